#include "kvmanager/handoff/offer_bytes.h"

#include <gtest/gtest.h>

namespace kvmanager {
namespace {

// Three layers, of which the last stays raw, sinks of one page; blocks of 64 tokens.
class OfferBytesTest : public ::testing::Test {
 protected:
  OfferBytesTest() {
    header_.config.layers = 3;
    header_.config.layout.kv_heads = 2;
    header_.config.layout.head_dim = 64;
    header_.config.layout.page_tokens = 64;
    info_.encoded_bytes = 4096;
    info_.layer_bytes = {4096, 2048, 32768};
    info_.sink_tokens = 64;
    info_.raw_layers = {false, false, true};
    header_.tokens = 64 * 5 + 3;
    header_.blocks.resize(5);
  }
  HandOffHeader header_;
  CodecInfo info_;
};

TEST_F(OfferBytesTest, CountsFormsThatPagesHave) {
  const uint64_t raw = header_.config.layout.raw_bytes();
  // Layers 0 and 1: a sink, four encoded pages, an open one. Layer 2: five raw pages and an open one.
  const uint64_t encoded = 4 * 4096 + 4 * 2048, always_raw = (2 + 5 + 3) * raw;
  for (uint32_t layer = 0; layer < 3; ++layer) {
    for (uint32_t block = 0; block < 5; ++block) header_.pages.push_back({block, layer, 0});
  }
  EXPECT_EQ(BytesAtLeast(header_, info_), encoded + always_raw);
  // What does not travel encoded has a raw slot besides.
  header_.pages.clear();
  EXPECT_EQ(BytesAtLeast(header_, info_), encoded + always_raw + 8 * raw);
}

// An offer behind another that waits is measured before anything of it was checked.
TEST_F(OfferBytesTest, PagesOfLayersAndBlocksThatAreNotThereAreSafe) {
  const uint64_t none = BytesAtLeast(header_, info_);
  for (const uint32_t layer : {3u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    for (const uint32_t block : {0u, 1u << 20, 0xffffffffu}) {
      header_.pages.assign(1000, {block, layer, 0});
      EXPECT_LE(BytesAtLeast(header_, info_), none);
    }
  }
}

}  // namespace
}  // namespace kvmanager
