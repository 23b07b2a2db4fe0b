// ZACK beside raw: decode of one token through a plan (queries mapped and outputs expanded included), and encoding.
//
//   bazel run --config=opt //attention:zack_bench
//
// 8 KV heads, 32 query heads, head_dim 128, 32K tokens, one thread; pages are distinct, shuffled, and larger than the
// caches. `mixed` has ranks 16..112 that average 64 (half of all dimensions removed); `even` has rank 64 everywhere.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/machine_limits.h"
#include "benchmark/benchmark.h"
#include "codecs/raw/raw.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_testing.h"

namespace kvmanager {
namespace {

constexpr int kTokens = 32768, kKvHeads = 8, kQueryHeads = 32, kHeadDim = 128, kPageTokens = 64;
constexpr int kPages = kTokens / kPageTokens;
constexpr size_t kPoolBytesMin = size_t{192} << 20;
constexpr int kRawPages = 16;

const CodecContext& Context() {
  static const CodecContext context =
      zack::MakeContext(zack::MakeLayout(kKvHeads, kHeadDim, kPageTokens), 1, kQueryHeads);
  return context;
}

std::unique_ptr<Codec> MakeCodec(const std::string& name) {
  if (name == "raw") {
    CodecRegistry registry;
    RegisterRaw(registry);
    return registry.Create("raw", Context()).value();
  }
  std::vector<int32_t> ranks(2 * kKvHeads, 64);
  if (name != "even") {
    ranks = {16, 112, 112, 16, 32, 96, 96, 32, 48, 80, 80, 48, 64, 64, 64, 64};
  }
  return std::make_unique<zack::ZackCodec>(zack::MakeFormat(Context(), "balanced", name == "mixed_folded", ranks),
                                           nullptr);
}

void Encode(const Codec& codec, const uint8_t* raw, uint8_t* page, absl::Span<uint8_t> workspace) {
  EncodeItem item;
  item.raw = raw;
  item.encoded = page;
  codec.Encode(absl::MakeSpan(&item, 1), workspace);
  KV_CHECK(!item.declined);
}

void Decode(benchmark::State& state, const std::string& name) {
  const std::unique_ptr<Codec> codec = MakeCodec(name);
  const PageLayout& layout = Context().layout;
  const auto raw_attention = MakeRawAttention(layout);
  const size_t page_bytes = codec->info().page_bytes(0);
  const size_t count = std::max<size_t>(kPages, kPoolBytesMin / page_bytes);
  const std::unique_ptr<void, void (*)(void*)> pool(AllocateHuge(count * page_bytes), std::free);
  const zack::Bytes workspace = zack::MakeBytes(codec->encode_workspace_bytes() + 64);
  std::mt19937_64 random(1);
  std::vector<const uint8_t*> pages;
  for (size_t i = 0; i < count; ++i) {
    uint8_t* page = static_cast<uint8_t*>(pool.get()) + i * page_bytes;
    if (i < kRawPages) {
      const zack::Bytes raw = zack::RandomPage(layout, random);
      Encode(*codec, raw.get(), page, absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
    } else {
      std::copy_n(static_cast<uint8_t*>(pool.get()) + i % kRawPages * page_bytes, page_bytes, page);
    }
    pages.push_back(page);
  }
  std::shuffle(pages.begin(), pages.end(), random);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> q(size_t{kQueryHeads} * kHeadDim), out(q.size());
  for (float& x : q) x = normal(random);
  std::vector<AttentionPage> table(kPages);
  AttentionSequence sequence;
  sequence.first_position = kTokens - 1;
  sequence.tokens = 1;
  sequence.q = q.data();
  sequence.out = out.data();
  AttentionBatch batch;
  batch.codec = codec.get();
  batch.raw_attention = raw_attention.get();
  batch.layout = layout;
  batch.query_heads = kQueryHeads;
  batch.sequences = absl::MakeConstSpan(&sequence, 1);
  size_t next = 0;
  for (auto _ : state) {
    for (AttentionPage& page : table) {
      (codec->info().identity ? page.raw : page.encoded) = pages[next];
      next = (next + 1) % pages.size();
    }
    sequence.pages = table;
    AttentionPlan::Make(batch, 1)->RunHere();
    benchmark::ClobberMemory();
  }
  state.counters["ns_per_token_head"] = benchmark::Counter(
      double(kTokens) * kKvHeads * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.counters["bytes_per_second"] =
      benchmark::Counter(double(kPages) * page_bytes, benchmark::Counter::kIsIterationInvariantRate);
}

void EncodePages(benchmark::State& state, const std::string& name) {
  const std::unique_ptr<Codec> codec = MakeCodec(name);
  const PageLayout& layout = Context().layout;
  std::mt19937_64 random(1);
  std::vector<zack::Bytes> raw;
  for (int i = 0; i < kRawPages; ++i) raw.push_back(zack::RandomPage(layout, random));
  const zack::Bytes page = zack::MakeBytes(codec->info().page_bytes(0));
  const zack::Bytes workspace = zack::MakeBytes(codec->encode_workspace_bytes());
  size_t i = 0;
  for (auto _ : state) {
    Encode(*codec, raw[i++ % kRawPages].get(), page.get(),
           absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
    benchmark::ClobberMemory();
  }
  state.counters["raw_bytes_per_second"] =
      benchmark::Counter(double(layout.raw_bytes()), benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK_CAPTURE(Decode, raw, "raw")->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Decode, mixed, "mixed")->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Decode, mixed_folded, "mixed_folded")->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Decode, even, "even")->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(EncodePages, mixed, "mixed")->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(EncodePages, even, "even")->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kvmanager

BENCHMARK_MAIN();
