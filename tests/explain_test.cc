// kvctl explain against a daemon: why each block of a prompt is there, or not.
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/tenant_label.h"
#include "nlohmann/json.hpp"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::BlockLoss;
using client::BlockPlace;
using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

constexpr int kPageTokens = 64;

class ExplainTest : public ::testing::Test {
 protected:
  void TearDown() override { client_.reset(); }

  void Start(std::vector<std::string> more_flags = {}) {
    client_.reset();
    daemon_.reset();
    DaemonOptions options;
    options.host_pool_bytes = 16 << 20;
    options.peers = false;
    options.more_flags = std::move(more_flags);
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }
  // Publishes the first blocks of a text that nobody uses afterwards.
  static void Publish(Cache& cache, const Source& source, int blocks) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache.CreateSequence());
    ASSERT_OK(Load(cache, made.sequence->id(), source, 0, blocks * kPageTokens, 1024));
    ASSERT_OK(made.sequence->Publish(Names(cache, source, blocks)));
  }
  client::Explanation Explain(Cache& cache, const Source& source, int blocks) {
    auto explanation = client_->Explain(cache.description().id, Names(cache, source, blocks));
    EXPECT_OK(explanation);
    return explanation.ok() ? *std::move(explanation) : client::Explanation();
  }
  std::string TokensFile(const Source& source, int tokens) {
    const std::string path = directory_.path() + "/tokens.json";
    std::ofstream(path) << nlohmann::json(source.TokenIds(0, uint64_t(tokens))).dump();
    return path;
  }
  CommandResult Run(const std::vector<std::string>& words) {
    std::vector<std::string> argv = {DataPath("client/cli/kvctl"), "--connect", daemon_->listen(), "explain"};
    argv.insert(argv.end(), words.begin(), words.end());
    absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? *result : CommandResult{-1, ""};
  }
  // Of the first `tokens` tokens.
  nlohmann::json Ask(const Cache& cache, const Source& source, int tokens) {
    const CommandResult result =
        Run({"--json", "--cache", absl::StrCat(cache.description().id), "--tokens", TokensFile(source, tokens)});
    EXPECT_EQ(result.status, 0) << result.output;
    nlohmann::json answer = nlohmann::json::parse(result.output, nullptr, false);
    EXPECT_FALSE(answer.is_discarded()) << result.output;
    return answer;
  }
  static CacheOptions Options(const std::string& tenant, const std::string& codec = "raw",
                              int page_tokens = kPageTokens) {
    CacheOptions options = SmallCache(codec, 2, page_tokens);
    options.tenant = tenant;
    return options;
  }

  TempDir directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(ExplainTest, StoredNeverStoredAndPurged) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("a")));
  const Source source{1, Kind::kNormal, Options("a")};
  ASSERT_NO_FATAL_FAILURE(Publish(*cache, source, 3));
  nlohmann::json answer = Ask(*cache, source, 4 * kPageTokens + 5);
  ASSERT_EQ(answer["blocks"].size(), 4u) << answer;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(answer["blocks"][i]["place"], "memory");
    EXPECT_EQ(answer["blocks"][i]["tier"], "host");
    EXPECT_EQ(answer["blocks"][i]["cache_id"], cache->description().id);
  }
  EXPECT_EQ(answer["blocks"][3]["place"], "nowhere");
  EXPECT_EQ(answer["blocks"][3]["loss"], "unknown");
  EXPECT_EQ(answer["unnamed_tokens"], 5);
  EXPECT_EQ(answer["remembered"], 0);
  ASSERT_OK(client_->Purge(cache->description().id));
  // A purge closes the cache; an engine that asks again opens it.
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(Options("a")));
  answer = Ask(*cache, source, 4 * kPageTokens);
  EXPECT_EQ(answer["blocks"][0]["loss"], "purged");
  EXPECT_EQ(answer["blocks"][0]["owner"], TenantLabel("a"));
  EXPECT_EQ(answer["blocks"][3]["loss"], "unknown");
  EXPECT_EQ(answer["remembered"], 3);
}

