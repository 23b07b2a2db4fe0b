// The whole of a query over selected tokens on a GPU: sparse selection and attention, against double precision over the
// same tokens.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "attention/selected_plan.h"
#include "codecs/pq/pq_rows_cuda.h"
#include "codecs/pq/pq_selects.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager {
namespace {

std::vector<SelectedList> ListsOf(const std::vector<pq::DeviceSelect>& queries) {
  std::vector<SelectedList> lists;
  for (const pq::DeviceSelect& query : queries)
    lists.push_back({query.list, query.list_stride, query.rows(), query.token});
  return lists;
}

uint16_t Element(float x, bool bfloat16) { return bfloat16 ? FloatToBFloat16(x) : FloatToHalf(x); }
float Value(uint16_t bits, bool bfloat16) { return bfloat16 ? BFloat16ToFloat(bits) : HalfToFloat(bits); }

template <typename T>
void Put(const DeviceBytes& to, const std::vector<T>& from) {
  ASSERT_CUDA(cudaMemcpy(to.as<T>(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}
template <typename T>
std::vector<T> Get(const DeviceBytes& from, size_t count) {
  std::vector<T> to(count);
  EXPECT_EQ(cudaMemcpy(to.data(), from.as<T>(), count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
  return to;
}

enum class Where { kDevice, kHost, kHostWithCopies };

class SelectedRowsGpu : public GpuTest {
 protected:
  struct Case {
    int kv_heads = 2, group = 4, head_dim = 128, page_tokens = 64;
    bool bfloat16 = false;
    Where where = Where::kDevice;
    float deviation = 1;  // of queries
  };

  /// Positions of the queries, each in a sequence of its own.
  void Run(const Case& c, const std::vector<uint32_t>& positions) {
    SCOPED_TRACE(testing::Message() << c.group << " heads of a group of " << c.head_dim << ", pages of "
                                    << c.page_tokens << ", bfloat16 " << c.bfloat16 << ", where " << int(c.where)
                                    << ", first position " << positions[0]);
    pq::DeviceShape shape;
    shape.kv_heads = c.kv_heads;
    shape.query_heads = c.kv_heads * c.group;
    shape.head_dim = c.head_dim;
    shape.page_tokens = c.page_tokens;
    shape.m = 4, shape.bits = 6;
    shape.bfloat16 = c.bfloat16;
    PageLayout layout;
    layout.dtype = c.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    layout.kv_heads = uint16_t(c.kv_heads);
    layout.head_dim = uint16_t(c.head_dim);
    layout.page_tokens = uint16_t(c.page_tokens);
    const uint32_t page_units = uint32_t(layout.raw_bytes() / pq::kRowUnitBytes);
    pq::Parameters parameters;

    // Pages of all sequences, shuffled; in host memory the copies of blocks stand behind them.
    std::vector<uint32_t> tables, slots;
    for (const uint32_t position : positions) {
      tables.push_back(uint32_t(slots.size()));
      slots.resize(slots.size() + position / c.page_tokens + 1);
    }
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    std::vector<uint16_t> pages(slots.size() * layout.raw_bytes() / 2);
    for (uint16_t& x : pages) x = Element(Normal(), c.bfloat16);
    // What lies behind a context is no number.
    for (size_t i = 0; i < positions.size(); ++i) {
      const uint32_t own = positions[i] / c.page_tokens;
      uint8_t* page = reinterpret_cast<uint8_t*>(pages.data()) + slots[tables[i] + own] * layout.raw_bytes();
      for (int side = 0; side < 2; ++side) {
        for (int h = 0; h < c.kv_heads; ++h) {
          for (int t = int(positions[i] % c.page_tokens) + 1; t < c.page_tokens; ++t) {
            std::memset(page + layout.raw_offset(side, h, t), 0xFF, c.head_dim * 2);
          }
        }
      }
    }
    const auto page_of = [&](size_t sequence, uint32_t token) {
      return reinterpret_cast<const uint8_t*>(pages.data()) +
             slots[tables[sequence] + token / c.page_tokens] / page_units * layout.raw_bytes();
    };
    for (uint32_t& slot : slots) slot *= page_units;

    // Random codes and centroids.
    std::vector<float> centroids(shape.half_norms_at() / 4);
    for (float& x : centroids) x = Normal();
    const uint32_t longest = *std::max_element(positions.begin(), positions.end()) + 1;
    const uint32_t chunks = (longest + pq::kCodeChunkTokens - 1) / pq::kCodeChunkTokens;
    std::vector<uint32_t> codes(chunks * shape.chunk_bytes() / 4);
    for (uint32_t& x : codes) x = random_() & 0x3F3F3F3F;
    // The codebook, then chunks.
    const size_t chunk_at = (shape.book_bytes() + 255) / 256 * 256;
    DeviceBytes index(chunk_at + codes.size() * 4), d_index((1 + chunks) * 4);
    Put(index, centroids);
    ASSERT_CUDA(cudaMemcpy(index.as<uint8_t>() + chunk_at, codes.data(), codes.size() * 4, cudaMemcpyHostToDevice));
    std::vector<uint32_t> index_slots = {0};
    for (uint32_t i = 0; i < chunks; ++i) {
      index_slots.push_back(uint32_t((chunk_at + i * shape.chunk_bytes()) / pq::kRowUnitBytes));
    }
    Put(d_index, index_slots);
    std::vector<uint16_t> q(positions.size() * shape.query_heads * c.head_dim);
    for (uint16_t& x : q) x = Element(Normal(c.deviation), c.bfloat16);
    DeviceBytes d_q(q.size() * 2), out(q.size() * 2), lse(q.size() / c.head_dim * 4), d_slots(slots.size() * 4);
    Put(d_q, q);
    Put(d_slots, slots);

    const size_t page_bytes = pages.size() * 2;
    DeviceBytes on_device(page_bytes), copies(page_bytes), second(sizeof(pq::SecondPlace));
    void* on_host = nullptr;
    ASSERT_CUDA(cudaHostAlloc(&on_host, page_bytes, cudaHostAllocMapped));
    const std::unique_ptr<void, cudaError_t (*)(void*)> free_host(on_host, cudaFreeHost);
    std::memcpy(on_host, pages.data(), page_bytes);
    Put(on_device, pages);
    copies.Set(0xFF);
    const uint8_t* const pool = c.where == Where::kDevice ? on_device.as<uint8_t>() : static_cast<uint8_t*>(on_host);
    const uint32_t second_unit = uint32_t(slots.size()) * page_units;
    Put(second, std::vector<pq::SecondPlace>{{copies.as<uint8_t>(), second_unit}});
    // Every third block has a copy, made by hand; in host memory what was copied is then spoilt.
    const uint32_t blocks = (longest + pq::kDeviceBlockTokens - 1) / pq::kDeviceBlockTokens;
    std::vector<uint32_t> cached(positions.size() * c.kv_heads * blocks, pq::kNoUnit);
    if (c.where == Where::kHostWithCopies) {
      const uint32_t pages_of_block = pq::kDeviceBlockTokens / c.page_tokens;
      uint32_t place = 0;
      for (size_t i = 0; i < positions.size(); ++i) {
        for (uint32_t block = i % 3; block < (positions[i] + 1) / pq::kDeviceBlockTokens; block += 3) {
          for (uint32_t j = 0; j < pages_of_block; ++j) {
            const uint32_t from = slots[tables[i] + block * pages_of_block + j];
            ASSERT_CUDA(cudaMemcpy(copies.as<uint8_t>() + (place + j) * layout.raw_bytes(),
                                   pages.data() + from * pq::kRowUnitBytes / 2, layout.raw_bytes(),
                                   cudaMemcpyHostToDevice));
          }
          for (int h = 0; h < c.kv_heads; ++h) {
            cached[(i * c.kv_heads + h) * blocks + block] = second_unit + place * page_units;
          }
          place += pages_of_block;
        }
      }
    }
    DeviceBytes d_cached(cached.size() * 4);
    Put(d_cached, cached);

    std::vector<pq::DeviceSelect> selects(positions.size());
    for (size_t i = 0; i < positions.size(); ++i) {
      pq::DeviceSelect& s = selects[i];
      if (c.where == Where::kHostWithCopies) {
        s.cached = d_cached.as<uint32_t>() + i * c.kv_heads * blocks;
        s.cached_stride = blocks;
      }
      s.table = tables[i];
      s.token = uint32_t(i);
      pq::SetReads(parameters, positions[i], &s);
      ASSERT_EQ(s.sinks + s.middle + s.local, positions[i] + 1);
    }
    const auto sizes = pq::PlaceSelects(shape, absl::MakeSpan(selects));
    ASSERT_TRUE(sizes.ok());
    DeviceBytes d_selects(selects.size() * sizeof(pq::DeviceSelect)), rows(sizes->rows * 4), chosen(sizes->rows * 4);
    Put(d_selects, selects);
    DeviceBytes scratch(pq::SelectScratchBytes(shape, sizes->runs));
    pq::SelectParams sp;
    sp.shape = shape;
    sp.slots = d_slots.as<uint32_t>();
    sp.index = {index.as<uint8_t>(), d_index.as<uint32_t>()};
    sp.queries = d_selects.as<pq::DeviceSelect>();
    sp.count = uint32_t(selects.size());
    sp.q = d_q.as<uint16_t>();
    sp.scale = 1 / std::sqrt(float(c.head_dim));
    sp.scratch = scratch.as<uint8_t>();
    sp.runs = sizes->runs;
    sp.rows = rows.as<uint32_t>();
    sp.chosen = chosen.as<uint32_t>();

    const device::AttendKernels* kernels = pq::SelectedRowsKernels(c.head_dim);
    ASSERT_NE(kernels, nullptr);
    ASSERT_EQ(kernels->prepare(), 0);
    ASSERT_EQ(pq::PrepareSelect(), 0);
    constexpr int kBlocks = 40;
    SelectedPlanner planner(layout, shape.query_heads, kBlocks, kernels->grid.warps);
    std::vector<device::AttendItem> items(4096);
    const auto planned = planner.Plan(ListsOf(selects), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok());
    items.resize(planned->items);
    const size_t parts = size_t{planned->parts} * device::kTileRows;
    DeviceBytes d_items(items.size() * sizeof(device::AttendItem)), partial(parts * c.head_dim * 4),
        partial_max(parts * 8), arrived(parts * 4);
    Put(d_items, items);
    arrived.Set(0);
    out.Set(0xFF);
    device::AttendParams p;
    p.pool = pool;
    p.slots = rows.as<uint32_t>();
    p.items = d_items.as<device::AttendItem>();
    p.q = d_q.as<void>();
    p.out = out.as<void>();
    p.lse = lse.as<float>();
    p.partial = partial.as<float>();
    p.partial_max = partial_max.as<float>();
    p.arrived = arrived.as<uint32_t>();
    p.query_heads = shape.query_heads;
    p.kv_heads = c.kv_heads;
    p.page_tokens = c.page_tokens;
    p.scale_log2 = float(M_LOG2E) * sp.scale;
    p.bfloat16 = c.bfloat16;
    if (c.where == Where::kHostWithCopies) p.codec = second.as<void>();
    for (int i = 0; i < 2; ++i) {  // twice: counters are left as they were
      ASSERT_EQ(pq::LaunchPqSelect(sp, 1 + i, sizes->middle_max, nullptr), 0);
      ASSERT_EQ(kernels->launch(p, planned->rows_max, kBlocks, nullptr), 0);
    }
    ASSERT_CUDA(cudaDeviceSynchronize());

    const std::vector<uint32_t> tokens = Get<uint32_t>(chosen, sizes->rows);
    const std::vector<uint16_t> got = Get<uint16_t>(out, q.size());
    const std::vector<float> got_lse = Get<float>(lse, q.size() / c.head_dim);
    double error = 0, norm = 0;
    for (size_t i = 0; i < selects.size(); ++i) {
      const pq::DeviceSelect& s = selects[i];
      for (int head = 0; head < shape.query_heads; ++head) {
        const int h = head / c.group;
        std::vector<uint32_t> read;
        for (uint32_t t = 0; t < s.sinks; ++t) read.push_back(t);
        for (uint32_t t = 0; t < s.chosen; ++t) read.push_back(tokens[s.list + h * s.list_stride + t]);
        for (uint32_t t = 0; t < s.local; ++t) read.push_back(s.sinks + s.middle + t);
        const size_t row = i * shape.query_heads + head;
        std::vector<double> score, wanted(c.head_dim);
        double top = -1e300, sum = 0;
        for (const uint32_t token : read) {
          const auto* k = reinterpret_cast<const uint16_t*>(page_of(i, token) +
                                                            layout.raw_offset(0, h, int(token % c.page_tokens)));
          double dot = 0;
          for (int j = 0; j < c.head_dim; ++j) {
            dot += double(Value(q[row * c.head_dim + j], c.bfloat16)) * Value(k[j], c.bfloat16);
          }
          score.push_back(dot * sp.scale);
          top = std::max(top, score.back());
        }
        for (size_t n = 0; n < read.size(); ++n) {
          const auto* v = reinterpret_cast<const uint16_t*>(page_of(i, read[n]) +
                                                            layout.raw_offset(1, h, int(read[n] % c.page_tokens)));
          const double weight = std::exp(score[n] - top);
          sum += weight;
          for (int j = 0; j < c.head_dim; ++j) wanted[j] += weight * Value(v[j], c.bfloat16);
        }
        EXPECT_NEAR(got_lse[row], top + std::log(sum), 2e-3);
        for (int j = 0; j < c.head_dim; ++j) {
          error += std::pow(Value(got[row * c.head_dim + j], c.bfloat16) - wanted[j] / sum, 2);
          norm += std::pow(wanted[j] / sum, 2);
        }
      }
    }
    // Results and weights are rounded to 11 or 8 bits.
    EXPECT_LE(std::sqrt(error / norm), c.bfloat16 ? 6e-3 : 1e-3);
  }

  float Normal(float deviation = 1) { return std::normal_distribution<float>(0, deviation)(random_); }
  std::mt19937 random_{1};
};

TEST_F(SelectedRowsGpu, AttendsToWhatIsRead) {
  for (int group = 1; group <= 16; ++group) {
    Case c;
    c.group = group;
    c.head_dim = group % 2 ? 128 : 64;
    c.bfloat16 = group % 3 == 0;
    c.page_tokens = group % 4 == 1 ? 128 : group % 4 == 2 ? 16 : 64;
    Run(c, {0, 1, 31, 63, 64, 700, 5000});
  }
}

TEST_F(SelectedRowsGpu, PeakedScores) {
  Case c;
  c.deviation = 8;
  Run(c, {3000, 9000});
}

TEST_F(SelectedRowsGpu, PagesInHostMemory) {
  for (const Where where : {Where::kHost, Where::kHostWithCopies}) {
    for (const int group : {4, 8}) {
      Case c;
      c.where = where;
      c.group = group;
      Run(c, {300, 2047, 6000});
      c.head_dim = 64, c.page_tokens = 128;
      Run(c, {127, 128, 6000});
    }
  }
}

}  // namespace
}  // namespace kvmanager
