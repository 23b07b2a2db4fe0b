#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codecs/pq/block_cache.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/selection.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::pq {
namespace {

template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& from) : count_(from.size()), bytes_(from.size() * sizeof(T)) {
    bytes_.Fill(from.data(), from.size() * sizeof(T));
  }
  T* get() const { return bytes_.as<T>(); }
  std::vector<T> Read() const {
    std::vector<T> to(count_);
    EXPECT_EQ(cudaMemcpy(to.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return to;
  }

 private:
  const size_t count_;
  DeviceBytes bytes_;
};

DeviceShape MakeShape(int kv_heads, int group, int head_dim, int m, int bits, bool bfloat16 = false,
                      int page_tokens = 64) {
  DeviceShape shape;
  shape.kv_heads = kv_heads;
  shape.query_heads = kv_heads * group;
  shape.head_dim = head_dim;
  shape.page_tokens = page_tokens;
  shape.m = m;
  shape.bits = bits;
  shape.bfloat16 = bfloat16;
  return shape;
}

uint16_t Element(float x, bool bfloat16) { return bfloat16 ? FloatToBFloat16(x) : FloatToHalf(x); }
float Value(uint16_t bits, bool bfloat16) { return bfloat16 ? BFloat16ToFloat(bits) : HalfToFloat(bits); }

/// Centroids that `draw` gives, and half norms as training makes them.
template <typename Draw>
Codebook MakeBook(const DeviceShape& shape, Draw draw) {
  Codebook book(shape.kv_heads, shape.m, shape.count(), shape.width());
  for (int h = 0; h < shape.kv_heads; ++h) {
    for (int s = 0; s < shape.m; ++s) {
      for (int c = 0; c < book.count; ++c) {
        float sum = 0;
        for (int j = 0; j < book.width; ++j) {
          const float x = draw(c, j);
          book.centroids_of(h, s)[j * book.count + c] = x;
          const float square = x * x;
          sum = sum + square;
        }
        book.half_norms_of(h, s)[c] = sum / 2;
      }
    }
  }
  return book;
}

/// A codebook on the device, and memory for chunks of codes behind it.
class Book {
 public:
  Book(const DeviceShape& shape, const Codebook& book, uint32_t chunks)
      : chunk_at_((shape.book_bytes() + 255) / 256 * 256),
        chunk_bytes_(shape.chunk_bytes()),
        bytes_(chunk_at_ + chunks * chunk_bytes_),
        at_({bytes_.as<uint8_t>()}) {
    bytes_.Set(0xFF);
    EXPECT_EQ(shape.half_norms_at(), book.centroids.size() * 4);
    bytes_.Fill(book.centroids.data(), book.centroids.size() * 4);
    EXPECT_EQ(cudaMemcpy(get() + shape.half_norms_at(), book.half_norms.data(), book.half_norms.size() * 4,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(LaunchPqPrepareBooks(shape, at_.get(), 1, nullptr), 0);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  uint8_t* get() const { return bytes_.as<uint8_t>(); }
  uint32_t* chunk(uint32_t i) const { return reinterpret_cast<uint32_t*>(get() + chunk_at_ + i * chunk_bytes_); }
  /// An entry of the table of indexes.
  uint32_t unit() const { return 0; }
  uint32_t chunk_unit(uint32_t i) const { return uint32_t((chunk_at_ + i * chunk_bytes_) / kRowUnitBytes); }

 private:
  const size_t chunk_at_, chunk_bytes_;
  DeviceBytes bytes_;
  OnDevice<uint8_t*> at_;
};

class PqGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) ASSERT_EQ(PrepareSelect(), 0);
  }
  std::mt19937 random_{1};

  float Normal(float deviation = 1) { return std::normal_distribution<float>(0, deviation)(random_); }

  /// Codes of `tokens` tokens of drawn keys, from token `first` on, equal those of the CPU.
  template <typename Draw>
  void CompareCodes(const DeviceShape& shape, const Codebook& book, uint32_t first, uint32_t tokens, Draw draw) {
    const uint32_t pages = (first + tokens + shape.page_tokens - 1) / shape.page_tokens;
    const size_t page_elements = size_t(2) * shape.kv_heads * shape.page_tokens * shape.head_dim;
    std::vector<uint16_t> pool(pages * page_elements, 0x7FFF);  // no numbers
    std::vector<uint32_t> slots(pages);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    std::vector<float> keys(size_t(shape.kv_heads) * tokens * shape.head_dim);
    for (int h = 0; h < shape.kv_heads; ++h) {
      for (uint32_t t = 0; t < tokens; ++t) {
        const uint32_t token = first + t;
        for (int c = 0; c < shape.head_dim; ++c) {
          const uint16_t x = Element(draw(h, t, c), shape.bfloat16);
          pool[slots[token / shape.page_tokens] * page_elements +
               (size_t(h) * shape.page_tokens + token % shape.page_tokens) * shape.head_dim + c] = x;
          keys[(size_t(h) * tokens + t) * shape.head_dim + c] = Value(x, shape.bfloat16);
        }
      }
    }
    for (uint32_t& slot : slots) slot *= uint32_t(page_elements * 2 / kRowUnitBytes);
    const Book on_device(shape, book, 1);
    const OnDevice<uint16_t> d_pool(pool);
    const OnDevice<uint32_t> d_slots(slots);
    constexpr uint32_t kGuard = 0xA5A5A5A5;
    ASSERT_CUDA(cudaMemset(on_device.chunk(0), kGuard & 0xFF, shape.chunk_bytes()));
    constexpr uint32_t kIndex = 3;
    std::vector<uint32_t> index(kIndex + 2 + first / kCodeChunkTokens, kNoUnit);
    index[kIndex] = on_device.unit(), index.back() = on_device.chunk_unit(0);
    const OnDevice<uint32_t> d_index(index);
    std::vector<DeviceEncodeCodes> items;
    for (uint32_t t = 0; t < tokens; t += kEncodeTokensMax) {
      items.push_back({kIndex, 0, first + t, std::min(kEncodeTokensMax, tokens - t)});
    }
    const OnDevice<DeviceEncodeCodes> d_items(items);
    ASSERT_EQ(LaunchPqEncode(shape, reinterpret_cast<const uint8_t*>(d_pool.get()), d_slots.get(),
                             {on_device.get(), d_index.get()}, d_items.get(), uint32_t(items.size()), nullptr),
              0);
    ASSERT_CUDA(cudaDeviceSynchronize());
    std::vector<uint32_t> got(shape.chunk_bytes() / 4);
    ASSERT_CUDA(cudaMemcpy(got.data(), on_device.chunk(0), shape.chunk_bytes(), cudaMemcpyDeviceToHost));
    const Kernels& kernels = KernelsOf(BestIsa());
    const int width = shape.width();
    for (int h = 0; h < shape.kv_heads; ++h) {
      std::vector<uint32_t> wanted(size_t(shape.words()) * tokens);
      for (int s = 0; s < shape.m; ++s) {
        std::vector<float> x(size_t(tokens) * width);
        for (uint32_t t = 0; t < tokens; ++t) {
          std::memcpy(&x[size_t(t) * width], &keys[(size_t(h) * tokens + t) * shape.head_dim + s * width], width * 4);
        }
        std::vector<uint8_t> codes(tokens);
        kernels.nearest(x.data(), tokens, width, book.centroids_of(h, s), book.half_norms_of(h, s), book.count,
                        codes.data());
        for (uint32_t t = 0; t < tokens; ++t) wanted[size_t(s / 4) * tokens + t] |= uint32_t{codes[t]} << 8 * (s % 4);
      }
      for (int w = 0; w < shape.words(); ++w) {
        const uint32_t* row = &got[(size_t(h) * shape.words() + w) * kCodeChunkTokens];
        for (uint32_t t = 0; t < kCodeChunkTokens; ++t) {
          const uint32_t in_item = t - first % kCodeChunkTokens;
          ASSERT_EQ(row[t], in_item < tokens ? wanted[size_t(w) * tokens + in_item] : kGuard)
              << "head " << h << ", word " << w << ", token " << t;
        }
      }
    }
  }
};

TEST_F(PqGpu, CodesAreTheCpus) {
  struct Case {
    int head_dim, m, bits;
  };
  for (const Case& c : {Case{128, 4, 8}, Case{128, 8, 8}, Case{128, 2, 6}, Case{64, 4, 4}, Case{64, 1, 5},
                        Case{128, 32, 8}, Case{256, 4, 7}, Case{96, 3, 8}, Case{128, 1, 8}}) {
    for (const bool bfloat16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.head_dim << " " << c.m << " " << c.bits << " " << bfloat16);
      const DeviceShape shape = MakeShape(3, 1, c.head_dim, c.m, c.bits, bfloat16);
      const Codebook book = MakeBook(shape, [&](int, int) { return Normal(); });
      CompareCodes(shape, book, 1024 + 100, 700, [&](int, uint32_t, int) { return Normal(); });
      CompareCodes(shape, book, 0, 1, [&](int, uint32_t, int) { return Normal(3); });
      CompareCodes(shape, book, 31, 33, [&](int, uint32_t, int) { return Normal(1e-3f); });
    }
  }
}

