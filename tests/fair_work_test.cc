// One client's long attention, and what another client, the daemon's end and the workers see of it.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::Pending;
using client::StepBatch;
using client::StepEntry;
using client::StepResult;
using client::TensorView;

constexpr int kContext = 16384, kQueries = 8192;  // an attend of them takes a core 1.6 seconds
constexpr int kAttends = 8;

/// Milliseconds of CPU time of a process so far.
int64_t CpuMs(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> fields = absl::StrSplit(line.substr(line.rfind(')') + 2), ' ');
  return (std::stoll(fields.at(11)) + std::stoll(fields.at(12))) * 1000 / sysconf(_SC_CLK_TCK);
}

/// A client of a tenant of its own, one sequence, and its queries.
class Tenant {
 public:
  static absl::StatusOr<std::unique_ptr<Tenant>> Make(const DaemonProcess& daemon, const std::string& name,
                                                      int context) {
    auto tenant = std::make_unique<Tenant>();
    KV_ASSIGN_OR_RETURN(tenant->client_, Client::Connect(daemon.listen(), {}));
    CacheOptions options = SmallCache("raw");
    options.tenant = name;
    KV_ASSIGN_OR_RETURN(tenant->cache_, tenant->client_->OpenCache(options));
    KV_ASSIGN_OR_RETURN(tenant->sequence_, tenant->cache_->CreateSequence());
    tenant->source_ = Source{3, Kind::kNormal, options};
    KV_RETURN_IF_ERROR(LoadLayer(*tenant->cache_, tenant->id(), tenant->source_, 0, 0, context));
    return tenant;
  }

  uint64_t id() const { return sequence_.sequence->id(); }
  Client& client() { return *client_; }
  absl::StatusOr<std::vector<float>> Decode(int context) {
    return AskLayer(*cache_, id(), source_, 0, uint64_t(context) - 1);
  }
  /// Begins an attend by the last kQueries tokens.
  void BeginLongAttend() {
    if (q_.empty()) q_ = source_.Q(0, kContext - kQueries, kQueries);
    out_.emplace_back(q_.size());
    const StepEntry entry{id(), kContext - kQueries, kQueries};
    StepBatch batch;
    batch.entries = {&entry, 1};
    batch.q = TensorView::Inline(q_.data(), q_.size() * sizeof(float));
    batch.out = TensorView::Inline(out_.back().data(), out_.back().size() * sizeof(float));
    pending_.push_back(cache_->StepAsync(batch));
  }
  /// Sends more of what was begun. True: one has ended.
  bool AnyEnded() {
    bool ended = false;
    for (auto& pending : pending_) ended = pending.ready() || ended;
    return ended;
  }

 private:
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  CreatedSequence sequence_;
  Source source_;
  std::vector<float> q_;
  std::vector<std::vector<float>> out_;
  std::vector<Pending<absl::StatusOr<StepResult>>> pending_;
};

class FairWorkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.host_pool_bytes = 256 << 20;
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(busy_, Tenant::Make(*daemon_, "busy", kContext));
    ASSERT_OK_AND_ASSIGN(other_, Tenant::Make(*daemon_, "other", 2048));
    // Idle, to know what a decode of the other is worth: more than runs on the event loop.
    for (int i = 0; i < 20; ++i) idle_ms_ = std::max(idle_ms_, Decode());
    for (int i = 0; i < kAttends; ++i) busy_->BeginLongAttend();
    // They are at work: eight take two cores more than five seconds.
    const int64_t begun = CpuMs(daemon_->pid());
    ASSERT_TRUE(Eventually([&] {
      EXPECT_FALSE(busy_->AnyEnded());
      return CpuMs(daemon_->pid()) > begun + 500;
    }));
  }

  int64_t Decode() {
    const int64_t begun = NowMs();
    EXPECT_OK(other_->Decode(2048));
    return NowMs() - begun;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Tenant> busy_, other_;
  int64_t idle_ms_ = 0;
};

TEST_F(FairWorkTest, AnothersDecodeHasItsTurn) {
  std::vector<int64_t> times;
  for (int i = 0; i < 50; ++i) times.push_back(Decode());
  std::sort(times.begin(), times.end());
  // Two turns of 2 ms, and a scheduler's slice on a machine with other work. In the queue's order it took seconds.
  EXPECT_LE(times[25], 2 * idle_ms_ + 20 * kSlowdown);
  EXPECT_LE(times.back(), 2 * idle_ms_ + 300 * kSlowdown);
}

TEST_F(FairWorkTest, ADeadClientsWorkEnds) {
  busy_.reset();
  // What it had begun would have kept every core busy for ten seconds.
  ASSERT_TRUE(Eventually(
      [&] {
        const int64_t begun = CpuMs(daemon_->pid());
        usleep(200000);
        return CpuMs(daemon_->pid()) - begun < 100;
      },
      2000));
  EXPECT_OK(other_->Decode(2048));
}

TEST_F(FairWorkTest, TheDaemonEndsWhenItIsTold) {
  other_.reset();
  const int64_t begun = NowMs();
  daemon_->process().Signal(SIGINT);
  daemon_->process().Signal(SIGTERM);
  ASSERT_OK(daemon_->process().Wait(20000));
  EXPECT_LE(NowMs() - begun, 3000 * kSlowdown);
}

}  // namespace
}  // namespace kvmanager::testing
