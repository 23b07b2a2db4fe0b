// What sharing a GPU with the daemon costs an engine: attention of one layer in the daemon and in the engine's own
// process, beside an empty call; and steps in the engine's process while pages are encoded, by itself or by the daemon.
// With --only-sampling: what it costs decode steps that the daemon samples how good encoded pages are.
//
//   device_bench --daemon bazel-bin/kvmanager/daemon/kvmanagerd [--json FILE]
//
// K, V and queries are random; 32 query and 8 KV heads, head_dim 128, 32 layers, hack with 2 bits.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/bench_daemon.h"
#include "client/client.h"
#include "client/device.h"
#include "client/in_process.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/sm_clock.h"

namespace kvmanager::client {
namespace {

constexpr int kLayers = 32, kKvHeads = 8, kQueryHeads = 32, kHeadDim = 128;
constexpr char kCodec[] = "hack:k_bits=2,v_bits=2";
constexpr size_t kKvRowBytes = size_t{kKvHeads} * kHeadDim * 2, kQRowBytes = size_t{kQueryHeads} * kHeadDim * 2;
constexpr int kFillTokens = 1024;  // of one append, while contexts are filled

/// What goes on beside steps.
enum class Beside { kEncodeHere, kEncodeByDaemon, kAppend };
const std::map<std::string, Beside> kBesides = {
    {"own", Beside::kEncodeHere}, {"daemon", Beside::kEncodeByDaemon}, {"appends", Beside::kAppend}};

std::string Text(Beside beside) {
  switch (beside) {
    case Beside::kEncodeHere:
      return "this process";
    case Beside::kEncodeByDaemon:
      return "the daemon";
    case Beside::kAppend:
      return "nobody: raw pages are appended";
  }
  return "";
}

struct Arguments {
  std::string daemon, json, pool = "24GiB";
  int batch = 16, context = 8192, rounds = 2000, steps = 600, settle_steps = 1000, change_steps = 100, repeats = 3;
  bool only_steps = false, only_sampling = false;
  std::vector<Beside> beside = {Beside::kEncodeHere, Beside::kEncodeByDaemon};
  double encode_gb_per_s = 10;
  int64_t busy_poll_us = 1000;
};

absl::Status Cuda(cudaError_t error, const char* call) { return CudaStatus(error, call); }

absl::StatusOr<std::shared_ptr<const Codec>> MakeCodec(const Cache& cache) {
  static const CodecRegistry& registry = *[] {
    auto* made = new CodecRegistry;
    RegisterBuiltinCodecs(*made);
    return made;
  }();
  CodecContext context;
  context.layout.kv_heads = kKvHeads;
  context.layout.head_dim = kHeadDim;
  context.layout.page_tokens = 64;
  context.layers = kLayers;
  context.query_heads = kQueryHeads;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry.Create(cache.description().options.codec, context));
  return std::shared_ptr<const Codec>(std::move(codec));
}

/// An engine that attends in its own process, on a stream of the highest or the lowest priority.
struct Engine {
  std::unique_ptr<Client> client;
  std::unique_ptr<DeviceClient> device;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<InProcess> run;
  std::vector<std::unique_ptr<Sequence>> sequences;
  cudaStream_t stream = nullptr;
  TensorView k, v, q, out;