TEST_F(ExplainTest, EvictedForAnotherTenant) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto ours, client_->OpenCache(Options("a")));
  ASSERT_OK_AND_ASSIGN(auto theirs, client_->OpenCache(Options("b")));
  const Source source{1, Kind::kNormal, Options("a")};
  ASSERT_NO_FATAL_FAILURE(Publish(*ours, source, 200));
  ASSERT_NO_FATAL_FAILURE(Publish(*theirs, {2, Kind::kNormal, Options("b")}, 100));
  const client::Explanation all = Explain(*ours, source, 200);
  int evicted = 0;
  for (const client::BlockExplanation& block : all.blocks) {
    if (block.place != BlockPlace::kNowhere) continue;
    ++evicted;
    EXPECT_EQ(block.loss, BlockLoss::kEvicted);
    EXPECT_EQ(block.tier, "host");
    EXPECT_EQ(block.owner, TenantLabel("a"));
    EXPECT_EQ(block.taker, TenantLabel("b"));
    EXPECT_EQ(block.cache_id, ours->description().id);
    EXPECT_GE(block.seconds_ago, 0);
  }
  EXPECT_GT(evicted, 0);
  EXPECT_EQ(all.remembered, static_cast<uint32_t>(evicted));
  const CommandResult text =
      Run({"--cache", absl::StrCat(ours->description().id), "--tokens", TokensFile(source, 200 * kPageTokens)});
  EXPECT_EQ(text.status, 0);
  const std::string why =
      absl::StrCat("evicted from host for tenant ", TenantLabel("b"), "; it was of tenant ", TenantLabel("a"));
  for (const std::string& shown :
       {absl::StrCat(200 - evicted, " of 200 blocks are there"), why, std::string("WHY NOT")}) {
    EXPECT_NE(text.output.find(shown), std::string::npos) << shown << "\n" << text.output;
  }
}

TEST_F(ExplainTest, StoredUnderAnotherName) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto asked, client_->OpenCache(Options("a")));
  ASSERT_OK_AND_ASSIGN(auto tenant, client_->OpenCache(Options("b")));
  ASSERT_OK_AND_ASSIGN(auto codec, client_->OpenCache(Options("a", "hack:k_bits=3,v_bits=2")));
  ASSERT_OK_AND_ASSIGN(auto pages, client_->OpenCache(Options("a", "raw", 32)));
  const Source source{1, Kind::kNormal, Options("a")};
  ASSERT_NO_FATAL_FAILURE(Publish(*tenant, source, 2));
  nlohmann::json answer = Ask(*asked, source, 4 * kPageTokens);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(answer["blocks"][i]["loss"], "unknown");
    EXPECT_EQ(answer["blocks"][i]["same_tokens_cache_id"], i < 2 ? tenant->description().id : 0u);
  }
  ASSERT_EQ(answer["others"].size(), 1u) << answer;
  EXPECT_EQ(answer["others"][0]["tenant"], TenantLabel("b"));
  EXPECT_EQ(answer["others"][0]["differs"], nlohmann::json({"tenant"}));
  EXPECT_EQ(answer["other_page_sizes"].size(), 0u);
  ASSERT_OK(client_->Purge(tenant->description().id));
  ASSERT_NO_FATAL_FAILURE(Publish(*codec, source, 3));
  Source small = source;
  small.shape.page_tokens = 32;
  {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, pages->CreateSequence());
    ASSERT_OK(Load(*pages, made.sequence->id(), small, 0, 96, 96));
    ASSERT_OK(made.sequence->Publish(Names(*pages, small, 3)));
  }
  answer = Ask(*asked, source, 4 * kPageTokens);
  EXPECT_EQ(answer["blocks"][2]["same_tokens_cache_id"], codec->description().id);
  EXPECT_EQ(answer["blocks"][3]["same_tokens_cache_id"], 0);
  EXPECT_EQ(answer["others"][0]["differs"], nlohmann::json({"codec"}));
  ASSERT_EQ(answer["other_page_sizes"].size(), 1u) << answer;
  EXPECT_EQ(answer["other_page_sizes"][0]["page_tokens"], 32);
  EXPECT_EQ(answer["other_page_sizes"][0]["blocks"], 8);
  EXPECT_EQ(answer["other_page_sizes"][0]["same_tokens_blocks"], 3);
  EXPECT_EQ(answer["other_page_sizes"][0]["others"][0]["differs"], nlohmann::json({"pageTokens"}));
}

