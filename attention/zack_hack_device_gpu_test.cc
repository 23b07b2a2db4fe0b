// Attention to ZACK+HACK pages and raw pages beside them on a GPU, by way of device steps, against the same arithmetic
// in double precision: q mapped as the device maps it, codes by HACK's reference, outputs expanded.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/device_step.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_reference.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::zack_hack {
namespace {

using zack::Memory;

enum class Keys { kRandom, kZero, kConstant, kOneHot };

struct Shape {
  std::string mode = "joint", bytes = "56", fold = "0";
  DType dtype = DType::kFloat16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int lag_pages = 2;
  int multiprocessors = 132;
  float q_std = 1;
  Keys keys = Keys::kRandom;
  bool holes = true;                                // some pages far back have no encoded form
  std::vector<std::pair<uint64_t, int>> sequences;  // context with the query tokens, query tokens

  std::string Name() const {
    return absl::StrCat(mode, " ", bytes, " fold ", fold, " dtype ", int(dtype), " d ", head_dim, " heads ", kv_heads,
                        " x ", group, " lag ", lag_pages, " blocks ", multiprocessors, " q ", q_std, " keys ",
                        int(keys), " first ", sequences[0].first, " ", sequences[0].second);
  }
};

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, size * sizeof(T)), cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

constexpr int kLayer = 1, kLayers = 2, kPageTokens = 64;

class World {
 public:
  World(const Shape& shape, uint64_t seed) : shape_(shape), random_(seed) {
    layout_.dtype = shape.dtype;
    layout_.kv_heads = uint16_t(shape.kv_heads);
    layout_.head_dim = uint16_t(shape.head_dim);
    layout_.page_tokens = kPageTokens;
    auto made = MakeCodec(zack::SyntheticContext(layout_, kLayers, query_heads()),
                          {{"mode", shape.mode},
                           {"bytes", absl::StrCat(std::stod(shape.bytes) * shape.head_dim / 128)},
                           {"fold", shape.fold}});
    KV_CHECK(made.ok());
    codec_ = *std::move(made);
    for (const auto& [context, tokens] : shape.sequences) AddSequence(context, tokens);
    std::normal_distribution<float> normal(0, shape.q_std);
    q16_.resize(size_t(tokens_) * query_heads() * shape.head_dim);
    q_.resize(q16_.size());
    for (size_t i = 0; i < q_.size(); ++i) StoreElement(q16_.data(), shape.dtype, i, normal(random_));
    if (shape.keys == Keys::kOneHot) PointAtTokens();
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = LoadElement(q16_.data(), shape.dtype, i);
  }
  int query_heads() const { return shape_.kv_heads * shape_.group; }

