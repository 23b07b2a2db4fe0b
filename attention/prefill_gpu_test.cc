// Kernels of attention by many query tokens against exact attention on the decoded pages, in double precision on the
// host.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/device_plan_testing.h"
#include "attention/prefill_plan.h"
#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "codecs/hack/hack.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager {
namespace {

constexpr int kPageTokens = device::kPrefillPageTokens;
constexpr uint32_t kNoSlot = DevicePage::kNoSlot;

enum class Keys { kRandom, kOutliers, kConstantChannels, kOneHot };

struct Shape {
  int k_bits = 0, v_bits = 0;  // 0: raw; -1: every segment its own; -2: some of K's have 8
  DType dtype = DType::kFloat16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int lag_pages = 2;
  uint32_t aged = 0;
  float q_std = 1;
  bool rotates = true, v_norm = true;  // of HACK
  Keys keys = Keys::kRandom;
  int rows_checked = 0;                             // of each sequence; 0: all
  std::vector<std::pair<uint64_t, int>> sequences;  // context with the query tokens, query tokens
};

/// A batch with its pages in a pool, and what each form of them stands for.
class World {
 public:
  World(const Shape& shape, uint64_t seed) : shape_(shape), random_(seed) {
    layout_.dtype = shape.dtype;
    layout_.kv_heads = uint16_t(shape.kv_heads);
    layout_.head_dim = uint16_t(shape.head_dim);
    layout_.page_tokens = kPageTokens;
    if (shape.k_bits == 0) {
      CodecRegistry registry;
      RegisterRaw(registry);
      codec_ = *registry.Create("raw", layout_);
    } else if (shape.k_bits > 0) {
      hack::HackParameters parameters;
      parameters.k_bits = shape.k_bits, parameters.v_bits = shape.v_bits;
      if (shape.v_bits == 1) parameters.v_range = hack::Range::kLeastSquares;
      parameters.rotation = shape.rotates ? hack::Rotation::kHadamard : hack::Rotation::kNone;
      parameters.v_norm = shape.v_norm;
      codec_ = MakeHackCodec(hack::MakeHackFormat(layout_, parameters));
    } else {
      hack::SegmentBits bits(shape.kv_heads);
      for (auto& head : bits) {
        for (auto& side : head) {
          for (int s = 0; s < shape.head_dim / 16; ++s) side.push_back(uint8_t(random_() % 5));
        }
        if (shape.k_bits == -2) Widen(&head[0], &head[1]);
      }
      hack::HackParameters parameters;
      parameters.rotation = shape.rotates ? hack::Rotation::kHadamard : hack::Rotation::kNone;
      parameters.v_norm = shape.v_norm;
      codec_ = MakeHackCodec(hack::MakeHackFormat(layout_, parameters, &bits));
    }
    slot_bytes_ = (layout_.raw_bytes() + 255) / 256 * 256;
    size_t slots = 0;
    for (const auto& [context, tokens] : shape.sequences) slots += 2 * ((context + 63) / kPageTokens + 2);
    pool_.resize(slots * slot_bytes_ + 64);
    std::fill(pool_.begin(), pool_.end(), 0xff);  // NaN wherever nothing was written
    for (size_t i = 0; i < slots; ++i) free_.push_back(uint32_t(i * slot_bytes_ / device::kSlotUnitBytes));
    std::shuffle(free_.begin(), free_.end(), random_);
    for (const auto& [context, tokens] : shape.sequences) AddSequence(context, tokens);
    std::normal_distribution<float> normal(0, 1);
    q_.resize(size_t(tokens_) * query_heads() * shape.head_dim);
    for (float& x : q_) x = Rounded(shape.q_std * normal(random_));
    if (shape.keys == Keys::kOneHot) PointAtOneToken();
  }

  int query_heads() const { return shape_.kv_heads * shape_.group; }

