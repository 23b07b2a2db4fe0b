// Blocks that clients want kept longer, or less long, against a daemon: by the client library and by kvctl.
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "nlohmann/json.hpp"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::RetainOutcome;

constexpr int kPageTokens = 64;
constexpr int kBlocks = 8;  // of a prompt

class RetainTest : public ::testing::Test {
 protected:
  void TearDown() override {
    cache_.reset();
    client_.reset();
  }

  void Start(std::vector<std::string> more_flags = {}) {
    cache_.reset();
    client_.reset();
    daemon_.reset();
    DaemonOptions options;
    options.host_pool_bytes = 16 << 20;
    options.peers = false;
    options.more_flags = std::move(more_flags);
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(Options()));
  }
  static CacheOptions Options() { return SmallCache("raw", 2, kPageTokens); }
  static Source Prompt(uint64_t seed) { return {seed, Kind::kNormal, Options()}; }
  // Publishes the first blocks of a text that nobody uses afterwards.
  std::vector<BlockName> Publish(uint64_t seed, int blocks = kBlocks) {
    const Source source = Prompt(seed);
    const std::vector<BlockName> names = Names(*cache_, source, blocks);
    auto made = cache_->CreateSequence();
    EXPECT_OK(made);
    EXPECT_OK(Load(*cache_, made->sequence->id(), source, 0, blocks * kPageTokens, 1024));
    EXPECT_OK(made->sequence->Publish(names));
    return names;
  }
  // More than the pool has, in prompts of others.
  void FillPool(uint64_t seed) {
    for (uint64_t i = 0; i < 20; ++i) Publish(1000 * seed + i, 32);
  }
  int Hits(const std::vector<BlockName>& names) {
    const absl::Span<const BlockName> prefix = names;
    const auto matches = cache_->Match({&prefix, 1});
    EXPECT_OK(matches);
    return matches.ok() ? (*matches)[0].hit_blocks : -1;
  }
  std::string TokensFile(uint64_t seed, int tokens) {
    const std::string path = directory_.path() + "/tokens.json";
    std::ofstream(path) << nlohmann::json(Prompt(seed).TokenIds(0, uint64_t(tokens))).dump();
    return path;
  }
  std::string CacheId() const { return absl::StrCat(cache_->description().id); }
  CommandResult Run(const std::string& command, const std::vector<std::string>& words) {
    std::vector<std::string> argv = {DataPath("client/cli/kvctl"), "--connect", daemon_->listen(), command};
    argv.insert(argv.end(), words.begin(), words.end());
    absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? *result : CommandResult{-1, ""};
  }

  TempDir directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
};

TEST_F(RetainTest, APromptOutlivesOthers) {
  ASSERT_NO_FATAL_FAILURE(Start({"--eviction", "lru"}));
  const auto kept = Publish(1), usual = Publish(2);
  ASSERT_OK_AND_ASSIGN(const RetainOutcome retained, cache_->Retain(kept, {.priority = 80, .ttl_ms = 3600000}));
  EXPECT_EQ(retained.blocks, uint64_t{kBlocks});
  EXPECT_GT(retained.bytes, 0u);
  FillPool(1);
  FillPool(2);
  EXPECT_EQ(Hits(kept), kBlocks);
  EXPECT_EQ(Hits(usual), 0);
  ASSERT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_retained_blocks", {"tier=\"host\""}) == kBlocks &&
           page->Sum("kvmanager_retained_bytes", {"tier=\"host\""}) == double(retained.bytes);
  }));
  // Taken back, by an operator, it goes as any other.
  ASSERT_OK_AND_ASSIGN(const RetainOutcome back, client_->Retain(cache_->description().id, kept, {}));
  EXPECT_EQ(back.blocks, uint64_t{kBlocks});
  FillPool(3);
  FillPool(4);
  EXPECT_EQ(Hits(kept), 0);
}