  /// Steps on the device, `captured` in a graph: out as floats, lse.
  void Run(bool captured, std::vector<float>* out, std::vector<float>* lse) {
    const std::unique_ptr<DeviceCodec> device_codec = codec_->NewDeviceCodec();
    ASSERT_NE(device_codec, nullptr);
    const size_t raw_bytes = layout_.raw_bytes(), encoded_bytes = codec_->info().encoded_bytes;
    const size_t slot_bytes = (std::max(raw_bytes, encoded_bytes) + 255) / 256 * 256;
    size_t slots = 0;
    for (const Sequence& s : sequences_) slots += 2 * s.pages.size();
    std::vector<uint32_t> order(slots);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<uint8_t> pool(slots * slot_bytes, 0xff);  // NaN wherever nothing was written
    DeviceArray<uint8_t> d_pool(pool.size());
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    DeviceStep::Options o;
    o.stream = stream;
    o.pool = d_pool.data();
    o.layout = layout_;
    o.layers = kLayers;
    o.query_heads = query_heads();
    o.lag_pages = shape_.lag_pages;
    o.codec = device_codec.get();
    o.multiprocessors = shape_.multiprocessors;
    o.pages_max = slots + 16;
    o.sequences_max = int(sequences_.size());
    o.tokens_max = tokens_;
    auto step = DeviceStep::Create(o);
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<DeviceStep::Entry> entries;
    size_t taken = 0;
    for (const Sequence& s : sequences_) {
      std::vector<DevicePage> list;
      for (const Page& page : s.pages) {
        DevicePage place;
        const auto put = [&](const Memory& bytes, size_t size) -> uint32_t {
          if (bytes == nullptr) return DevicePage::kNoSlot;
          const size_t at = order[taken++] * slot_bytes;
          std::memcpy(pool.data() + at, bytes.get(), size);
          return uint32_t(at / device::kSlotUnitBytes);
        };
        place.raw = put(page.raw, raw_bytes);
        place.encoded = put(page.encoded, codec_->info().page_bytes(kLayer));
        list.push_back(place);
      }
      const auto place = (*step)->AddSequence(list.size());
      ASSERT_TRUE(place.ok()) << place.status();
      ASSERT_TRUE((*step)->SetPages(*place, kLayer, 0, list).ok());
      entries.push_back({*place, s.first_position, s.tokens, 0});
    }
    ASSERT_CUDA(cudaMemcpy(d_pool.data(), pool.data(), pool.size(), cudaMemcpyHostToDevice));
    DeviceArray<uint16_t> d_q(q16_.size()), d_out(q16_.size());
    DeviceArray<float> d_lse(q16_.size() / layout_.head_dim);
    ASSERT_CUDA(cudaMemcpy(d_q.data(), q16_.data(), q16_.size() * 2, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const absl::Status prepared = (*step)->Prepare(kLayer, 1, entries, false, true);
    ASSERT_TRUE(prepared.ok()) << prepared;
    if (captured) {
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      const absl::Status status = (*step)->Attend(kLayer, d_q.data(), d_out.data(), d_lse.data());
      cudaGraph_t graph;
      ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
      ASSERT_TRUE(status.ok()) << status;
      cudaGraphExec_t ready;
      ASSERT_CUDA(cudaGraphInstantiate(&ready, graph, 0));
      for (int i = 0; i < 3; ++i) ASSERT_CUDA(cudaGraphLaunch(ready, stream));
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      cudaGraphExecDestroy(ready);
      cudaGraphDestroy(graph);
    } else {
      // Twice: the second finds what the first left behind.
      for (int i = 0; i < 2; ++i) {
        const absl::Status status = (*step)->Attend(kLayer, d_q.data(), d_out.data(), d_lse.data());
        ASSERT_TRUE(status.ok()) << status;
      }
      ASSERT_CUDA(cudaStreamSynchronize(stream));
    }
    std::vector<uint16_t> got(q16_.size());
    lse->resize(q16_.size() / layout_.head_dim);
    ASSERT_CUDA(cudaMemcpy(got.data(), d_out.data(), got.size() * 2, cudaMemcpyDeviceToHost));
    ASSERT_CUDA(cudaMemcpy(lse->data(), d_lse.data(), lse->size() * 4, cudaMemcpyDeviceToHost));
    out->resize(got.size());
    for (size_t i = 0; i < got.size(); ++i) (*out)[i] = LoadElement(got.data(), shape_.dtype, i);
    step->reset();
    cudaStreamDestroy(stream);
  }

  /// The same on the host.
  void Reference(std::vector<double>* out, std::vector<double>* lse) const {
    const int d = layout_.head_dim;
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < query_heads(); ++head, ++row) {
          const std::vector<double> one = ReferenceRow(s, s.first_position + token, head, &q_[row * d]);
          out->insert(out->end(), one.begin(), one.end() - 1);
          lse->push_back(one.back());
        }
      }
    }
  }

 private:
  struct Page {
    Memory raw, encoded;  // nullptr: not there
  };
  struct Sequence {
    std::vector<Page> pages;
    uint64_t first_position;
    int tokens;
  };
  const zack::RotatedCodec& rotated() const { return static_cast<const zack::RotatedCodec&>(*codec_); }

  void AddSequence(uint64_t context, int tokens) {
    Sequence s;
    s.first_position = context - uint64_t(tokens), s.tokens = tokens;
    const size_t pages = (context + kPageTokens - 1) / kPageTokens;
    for (size_t j = 0; j < pages; ++j) {
      Memory raw = zack::RandomRawPage(layout_, random_, 0.5f);
      const int filled = int(std::min<uint64_t>(kPageTokens, context - j * kPageTokens));
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < layout_.kv_heads; ++head) {
          for (int t = 0; t < kPageTokens; ++t) {
            for (int c = 0; c < layout_.head_dim; ++c) {
              uint8_t* const at = raw.get() + layout_.raw_offset(side, head, t);
              if (shape_.keys == Keys::kZero && side == 0) StoreElement(at, shape_.dtype, c, 0);
              if (shape_.keys == Keys::kConstant) StoreElement(at, shape_.dtype, c, float(c % 7) - 3);
              if (t >= filled) StoreElement(at, shape_.dtype, c, NAN);
            }
          }
        }
      }
      Page page;
      // The query's own page is raw: also of the first of several query tokens.
      const bool may_encode = filled == kPageTokens && (j + 1) * kPageTokens <= s.first_position;
      const bool far = (j + 1 + size_t(shape_.lag_pages)) * kPageTokens <= s.first_position;
      if (may_encode && (far || random_() % 2 == 0) && !(shape_.holes && random_() % 8 == 0)) {
        zack::EncodedPage encoded = zack::EncodeOne(*codec_, kLayer, raw.get(), j * kPageTokens);
        KV_CHECK(!encoded.declined);
        page.encoded = std::move(encoded.bytes);
      }
      if (page.encoded == nullptr || !far) page.raw = std::move(raw);
      s.pages.push_back(std::move(page));
    }
    tokens_ += tokens;
    sequences_.push_back(std::move(s));
  }

  /// Every row's q is a multiple of one key that it sees.
  void PointAtTokens() {
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < query_heads(); ++head, ++row) {
          const uint64_t at = random_() % (s.first_position + token + 1);
          const Page& page = s.pages[at / kPageTokens];
          if (page.raw == nullptr) continue;
          const uint8_t* k = page.raw.get() + layout_.raw_offset(0, head / shape_.group, int(at % kPageTokens));
          for (int c = 0; c < layout_.head_dim; ++c) {
            StoreElement(q16_.data(), shape_.dtype, row * layout_.head_dim + c, 20 * LoadElement(k, shape_.dtype, c));
          }
        }
      }
    }
  }

  /// q in the space, in the order of the device's sums: a difference in the last bit would round some codes otherwise.
  Memory Map(const float* q, int kv_head) const {
    const int d = layout_.head_dim, depth = d / 4;
    const std::vector<float>& factor = rotated().rotation(kLayer, kv_head).query;
    Memory out = zack::MakeMemory(d * sizeof(float));
    for (int c = 0; c < d; ++c) {
      float sum = 0;
      for (int part = 0; part < 4; ++part) {
        float of_part = 0;
        for (int i = part * depth; i < (part + 1) * depth; ++i) of_part = std::fma(q[i], factor[i * d + c], of_part);
        sum += of_part;
      }
      reinterpret_cast<float*>(out.get())[c] = sum;
    }
    return out;
  }
  static void Multiply(const std::vector<double>& x, const std::vector<float>& factor, int d,
                       std::vector<double>* out) {
    for (int c = 0; c < d; ++c) {
      for (int k = 0; k < d; ++k) (*out)[c] += x[k] * double(factor[size_t(k) * d + c]);
    }
  }

  /// out, then lse.
  std::vector<double> ReferenceRow(const Sequence& s, uint64_t position, int head, const float* q) const {
    const int d = layout_.head_dim, kv_head = head / shape_.group;
    const uint32_t own = uint32_t(position / kPageTokens);
    const float scale = 1 / std::sqrt(float(d));
    const Memory mapped = Map(q, kv_head);
    const auto& inner = static_cast<const hack::HackCodec&>(rotated().inner(kLayer));
    double max = -INFINITY, sum = 0;
    std::vector<double> in_space(d), plain(d);
    const auto rescale = [&](double to) {
      const double factor = max == -INFINITY ? 0 : std::exp(max - to);
      sum *= factor;
      for (double& x : in_space) x *= factor;
      for (double& x : plain) x *= factor;
      max = to;
    };
    for (uint32_t j = 0; j <= own; ++j) {
      const Page& page = s.pages[j];
      const bool near = own - j <= uint32_t(shape_.lag_pages);
      const bool raw = page.encoded == nullptr || (near && page.raw != nullptr);
      if (!raw) {
        float page_max = -INFINITY, page_sum = 0;
        Memory acc = zack::MakeMemory(d * sizeof(float));
        std::memset(acc.get(), 0, d * sizeof(float));
        const uint8_t* const encoded = page.encoded.get();
        PageAttentionTask task;
        task.q = reinterpret_cast<const float*>(mapped.get());
        task.rows = 1;
        task.scale = scale;
        task.layer = kLayer;
        task.kv_head = kv_head;
        task.pages = {&encoded, 1};
        hack::ReferenceAttend(inner.format(), task, {&page_max, &page_sum, reinterpret_cast<float*>(acc.get())});
        if (page_max > max) rescale(page_max);
        const double factor = std::exp(page_max - max);
        sum += factor * page_sum;
        for (int c = 0; c < d; ++c) in_space[c] += factor * reinterpret_cast<const float*>(acc.get())[c];
        continue;
      }
      const int seen = j == own ? int(position % kPageTokens) + 1 : kPageTokens;
      for (int t = 0; t < seen; ++t) {
        const uint8_t* const k = page.raw.get() + layout_.raw_offset(0, kv_head, t);
        const uint8_t* const v = page.raw.get() + layout_.raw_offset(1, kv_head, t);
        double score = 0;
        for (int c = 0; c < d; ++c) score += double(q[c]) * LoadElement(k, shape_.dtype, c);
        score *= scale;
        if (score > max) rescale(score);
        const double p = std::exp(score - max);
        sum += p;
        for (int c = 0; c < d; ++c) plain[c] += p * LoadElement(v, shape_.dtype, c);
      }
    }
    const zack::HeadRotation& rotation = rotated().rotation(kLayer, kv_head);
    std::vector<double> out = shape_.fold == "1" ? in_space : plain;
    if (shape_.fold == "1") {
      Multiply(plain, rotation.encode[1], d, &out);
    } else {
      Multiply(in_space, rotation.decode[1], d, &out);
    }
    for (double& x : out) x /= sum;
    out.push_back(max + std::log(sum));
    return out;
  }

  const Shape shape_;
  std::mt19937_64 random_;
  PageLayout layout_;
  std::unique_ptr<Codec> codec_;
  std::vector<Sequence> sequences_;
  std::vector<uint16_t> q16_;
  std::vector<float> q_;
  int tokens_ = 0;
};

