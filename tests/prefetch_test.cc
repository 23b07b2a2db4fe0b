// Blocks that are brought from the disk before a request needs them: behind a match, by a call, by kvctl.
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "nlohmann/json.hpp"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::PrefixMatch;

constexpr int kBlocks = 12;

class PrefetchTest : public RestartedDaemonTest {
 protected:
  PrefetchTest() { flags_ = {"--disk-path", directory_.path() + "/disk", "--disk-bytes", "1GiB"}; }
  void TearDown() override {
    cache_.reset();
    RestartedDaemonTest::TearDown();
  }

  // The disk alone has the first blocks of texts 1..`texts`.
  void StartWithTexts(int texts) {
    Start();
    {
      ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
      for (int seed = 1; seed <= texts; ++seed) Publish(*cache, Text(seed), kBlocks);
      ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_disk_unwritten_blocks") == 0; }, 60000));
    }
    Kill();
    Start();
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(options_));
    ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_disk_blocks") == texts * kBlocks; }));
  }
  Source Text(int seed) const { return {static_cast<uint64_t>(seed), Kind::kNormal, options_}; }
  std::vector<BlockName> NamesOf(int seed, int blocks = kBlocks) const { return Names(*cache_, Text(seed), blocks); }
  PrefixMatch Match(int seed, bool prefetch = false) {
    const std::vector<BlockName> names = NamesOf(seed);
    const absl::Span<const BlockName> prefix = names;
    const auto found = cache_->Match({&prefix, 1}, {.prefetch = prefetch});
    EXPECT_OK(found);
    return found.ok() ? found->at(0) : PrefixMatch();
  }
  CommandResult Run(const std::vector<std::string>& words) {
    std::vector<std::string> argv = {DataPath("client/cli/kvctl"), "--connect", daemon_->listen(), "prefetch"};
    argv.insert(argv.end(), words.begin(), words.end());
    absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? *result : CommandResult{-1, ""};
  }

  const CacheOptions options_ = SmallCache("raw");
  std::unique_ptr<Cache> cache_;
};

TEST_F(PrefetchTest, BehindAMatchWhatTheDiskHasComes) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(2));
  PrefixMatch match = Match(1);
  EXPECT_EQ(match.hit_blocks, kBlocks);
  EXPECT_EQ(match.in_memory, 0);
  EXPECT_EQ(Metric("kvmanager_disk_read_blocks_total"), 0) << "a match alone reads nothing";
  EXPECT_EQ(Match(1, /*prefetch=*/true).hit_blocks, kBlocks);
  EXPECT_TRUE(Eventually([&] { return Match(1).in_memory == kBlocks; }));
  EXPECT_EQ(Metric("kvmanager_prefetched_blocks_total"), kBlocks);
  EXPECT_EQ(Match(2).in_memory, 0);
  // Nothing is read again for who comes for them, and their bytes are those that were published.
  EXPECT_EQ(Compare(*cache_, Text(1), kBlocks), kBlocks);
  EXPECT_EQ(Metric("kvmanager_disk_read_blocks_total"), kBlocks);
}

TEST_F(PrefetchTest, ACallWaitsUntilAllIsThere) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(1));
  const auto names = NamesOf(1, kBlocks + 3);
  ASSERT_OK_AND_ASSIGN(const PrefixMatch match, cache_->Prefetch(names));
  EXPECT_EQ(match.hit_blocks, kBlocks);
  EXPECT_EQ(match.in_memory, kBlocks);
  EXPECT_EQ(match.reason, client::Miss::kNotFound);
  EXPECT_EQ(Metric("kvmanager_disk_read_blocks_total"), kBlocks);
  EXPECT_EQ(Compare(*cache_, Text(1), kBlocks), kBlocks);
}

TEST_F(PrefetchTest, AnOperatorsCallNamesTheCache) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(1));
  const uint32_t id = cache_->description().id;
  ASSERT_OK_AND_ASSIGN(const PrefixMatch match, client_->Prefetch(id, NamesOf(1)));
  EXPECT_EQ(match.in_memory, kBlocks);
  EXPECT_CODE(client_->Prefetch(id + 100, NamesOf(1)), kNotFound);
}

