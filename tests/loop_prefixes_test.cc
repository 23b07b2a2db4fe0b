// Long prefixes and the longest sequences do not hold the event loop: named, found, forked, verified, retained, taken
// from a disk and from memory that outlives the daemon.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/loop_case.h"

namespace kvmanager::testing {
namespace {

using client::PrefixMatch;

constexpr int kBlocks = 4096;  // with pages of 64 tokens a context of 262,144

LOOP_TEST(WithLongPrefixes) {
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Long(*cache_, kBlocks, 1024));
  Look("appends of 16,384 tokens");
  std::vector<BlockName> names;
  for (int i = 0; i < kBlocks; ++i) names.push_back(NameOf(i));
  ASSERT_OK(made.sequence->Publish(names));
  Look("publish");
  // As many names as a message holds.
  const std::vector<absl::Span<const BlockName>> many(32 * kMiB / 96 / kBlocks, names), one(1, names);
  ASSERT_OK_AND_ASSIGN(const std::vector<PrefixMatch> matches, cache_->Match(many));
  for (const PrefixMatch& match : matches) EXPECT_EQ(match.hit_blocks, kBlocks);
  Look(absl::StrCat("match of ", many.size(), " prefixes"));
  {
    ASSERT_OK_AND_ASSIGN(auto first, cache_->CreateSequences(one));
    EXPECT_EQ(first[0]->match.hit_blocks, kBlocks);
    Look("createSequences");
    ASSERT_OK_AND_ASSIGN(auto more, cache_->CreateSequences(many));
    for (const auto& each : more) EXPECT_EQ(each->match.hit_blocks, kBlocks);
    Look(absl::StrCat("createSequences of ", many.size(), " prefixes"));
    ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
    Look("fork");
  }
  EXPECT_OK(client_->Ping());
  Look("drop of all of them");
  ASSERT_OK_AND_ASSIGN(CreatedSequence equal, Long(*cache_, kBlocks, 1024));
  ASSERT_OK(equal.sequence->Publish(names));
  Look("publish of equal blocks");
  ASSERT_OK(made.sequence->Crop(kPageTokens));
  Look("crop to one block");
}

LOOP_TEST(WithTheLongestSequences) {
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Long(*cache_, kMostBlocks, 1000));
  ASSERT_OK_AND_ASSIGN(CreatedSequence equal, Long(*cache_, kMostBlocks, 1000));
  Look("appends of 16,000 tokens");
  std::vector<BlockName> names;
  for (int i = 0; i < kMostBlocks; ++i) names.push_back(NameOf(i));
  ASSERT_OK(made.sequence->Publish(names));
  Look("publish of 60,000 blocks");
  ASSERT_OK(made.sequence->Publish(names));
  Look("publish of the same");
  ASSERT_OK(equal.sequence->Publish(names));
  Look("publish of equal blocks");
  {
    ASSERT_OK_AND_ASSIGN(const CreatedSequence created, cache_->CreateSequence(names));
    EXPECT_EQ(created.match.hit_blocks, kMostBlocks);
    Look("createSequences with a prefix of 60,000 blocks");
    ASSERT_OK_AND_ASSIGN(const auto fork, created.sequence->Fork());
    Look("fork");
  }
  ASSERT_OK(client_->Ping());
  Look("drop of both");
  {
    ASSERT_OK_AND_ASSIGN(const auto there, client_->Explain(cache_->description().id, names));
    EXPECT_EQ(there.blocks.at(kMostBlocks - 1).place, client::BlockPlace::kMemory);
    Look("explain of 60,000 blocks that are there");
    ASSERT_OK_AND_ASSIGN(const auto other, client_->OpenCache(Options("other")));
    std::vector<BlockName> missing = names;
    for (BlockName& name : missing) {
      name.key.bytes[30] = 1;
      name.tokens = name.key;
    }
    ASSERT_OK_AND_ASSIGN(const auto nowhere, client_->Explain(other->description().id, missing));
    EXPECT_EQ(nowhere.blocks.at(kMostBlocks - 1).place, client::BlockPlace::kNowhere);
    Look("explain of 60,000 that are nowhere, beside 60,000 blocks");
  }
  for (const int priority : {100, 0, 50}) {
    ASSERT_OK_AND_ASSIGN(const auto retained, cache_->Retain(names, {.priority = priority, .ttl_ms = 60000}));
    EXPECT_EQ(retained.blocks, uint64_t{kMostBlocks});
    Look(absl::StrCat("retain of 60,000 blocks in use at priority ", priority));
  }
  ASSERT_OK(equal.sequence->Crop(kPageTokens));
  Look("crop to one block");
  equal.sequence.reset();
  made.sequence.reset();
  ASSERT_OK(client_->Ping());
  EXPECT_TRUE(Eventually([&] { return client_->Status()->leases == 0; }));
  Look("drop of 60,000 blocks");
}

