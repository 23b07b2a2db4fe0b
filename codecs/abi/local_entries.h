// A plug-in in this process as a CodecSource: its entries are called through its table. Any thread.
#pragma once

#include <memory>

#include "codecs/abi/codec_entries.h"
#include "codecs/abi/codec_plugin.h"

namespace kvmanager {

std::shared_ptr<const CodecSource> MakeLocalSource(std::shared_ptr<const CodecPlugin> plugin);

/// describe of `plugin` for `context`, into `description` with room for its layers. Errors: the plug-in's.
absl::Status DescribeCodec(const CodecPlugin& plugin, const kvmc_context& context, RawDescription* description);

}  // namespace kvmanager
