// Attention kernels on a GPU against the same arithmetic in double precision on the host.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/device_plan.h"
#include "attention/device_plan_testing.h"
#include "codecs/hack/hack.h"
#include "codecs/hack/hack_attention_cuda.h"
#include "codecs/hack/hack_reference.h"
#include "codecs/million/million_attention_cuda.h"
#include "codecs/million/million_device_format.h"
#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "codecs/raw/raw_attention_cuda.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::AttendKernels;
using device::AttendParams;

enum class Keys { kRandom, kZero, kConstantChannels, kOneHot };
/// Of V's tokens: alike; a few thousand times as large as the others; most of them far below fp16's; all zero.
enum class Norms { kAlike, kFewLarge, kTiny, kZero };

struct Shape {
  int k_bits = 0, v_bits = 0;          // of HACK; 0 and 0: raw, or
  bool rotates = true, v_norm = true;  // of HACK
  bool million = false;                // 64 subspaces of 8 bits
  DType dtype = DType::kFloat16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int page_tokens = 64;
  int lag_pages = 2;
  float q_std = 1;
  Keys keys = Keys::kRandom;
  Norms norms = Norms::kAlike;
  bool hostile_norms = false;                       // pages with stored norms of 0, which no encoder writes
  std::vector<std::pair<uint64_t, int>> sequences;  // context with the query tokens, query tokens
};

/// A batch with its pages in a pool on the device and on the host.
class World {
 public:
  World(const Shape& shape, uint64_t seed) : shape_(shape), random_(seed) {
    layout_.dtype = shape.dtype;
    layout_.kv_heads = shape.kv_heads;
    layout_.head_dim = shape.head_dim;
    layout_.page_tokens = shape.page_tokens;
    if (shape.k_bits != 0) {
      hack::HackParameters parameters;
      parameters.k_bits = shape.k_bits;
      parameters.v_bits = shape.v_bits;
      parameters.rotation = shape.rotates ? hack::Rotation::kHadamard : hack::Rotation::kNone;
      parameters.v_norm = shape.v_norm;
      if (shape.v_bits == 1) parameters.v_range = hack::Range::kLeastSquares;
      format_ = std::make_unique<hack::HackFormat>(hack::MakeHackFormat(layout_, parameters));
    }
    if (shape.million) {
      million_ = std::make_unique<million::MillionFormat>(million::MakeFormat(layout_, {64, 8}, {64, 8}));
      MakeBooks();
    }
    slot_bytes_ = (layout_.raw_bytes() + 255) / 256 * 256;
    size_t slots = 0;
    for (const auto& [context, tokens] : shape.sequences) slots += 2 * ((context + 63) / shape.page_tokens + 2);
    pool_.assign((slots + 1) * slot_bytes_, 0xff);  // NaN wherever nothing was written
    order_.resize(slots);
    std::iota(order_.begin(), order_.end(), 0u);
    std::shuffle(order_.begin(), order_.end(), random_);
    for (const auto& [context, tokens] : shape.sequences) AddSequence(context, tokens);
    q_.resize(size_t(tokens_) * query_heads() * shape.head_dim);
    std::normal_distribution<float> normal(0, 1);
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = Rounded(shape.q_std * normal(random_));
    if (shape.keys == Keys::kOneHot) PointAtOneToken();
  }

