// One client's largest steps on a GPU, and what another client on the same GPU sees of them: attention that takes long
// runs in several launches, which answer as one would.
//
// What is measured is printed: another client's decode steps, idle and beside those, and launches by their ends.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/device_engines.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::Arena;
using client::Cache;
using client::Client;
using client::DeviceClient;
using client::Sequence;
using client::StepBatch;
using client::StepEntry;
using client::StepResult;
using client::TensorView;
using Word = SharedSemaphores::Word;

constexpr char kK2V2[] = "hack:k_bits=2,v_bits=2";
constexpr char kSlowest[] = "million:m=32,bits=12,calibration=made";  // to encode
constexpr int kHeadDim = 128;
constexpr int kStepTokens = 16384;  // the most of one step on a GPU
/// Of pieces, which are split among blocks otherwise and rounded to float16.
constexpr double kSameAnswer = 2e-3;

double NowUs() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The largest of all but 1 - share of them.
double Quantile(std::vector<double> times, double share) {
  std::sort(times.begin(), times.end());
  return times[size_t(double(times.size() - 1) * share)];
}
double P99(const std::vector<double>& times) { return Quantile(times, 0.99); }

struct Answer {
  std::vector<uint16_t> out;
  std::vector<float> lse;
  uint64_t launches = 0;  // submissions
};

/// A client with a cache of one layer. Rows of K, V and q are random, and those of a position are always the same.
class Tenant {
 public:
  struct Shape {
    std::string codec = kK2V2;
    int kv_heads = 8, query_heads = 32;
    int tokens = 0;   // of the longest sequence
    int queries = 0;  // of a step
  };