  static absl::StatusOr<std::unique_ptr<Engine>> Make(const std::string& address, int64_t busy_poll_us,
                                                      const std::string& model, const std::string& codec_spec,
                                                      bool lowest, bool encode_here, int tokens_max) {
    auto engine = std::make_unique<Engine>();
    Client::Options options{.name = "device_bench", .connect_ms = 20000, .busy_poll_us = busy_poll_us};
    KV_ASSIGN_OR_RETURN(engine->client, Client::Connect(address, options));
    KV_ASSIGN_OR_RETURN(engine->device, DeviceClient::Open(engine->client.get(), 0));
    CacheOptions cache;
    cache.model = model;
    cache.layers = kLayers, cache.kv_heads = kKvHeads, cache.query_heads = kQueryHeads, cache.head_dim = kHeadDim;
    cache.codec = codec_spec;
    cache.device = 0;
    KV_ASSIGN_OR_RETURN(engine->cache, engine->client->OpenCache(cache));
    int least = 0, greatest = 0;
    KV_RETURN_IF_ERROR(Cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities"));
    KV_RETURN_IF_ERROR(Cuda(
        cudaStreamCreateWithPriority(&engine->stream, cudaStreamNonBlocking, lowest ? least : greatest), "stream"));
    KV_ASSIGN_OR_RETURN(auto codec, MakeCodec(*engine->cache));
    InProcess::Options run;
    run.stream = engine->stream;
    run.encode_here = encode_here;
    run.tokens_max = tokens_max;
    KV_ASSIGN_OR_RETURN(engine->run,
                        InProcess::Create(engine->device.get(), engine->cache.get(), std::move(codec), run));
    const size_t kv = size_t(tokens_max) * kKvRowBytes, rows = size_t{256} * kQRowBytes;
    KV_ASSIGN_OR_RETURN(engine->arena, engine->device->CreateArena(2 * kv + 2 * rows));
    engine->k = engine->arena->View(0, kv);
    engine->v = engine->arena->View(kv, kv);
    engine->q = engine->arena->View(2 * kv, rows);
    engine->out = engine->arena->View(2 * kv + rows, rows);
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> host((2 * kv + rows) / 2);
    for (uint16_t& x : host) x = FloatToHalf(normal(random));
    KV_RETURN_IF_ERROR(
        Cuda(cudaMemcpyAsync(engine->k.data, host.data(), host.size() * 2, cudaMemcpyHostToDevice, engine->stream),
             "cudaMemcpyAsync"));
    KV_RETURN_IF_ERROR(engine->Wait());
    return engine;
  }
  absl::Status Wait() const { return Cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

  absl::Status AddSequences(int count) {
    for (int i = 0; i < count; ++i) {
      KV_ASSIGN_OR_RETURN(auto made, cache->CreateSequence());
      sequences.push_back(std::move(made.sequence));
    }
    return absl::OkStatus();
  }
  /// Appends `tokens` tokens at `position` of one sequence, in all layers; the GPU works on.
  absl::Status Append(const Sequence& sequence, uint64_t position, int tokens) {
    const StepEntry entry{sequence.id(), position, tokens};
    KV_RETURN_IF_ERROR(run->Begin({&entry, 1}, true, false));
    for (int layer = 0; layer < kLayers; ++layer) KV_RETURN_IF_ERROR(run->Append(layer, k.data, v.data));
    return run->End();
  }
  absl::Status Fill(int context) {
    for (const auto& sequence : sequences) {
      for (int at = 0; at < context; at += kFillTokens) {
        KV_RETURN_IF_ERROR(Append(*sequence, uint64_t(at), std::min(kFillTokens, context - at)));
        KV_RETURN_IF_ERROR(Wait());
      }
    }
    return absl::OkStatus();
  }
};

/// Attention of one layer, from call to result: in this process, and in the daemon.
absl::StatusOr<nlohmann::json> Ways(const std::string& address, const Arguments& arguments, int64_t busy_poll_us) {
  KV_ASSIGN_OR_RETURN(auto engine, Engine::Make(address, busy_poll_us, "ways", kCodec, false, true, kFillTokens));
  KV_RETURN_IF_ERROR(engine->AddSequences(arguments.batch));
  KV_RETURN_IF_ERROR(engine->Fill(arguments.context));
  std::vector<StepEntry> entries;
  for (const auto& sequence : engine->sequences) {
    entries.push_back({sequence->id(), uint64_t(arguments.context - 1), 1});
  }
  const int warm_up = arguments.rounds / 10 + 1;
  const auto measure = [&](auto call) -> absl::StatusOr<Percentiles> {
    std::vector<double> us;
    for (int i = -warm_up; i < arguments.rounds; ++i) {
      const double begin = NowUs();
      KV_RETURN_IF_ERROR(call(i + warm_up));
      if (i >= 0) us.push_back(NowUs() - begin);
    }
    return Of(std::move(us));
  };
  KV_ASSIGN_OR_RETURN(const Percentiles ping, measure([&](int) { return engine->client->Ping(); }));
  // In this process: the step begins once, as it does for all layers.
  KV_RETURN_IF_ERROR(engine->run->Begin(entries, false, true));
  KV_ASSIGN_OR_RETURN(const Percentiles own, measure([&](int i) -> absl::Status {
                        KV_RETURN_IF_ERROR(engine->run->Attend(i % kLayers, engine->q.data, engine->out.data, nullptr));
                        return engine->Wait();
                      }));
  std::vector<double> run_us;
  for (int i = 0; i < arguments.rounds; ++i) {
    const double begin = NowUs();
    KV_RETURN_IF_ERROR(engine->run->Attend(i % kLayers, engine->q.data, engine->out.data, nullptr));
    run_us.push_back(NowUs() - begin);
    if (i % 64 == 63) KV_RETURN_IF_ERROR(engine->Wait());
  }
  KV_RETURN_IF_ERROR(engine->run->End());
  KV_RETURN_IF_ERROR(engine->Wait());
  uint64_t ready = 0;
  const size_t bytes = size_t(arguments.batch) * kQRowBytes;
  const auto by_daemon = [&](int i) -> absl::Status {
    StepBatch batch;
    batch.layer = i % kLayers;
    batch.entries = entries;
    batch.q = {engine->q.data, bytes, engine->q.arena};
    batch.out = {engine->out.data, bytes, engine->out.arena};
    batch.q_dtype = DType::kFloat16;
    batch.ready = ++ready;
    KV_RETURN_IF_ERROR(engine->device->EnqueueReady(engine->stream, ready));
    KV_ASSIGN_OR_RETURN(const StepResult result, engine->cache->Step(batch));
    KV_RETURN_IF_ERROR(engine->device->EnqueueWaitDone(engine->stream, result.done));
    return engine->Wait();
  };
  for (int i = 0; i < kLayers; ++i) KV_RETURN_IF_ERROR(by_daemon(i));  // its tables are made
  KV_ASSIGN_OR_RETURN(const Percentiles daemon, measure(by_daemon));
  return nlohmann::json{{"empty_call", ping.Json()},
                        {"in_process", own.Json()},
                        {"in_process_host", Of(run_us).Json()},
                        {"in_daemon", daemon.Json()},
                        {"daemon_less_own_p50_us", daemon.p50_us - own.p50_us},
                        {"daemon_less_own_less_empty_p50_us", daemon.p50_us - own.p50_us - ping.p50_us}};
}

/// Pages are appended and encoded beside the engine, at a rate of raw bytes, while it is on; by this process or by the
/// daemon.
class Load {
 public:
  Load(const std::string& address, const Arguments& arguments, Beside beside)
      : address_(address), arguments_(arguments), beside_(beside), thread_([this] { status_ = Run(); }) {}
  ~Load() { (void)Stop(); }
  /// It has run once, so that nothing is made or loaded for the first time later; or it has failed.
  bool ready() const { return ready_ || ended_; }
  void Set(bool on) { on_ = on; }
  /// Bytes of raw K and V that were appended, and encoded if anybody does.
  double bytes() const { return double(chunks_) * kChunkBytes; }
  absl::Status Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  static constexpr int kSequenceTokens = 8192;  // of which a chunk is appended at a time, as of a prefill in chunks
  static constexpr double kChunkBytes = double{kFillTokens} * 2 * kKvRowBytes * kLayers;

  absl::Status Run() {
    const absl::Status status = Work();
    ended_ = true;
    return status;
  }
  absl::Status Work() {
    KV_ASSIGN_OR_RETURN(auto engine, Engine::Make(address_, arguments_.busy_poll_us, "load",
                                                  beside_ == Beside::kAppend ? "raw" : kCodec, true,
                                                  beside_ != Beside::kEncodeByDaemon, kFillTokens));
    KV_RETURN_IF_ERROR(engine->AddSequences(1));
    const double pause_us = kChunkBytes / arguments_.encode_gb_per_s * 1e-3;
    uint64_t position = 0;
    double next = 0;
    while (!stop_) {
      if (ready_ && !on_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      KV_RETURN_IF_ERROR(engine->Append(*engine->sequences[0], position, kFillTokens));
      position += kFillTokens;
      if (position == kSequenceTokens) {
        KV_RETURN_IF_ERROR(engine->Wait());
        engine->run->Forget(engine->sequences[0]->id());
        engine->sequences.clear();
        KV_RETURN_IF_ERROR(engine->AddSequences(1));
        position = 0;
        ready_ = true;
      }
      ++chunks_;
      // A chunk that is late is not made up for: the rate is never above what was asked for.
      next = std::max(next + pause_us, NowUs());
      while (NowUs() < next && !stop_) std::this_thread::yield();
    }
    KV_RETURN_IF_ERROR(engine->Wait());
    engine->run->Forget(engine->sequences[0]->id());
    return absl::OkStatus();
  }

  const std::string address_;
  const Arguments& arguments_;
  const Beside beside_;
  std::atomic<bool> stop_{false}, on_{false}, ready_{false}, ended_{false};
  std::atomic<uint64_t> chunks_{0};
  absl::Status status_;
  std::thread thread_;
};

/// Steps of all layers, one after the other, and what they took.
struct Phase {
  Percentiles us;
  double sm_mhz_least = 0, sm_mhz_most = 0;
  double seconds = 0;
  nlohmann::json Json() const {
    nlohmann::json json = us.Json();
    json["sm_mhz_least"] = sm_mhz_least, json["sm_mhz_most"] = sm_mhz_most;
    return json;
  }
};

/// Whole steps of all layers, appending a token to each sequence; alone and beside encoding, by turns. Steps never
/// pause: a GPU whose load rises after a pause lowers its clock for some tenths of a second, a second later. What the
/// clock was is part of the result.
absl::StatusOr<nlohmann::json> Steps(const std::string& address, const Arguments& arguments) {
  KV_ASSIGN_OR_RETURN(auto engine,
                      Engine::Make(address, arguments.busy_poll_us, "steps", kCodec, false, true, kFillTokens));
  KV_RETURN_IF_ERROR(engine->AddSequences(arguments.batch));
  KV_RETURN_IF_ERROR(engine->Fill(arguments.context));
  std::map<Beside, std::unique_ptr<Load>> loads;
  for (const Beside beside : arguments.beside) {
    if (loads.count(beside)) continue;
    Load& load = *(loads[beside] = std::make_unique<Load>(address, arguments, beside));
    while (!load.ready()) std::this_thread::yield();
  }
  uint64_t position = uint64_t(arguments.context);
  cudaEvent_t first, last;
  KV_RETURN_IF_ERROR(Cuda(cudaEventCreate(&first), "cudaEventCreate"));
  KV_RETURN_IF_ERROR(Cuda(cudaEventCreate(&last), "cudaEventCreate"));
  void* pinned = nullptr;
  KV_RETURN_IF_ERROR(Cuda(cudaMallocHost(&pinned, sizeof(SmClockSample)), "cudaMallocHost"));
  auto* const clock = static_cast<SmClockSample*>(pinned);
  const auto run = [&](int steps) -> absl::StatusOr<Phase> {
    Phase phase;
    std::vector<double> us;
    std::vector<StepEntry> entries(engine->sequences.size());
    const double begin = NowUs();
    for (int i = 0; i < steps; ++i, ++position) {
      for (size_t s = 0; s < entries.size(); ++s) entries[s] = {engine->sequences[s]->id(), position, 1};
      KV_RETURN_IF_ERROR(engine->run->Begin(entries, true, true));
      KV_RETURN_IF_ERROR(Cuda(cudaEventRecord(first, engine->stream), "cudaEventRecord"));
      for (int layer = 0; layer < kLayers; ++layer) {
        KV_RETURN_IF_ERROR(engine->run->Append(layer, engine->k.data, engine->v.data));
        KV_RETURN_IF_ERROR(engine->run->Attend(layer, engine->q.data, engine->out.data, nullptr));
      }
      KV_RETURN_IF_ERROR(Cuda(cudaEventRecord(last, engine->stream), "cudaEventRecord"));
      KV_RETURN_IF_ERROR(engine->run->End());
      KV_RETURN_IF_ERROR(Cuda(cudaError_t(SampleSmClock(clock, engine->stream)), "SampleSmClock"));
      KV_RETURN_IF_ERROR(engine->Wait());
      float ms = 0;
      KV_RETURN_IF_ERROR(Cuda(cudaEventElapsedTime(&ms, first, last), "cudaEventElapsedTime"));
      us.push_back(double(ms) * 1e3);
      phase.sm_mhz_least = i == 0 ? clock->mhz() : std::min(phase.sm_mhz_least, clock->mhz());
      phase.sm_mhz_most = std::max(phase.sm_mhz_most, clock->mhz());
    }
    phase.seconds = (NowUs() - begin) * 1e-6;
    phase.us = Of(std::move(us));
    return phase;
  };
  KV_ASSIGN_OR_RETURN(const Phase rising, run(arguments.settle_steps));  // after a pause
  nlohmann::json json = {{"rising", rising.Json()}, {"runs", nlohmann::json::array()}};
  // Contexts grow from step to step, so what is idle is measured before and after.
  KV_ASSIGN_OR_RETURN(Phase before, run(arguments.steps));
  for (int again = 0; again < arguments.repeats; ++again) {
    for (const Beside beside : arguments.beside) {
      Load& load = *loads[beside];
      load.Set(true);
      KV_ASSIGN_OR_RETURN(const Phase changing, run(arguments.change_steps));
      const double bytes = load.bytes();
      KV_ASSIGN_OR_RETURN(const Phase loaded, run(arguments.steps));
      const double gb_per_s = (load.bytes() - bytes) / loaded.seconds * 1e-9;
      load.Set(false);
      KV_RETURN_IF_ERROR(run(arguments.change_steps).status());
      KV_ASSIGN_OR_RETURN(const Phase after, run(arguments.steps));
      json["runs"].push_back({{"encodes", Text(beside)},
                              {"idle_before", before.Json()},
                              {"change", changing.Json()},
                              {"step", loaded.Json()},
                              {"idle_after", after.Json()},
                              {"encoded_gb_per_s", gb_per_s},
                              {"p50_ratio", 2 * loaded.us.p50_us / (before.us.p50_us + after.us.p50_us)},
                              {"p99_ratio", 2 * loaded.us.p99_us / (before.us.p99_us + after.us.p99_us)}});
      before = after;
    }
  }
  for (auto& [beside, load] : loads) KV_RETURN_IF_ERROR(load->Stop());
  cudaEventDestroy(first);
  cudaEventDestroy(last);
  cudaFreeHost(pinned);
  return json;
}

/// Decode steps of an engine whose daemon samples how good encoded pages are and of one whose daemon does not, by
/// turns: a step of all layers in the engine's process (GPU time, and wall time), and a layer's attention in the
/// daemon.
absl::StatusOr<nlohmann::json> Sampling(const Arguments& arguments) {
  struct Side {
    std::string sample;
    std::unique_ptr<BenchDaemon> daemon;
    std::unique_ptr<Engine> engine;
    uint64_t ready = 0;
    std::vector<double> gpu_us, wall_us, daemon_us;
  };
  Side sides[2];
  sides[0].sample = "0", sides[1].sample = "64";
  for (Side& side : sides) {
    const std::vector<std::string> flags = {
        "--device-pool-bytes", arguments.pool, "--host-pool-bytes", "134217728",
        "--quality-sample",    side.sample,    "--busy-poll-us",    absl::StrCat(arguments.busy_poll_us)};
    KV_ASSIGN_OR_RETURN(BenchDaemon daemon, BenchDaemon::Start(arguments.daemon, flags));
    side.daemon = std::make_unique<BenchDaemon>(std::move(daemon));
    KV_ASSIGN_OR_RETURN(side.engine, Engine::Make(side.daemon->address(), arguments.busy_poll_us, "sampling", kCodec,
                                                  false, true, kFillTokens));
    KV_RETURN_IF_ERROR(side.engine->AddSequences(arguments.batch));
    KV_RETURN_IF_ERROR(side.engine->Fill(arguments.context));
  }
  cudaEvent_t first, last;
  KV_RETURN_IF_ERROR(Cuda(cudaEventCreate(&first), "cudaEventCreate"));
  KV_RETURN_IF_ERROR(Cuda(cudaEventCreate(&last), "cudaEventCreate"));
  std::vector<StepEntry> entries(size_t(arguments.batch));
  const auto own_step = [&](Side& side, uint64_t position, bool keep) -> absl::Status {
    Engine& engine = *side.engine;
    for (size_t s = 0; s < entries.size(); ++s) entries[s] = {engine.sequences[s]->id(), position, 1};
    const double begin = NowUs();
    KV_RETURN_IF_ERROR(engine.run->Begin(entries, true, true));
    KV_RETURN_IF_ERROR(Cuda(cudaEventRecord(first, engine.stream), "cudaEventRecord"));
    for (int layer = 0; layer < kLayers; ++layer) {
      KV_RETURN_IF_ERROR(engine.run->Append(layer, engine.k.data, engine.v.data));
      KV_RETURN_IF_ERROR(engine.run->Attend(layer, engine.q.data, engine.out.data, nullptr));
    }
    KV_RETURN_IF_ERROR(Cuda(cudaEventRecord(last, engine.stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(engine.run->End());
    KV_RETURN_IF_ERROR(engine.Wait());
    float ms = 0;
    KV_RETURN_IF_ERROR(Cuda(cudaEventElapsedTime(&ms, first, last), "cudaEventElapsedTime"));
    if (keep) side.wall_us.push_back(NowUs() - begin), side.gpu_us.push_back(double(ms) * 1e3);
    return absl::OkStatus();
  };
  const auto daemon_layer = [&](Side& side, int layer, uint64_t position, bool keep) -> absl::Status {
    Engine& engine = *side.engine;
    for (size_t s = 0; s < entries.size(); ++s) entries[s] = {engine.sequences[s]->id(), position, 1};
    const size_t bytes = size_t(arguments.batch) * kQRowBytes;
    StepBatch batch;
    batch.layer = layer;
    batch.entries = entries;
    batch.q = {engine.q.data, bytes, engine.q.arena};
    batch.out = {engine.out.data, bytes, engine.out.arena};
    batch.q_dtype = DType::kFloat16;
    batch.ready = ++side.ready;
    const double begin = NowUs();
    KV_RETURN_IF_ERROR(engine.device->EnqueueReady(engine.stream, side.ready));
    KV_ASSIGN_OR_RETURN(const StepResult result, engine.cache->Step(batch));
    KV_RETURN_IF_ERROR(engine.device->EnqueueWaitDone(engine.stream, result.done));
    KV_RETURN_IF_ERROR(engine.Wait());
    if (keep) side.daemon_us.push_back(NowUs() - begin);
    return absl::OkStatus();
  };
  uint64_t position = uint64_t(arguments.context);
  for (int i = -arguments.settle_steps; i < arguments.steps; ++i, ++position) {
    for (const int turn : {0, 1}) KV_RETURN_IF_ERROR(own_step(sides[(i & 1) ^ turn], position, i >= 0));
  }
  for (int i = -kLayers; i < arguments.rounds; ++i) {
    for (const int turn : {0, 1}) {
      KV_RETURN_IF_ERROR(daemon_layer(sides[(i & 1) ^ turn], (i + kLayers) % kLayers, position - 1, i >= 0));
    }
  }
  cudaEventDestroy(first);
  cudaEventDestroy(last);
  nlohmann::json json;
  const auto show = [&](const char* name, std::vector<double> Side::*us) {
    std::vector<double> more;
    for (size_t i = 0; i < (sides[0].*us).size(); ++i) more.push_back((sides[1].*us)[i] - (sides[0].*us)[i]);
    double sum = 0;
    for (const double x : more) sum += x;
    std::sort(more.begin(), more.end());
    json[name] = {{"without", Of(sides[0].*us).Json()},
                  {"with", Of(sides[1].*us).Json()},
                  {"more_mean_us", sum / double(more.size())},
                  {"more_quartiles_us", {more[more.size() / 4], more[more.size() / 2], more[more.size() * 3 / 4]}}};
  };
  show("own_step_gpu", &Side::gpu_us);
  show("own_step_wall", &Side::wall_us);
  show("daemon_layer_wall", &Side::daemon_us);
  return json;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{"What sharing a GPU with kvmanagerd costs an engine.", "device_bench"};
  app.add_option("--daemon", arguments.daemon, "path of kvmanagerd")->required();
  app.add_option("--json", arguments.json, "write the results to this file");
  app.add_option("--device-pool-bytes", arguments.pool, "of the daemon")->capture_default_str();
  app.add_option("--batch", arguments.batch, "sequences")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--context", arguments.context, "tokens")->check(CLI::Range(64, 1 << 20))->capture_default_str();
  app.add_option("--rounds", arguments.rounds, "calls per measurement")->capture_default_str();
  app.add_option("--steps", arguments.steps, "steps per measurement")->capture_default_str();
  app.add_option("--settle-steps", arguments.settle_steps,
                 "before the first measurement, for the GPU's clock to settle")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--change-steps", arguments.change_steps, "that are not measured when what goes on beside changes")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_flag("--only-steps", arguments.only_steps, "no attention of one layer");
  app.add_flag("--only-sampling", arguments.only_sampling,
               "nothing but what it costs that the daemon compares encoded pages (--quality-sample)");
  app.add_option("--beside", arguments.beside, "what goes on beside steps: own, daemon (which encode), appends")
      ->delimiter(',')
      ->transform(CLI::CheckedTransformer(kBesides));
  app.add_option("--repeats", arguments.repeats, "measurements beside each")->capture_default_str();
  app.add_option("--encode-gb-per-s", arguments.encode_gb_per_s, "of raw K and V")->capture_default_str();
  app.add_option("--busy-poll-us", arguments.busy_poll_us, "how long both ends poll")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  AllowManyStreams();
  nlohmann::json json = {{"batch", arguments.batch}, {"context", arguments.context}};
  const auto work = [&]() -> absl::Status {
    if (arguments.only_sampling) {
      KV_ASSIGN_OR_RETURN(json["sampling"], Sampling(arguments));
      return absl::OkStatus();
    }
    for (const bool poll : {false, true}) {
      if (arguments.only_steps && !poll) continue;
      std::vector<std::string> flags = {"--device-pool-bytes", arguments.pool, "--host-pool-bytes", "134217728"};
      if (poll) flags.insert(flags.end(), {"--busy-poll-us", absl::StrCat(arguments.busy_poll_us)});
      KV_ASSIGN_OR_RETURN(const BenchDaemon daemon, BenchDaemon::Start(arguments.daemon, flags));
      if (!arguments.only_steps) {
        KV_ASSIGN_OR_RETURN(json[poll ? "polling" : "blocking"],
                            Ways(daemon.address(), arguments, poll ? arguments.busy_poll_us : 0));
      }
      if (!poll) continue;
      KV_ASSIGN_OR_RETURN(json["steps"], Steps(daemon.address(), arguments));
    }
    return absl::OkStatus();
  };
  const absl::Status status = work();
  std::printf("%s\n", json.dump(1).c_str());
  if (!arguments.json.empty()) std::ofstream(arguments.json) << json.dump(1) << "\n";
  if (status.ok()) return 0;
  std::fprintf(stderr, "device_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kvmanager::client

int main(int argc, char** argv) { return kvmanager::client::Main(argc, argv); }