TEST_F(PqGpu, CodesOfHostileKeysAreTheCpus) {
  for (const bool bfloat16 : {false, true}) {
    const DeviceShape shape = MakeShape(2, 1, 128, 4, 8, bfloat16);
    const auto compare = [&](const char* what, const Codebook& book, auto draw) {
      SCOPED_TRACE(testing::Message() << what << " " << bfloat16);
      CompareCodes(shape, book, 5, 600, draw);
    };
    const Codebook random = MakeBook(shape, [&](int, int) { return Normal(); });
    compare("zero", random, [](int, uint32_t, int) { return 0.0f; });
    // Every centroid twice, or all the same: ties go to the lower.
    std::vector<float> drawn(256 * 128);
    for (float& x : drawn) x = Normal();
    const Codebook twice = MakeBook(shape, [&](int c, int j) { return drawn[(c / 2) * 128 + j]; });
    compare("twice", twice, [&](int, uint32_t, int) { return Normal(); });
    compare("equal", MakeBook(shape, [](int, int) { return 0.5f; }), [&](int, uint32_t, int) { return Normal(); });
    // Whole numbers, half way between centroids.
    compare("half way", MakeBook(shape, [](int c, int j) { return float((c >> (j % 8)) & 1); }),
            [&](int, uint32_t, int) { return float(random_() % 3) / 2; });
    // Nearly equal centroids: rounded to 16 bits they are alike.
    compare("near", MakeBook(shape, [&](int c, int j) { return drawn[j] + float(c) * 1e-6f; }),
            [&](int, uint32_t, int) { return Normal(); });
    compare("large", MakeBook(shape, [&](int, int) { return Normal(20000); }),
            [&](int, uint32_t, int) { return std::clamp(Normal(20000), -65504.0f, 65504.0f); });
    compare("small", MakeBook(shape, [&](int, int) { return Normal(1e-7f); }),
            [&](int, uint32_t, int) { return Normal(1e-6f); });
    if (!bfloat16) continue;
    compare("too large", MakeBook(shape, [&](int, int) { return Normal(1e30f); }),
            [&](int, uint32_t, int) { return Normal(1e30f); });
    compare("too small", MakeBook(shape, [&](int, int) { return Normal(1e-25f); }),
            [&](int, uint32_t, int) { return Normal(1e-25f); });
  }
}