  static absl::StatusOr<std::unique_ptr<Tenant>> Make(const DaemonProcess& daemon, const std::string& name,
                                                      const Shape& shape) {
    auto tenant = std::make_unique<Tenant>();
    tenant->shape_ = shape;
    KV_ASSIGN_OR_RETURN(tenant->client_, Client::Connect(daemon.listen(), {}));
    KV_ASSIGN_OR_RETURN(tenant->device_, DeviceClient::Open(tenant->client_.get(), 0));
    Text text;
    text.layers = 1, text.kv_heads = shape.kv_heads, text.query_heads = shape.query_heads, text.head_dim = kHeadDim;
    KV_ASSIGN_OR_RETURN(tenant->cache_, tenant->client_->OpenCache(OptionsFor(text, shape.codec, 0, name)));
    const size_t kv = size_t(shape.tokens) * tenant->kv_bytes(), q = size_t(shape.queries) * tenant->q_bytes();
    KV_ASSIGN_OR_RETURN(tenant->kv_, tenant->device_->CreateArena(2 * kv));
    KV_ASSIGN_OR_RETURN(tenant->q_, tenant->device_->CreateArena(q));
    KV_ASSIGN_OR_RETURN(tenant->out_, tenant->device_->CreateArena(q));
    KV_ASSIGN_OR_RETURN(tenant->lse_,
                        tenant->device_->CreateArena(size_t(shape.queries) * shape.query_heads * sizeof(float)));
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&tenant->stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
    KV_RETURN_IF_ERROR(tenant->Fill(*tenant->kv_));
    KV_RETURN_IF_ERROR(tenant->Fill(*tenant->q_));
    return tenant;
  }
  ~Tenant() {
    sequences_.clear();
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    kv_.reset(), q_.reset(), out_.reset(), lse_.reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::StatusOr<uint64_t> NewSequence() {
    KV_ASSIGN_OR_RETURN(auto made, cache_->CreateSequence());
    sequences_.push_back(std::move(made.sequence));
    return sequences_.back()->id();
  }
  void DropSequences() { sequences_.clear(); }

  /// One step of entries that are appended to, attended to by, or both. Their appended rows are of the first entry's
  /// positions. Returns when it is submitted.
  absl::StatusOr<StepResult> Step(const std::vector<StepEntry>& entries, bool append, bool attend) {
    size_t tokens = 0;
    for (const StepEntry& entry : entries) tokens += size_t(entry.tokens);
    StepBatch batch;
    batch.entries = entries;
    batch.q_dtype = DType::kFloat16;
    if (append) {
      const size_t at = entries[0].position * kv_bytes(), bytes = tokens * kv_bytes();
      batch.k = kv_->View(at, bytes);
      batch.v = kv_->View(size_t(shape_.tokens) * kv_bytes() + at, bytes);
    }
    if (attend) {
      batch.q = q_->View(0, tokens * q_bytes());
      batch.out = out_->View(0, tokens * q_bytes());
      batch.lse = lse_->View(0, tokens * shape_.query_heads * sizeof(float));
    }
    auto result = cache_->Step(batch);
    if (result.ok()) {
      launches_ = result->done - done_;
      done_ = result->done;
      KV_RETURN_IF_ERROR(device_->EnqueueWaitDone(stream_, done_));
    }
    return result;
  }
  absl::Status Wait() { return CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  uint64_t launches() const { return launches_; }  // of the last step
  cudaStream_t stream() const { return stream_; }

  absl::Status Append(uint64_t sequence, int tokens) {
    for (int at = 0; at < tokens; at += kStepTokens) {
      KV_RETURN_IF_ERROR(Step({{sequence, uint64_t(at), std::min(kStepTokens, tokens - at)}}, true, false).status());
    }
    return Wait();
  }
  /// The step's answer. q_row: of the step's queries, in q.
  absl::StatusOr<Answer> Ask(const std::vector<StepEntry>& entries, bool append, size_t q_row = 0) {
    size_t tokens = 0;
    for (const StepEntry& entry : entries) tokens += size_t(entry.tokens);
    // Rows of q move to where the step reads them; they are put back by the next Fill.
    if (q_row != 0) {
      KV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(q_->data().data(), q_->data().data() + q_row * q_bytes(),
                                                    tokens * q_bytes(), cudaMemcpyDeviceToDevice, stream_),
                                    "cudaMemcpyAsync"));
      KV_RETURN_IF_ERROR(Wait());
    }
    KV_RETURN_IF_ERROR(Step(entries, append, true).status());
    Answer answer;
    answer.launches = launches_;
    answer.out.resize(tokens * q_bytes() / 2);
    answer.lse.resize(tokens * size_t(shape_.query_heads));
    KV_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(answer.out.data(), out_->data().data(), answer.out.size() * 2, cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(answer.lse.data(), lse_->data().data(),
                                                  answer.lse.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_),
                                  "cudaMemcpyAsync"));
    KV_RETURN_IF_ERROR(Wait());
    return answer;
  }
  absl::Status FillQueries() { return Fill(*q_); }

  /// How long each launch of a step took, by when `done` moved; the step is submitted while the stream is idle.
  absl::StatusOr<std::vector<double>> LaunchTimes(const std::vector<StepEntry>& entries) {
    std::vector<double> times;
    std::atomic<bool> ended = false;
    const uint64_t from = device_->words().Load(Word::kDone);
    std::thread watch([&, begun = NowUs()]() mutable {
      for (uint64_t seen = from; !ended || device_->words().Load(Word::kDone) != seen;) {
        const uint64_t now = device_->words().Load(Word::kDone);
        if (now == seen) continue;
        const double us = NowUs();
        times.push_back((us - begun) / double(now - seen));
        seen = now, begun = us;
      }
    });
    absl::Status status = Step(entries, false, true).status();
    status.Update(Wait());
    ended = true;
    watch.join();
    KV_RETURN_IF_ERROR(status);
    return times;
  }

 private:
  size_t kv_bytes() const { return size_t(shape_.kv_heads) * kHeadDim * 2; }
  size_t q_bytes() const { return size_t(shape_.query_heads) * kHeadDim * 2; }
  absl::Status Fill(const Arena& arena) {
    static const std::vector<uint16_t> rows = [] {
      std::mt19937_64 random(5);
      std::normal_distribution<float> normal;
      std::vector<uint16_t> made((1 << 22) + 64);  // not a multiple of a row, so that heads and tokens differ
      for (uint16_t& x : made) x = FloatToHalf(normal(random));
      return made;
    }();
    const absl::Span<uint8_t> to = arena.data();
    for (size_t at = 0; at < to.size(); at += rows.size() * 2) {
      const size_t bytes = std::min(rows.size() * 2, to.size() - at);
      KV_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(to.data() + at, rows.data(), bytes, cudaMemcpyHostToDevice, stream_), "filling"));
    }
    return Wait();
  }

  Shape shape_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<DeviceClient> device_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Arena> kv_, q_, out_, lse_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  uint64_t done_ = 0, launches_ = 0;
};

