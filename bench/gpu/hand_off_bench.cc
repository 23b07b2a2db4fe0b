// A prompt computed on one GPU and decoded on another: hand-offs that begin with the prompt, beside the same sequence
// handed over in one piece when it is done.
//
//   bazel run --config=opt //bench/gpu:hand_off_bench -- [--tokens 32768] [--chunk 4096] [--codecs ...] [--json FILE]
//
// Two daemons, each on its GPU (or both on one, --gpus 0,0), and one process that drives both, so that one clock times
// both. The prompt's attention is all that is computed, over random K, V and queries: a model's projections would make
// prefill longer, and a hand-off easier to hide. Ways of computing it: by the daemon, which knows of each layer as it
// is done, and in this process, whose steps end with their last layer. Per codec and way, medians:
//   prefill    until the last layer's attention is there, with no hand-off beside
//   beside     the same with one
//   one piece  a hand-off of the whole sequence, from the call until the other daemon's client has claimed it
//   exposed    what is left of one that began with the prompt, from the last layer's attention until it is claimed
//   hidden     1 - exposed / one piece
// After each, one token is decoded on both GPUs: all layers' outputs must be equal, bit for bit.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "client/in_process.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "tests/device_engines.h"
#include "tests/harness.h"

namespace kvmanager::client {
namespace {

using testing::DaemonOptions;
using testing::DaemonProcess;

struct Arguments {
  int tokens = 32768, chunk = 4096, layers = 32, kv_heads = 8, query_heads = 32, head_dim = 128, repeats = 5;
  std::string pool = "24GiB", json;
  std::vector<int> gpus = {0, 1};  // the prompt's, and the one that decodes
  std::vector<std::string> codecs = {"raw", "hack:k_bits=3,v_bits=2"}, ways = {"daemon", "process"};

