// A shared object that holds a codec (kvmanager_codec.h), loaded and checked.
//
// The object stays loaded for the life of the process: its code may be on a stack when the last codec goes. A
// CodecPlugin is immutable and may be used from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "codecs/abi/codec_entries.h"
#include "codecs/abi/kvmanager_codec.h"

namespace kvmanager {

/// A text of a plug-in as far as it can be shown: printable ASCII, at most `bytes_max`.
std::string PrintablePluginText(const char* text, size_t bytes_max);

/// Whether a plug-in may have this name.
bool IsPluginName(absl::string_view name);

/// What `status`, which `entry` of a plug-in returned with `text` as its last error, says; OK for KVMC_OK.
absl::Status PluginStatus(kvmc_status status, absl::string_view name, absl::string_view path, absl::string_view entry,
                          absl::string_view text);

class CodecPlugin {
 public:
  /// Opens `path` and takes its table. Errors name the file, the entry and what is needed: NOT_FOUND (no such file),
  /// INVALID_ARGUMENT (not a codec, another version, a required entry is missing, a name that cannot be used),
  /// UNAVAILABLE (it cannot run on this machine).
  static absl::StatusOr<std::shared_ptr<const CodecPlugin>> Load(const std::string& path);

  /// The same of a table that is in this process already; `source` stands for the file in errors.
  static absl::StatusOr<std::shared_ptr<const CodecPlugin>> Adopt(const kvmc_codec_api* table, std::string source);

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }
  const std::string& help() const { return help_; }
  /// Whatever the object was built against, in this build's shape: what it lacks is NULL, what is beyond is cut off.
  const kvmc_codec_api& api() const { return api_; }

  OptionalEntries optional_entries() const;

  /// What `status`, which `entry` returned in this thread just now, says; OK for KVMC_OK.
  absl::Status StatusOf(kvmc_status status, absl::string_view entry) const;
  /// The text of this thread's last error, printable and cut.
  std::string LastError() const;

 private:
  CodecPlugin() = default;

  std::string path_, name_, help_;
  kvmc_codec_api api_ = {};
};

}  // namespace kvmanager