TEST_F(RetainTest, ItEndsByTheClock) {
  ASSERT_NO_FATAL_FAILURE(Start({"--eviction", "lru"}));
  const auto kept = Publish(1);
  ASSERT_OK(cache_->Retain(kept, {.priority = 100, .ttl_ms = 1}));
  uint64_t seed = 1;
  EXPECT_TRUE(Eventually([&] {
    FillPool(seed++);
    return Hits(kept) == 0;
  }));
}

TEST_F(RetainTest, AllRetainedRefusesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::vector<BlockName> last;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    last = Publish(seed, 32);
    ASSERT_OK(cache_->Retain(last, {.priority = 100}));
  }
  EXPECT_EQ(Hits(last), 32);
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon_));
  EXPECT_GT(page.Sum("kvmanager_evicted_blocks_total"), 0);
  EXPECT_EQ(page.Sum("kvmanager_pool_exhausted_total"), 0);
}

TEST_F(RetainTest, BoundsAndManyNames) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const auto names = Publish(1);
  const auto field_of = [&](const client::RetentionOptions& options, size_t count = 1) {
    const absl::Status status = cache_->Retain(std::vector<BlockName>(count, names[0]), options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return DetailOf(status).field;
  };
  EXPECT_EQ(field_of({.priority = -1}), "priority");
  EXPECT_EQ(field_of({.priority = 101}), "priority");
  EXPECT_EQ(field_of({.priority = 80, .ttl_ms = -1}), "ttl_ms");
  EXPECT_EQ(field_of({.priority = 80, .ttl_ms = INT64_MAX}), "ttlMs");
  EXPECT_EQ(field_of({.priority = 80}, 65537), "names");
  std::vector<BlockName> many(65536);
  many.back() = names[0];
  ASSERT_OK_AND_ASSIGN(const RetainOutcome retained, cache_->Retain(many, {.priority = 100, .ttl_ms = 315360000000}));
  EXPECT_EQ(retained.blocks, 1u);
  EXPECT_OK(cache_->Retain({}, {.priority = 0}));
  EXPECT_EQ(client_->Retain(999, names, {}).status().code(), absl::StatusCode::kNotFound);
  // Purged, and asked again: the cache is opened anew, and has none of them.
  ASSERT_OK(client_->Purge(Client::kAllCaches));
  ASSERT_OK_AND_ASSIGN(const RetainOutcome none, cache_->Retain(names, {.priority = 80}));
  EXPECT_EQ(none.blocks, 0u);
}

TEST_F(RetainTest, AnotherTenantsNamesAreNotFound) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const auto names = Publish(1);
  CacheOptions other = Options();
  other.tenant = "another";
  ASSERT_OK_AND_ASSIGN(auto theirs, client_->OpenCache(other));
  ASSERT_OK_AND_ASSIGN(const RetainOutcome retained, theirs->Retain(names, {.priority = 0}));
  EXPECT_EQ(retained.blocks, 0u);
  EXPECT_EQ(retained.bytes, 0u);
}

TEST_F(RetainTest, OnTheDiskUntilTheDaemonEnds) {
  const std::vector<std::string> flags = {"--disk-path", directory_.path() + "/disk", "--disk-bytes", "1GiB"};
  ASSERT_NO_FATAL_FAILURE(Start(flags));
  const auto names = Publish(1);
  ASSERT_OK(cache_->Retain(names, {.priority = 80}));
  ASSERT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_disk_retained_blocks") == kBlocks;
  }));
  // Memory and disk.
  ASSERT_OK_AND_ASSIGN(const RetainOutcome both, cache_->Retain(names, {.priority = 90}));
  EXPECT_EQ(both.blocks, uint64_t{kBlocks});
  ASSERT_NO_FATAL_FAILURE(Start(flags));
  const auto there = [&] { return client_->Explain(cache_->description().id, names); };
  ASSERT_TRUE(Eventually([&] {
    const auto explained = there();
    return explained.ok() && explained->blocks.back().place == client::BlockPlace::kDisk;
  }));
  ASSERT_OK_AND_ASSIGN(const client::Explanation forgotten, there());
  EXPECT_EQ(forgotten.blocks[0].priority, 50);
  // There alone, and then in memory, too.
  ASSERT_OK_AND_ASSIGN(const RetainOutcome on_disk, cache_->Retain(names, {.priority = 70}));
  EXPECT_EQ(on_disk.blocks, uint64_t{kBlocks});
  EXPECT_LT(on_disk.bytes, both.bytes);
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache_->CreateSequence(names));
  EXPECT_EQ(hit.match.hit_blocks, kBlocks);
  ASSERT_OK_AND_ASSIGN(const client::Explanation loaded, there());
  EXPECT_EQ(loaded.blocks[0].place, client::BlockPlace::kMemory);
  EXPECT_EQ(loaded.blocks[0].priority, 70);
}