  size_t kv_bytes(int rows) const { return size_t(rows) * kv_heads * head_dim * 2; }
  size_t q_bytes(int rows) const { return size_t(rows) * query_heads * head_dim * 2; }
};

/// A daemon on a GPU, and an engine beside it.
class Side {
 public:
  static absl::StatusOr<std::unique_ptr<Side>> Make(const Arguments& a, int gpu) {
    auto side = std::unique_ptr<Side>(new Side(a, gpu));
    DaemonOptions options;
    options.more_flags = {"--devices", absl::StrCat(gpu),     "--device-pool-bytes",
                          a.pool,      "--hand-off-lease-ms", "20000"};
    KV_ASSIGN_OR_RETURN(side->daemon_, DaemonProcess::Start(options));
    KV_ASSIGN_OR_RETURN(side->client_, Client::Connect(side->daemon_->listen(), {.deadline_ms = 60000}));
    KV_ASSIGN_OR_RETURN(side->device_, DeviceClient::Open(side->client_.get(), gpu));
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&side->stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
    KV_ASSIGN_OR_RETURN(side->arena_, side->device_->CreateArena(2 * (a.kv_bytes(a.chunk) + a.q_bytes(a.chunk))));
    std::mt19937_64 random(1);  // alike on both sides
    std::normal_distribution<float> normal;
    std::vector<uint16_t> host((2 * a.kv_bytes(a.chunk) + a.q_bytes(a.chunk)) / 2);
    for (uint16_t& value : host) value = FloatToHalf(normal(random));
    KV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(side->arena_->data().data(), host.data(), host.size() * 2,
                                                  cudaMemcpyHostToDevice, side->stream_),
                                  "cudaMemcpyAsync"));
    KV_RETURN_IF_ERROR(side->Wait());
    return side;
  }
  ~Side() {
    (void)Use();
    run_.reset();
    cache_.reset();
    arena_.reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status OpenCache(const std::string& codec, bool in_process, const std::string& tenant) {
    KV_RETURN_IF_ERROR(Use());
    run_.reset();
    CacheOptions options;
    options.model = "hand-off";
    options.tenant = tenant;
    options.layers = a_.layers, options.kv_heads = a_.kv_heads, options.query_heads = a_.query_heads;
    options.head_dim = a_.head_dim;
    options.codec = codec;
    options.lag_pages = 0;
    options.device = gpu_;
    KV_ASSIGN_OR_RETURN(cache_, client_->OpenCache(options));
    if (!in_process) return absl::OkStatus();
    KV_ASSIGN_OR_RETURN(auto made, testing::CodecOf(*cache_, ""));
    InProcess::Options run;
    run.stream = stream_;
    run.tokens_max = a_.chunk;
    KV_ASSIGN_OR_RETURN(run_, InProcess::Create(device_.get(), cache_.get(), std::move(made), run));
    return absl::OkStatus();
  }
  void CloseCache() {
    run_.reset();
    cache_.reset();
  }

  /// Appends `tokens` at `first` and attends from them, in all layers, whose outputs `answers` gets one after the
  /// other, if it is given. Waits for the GPU.
  absl::Status Step(const Sequence& sequence, int first, int tokens, std::vector<uint16_t>* answers = nullptr) {
    KV_RETURN_IF_ERROR(Use());
    const StepEntry entry{sequence.id(), uint64_t(first), tokens};
    if (run_ != nullptr) {
      KV_RETURN_IF_ERROR(run_->Begin({&entry, 1}, true, false));
      for (int layer = 0; layer < a_.layers; ++layer) KV_RETURN_IF_ERROR(run_->Append(layer, k().data, v().data));
      KV_RETURN_IF_ERROR(run_->End());
      KV_RETURN_IF_ERROR(run_->Begin({&entry, 1}, false, true));
    }
    for (int layer = 0; layer < a_.layers; ++layer) {
      if (run_ != nullptr) {
        KV_RETURN_IF_ERROR(run_->Attend(layer, q().data, out().data, nullptr));
      } else {
        KV_RETURN_IF_ERROR(StepInDaemon(entry, layer));
      }
      if (answers == nullptr) continue;
      KV_RETURN_IF_ERROR(Wait());
      const size_t at = answers->size(), bytes = a_.q_bytes(tokens);
      answers->resize(at + bytes / 2);
      KV_RETURN_IF_ERROR(CudaStatus(
          cudaMemcpyAsync(answers->data() + at, out().data, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpy"));
    }
    if (run_ != nullptr) KV_RETURN_IF_ERROR(run_->End());
    return Wait();
  }
  absl::Status Prefill(const Sequence& sequence) {
    for (int at = 0; at < a_.tokens; at += a_.chunk) {
      KV_RETURN_IF_ERROR(Step(sequence, at, std::min(a_.chunk, a_.tokens - at)));
    }
    return absl::OkStatus();
  }
  void Forget(const Sequence& sequence) {
    if (run_ != nullptr) run_->Forget(sequence.id());
  }
  Cache& cache() { return *cache_; }
  std::string peer() const { return daemon_->peer(); }
  double between_gpus() const {
    const auto page = testing::Scrape(*daemon_);
    return page.ok() ? page->Sum("kvmanager_hand_offs_between_gpus_total") : -1;
  }

 private:
  Side(const Arguments& a, int gpu) : a_(a), gpu_(gpu) {}
  absl::Status Use() const { return device_ == nullptr ? absl::OkStatus() : device_->device().Use(); }
  absl::Status Wait() const { return CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  TensorView k() const { return arena_->View(0, a_.kv_bytes(a_.chunk)); }
  TensorView v() const { return arena_->View(a_.kv_bytes(a_.chunk), a_.kv_bytes(a_.chunk)); }
  TensorView q() const { return arena_->View(2 * a_.kv_bytes(a_.chunk), a_.q_bytes(a_.chunk)); }
  TensorView out() const {
    return arena_->View(2 * a_.kv_bytes(a_.chunk) + a_.q_bytes(a_.chunk), a_.q_bytes(a_.chunk));
  }
  absl::Status StepInDaemon(const StepEntry& entry, int layer) {
    const auto rows = [](TensorView view, size_t bytes) {
      view.bytes = bytes;
      return view;
    };
    StepBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = rows(k(), a_.kv_bytes(entry.tokens));
    batch.v = rows(v(), a_.kv_bytes(entry.tokens));
    batch.q = rows(q(), a_.q_bytes(entry.tokens));
    batch.out = rows(out(), a_.q_bytes(entry.tokens));
    batch.q_dtype = DType::kFloat16;
    batch.ready = ++ready_;
    KV_RETURN_IF_ERROR(device_->EnqueueReady(stream_, ready_));
    KV_ASSIGN_OR_RETURN(const StepResult result, cache_->Step(batch));
    return device_->EnqueueWaitDone(stream_, result.done);
  }

  const Arguments& a_;
  const int gpu_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<DeviceClient> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<InProcess> run_;  // nullptr: the daemon attends
  cudaStream_t stream_ = nullptr;
  uint64_t ready_ = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The same token on both GPUs.
absl::Status Compare(const Arguments& a, Side& from, const Sequence& sent, Side& to, const Sequence& claimed) {
  std::vector<uint16_t> here, there;
  KV_RETURN_IF_ERROR(from.Step(sent, a.tokens, 1, &here));
  KV_RETURN_IF_ERROR(to.Step(claimed, a.tokens, 1, &there));
  if (here != there) return absl::DataLossError("the other GPU attends to something else");
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::json> RunWay(const Arguments& a, Side& from, Side& to, const std::string& codec,
                                      const std::string& way) {
  const std::string tenant = absl::StrCat(codec, " ", way);
  KV_RETURN_IF_ERROR(from.OpenCache(codec, way == "process", tenant));
  KV_RETURN_IF_ERROR(to.OpenCache(codec, way == "process", tenant));
  const SteadyClock clock;
  const HandOffOptions options{.timeout_ms = 60000, .will_append = true};
  std::vector<double> prefill_ms, beside_ms, piece_ms, exposed_ms;
  uint64_t bytes = 0;
  for (int i = -1; i < a.repeats; ++i) {  // the first, which loads kernels and maps slabs, does not count
    const auto note = [&](std::vector<double>* ms, int64_t ns) {
      if (i >= 0) ms->push_back(double(ns) / 1e6);
    };
    for (const bool streamed : {false, true}) {
      const double before = to.between_gpus();
      KV_ASSIGN_OR_RETURN(auto made, from.cache().CreateSequence());
      const Sequence& sequence = *made.sequence;
      std::unique_ptr<HandOff> hand_off;
      if (streamed) {
        KV_ASSIGN_OR_RETURN(hand_off, made.sequence->BeginHandOff(to.peer(), uint64_t(a.tokens), options));
      }
      const int64_t begin = clock.NowNs();
      KV_RETURN_IF_ERROR(from.Prefill(sequence));
      const int64_t done = clock.NowNs();
      note(streamed ? &beside_ms : &prefill_ms, done - begin);
      absl::StatusOr<HandOffOutcome> outcome =
          streamed ? hand_off->Finish("") : made.sequence->HandOff(to.peer(), "", options);
      if (!outcome.ok()) return outcome.status();
      KV_ASSIGN_OR_RETURN(auto claimed, to.cache().Claim(outcome->ticket));
      note(streamed ? &exposed_ms : &piece_ms, clock.NowNs() - done);
      bytes = outcome->bytes_sent;
      if (to.between_gpus() != before + 1) return absl::InternalError("it did not go from GPU to GPU");
      KV_RETURN_IF_ERROR(Compare(a, from, sequence, to, *claimed.sequence));
      from.Forget(sequence);
      to.Forget(*claimed.sequence);
    }
  }
  from.CloseCache();
  to.CloseCache();
  const double piece = Median(piece_ms), exposed = Median(exposed_ms);
  std::printf("| %s | %s | %.0f | %.1f | %.1f | %.2f | %.2f | %.2f .. %.2f | %.3f |\n", codec.c_str(), way.c_str(),
              double(bytes) / 1e6, Median(prefill_ms), Median(beside_ms), piece, exposed,
              *std::min_element(exposed_ms.begin(), exposed_ms.end()),
              *std::max_element(exposed_ms.begin(), exposed_ms.end()), 1 - exposed / piece);
  std::fflush(stdout);
  return nlohmann::json{{"codec", codec},
                        {"way", way},
                        {"bytes", bytes},
                        {"prefill_ms", prefill_ms},
                        {"prefill_beside_ms", beside_ms},
                        {"one_piece_ms", piece_ms},
                        {"exposed_ms", exposed_ms},
                        {"hidden", 1 - exposed / piece}};
}

absl::Status Run(const Arguments& a) {
  int gpus = 0;
  const int wanted = 1 + std::max(a.gpus[0], a.gpus[1]);
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < wanted) {
    return absl::FailedPreconditionError(
        absl::StrCat(gpus, " GPUs here, and --gpus ", a.gpus[0], ",", a.gpus[1], " wants ", wanted));
  }
  KV_ASSIGN_OR_RETURN(const auto from, Side::Make(a, a.gpus[0]));
  KV_ASSIGN_OR_RETURN(const auto to, Side::Make(a, a.gpus[1]));
  std::printf(
      "%d tokens in steps of %d, %d layers, %d query and %d KV heads of %d; medians of %d, ms\n\n"
      "| codec | attention by | MB sent | prefill | beside a hand-off | in one piece | exposed | from .. to | hidden "
      "|\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
      a.tokens, a.chunk, a.layers, a.query_heads, a.kv_heads, a.head_dim, a.repeats);
  nlohmann::json rows = nlohmann::json::array();
  for (const std::string& codec : a.codecs) {
    for (const std::string& way : a.ways) {
      KV_ASSIGN_OR_RETURN(nlohmann::json row, RunWay(a, *from, *to, codec, way));
      rows.push_back(std::move(row));
    }
  }
  if (!a.json.empty()) std::ofstream(a.json) << rows.dump(1) << "\n";
  std::printf(
      "\nNot covered: a model's own kernels beside attention, more than one hand-off at once, GPUs without NVLink.\n");
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::client

int main(int argc, char** argv) {
  kvmanager::client::Arguments a;
  CLI::App app("Prompts computed on one GPU and decoded on another, handed over meanwhile or in one piece");
  app.add_option("--tokens", a.tokens, "of the prompt")->check(CLI::Range(64, 1 << 20))->capture_default_str();
  app.add_option("--chunk", a.chunk, "tokens of a step")->check(CLI::Range(64, 8192))->capture_default_str();
  app.add_option("--layers", a.layers)->check(CLI::Range(1, 128))->capture_default_str();
  app.add_option("--kv-heads", a.kv_heads)->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--query-heads", a.query_heads, "a multiple of them")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--repeats", a.repeats)->check(CLI::Range(1, 100))->capture_default_str();
  app.add_option("--pool", a.pool, "--device-pool-bytes of each daemon")->capture_default_str();
  app.add_option("--gpus", a.gpus, "the prompt's and the one that decodes; one GPU twice: two daemons share it")
      ->delimiter(',')
      ->expected(2)
      ->check(CLI::Range(0, 63))
      ->capture_default_str();
  app.add_option("--codecs", a.codecs, "of hack and raw, and others that need no artifact");
  app.add_option("--ways", a.ways, "daemon, process")->delimiter(',')->check(CLI::IsMember({"daemon", "process"}));
  app.add_option("--json", a.json, "a file for all times");
  CLI11_PARSE(app, argc, argv);
  if (a.query_heads % a.kv_heads != 0) {
    std::fprintf(stderr, "--query-heads is %d, must be a multiple of --kv-heads, %d\n", a.query_heads, a.kv_heads);
    return 2;
  }
  const absl::Status status = kvmanager::client::Run(a);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