  int query_heads() const { return shape_.kv_heads * shape_.group; }
  /// Runs on the device with `blocks` blocks: out as floats, lse.
  void Run(const AttendKernels& kernels, int blocks, std::vector<float>* out, std::vector<float>* lse) {
    DevicePlanner::Options o;
    o.layout = layout_;
    o.query_heads = query_heads();
    o.lag_pages = shape_.lag_pages;
    o.identity = !encodes();
    o.blocks = blocks;
    o.warps = kernels.grid.warps;
    o.encoded_cost = kernels.encoded_cost;
    std::vector<AttendItem> items(1 << 14);
    DeviceTables tables;
    for (const Sequence& s : sequences_) tables.Add(s.pages, 0, s.first_position, s.tokens);
    const std::vector<uint32_t>& slots = tables.slots();
    const auto planned = DevicePlanner(o).Plan(tables.sequences(), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok()) << planned.status();
    std::vector<uint16_t> q16(q_.size());
    for (size_t i = 0; i < q_.size(); ++i) StoreElement(q16.data(), shape_.dtype, i, q_[i]);
    DeviceBytes pool(pool_.size()), d_items(items.size() * sizeof items[0]), d_slots(slots.size() * 4),
        q(q16.size() * 2), d_out(q16.size() * 2), d_lse(q16.size() / layout_.head_dim * 4),
        partial(size_t(planned->parts + 1) * device::kTileRows * layout_.head_dim * 4),
        partial_max(size_t(planned->parts + 1) * device::kTileRows * 8),
        arrived((planned->parts + 1) * device::kTileRows * 4), codec(kCodecBytesMax);
    if (million_ != nullptr) {
      const auto pairs = million::MakeMillionDeviceFormat(*million_, *books_->tables).pairs;
      codec.Fill(pairs.data(), pairs.size() * sizeof pairs[0]);
    }
    pool.Fill(pool_.data(), pool_.size());
    d_items.Fill(items.data(), items.size() * sizeof items[0]);
    d_slots.Fill(slots.data(), slots.size() * 4);
    q.Fill(q16.data(), q16.size() * 2);
    d_out.Set(0xff);
    d_lse.Set(0xff);
    partial.Set(0xff);
    partial_max.Set(0xff);
    arrived.Set(0);
    AttendParams p;
    p.pool = pool.as<uint8_t>();
    p.slots = d_slots.as<uint32_t>();
    p.items = d_items.as<AttendItem>();
    p.q = q.as<void>();
    p.out = d_out.as<void>();
    p.lse = d_lse.as<float>();
    p.partial = partial.as<float>();
    p.partial_max = partial_max.as<float>();
    p.arrived = arrived.as<uint32_t>();
    p.query_heads = query_heads();
    p.kv_heads = layout_.kv_heads;
    p.page_tokens = layout_.page_tokens;
    p.scale_log2 = Scale() * float(M_LOG2E);
    p.bfloat16 = shape_.dtype == DType::kBFloat16;
    p.codec = codec.as<void>();
    p.tokens = uint32_t(tokens_);
    ASSERT_CUDA(cudaError_t(kernels.prepare()));
    // Twice: the second finds what the first left in `arrived`.
    for (int i = 0; i < 2; ++i) ASSERT_CUDA(cudaError_t(kernels.launch(p, planned->rows_max, blocks, nullptr)));
    ASSERT_CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> got(q16.size());
    lse->resize(q16.size() / layout_.head_dim);
    ASSERT_CUDA(cudaMemcpy(got.data(), p.out, got.size() * 2, cudaMemcpyDeviceToHost));
    ASSERT_CUDA(cudaMemcpy(lse->data(), p.lse, lse->size() * 4, cudaMemcpyDeviceToHost));
    out->resize(got.size());
    for (size_t i = 0; i < got.size(); ++i) (*out)[i] = LoadElement(got.data(), shape_.dtype, i);
  }