// ---- sparse selection ----

struct Tokens {
  uint32_t sinks, middle, chosen, local;
  uint32_t all() const { return sinks + middle + local; }
};

/// Queries of one sequence, with codes at random, on both sides.
class Choice {
 public:
  Choice(const DeviceShape& shape, uint32_t tokens, float deviation, std::mt19937& random)
      : shape_(shape),
        tokens_(tokens),
        book_(MakeBook(shape, [&](int, int) { return std::normal_distribution<float>(0, 1)(random); })),
        random_(random) {
    codes_.resize(size_t(shape.kv_heads) * shape.m * tokens);
    for (uint8_t& c : codes_) c = uint8_t(random() % shape.count());
    q_.resize(size_t(kQueries) * shape.query_heads * shape.head_dim);
    for (uint16_t& x : q_) x = Element(std::normal_distribution<float>(0, deviation)(random), shape.bfloat16);
  }

  static constexpr int kQueries = 2;
  std::vector<uint8_t>& codes() { return codes_; }  // [kv_heads][m][tokens]
  std::vector<uint16_t>& q() { return q_; }
  Codebook& book() { return book_; }

  /// Each query has tokens of its own; both read from token 0 on.
  void Compare(const std::vector<Tokens>& queries, int blocks, float scale) {
    SCOPED_TRACE(testing::Message() << shape_.group() << " heads of a group, " << shape_.m << " sub-vectors of "
                                    << shape_.bits << " bits, " << blocks << " blocks, middle " << queries[0].middle
                                    << ", chosen " << queries[0].chosen);
    ASSERT_TRUE(CanSelectOnDevice(shape_));
    const uint32_t chunks = (tokens_ + kCodeChunkTokens - 1) / kCodeChunkTokens;
    std::vector<uint32_t> words(chunks * shape_.chunk_bytes() / 4, 0xFFFFFFFF);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      for (int w = 0; w < shape_.words(); ++w) {
        for (uint32_t t = 0; t < tokens_; ++t) {
          uint32_t word = 0;
          for (int s = 4 * w; s < std::min(4 * w + 4, shape_.m); ++s) word |= uint32_t{code(h, s, t)} << 8 * (s % 4);
          words[t / kCodeChunkTokens * (shape_.chunk_bytes() / 4) +
                (size_t(h) * shape_.words() + w) * kCodeChunkTokens + t % kCodeChunkTokens] = word;
        }
      }
    }
    // A codebook, and the chunks in any order.
    const Book book(shape_, book_, chunks);
    constexpr uint32_t kIndex = 5;
    std::vector<uint32_t> index(kIndex + 1 + chunks);
    index[kIndex] = book.unit();
    for (uint32_t i = 0; i < chunks; ++i) {
      index[kIndex + 1 + i] = book.chunk_unit(chunks - 1 - i);
      ASSERT_CUDA(cudaMemcpy(book.chunk(chunks - 1 - i), words.data() + i * (shape_.chunk_bytes() / 4),
                             shape_.chunk_bytes(), cudaMemcpyHostToDevice));
    }
    const OnDevice<uint32_t> d_index(index);
    const uint32_t pages = (tokens_ + shape_.page_tokens - 1) / shape_.page_tokens;
    const uint32_t page_units =
        uint32_t(4 * shape_.kv_heads * shape_.page_tokens * shape_.head_dim / int(kRowUnitBytes));
    std::vector<uint32_t> slots(pages);
    std::iota(slots.begin(), slots.end(), 7);
    std::shuffle(slots.begin(), slots.end(), random_);
    for (uint32_t& slot : slots) slot *= page_units;
    const OnDevice<uint32_t> d_slots(slots);
    const OnDevice<uint16_t> d_q(q_);

