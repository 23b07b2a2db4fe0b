// Plans over a codec that keeps its pages in a space of its own: queries are mapped in, outputs out, and raw pages of
// the same sequence meet the encoded ones in whichever space the output is wanted in.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "codecs/raw/raw_attention.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout{DType::kFloat16, 3, 32, 64};
constexpr int kDim = kLayout.head_dim;

/// The space: channels in another order per KV head, and every second one with its sign turned. Its own inverse's
/// arithmetic is exact, so that a result differs from raw's by the order of sums alone.
int Place(int layer, int kv_head, int channel) { return (channel * 5 + 7 * kv_head + layer) % kDim; }
float Sign(int channel) { return channel % 2 == 0 ? 1.0f : -1.0f; }

void In(int layer, int kv_head, int rows, const float* from, float* to) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < kDim; ++c) to[r * kDim + Place(layer, kv_head, c)] = Sign(c) * from[r * kDim + c];
  }
}
void Out(int layer, int kv_head, int rows, const float* from, float* to) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < kDim; ++c) to[r * kDim + c] = Sign(c) * from[r * kDim + Place(layer, kv_head, c)];
  }
}

class TurnedAttention final : public PageAttention {
 public:
  TurnedAttention(bool folds, int turn, const char* space)
      : raw_(MakeRawAttention(kLayout)), folds_(folds), turn_(turn), space_(space) {}
  size_t workspace_bytes(int rows) const override { return raw_->workspace_bytes(rows); }
  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    raw_->Attend(task, state, workspace);
  }
  bool maps(int) const override { return true; }
  absl::string_view space(int) const override { return space_; }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    In(layer + turn_, kv_head, rows, q, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Out(layer + turn_, kv_head, rows, acc, out);
  }
  bool folds_output(int) const override { return folds_; }
  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    In(layer + turn_, kv_head, rows, acc, out);
  }

 private:
  const std::unique_ptr<PageAttention> raw_;
  const bool folds_;
  const int turn_;  // of a space: that of a layer so much later
  const char* const space_;
};

class TurnedCodec final : public Codec {
 public:
  explicit TurnedCodec(bool folds, int turn = 0, const char* space = "") : turn_(turn), attention_(folds, turn, space) {
    info_.encoded_bytes = kLayout.raw_bytes();
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return kLayout; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    for (EncodeItem& item : items) {
      for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) {
        const int c = int(i % kDim), head = int(i / (size_t{kLayout.page_tokens} * kDim)) % kLayout.kv_heads;
        StoreElement(item.encoded, kLayout.dtype, i - c + Place(int(item.layer) + turn_, head, c),
                     Sign(c) * LoadElement(item.raw, kLayout.dtype, i));
      }
    }
  }
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return attention_; }

 private:
  const int turn_;
  CodecInfo info_;
  TurnedAttention attention_;
};

/// Pages of rung 0 are in a space of their own, those of rungs 2 and 3 in another, or in one each, and those of rung 1
/// in none.
class TurnedLadder final : public Codec {
 public:
  explicit TurnedLadder(bool shares)
      : rungs_{TurnedCodec(false), TurnedCodec(false), TurnedCodec(false, 3, "third"),
               TurnedCodec(false, shares ? 3 : 8, shares ? "third" : "")} {}
  const CodecInfo& info() const override { return rungs_[0].info(); }
  const PageLayout& layout() const override { return kLayout; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    rungs_[0].Encode(items, workspace);
  }
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return rungs_[0].attention(); }
  int rungs() const override { return 4; }
  const Codec& rung(int rung) const override { return rung == 1 ? static_cast<const Codec&>(plain_) : rungs_[rung]; }

 private:
  class Plain final : public Codec {
   public:
    Plain() { info_.encoded_bytes = kLayout.raw_bytes(); }
    const CodecInfo& info() const override { return info_; }
    const PageLayout& layout() const override { return kLayout; }
    size_t encode_workspace_bytes() const override { return 0; }
    void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
      for (EncodeItem& item : items) std::memcpy(item.encoded, item.raw, kLayout.raw_bytes());
    }
    void Decode(absl::Span<const DecodeItem>) const override {}
    absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
    const PageAttention& attention() const override { return *attention_; }

   private:
    CodecInfo info_;
    const std::unique_ptr<PageAttention> attention_ = MakeRawAttention(kLayout);
  };
  const Plain plain_;
  const TurnedCodec rungs_[4];
};

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};

struct Output {
  std::vector<float> out, lse;
};

class MappedSpace : public ::testing::TestWithParam<int /* G */> {
 protected:
  static constexpr int kPages = 40, kLayer = 3;