  /// The same on the host.
  void Reference(std::vector<float>* out, std::vector<float>* lse) const {
    const int d = layout_.head_dim, heads = query_heads();
    out->assign(size_t(tokens_) * heads * d, 0);
    lse->assign(size_t(tokens_) * heads, 0);
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < heads; ++head, ++row) {
          float max = -INFINITY, sum = 0;
          std::vector<float> acc(d + 16);
          AttendRow(s, s.first_position + token, head, q_.data() + row * d, {&max, &sum, acc.data()});
          for (int c = 0; c < d; ++c) (*out)[row * d + c] = acc[c] / sum;
          (*lse)[row] = max + std::log(sum);
        }
      }
    }
  }

  const AttendKernels* kernels() const {
    if (million_ != nullptr) return MillionAttentionKernels(*million_);
    return format_ != nullptr ? HackAttentionKernels(*format_) : RawAttentionKernels(layout_.head_dim);
  }

 private:
  static constexpr size_t kCodecBytesMax = 4 * sizeof(million::MillionPairTables);
  bool encodes() const { return format_ != nullptr || million_ != nullptr; }
  /// Channels of different size and place, as pages have them.
  void MakeBooks() {
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> spread(2 * layout_.head_dim), bias(2 * layout_.head_dim);
    for (float& x : spread) x = std::exp(normal(random_));
    for (float& x : bias) x = normal(random_);
    books_ = std::make_unique<million::Books>(*million_, 1, random_(), [&](int side, int channel, int) {
      const int c = side * layout_.head_dim + channel;
      return shape_.keys == Keys::kConstantChannels ? bias[c] : spread[c] * normal(random_) + bias[c];
    });
  }
  struct Sequence {
    std::vector<DevicePage> pages;
    std::vector<std::vector<float>> keys;  // [pages] of [kv_heads][page_tokens][head_dim]: K of both forms, or near it
    uint64_t first_position;
    int tokens;
  };
  float Scale() const { return 1 / std::sqrt(float(layout_.head_dim)); }
  float Rounded(float x) const {
    return shape_.dtype == DType::kFloat16 ? HalfToFloat(FloatToHalf(x)) : BFloat16ToFloat(FloatToBFloat16(x));
  }
  uint8_t* Slot(uint32_t unit) { return pool_.data() + size_t(unit) * device::kSlotUnitBytes; }
  const uint8_t* Slot(uint32_t unit) const { return pool_.data() + size_t(unit) * device::kSlotUnitBytes; }
  uint32_t TakeSlot() { return uint32_t(order_[taken_++] * slot_bytes_ / device::kSlotUnitBytes); }

  void AddSequence(uint64_t context, int tokens) {
    std::normal_distribution<float> normal(0, 1);
    const uint64_t first = context - tokens;
    const uint32_t page_tokens = layout_.page_tokens;
    std::vector<DevicePage> list((context + page_tokens - 1) / page_tokens);
    std::vector<float> spread(layout_.head_dim), bias(layout_.head_dim);
    for (float& x : spread) x = std::exp(normal(random_));
    for (float& x : bias) x = normal(random_);
    std::vector<std::vector<float>> keys(list.size());
    for (size_t j = 0; j < list.size(); ++j) {
      std::vector<uint8_t> raw(layout_.raw_bytes() + 64);
      const int filled = int(std::min<uint64_t>(page_tokens, context - j * page_tokens));
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < layout_.kv_heads; ++head) {
          for (uint32_t t = 0; t < page_tokens; ++t) {
            uint8_t* to = raw.data() + layout_.raw_offset(side, head, t);
            const float norm = side == 1 ? NormOfToken(t) : 1;
            for (int c = 0; c < layout_.head_dim; ++c) {
              float x = spread[c] * normal(random_) + bias[c];
              if (shape_.keys == Keys::kZero && side == 0) x = 0;
              if (shape_.keys == Keys::kConstantChannels) x = bias[c];
              x *= norm;
              if (int(t) >= filled) x = NAN;  // beyond what was appended
              StoreElement(to, shape_.dtype, c, x);
            }
          }
        }
      }
      const bool sealed = filled == int(page_tokens);
      // The query's own page must be raw: also of the first of several query tokens.
      const bool may_encode = encodes() && sealed && (j + 1) * page_tokens <= first;
      const bool far = (j + 1 + shape_.lag_pages) * page_tokens <= first;
      if (may_encode && (far || random_() % 2 == 0) && random_() % 16 != 0) {
        list[j].encoded = TakeSlot();
        std::vector<uint8_t> encoded(million_ ? million_->page_bytes : format_->page_bytes);
        if (million_ != nullptr) {
          // What pages say does not matter to attention, and the nearest centroids take long to find.
          for (uint8_t& index : encoded) index = uint8_t(random_());
        } else {
          EXPECT_TRUE(hack::ReferenceEncode(*format_, raw.data(), 0, j * page_tokens, encoded.data()));
          for (const hack::HeadLayout& head : format_->heads) {
            for (uint32_t t = 0; shape_.hostile_norms && t < page_tokens; ++t) {
              if (random_() % 4 != 0) encoded[head.offset + head.side[1].norms + t] = 0;
            }
          }
        }
        if (million_ != nullptr && far && shape_.keys == Keys::kOneHot) keys[j] = MillionKeys(encoded.data());
        std::memcpy(Slot(list[j].encoded), encoded.data(), encoded.size());
      }
      if (list[j].encoded == DevicePage::kNoSlot || !far) {
        list[j].raw = TakeSlot();
        std::memcpy(Slot(list[j].raw), raw.data(), layout_.raw_bytes());
      }
      if (keys[j].empty() && shape_.keys == Keys::kOneHot) keys[j] = RawKeys(raw.data());
    }
    sequences_.push_back({std::move(list), std::move(keys), first, tokens});
    tokens_ += tokens;
  }
  /// One in eight tokens is large where they differ, so that one-hot attention meets small ones.
  float NormOfToken(uint32_t token) const {
    switch (shape_.norms) {
      case Norms::kFewLarge:
        return token % 8 == 3 ? 60 : 0.05f;
      case Norms::kTiny:
        return token % 8 == 3 ? 1 : 1e-4f;
      case Norms::kZero:
        return 0;
      default:
        return 1;
    }
  }
  std::vector<float> RawKeys(const uint8_t* raw) const {
    std::vector<float> keys(layout_.raw_bytes() / 4);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = LoadElement(raw, shape_.dtype, i);
    return keys;
  }
  std::vector<float> MillionKeys(const uint8_t* encoded) const {
    std::vector<float> keys;
    for (int head = 0; head < layout_.kv_heads; ++head) {
      const auto of_head = million::ReferenceValues(*million_, *books_->tables, encoded, 0, head, million::kSideK);
      keys.insert(keys.end(), of_head.begin(), of_head.end());
    }
    return keys;
  }

  /// Every row's q is a multiple of one key that it sees: its weight is 1, all others' 0.
  void PointAtOneToken() {
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < query_heads(); ++head, ++row) {
          const uint64_t at = random_() % (s.first_position + token + 1);
          const size_t in_page = size_t(head / shape_.group) * layout_.page_tokens + at % layout_.page_tokens;
          const float* const k = s.keys[at / layout_.page_tokens].data() + in_page * layout_.head_dim;
          for (int c = 0; c < layout_.head_dim; ++c) {
            q_[row * layout_.head_dim + c] = Rounded(20 * k[c]);
          }
        }
      }
    }
  }

  void AttendRow(const Sequence& s, uint64_t position, int head, const float* q, const SoftmaxRows& state) const {
    const int d = layout_.head_dim, kv_head = head / shape_.group;
    const uint32_t page_tokens = layout_.page_tokens, own = uint32_t(position / page_tokens);
    for (uint32_t j = 0; j <= own; ++j) {
      const DevicePage& page = s.pages[j];
      const bool near = own - j <= uint32_t(shape_.lag_pages);
      const bool raw = page.encoded == DevicePage::kNoSlot || (near && page.raw != DevicePage::kNoSlot);
      float max = -INFINITY, sum = 0;
      std::vector<float> acc(d);
      if (!raw) {
        const uint8_t* const encoded = Slot(page.encoded);
        PageAttentionTask task;
        task.q = q;
        task.rows = 1;
        task.scale = Scale();
        task.kv_head = kv_head;
        task.pages = {&encoded, 1};
        if (million_ != nullptr) {
          million::ReferenceAttend(*million_, *books_->tables, task, million::Rounding::kGpu, {&max, &sum, acc.data()});
        } else {
          std::vector<float> mapped(q, q + d);
          if (shape_.rotates) hack::Hadamard(absl::MakeSpan(mapped));
          task.q = mapped.data();
          hack::ReferenceAttend(*format_, task, {&max, &sum, acc.data()});
          if (shape_.rotates) hack::Hadamard(absl::MakeSpan(acc));
        }
      } else {
        const int seen = j == own ? int(position % page_tokens) + 1 : int(page_tokens);
        std::vector<double> scores(seen), out(d);
        double top = -INFINITY, total = 0;
        for (int t = 0; t < seen; ++t) {
          const uint8_t* k = Slot(page.raw) + layout_.raw_offset(0, kv_head, t);
          for (int c = 0; c < d; ++c) scores[t] += double(q[c]) * LoadElement(k, shape_.dtype, c);
          scores[t] *= Scale();
          top = std::max(top, scores[t]);
        }
        for (int t = 0; t < seen; ++t) {
          const uint8_t* v = Slot(page.raw) + layout_.raw_offset(1, kv_head, t);
          const double p = std::exp(scores[t] - top);
          total += p;
          for (int c = 0; c < d; ++c) out[c] += p * LoadElement(v, shape_.dtype, c);
        }
        max = float(top), sum = float(total);
        for (int c = 0; c < d; ++c) acc[c] = float(out[c]);
      }
      MergeSoftmax(1, d, {&max, &sum, acc.data()}, state);
    }
  }

  const Shape shape_;
  std::mt19937_64 random_;
  PageLayout layout_;
  std::unique_ptr<hack::HackFormat> format_;
  std::unique_ptr<million::MillionFormat> million_;
  std::unique_ptr<million::Books> books_;
  size_t slot_bytes_ = 0;
  std::vector<uint8_t> pool_;
  std::vector<uint32_t> order_;
  size_t taken_ = 0;
  std::vector<Sequence> sequences_;
  int tokens_ = 0;
  std::vector<float> q_;
};