  /// out as floats, lse.
  void Run(int blocks, std::vector<float>* out, std::vector<float>* lse) {
    const std::unique_ptr<DeviceCodec> codec = codec_->NewDeviceCodec();
    ASSERT_NE(codec, nullptr);
    const device::Prefill prefill = codec->prefill(0);
    ASSERT_NE(prefill.kernels, nullptr);
    PrefillPlanner::Options o;
    o.layout = layout_, o.query_heads = query_heads(), o.lag_pages = shape_.lag_pages;
    o.identity = shape_.k_bits == 0, o.blocks = blocks, o.apart = prefill.kernels->maps;
    std::vector<device::PrefillItem> items(1 << 13);
    std::vector<device::PrefillRun> runs(1 << 15);
    DeviceTables tables;
    for (const Sequence& s : sequences_) tables.Add(s.pages, shape_.aged, s.first_position, s.tokens);
    const std::vector<uint32_t>& slots = tables.slots();
    const auto planned = PrefillPlanner(o).Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs));
    ASSERT_TRUE(planned.ok()) << planned.status();
    std::vector<uint16_t> q16(q_.size());
    for (size_t i = 0; i < q_.size(); ++i) StoreElement(q16.data(), shape_.dtype, i, q_[i]);
    const size_t rows = q_.size() / shape_.head_dim, part_rows = size_t{planned->parts} * device::kPrefillRows;
    DeviceBytes pool(pool_.size()), d_items(items.size() * sizeof items[0]), d_runs(runs.size() * sizeof runs[0]),
        d_slots(slots.size() * 4), q(q16.size() * 2), d_out(q16.size() * 2), d_lse(rows * 4),
        partial(part_rows * layout_.head_dim * 4), state(part_rows * 8), arrived(planned->parts * 8),
        mapped(prefill.kernels->maps ? device::kMappedRows * rows * layout_.head_dim * 4 : 4);
    pool.Fill(pool_.data(), pool_.size());
    d_items.Fill(items.data(), items.size() * sizeof items[0]);
    d_runs.Fill(runs.data(), runs.size() * sizeof runs[0]);
    d_slots.Fill(slots.data(), slots.size() * 4);
    q.Fill(q16.data(), q16.size() * 2);
    partial.Set(0xff);
    state.Set(0xff);
    arrived.Set(0);
    device::PrefillParams p;
    p.pool = pool.as<uint8_t>();
    p.slots = d_slots.as<uint32_t>();
    p.items = d_items.as<device::PrefillItem>();
    p.runs = d_runs.as<device::PrefillRun>();
    p.q = q.as<void>();
    p.out = d_out.as<void>();
    p.lse = d_lse.as<float>();
    p.partial = partial.as<float>();
    p.partial_state = state.as<float>();
    p.arrived = arrived.as<uint32_t>();
    p.mapped = mapped.as<float>();
    p.tokens = uint32_t(tokens_);
    p.format = prefill.format;
    p.query_heads = query_heads();
    p.kv_heads = shape_.kv_heads;
    p.scale_log2 = float(M_LOG2E / std::sqrt(double(shape_.head_dim)));
    p.bfloat16 = shape_.dtype == DType::kBFloat16;
    ASSERT_CUDA(cudaError_t(prefill.kernels->prepare()));
    std::vector<uint16_t> out16(q16.size()), before(q16.size());
    lse->resize(rows);
    for (int launch = 0; launch < 2; ++launch) {  // the second finds what the first left
      d_out.Set(0xff);
      d_lse.Set(0xff);
      ASSERT_CUDA(cudaError_t(prefill.kernels->launch(p, blocks, nullptr)));
      ASSERT_CUDA(cudaDeviceSynchronize());
      out16.swap(before);
      ASSERT_CUDA(cudaMemcpy(out16.data(), d_out.as<void>(), out16.size() * 2, cudaMemcpyDeviceToHost));
    }
    ASSERT_EQ(out16, before);
    ASSERT_CUDA(cudaMemcpy(lse->data(), d_lse.as<void>(), rows * 4, cudaMemcpyDeviceToHost));
    out->resize(q16.size());
    for (size_t i = 0; i < out->size(); ++i) (*out)[i] = LoadElement(out16.data(), shape_.dtype, i);
  }

  /// Compares with exact attention; returns the relative error of everything that is checked.
  double Compare(const std::vector<float>& out, const std::vector<float>& lse) {
    const int d = shape_.head_dim;
    double error = 0, norm = 0, worst_lse = 0;
    size_t row = 0;
    std::vector<double> wanted(d), weights;
    for (const Sequence& s : sequences_) {
      std::vector<bool> checked(size_t(s.tokens) * query_heads(), shape_.rows_checked == 0);
      for (int i = 0; i < shape_.rows_checked; ++i) checked[random_() % checked.size()] = true;
      for (int i = 0; i < s.tokens; ++i) {
        const uint64_t position = s.first_position + i;
        const uint32_t own = uint32_t(position / kPageTokens);
        for (int head = 0; head < query_heads(); ++head, ++row) {
          if (!checked[size_t(i) * query_heads() + head]) continue;
          const float* const q = q_.data() + row * d;
          weights.assign(position + 1, 0);
          double top = -std::numeric_limits<double>::infinity();
          for (uint64_t t = 0; t <= position; ++t) {
            const float* const k = Row(s, own, 0, head / shape_.group, t);
            float sum = 0;
            for (int c = 0; c < d; ++c) sum += q[c] * k[c];
            weights[t] = double(sum) / std::sqrt(double(d));
            top = std::max(top, weights[t]);
          }
          double total = 0;
          std::fill(wanted.begin(), wanted.end(), 0);
          for (uint64_t t = 0; t <= position; ++t) {
            const double w = std::exp(weights[t] - top);
            const float* const v = Row(s, own, 1, head / shape_.group, t);
            total += w;
            for (int c = 0; c < d; ++c) wanted[c] += w * v[c];
          }
          for (int c = 0; c < d; ++c) {
            const double want = wanted[c] / total, got = out[row * d + c];
            error += (got - want) * (got - want);
            norm += want * want;
          }
          const double want_lse = top + std::log(total);
          const double of_lse = std::abs(lse[row] - want_lse) / (1 + std::abs(want_lse));
          worst_lse = std::isnan(of_lse) ? of_lse : std::max(worst_lse, of_lse);
        }
      }
    }
    EXPECT_LE(worst_lse, 4e-3);
    return std::sqrt(error / norm);
  }

 private:
  /// Two of K's segments or more get 8 bits, and V as few as such records have room for.
  void Widen(std::vector<uint8_t>* k, std::vector<uint8_t>* v) {
    for (size_t s = 0; s < k->size(); ++s) {
      if (s % 4 == 0 || s + 1 == k->size() || random_() % 4 == 0) (*k)[s] = 8;
    }
    size_t spare = 8 * k->size();
    for (const uint8_t bits : *k) spare -= bits;
    for (uint8_t& bits : *v) {
      bits = uint8_t(std::min<size_t>(bits, spare));
      spare -= bits;
    }
  }
  struct Sequence {
    std::vector<DevicePage> pages;
    std::vector<std::vector<float>> raw, encoded;  // [pages] values: [side][kv_heads][tokens][head_dim]
    uint64_t first_position;
    int tokens;
  };

  float Rounded(float x) const {
    uint32_t bits = 0;  // of the largest type
    StoreElement(&bits, shape_.dtype, 0, x);
    return LoadElement(&bits, shape_.dtype, 0);
  }
  const float* Row(const Sequence& s, uint32_t own, int side, int kv_head, uint64_t position) const {
    const uint32_t j = uint32_t(position / kPageTokens);
    const bool near = j == own || (j >= shape_.aged && j + shape_.lag_pages >= own);
    const bool encoded = s.pages[j].encoded != kNoSlot && (s.pages[j].raw == kNoSlot || !near);
    const size_t row = (size_t(side) * shape_.kv_heads + kv_head) * kPageTokens + position % kPageTokens;
    return (encoded ? s.encoded : s.raw)[j].data() + row * shape_.head_dim;
  }
  std::vector<float> Values(const uint8_t* raw) const {
    std::vector<float> values(layout_.raw_bytes() / 2);
    for (size_t i = 0; i < values.size(); ++i) values[i] = LoadElement(raw, shape_.dtype, i);
    return values;
  }
  void AddSequence(uint64_t context, int tokens) {
    Sequence s;
    s.first_position = context - tokens, s.tokens = tokens;
    tokens_ += tokens;
    std::normal_distribution<float> normal(0, 1);
    const size_t d = shape_.head_dim;
    std::vector<float> spread(d), bias(d);
    for (size_t c = 0; c < d; ++c) {
      spread[c] = std::exp(0.5f * normal(random_)), bias[c] = normal(random_);
      if (shape_.keys == Keys::kOutliers && c % 16 == 3) bias[c] *= 20;
      if (shape_.keys == Keys::kConstantChannels && c % 4 == 0) spread[c] = 0;
    }
    const size_t encoded_bytes = codec_->info().encoded_bytes;
    std::vector<uint8_t> memory(layout_.raw_bytes() * 2 + encoded_bytes + codec_->encode_workspace_bytes() + 4 * 64);
    uint8_t* const raw = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    uint8_t* const decoded = raw + layout_.raw_bytes();
    uint8_t* const encoded = decoded + layout_.raw_bytes();
    uint8_t* const workspace = encoded + (encoded_bytes + 63) / 64 * 64;
    for (uint64_t first = 0; first < context; first += kPageTokens) {
      const size_t written = std::min<uint64_t>(kPageTokens, context - first);
      std::memset(raw, 0xff, layout_.raw_bytes());
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < shape_.kv_heads; ++head) {
          for (size_t t = 0; t < written; ++t) {
            for (size_t c = 0; c < d; ++c) {
              StoreElement(raw, shape_.dtype, layout_.raw_offset(side, head, int(t)) / 2 + c,
                           spread[c] * normal(random_) + (side == 0 ? bias[c] : 0.3f * bias[c]));
            }
          }
        }
      }
      DevicePage page;
      s.raw.push_back(Values(raw));
      s.encoded.emplace_back();
      const bool own = first + kPageTokens > s.first_position;
      const bool last_alone = first + kPageTokens == s.first_position + 1;
      const bool encodes = shape_.k_bits != 0 && written == kPageTokens && random_() % 8 != 0;
      if (encodes) {
        EncodeItem item;
        item.raw = raw, item.encoded = encoded, item.first_token = first;
        codec_->Encode({&item, 1}, {workspace, codec_->encode_workspace_bytes()});
        EXPECT_FALSE(item.declined);
        DecodeItem back;
        back.encoded = encoded, back.raw = decoded;
        codec_->Decode({&back, 1});
        s.encoded.back() = Values(decoded);
        page.encoded = TakeSlot(encoded, encoded_bytes);
      }
      // Not every page behind has a raw form still; some that are near have lost it.
      if (!encodes || (own && !last_alone) || random_() % 2 == 0) page.raw = TakeSlot(raw, layout_.raw_bytes());
      s.pages.push_back(page);
    }
    sequences_.push_back(std::move(s));
  }
  uint32_t TakeSlot(const uint8_t* from, size_t bytes) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    std::memcpy(pool_.data() + slot * device::kSlotUnitBytes, from, bytes);
    return slot;
  }
  /// Each row of q like one key that it sees, large.
  void PointAtOneToken() {
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int i = 0; i < s.tokens; ++i) {
        for (int head = 0; head < query_heads(); ++head, ++row) {
          const uint64_t position = s.first_position + i;
          const float* const k =
              Row(s, uint32_t(position / kPageTokens), 0, head / shape_.group, random_() % (position + 1));
          for (int c = 0; c < shape_.head_dim; ++c) q_[row * shape_.head_dim + c] = Rounded(4 * k[c]);
        }
      }
    }
  }

  const Shape shape_;
  std::mt19937_64 random_;
  PageLayout layout_;
  std::unique_ptr<Codec> codec_;
  size_t slot_bytes_ = 0;
  std::vector<uint8_t> pool_;
  std::vector<uint32_t> free_;
  std::vector<Sequence> sequences_;
  std::vector<float> q_;  // [tokens][query_heads][head_dim]
  int tokens_ = 0;
};

