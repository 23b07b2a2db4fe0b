// What loop tests are made of: no input holds the event loop for long, so after each the daemon's own watchdog
// (loop_long_turns_total) has counted nothing. A turn is milliseconds longer now and then where a virtual machine's
// neighbours work; what the daemon does too long is long each time. So a case with a long turn is tried again, and
// fails with what was long in every try.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::StepBatch;
using client::StepEntry;
using client::TensorView;

constexpr size_t kMiB = 1 << 20;
constexpr int kPageTokens = 16;
constexpr int kMostBlocks = 60000;  // near a sequence's bound, 65,536

inline CacheOptions Options(const std::string& tenant, int heads = 1, int head_dim = 32) {
  CacheOptions options;
  options.model = "loop";
  options.tenant = tenant;
  options.layers = 1;
  options.kv_heads = options.query_heads = heads;
  options.head_dim = head_dim;
  options.page_tokens = kPageTokens;
  return options;
}

inline BlockName NameOf(uint64_t block) {
  BlockName name;
  std::memcpy(name.key.bytes.data(), &block, sizeof block);
  name.key.bytes[31] = 1;
  return name;
}

class LoopCase {
 public:
  void SetUp() {
    DaemonOptions options;
    options.host_pool_bytes = 1536 << 20;
    Restart(options);
  }
  virtual void Run() = 0;
  /// Steps, and calls as their metric names them.
  const std::set<std::string>& long_turns() const { return long_; }

 protected:
  ~LoopCase() = default;
  void Restart(const DaemonOptions& options) {
    cache_.reset();
    client_.reset();
    daemon_.reset();
    seen_ = 0;
    seen_of_.clear();
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    Client::Options with_time;
    with_time.deadline_ms = 120000;
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), with_time));
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(Options("loop")));
  }
  /// A sequence of `blocks` full blocks of zeros.
  absl::StatusOr<CreatedSequence> Long(Cache& cache, int blocks, int at_once = 8192) {
    KV_ASSIGN_OR_RETURN(CreatedSequence made, cache.CreateSequence());
    const std::vector<uint8_t> rows(size_t(at_once) * kPageTokens * cache.description().options.kv_heads *
                                    cache.description().options.head_dim * 2);
    for (int done = 0; done < blocks; done += at_once) {
      const StepEntry entry{made.sequence->id(), uint64_t(done) * kPageTokens, at_once * kPageTokens};
      StepBatch batch;
      batch.entries = {&entry, 1};
      batch.k = batch.v = TensorView::Inline(rows.data(), rows.size());
      KV_RETURN_IF_ERROR(cache.Step(batch).status());
    }
    return made;
  }
  double Gauge(const std::string& name) {
    const auto page = Scrape(*daemon_);
    EXPECT_OK(page);
    return page->Sum(name);
  }
  /// Notes `step`, and the calls, if a turn lasted too long since the last look, and prints the longest.
  void Look(const std::string& step) {
    const std::string turns = "kvmanager_loop_long_turns_total";
    const auto page = Scrape(*daemon_);
    ASSERT_OK(page);
    const double all = page->Sum(turns), since = all - std::exchange(seen_, all);
    std::printf("%-60s %3.0f long turns; the longest so far %.1f ms\n", step.c_str(), since,
                page->Sum("kvmanager_loop_longest_turn_seconds") * 1e3);
    std::fflush(stdout);
    if (since == 0) return;
    long_.insert(step);
    // What follows an answer may be seen behind another step in another try.
    for (const auto& [call, count] : page->families.at(turns).samples) {
      if (count == std::exchange(seen_of_[call], count)) continue;
      std::printf("  %s\n", call.c_str());
      long_.insert(call);
    }
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  double seen_ = 0;
  std::map<std::string, double> seen_of_;  // calls
  std::set<std::string> long_;
};

template <typename Case>
void Try() {
  constexpr int kTries = 3;
  std::set<std::string> every_time;
  for (int tries = 1; tries <= kTries; ++tries) {
    Case now;
    now.SetUp();
    if (!::testing::Test::HasFailure()) now.Run();
    if (::testing::Test::HasFailure()) return;
    std::set<std::string> both;
    std::set_intersection(every_time.begin(), every_time.end(), now.long_turns().begin(), now.long_turns().end(),
                          std::inserter(both, both.end()));
    every_time = tries == 1 ? now.long_turns() : both;
    if (every_time.empty()) return;
    std::printf("long in %d of %d tries: %s\n", tries, kTries, absl::StrJoin(every_time, "; ").c_str());
  }
  ADD_FAILURE() << "a turn was too long in every try: " << absl::StrJoin(every_time, "; ");
}

#define LOOP_TEST(name)                 \
  class name final : public LoopCase {  \
   public:                              \
    void Run() override;                \
  };                                    \
  TEST(LoopTest, name) { Try<name>(); } \
  void name::Run()

}  // namespace kvmanager::testing