class DeviceAttention : public GpuTest {
 protected:
  /// Relative L2 of all rows against the same arithmetic in doubles; q's, P's and out's own rounding included.
  void Check(const Shape& shape, uint64_t seed, const std::vector<int>& block_counts = {132}) {
    World world(shape, seed);
    const AttendKernels* const kernels = world.kernels();
    ASSERT_NE(kernels, nullptr) << shape.k_bits << " " << shape.v_bits << " " << shape.million;
    std::vector<float> wanted, wanted_lse;
    world.Reference(&wanted, &wanted_lse);
    for (const int blocks : block_counts) {
      std::vector<float> out, lse;
      world.Run(*kernels, blocks, &out, &lse);
      ASSERT_EQ(out.size(), wanted.size());
      double error = 0, norm = 0, worst_lse = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        error += (double(out[i]) - wanted[i]) * (double(out[i]) - wanted[i]);
        norm += double(wanted[i]) * wanted[i];
      }
      for (size_t i = 0; i < lse.size(); ++i) {
        worst_lse = std::max(worst_lse, std::abs(double(lse[i]) - wanted_lse[i]) / (1 + std::abs(wanted_lse[i])));
      }
      const double relative = norm == 0 && error == 0 ? 0 : std::sqrt(error / norm);
      worst_ = std::max(worst_, std::isnan(relative) ? INFINITY : relative);
      EXPECT_LE(relative, shape.dtype == DType::kFloat16 ? 1e-3 : 4e-3)
          << "bits " << shape.k_bits << "/" << shape.v_bits << " million " << shape.million << " d " << shape.head_dim
          << " group " << shape.group << " keys " << int(shape.keys) << " blocks " << blocks << " seed " << seed
          << " first context " << shape.sequences[0].first << " tokens " << shape.sequences[0].second;
      EXPECT_LE(worst_lse, 1e-3);
      // Rows that are small beside others.
      for (size_t at = 0; shape.keys == Keys::kOneHot && shape.dtype == DType::kFloat16 && at < out.size();
           at += shape.head_dim) {
        double row_error = 0, row_norm = 0;
        for (int c = 0; c < shape.head_dim; ++c) {
          row_error += (double(out[at + c]) - wanted[at + c]) * (double(out[at + c]) - wanted[at + c]);
          row_norm += double(wanted[at + c]) * wanted[at + c];
        }
        if (shape.hostile_norms) continue;
        EXPECT_LE(std::sqrt(row_error), 4e-3 * std::sqrt(row_norm)) << "row " << at / shape.head_dim;
      }
    }
  }
  void TearDown() override { RecordProperty("worst", absl::StrCat(worst_)); }
  double worst_ = 0;
};

