#include "kvmanager/handoff/offer_bytes.h"

#include <algorithm>

#include "kvmanager/base/reading_rule.h"

namespace kvmanager {

uint64_t BytesAtLeast(const HandOffHeader& header, const CodecInfo& info) {
  const PageLayout& layout = header.config.layout;
  const uint64_t blocks = header.blocks.size(), layers = static_cast<uint64_t>(header.config.layers);
  const ReadingRule rule{layout.page_tokens, header.config.lag_pages};
  const uint64_t sinks = std::min(blocks, rule.SinkPages(info.sink_tokens));
  uint64_t raw_pages = header.tokens % layout.page_tokens != 0 ? layers : 0;
  uint64_t bytes = 0, encodable = 0, sent_encoded = 0;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    const uint64_t kept_raw = info.keeps_raw(static_cast<int>(layer), UINT64_MAX) ? blocks : sinks;
    raw_pages += kept_raw;
    encodable += blocks - kept_raw;
    bytes += (blocks - kept_raw) * info.page_bytes(static_cast<int>(layer));
  }
  for (const HandOffPage& page : header.pages) {
    if (page.layer >= layers) continue;  // refused later
    sent_encoded += !info.keeps_raw(static_cast<int>(page.layer), uint64_t{page.block} * layout.page_tokens);
  }
  if (!info.identity) raw_pages += encodable - std::min(encodable, sent_encoded);
  return bytes + raw_pages * layout.raw_bytes();
}

}  // namespace kvmanager