    std::vector<DeviceSelect> selects;
    uint32_t runs = 0, list = 0, middle_max = 0;
    for (size_t i = 0; i < queries.size(); ++i) {
      DeviceSelect s;
      s.index = kIndex;
      s.token = uint32_t(i);
      s.sinks = queries[i].sinks, s.middle = queries[i].middle, s.chosen = queries[i].chosen,
      s.local = queries[i].local;
      s.list = list;
      s.list_stride = (s.rows() + shape_.page_tokens - 1) / shape_.page_tokens * shape_.page_tokens;
      s.first_run = runs;
      runs += SelectRuns(s.middle) * shape_.kv_heads;
      list += s.list_stride * shape_.kv_heads;
      middle_max = std::max(middle_max, s.middle);
      selects.push_back(s);
    }
    const OnDevice<DeviceSelect> d_selects(selects);
    DeviceBytes scratch(SelectScratchBytes(shape_, runs));
    scratch.Set(0xFF);
    const OnDevice<uint32_t> rows(std::vector<uint32_t>(list, kNoUnit)), chosen(std::vector<uint32_t>(list, kNoUnit));
    SelectParams p;
    p.shape = shape_;
    p.slots = d_slots.get();
    p.index = {book.get(), d_index.get()};
    p.queries = d_selects.get();
    p.count = uint32_t(selects.size());
    p.q = d_q.get();
    p.scale = scale;
    p.scratch = scratch.as<uint8_t>();
    p.runs = runs;
    p.rows = rows.get();
    p.chosen = chosen.get();
    ASSERT_EQ(LaunchPqSelect(p, blocks, middle_max, nullptr), 0);
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint32_t> got_rows = rows.Read(), got = chosen.Read();
    for (size_t i = 0; i < queries.size(); ++i) {
      const DeviceSelect& s = selects[i];
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const std::vector<uint32_t> wanted = Reference(queries[i], int(i), h, scale);
        const uint32_t at = s.list + h * s.list_stride;
        ASSERT_EQ(std::vector<uint32_t>(got.begin() + at, got.begin() + at + wanted.size()), wanted)
            << "query " << i << ", head " << h;
        std::vector<uint32_t> tokens;
        for (uint32_t t = 0; t < s.sinks; ++t) tokens.push_back(t);
        tokens.insert(tokens.end(), wanted.begin(), wanted.end());
        for (uint32_t t = 0; t < s.local; ++t) tokens.push_back(s.sinks + s.middle + t);
        tokens.resize(s.list_stride, 0);
        for (size_t r = 0; r < tokens.size(); ++r) {
          const uint32_t in_page = tokens[r] % shape_.page_tokens;
          const size_t unit = slots[tokens[r] / shape_.page_tokens] +
                              (size_t(h) * shape_.page_tokens + in_page) * shape_.head_dim * 2 / kRowUnitBytes;
          ASSERT_EQ(got_rows[at + r], unit) << "row " << r;
        }
      }
    }
  }

 private:
  uint8_t& code(int head, int sub, uint32_t token) { return codes_[(size_t(head) * shape_.m + sub) * tokens_ + token]; }

  std::vector<uint32_t> Reference(const Tokens& tokens, int query, int head, float scale) {
    std::vector<float> q(size_t(shape_.group()) * shape_.head_dim);
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = Value(q_[(size_t(query) * shape_.query_heads + size_t(head) * shape_.group()) * shape_.head_dim + i],
                   shape_.bfloat16);
    }
    SelectionTask task;
    task.q = q.data();
    task.rows = shape_.group();
    task.scale = scale;
    task.kv_head = head;
    task.first = tokens.sinks;
    task.middle = tokens.middle;
    task.chosen = tokens.chosen;
    Parameters parameters;
    parameters.m = shape_.m;
    parameters.bits = shape_.bits;
    const SelectionScratch layout(parameters, task.rows, task.middle, task.chosen);
    std::vector<uint8_t> workspace(layout.bytes + 64);
    uint8_t* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    const CodeRun run = {&code(head, 0, tokens.sinks), tokens_, tokens.middle};
    const auto chosen = SelectByCodes(KernelsOf(BestIsa()), book_, task, absl::MakeConstSpan(&run, 1), layout, aligned);
    return {chosen.begin(), chosen.end()};
  }

  const DeviceShape shape_;
  const uint32_t tokens_;
  Codebook book_;
  std::mt19937& random_;
  std::vector<uint8_t> codes_;
  std::vector<uint16_t> q_;
};

