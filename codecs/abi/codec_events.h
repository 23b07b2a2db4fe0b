// Interface for what an operator should hear of plug-ins' codecs: errors, and what happens to their processes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// What happens in plug-ins' codecs that an operator should hear of. Called from any thread, errors from inside hot
/// paths: count there, and log the first.
class CodecEvents {
 public:
  enum class Entry { kEncode = 0, kDecode, kAttend };
  static constexpr int kEntries = 3;
  static const char* EntryName(Entry entry) {
    constexpr const char* kNames[kEntries] = {"encode", "decode", "attend"};
    return kNames[static_cast<int>(entry)];
  }

  virtual ~CodecEvents() = default;
  /// `pages` of a codec without attention of its own (or that failed at it) were decoded for an attention.
  virtual void OnDecodedPages(size_t pages) = 0;
  /// first: the first such error of this codec object.
  virtual void OnError(Entry entry, const absl::Status& error, bool first) = 0;

  /// The plug-in of `codec` has a process of its own from now on.
  virtual void OnProcess(absl::string_view codec) = 0;
  /// A call was not answered by that process; it is an OnError, too, unless it was `validate` or making a codec.
  virtual void OnUnanswered(absl::string_view codec) = 0;
  /// The process has ended, or was ended: why. It is started again after `restart_ms`.
  virtual void OnProcessEnded(absl::string_view codec, const absl::Status& why, int64_t restart_ms) = 0;
};

}  // namespace kvmanager