/// Rows [first, ...) of `whole` against `piece`.
void ExpectSame(const Answer& whole, const Answer& piece, size_t first_row, size_t rows, Difference* difference) {
  const size_t width = whole.lse.size() == 0 ? 0 : whole.out.size() / (whole.lse.size());  // head_dim
  const size_t heads = piece.lse.size() / rows;
  ASSERT_GT(heads, 0u);
  const auto out = whole.out.begin() + ptrdiff_t(first_row * heads * width);
  difference->Add({out, out + ptrdiff_t(rows * heads * width)}, piece.out);
  for (size_t i = 0; i < piece.lse.size(); ++i) {
    ASSERT_NEAR(whole.lse[first_row * heads + i], piece.lse[i], 2e-3) << "row " << first_row + i / heads;
  }
}

class DeviceFairTest : public DeviceDaemonTest {
 protected:
  void StartDaemon() {
    Text text;
    text.layers = 1, text.kv_heads = 8, text.query_heads = 32, text.head_dim = kHeadDim;
    WriteArtifact(text, {kSlowest}, artifacts_.path(), "made");
    Start("8GiB", {"--tenant-most-percent", "60"});
  }
};

class DeviceFairCutsTest : public DeviceFairTest, public ::testing::WithParamInterface<const char*> {};

// A chunk of a prompt, appended and attended to in one step, and the same in steps of a quarter.
TEST_P(DeviceFairCutsTest, AChunkInSeveralLaunchesAnswersAsItsPieces) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  constexpr int kBefore = 12000, kTokens = 4100, kPieces = 4;  // neither ends with a page
  const Tenant::Shape shape = {GetParam(), 4, 16, kBefore + kTokens, kTokens};
  ASSERT_OK_AND_ASSIGN(auto tenant, Tenant::Make(*daemon_, "a", shape));
  ASSERT_OK_AND_ASSIGN(const uint64_t a, tenant->NewSequence());
  ASSERT_OK_AND_ASSIGN(const uint64_t b, tenant->NewSequence());
  ASSERT_OK(tenant->Append(a, kBefore));
  ASSERT_OK(tenant->Append(b, kBefore));
  ASSERT_OK_AND_ASSIGN(const Answer whole, tenant->Ask({{a, kBefore, kTokens}}, true));
  std::printf("%s: a chunk of %d tokens behind %d: %d launches\n", GetParam(), kTokens, kBefore, int(whole.launches));
  EXPECT_GT(whole.launches, 2u);
  Difference difference;
  for (int piece = 0; piece < kPieces; ++piece) {
    constexpr int kRows = kTokens / kPieces;
    ASSERT_OK(tenant->FillQueries());
    ASSERT_OK_AND_ASSIGN(const Answer part,
                         tenant->Ask({{b, uint64_t(kBefore + piece * kRows), kRows}}, true, size_t(piece) * kRows));
    ASSERT_NO_FATAL_FAILURE(ExpectSame(whole, part, size_t(piece) * kRows, kRows, &difference));
  }
  std::printf("%s: relative L2 %.2g\n", GetParam(), difference.relative());
  EXPECT_LE(difference.relative(), kSameAnswer);
  EXPECT_GT(difference.norm, 0);
  // The next tokens are appended behind all of it.
  ASSERT_OK(tenant->FillQueries());
  ASSERT_OK_AND_ASSIGN(const Answer next_a, tenant->Ask({{a, kBefore + kTokens - 1, 1}}, false));
  ASSERT_OK_AND_ASSIGN(const Answer next_b, tenant->Ask({{b, kBefore + kTokens - 1, 1}}, false));
  EXPECT_EQ(next_a.out, next_b.out);
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeviceFairCutsTest, ::testing::Values("raw", kK2V2),
                         [](const auto& info) { return info.index == 0 ? "raw" : "k2v2"; });

// Many entries of few tokens: a step is cut between entries, and inside one.
TEST_F(DeviceFairTest, ManyEntriesInSeveralLaunchesAnswerAsEachAlone) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  constexpr int kContext = 4096, kEntries = 96, kTokens = 63;
  const Tenant::Shape shape = {"raw", 2, 8, kContext, kEntries * kTokens};
  ASSERT_OK_AND_ASSIGN(auto tenant, Tenant::Make(*daemon_, "a", shape));
  std::vector<StepEntry> entries;
  for (int i = 0; i < kEntries; ++i) {
    ASSERT_OK_AND_ASSIGN(const uint64_t id, tenant->NewSequence());
    ASSERT_OK(tenant->Append(id, kContext - i));
    entries.push_back({id, uint64_t(kContext - i - kTokens), kTokens});
  }
  ASSERT_OK_AND_ASSIGN(const Answer whole, tenant->Ask(entries, false));
  std::printf("%d entries of %d tokens: %d launches\n", kEntries, kTokens, int(whole.launches));
  EXPECT_GT(whole.launches, 1u);
  Difference difference;
  for (int i = 0; i < kEntries; ++i) {
    ASSERT_OK(tenant->FillQueries());
    ASSERT_OK_AND_ASSIGN(const Answer alone, tenant->Ask({entries[size_t(i)]}, false, size_t(i) * kTokens));
    EXPECT_EQ(alone.launches, 1u);
    ASSERT_NO_FATAL_FAILURE(ExpectSame(whole, alone, size_t(i) * kTokens, kTokens, &difference));
  }
  std::printf("relative L2 %.2g\n", difference.relative());
  EXPECT_LE(difference.relative(), kSameAnswer);
}