// The same blocks, which after a restart the disk alone has.
LOOP_TEST(WithTheLongestPrefixOnADisk) {
  const TempDir directory;
  DaemonOptions options;
  options.host_pool_bytes = 1536 << 20;
  options.more_flags = {absl::StrCat("--disk-path=", directory.path(), "/disk"), "--disk-bytes=2GiB"};
  ASSERT_NO_FATAL_FAILURE(Restart(options));
  std::vector<BlockName> names;
  for (int i = 0; i < kMostBlocks; ++i) names.push_back(NameOf(i));
  {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, Long(*cache_, kMostBlocks, 1000));
    ASSERT_OK(made.sequence->Publish(names));
    Look("publish of 60,000 blocks, with a disk");
  }
  ASSERT_TRUE(Eventually([&] { return Gauge("kvmanager_disk_blocks") == kMostBlocks; }, 60000));
  Look("writing them");
  ASSERT_NO_FATAL_FAILURE(Restart(options));
  ASSERT_TRUE(Eventually([&] { return Gauge("kvmanager_disk_blocks") == kMostBlocks; }, 60000));
  Look("a start with them");
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto found, cache_->Match({{names}}));
    EXPECT_EQ(found[0].hit_blocks, kMostBlocks);
    Look(i == 0 ? "match of what the disk has" : "match of what memory has, and nobody uses");
    ASSERT_OK_AND_ASSIGN(const CreatedSequence created, cache_->CreateSequence(names));
    EXPECT_EQ(created.match.hit_blocks, kMostBlocks);
    Look("createSequences with it");
  }
  // In memory and on the disk, evictable in both.
  ASSERT_OK(client_->Ping());
  ASSERT_TRUE(Eventually([&] { return client_->Status()->leases == 0; }));
  Look("drop of both");
  for (const int priority : {100, 0, 80}) {
    ASSERT_OK_AND_ASSIGN(const auto retained, cache_->Retain(names, {.priority = priority, .ttl_ms = 60000}));
    EXPECT_EQ(retained.blocks, uint64_t{kMostBlocks});
    Look(absl::StrCat("retain of them at priority ", priority));
  }
  ASSERT_OK(cache_->Retain(names, {.priority = 80, .ttl_ms = 1}));
  ASSERT_OK(cache_->Retain({}, {}));
  ASSERT_TRUE(Eventually([&] { return Gauge("kvmanager_retained_blocks") < kMostBlocks; }));
  Look("their ends");
}

// And in memory that outlives the daemon: recorded, claimed, given up by a purge.
LOOP_TEST(WithTheLongestPrefixInKeptMemory) {
  const TempDir directory;
  const std::string state = directory.path() + "/state";
  DaemonOptions options;
  options.host_pool_bytes = 1536 << 20;
  options.more_flags = {"--state-dir", state, "--state-keep-s", "60"};
  ASSERT_NO_FATAL_FAILURE(Restart(options));
  std::vector<BlockName> names;
  for (int i = 0; i < kMostBlocks; ++i) names.push_back(NameOf(i));
  {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, Long(*cache_, kMostBlocks, 1000));
    ASSERT_OK(made.sequence->Publish(names));
    Look("publish of 60,000 blocks that are recorded");
  }
  ASSERT_TRUE(Eventually([&] { return Gauge("kvmanager_recorded_blocks") == kMostBlocks; }, 60000));
  daemon_->Kill();
  ASSERT_NO_FATAL_FAILURE(Restart(options));
  ASSERT_TRUE(Eventually([&] { return Gauge("kvmanager_recorded_blocks") == kMostBlocks; }, 60000));
  Look("their claim after a kill");
  {
    ASSERT_OK_AND_ASSIGN(const CreatedSequence created, cache_->CreateSequence(names));
    EXPECT_EQ(created.match.hit_blocks, kMostBlocks);
    Look("createSequences with them, compared");
  }
  cache_.reset();
  client_.reset();
  daemon_.reset();
  KillKeeperOf(state);
}

LOOP_TEST(WithManyBytesToVerify) {
  ASSERT_OK_AND_ASSIGN(auto large, client_->OpenCache(Options("large", 4, 256)));
  constexpr int kLarge = 4096;  // of 64 KiB: 256 MiB
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Long(*large, kLarge, 32));
  Look("appends of 2 x 1 MiB");
  std::vector<BlockName> names;
  for (int i = 0; i < kLarge; ++i) names.push_back(NameOf(i));
  ASSERT_OK(made.sequence->Publish(names));
  Look("publish");
  ASSERT_OK_AND_ASSIGN(auto created, large->CreateSequence(names));
  EXPECT_EQ(created.match.hit_blocks, kLarge);
  Look("createSequences that verifies 256 MiB");
}

}  // namespace
}  // namespace kvmanager::testing
