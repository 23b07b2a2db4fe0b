// Batches on a GPU by way of device steps, for tests of codecs that map queries and outputs: random pages in both forms
// in shuffled slots, and what a test's own reference says of each row.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/device_step.h"
#include "codecs/codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager {

enum class StepKeys { kRandom, kZero, kConstant, kOneHot };

struct StepShape {
  std::string mode = "joint", fold = "0";
  DType dtype = DType::kFloat16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int lag_pages = 2;
  int multiprocessors = 132;
  float q_std = 1;
  StepKeys keys = StepKeys::kRandom;
  bool holes = true;     // some pages far back have no encoded form
  int pages_made = 0;    // of those far back, which are then pages of these again and again; 0: all are
  int rows_checked = 0;  // of each sequence; 0: all
  std::vector<std::pair<uint64_t, int>> sequences;  // context with the query tokens, query tokens

  std::string Name() const {
    return absl::StrCat(mode, " fold ", fold, " dtype ", int(dtype), " d ", head_dim, " heads ", kv_heads, " x ", group,
                        " lag ", lag_pages, " blocks ", multiprocessors, " q ", q_std, " keys ", int(keys), " first ",
                        sequences[0].first, " ", sequences[0].second);
  }
  PageLayout layout() const {
    PageLayout layout;
    layout.dtype = dtype;
    layout.kv_heads = uint16_t(kv_heads);
    layout.head_dim = uint16_t(head_dim);
    layout.page_tokens = 64;
    return layout;
  }
  int query_heads() const { return kv_heads * group; }
};

/// `base`, with what a codec's own shape says besides.
template <class Shape>
Shape Like(const StepShape& base, Shape own = {}) {
  static_cast<StepShape&>(own) = base;
  return own;
}

// Shapes that the test of every codec has.

/// Up to three sequences of few query tokens.
inline StepShape RandomStepShape(std::mt19937& random) {
  StepShape shape;
  shape.mode = random() % 2 == 0 ? "joint" : "balanced";
  shape.fold = random() % 4 == 0 ? "1" : "0";
  shape.dtype = random() % 3 == 0 ? DType::kBFloat16 : DType::kFloat16;
  shape.head_dim = random() % 3 == 0 ? 64 : 128;
  shape.kv_heads = 1 + int(random() % 3);
  shape.group = 1 + int(random() % 16);
  shape.lag_pages = int(random() % 3);
  shape.multiprocessors = random() % 2 == 0 ? 132 : 1 + int(random() % 40);
  shape.q_std = std::exp(float(random() % 4) - 2);
  const int sequences = 1 + int(random() % 3);
  for (int i = 0; i < sequences; ++i) {
    const uint64_t context = 1 + random() % 1200;
    shape.sequences.push_back({context, 1 + int(random() % std::min<uint64_t>(context, random() % 2 ? 1 : 16))});
  }
  return shape;
}
/// Sequences of many query tokens, which kernels of their own serve, also beside one of few.
inline StepShape RandomLongShape(std::mt19937& random) {
  StepShape shape = RandomStepShape(random);
  shape.kv_heads = 1 + int(random() % 2);
  shape.group = 1 + int(random() % 8);
  const size_t sequences = shape.sequences.size();
  shape.sequences.clear();
  for (size_t i = 0; i < sequences; ++i) {
    const int tokens = i == 1 ? 1 + int(random() % 16) : 64 + int(random() % 100);
    shape.sequences.push_back({uint64_t(tokens) + random() % 700, tokens});
  }
  return shape;
}
inline std::vector<StepShape> ShapesAtPageBoundaries() {
  std::vector<StepShape> shapes;
  for (const uint64_t context : {1, 16, 17, 63, 64, 65, 128, 129, 192, 193, 256, 320}) {
    for (const int tokens : {1, 2, 16}) {
      if (uint64_t(tokens) > context) continue;
      StepShape& shape = shapes.emplace_back();
      shape.lag_pages = 1;
      shape.sequences = {{context, tokens}};
    }
  }
  return shapes;
}
inline std::vector<StepShape> ShapesOfEveryGroup() {
  std::vector<StepShape> shapes;
  for (int group = 1; group <= 16; ++group) {
    StepShape& shape = shapes.emplace_back();
    shape.group = group;
    shape.sequences = {{700, 1}, {130, 3}};
  }
  return shapes;
}
/// deviations: of q.
inline std::vector<StepShape> ShapesOfHardKeysAndQueries(const std::vector<float>& deviations) {
  std::vector<StepShape> shapes;
  for (const char* const mode : {"joint", "balanced"}) {
    for (const StepKeys keys : {StepKeys::kZero, StepKeys::kConstant, StepKeys::kOneHot}) {
      StepShape& shape = shapes.emplace_back();
      shape.mode = mode;
      shape.keys = keys;
      shape.sequences = {{900, 1}, {64, 1}, {350, 5}};
    }
    for (const float deviation : deviations) {
      StepShape& shape = shapes.emplace_back();
      shape.mode = mode;
      shape.q_std = deviation;
      shape.sequences = {{900, 1}};
    }
  }
  return shapes;
}
inline std::vector<StepShape> ShapesHoweverSplit() {
  std::vector<StepShape> shapes;
  for (const int blocks : {1, 2, 3, 7, 32, 131, 264}) {
    for (const bool holes : {false, true}) {
      StepShape& shape = shapes.emplace_back();
      shape.kv_heads = 8;
      shape.holes = holes;
      shape.multiprocessors = blocks;
      shape.sequences = {{2000, 1}, {300, 1}, {65, 1}};
    }
  }
  return shapes;
}