class ZackHackDevice : public GpuTest {
 protected:
  void Check(const Shape& shape, uint64_t seed, bool captured = false) {
    SCOPED_TRACE(absl::StrCat(shape.Name(), " seed ", seed));
    World world(shape, seed);
    std::vector<double> wanted, wanted_lse;
    world.Reference(&wanted, &wanted_lse);
    std::vector<float> out, lse;
    world.Run(captured, &out, &lse);
    ASSERT_EQ(out.size(), wanted.size());
    double error = 0, norm = 0, worst_lse = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      error += (out[i] - wanted[i]) * (out[i] - wanted[i]), norm += wanted[i] * wanted[i];
    }
    for (size_t i = 0; i < lse.size(); ++i) {
      worst_lse = std::max(worst_lse, std::abs(lse[i] - wanted_lse[i]) / (1 + std::abs(wanted_lse[i])));
    }
    const double relative = std::sqrt(error / norm);
    worst_ = std::max(worst_, std::isnan(relative) ? INFINITY : relative);
    EXPECT_LE(relative, shape.dtype == DType::kFloat16 ? 1e-3 : 4e-3);
    EXPECT_LE(worst_lse, 1e-3);
  }
  void TearDown() override { RecordProperty("worst", absl::StrCat(worst_)); }
  double worst_ = 0;
};

