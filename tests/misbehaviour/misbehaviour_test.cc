// One client misbehaves in each of the ways of ways.h while another, of another tenant, decodes: that one's steps stay
// near what they take without the first, its calls end in time, the daemon's memory stays within its budget, the first
// gets service or honest errors, and once it is gone nothing of it is left.
//
// Steps are held against what the same daemon and client took just before: p99 at most twice as much and 3 ms. That
// asks for a machine that nobody else uses, and is judged with KVMANAGER_QUIET_MACHINE=1 alone. Else it is printed, and
// judged is that nobody stands still: p99 at most kCoarseMs. A way that fails is tried again, kTries times in all,
// since another process may have had the machine; a fault of the daemon comes back.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/misbehaviour/victim.h"
#include "tests/misbehaviour/ways.h"

namespace kvmanager::testing {
namespace {

constexpr int64_t kIdleWindowMs = 300, kUnderMs = 2000;
constexpr int kIdleWindows = 3, kTries = 3;
constexpr double kCoarseMs = 150;
constexpr int64_t kDeadlineMs = 2000 * kSlowdown;  // of the victim's calls
constexpr int64_t kBalanceMs = 8000;               // until nothing of the offender is left
// Of memory that is not counted: code, stacks, allocator, workers' buffers, artifacts, bookkeeping.
constexpr uint64_t kConstantBytes = uint64_t{kSlowdown > 1 ? 1024 : 64} << 20;

enum class Fault { kSteps, kCalls, kMemory, kHonesty, kBooks, kBits, kEnd };

uint64_t StatusBytes(pid_t pid, const std::string& field) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoull(line.substr(field.size() + 1)) << 10;
  }
  return 0;
}

// What the main thread of a process had of a core, and waited for one, in seconds.
struct CoreTime {
  double ran = 0, waited = 0;
};
CoreTime LoopTime(pid_t pid) {
  double ran = 0, waited = 0;
  std::ifstream(absl::StrCat("/proc/", pid, "/task/", pid, "/schedstat")) >> ran >> waited;
  return {ran * 1e-9, waited * 1e-9};
}

// What is held of a daemon, but for what is published.
struct Books {
  uint64_t leases = 0, used_bytes = 0, waiting_hand_offs = 0;
  double connections = 0, arena_bytes = 0;
  bool messages = false;  // more bytes of them than small ones take
  friend bool operator==(const Books&, const Books&) = default;
  std::string Text() const {
    return absl::StrCat(leases, " leases, ", used_bytes, " bytes of pages, ", waiting_hand_offs, " hand-offs, ",
                        connections, " connections, ", arena_bytes, " bytes of arenas",
                        messages ? ", large messages" : "");
  }
};

struct Outcome {
  std::vector<std::pair<Fault, std::string>> faults;
  std::string line;
};

class MisbehaviourTest : public ::testing::TestWithParam<Way> {
 protected:
  static void SetUpTestSuite() {
    directory_ = new TempDir;
    const auto write = [&](const char* name, const client::CacheOptions& of) {
      const CalibrationModel model{of.model, of.revision, of.layers, of.kv_heads, of.query_heads, of.head_dim};
      const auto made = SyntheticCalibration(model, 1, {});
      std::ofstream(absl::StrCat(directory_->path(), "/", name, ".safetensors"), std::ios::binary)
          << SerializeCalibration(made->model(), made->tensors(), made->metadata());
    };
    write(kArtifact, SmallCache("raw"));
    write(kLargeArtifact, LargeHeads());
  }
  static void TearDownTestSuite() { delete directory_; }

  absl::Status Begin() {
    DaemonOptions options;
    options.host_pool_bytes = kPoolBytes;
    options.more_flags = {absl::StrCat("--memory-beyond-pool-bytes=", kRoomBytes),
                          absl::StrCat("--arena-bytes=", kArenaBytes),
                          "--hand-off-lease-ms=4000",
                          absl::StrCat("--calibration-dir=", directory_->path()),
                          "--log-level=error",
                          absl::StrCat("--disk-path=", directory_->path(), "/disk"),
                          absl::StrCat("--disk-bytes=", kDiskBytes)};
    KV_ASSIGN_OR_RETURN(daemon_, DaemonProcess::Start(options));
    KV_ASSIGN_OR_RETURN(victim_, Victim::Make(daemon_->listen(), kDeadlineMs));
    return absl::OkStatus();
  }