#ifdef KVMANAGER_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

TEST_F(PqGpu, ChoosesAsTheCpu) {
  const std::vector<uint32_t> middles = {1, 5, 31, 33, 511, 512, 513, 2000, 9001};
  uint32_t n = 0;
  for (int group = 1; group <= 16; group += kSanitized ? 15 : 1) {
    for (const float deviation : {0.1f, 1.0f, 4.0f}) {
      if (kSanitized && deviation != 1.0f) continue;
      const uint32_t middle = middles[n++ % (kSanitized ? 4 : middles.size())];
      const DeviceShape shape =
          MakeShape(2, group, n % 2 ? 128 : 64, n % 3 ? 4 : 2, n % 4 ? 8 : 6, n % 2 == 0, n % 5 ? 64 : 128);
      Choice choice(shape, middle + 300, deviation, random_);
      const uint32_t sinks = random_() % 64;
      for (const uint32_t k : {1u, (middle + 1) / 2, std::max(middle, 2u) - 1, middle}) {
        choice.Compare({{sinks, middle, k, 77}, {32, 1 + middle / 3, 1 + middle / 9, 200}}, 1 << n % 4,
                       1 / std::sqrt(128.0f));
      }
    }
  }
}

TEST_F(PqGpu, EveryNumberOfSubVectorsAndBits) {
  for (const int m : {1, 2, 3, 4, 6, 8, 16, 32}) {
    for (const int bits : {4, 6, 8}) {
      for (const int group : {1, 4, 8}) {
        const DeviceShape shape = MakeShape(2, group, m % 3 ? 128 : 96, m, bits);
        Choice choice(shape, 3000, 1, random_);
        choice.Compare({{32, 2500, 250, 300}, {0, 700, 699, 1}}, m % 2 ? 1 : 2, 0.1f);
      }
    }
  }
}