/// Bits of K and V in HACK; none: raw; kMillion: that.
constexpr std::pair<int, int> kMillion = {64, 64};
constexpr std::pair<int, int> kWidths[] = {{0, 0}, {2, 2}, {3, 2}, {4, 3}, {2, 1}, {4, 4}, kMillion};

Shape ShapeOf(const std::pair<int, int>& widths) {
  Shape shape;
  shape.million = widths == kMillion;
  if (!shape.million) std::tie(shape.k_bits, shape.v_bits) = widths;
  return shape;
}

TEST_F(DeviceAttention, RandomBatches) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 70; ++trial) {
    Shape shape = ShapeOf(kWidths[random() % std::size(kWidths)]);
    shape.head_dim = random() % 3 == 0 && !shape.million ? 64 : 128;
    shape.dtype = random() % 3 == 0 ? DType::kBFloat16 : DType::kFloat16;
    shape.kv_heads = 1 + random() % 3;
    shape.group = 1 + random() % 16;
    shape.lag_pages = random() % 3;
    shape.q_std = std::exp(float(random() % 4) - 2);
    shape.rotates = random() % 3 != 0;
    shape.v_norm = random() % 3 != 0;
    const int sequences = 1 + random() % 4;
    for (int i = 0; i < sequences; ++i) {
      const uint64_t context = 1 + random() % 1200;
      shape.sequences.push_back({context, 1 + int(random() % std::min<uint64_t>(context, random() % 2 ? 1 : 16))});
    }
    Check(shape, trial, {int(1 + random() % 40), 132});
  }
}