/// Long contexts: of generated tokens, and last of a prompt's chunk. Of few pages and checked rows, so that the host
/// has little to do.
inline std::vector<StepShape> ShapesOfLongContexts() {
#ifdef KVMANAGER_SANITIZED
  constexpr int kShorter = 16, kPages = 24, kChunk = 128;
#else
  constexpr int kShorter = 1, kPages = 96, kChunk = 2048;
#endif
  StepShape shape;
  shape.kv_heads = 4;
  shape.pages_made = kPages;
  std::vector<StepShape> shapes(3, shape);
  shapes[0].sequences = {{131072 / kShorter, 1}};
  shapes[0].rows_checked = 4;
  for (uint64_t i = 0; i < 4; ++i) shapes[1].sequences.push_back({32768 / kShorter - 13 * i, 1});
  shapes[1].rows_checked = 2;
  shapes[2].sequences = {{32768 / kShorter + kChunk, kChunk}};
  shapes[2].rows_checked = 3;
  shapes[2].holes = false;  // each would be runs of its own in every tile
  return shapes;
}
/// A block that attends by many query tokens to so many pages that all places in shared memory are used again, and
/// their barriers go around twice; little enough for a tool that looks at every access.
inline StepShape ShapeThatReusesPlaces() {
  StepShape shape;
  shape.kv_heads = shape.group = 1;
  shape.lag_pages = 1;
  shape.holes = false;
  shape.multiprocessors = 1;
  shape.sequences = {{64 * 41, 64}};
  return shape;
}

class StepWorld {
 public:
  static constexpr int kLayer = 1, kLayers = 2, kPageTokens = 64;
  /// Changes a raw page that is about to be appended.
  using PageChange = std::function<void(const Codec& codec, std::mt19937_64& random, uint8_t* raw)>;

  virtual ~StepWorld() = default;