double Check(const Shape& shape, uint64_t seed, int blocks = 132) {
  World world(shape, seed);
  std::vector<float> out, lse;
  world.Run(blocks, &out, &lse);
  if (::testing::Test::HasFatalFailure()) return NAN;
  const double error = world.Compare(out, lse);
  std::printf("  k %d v %d, head_dim %d, group %d, %s, std %.1f: %.2e\n", shape.k_bits, shape.v_bits, shape.head_dim,
              shape.group, shape.dtype == DType::kBFloat16 ? "bf16" : "fp16", shape.q_std, error);
  return error;
}
/// Of float16 or bfloat16 weights, pages and outputs.
double Bound(const Shape& shape) { return shape.dtype == DType::kBFloat16 ? 8e-3 : 1.5e-3; }

class PrefillGpu : public GpuTest {};

TEST_F(PrefillGpu, RawPages) {
  for (const int head_dim : {64, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      Shape shape;
      shape.head_dim = head_dim, shape.dtype = dtype;
      shape.sequences = {{256, 256}, {700, 130}, {1100, 64}, {64, 64}, {65, 65}};
      EXPECT_LE(Check(shape, 1), Bound(shape));
    }
  }
}

TEST_F(PrefillGpu, EncodedPages) {
  for (const auto& [k_bits, v_bits] : {std::pair{3, 2}, {2, 2}, {2, 1}, {4, 3}, {4, 4}, {1, 3}, {-1, -1}, {-2, -2}}) {
    for (const int head_dim : {64, 128}) {
      Shape shape;
      shape.k_bits = k_bits, shape.v_bits = v_bits, shape.head_dim = head_dim;
      shape.dtype = head_dim == 64 && k_bits != 3 ? DType::kBFloat16 : DType::kFloat16;
      shape.sequences = {{1000, 100}, {640, 64}, {333, 333}};
      for (int i = 0; i < 3; ++i) {
        shape.rotates = i == 0, shape.v_norm = i != 2;
        EXPECT_LE(Check(shape, 2), Bound(shape));
      }
    }
  }
}