  // What is being written stays in memory until it was.
  Books TakeBooks() {
    Books books;
    const auto is_written = [&] {
      const absl::StatusOr<MetricsPage> page = Scrape(*daemon_);
      return page.ok() && page->Sum("kvmanager_disk_unwritten_blocks") == 0;
    };
    EXPECT_TRUE(Eventually(is_written, kBalanceMs));
    EXPECT_OK(victim_->client().Purge(client::Client::kAllCaches));
    const absl::StatusOr<client::DaemonDescription> status = victim_->client().Status();
    EXPECT_OK(status);
    const absl::StatusOr<MetricsPage> page = Scrape(*daemon_);
    EXPECT_OK(page);
    if (!status.ok() || !page.ok()) return books;
    books.leases = status->leases;
    for (const auto& pool : status->pools) books.used_bytes += pool.used_bytes;
    books.waiting_hand_offs = status->waiting_hand_offs;
    books.connections = page->Sum("kvmanager_connections");
    books.arena_bytes = page->Sum("kvmanager_arena_bytes");
    books.messages = page->Sum("kvmanager_message_bytes") > 65536;
    return books;
  }

  Outcome Try(const Way& way) {
    Outcome outcome;
    const auto fault = [&outcome](Fault kind, std::string what) { outcome.faults.emplace_back(kind, std::move(what)); };
    if (const absl::Status begun = Begin(); !begun.ok()) {
      fault(Fault::kEnd, absl::StrCat("the victim cannot begin: ", begun.ToString()));
      return outcome;
    }
    const absl::StatusOr<std::vector<float>> looked = victim_->Look();
    EXPECT_OK(looked);
    std::vector<double> p50, p99;
    for (int window = 0; window < kIdleWindows; ++window) {
      const Decoded idle = victim_->Decode(kIdleWindowMs);
      EXPECT_OK(idle.failed);
      p50.push_back(idle.steps.At(0.5));
      p99.push_back(idle.steps.At(0.99));
    }
    std::sort(p50.begin(), p50.end());
    std::sort(p99.begin(), p99.end());
    const double idle_p50 = p50[kIdleWindows / 2], idle_p99 = p99[kIdleWindows / 2];
    const Books before = TakeBooks();

    Tally& tally = Tally::At(absl::StrCat(directory_->path(), "/tally"));
    new (&tally) Tally();
    auto offender =
        ChildProcess::Start({DataPath("tests/misbehaviour/offender"), way.name, daemon_->listen(), daemon_->admin(),
                             daemon_->peer(), daemon_->metrics(), absl::StrCat(directory_->path(), "/tally")});
    EXPECT_OK(offender);
    EXPECT_TRUE(Eventually([&] { return tally.calls > 0; })) << "it does nothing";
    std::atomic<bool> stop{false};
    OwnCalls own;
    std::thread own_thread([&] { own.Run(daemon_->listen(), kDeadlineMs, stop); });
    uint64_t rss = 0, anon = 0;
    std::thread memory([&] {
      while (!stop) {
        rss = std::max(rss, StatusBytes(daemon_->pid(), "VmRSS"));
        anon = std::max(anon, StatusBytes(daemon_->pid(), "RssAnon"));
        usleep(20000);
      }
    });
    const CoreTime loop = LoopTime(daemon_->pid());
    const Decoded under = victim_->Decode(kUnderMs);
    const CoreTime loop_after = LoopTime(daemon_->pid());
    (*offender)->Signal(SIGKILL);
    (void)(*offender)->Wait();
    stop = true;
    own_thread.join();
    memory.join();

    const double p99_under = under.steps.At(0.99), bound = 2 * idle_p99 + 3;
    if (!under.failed.ok()) fault(Fault::kCalls, absl::StrCat("a step failed: ", under.failed.ToString()));
    // Instrumented, steps take longer than until the next is due.
    const double judged = std::getenv("KVMANAGER_QUIET_MACHINE") != nullptr ? bound : std::max(bound, kCoarseMs);
    if (!kSanitized && p99_under > judged) {
      fault(Fault::kSteps, absl::StrFormat("p99 of steps %.2f ms, over %.2f", p99_under, judged));
    }
    if (!own.failed.ok()) fault(Fault::kCalls, absl::StrCat("a call failed: ", own.failed.ToString()));
    const uint64_t rss_most = kPoolBytes + kArenaBytes + kRoomBytes + kConstantBytes;
    const uint64_t anon_most = kRoomBytes + kConstantBytes;
    if (rss > rss_most) fault(Fault::kMemory, absl::StrCat("RSS ", rss >> 20, " MiB, over ", rss_most >> 20));
    if (anon > anon_most) {
      fault(Fault::kMemory, absl::StrCat("memory beyond the pool ", anon >> 20, " MiB, over ", anon_most >> 20));
    }
    if (tally.dishonest > 0) fault(Fault::kHonesty, absl::StrCat("the offender was told: ", tally.lie));
    if (!daemon_->process().running()) {
      fault(Fault::kEnd, "the daemon has ended");
      daemon_->Kill();
    } else {
      Books after;
      if (!Eventually([&] { return (after = TakeBooks()) == before; }, kBalanceMs)) {
        fault(Fault::kBooks, absl::StrCat("left behind: ", after.Text(), "; before: ", before.Text()));
      }
      if (const auto again = victim_->Look(); !again.ok() || *again != *looked) {
        fault(Fault::kBits, absl::StrCat("the victim reads other bits: ", again.status().ToString()));
      }
    }
    const absl::StatusOr<MetricsPage> page = Scrape(*daemon_);
    outcome.line = absl::StrFormat(
        "%-24s idle p50 %.2f p99 %.2f | under it p50 %.2f p99 %.2f max %.1f ms, bound %.2f | own calls max %.0f ms, "
        "%d refused | RSS %d anon %d MiB | it: %d calls, %d served, %d refused, %d ended",
        way.name, idle_p50, idle_p99, under.steps.At(0.5), p99_under, under.steps.At(1), bound, own.times.At(1),
        own.refused, rss >> 20, anon >> 20, tally.calls.load(), tally.served.load(), tally.refused.load(),
        tally.ended.load());
    if (page.ok()) {
      absl::StrAppendFormat(
          &outcome.line, " | loop busy %.0f %%, waits for a core %.0f %%, long turns %.0f, longest %.1f ms",
          100e3 * (loop_after.ran - loop.ran) / kUnderMs, 100e3 * (loop_after.waited - loop.waited) / kUnderMs,
          page->Sum("kvmanager_loop_long_turns_total"), 1e3 * page->Sum("kvmanager_loop_longest_turn_seconds"));
    }
    if (tally.refused + tally.ended > 0) absl::StrAppend(&outcome.line, " (", tally.refusal, ")");
    victim_.reset();
    daemon_.reset();
    return outcome;
  }

  static TempDir* directory_;  // of artifacts, and of the tally
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Victim> victim_;
};

TempDir* MisbehaviourTest::directory_ = nullptr;

TEST_P(MisbehaviourTest, TheOtherClientIsServed) {
  const Way& way = GetParam();
  Outcome outcome;
  for (int i = 0; i < kTries; ++i) {
    outcome = Try(way);
    std::printf("WAY %s | %s\n", outcome.line.c_str(), outcome.faults.empty() ? "ok" : "FAULT");
    for (const auto& [kind, what] : outcome.faults) std::printf("    %s: %s\n", way.name, what.c_str());
    std::fflush(stdout);
    if (outcome.faults.empty()) break;
  }
  for (const auto& [kind, what] : outcome.faults) ADD_FAILURE() << way.what << ": " << what;
}

INSTANTIATE_TEST_SUITE_P(Ways, MisbehaviourTest, ::testing::ValuesIn(AllWays()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(WaysTest, TheOffenderIsIdleForTheScheduler) {
  std::printf("offenders run under SCHED_IDLE; steps of the victim are due every %d us\n", Victim::kPeriodUs);
  EXPECT_GE(AllWays().size(), 25u);
}

}  // namespace
}  // namespace kvmanager::testing