TEST_F(PrefetchTest, MoreThanThereIsRoomForIsNoError) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(1));
  Kill();
  Start(/*pool_bytes=*/4 << 20);
  ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(options_));
  ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_disk_blocks") == kBlocks; }));
  // A sequence holds nearly all of the pool.
  ASSERT_OK_AND_ASSIGN(client::CreatedSequence holder, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, holder.sequence->id(), Text(9), 0, 60 * kPageTokens, 1024));
  ASSERT_OK_AND_ASSIGN(const PrefixMatch match, cache_->Prefetch(NamesOf(1)));
  EXPECT_EQ(match.hit_blocks, kBlocks);
  EXPECT_LT(match.in_memory, kBlocks);
}

TEST_F(PrefetchTest, WhatIsWrongIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(1));
  const std::vector<BlockName> many(65537);
  EXPECT_TRUE(NamesField(cache_->Prefetch(many).status(), absl::StatusCode::kInvalidArgument, "names"));
  ASSERT_OK_AND_ASSIGN(const PrefixMatch nothing, cache_->Prefetch({}));
  EXPECT_EQ(nothing.hit_blocks, 0);
}

// Each of many matches asks for all of it: what is on its way is read once, what is too much is not prefetched, and the
// connection lives.
TEST_F(PrefetchTest, WhoAsksForTooMuchGetsNoMore) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(8));
  const absl::StatusOr<uint64_t> limit = [&]() -> absl::StatusOr<uint64_t> {
    KV_ASSIGN_OR_RETURN(const auto limits, client_->Limits());
    for (const auto& each : limits) {
      if (each.name == "connection_prefetch_names") return each.limit;
    }
    return absl::NotFoundError("connection_prefetch_names");
  }();
  ASSERT_OK(limit);
  std::vector<std::vector<BlockName>> names;
  for (int seed = 1; seed <= 8; ++seed) names.push_back(NamesOf(seed));
  std::vector<absl::Span<const BlockName>> prefixes;
  for (int i = 0; i < 4096; ++i) prefixes.emplace_back(names[static_cast<size_t>(i) % names.size()]);
  for (int i = 0; i < 8; ++i) ASSERT_OK(cache_->Match(prefixes, {.prefetch = true}));
  EXPECT_TRUE(Eventually([&] { return Match(8).in_memory == kBlocks; }));
  EXPECT_EQ(Metric("kvmanager_disk_read_blocks_total"), 8 * kBlocks);
  EXPECT_OK(client_->Ping());
}

TEST_F(PrefetchTest, ItEndsWithItsConnection) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(4));
  for (int round = 0; round < 20; ++round) {
    ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options_));
    const std::vector<BlockName> names = NamesOf(1 + round % 4);
    const absl::Span<const BlockName> prefix = names;
    ASSERT_OK(cache->Match({&prefix, 1}, {.prefetch = true}));
  }
  for (int seed = 1; seed <= 4; ++seed) EXPECT_EQ(Compare(*cache_, Text(seed), kBlocks), kBlocks);
}

TEST_F(PrefetchTest, Kvctl) {
  ASSERT_NO_FATAL_FAILURE(StartWithTexts(2));
  const std::string path = directory_.path() + "/tokens.json";
  const auto write = [&](int seed, int tokens) {
    std::ofstream(path) << nlohmann::json(Text(seed).TokenIds(0, static_cast<uint64_t>(tokens))).dump();
  };
  const std::string id = absl::StrCat(cache_->description().id);
  write(1, kBlocks * kPageTokens + 5);
  CommandResult result = Run({"--cache", id, "--tokens", path});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "12 of 12 blocks are in the cache's memory\n")) << result.output;
  EXPECT_EQ(Match(1).in_memory, kBlocks);
  write(2, (kBlocks + 2) * kPageTokens);
  result = Run({"--json", "--cache", id, "--tokens", path});
  EXPECT_EQ(result.status, 0) << result.output;
  const auto json = nlohmann::json::parse(result.output);
  EXPECT_EQ(json["asked"], 14);
  EXPECT_EQ(json["in_memory"], 12);
  EXPECT_EQ(json["reason"], "not_found");
  write(2, kPageTokens - 1);
  result = Run({"--cache", id, "--tokens", path});
  EXPECT_NE(result.status, 0);
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(Run({"--cache", "0", "--tokens", path}).status, 2);
  EXPECT_EQ(Run({"--cache", id}).status, 2);
  EXPECT_EQ(Run({"--help"}).status, 0);
}

}  // namespace
}  // namespace kvmanager::testing
