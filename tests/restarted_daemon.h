// The fixture of tests of what outlives a daemon: it is killed and started again with the same flags, and clients look
// for what they had published.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/logged_daemon.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/prefix_reads.h"

namespace kvmanager::testing {

class RestartedDaemonTest : public ::testing::Test {
 protected:
  static constexpr int kPageTokens = 64;

  void TearDown() override { client_.reset(); }

  void Start(uint64_t pool_bytes = 64 << 20, const std::vector<std::string>& more = {}, bool may_fail = false) {
    client_.reset();
    daemon_.reset();
    DaemonOptions options;
    options.host_pool_bytes = pool_bytes;
    options.peers = false;
    options.program = log_.program();
    options.more_flags = flags_;
    options.more_flags.insert(options.more_flags.end(), more.begin(), more.end());
    auto daemon = DaemonProcess::Start(options);
    if (may_fail && !daemon.ok()) return;
    ASSERT_OK(daemon);
    daemon_ = *std::move(daemon);
    ASSERT_OK_AND_ASSIGN(client_, client::Client::Connect(daemon_->listen(), {.admin_address = daemon_->admin()}));
  }
  void Kill() {
    client_.reset();
    daemon_->Kill();
  }
  double Metric(const std::string& name) {
    const auto page = Scrape(*daemon_);
    EXPECT_OK(page);
    return page.ok() ? page->Sum(name) : -1;
  }
  // Publishes the first `blocks` blocks of a text that nobody uses afterwards.
  static void Publish(client::Cache& cache, const Source& source, int blocks) {
    ASSERT_OK_AND_ASSIGN(client::CreatedSequence made, cache.CreateSequence());
    ASSERT_OK(Load(cache, made.sequence->id(), source, 0, blocks * kPageTokens, 1024));
    ASSERT_OK(made.sequence->Publish(Names(cache, source, blocks)));
  }
  static int Found(client::Cache& cache, const Source& source, int blocks) {
    const std::vector<BlockName> names = Names(cache, source, blocks);
    const absl::Span<const BlockName> prefix = names;
    const auto match = cache.Match({&prefix, 1});
    EXPECT_OK(match);
    return match.ok() ? match->at(0).hit_blocks : -1;
  }
  // Finds `blocks` blocks and compares every token with the model of the codec; how many it found.
  static int Compare(client::Cache& cache, const Source& source, int blocks) {
    auto made = cache.CreateSequence(Names(cache, source, blocks));
    EXPECT_OK(made);
    if (!made.ok() || made->match.hit_blocks == 0) return 0;
    const int tokens = made->match.hit_blocks * kPageTokens;
    const auto layer = LayerThatDiffers(cache, made->sequence->id(), source, tokens);
    EXPECT_OK(layer);
    EXPECT_EQ(layer.value_or(kNoLayer), kNoLayer);
    return made->match.hit_blocks;
  }

  TempDir directory_;
  std::vector<std::string> flags_;
  const DaemonLog log_{directory_.path()};
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace kvmanager::testing
