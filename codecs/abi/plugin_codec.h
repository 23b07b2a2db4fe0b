// PluginCodec: a codec of a shared object as a Codec, so that the rest of the program sees no difference.
//
// A PluginCodec is immutable and may be used from any thread, as every Codec. What a plug-in says of itself is checked
// against bounds when a codec is made; what it does afterwards cannot be checked from inside its process
// (codec_conformance does that), but its errors are handled: a page that it fails to encode stays raw; attention that
// fails is done on the decoded page; a page that cannot be decoded gives NaN, never a wrong answer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "codecs/abi/codec_plugin.h"
#include "codecs/registry.h"

namespace kvmanager {

/// What happens in plug-ins' codecs that an operator should hear of. Called from any thread, errors from inside hot
/// paths: count there, and log the first.
class CodecEvents {
 public:
  enum class Entry { kEncode = 0, kDecode, kAttend };
  static constexpr int kEntries = 3;
  static const char* EntryName(Entry entry);

  virtual ~CodecEvents() = default;
  /// `pages` of a codec without attention of its own (or that failed at it) were decoded for an attention.
  virtual void OnDecodedPages(size_t pages) = 0;
  /// first: the first such error of this codec object.
  virtual void OnError(Entry entry, const absl::Status& error, bool first) = 0;
};

/// A codec of `plugin` for `context`. `events` outlives it; nullptr: nobody wants to know. Errors: the plug-in's, and
/// INVALID_ARGUMENT naming what the plug-in said of itself and the bound.
absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecPlugin> plugin,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events);

/// Loads the object at `path` and registers its codec. Errors: CodecPlugin::Load's; ALREADY_EXISTS if the registry has
/// a codec of that name.
absl::Status LoadCodecPlugin(const std::string& path, CodecRegistry& registry, CodecEvents* events);

/// Loads each of `paths`, for programs that are told by --codec-plugin.
absl::Status LoadCodecPlugins(const std::vector<std::string>& paths, CodecRegistry& registry, CodecEvents* events);

}  // namespace kvmanager