TEST_F(PqGpu, LongContextsAreCutOverBlocks) {
  const DeviceShape shape = MakeShape(2, 4, 128, 4, 8);
  Choice choice(shape, 70000, 1, random_);
  for (const int blocks : {1, 2, 4, 8}) {
    choice.Compare({{32, 66000, 3300, 3300}, {32, 31100, 1636, 1636}}, blocks, 1 / std::sqrt(128.0f));
  }
}

TEST_F(PqGpu, HostileScores) {
  for (const int group : {1, 4, 6}) {
    const DeviceShape shape = MakeShape(2, group, 128, 4, 8, true);
    for (const float deviation : {0.0f, 1e-20f, 30.0f, 300.0f, 1e5f, 1e20f, 1e37f}) {
      Choice choice(shape, 6000, deviation, random_);
      choice.Compare({{32, 5500, 275, 400}, {1, 1111, 56, 56}}, 2, 1.0f);
    }
    // All tokens alike; two kinds alone; runs of tokens far below the others.
    Choice ties(shape, 6000, 1, random_);
    std::fill(ties.codes().begin(), ties.codes().end(), uint8_t{7});
    ties.Compare({{32, 5500, 275, 400}, {0, 513, 512, 56}}, 1, 1.0f);
    for (size_t i = 0; i < ties.codes().size(); ++i) ties.codes()[i] = i * 2654435761u % 7 == 0 ? 9 : 7;
    ties.Compare({{32, 5500, 1000, 400}, {3, 4000, 2001, 56}}, 4, 1.0f);
    for (size_t i = 0; i < ties.codes().size(); ++i) ties.codes()[i] = uint8_t(i / 700 * 37);
    for (const float scale : {1.0f, 20.0f, 1000.0f}) {
      ties.Compare({{32, 5500, 1000, 400}, {3, 4000, 3999, 56}}, 2, scale);
    }
  }
}

TEST_F(PqGpu, NothingToChoose) {
  Choice choice(MakeShape(2, 4, 128, 4, 8), 500, 1, random_);
  choice.Compare({{10, 0, 0, 5}, {32, 0, 0, 300}}, 1, 1.0f);
}

// ---- copies of blocks ----