  void SetUp() override {
    std::mt19937 random(GetParam());
    std::normal_distribution<float> normal;
    for (int i = 0; i < 2 * kPages; ++i) {
      pages_.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, kLayout.raw_bytes())));
    }
    for (int i = 0; i < kPages; ++i) {
      for (size_t e = 0; e < kLayout.raw_bytes() / 2; ++e) {
        StoreElement(pages_[i].get(), kLayout.dtype, e, normal(random));
      }
      EncodeItem item{pages_[i].get(), pages_[kPages + i].get(), kLayer, uint64_t(i) * 64};
      plain_.Encode(absl::MakeSpan(&item, 1), {});
    }
    q_.resize(size_t{kPages} * 64 * query_heads() * kDim);
    for (float& x : q_) x = normal(random);
  }

  int query_heads() const { return GetParam() * kLayout.kv_heads; }

  /// Tokens first .. first + tokens - 1. codec: nullptr reads everything raw.
  Output Run(const Codec* codec, int lag, int first, int tokens, int threads) {
    std::vector<AttentionPage> table(kPages);
    for (int i = 0; i < kPages; ++i) {
      table[i].raw = pages_[i].get();
      if (codec != nullptr) table[i].encoded = pages_[kPages + i].get();
    }
    return Run(codec, table, lag, first, tokens, threads);
  }

  Output Run(const Codec* codec, absl::Span<const AttentionPage> table, int lag, int first, int tokens, int threads) {
    Output output;
    output.out.resize(size_t(tokens) * query_heads() * kDim);
    output.lse.resize(size_t(tokens) * query_heads());
    AttentionSequence sequence;
    sequence.pages = table.first((first + tokens - 1) / 64 + 1);
    sequence.first_position = first;
    sequence.tokens = tokens;
    sequence.q = q_.data() + size_t(first) * query_heads() * kDim;
    sequence.out = output.out.data();
    sequence.lse = output.lse.data();
    AttentionBatch batch;
    batch.codec = codec;
    batch.raw_attention = raw_attention_.get();
    batch.layout = kLayout;
    batch.layer = kLayer;
    batch.query_heads = query_heads();
    batch.lag_pages = lag;
    batch.sequences = absl::MakeConstSpan(&sequence, 1);
    const auto plan = AttentionPlan::Make(batch, threads);
    if (threads == 1) {
      plan->RunHere();
    } else {
      WorkerPool pool(threads);
      std::promise<void> done;
      plan->Run(pool, [&] { done.set_value(); });
      done.get_future().wait();
    }
    return output;
  }

  void ExpectNear(const Output& expected, const Output& got) {
    for (size_t i = 0; i < expected.out.size(); ++i) ASSERT_NEAR(expected.out[i], got.out[i], 2e-5) << i;
    for (size_t i = 0; i < expected.lse.size(); ++i) ASSERT_NEAR(expected.lse[i], got.lse[i], 2e-5) << i;
  }

  /// The same output in the codec's space.
  Output Turned(Output output) {
    const std::vector<float> from = output.out;
    for (size_t row = 0; row < from.size() / kDim; ++row) {
      In(kLayer, int(row % query_heads()) / GetParam(), 1, &from[row * kDim], &output.out[row * kDim]);
    }
    return output;
  }

  const TurnedCodec plain_{false}, folding_{true};
  const std::unique_ptr<PageAttention> raw_attention_ = MakeRawAttention(kLayout);
  std::vector<std::unique_ptr<uint8_t, Free>> pages_;
  std::vector<float> q_;
};

TEST_P(MappedSpace, EqualsRawWhateverIsReadEncoded) {
  for (const int first : {0, 63, 64, 700, kPages * 64 - 70}) {
    const int tokens = std::min(70, kPages * 64 - first);
    const Output raw = Run(nullptr, 0, first, tokens, 1);
    for (const int lag : {0, 2, 1000}) {
      for (const int threads : {1, 3}) {
        SCOPED_TRACE(testing::Message() << "first " << first << " lag " << lag << " threads " << threads);
        ExpectNear(raw, Run(&plain_, lag, first, tokens, threads));
        ExpectNear(Turned(raw), Run(&folding_, lag, first, tokens, threads));
      }
    }
  }
}

TEST_P(MappedSpace, LastTokenOfAnEncodedPage) {
  const Output raw = Run(nullptr, 0, kPages * 64 - 1, 1, 1);
  for (const int threads : {1, 2}) {
    ExpectNear(raw, Run(&plain_, 0, kPages * 64 - 1, 1, threads));
    ExpectNear(Turned(raw), Run(&folding_, 0, kPages * 64 - 1, 1, threads));
  }
}

TEST_P(MappedSpace, EqualsRawOnWhateverRungsPagesAre) {
  std::mt19937 random(3);
  for (int round = 0; round < 8; ++round) {
    const TurnedLadder ladder(/*shares=*/round % 2 == 0);
    const int run = round % 4 == 0 ? 1 : 1 + int(random() % 9), rungs = std::min(1 + round, 4);
    std::vector<AttentionPage> table(kPages);
    std::vector<std::unique_ptr<uint8_t, Free>> encoded;
    for (int i = 0; i < kPages; ++i) {
      table[i].rung = i % run == 0 ? uint8_t(random() % rungs) : table[i - 1].rung;
      encoded.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, kLayout.raw_bytes())));
      EncodeItem item{pages_[i].get(), encoded.back().get(), kLayer, uint64_t(i) * 64};
      ladder.rung(table[i].rung).Encode(absl::MakeSpan(&item, 1), {});
      table[i].encoded = item.encoded;
      if (random() % 4 != 0) table[i].raw = pages_[i].get();
    }
    for (int first : {0, 64 * 30 - 20, kPages * 64 - 70}) {
      const int tokens = 70;
      for (int page = first / 64; page <= (first + tokens - 1) / 64; ++page) table[page].raw = pages_[page].get();
      const Output raw = Run(nullptr, 0, first, tokens, 1);
      for (const int lag : {0, 3}) {
        for (const int threads : {1, 3}) {
          SCOPED_TRACE(testing::Message() << "first " << first << " lag " << lag << " threads " << threads);
          ExpectNear(raw, Run(&ladder, table, lag, first, tokens, threads));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, MappedSpace, ::testing::Values(1, 3, 8));

}  // namespace
}  // namespace kvmanager
