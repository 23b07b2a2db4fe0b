// Encode and decode speed of each codec, one thread, in bytes of raw pages per second; `bytes_per_token_head` beside
// it. "compare" is what sampling a page costs (page_error.h): attention of 4 query tokens of 32 heads in both forms.
//
//   bazel run --config=opt //codecs:codec_bench -- [--codec=SPEC ...] [--codec-plugin=FILE.so ...]
//       [flags of Google Benchmark]
//
// A SPEC may say calibration=synthetic: a random artifact for the one layer of 8 KV heads and 128 channels that is
// measured; calibration=FILE only if it is for that shape.
// The case "copy" is memcpy of the same pages: what this core's memory allows.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "codecs/bench_codecs.h"
#include "codecs/page_error.h"
#include "codecs/registry.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 8, 128, 64};
constexpr int kPages = 256;  // 64 MiB of raw pages: beyond the caches of one core

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t[], Free>;

Aligned Allocate(size_t bytes) {
  Aligned p(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
  std::memset(p.get(), 0, bytes);
  return p;
}

const uint8_t* RawPages() {
  static const Aligned* pages = [] {
    auto* p = new Aligned(Allocate(kLayout.raw_bytes() * kPages));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kLayout.raw_bytes() / 2 * kPages; ++i)
      StoreElement(p->get(), kLayout.dtype, i, normal(random));
    return p;
  }();
  return pages->get();
}

struct Encoded {
  std::unique_ptr<Codec> codec;
  Aligned bytes, workspace;
  std::vector<EncodeItem> items;
};

BenchCodecs& Codecs() {
  static BenchCodecs codecs;
  return codecs;
}

Encoded Prepare(const std::string& spec) {
  auto codec = Codecs().Make(spec, kLayout, 4 * kLayout.kv_heads);
  if (!codec.ok()) {
    std::fprintf(stderr, "codec_bench: %s\n", std::string(codec.status().message()).c_str());
    std::exit(2);
  }
  Encoded e{std::move(codec).value(), nullptr, nullptr, {}};
  e.bytes = Allocate(e.codec->info().encoded_bytes * kPages);
  e.workspace = Allocate(e.codec->encode_workspace_bytes());
  for (int i = 0; i < kPages; ++i) {
    e.items.push_back(
        {RawPages() + i * kLayout.raw_bytes(), e.bytes.get() + i * e.codec->info().encoded_bytes, 0, uint64_t(i) * 64});
  }
  e.codec->Encode(absl::MakeSpan(e.items), {e.workspace.get(), e.codec->encode_workspace_bytes()});
  return e;
}

void Report(benchmark::State& state, const Codec& codec) {
  state.SetBytesProcessed(int64_t(state.iterations()) * int64_t(kLayout.raw_bytes()) * kPages);
  state.counters["bytes_per_token_head"] = double(codec.info().payload_bytes) / kLayout.page_tokens / kLayout.kv_heads;
}

void Encode(benchmark::State& state, const std::string& spec) {
  Encoded e = Prepare(spec);
  for (auto _ : state) {
    e.codec->Encode(absl::MakeSpan(e.items), {e.workspace.get(), e.codec->encode_workspace_bytes()});
    benchmark::ClobberMemory();
  }
  Report(state, *e.codec);
}

void Decode(benchmark::State& state, const std::string& spec) {
  Encoded e = Prepare(spec);
  const Aligned raw = Allocate(kLayout.raw_bytes() * kPages);
  std::vector<DecodeItem> items;
  for (int i = 0; i < kPages; ++i) items.push_back({e.items[i].encoded, raw.get() + i * kLayout.raw_bytes()});
  for (auto _ : state) {
    e.codec->Decode(items);
    benchmark::ClobberMemory();
  }
  Report(state, *e.codec);
}

void Compare(benchmark::State& state, const std::string& spec) {
  const Encoded e = Prepare(spec);
  constexpr int kQueryTokens = 4;
  std::vector<float> q(size_t{kQueryTokens} * 4 * kLayout.kv_heads * kLayout.head_dim);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(random);
  double errors = 0;
  for (auto _ : state) {
    errors = 0;
    for (const EncodeItem& item : e.items) {
      PageErrorTask task;
      task.codec = e.codec.get();
      task.raw = item.raw;
      task.encoded = item.encoded;
      task.q = q.data();
      task.q_tokens = kQueryTokens;
      task.query_heads = 4 * kLayout.kv_heads;
      errors += RelativePageError(task);
    }
  }
  Report(state, *e.codec);
  state.counters["relative_error"] = errors / kPages;
}

void Validate(benchmark::State& state, const std::string& spec) {
  const Encoded e = Prepare(spec);
  const size_t page_bytes = e.codec->info().encoded_bytes;
  for (auto _ : state) {
    for (const EncodeItem& item : e.items) KV_CHECK(e.codec->Validate(0, {item.encoded, page_bytes}).ok());
  }
  Report(state, *e.codec);
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) {
  using namespace kvmanager;
  if (const absl::Status status = Codecs().LoadPlugins(&argc, argv); !status.ok()) {
    std::fprintf(stderr, "codec_bench: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  std::vector<std::string> specs = TakeFlags("codec", &argc, argv);
  if (specs.empty()) {
    for (const BenchSpec& spec : BenchSpecs()) specs.push_back(spec.spec);
    for (const char* spec :
         {"hack:k_bits=8,v_bits=8", "hack:meta=16", "hack:rounding=stochastic",
          "hack:k_axis=token,k_bits=2,q=asymmetric,meta=16", "hack:k_axis=token,k_bits=2",
          "hack:rotation=none,v_norm=0", "million:k_m=64,k_bits=8,v_m=32,v_bits=8,calibration=synthetic",
          "zack+million:m=64,bits=8,calibration=synthetic"}) {
      specs.push_back(spec);
    }
  }
  for (const std::string& spec : specs) {
    const std::string name = spec == "raw" ? "copy" : spec;
    benchmark::RegisterBenchmark(("encode/" + name).c_str(), [spec](benchmark::State& s) { Encode(s, spec); });
    benchmark::RegisterBenchmark(("decode/" + name).c_str(), [spec](benchmark::State& s) { Decode(s, spec); });
    if (spec != "raw") {
      benchmark::RegisterBenchmark(("compare/" + name).c_str(), [spec](benchmark::State& s) { Compare(s, spec); });
    }
    benchmark::RegisterBenchmark(("validate/" + spec).c_str(), [spec](benchmark::State& s) { Validate(s, spec); });
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