TEST_F(PrefillGpu, EveryGroupSizeAndManyBatches) {
  std::mt19937 random(3);
  for (int group = 1; group <= device::kPrefillGroupMax; ++group) {
    Shape shape;
    shape.group = group, shape.kv_heads = 1 + group % 2;
    shape.k_bits = group % 3 == 0 ? 0 : 3, shape.v_bits = 2;
    shape.head_dim = group % 4 == 0 ? 64 : 128;
    shape.lag_pages = int(random() % 4), shape.aged = random() % 2 * uint32_t(random() % 10);
    for (int i = 0; i < 3; ++i) {
      const int tokens = 1 + int(random() % 200);
      shape.sequences.push_back({tokens + random() % 500, tokens});
    }
    EXPECT_LE(Check(shape, 100 + group, 1 + int(random() % 140)), Bound(shape));
  }
}

TEST_F(PrefillGpu, QueriesOfAnySize) {
  for (const float q_std : {0.1f, 4.f}) {
    Shape shape;
    shape.k_bits = 3, shape.v_bits = 2, shape.q_std = q_std;
    shape.sequences = {{2000, 70}};
    EXPECT_LE(Check(shape, 4), Bound(shape));
  }
  for (const Keys keys : {Keys::kOutliers, Keys::kConstantChannels, Keys::kOneHot}) {
    for (const int bits : {0, 3}) {
      Shape shape;
      shape.k_bits = bits, shape.v_bits = 2, shape.keys = keys;
      shape.q_std = keys == Keys::kOutliers ? 0.1f : 1;
      shape.sequences = {{900, 300}};
      EXPECT_LE(Check(shape, 5), 2 * Bound(shape));
    }
  }
}

