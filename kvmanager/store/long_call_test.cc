// Calls on very many blocks, done in pieces: the same as at once, with the books right between two pieces.
#include "kvmanager/store/long_call.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::Text;
using Next = LongCall::Next;

constexpr int kBlocks = 300;

class LongCallTest : public testing::PageStoreTest {
 protected:
  void SetUp() override {
    cache_ = test().Open(MakeConfig("raw", 0));
    names_ = Names(cache_, text_, kBlocks);
  }
  // A sequence of kBlocks full blocks; lag 0, and aged as far as one append of a token ages it.
  SequenceId Full(const Text& text) { return Filled(cache_, text, kBlocks * kPage); }
  void PublishAndDrop() {
    const SequenceId made = Full(text_);
    ASSERT_EQ(store().Publish(made, names_)->published, kBlocks);
    Leave(made);
  }
  void Leave(SequenceId sequence) {
    store().Drop(sequence);
    while (store().long_calls().ReleaseSome()) {
    }
  }
  std::unique_ptr<SequenceBeginning> Begin() {
    auto begun = store().long_calls().Begin(cache_, names_, 0);
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *std::move(begun);
  }
  std::unique_ptr<Publication> Publish(SequenceId sequence) {
    auto begun = store().long_calls().BeginPublish(sequence, names_);
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *std::move(begun);
  }
  struct Pieces {
    int pieces = 0, comparisons = 0, pages = 0;
  };
  Pieces Run(LongCall& call) {
    Pieces done;
    for (Next next; (next = call.DoPiece()) != Next::kDone; ++done.pieces) {
      store().report().CheckInvariants();
      if (next != Next::kCompare) continue;
      ++done.comparisons;
      do ++done.pages;
      while (call.CompareOne());
    }
    store().report().CheckInvariants();
    return done;
  }
  // Changes a byte of layer 1 of a block.
  void Flip(int block) {
    const auto sequence = store().Create(cache_, absl::MakeConstSpan(names_).first(block + 1));
    ASSERT_EQ(sequence->match.hit_blocks, block + 1);
    const auto lease = Attend(cache_, sequence->sequence, uint64_t(block + 1) * kPage - 1, 1, /*layer=*/1);
    const AttentionPage& page = lease->pages(0)[block];
    const_cast<uint8_t*>(page.encoded != nullptr ? page.encoded : page.raw)[99] ^= 4;
    Leave(sequence->sequence);
  }
  void Pass() { test().clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2); }
  uint64_t used_bytes() { return test().pool->used_bytes(); }

  const Text text_ = MakeText(kBlocks * kPage);
  CacheId cache_ = 0;
  std::vector<BlockName> names_;
};

TEST_F(LongCallTest, ASequenceBeginsInPieces) {
  PublishAndDrop();
  Pass();
  const auto beginning = Begin();
  const Pieces done = Run(*beginning);
  EXPECT_EQ(done.comparisons, 3);
  EXPECT_EQ(done.pages, 2 * kBlocks);
  const auto made = beginning->Commit();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->match.hit_blocks, kBlocks);
  EXPECT_EQ(made->match.reason, MissReason::kNone);
  EXPECT_EQ(store().Describe(made->sequence)->tokens, uint64_t{kBlocks} * kPage);
  store().report().CheckInvariants();
  // Another one finds them verified.
  const auto again = Begin();
  EXPECT_EQ(Run(*again).comparisons, 0);
  EXPECT_EQ(again->Commit()->match.hit_blocks, kBlocks);
}

TEST_F(LongCallTest, AMatchIsDoneInPieces) {
  PublishAndDrop();
  auto names = names_;
  names[290].tokens = {};
  const auto match = *store().caches().BeginMatch(cache_, names);
  int pieces = 1;
  for (; match->DoPiece(); ++pieces) store().report().CheckInvariants();
  EXPECT_EQ(pieces, 6);  // of 128: three to look, three to note the use
  EXPECT_EQ(match->result()->hit_blocks, 290);
  EXPECT_EQ(match->result()->reason, MissReason::kTokenMismatch);
  // All of it counts as used, children before their parents: what is evicted now is the end.
  const CacheId other = test().Open(MakeConfig("raw", 1));
  for (uint32_t i = 0; test().store_metrics.evicted_blocks.Value() < 50; ++i) {
    const Text text = MakeText(kPage, 1000 + i);
    const SequenceId sequence = Filled(other, text, kPage);
    ASSERT_TRUE(store().Publish(sequence, Names(other, text, 1)).ok());
    Leave(sequence);
  }
  const int left = store().caches().Match(cache_, names_)->hit_blocks;
  EXPECT_GT(left, 0);
  EXPECT_LE(left, 250);
}

