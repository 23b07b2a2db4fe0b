// PluginCodec: a codec of a shared object as a Codec, so that the rest of the program sees no difference.
//
// A PluginCodec is immutable and may be used from any thread, as every Codec; where its plug-in has a process of its
// own (plugin_process.h), a call waits for that process (WaitingCodec). What a plug-in says of itself is checked
// against bounds when a codec is made. What it does afterwards cannot be checked in its own process (codec_conformance
// does that), but its errors are handled: a page that it fails to encode stays raw; attention that fails is done on the
// decoded page; a page that cannot be decoded gives NaN, never a wrong answer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "codecs/abi/codec_entries.h"
#include "codecs/abi/codec_events.h"
#include "codecs/abi/codec_plugin.h"
#include "codecs/registry.h"

namespace kvmanager {

/// A codec of `source` for `context`. `events` outlives it; nullptr: nobody wants to know. Errors: the plug-in's, and
/// INVALID_ARGUMENT naming what the plug-in said of itself and the bound.
absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecSource> source,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events);
/// The same of a plug-in in this process.
absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecPlugin> plugin,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events);

/// Registers the codec of `source`. Errors: ALREADY_EXISTS if the registry has a codec of that name.
absl::Status RegisterPlugin(std::shared_ptr<const CodecSource> source, CodecRegistry& registry, CodecEvents* events);

/// Loads the object at `path` and registers its codec. Errors: CodecPlugin::Load's and RegisterPlugin's.
absl::Status LoadCodecPlugin(const std::string& path, CodecRegistry& registry, CodecEvents* events);

/// Loads each of `paths`, for programs that are told by --codec-plugin.
absl::Status LoadCodecPlugins(const std::vector<std::string>& paths, CodecRegistry& registry, CodecEvents* events);

}  // namespace kvmanager