TEST_F(PrefillGpu, LongContexts) {
#ifdef KVMANAGER_SANITIZED
  constexpr int kShorter = 16;
#else
  constexpr int kShorter = 1;
#endif
  for (const int k_bits : {0, 3}) {
    Shape shape;
    shape.k_bits = k_bits, shape.v_bits = k_bits == 0 ? 0 : 2;
    shape.rows_checked = 8;
    shape.sequences = {{(32768 + 2048) / kShorter, 2048 / kShorter}};
    EXPECT_LE(Check(shape, 6), Bound(shape));
    shape.kv_heads = 1;
    shape.sequences = {{131072 / kShorter, 64}};
    EXPECT_LE(Check(shape, 7), Bound(shape));
    shape.sequences.assign(4, {32768 / kShorter, 64});
    shape.sequences[1].first -= 13;
    EXPECT_LE(Check(shape, 8), Bound(shape));
  }
}

// A block's pages take all places in shared memory again, and their barriers go around twice; little enough for a tool
// that looks at every access.
TEST_F(PrefillGpu, ReusesPlaces) {
  for (const int k_bits : {0, 3}) {
    Shape shape;
    shape.k_bits = k_bits, shape.v_bits = k_bits == 0 ? 0 : 2;
    shape.kv_heads = shape.group = 1;
    shape.sequences = {{41 * kPageTokens, 64}};
    EXPECT_LE(Check(shape, 8, 1), Bound(shape));
  }
}

}  // namespace
}  // namespace kvmanager