TEST_F(LongCallTest, AMatchEndsWithItsCache) {
  PublishAndDrop();
  const auto match = *store().caches().BeginMatch(cache_, names_);
  EXPECT_TRUE(match->DoPiece());
  ASSERT_TRUE(store().caches().Purge(cache_).ok());
  EXPECT_FALSE(match->DoPiece());
  EXPECT_EQ(match->result().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(LongCallTest, ASequenceEndsAtABlockThatHasChanged) {
  PublishAndDrop();
  Flip(200);
  Pass();
  const auto beginning = Begin();
  Run(*beginning);
  const auto made = beginning->Commit();
  EXPECT_EQ(made->match.hit_blocks, 200);
  EXPECT_EQ(made->match.reason, MissReason::kChecksum);
  EXPECT_EQ(test().store_metrics.checksum_failures.Value(), 1);
  EXPECT_EQ(store().caches().Match(cache_, names_)->hit_blocks, 200);
}

TEST_F(LongCallTest, ASequenceThatIsGivenUpLeavesNothing) {
  PublishAndDrop();
  for (const int pieces : {1, 2, 3}) {
    Pass();
    auto beginning = Begin();
    for (int i = 0; i < pieces; ++i) {
      ASSERT_EQ(beginning->DoPiece(), Next::kCompare);
      EXPECT_TRUE(beginning->CompareOne());
      if (i + 1 == pieces) break;  // in the midst of a comparison
      while (beginning->CompareOne()) {
      }
    }
    EXPECT_EQ(store().Describe(1).status().code(), absl::StatusCode::kNotFound);
    beginning = nullptr;
    store().report().CheckInvariants();
  }
  while (store().long_calls().ReleaseSome()) {
  }
  EXPECT_EQ(*store().caches().Purge(cache_), uint64_t{kBlocks});
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(LongCallTest, TheyOutliveTheirStore) {
  const SequenceId made = Full(text_);
  auto publication = Publish(made);
  EXPECT_EQ(publication->DoPiece(), Next::kPiece);
  store().Publish(made, names_).IgnoreError();
  Pass();
  auto beginning = Begin();
  EXPECT_EQ(beginning->DoPiece(), Next::kCompare);
  const AttendEntry last{made, uint64_t{kBlocks} * kPage - 1, 1};
  std::vector<std::unique_ptr<Listing>> listings;
  for (const int more_pieces : {0, 1}) {  // one is in the middle, one at its end
    const AttendEntry entries[] = {last, {*store().Fork(made), last.position, 1}};
    listings.push_back(*store().long_calls().BeginAttend(cache_, 0, entries));
    EXPECT_EQ(listings.back()->DoPiece(), Next::kPiece);
    if (more_pieces == 1) {
      EXPECT_EQ(listings.back()->DoPiece(), Next::kDone);
    }
  }
  test().store.reset();
  for (auto& listing : listings) {
    EXPECT_EQ(listing->DoPiece(), Next::kDone);
    EXPECT_EQ(listing->Commit().status().code(), absl::StatusCode::kUnavailable);
    listing = nullptr;
  }
  EXPECT_EQ(beginning->DoPiece(), Next::kDone);
  EXPECT_EQ(beginning->Commit().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(publication->DoPiece(), Next::kDone);
  EXPECT_EQ(publication->result().status().code(), absl::StatusCode::kUnavailable);
  beginning = nullptr;
  publication = nullptr;
  test_.reset();
}

TEST_F(LongCallTest, NamesAreGivenInPieces) {
  const SequenceId first = Full(text_), second = Full(text_);
  const auto publication = Publish(first);
  EXPECT_GE(Run(*publication).pieces, 4);
  EXPECT_EQ(publication->result()->published, kBlocks);
  EXPECT_EQ(store().caches().Match(cache_, names_)->hit_blocks, kBlocks);
  Pass();
  // Its own blocks need no comparison, equal ones of others do.
  const auto again = Publish(first);
  EXPECT_EQ(Run(*again).comparisons, 0);
  EXPECT_EQ(again->result()->published, 0);
  const auto equal = Publish(second);
  EXPECT_EQ(Run(*equal).pages, 2 * kBlocks);
  ASSERT_TRUE(equal->result().ok());
  EXPECT_EQ(equal->result()->published, 0);
  EXPECT_EQ(equal->result()->shared + equal->result()->deferred, kBlocks);
}

TEST_F(LongCallTest, AnEqualBlockThatHasChangedIsNotTaken) {
  const SequenceId first = Full(text_), second = Full(text_);
  ASSERT_EQ(store().Publish(first, names_)->published, kBlocks);
  Flip(280);
  Pass();
  const auto publication = Publish(second);
  Run(*publication);
  ASSERT_TRUE(publication->result().ok());
  EXPECT_EQ(publication->result()->published, 1);
  EXPECT_EQ(store().Describe(first)->published_blocks, kBlocks - 1);
}

TEST_F(LongCallTest, AWrongNameNamesNothing) {
  const SequenceId made = Full(text_);
  names_[290] = names_[3];
  const auto publication = Publish(made);
  Run(*publication);
  EXPECT_EQ(publication->result().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(publication->result().status()).field, "names[290]");
  EXPECT_EQ(store().Describe(made)->published_blocks, 0);
}

TEST_F(LongCallTest, ANameThatAnotherGivesMeanwhileEndsIt) {
  const Text other = MakeText(kBlocks * kPage, 9);
  const SequenceId made = Full(text_), of_other = Full(other);
  const auto publication = Publish(made);
  ASSERT_EQ(publication->DoPiece(), Next::kPiece);
  ASSERT_EQ(publication->DoPiece(), Next::kPiece);  // all are looked at
  std::vector<BlockName> others = Names(cache_, other, 201);
  others[200].key = names_[200].key;
  ASSERT_EQ(store().Publish(of_other, others)->published, 201);
  Run(*publication);
  EXPECT_EQ(DetailOf(publication->result().status()).field, "names[200].tokens");
  EXPECT_EQ(store().Describe(made)->published_blocks, 200);
}

TEST_F(LongCallTest, ACropMeanwhileEndsIt) {
  const SequenceId made = Full(text_);
  const auto publication = Publish(made);
  ASSERT_EQ(publication->DoPiece(), Next::kPiece);
  ASSERT_TRUE(store().Crop(made, 5 * kPage).ok());
  Run(*publication);
  EXPECT_EQ(publication->result().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store().Describe(made)->published_blocks, 0);
}

TEST_F(LongCallTest, WhatASequenceLeavesIsGivenBackInPieces) {
  int told = 0;
  store().long_calls().OnLeftovers([&told] { ++told; });
  const SequenceId cropped = Full(text_), dropped = Full(MakeText(kBlocks * kPage, 5));
  const uint64_t of_one = used_bytes() / 2;
  ASSERT_TRUE(store().Crop(cropped, 2 * kPage).ok());
  EXPECT_EQ(store().Describe(cropped)->tokens, 2u * kPage);
  EXPECT_EQ(told, 1);
  EXPECT_GT(used_bytes(), of_one);
  store().Drop(dropped);
  EXPECT_EQ(told, 1) << "there was something already";
  store().report().CheckInvariants();
  int pieces = 1;
  for (; store().long_calls().ReleaseSome(); ++pieces) store().report().CheckInvariants();
  EXPECT_EQ(pieces, 2);
  EXPECT_EQ(used_bytes(), of_one / kBlocks * 2);
  store().Drop(cropped);
  EXPECT_EQ(used_bytes(), 0u);
  EXPECT_EQ(told, 1) << "few are given back at once";
}

TEST_F(LongCallTest, AttentionIsListedInPieces) {
  std::vector<AttendEntry> entries = {{Full(text_), uint64_t{kBlocks} * kPage - 1, 1}};
  for (int i = 1; i < 4; ++i) {
    entries.push_back({*store().Fork(entries[0].sequence), uint64_t(kBlocks - i) * kPage - 1, 1});
  }
  const uint64_t pages = 4 * kBlocks - 6;
  int told = 0;
  store().long_calls().OnLeftovers([&] { ++told; });
  auto listing = *store().long_calls().BeginAttend(cache_, 1, entries);
  EXPECT_EQ(store().report().Use().lease_pages, pages);
  EXPECT_EQ(Run(*listing).pieces, 2);
  auto lease = *listing->Commit();
  listing.reset();
  auto at_once = *store().Attend(cache_, 1, entries);
  EXPECT_EQ(store().report().Use().lease_pages, 2 * pages);
  ASSERT_TRUE(lease->ready() && at_once->ready());
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ(lease->pages(i).size(), size_t(kBlocks - i));
    EXPECT_EQ(lease->aged(i), at_once->aged(i));
    for (size_t j = 0; j < lease->pages(i).size(); ++j) {
      const AttentionPage &one = lease->pages(i)[j], &other = at_once->pages(i)[j];
      ASSERT_TRUE(one.raw == other.raw && one.encoded == other.encoded && one.lag_applies == other.lag_applies);
    }
  }
  at_once.reset();
  lease.reset();
  EXPECT_EQ(told, 1);
  int releases = 1;
  for (; store().long_calls().ReleaseSome(); ++releases) store().report().CheckInvariants();
  EXPECT_EQ(releases, 2 * 3);
  EXPECT_EQ(store().report().Use().lease_pages, 0u);
}

TEST_F(LongCallTest, ASequenceThatChangesMeanwhileEndsAListing) {
  enum class Case { kCropped, kDropped, kListedGoes, kPartGoes, kGivenUp };
  for (const Case which : {Case::kCropped, Case::kDropped, Case::kListedGoes, Case::kPartGoes, Case::kGivenUp}) {
    SCOPED_TRACE(static_cast<int>(which));
    std::vector<AttendEntry> entries = {{Full(text_), uint64_t{kBlocks} * kPage - 1, 1}};
    for (int i = 1; i < 3; ++i) {
      entries.push_back({*store().Fork(entries[0].sequence), entries[0].position, 1});
    }
    auto listing = *store().long_calls().BeginAttend(cache_, 0, entries);
    EXPECT_EQ(listing->DoPiece(), Next::kPiece);  // the first of them, and a part of the second
    const size_t changes = which == Case::kListedGoes ? 0 : which == Case::kPartGoes ? 1 : 2;
    if (which == Case::kCropped) {
      ASSERT_TRUE(store().Crop(entries[changes].sequence, kPage).ok());
    } else if (which != Case::kGivenUp) {
      store().Drop(entries[changes].sequence);
    }
    if (which != Case::kGivenUp) {
      Run(*listing);
      const auto lease = listing->Commit();
      // What was listed is pinned.
      EXPECT_EQ(lease.ok(), which == Case::kListedGoes) << lease.status();
    }
    listing.reset();
    store().report().CheckInvariants();
    for (const AttendEntry& entry : entries) Leave(entry.sequence);
    EXPECT_EQ(store().report().Use().lease_pages, 0u);
    EXPECT_EQ(used_bytes(), 0u);
  }
}

TEST_F(LongCallTest, WhatASequenceLeavesIsRoom) {
  SequenceId made = Full(text_);
  const uint64_t fits = test().pool->capacity_bytes() / used_bytes();
  for (uint64_t i = 0; i < 3 * fits; ++i) {
    store().Drop(made);  // nobody calls ReleaseSome
    made = Full(MakeText(kBlocks * kPage, uint32_t(i)));
  }
  EXPECT_EQ(store().Describe(made)->tokens, uint64_t{kBlocks} * kPage);
}

TEST_F(LongCallTest, APurgeGivesBackWhatWasLeft) {
  const SequenceId made = Full(text_);
  ASSERT_EQ(store().Publish(made, names_)->published, kBlocks);
  store().Drop(made);
  EXPECT_EQ(*store().caches().Purge(cache_), uint64_t{kBlocks});
  EXPECT_EQ(used_bytes(), 0u);
}

}  // namespace
}  // namespace kvmanager
