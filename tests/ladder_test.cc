// A daemon whose cache has a ladder of codecs: more prompts fit, each page is what its rung makes of it, attention
// reads all rungs in one step, and a kill changes nothing of it.
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/exact_attention.h"
#include "client/client.h"
#include "codecs/ladder/lower_pages.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/half.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;

constexpr char kUpper[] = "hack:k_bits=8,v_bits=8", kLower[] = "hack:k_bits=4,v_bits=3";
constexpr int kBlocks = 8, kTexts = 160;
constexpr uint64_t kPoolBytes = 32 << 20;
constexpr double kHackError = 0.04;  // of attention that rounds queries, as in integration_test

class LadderTest : public RestartedDaemonTest {
 protected:
  LadderTest() { flags_ = {"--state-dir", state_, "--state-keep-s", "60", "--eviction", "lru"}; }
  void TearDown() override {
    RestartedDaemonTest::TearDown();
    daemon_.reset();
    KillKeeperOf(state_);
  }
  static CacheOptions Ladder() { return SmallCache(absl::StrCat("ladder=", kUpper, ">", kLower), 0); }
  static Source TextOf(int text) { return {static_cast<uint64_t>(text + 1), Kind::kNormal, Ladder()}; }

  using Rows = std::vector<uint8_t>;
  // K and V of a block, `bytes` each.
  static Rows PageOf(const ModelSequence::Rows& rows, int block, size_t bytes) {
    Rows page(rows.k.begin() + block * bytes, rows.k.begin() + (block + 1) * bytes);
    page.insert(page.end(), rows.v.begin() + block * bytes, rows.v.begin() + (block + 1) * bytes);
    return page;
  }
  // What a page of a text gives back on a rung.
  Rows Expected(const Source& source, int block, int layer, int rung) {
    if (codec_ == nullptr) {
      CodecContext context;
      context.layout.kv_heads = static_cast<uint16_t>(source.shape.kv_heads);
      context.layout.head_dim = static_cast<uint16_t>(source.shape.head_dim);
      context.layers = source.shape.layers;
      context.query_heads = source.shape.query_heads;
      codec_ = *AllCodecs().CreateForCache(source.shape.codec, context);
    }
    const PageLayout& layout = codec_->layout();
    const size_t head = size_t{layout.head_dim} * 2, row = head * layout.kv_heads;
    AlignedBuffer raw(layout.raw_bytes()), upper(codec_->rung(0).info().page_bytes(layer)),
        lower(codec_->rung(1).info().page_bytes(layer)), workspace(LowerWorkspaceBytes(*codec_));
    const Rows k = source.K(layer, uint64_t(block) * kPageTokens, kPageTokens),
               v = source.V(layer, uint64_t(block) * kPageTokens, kPageTokens);
    for (int side = 0; side < 2; ++side) {
      for (int h = 0; h < layout.kv_heads; ++h) {
        for (int t = 0; t < kPageTokens; ++t) {
          std::memcpy(raw.data() + layout.raw_offset(side, h, t), (side == 0 ? k : v).data() + t * row + h * head,
                      head);
        }
      }
    }
    EncodeItem item;
    item.raw = raw.data();
    item.encoded = upper.data();
    item.layer = static_cast<uint32_t>(layer);
    item.first_token = uint64_t(block) * kPageTokens;
    AlignedBuffer encode_workspace(codec_->encode_workspace_bytes());
    codec_->Encode({&item, 1}, encode_workspace.span());
    EXPECT_FALSE(item.declined);
    const uint8_t* page = upper.data();
    if (rung == 1) {
      LowerItem lowered{upper.data(), lower.data(), item.layer, item.first_token};
      LowerPages(*codec_, 0, {&lowered, 1}, workspace.span());
      EXPECT_FALSE(lowered.declined);
      page = lower.data();
    }
    const DecodeItem decode{page, raw.data(), item.layer};
    codec_->rung(rung).Decode({&decode, 1});
    Rows rows(k.size() * 2);
    for (int side = 0; side < 2; ++side) {
      for (int h = 0; h < layout.kv_heads; ++h) {
        for (int t = 0; t < kPageTokens; ++t) {
          std::memcpy(rows.data() + side * k.size() + t * row + h * head, raw.data() + layout.raw_offset(side, h, t),
                      head);
        }
      }
    }
    return rows;
  }
  // The query of the last token by plain arithmetic over what was read.
  std::vector<double> Attend(const Source& source, int layer, const ModelSequence::Rows& rows) {
    const PageLayout& layout = codec_->layout();
    std::vector<float> values[2];
    for (int side = 0; side < 2; ++side) {
      const Rows& of = side == 0 ? rows.k : rows.v;
      values[side].resize(of.size() / 2);
      for (size_t i = 0; i < values[side].size(); ++i) {
        uint16_t half;
        std::memcpy(&half, of.data() + 2 * i, 2);
        values[side][i] = HalfToFloat(half);
      }
    }
    const uint64_t row = uint64_t{layout.kv_heads} * layout.head_dim;
    const uint64_t last = values[0].size() / row - 1;
    const std::vector<float> q = source.Q(layer, last, 1);
    return ExactAttention(layout, source.shape.query_heads, 1 / std::sqrt(double(layout.head_dim)), last, 1,
                          {q.begin(), q.end()},
                          [&](int side, int head, uint64_t position, uint64_t) {
                            return values[side].data() + position * row + uint64_t(head) * layout.head_dim;
                          })
        .out;
  }