  /// Steps on the device, `captured` in a graph: out as floats, lse.
  void Run(bool captured, std::vector<float>* out, std::vector<float>* lse) {
    const std::unique_ptr<DeviceCodec> device_codec = codec_->NewDeviceCodec();
    ASSERT_NE(device_codec, nullptr);
    const size_t raw_bytes = layout_.raw_bytes(), encoded_bytes = codec_->info().encoded_bytes;
    const size_t slot_bytes = (std::max(raw_bytes, encoded_bytes) + 255) / 256 * 256;
    size_t pages = 0;
    for (const Sequence& s : sequences_) pages += s.pages.size();
    std::vector<uint32_t> order(bytes_.size());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<uint8_t> pool(order.size() * slot_bytes, 0xff);  // NaN wherever nothing was written
    TestArray<uint8_t> d_pool(pool.size());
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    DeviceStep::Options o;
    o.stream = stream;
    o.pool = d_pool.data();
    o.layout = layout_;
    o.layers = kLayers;
    o.query_heads = shape_.query_heads();
    o.lag_pages = shape_.lag_pages;
    o.codec = device_codec.get();
    o.multiprocessors = shape_.multiprocessors;
    o.pages_max = 2 * pages + 16;
    o.sequences_max = int(sequences_.size());
    o.tokens_max = tokens_;
    auto step = DeviceStep::Create(o);
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<DeviceStep::Entry> entries;
    std::map<const uint8_t*, size_t> places;  // in the pool
    for (const Sequence& s : sequences_) {
      std::vector<DevicePage> list;
      for (const Page& page : s.pages) {
        DevicePage place;
        const auto put = [&](const uint8_t* bytes, size_t size) -> uint32_t {
          if (bytes == nullptr) return DevicePage::kNoSlot;
          auto at = places.find(bytes);
          if (at == places.end()) {
            at = places.emplace(bytes, order[places.size()]).first;
            std::memcpy(pool.data() + at->second * slot_bytes, bytes, size);
          }
          return uint32_t(at->second * slot_bytes / device::kSlotUnitBytes);
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
    TestArray<uint16_t> d_q(q16_.size()), d_out(q16_.size());
    TestArray<float> d_lse(q16_.size() / layout_.head_dim);
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

  /// The same of checked rows on the host, one row behind the other.
  void Reference(std::vector<double>* out, std::vector<double>* lse) const {
    const int d = layout_.head_dim;
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < shape_.query_heads(); ++head, ++row) {
          if (!checked_[row]) continue;
          const std::vector<double> one = ReferenceRow(s, s.first_position + token, head, &q_[row * d]);
          out->insert(out->end(), one.begin(), one.end() - 1);
          lse->push_back(one.back());
        }
      }
    }
  }

  /// Steps on the device against the reference: relative L2 of all checked outputs, and the largest error of lse.
  struct Distance {
    double relative = INFINITY, lse = INFINITY;
  };
  Distance Compare(bool captured) {
    std::vector<double> wanted, wanted_lse;
    Reference(&wanted, &wanted_lse);
    std::vector<float> out, lse;
    Run(captured, &out, &lse);
    if (lse.size() != checked_.size()) return {};
    double error = 0, norm = 0, worst_lse = 0;
    const size_t d = layout_.head_dim;
    for (size_t row = 0, at = 0; row < lse.size(); ++row) {
      if (!checked_[row]) continue;
      for (size_t c = 0; c < d; ++c) {
        const double want = wanted[at * d + c], got = out[row * d + c];
        error += (got - want) * (got - want), norm += want * want;
      }
      const double of_lse = std::abs(lse[row] - wanted_lse[at]) / (1 + std::abs(wanted_lse[at]));
      worst_lse = std::isnan(of_lse) ? INFINITY : std::max(worst_lse, of_lse);
      ++at;
    }
    const double relative = std::sqrt(error / norm);
    return {std::isnan(relative) ? INFINITY : relative, worst_lse};
  }

 protected:
  struct Page {
    const uint8_t *raw = nullptr, *encoded = nullptr;  // nullptr: not there
    const uint8_t* appended = nullptr;                 // what both forms were made of
  };
  struct Sequence {
    std::vector<Page> pages;
    uint64_t first_position;
    int tokens;
  };
  StepWorld(const StepShape& shape, std::unique_ptr<Codec> codec, uint64_t seed, PageChange change = nullptr)
      : shape_(shape), random_(seed), layout_(shape.layout()), codec_(std::move(codec)), change_(std::move(change)) {
    for (const auto& [context, tokens] : shape.sequences) AddSequence(context, tokens);
    std::normal_distribution<float> normal(0, shape.q_std);
    q16_.resize(size_t(tokens_) * shape_.query_heads() * shape.head_dim);
    q_.resize(q16_.size());
    for (size_t i = 0; i < q_.size(); ++i) StoreElement(q16_.data(), shape.dtype, i, normal(random_));
    if (shape.keys == StepKeys::kOneHot) PointAtTokens();
    ChooseRows();
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = LoadElement(q16_.data(), shape.dtype, i);
  }

  /// The output of a row in double precision, and then its logarithm of the sum of exponentials.
  virtual std::vector<double> ReferenceRow(const Sequence& s, uint64_t position, int head, const float* q) const = 0;

  /// Whether a query on page `own` reads page j raw.
  bool ReadsRaw(const Sequence& s, uint32_t own, uint32_t j) const {
    const Page& page = s.pages[j];
    const bool near = own - j <= uint32_t(shape_.lag_pages);
    return page.encoded == nullptr || (near && page.raw != nullptr);
  }
  const Codec& codec() const { return *codec_; }
  const PageLayout& layout() const { return layout_; }

 private:
  void AddSequence(uint64_t context, int tokens) {
    Sequence s;
    s.first_position = context - uint64_t(tokens), s.tokens = tokens;
    const size_t pages = (context + kPageTokens - 1) / kPageTokens;
    for (size_t j = 0; j < pages; ++j) {
      const int filled = int(std::min<uint64_t>(kPageTokens, context - j * kPageTokens));
      const bool far = (j + 1 + size_t(shape_.lag_pages)) * kPageTokens <= s.first_position;
      if (far && shape_.pages_made > 0 && far_.size() == size_t(shape_.pages_made)) {
        s.pages.push_back(far_[random_() % far_.size()]);
        continue;
      }
      // The query's own page is raw: also of the first of several query tokens.
      const bool may_encode = filled == kPageTokens && (j + 1) * kPageTokens <= s.first_position;
      Page page;
      page.appended = Keep(RandomPage(filled));
      if (may_encode && (far || random_() % 2 == 0) && !(shape_.holes && random_() % 8 == 0)) {
        zack::EncodedPage encoded = zack::EncodeOne(*codec_, kLayer, page.appended, j * kPageTokens);
        KV_CHECK(!encoded.declined);
        page.encoded = Keep(std::move(encoded.bytes));
      }
      if (page.encoded == nullptr || !far) page.raw = page.appended;
      s.pages.push_back(page);
      if (far && shape_.pages_made > 0) far_.push_back(page);
    }
    tokens_ += tokens;
    sequences_.push_back(std::move(s));
  }

  zack::Memory RandomPage(int filled) {
    zack::Memory raw = zack::RandomRawPage(layout_, random_, 0.5f);
    if (change_) change_(*codec_, random_, raw.get());
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < layout_.kv_heads; ++head) {
        for (int t = 0; t < kPageTokens; ++t) {
          for (int c = 0; c < layout_.head_dim; ++c) {
            uint8_t* const at = raw.get() + layout_.raw_offset(side, head, t);
            if (shape_.keys == StepKeys::kZero && side == 0) StoreElement(at, shape_.dtype, c, 0);
            if (shape_.keys == StepKeys::kConstant) StoreElement(at, shape_.dtype, c, float(c % 7) - 3);
            if (t >= filled) StoreElement(at, shape_.dtype, c, NAN);
          }
        }
      }
    }
    return raw;
  }
  const uint8_t* Keep(zack::Memory bytes) { return bytes_.emplace_back(std::move(bytes)).get(); }

  /// Every row's q is a multiple of one key that it sees, in whatever form it reads that.
  void PointAtTokens() {
    size_t row = 0;
    for (const Sequence& s : sequences_) {
      for (int token = 0; token < s.tokens; ++token) {
        for (int head = 0; head < shape_.query_heads(); ++head, ++row) {
          const uint64_t at = random_() % (s.first_position + token + 1);
          const uint8_t* const k =
              s.pages[at / kPageTokens].appended + layout_.raw_offset(0, head / shape_.group, int(at % kPageTokens));
          for (int c = 0; c < layout_.head_dim; ++c) {
            StoreElement(q16_.data(), shape_.dtype, row * layout_.head_dim + c, 20 * LoadElement(k, shape_.dtype, c));
          }
        }
      }
    }
  }

  void ChooseRows() {
    for (const Sequence& s : sequences_) {
      const size_t first = checked_.size(), rows = size_t(s.tokens) * shape_.query_heads();
      checked_.resize(first + rows, shape_.rows_checked == 0);
      for (int i = 0; i < shape_.rows_checked; ++i) checked_[first + random_() % rows] = true;
    }
  }

  const StepShape shape_;
  std::mt19937_64 random_;
  const PageLayout layout_;
  const std::unique_ptr<Codec> codec_;
  const PageChange change_;
  std::vector<zack::Memory> bytes_;  // of pages, which sequences may share
  std::vector<Page> far_;            // that are attended to as far pages
  std::vector<Sequence> sequences_;
  std::vector<bool> checked_;  // [rows]
  std::vector<uint16_t> q16_;
  std::vector<float> q_;
  int tokens_ = 0;
};

/// Of the relative L2, of float16 and of bfloat16.
struct StepBounds {
  double half = 1e-3, bfloat16 = 4e-3;
  double lse = 1e-3;  // of 1 and more
};

class MappedStepTest : public GpuTest {
 protected:
  void Check(StepWorld& world, const std::string& name, const StepShape& shape, bool captured,
             const StepBounds& bounds = {}) {
    SCOPED_TRACE(name);
    const StepWorld::Distance distance = world.Compare(captured);
    worst_ = std::max(worst_, distance.relative);
    const double bound = shape.dtype == DType::kFloat16 ? bounds.half : bounds.bfloat16;
    EXPECT_LE(distance.relative, bound);
    EXPECT_LE(distance.lse, bounds.lse);
  }
  void TearDown() override { RecordProperty("worst", absl::StrCat(worst_)); }

  double worst_ = 0;
};

}  // namespace kvmanager