TEST_F(ZackHackDevice, RandomBatches) {
  std::mt19937 random(1);
  const char* const bytes[] = {"56", "48", "32", "72", "100", "130"};
  for (int trial = 0; trial < 40; ++trial) {
    Shape shape;
    shape.mode = random() % 2 == 0 ? "joint" : "balanced";
    shape.bytes = bytes[random() % std::size(bytes)];
    shape.fold = random() % 4 == 0 ? "1" : "0";
    shape.dtype = random() % 3 == 0 ? DType::kBFloat16 : DType::kFloat16;
    shape.head_dim = random() % 3 == 0 ? 64 : 128;
    shape.kv_heads = 1 + random() % 3;
    shape.group = 1 + random() % 16;
    shape.lag_pages = random() % 3;
    shape.multiprocessors = random() % 2 == 0 ? 132 : 1 + int(random() % 40);
    shape.q_std = std::exp(float(random() % 4) - 2);
    const int sequences = 1 + random() % 3;
    for (int i = 0; i < sequences; ++i) {
      const uint64_t context = 1 + random() % 1200;
      shape.sequences.push_back({context, 1 + int(random() % std::min<uint64_t>(context, random() % 2 ? 1 : 16))});
    }
    Check(shape, trial, trial % 4 == 0);
  }
}