TEST_F(RetainTest, Kvctl) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const auto names = Publish(1);
  const std::string tokens = TokensFile(1, kBlocks * kPageTokens + 3);
  CommandResult result =
      Run("retain", {"--cache", CacheId(), "--tokens", tokens, "--priority", "80", "--ttl-s", "3600"});
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.output.find("8 of 8 blocks are there"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("they go after others of their tenant, for 1 h 00 m"), std::string::npos)
      << result.output;
  result = Run("retain", {"--json", "--cache", CacheId(), "--tokens", tokens, "--priority", "0", "--blocks", "6..7"});
  EXPECT_EQ(result.status, 0);
  nlohmann::json answer = nlohmann::json::parse(result.output, nullptr, false);
  ASSERT_FALSE(answer.is_discarded()) << result.output;
  EXPECT_EQ(answer["blocks"], 2);
  EXPECT_EQ(answer["asked"], 2);
  EXPECT_EQ(answer["priority"], 0);
  EXPECT_GT(answer["bytes"], 0);
  result =
      Run("retain", {"--cache", CacheId(), "--keys", names[5].key.ToHex(), std::string(64, '0'), "--priority", "50"});
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.output.find("1 of 2 blocks are there"), std::string::npos) << result.output;
  result = Run("explain", {"--json", "--cache", CacheId(), "--tokens", tokens});
  answer = nlohmann::json::parse(result.output, nullptr, false);
  ASSERT_FALSE(answer.is_discarded()) << result.output;
  const int priorities[] = {80, 80, 80, 80, 80, 50, 0, 0};
  for (int i = 0; i < kBlocks; ++i) EXPECT_EQ(answer["blocks"][i]["priority"], priorities[i]) << i;
  EXPECT_GT(answer["blocks"][0]["retained_seconds"], 3000);
  EXPECT_EQ(answer["blocks"][7]["retained_seconds"], 0);
  EXPECT_EQ(Run("retain", {"--help"}).status, 0);
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {},
           {"--cache", "1", "--tokens", tokens},
           {"--tokens", tokens, "--priority", "80"},
           {"--cache", "1", "--priority", "80"},
           {"--cache", "x", "--tokens", tokens, "--priority", "80"},
           {"--cache", "1", "--tokens", tokens, "--priority", "101"},
           {"--cache", "1", "--tokens", tokens, "--priority", "80", "--ttl-s", "-1"},
           {"--cache", "1", "--tokens", tokens, "--keys", std::string(64, '0'), "--priority", "80"}}) {
    EXPECT_EQ(Run("retain", words).status, 2);
  }
  for (const std::string& blocks : {"8..8", "3..2", "3", "a..b", "0..", "0..1..2"}) {
    EXPECT_EQ(Run("retain", {"--cache", CacheId(), "--tokens", tokens, "--priority", "80", "--blocks", blocks}).status,
              blocks == "8..8" ? 1 : 2)  // one that the prompt has not, and no ranges
        << blocks;
  }
  EXPECT_EQ(Run("retain", {"--cache", "99", "--tokens", tokens, "--priority", "80"}).status, 1);
}

}  // namespace
}  // namespace kvmanager::testing
