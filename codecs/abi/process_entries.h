// A plug-in in a process of its own as a CodecSource: its entries are asked of that process (plugin_process.h). Any
// thread may call them, but they wait: they belong on CodecSource::workers().
#pragma once

#include <memory>

#include "codecs/abi/codec_entries.h"
#include "codecs/abi/plugin_process.h"

namespace kvmanager {

/// Encoded pages of attention that are copied at once: they stay in a core's caches until the process reads them.
inline constexpr size_t kAttendBytesAtOnce = 512 << 10;

std::shared_ptr<const CodecSource> MakeProcessSource(std::shared_ptr<PluginProcess> process);

}  // namespace kvmanager