TEST_F(ZackHackDevice, ContextsAtPageBoundaries) {
  for (const char* bytes : {"56", "48"}) {
    for (const uint64_t context : {1, 16, 17, 63, 64, 65, 128, 129, 192, 193, 256, 320}) {
      for (const int tokens : {1, 2, 16}) {
        if (uint64_t(tokens) > context) continue;
        Shape shape;
        shape.bytes = bytes;
        shape.lag_pages = 1;
        shape.sequences = {{context, tokens}};
        Check(shape, context);
      }
    }
  }
}

TEST_F(ZackHackDevice, EveryGroup) {
  for (int group = 1; group <= 16; ++group) {
    Shape shape;
    shape.group = group;
    shape.sequences = {{700, 1}, {130, 3}};
    Check(shape, group);
  }
}

TEST_F(ZackHackDevice, HardKeysAndQueries) {
  for (const char* mode : {"joint", "balanced"}) {
    for (const Keys keys : {Keys::kZero, Keys::kConstant, Keys::kOneHot}) {
      Shape shape;
      shape.mode = mode;
      shape.keys = keys;
      shape.sequences = {{900, 1}, {64, 1}, {350, 5}};
      Check(shape, 7);
    }
    for (const float q_std : {0.f, 8.f}) {
      Shape shape;
      shape.mode = mode;
      shape.q_std = q_std;
      shape.sequences = {{900, 1}};
      Check(shape, 8);
    }
  }
}

TEST_F(ZackHackDevice, HoweverTheWorkIsSplit) {
  for (const int blocks : {1, 2, 3, 7, 32, 131, 264}) {
    for (const bool holes : {false, true}) {
      Shape shape;
      shape.kv_heads = 8;
      shape.holes = holes;
      shape.multiprocessors = blocks;
      shape.sequences = {{2000, 1}, {300, 1}, {65, 1}};
      Check(shape, 11);
    }
  }
}

}  // namespace
}  // namespace kvmanager::zack_hack
