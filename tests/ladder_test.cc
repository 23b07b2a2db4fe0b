// A daemon whose cache has a ladder of codecs: more prompts fit, each page is what its rung makes of it, attention
// reads all rungs in one step, and a kill changes nothing of it.
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  // K of one layer of the first tokens of a sequence.
  static std::pair<Rows, Rows> Read(client::Cache& cache, uint64_t sequence, int layer, int tokens) {
    const CacheOptions& shape = cache.description().options;
    std::pair<Rows, Rows> rows;
    rows.first.resize(size_t(tokens) * shape.kv_heads * shape.head_dim * 2);
    rows.second.resize(rows.first.size());
    client::StepEntry entry;
    entry.sequence = sequence;
    entry.tokens = tokens;
    client::ReadBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = client::TensorView::Inline(rows.first.data(), rows.first.size());
    batch.v = client::TensorView::Inline(rows.second.data(), rows.second.size());
    EXPECT_OK(cache.Read(batch));
    return rows;
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
  // One query behind the text by plain arithmetic over what was read.
  static std::vector<double> Attend(const CacheOptions& shape, const std::vector<float>& q, const Rows& k,
                                    const Rows& v) {
    const int tokens = static_cast<int>(k.size() / 2 / shape.kv_heads / shape.head_dim);
    const int group = shape.query_heads / shape.kv_heads;
    std::vector<double> out(size_t(shape.query_heads) * shape.head_dim);
    const auto at = [&](const Rows& rows, int token, int head, int channel) {
      uint16_t half;
      std::memcpy(&half, rows.data() + 2 * ((size_t(token) * shape.kv_heads + head) * shape.head_dim + channel), 2);
      return double(HalfToFloat(half));
    };
    for (int head = 0; head < shape.query_heads; ++head) {
      std::vector<double> scores(tokens);
      double sum = 0;
      for (int t = 0; t < tokens; ++t) {
        double score = 0;
        for (int c = 0; c < shape.head_dim; ++c) {
          score += double(q[size_t(head) * shape.head_dim + c]) * at(k, t, head / group, c);
        }
        sum += scores[t] = std::exp(score / std::sqrt(double(shape.head_dim)));
      }
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < shape.head_dim; ++c) {
          out[size_t(head) * shape.head_dim + c] += scores[t] / sum * at(v, t, head / group, c);
        }
      }
    }
    return out;
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
    EXPECT_GT(Metric("kvmanager_lowered_blocks_total"), 0);
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
        const auto [k, v] = Read(*cache, made.sequence->id(), layer, tokens);
        const size_t page = k.size() / kBlocks;
        for (int block = 1; block < kBlocks; ++block) {  // the first is a sink
          Rows got(k.begin() + block * page, k.begin() + (block + 1) * page);
          got.insert(got.end(), v.begin() + block * page, v.begin() + (block + 1) * page);
          const bool is_lower = got == Expected(source, block, layer, 1);
          EXPECT_TRUE(is_lower || got == Expected(source, block, layer, 0)) << text << " " << block;
          if (layer == 0) of[block] = is_lower;
          EXPECT_EQ(of[block], is_lower);
        }
        // The last token's query: its page is encoded, and is read as a whole.
        ASSERT_OK_AND_ASSIGN(const auto out, AskLayer(*cache, made.sequence->id(), source, layer, tokens - 1));
        EXPECT_LT(RelativeError(out, Attend(source.shape, source.Q(layer, tokens - 1, 1), k, v)), kHackError) << text;
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
    const auto [k, v] = Read(*cache, made.sequence->id(), 0, kBlocks * kPageTokens);
    const size_t page = k.size() / kBlocks;
    for (int block = 1; block < kBlocks; ++block) {
      Rows got(k.begin() + block * page, k.begin() + (block + 1) * page);
      got.insert(got.end(), v.begin() + block * page, v.begin() + (block + 1) * page);
      EXPECT_TRUE(got == Expected(source, block, 0, of[block])) << text << " " << block;
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
