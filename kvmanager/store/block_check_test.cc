#include "kvmanager/store/block_check.h"

#include <memory>
#include <vector>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::Text;

constexpr int kBlocks = 64;

class BlockCheckTest : public testing::PageStoreTest {
 protected:
  void SetUp() override {
    cache_ = test().Open(MakeConfig("raw", 0));
    const SequenceId made = Filled(cache_, text_, kBlocks * kPage);
    names_ = Names(cache_, text_, kBlocks);
    ASSERT_EQ(store().Publish(made, names_)->published, kBlocks);
    store().Drop(made);
  }
  std::unique_ptr<BlockCheck> Check() {
    auto check = store().caches().Check(cache_, names_);
    EXPECT_TRUE(check.ok()) << check.status();
    return *std::move(check);
  }
  static void Run(BlockCheck& check) {
    while (check.Next()) {
      while (check.CompareOne()) {
      }
    }
  }
  // Changes a byte of layer 1 of a block.
  void Flip(int block) {
    const auto sequence = store().Create(cache_, absl::MakeConstSpan(names_).first(block + 1));
    ASSERT_EQ(sequence->match.hit_blocks, block + 1);
    const auto lease = Attend(cache_, sequence->sequence, uint64_t(block + 1) * kPage - 1, 1, /*layer=*/1);
    ASSERT_TRUE(lease->ready());
    const AttentionPage& page = lease->pages(0)[block];
    const_cast<uint8_t*>(page.encoded != nullptr ? page.encoded : page.raw)[99] ^= 4;
    store().Drop(sequence->sequence);
  }
  MatchResult Begin() {
    const auto made = store().Create(cache_, names_);
    store().Drop(made->sequence);
    return made->match;
  }
  double failures() { return test().store_metrics.checksum_failures.Value(); }
  void Pass() { test().clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2); }

  const Text text_ = MakeText(kBlocks * kPage);
  CacheId cache_ = 0;
  std::vector<BlockName> names_;
};

TEST_F(BlockCheckTest, FindsWhatHasChanged) {
  Flip(40);
  Pass();
  auto check = Check();
  ASSERT_NE(check, nullptr);
  Run(*check);
  EXPECT_EQ(failures(), 1);
  check.reset();
  EXPECT_EQ(Begin().hit_blocks, 40);
}

TEST_F(BlockCheckTest, WhatItVerifiedIsNotVerifiedAgainForAWhile) {
  Pass();
  Run(*Check());
  EXPECT_EQ(Check(), nullptr);
  Flip(7);
  EXPECT_EQ(Begin().hit_blocks, kBlocks);
  Pass();
  EXPECT_EQ(Begin().hit_blocks, 7);
  EXPECT_EQ(failures(), 1);
}

TEST_F(BlockCheckTest, WhatWasNotComparedIsNotTakenForVerified) {
  Flip(3);
  Pass();
  {
    auto check = Check();
    ASSERT_TRUE(check->Next());
    for (int pages = 0; pages < 3; ++pages) ASSERT_TRUE(check->CompareOne());
  }
  EXPECT_EQ(Begin().hit_blocks, 3);
}

TEST_F(BlockCheckTest, AFewBytesNeedNoThread) {
  Pass();
  const auto few = store().caches().Check(cache_, absl::MakeConstSpan(names_).first(1));
  ASSERT_TRUE(few.ok());
  EXPECT_EQ(*few, nullptr);
  EXPECT_EQ(store().caches().Check(cache_ + 1, names_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(BlockCheckTest, ItsBlocksStayWhileTheyAreCompared) {
  Flip(5);
  Pass();
  auto check = Check();
  ASSERT_TRUE(check->Next());
  EXPECT_EQ(*store().caches().Purge(cache_), 0u);
  EXPECT_EQ(Begin().hit_blocks, 5);  // this found it first
  while (check->CompareOne()) {
  }
  EXPECT_FALSE(check->Next());
  EXPECT_EQ(failures(), 1);
  store().report().CheckInvariants();
  check.reset();
  EXPECT_EQ(*store().caches().Purge(cache_), uint64_t{kBlocks} - 1);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

TEST_F(BlockCheckTest, OutlivesItsStore) {
  Pass();
  auto check = Check();
  ASSERT_TRUE(check->Next());
  test().store.reset();
  EXPECT_FALSE(check->Next());
  check.reset();
  test_.reset();
}

}  // namespace
}  // namespace kvmanager