TEST_F(DeviceAttention, ContextsAtPageBoundaries) {
  for (const auto& widths : kWidths) {
    for (const uint64_t context : {1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 192, 193, 256, 320}) {
      for (const int tokens : {1, 2, 16}) {
        if (uint64_t(tokens) > context) continue;
        Shape shape = ShapeOf(widths);
        shape.lag_pages = 1;
        shape.sequences = {{context, tokens}};
        Check(shape, context);
      }
    }
  }
}

TEST_F(DeviceAttention, EveryGroup) {
  for (const auto& widths : {std::pair{0, 0}, {3, 2}, kMillion}) {
    for (int group = 1; group <= 16; ++group) {
      Shape shape = ShapeOf(widths);
      shape.group = group;
      shape.sequences = {{700, 1}, {130, 3}};
      Check(shape, group);
    }
  }
}

TEST_F(DeviceAttention, HardKeysAndQueries) {
  for (const auto& widths : kWidths) {
    for (const Keys keys : {Keys::kZero, Keys::kConstantChannels, Keys::kOneHot}) {
      Shape shape = ShapeOf(widths);
      shape.keys = keys;
      shape.sequences = {{900, 1}, {64, 1}, {350, 5}};
      Check(shape, 7);
    }
    Shape shape = ShapeOf(widths);
    shape.q_std = 0;
    shape.sequences = {{900, 1}};
    Check(shape, 8);
    shape.q_std = 30;  // scores in the hundreds
    Check(shape, 9);
  }
}

TEST_F(DeviceAttention, NormsOfAnySize) {
  for (const auto& widths : {std::pair{2, 2}, {3, 2}, {4, 3}, {2, 1}}) {
    for (const bool rotates : {true, false}) {
      for (const Norms norms : {Norms::kAlike, Norms::kFewLarge, Norms::kTiny, Norms::kZero}) {
        for (const Keys keys : {Keys::kRandom, Keys::kOneHot}) {
          Shape shape = ShapeOf(widths);
          shape.head_dim = keys == Keys::kRandom && rotates ? 64 : 128;
          shape.rotates = rotates, shape.norms = norms, shape.keys = keys;
          shape.group = keys == Keys::kRandom ? 4 : 7;
          shape.sequences = {{900, 1}, {350, 5}};
          Check(shape, 12);
        }
      }
    }
  }
}

TEST_F(DeviceAttention, WithoutNormsOrRotation) {
  for (const auto& widths : kWidths) {
    if (widths.first == 0 || widths == kMillion) continue;
    for (int i = 0; i < 3; ++i) {
      Shape shape = ShapeOf(widths);
      shape.rotates = i == 1, shape.v_norm = i == 2;
      shape.sequences = {{900, 1}, {64, 1}, {350, 5}};
      Check(shape, 13);
    }
  }
}

TEST_F(DeviceAttention, HostileNorms) {
  for (const Keys keys : {Keys::kRandom, Keys::kOneHot}) {
    Shape shape = ShapeOf({3, 2});
    shape.hostile_norms = true, shape.keys = keys;
    shape.sequences = {{900, 1}, {350, 5}};
    Check(shape, 14);
  }
}

TEST_F(DeviceAttention, HoweverTheWorkIsSplit) {
  for (const auto& widths : kWidths) {
    Shape shape = ShapeOf(widths);
    shape.sequences = {{2000, 1}, {300, 1}, {65, 1}};
    Check(shape, 11, {1, 2, 3, 7, 32, 131, 264});
  }
}

TEST_F(DeviceAttention, RawPagesOfAnySize) {
  for (const int page_tokens : {16, 32, 128, 256}) {
    Shape shape;
    shape.page_tokens = page_tokens;
    shape.sequences = {{1000, 4}, {257, 1}, {16, 1}};
    Check(shape, page_tokens);
  }
}

}  // namespace
}  // namespace kvmanager
