// Decode of one token: codec x context x heads x threads, with the machine's limits measured in the same run.
//
//   bazel run --config=opt //attention:attention_bench -- [--codec=SPEC ...] [--codec-plugin=FILE.so ...]
//       [--ladder=SPEC>SPEC ...] [flags of Google Benchmark]
//
// A SPEC may name an artifact, calibration=FILE (the shape is then the artifact's), or calibration=synthetic: a random
// one. The mapping of queries and outputs that some codecs need is part of what is timed.
//
// Pages are distinct, shuffled, and together larger than the last-level cache. Counters: bytes_per_second (bytes of the
// pages read), ns_per_token_head (per token of context and KV head, all threads together), ratio_to_raw (raw of the
// same shape in the same run), and fractions of what as many threads can do, measured in this run: read_fraction of the
// read bandwidth, of raw and zack fma_fraction of the fp32 multiply-adds, of hack and zack+hack byte_fma_fraction of
// the 8-bit ones, of million look_up_fraction of the table look-ups in registers (one per channel of K and of V). The
// label names the largest, the limit that binds, or "instruction issue" where all are below 0.6.
//
// ladder/... measures steps over pages of two rungs beside steps over pages of one, in turns: the first half on the
// lower rung ("halves"), runs of 16 pages ("runs"), every second page ("pages"). Counters: us of each (medians), and of
// each mixture its median over the mean of those of the two rungs alone, with a 95% interval (_low, _high).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
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

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/bench_index.h"
#include "attention/machine_limits.h"
#include "codecs/bench_codecs.h"
#include "codecs/cpu_isa.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/registry.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kHeadDim = 128;
constexpr int kPageTokens = 64;
constexpr int kIndexLayers = 4;        // of codecs that choose what they read: their codes exceed an L2 cache
constexpr int kDistinctRawPages = 16;  // encoded pages repeat these contents, each in memory of its own
// Below this share of every limit the core is busy with what lies between: unpacking, softmax, conversions.
constexpr double kBindsFrom = 0.6;
constexpr size_t kPoolBytesMin = size_t{192} << 20;  // several last-level caches

struct Shape {
  std::string codec;
  int context_tokens;
  int query_heads;
  int kv_heads;
  int threads;
  int layers = 1;
  int head_dim = kHeadDim;
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
  std::unique_ptr<BenchIndex> index;  // nullptr: queries read everything
};

BenchCodecs& Codecs() {
  static BenchCodecs codecs;
  return codecs;
}

/// Pages of layer 0 that `codec` made of random values, enough for contexts of so many tokens.
std::unique_ptr<Arena> MakePages(const Codec& codec, int context_tokens, std::vector<const uint8_t*>* pages) {
  const size_t page_bytes = codec.info().page_bytes(0);
  const size_t raw_bytes = codec.layout().raw_bytes();
  const size_t count = std::max<size_t>(context_tokens / kPageTokens, kPoolBytesMin / page_bytes);
  auto arena = std::make_unique<Arena>(count * page_bytes);

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  Arena raw(kDistinctRawPages * raw_bytes), encoded(kDistinctRawPages * page_bytes);
  Arena workspace(codec.encode_workspace_bytes() + 64);
  std::vector<EncodeItem> items(kDistinctRawPages);
  for (int i = 0; i < kDistinctRawPages; ++i) {
    uint16_t* values = reinterpret_cast<uint16_t*>(raw.data() + i * raw_bytes);
    for (size_t e = 0; e < raw_bytes / 2; ++e) values[e] = FloatToHalf(normal(random));
    items[i].raw = raw.data() + i * raw_bytes;
    items[i].encoded = encoded.data() + i * page_bytes;
    items[i].first_token = i * kPageTokens;
  }
  if (codec.info().identity) {
    std::copy_n(raw.data(), kDistinctRawPages * raw_bytes, encoded.data());
  } else {
    codec.Encode(absl::MakeSpan(items), absl::MakeSpan(workspace.data(), codec.encode_workspace_bytes()));
  }
  for (size_t i = 0; i < count; ++i) {
    uint8_t* page = arena->data() + i * page_bytes;
    std::copy_n(encoded.data() + i % kDistinctRawPages * page_bytes, page_bytes, page);
    pages->push_back(page);
  }
  std::shuffle(pages->begin(), pages->end(), random);
  return arena;
}

PageLayout LayoutOf(const Shape& shape) {
  PageLayout layout;
  layout.kv_heads = shape.kv_heads;
  layout.head_dim = shape.head_dim;
  layout.page_tokens = kPageTokens;
  return layout;
}

