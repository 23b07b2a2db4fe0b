// Decode of one token: codec x context x heads x threads, with the machine's limits measured in the same run.
//
// Pages are distinct, shuffled, and together larger than the last-level cache. Counters: bytes_per_second (bytes of the
// pages read), ns_per_token_head (per token of context and KV head, all threads together), ratio_to_raw (raw of the
// same shape in the same run), and of raw limit_fraction: the larger of its fractions of the measured read bandwidth
// and multiply-add rate of as many threads (read_fraction, fma_fraction).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/attention.h"
#include "attention/machine_limits.h"
#include "codecs/builtin.h"
#include "codecs/cpu_isa.h"
#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kHeadDim = 128;
constexpr int kPageTokens = 64;
constexpr int kDistinctRawPages = 16;                // encoded pages repeat these contents, each in memory of its own
constexpr size_t kPoolBytesMin = size_t{192} << 20;  // several last-level caches

struct Shape {
  std::string codec;
  int context_tokens;
  int query_heads;
  int kv_heads;
  int threads;
};

/// Aligned memory, asked to lie in huge pages as the daemon's pool does.
class Arena {
 public:
  explicit Arena(size_t bytes);
  ~Arena() { std::free(data_); }
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

Arena::Arena(size_t bytes) : data_(static_cast<uint8_t*>(AllocateHuge(bytes))) { KV_CHECK(data_ != nullptr); }

/// A pool of pages of one codec and shape, with a shuffled order in which a sequence uses them.
struct Pool {
  std::unique_ptr<Codec> codec;
  std::unique_ptr<PageAttention> raw_attention;
  PageLayout layout;
  std::unique_ptr<Arena> arena;
  std::vector<const uint8_t*> pages;  // shuffled
};

std::unique_ptr<Pool> MakePool(const std::string& spec, int kv_heads, int context_tokens) {
  auto pool = std::make_unique<Pool>();
  pool->layout.kv_heads = kv_heads;
  pool->layout.head_dim = kHeadDim;
  pool->layout.page_tokens = kPageTokens;
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  auto codec = registry.Create(spec, pool->layout);
  KV_CHECK(codec.ok());
  pool->codec = std::move(codec).value();
  pool->raw_attention = MakeRawAttention(pool->layout);
  const size_t page_bytes = pool->codec->info().encoded_bytes;
  const size_t raw_bytes = pool->layout.raw_bytes();
  const size_t count = std::max<size_t>(context_tokens / kPageTokens, kPoolBytesMin / page_bytes);
  pool->arena = std::make_unique<Arena>(count * page_bytes);

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  Arena raw(kDistinctRawPages * raw_bytes), encoded(kDistinctRawPages * page_bytes);
  Arena workspace(pool->codec->encode_workspace_bytes() + 64);
  std::vector<EncodeItem> items(kDistinctRawPages);
  for (int i = 0; i < kDistinctRawPages; ++i) {
    uint16_t* values = reinterpret_cast<uint16_t*>(raw.data() + i * raw_bytes);
    for (size_t e = 0; e < raw_bytes / 2; ++e) values[e] = FloatToHalf(normal(random));
    items[i].raw = raw.data() + i * raw_bytes;
    items[i].encoded = encoded.data() + i * page_bytes;
    items[i].first_token = i * kPageTokens;
  }
  if (pool->codec->info().identity) {
    std::copy_n(raw.data(), kDistinctRawPages * raw_bytes, encoded.data());
  } else {
    pool->codec->Encode(absl::MakeSpan(items), absl::MakeSpan(workspace.data(), pool->codec->encode_workspace_bytes()));
  }
  for (size_t i = 0; i < count; ++i) {
    uint8_t* page = pool->arena->data() + i * page_bytes;
    std::copy_n(encoded.data() + i % kDistinctRawPages * page_bytes, page_bytes, page);
    pool->pages.push_back(page);
  }
  std::shuffle(pool->pages.begin(), pool->pages.end(), random);
  return pool;
}

/// Pools are large: one at a time.
Pool& PoolOf(const Shape& shape) {
  static std::unique_ptr<Pool> pool;
  static std::tuple<std::string, int, int> key;
  const std::tuple<std::string, int, int> wanted(shape.codec, shape.kv_heads, shape.context_tokens);
  if (pool == nullptr || key != wanted) {
    pool.reset();
    pool = MakePool(shape.codec, shape.kv_heads, shape.context_tokens);
    key = wanted;
  }
  return *pool;
}

using RawKey = std::tuple<int, int, int, int>;

/// Nanoseconds per token and KV head of raw, by shape, as measured in this run.
std::map<RawKey, double>& RawResults() {
  static std::map<RawKey, double> results;
  return results;
}

void Decode(benchmark::State& state, const Shape& shape) {
  Pool& pool = PoolOf(shape);
  const int pages = shape.context_tokens / kPageTokens;
  const bool identity = pool.codec->info().identity;
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> q(size_t(shape.query_heads) * kHeadDim), out(q.size());
  for (float& x : q) x = normal(random);
  std::vector<AttentionPage> table(pages);
  AttentionSequence sequence;
  sequence.first_position = shape.context_tokens - 1;
  sequence.tokens = 1;
  sequence.q = q.data();
  sequence.out = out.data();
  AttentionBatch batch;
  batch.codec = pool.codec.get();
  batch.raw_attention = pool.raw_attention.get();
  batch.layout = pool.layout;
  batch.query_heads = shape.query_heads;
  batch.sequences = absl::MakeConstSpan(&sequence, 1);
  std::unique_ptr<WorkerPool> workers;
  if (shape.threads > 1) workers = std::make_unique<WorkerPool>(shape.threads);

  size_t next = 0;
  std::vector<double> samples_ns;
  for (auto _ : state) {
    // Each decode reads the next pages of the pool, so that none is left in a cache from the one before.
    for (AttentionPage& page : table) {
      (identity ? page.raw : page.encoded) = pool.pages[next];
      next = (next + 1) % pool.pages.size();
    }
    sequence.pages = table;
    const auto begin = std::chrono::steady_clock::now();
    const std::unique_ptr<AttentionPlan> plan = AttentionPlan::Make(batch, shape.threads);
    if (workers == nullptr) {
      plan->RunHere();
    } else {
      std::promise<void> finished;
      plan->Run(*workers, [&] { finished.set_value(); });
      finished.get_future().wait();
    }
    const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
    samples_ns.push_back(ns);
    state.SetIterationTime(ns * 1e-9);
  }
  std::nth_element(samples_ns.begin(), samples_ns.begin() + samples_ns.size() / 2, samples_ns.end());
  const double median_ns = samples_ns[samples_ns.size() / 2];
  const double token_heads = double(shape.context_tokens) * shape.kv_heads;
  const double ns_per_token_head = median_ns / token_heads;
  const double bytes = double(pages) * pool.codec->info().encoded_bytes;
  state.counters["bytes_per_second"] = bytes / (median_ns * 1e-9);
  state.counters["ns_per_token_head"] = ns_per_token_head;
  const RawKey key(shape.context_tokens, shape.query_heads, shape.kv_heads, shape.threads);
  if (identity) {
    RawResults()[key] = ns_per_token_head;
    const MachineLimits& limits = MeasuredLimits(shape.threads);
    const double fma_per_second =
        token_heads * (shape.query_heads / shape.kv_heads) * kHeadDim * 2 / (median_ns * 1e-9);
    const double read_fraction = bytes / (median_ns * 1e-9) / limits.read_bytes_per_second;
    const double fma_fraction = fma_per_second / limits.fma_per_second;
    state.counters["read_limit_bytes_per_second"] = limits.read_bytes_per_second;
    state.counters["fma_limit_per_second"] = limits.fma_per_second;
    state.counters["read_fraction"] = read_fraction;
    state.counters["fma_fraction"] = fma_fraction;
    state.counters["limit_fraction"] = std::max(read_fraction, fma_fraction);
    state.SetLabel(
        absl::StrFormat("%s; limit: %s", IsaName(BestIsa()), read_fraction >= fma_fraction ? "memory" : "fma"));
  } else {
    const auto raw = RawResults().find(key);
    if (raw != RawResults().end()) state.counters["ratio_to_raw"] = raw->second / ns_per_token_head;
    state.SetLabel(IsaName(BestIsa()));
  }
}

void RegisterAll() {
  const std::pair<const char*, const char*> codecs[] = {
      {"raw", "raw"},
      {"K2V2", "hack:k_bits=2,v_bits=2"},
      {"K3V2", "hack:k_bits=3,v_bits=2"},
      {"K2V1", "hack:k_bits=2,v_bits=1"},
      {"K4V3", "hack:k_bits=4,v_bits=3"},
      {"token_K2V2", "hack:k_axis=token,k_bits=2,v_bits=2"},
  };
  for (int context : {4096, 32768}) {
    for (auto [query_heads, kv_heads] : {std::pair(8, 8), std::pair(32, 8), std::pair(8, 2)}) {
      for (auto [name, spec] : codecs) {
        for (int threads : {1, 2}) {
          const Shape shape{spec, context, query_heads, kv_heads, threads};
          benchmark::RegisterBenchmark(absl::StrCat("decode/", name, "/context:", context, "/heads:", query_heads, "x",
                                                    kv_heads, "/threads:", threads)
                                           .c_str(),
                                       [shape](benchmark::State& state) { Decode(state, shape); })
              ->UseManualTime()
              ->Unit(benchmark::kMicrosecond)
              ->MinTime(0.3);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) {
  kvmanager::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("simd", kvmanager::IsaName(kvmanager::BestIsa()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