// Steps that a client sends behind one that is cut are submitted behind all of it, in their order.
TEST_F(DeviceFairTest, LaterStepsStayBehindAStepThatIsCut) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  // All pages that the step fills are within its queries' lag: it waits for no encoding, which it would do without its
  // turn.
  constexpr int kLagPages = 64, kBefore = kStepTokens, kQueries = (kLagPages - 1) * 64;
  constexpr int kContext = kBefore + kQueries, kLater = 64;
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
  Text text;
  text.layers = 1, text.kv_heads = 8, text.query_heads = 32, text.head_dim = kHeadDim;
  client::CacheOptions options = OptionsFor(text, kK2V2, 0, "a");
  options.lag_pages = kLagPages;
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(auto made, cache->CreateSequence());
  const size_t kv_row = text.kv_row() * 2, q_row = text.q_row() * 2;
  ASSERT_OK_AND_ASSIGN(auto kv, device->CreateArena((kContext + kLater) * kv_row));  // zeros
  ASSERT_OK_AND_ASSIGN(auto q, device->CreateArena(kQueries * q_row));
  ASSERT_OK_AND_ASSIGN(auto out, device->CreateArena(kQueries * q_row));
  const auto append = [&](uint64_t position, int tokens) {
    const StepEntry entry = {made.sequence->id(), position, tokens};
    StepBatch batch;
    batch.entries = {&entry, 1};
    batch.k = batch.v = kv->View(position * kv_row, size_t(tokens) * kv_row);
    return cache->StepAsync(batch);
  };
  ASSERT_OK_AND_ASSIGN(const StepResult appended, append(0, kBefore).Wait());
  ASSERT_TRUE(Eventually([&] { return device->words().Load(Word::kDone) >= appended.done; }));
  const StepEntry entry = {made.sequence->id(), kBefore, kQueries};
  StepBatch batch;
  batch.entries = {&entry, 1};
  batch.k = batch.v = kv->View(kBefore * kv_row, kQueries * kv_row);
  batch.q = q->View(0, kQueries * q_row);
  batch.out = out->View(0, kQueries * q_row);
  batch.q_dtype = DType::kFloat16;
  // Nor for that of those before.
  ASSERT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_pages", {"state=\"sealed\""}) == 0 &&
           page->Sum("kvmanager_pages", {"state=\"encoding\""}) == 0;
  }));
  auto cut = cache->StepAsync(batch);
  // Each is refused where the one before is not there yet.
  std::vector<client::Pending<absl::StatusOr<StepResult>>> later;
  for (int i = 0; i < kLater; ++i) later.push_back(append(uint64_t(kContext + i), 1));
  ASSERT_OK_AND_ASSIGN(const StepResult first, cut.Wait());
  uint64_t done = first.done;
  for (auto& pending : later) {
    ASSERT_OK_AND_ASSIGN(const StepResult result, pending.Wait());
    EXPECT_EQ(result.done, done + 1);
    done = result.done;
  }
}

/// What the other client does all the time.
struct Strain {
  const char* name;
  const char* codec;
  bool attends;  // by 16,384 tokens over 32,768; else it appends so many, which are encoded
};

class DeviceFairStrainTest : public DeviceFairTest, public ::testing::WithParamInterface<Strain> {};