std::unique_ptr<Pool> MakePool(const Shape& shape) {
  auto pool = std::make_unique<Pool>();
  pool->layout = LayoutOf(shape);
  auto codec = Codecs().Make(shape.codec, pool->layout, shape.query_heads, shape.layers);
  if (codec.ok() && (*codec)->NewIndex({}) != nullptr) {
    codec = Codecs().Make(shape.codec, pool->layout, shape.query_heads, kIndexLayers);
  }
  if (!codec.ok()) {
    std::fprintf(stderr, "attention_bench: %s\n", std::string(codec.status().message()).c_str());
    std::exit(2);
  }
  pool->codec = std::move(codec).value();
  pool->raw_attention = MakeRawAttention(pool->layout);
  pool->arena = MakePages(*pool->codec, shape.context_tokens, &pool->pages);
  pool->index = BenchIndex::Make(*pool->codec, kIndexLayers,
                                 absl::MakeConstSpan(pool->pages).first(shape.context_tokens / kPageTokens),
                                 shape.context_tokens);
  return pool;
}

/// Pools are large: one at a time.
Pool& PoolOf(const Shape& shape) {
  static std::unique_ptr<Pool> pool;
  static std::tuple<std::string, int, int, int> key;
  const std::tuple<std::string, int, int, int> wanted(shape.codec, shape.query_heads, shape.kv_heads,
                                                      shape.context_tokens);
  if (pool == nullptr || key != wanted) {
    pool.reset();
    pool = MakePool(shape);
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

/// How much of each limit a decode of `seconds` used; the name of the largest.
std::string ReportLimits(benchmark::State& state, const Shape& shape, const Pool& pool, double bytes, double seconds) {
  const MachineLimits& limits = MeasuredLimits(shape.threads);
  const std::string& name = pool.codec->info().name;
  const double token_heads = double(shape.context_tokens) * shape.kv_heads;
  const int group = shape.query_heads / shape.kv_heads;
  std::vector<std::pair<double, std::string>> used;
  const auto report = [&](const std::string& of, double work, double per_second) {
    used.emplace_back(work / seconds / per_second, of);
    state.counters[absl::StrCat(of, "_fraction")] = used.back().first;
    state.counters[absl::StrCat(of, "_limit_per_second")] = per_second;
  };
  report("read", bytes, limits.read_bytes_per_second);
  const double kept = double(pool.codec->info().payload_bytes) / double(pool.layout.raw_bytes());
  if (name == "raw") report("fma", token_heads * group * shape.head_dim * 2, limits.fma_per_second);
  if (name == "zack") report("fma", token_heads * group * shape.head_dim * 2 * kept, limits.fma_per_second);
  if (name == "hack" || name == "zack+hack") {
    report("byte_fma", token_heads * group * shape.head_dim * 2, limits.byte_fma_per_second);
  }
  // One per channel of K and V, whatever the group. From 10 bits on it is by address, and no limit is known.
  if (name == "million" && !absl::StrContains(pool.codec->info().spec, "bits=1")) {
    report("look_up", token_heads * 2 * shape.head_dim, limits.look_ups_per_second);
  }
  const auto largest = std::max_element(used.begin(), used.end());
  return largest->first < kBindsFrom ? "instruction issue" : largest->second;
}

void Decode(benchmark::State& state, const Shape& shape) {
  Pool& pool = PoolOf(shape);
  const int pages = shape.context_tokens / kPageTokens;
  const bool identity = pool.codec->info().identity, is_raw = pool.codec->info().name == "raw";
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> q(size_t(shape.query_heads) * shape.head_dim), out(q.size());
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
  BenchIndex* const index = pool.index.get();

  size_t next = 0;
  std::vector<double> samples_ns;
  uint64_t read_pairs = 0;
  for (auto _ : state) {
    // Each decode reads the next pages of the pool, so that none is left in a cache from the one before.
    for (AttentionPage& page : table) {
      (identity ? page.raw : page.encoded) = pool.pages[next];
      next = (next + 1) % pool.pages.size();
    }
    sequence.pages = table;
    if (index != nullptr) {
      for (float& x : q) x = normal(random);
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::unique_ptr<TokenSelector> selector = index == nullptr ? nullptr : index->Select();
    sequence.selector = selector.get();
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
    read_pairs = plan->counts().raw_pairs + plan->counts().encoded_pairs;
    state.SetIterationTime(ns * 1e-9);
  }
  std::nth_element(samples_ns.begin(), samples_ns.begin() + samples_ns.size() / 2, samples_ns.end());
  const double median_ns = samples_ns[samples_ns.size() / 2];
  const double token_heads = double(shape.context_tokens) * shape.kv_heads;
  const double ns_per_token_head = median_ns / token_heads;
  const double seconds = median_ns * 1e-9, bytes = double(read_pairs) / kPageTokens * pool.codec->info().page_bytes(0);
  state.counters["bytes_per_second"] = bytes / seconds;
  // Of the layer that is measured; where there are several, the payload is their mean, and the page's own size is told.
  const CodecInfo& info = pool.codec->info();
  state.counters["bytes_per_token_head"] =
      double(shape.layers > 1 ? info.page_bytes(0) : info.payload_bytes) / kPageTokens / shape.kv_heads;
  state.counters["ns_per_token_head"] = ns_per_token_head;
  const RawKey key(shape.context_tokens, shape.query_heads, shape.kv_heads, shape.threads);
  if (is_raw) RawResults()[key] = ns_per_token_head;
  const auto raw = RawResults().find(key);
  if (!is_raw && raw != RawResults().end()) state.counters["ratio_to_raw"] = raw->second / ns_per_token_head;
  state.SetLabel(absl::StrCat(IsaName(BestIsa()), "; limit: ", ReportLimits(state, shape, pool, bytes, seconds)));
}

constexpr int kLadderRungs = 2;
constexpr int kRunPages = 16;  // of "runs"
/// What a step reads: rung 0 alone, rung 1 alone, and mixtures of half of each.
struct LadderArm {
  const char* name;
  int (*rung)(int page, int pages);
};
constexpr LadderArm kLadderArms[] = {
    {"upper", [](int, int) { return 0; }},
    {"lower", [](int, int) { return 1; }},
    {"halves", [](int page, int pages) { return page < pages / 2 ? 1 : 0; }},
    {"runs", [](int page, int) { return page / kRunPages % 2; }},
    {"pages", [](int page, int) { return page % 2; }},
};
constexpr size_t kArms = std::size(kLadderArms), kSingleArms = 2;

double MedianOf(std::vector<double> samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

/// The median of `mixed` over the mean of the medians of `upper` and `lower`, and its 95% interval, by drawing turns
/// again: [low, ratio, high]. Medians come first, so that a step that another process delayed spoils no other.
std::array<double, 3> MixedRatio(const std::vector<double>& upper, const std::vector<double>& lower,
                                 const std::vector<double>& mixed) {
  constexpr int kDraws = 400;
  const auto ratio = [](const std::vector<double>& a, const std::vector<double>& b, const std::vector<double>& c) {
    return 2 * MedianOf(c) / (MedianOf(a) + MedianOf(b));
  };
  std::mt19937 random(3);
  std::vector<double> drawn, a(mixed.size()), b(mixed.size()), c(mixed.size());
  for (int draw = 0; draw < kDraws; ++draw) {
    for (size_t i = 0; i < mixed.size(); ++i) {
      const size_t turn = random() % mixed.size();
      a[i] = upper[turn], b[i] = lower[turn], c[i] = mixed[turn];
    }
    drawn.push_back(ratio(a, b, c));
  }
  std::sort(drawn.begin(), drawn.end());
  return {drawn[kDraws / 40], ratio(upper, lower, mixed), drawn[kDraws - 1 - kDraws / 40]};
}

void Ladder(benchmark::State& state, const Shape& shape) {
  auto made = Codecs().Make(shape.codec, LayoutOf(shape), shape.query_heads, shape.layers);
  if (!made.ok() || (*made)->rungs() < kLadderRungs) {
    state.SkipWithError(made.ok() ? "not a ladder" : std::string(made.status().message()).c_str());
    return;
  }
  const std::unique_ptr<Codec> codec = *std::move(made);
  const std::unique_ptr<PageAttention> raw_attention = MakeRawAttention(codec->layout());
  std::unique_ptr<Arena> arenas[kLadderRungs];
  std::vector<const uint8_t*> pool[kLadderRungs];
  size_t next[kLadderRungs] = {};
  for (int rung = 0; rung < kLadderRungs; ++rung) {
    arenas[rung] = MakePages(codec->rung(rung), shape.context_tokens, &pool[rung]);
  }
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> q(size_t(shape.query_heads) * shape.head_dim), out(q.size());
  for (float& x : q) x = normal(random);
  std::vector<AttentionPage> table(shape.context_tokens / kPageTokens);
  AttentionSequence sequence;
  sequence.pages = table;
  sequence.first_position = shape.context_tokens - 1;
  sequence.tokens = 1;
  sequence.q = q.data();
  sequence.out = out.data();
  AttentionBatch batch;
  batch.codec = codec.get();
  batch.raw_attention = raw_attention.get();
  batch.layout = codec->layout();
  batch.query_heads = shape.query_heads;
  batch.sequences = absl::MakeConstSpan(&sequence, 1);
  std::unique_ptr<WorkerPool> workers;
  if (shape.threads > 1) workers = std::make_unique<WorkerPool>(shape.threads);

  std::vector<double> ns[kArms];
  size_t first_arm = 0;
  for (auto _ : state) {
    double turn_ns[kArms];
    for (size_t i = 0; i < kArms; ++i) {
      const size_t arm = (first_arm + i) % kArms;
      for (size_t page = 0; page < table.size(); ++page) {
        const int rung = kLadderArms[arm].rung(int(page), int(table.size()));
        table[page].encoded = pool[rung][next[rung]];
        table[page].rung = uint8_t(rung);
        next[rung] = (next[rung] + 1) % pool[rung].size();
      }
      const auto begin = std::chrono::steady_clock::now();
      const std::unique_ptr<AttentionPlan> plan = AttentionPlan::Make(batch, shape.threads);
      if (workers == nullptr) {
        plan->RunHere();
      } else {
        std::promise<void> finished;
        plan->Run(*workers, [&] { finished.set_value(); });
        finished.get_future().wait();
      }
      turn_ns[arm] = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
    }
    ++first_arm;
    for (size_t arm = 0; arm < kArms; ++arm) ns[arm].push_back(turn_ns[arm]);
    state.SetIterationTime(turn_ns[kSingleArms] * 1e-9);
  }
  for (size_t arm = 0; arm < kArms; ++arm) {
    const std::string name = kLadderArms[arm].name;
    state.counters[name + "_us"] = MedianOf(ns[arm]) * 1e-3;
    if (arm < kSingleArms) continue;
    const auto [low, median, high] = MixedRatio(ns[0], ns[1], ns[arm]);
    state.counters[name + "_ratio"] = median;
    state.counters[name + "_ratio_low"] = low;
    state.counters[name + "_ratio_high"] = high;
  }
  state.SetLabel(absl::StrCat(IsaName(BestIsa()), "; ", ns[0].size(), " turns"));
}

void RegisterLadders(const std::vector<std::string>& specs) {
  for (const std::string& spec : specs) {
    for (int context : {4096, 32768}) {
      for (int threads : {1, 2}) {
        const Shape shape{absl::StrCat(CodecRegistry::kLadderPrefix, spec), context, 32, 8, threads};
        benchmark::RegisterBenchmark(
            absl::StrCat("ladder/", spec, "/context:", context, "/heads:32x8/threads:", threads).c_str(),
            [shape](benchmark::State& state) { Ladder(state, shape); })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond)
            ->MinTime(0.5);
      }
    }
  }
}

void RegisterOne(const std::string& name, const Shape& shape) {
  benchmark::RegisterBenchmark(absl::StrCat("decode/", name, "/context:", shape.context_tokens, "/heads:",
                                            shape.query_heads, "x", shape.kv_heads, "/threads:", shape.threads)
                                   .c_str(),
                               [shape](benchmark::State& state) { Decode(state, shape); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(0.3);
}

void RegisterDefaults() {
  for (int context : {4096, 32768}) {
    for (auto [query_heads, kv_heads] : {std::pair(8, 8), std::pair(32, 8), std::pair(8, 2)}) {
      for (const BenchSpec& spec : BenchSpecs()) {
        for (int threads : {1, 2}) RegisterOne(spec.name, {spec.spec, context, query_heads, kv_heads, threads});
      }
    }
  }
}

/// One codec beside raw, in the shape of its artifact if it names one.
absl::Status RegisterSpec(const std::string& spec) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const Calibration> artifact, Codecs().ArtifactOf(spec));
  for (int context : {4096, 32768}) {
    for (const std::string& codec : {std::string("raw"), spec}) {
      for (int threads : {1, 2}) {
        Shape shape{codec, context, 32, 8, threads};
        if (artifact != nullptr) {
          const CalibrationModel& model = artifact->model();
          shape.query_heads = model.query_heads;
          shape.kv_heads = model.kv_heads;
          shape.layers = model.layers;
          shape.head_dim = model.head_dim;
        }
        RegisterOne(codec, shape);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) {
  if (const absl::Status status = kvmanager::Codecs().LoadPlugins(&argc, argv); !status.ok()) {
    std::fprintf(stderr, "attention_bench: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  const std::vector<std::string> specs = kvmanager::TakeFlags("codec", &argc, argv);
  std::vector<std::string> ladders = kvmanager::TakeFlags("ladder", &argc, argv);
  if (specs.empty() && ladders.empty()) {
    kvmanager::RegisterDefaults();
    ladders = {"hack:k_bits=4,v_bits=3>hack:k_bits=2,v_bits=1",
               "zack+hack:bytes=56,calibration=synthetic>zack+hack:bytes=32,calibration=synthetic"};
  }
  kvmanager::RegisterLadders(ladders);
  for (const std::string& spec : specs) {
    if (const absl::Status status = kvmanager::RegisterSpec(spec); !status.ok()) {
      std::fprintf(stderr, "attention_bench: %s\n", std::string(status.message()).c_str());
      return 2;
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("simd", kvmanager::IsaName(kvmanager::BestIsa()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