  const std::string state_ = directory_.path() + "/state";
  std::unique_ptr<Codec> codec_;
};

TEST_F(LadderTest, ColdPromptsAreLoweredReadAndKept) {
  Start(kPoolBytes);
  std::map<int, std::vector<int>> rungs;  // of texts that are there as a whole: of each block
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Ladder()));
    for (int text = 0; text < kTexts; ++text) Publish(*cache, TextOf(text), kBlocks);
    // Workers go on behind the last prompt, until as much is on either rung; on a busy machine that takes a while.
    double lowered = 0;
    int same = 0;
    ASSERT_TRUE(Eventually([&] {
      const double now = Metric("kvmanager_lowered_blocks_total");
      same = now == std::exchange(lowered, now) ? same + 1 : 0;
      return lowered > 0 && same >= 10;
    }));
    EXPECT_GT(Metric("kvmanager_lowering_error_count"), 0);
    for (int text = 0; text < kTexts; ++text) {
      const Source source = TextOf(text);
      if (Found(*cache, source, kBlocks) < kBlocks) continue;
      ASSERT_OK_AND_ASSIGN(auto made, cache->CreateSequence(Names(*cache, source, kBlocks)));
      if (made.match.hit_blocks < kBlocks) continue;
      const int tokens = kBlocks * kPageTokens;
      std::vector<int>& of = rungs[text];
      of.assign(kBlocks, 0);
      for (int layer = 0; layer < source.shape.layers; ++layer) {
        ASSERT_OK_AND_ASSIGN(const ModelSequence::Rows rows, ReadLayer(*cache, made.sequence->id(), layer, tokens));
        const size_t page = rows.k.size() / kBlocks;
        for (int block = 1; block < kBlocks; ++block) {  // the first is a sink
          const Rows got = PageOf(rows, block, page);
          const bool is_lower = got == Expected(source, block, layer, 1);
          EXPECT_TRUE(is_lower || got == Expected(source, block, layer, 0)) << text << " " << block;
          if (layer == 0) of[block] = is_lower;
          EXPECT_EQ(of[block], is_lower);
        }
        // The last token's query: its page is encoded, and is read as a whole.
        ASSERT_OK_AND_ASSIGN(const auto out, AskLayer(*cache, made.sequence->id(), source, layer, tokens - 1));
        EXPECT_LT(RelativeError(out, Attend(source, layer, rows)), kHackError) << text;
      }
    }
    int lower = 0, mixed = 0;
    for (const auto& [text, of] : rungs) {
      int sum = 0;
      for (const int rung : of) sum += rung;
      lower += sum == kBlocks - 1;
      mixed += sum > 0 && sum < kBlocks - 1;
    }
    EXPECT_GT(lower, 0);
    EXPECT_LT(lower + mixed, static_cast<int>(rungs.size()));
    EXPECT_GT(Metric("kvmanager_rung_hit_blocks_total"), 0);
    ASSERT_TRUE(Eventually([&] {
      const auto page = Scrape(*daemon_);
      return page.ok() && page->Sum("kvmanager_recorded_blocks") == page->Sum("kvmanager_published_blocks");
    }));
  }
  Kill();
  Start(kPoolBytes);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Ladder()));
  int found = 0;
  for (const auto& [text, of] : rungs) {
    const Source source = TextOf(text);
    ASSERT_OK_AND_ASSIGN(auto made, cache->CreateSequence(Names(*cache, source, kBlocks)));
    if (made.match.hit_blocks < kBlocks) continue;
    ++found;
    ASSERT_OK_AND_ASSIGN(const ModelSequence::Rows rows,
                         ReadLayer(*cache, made.sequence->id(), 0, kBlocks * kPageTokens));
    const size_t page = rows.k.size() / kBlocks;
    for (int block = 1; block < kBlocks; ++block) {
      const Rows got = PageOf(rows, block, page);
      const bool is_lower = got == Expected(source, block, 0, 1);
      // Workers lower blocks that nobody uses at any time, also after the read above. None is ever raised.
      EXPECT_TRUE(is_lower || (of[block] == 0 && got == Expected(source, block, 0, 0))) << text << " " << block;
    }
  }
  EXPECT_EQ(found, static_cast<int>(rungs.size()));
}

TEST_F(LadderTest, WhatHasOneCodecForAllPagesRefusesIt) {
  Start(kPoolBytes);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Ladder()));
  const Source source = TextOf(0);
  ASSERT_OK_AND_ASSIGN(auto made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 2 * kPageTokens, 64));
  const auto sent = made.sequence->HandOff("127.0.0.1:1", "");
  EXPECT_FALSE(sent.ok());
  CacheOptions on_gpu = Ladder();
  on_gpu.device = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(client_->OpenCache(on_gpu).status()));
  for (const char* const codec : {"ladder=raw>hack", "ladder=hack:k_bits=3,v_bits=2>hack:k_bits=8,v_bits=8",
                                  "ladder=hack", "ladder=pq>hack", "ladder="}) {
    EXPECT_TRUE(absl::IsInvalidArgument(client_->OpenCache(SmallCache(codec, 0)).status())) << codec;
  }
  // The connection goes on.
  EXPECT_OK(cache->CreateSequence());
}

}  // namespace
}  // namespace kvmanager::testing