TEST_F(ExplainTest, OnTheDiskAfterARestart) {
  const std::vector<std::string> flags = {"--disk-path", directory_.path() + "/disk", "--disk-bytes", "1GiB"};
  ASSERT_NO_FATAL_FAILURE(Start(flags));
  const Source source{1, Kind::kNormal, Options("a")};
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("a")));
    ASSERT_NO_FATAL_FAILURE(Publish(*cache, source, 3));
  }
  ASSERT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_disk_blocks") == 3;
  }));
  client_.reset();
  daemon_->Kill();
  ASSERT_NO_FATAL_FAILURE(Start(flags));
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("a")));
  ASSERT_TRUE(Eventually([&] { return Explain(*cache, source, 3).blocks.at(2).place == BlockPlace::kDisk; }));
  const nlohmann::json answer = Ask(*cache, source, 4 * kPageTokens);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(answer["blocks"][i]["place"], "disk");
    EXPECT_EQ(answer["blocks"][i]["tier"], "disk");
  }
  EXPECT_EQ(answer["blocks"][3]["place"], "nowhere");
  // Whoever takes them has a hit that came from the disk.
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 3)));
  EXPECT_EQ(hit.match.hit_blocks, 3);
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon_));
  EXPECT_EQ(page.Sum("kvmanager_prefix_hit_tier_blocks_total", {"tier=\"disk\""}), 3);
  EXPECT_EQ(page.Sum("kvmanager_prefix_hit_tier_blocks_total"), page.Sum("kvmanager_prefix_hit_blocks_total"));
}

TEST_F(ExplainTest, KeysAndWrongUse) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("a")));
  const Source source{1, Kind::kNormal, Options("a")};
  ASSERT_NO_FATAL_FAILURE(Publish(*cache, source, 1));
  const std::string key = Names(*cache, source, 1)[0].key.ToHex();
  const CommandResult found = Run({"--json", "--keys", key, std::string(64, '0')});
  EXPECT_EQ(found.status, 0);
  const nlohmann::json answer = nlohmann::json::parse(found.output, nullptr, false);
  ASSERT_FALSE(answer.is_discarded()) << found.output;
  EXPECT_EQ(answer["blocks"][0]["place"], "memory");
  EXPECT_EQ(answer["blocks"][0]["cache_id"], cache->description().id);
  EXPECT_EQ(answer["blocks"][1]["place"], "nowhere");
  const std::string tokens = TokensFile(source, kPageTokens);
  EXPECT_EQ(Run({"--help"}).status, 0);
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {}, {"--tokens", tokens}, {"--cache", "x", "--tokens", tokens}, {"--cache", "1"}, {"--keys", "12"}}) {
    EXPECT_EQ(Run(words).status, 2);
  }
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--cache", "99", "--tokens", tokens},
                                             {"--cache", "1", "--tokens", tokens + ".none"},
                                             {"--cache", "1", "--tokens", TokensFile(source, kPageTokens - 1)}}) {
    EXPECT_EQ(Run(words).status, 1);
  }
}

TEST_F(ExplainTest, SaysWhatAFileOfTokensHasInstead) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("a")));
  const std::string id = absl::StrCat(cache->description().id), path = directory_.path() + "/prompt";
  const auto error = [&](const std::string& file) {
    const CommandResult result = Run({"--json", "--cache", id, "--tokens", file});
    EXPECT_EQ(result.status, 1) << result.output;
    const nlohmann::json answer = nlohmann::json::parse(result.output, nullptr, false);
    EXPECT_FALSE(answer.is_discarded()) << result.output;
    return answer.is_discarded() ? nlohmann::json() : answer["error"];
  };
  const auto says = [&](const std::string& content, const std::string& found) {
    std::ofstream(path, std::ios::binary) << content;
    const nlohmann::json said = error(path);
    EXPECT_EQ(said["code"], "INVALID_ARGUMENT");
    EXPECT_NE(said["message"].get<std::string>().find(absl::StrCat("--tokens is ", path, ", ", found)),
              std::string::npos)
        << said;
    return said["message"].get<std::string>();
  };
  const std::string message = says("Once upon a time", "which is no JSON from byte 1 on");
  EXPECT_NE(message.find("a list in JSON of numbers 0..4294967295, such as [1, 15043, 3186]"), std::string::npos);
  says("", "which is empty");
  says(std::string("\x7f"
                   "ELF\0",
                   5),
       "which is binary");
  says("{\"input_ids\": [1, 2]}", "which is a JSON object with a list in");
  says("[1, -2]", "whose entry 2 is -2");
  EXPECT_NE(says("[1, 2]", "which has 2 token ids, must be a file with at least 64").find(id), std::string::npos);
  std::filesystem::remove(path);
  nlohmann::json said = error(path);
  EXPECT_EQ(said["code"], "NOT_FOUND");
  EXPECT_NE(said["message"].get<std::string>().find("which does not exist"), std::string::npos) << said;
  EXPECT_FALSE(said.contains("advice")) << "the file is missing, and no cache: " << said;
  said = error(directory_.path());
  EXPECT_NE(said["message"].get<std::string>().find("which is a directory"), std::string::npos) << said;
}

}  // namespace
}  // namespace kvmanager::testing