TEST_F(PqGpu, CopiesOfBlocksAreTheCpus) {
  constexpr uint32_t kBlocks = 40, kQueries = 2;
  const DeviceShape shape = MakeShape(2, 1, 64, 4, 8);
  const size_t page_bytes = size_t(4) * shape.kv_heads * shape.page_tokens * shape.head_dim;
  const uint32_t page_units = uint32_t(page_bytes / kRowUnitBytes), pages = kBlocks * 2;
  for (const bool lru : {false, true}) {
    for (const uint32_t slot_count : {1u, 3u, 7u, 40u}) {
      SCOPED_TRACE(testing::Message() << (lru ? "lru " : "lfu ") << slot_count);
      const uint32_t heads = kQueries * shape.kv_heads;
      // The pages, then the copies, which lie elsewhere.
      std::vector<uint32_t> pool(pages * page_bytes / 4), slots(pages);
      for (uint32_t& x : pool) x = random_();
      for (uint32_t i = 0; i < pages; ++i) slots[i] = (i * 7 + 3) % pages * page_units;
      const OnDevice<uint32_t> d_pool(pool), d_slots(slots);
      const OnDevice<uint32_t> copies_at(std::vector<uint32_t>(kQueries * slot_count * 2 * page_bytes / 4));
      const OnDevice<uint32_t> cached(std::vector<uint32_t>(heads * kBlocks, kNoUnit));
      const OnDevice<DeviceCacheSlot> cache_slots(std::vector<DeviceCacheSlot>(heads * slot_count));
      const OnDevice<DeviceCacheCounts> counts{std::vector<DeviceCacheCounts>(heads)};
      const OnDevice<uint32_t> lists(std::vector<uint32_t>(heads * (1 + 2 * slot_count)));
      std::vector<DeviceCache> caches(heads);
      const uint32_t second_unit = pages * page_units;
      for (uint32_t i = 0; i < heads; ++i) {
        caches[i].cached = cached.get() + i * kBlocks;
        caches[i].slots = cache_slots.get() + i * slot_count;
        caches[i].counts = counts.get() + i;
        caches[i].copies = lists.get() + i * (1 + 2 * slot_count);
        caches[i].first_unit = second_unit + i / shape.kv_heads * slot_count * 2 * page_units;
      }
      const OnDevice<DeviceCache> d_caches(caches);
      std::vector<std::unique_ptr<BlockCache>> reference;
      std::vector<BlockCache::Counts> wanted(heads);
      for (uint32_t i = 0; i < heads; ++i) {
        reference.push_back(std::make_unique<BlockCache>(
            slot_count, 8, lru ? Parameters::CachePolicy::kLru : Parameters::CachePolicy::kLfu));
      }
      for (int step = 0; step < 30; ++step) {
        std::vector<DeviceSelect> selects(kQueries);
        std::vector<uint32_t> chosen;
        for (uint32_t qi = 0; qi < kQueries; ++qi) {
          DeviceSelect& s = selects[qi];
          const uint32_t tokens = (20 + random_() % 20) * kDeviceBlockTokens + random_() % 100;
          s.sinks = 3, s.local = 1, s.middle = tokens - 4;
          s.chosen = 1 + random_() % 60;
          s.list = uint32_t(chosen.size()), s.list_stride = 64;
          for (int h = 0; h < shape.kv_heads; ++h) {
            std::vector<uint32_t> mine;
            while (mine.size() < s.chosen) {
              // Few blocks, some more often than others.
              const uint32_t block = random_() % (1 + random_() % (tokens / kDeviceBlockTokens + 1));
              const uint32_t token = block * kDeviceBlockTokens + random_() % kDeviceBlockTokens;
              if (token < s.sinks + s.middle && token >= s.sinks) mine.push_back(token);
              std::sort(mine.begin(), mine.end());
              mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
            }
            std::vector<BlockCache::Use> uses;
            for (const uint32_t token : mine) {
              const uint64_t block = token / kDeviceBlockTokens;
              if (uses.empty() || uses.back().block != block) {
                uses.push_back({block, 0, (block + 1) * kDeviceBlockTokens <= tokens});
              }
              ++uses.back().tokens;
            }
            const uint32_t at = qi * shape.kv_heads + h;
            reference[at]->Update(
                uses, [](uint64_t block, uint8_t* to) { std::memcpy(to, &block, 8); }, &wanted[at]);
            mine.resize(64, kNoUnit);
            chosen.insert(chosen.end(), mine.begin(), mine.end());
          }
        }
        const OnDevice<DeviceSelect> d_selects(selects);
        const OnDevice<uint32_t> d_chosen(chosen);
        CacheParams p;
        p.shape = shape;
        p.pool = reinterpret_cast<const uint8_t*>(d_pool.get());
        p.second = reinterpret_cast<uint8_t*>(copies_at.get());
        p.second_unit = second_unit;
        p.slots = d_slots.get();
        p.queries = d_selects.get();
        p.count = kQueries;
        p.chosen = d_chosen.get();
        p.caches = d_caches.get();
        p.slot_count = p.admitted_max = slot_count;
        p.blocks_max = kBlocks;
        p.lru = lru;
        ASSERT_EQ(LaunchPqCacheUpdate(p, nullptr), 0);
        ASSERT_CUDA(cudaDeviceSynchronize());
      }
      const std::vector<uint32_t> got_cached = cached.Read(), data = copies_at.Read();
      const std::vector<DeviceCacheCounts> got = counts.Read();
      for (uint32_t i = 0; i < heads; ++i) {
        EXPECT_EQ(got[i].hits, wanted[i].hits);
        EXPECT_EQ(got[i].misses, wanted[i].misses);
        EXPECT_EQ(got[i].evictions, wanted[i].evictions);
        const int head = int(i) % shape.kv_heads;
        for (uint32_t block = 0; block < kBlocks; ++block) {
          const uint32_t unit = got_cached[i * kBlocks + block];
          ASSERT_EQ(unit != kNoUnit, reference[i]->Find(block) != nullptr) << block;
          if (unit == kNoUnit) continue;
          for (int page = 0; page < 2; ++page) {
            for (int side = 0; side < 2; ++side) {
              const size_t bytes = size_t(2) * shape.page_tokens * shape.head_dim;
              const size_t offset = (size_t(side) * shape.kv_heads + head) * bytes;
              const size_t from = slots[block * 2 + page] * kRowUnitBytes + offset;
              const size_t to = (unit - second_unit + page * page_units) * kRowUnitBytes + offset;
              ASSERT_EQ(0, std::memcmp(&pool[from / 4], &data[to / 4], bytes)) << block;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager::pq