TEST_P(DeviceFairStrainTest, AnothersDecodeStepsHaveTheirTurn) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  constexpr int kSequences = 16, kContext = 4096, kWarmUp = 500, kSteps = 1500;
  const Strain& strain = GetParam();
  ASSERT_OK_AND_ASSIGN(auto decoder, Tenant::Make(*daemon_, "b", {kK2V2, 8, 32, kContext + 4 * kSteps, kSequences}));
  std::vector<StepEntry> entries;
  for (int i = 0; i < kSequences; ++i) {
    ASSERT_OK_AND_ASSIGN(const uint64_t id, decoder->NewSequence());
    ASSERT_OK(decoder->Append(id, kContext));
    entries.push_back({id, kContext, 1});
  }
  int split = 0;  // steps whose queries waited for pages that were encoded
  const auto decode = [&](int steps) {
    std::vector<double> times;
    for (int i = 0; i < steps && !HasFailure(); ++i) {
      const double begun = NowUs();
      EXPECT_OK(decoder->Step(entries, true, true).status());
      split += decoder->launches() > 1;
      EXPECT_OK(decoder->Wait());
      times.push_back(NowUs() - begun);
      for (StepEntry& entry : entries) ++entry.position;
    }
    return times;
  };
  decode(kWarmUp);
  split = 0;
  const double idle = P99(decode(kSteps));
  EXPECT_EQ(split, 0);  // an ordinary step is one launch

  std::atomic<bool> ended = false, begun = false;
  std::atomic<int> steps = 0;
  std::vector<double> launches;
  absl::Status status;
  std::thread other([&] {
    status = [&]() -> absl::Status {
      Tenant::Shape shape;
      shape.codec = strain.codec;
      shape.tokens = strain.attends ? 2 * kStepTokens : kStepTokens;
      shape.queries = strain.attends ? kStepTokens : 64;
      KV_ASSIGN_OR_RETURN(auto tenant, Tenant::Make(*daemon_, "a", shape));
      KV_ASSIGN_OR_RETURN(uint64_t id, tenant->NewSequence());
      const std::vector<StepEntry> step = {{id, kStepTokens, kStepTokens}};
      if (strain.attends) {
        KV_RETURN_IF_ERROR(tenant->Append(id, 2 * kStepTokens));
        for (int i = 0; i < 5; ++i) {
          KV_ASSIGN_OR_RETURN(const std::vector<double> times, tenant->LaunchTimes(step));
          if (i > 0) launches.insert(launches.end(), times.begin(), times.end());
        }
      }
      cudaEvent_t events[2];
      for (cudaEvent_t& event : events) {
        KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
        KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, tenant->stream()), "cudaEventRecord"));
      }
      while (!ended) {
        // Two are on their way.
        KV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(events[steps % 2]), "cudaEventSynchronize"));
        if (!strain.attends) {
          tenant->DropSequences();
          KV_ASSIGN_OR_RETURN(id, tenant->NewSequence());
        }
        const absl::Status done = strain.attends ? tenant->Step(step, false, true).status()
                                                 : tenant->Step({{id, 0, kStepTokens}}, true, false).status();
        if (absl::IsResourceExhausted(done)) {  // pages are not encoded as fast as they are appended
          begun = true;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          continue;
        }
        KV_RETURN_IF_ERROR(done);
        KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(events[steps % 2], tenant->stream()), "cudaEventRecord"));
        if (++steps == 4) begun = true;
      }
      for (cudaEvent_t event : events) cudaEventDestroy(event);
      return absl::OkStatus();
    }();
    begun = true;
  });
  while (!begun) std::this_thread::yield();
  const int before = steps;
  const double from = NowUs();
  const std::vector<double> times = decode(kSteps);
  const double seconds = (NowUs() - from) / 1e6;
  const double beside = P99(times);
  std::printf(
      "%s: decode steps of %d sequences: p99 %.0f us idle; beside %.1f largest steps a second p50 %.0f us, p99 "
      "%.0f us, longest %.0f us; p99 may be %.0f us; %d waited for pages\n",
      strain.name, kSequences, idle, (steps - before) / seconds, Quantile(times, 0.5), beside, Quantile(times, 1),
      2 * idle + 3000, split);
  ended = true;
  other.join();
  ASSERT_OK(status);
  if (!launches.empty()) {
    double sum = 0;
    for (const double us : launches) sum += us;
    std::printf("%s: launches of the largest step alone, by their ends: %d a step, longest %.0f us, mean %.0f us\n",
                strain.name, int(launches.size() / 4), *std::max_element(launches.begin(), launches.end()),
                sum / double(launches.size()));
    EXPECT_LE(*std::max_element(launches.begin(), launches.end()), 2000);
  }
  EXPECT_LE(beside, 2 * idle + 3000);
  EXPECT_GT(steps, before);
}

INSTANTIATE_TEST_SUITE_P(Strains, DeviceFairStrainTest,
                         ::testing::Values(Strain{"attends_k2v2", kK2V2, true}, Strain{"attends_raw", "raw", true},
                                           Strain{"encodes_slowly", kSlowest, false}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvmanager::testing
