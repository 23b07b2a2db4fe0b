// Sequences that are received in pieces: the same as at once, with the books right between two pieces.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::Deliver;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::PageStoreTest;
using testing::SentPage;
using testing::TakeAll;
using testing::TestStore;
using testing::Text;
using Next = LongCall::Next;

constexpr int kBlocks = 300, kTokens = kBlocks * kPage + 5;

// store() sends, peer_ receives.
class ImportPiecesTest : public PageStoreTest {
 protected:
  ImportPiecesTest() { pool_bytes_ = 64 << 20; }
  // encodes_late: what the codec declines is not known to the header.
  void Offer(const std::string& codec, bool encodes_late = false) {
    config_ = MakeConfig(codec, 1);
    const CacheId cache = test().Open(config_);
    const SequenceId sent = Filled(cache, text_, kTokens);
    names_ = Names(cache, text_, kBlocks);
    ASSERT_EQ(store().Publish(sent, names_)->published, kBlocks);
    if (!encodes_late) test().executor.FinishAll();
    lease_ = *store().exports().Whole(sent);
    test().executor.FinishAll();
    while (store().long_calls().ReleaseSome()) {
    }
    ASSERT_NE(lease_->trailer(), nullptr);
    pages_ = TakeAll(*lease_);
  }
  // The receiver has the first `blocks` of them.
  void PeerHas(int blocks) {
    peer_cache_ = peer_.Open(config_);
    const SequenceId made = peer_.store->Create(peer_cache_, {})->sequence;
    ASSERT_TRUE(peer_.AppendAll(peer_cache_, made, text_, 0, (blocks + 1) * kPage).ok());
    peer_.executor.FinishAll();
    ASSERT_EQ(peer_.store->Publish(made, absl::MakeConstSpan(names_).first(blocks))->published, blocks);
    Leave(made);
    peer_.clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2);
  }
  void Leave(SequenceId sequence) {
    peer_.store->Drop(sequence);
    LeaveRest();
  }
  void LeaveRest() {
    while (peer_.store->long_calls().ReleaseSome()) {
    }
  }
  // Changes a byte of layer 1 of the receiver's block.
  void Flip(int block) {
    const auto sequence = peer_.store->Create(peer_cache_, absl::MakeConstSpan(names_).first(block + 1));
    ASSERT_EQ(sequence->match.hit_blocks, block + 1);
    const AttendEntry entry{sequence->sequence, uint64_t(block + 1) * kPage - 1, 1};
    const auto view = *peer_.store->Attend(peer_cache_, 1, {&entry, 1});
    const AttentionPage& page = view->pages(0)[block];
    const_cast<uint8_t*>(page.encoded != nullptr ? page.encoded : page.raw)[99] ^= 4;
    Leave(sequence->sequence);
  }
  std::unique_ptr<Importing> Begin() {
    auto begun = peer_.store->imports().Begin(std::make_shared<const HandOffHeader>(lease_->header()), nullptr,
                                              [](uint32_t, uint32_t, uint32_t) { return 0u; });
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *std::move(begun);
  }
  struct Pieces {
    int pieces = 0, comparisons = 0;
  };
  Pieces Run(LongCall& call, int pieces_max = INT32_MAX) {
    Pieces done;
    for (Next next; done.pieces < pieces_max && (next = call.DoPiece()) != Next::kDone; ++done.pieces) {
      peer_.store->report().CheckInvariants();
      if (next != Next::kCompare) continue;
      ++done.comparisons;
      while (call.CompareOne()) {
      }
    }
    peer_.store->report().CheckInvariants();
    return done;
  }
  // Bytes of pages_[from, to) come.
  void Arrive(ImportLease& import, size_t from, size_t to) {
    for (size_t i = from; i < std::min(to, pages_.size()); ++i) {
      ASSERT_TRUE(Deliver(import, pages_[i].bytes).ok());
    }
  }
  std::vector<bool> Unwanted(const ImportLease& import, size_t pages) {
    std::vector<bool> unwanted(pages, false);
    for (const uint32_t page : import.unwanted()) unwanted.at(page) = true;
    for (size_t i = 0; i < pages; ++i) EXPECT_EQ(import.target(i).empty(), unwanted[i]) << i;
    return unwanted;
  }
  uint64_t used_bytes() { return peer_.pool->used_bytes(); }

  const Text text_ = MakeText(kTokens);
  CacheConfig config_;
  std::vector<BlockName> names_;
  std::unique_ptr<ExportLease> lease_;
  std::vector<SentPage> pages_;
  TestStore peer_{16 << 20};
  CacheId peer_cache_ = 0;
};

TEST_F(ImportPiecesTest, AreTheSameAsAtOnce) {
  for (const std::string codec : {"raw", "fake", "declining"}) {
    SCOPED_TRACE(codec);
    Offer(codec, /*encodes_late=*/codec == "declining");
    EXPECT_EQ(lease_->trailer()->withdrawn.empty(), codec != "declining");
    const size_t in_first = lease_->header().size();
    auto importing = Begin();
    EXPECT_GT(Run(*importing).pieces, 5);
    ASSERT_TRUE(importing->status().ok()) << importing->status();
    auto import = importing->Commit();
    importing.reset();
    Unwanted(*import, in_first);
    // The trailer, while pages of the header come.
    import->BeginExtend(*lease_->trailer());
    size_t pieces = 0, came = 0;
    for (; import->ExtendNext(); ++pieces) {
      peer_.store->report().CheckInvariants();
      EXPECT_FALSE(import->can_show());
      for (int i = 0; i < 20 && came < pages_.size() && pages_[came].bytes.page < in_first; ++i, ++came) {
        Arrive(*import, came, came + 1);
      }
    }
    EXPECT_GT(pieces, 4u);
    ASSERT_TRUE(import->extended().ok()) << import->extended();
    Arrive(*import, came, pages_.size());
    ASSERT_TRUE(import->can_show());
    const auto shown = import->Show();
    ASSERT_TRUE(shown.ok()) << shown.status();
    int commits = 0;
    for (; import->CommitNext(); ++commits) {
      peer_.store->report().CheckInvariants();
      EXPECT_FALSE(peer_.store->Fork(*shown).ok());  // it still arrives
    }
    EXPECT_GT(commits, 1);
    EXPECT_TRUE(import->committed().ok());
    EXPECT_FALSE(import->CommitNext());
    EXPECT_TRUE(absl::IsFailedPrecondition(import->committed()));
    import.reset();
    peer_.executor.FinishAll();
    const CacheId cache = peer_.store->Describe(*shown)->cache;
    EXPECT_EQ(peer_.store->Describe(*shown)->tokens, uint64_t{kTokens});
    EXPECT_EQ(peer_.store->caches().Match(cache, names_)->hit_blocks, kBlocks);
    // What is there is wanted no more.
    auto again = peer_.store->imports().Import(lease_->header());
    ASSERT_TRUE(again.ok()) << again.status();
    const std::vector<bool> unwanted = Unwanted(**again, in_first);
    EXPECT_EQ(std::count(unwanted.begin(), unwanted.end(), true), static_cast<std::ptrdiff_t>(in_first));
    again->reset();
    Leave(*shown);
    ASSERT_TRUE(peer_.store->caches().Purge(cache).ok());
    LeaveRest();
    EXPECT_EQ(used_bytes(), 0u);
    peer_.store->report().CheckInvariants();
  }
}

// Also behind one that is missing, and behind one that has changed.
TEST_F(ImportPiecesTest, WhatIsHereIsComparedAway) {
  Offer("raw");
  PeerHas(kBlocks - 1);
  Flip(100);
  Flip(101);
  Flip(kBlocks - 2);
  peer_.clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2);
  auto importing = Begin();
  EXPECT_GE(Run(*importing).comparisons, 5);
  ASSERT_TRUE(importing->status().ok()) << importing->status();
  auto import = importing->Commit();
  EXPECT_EQ(peer_.store_metrics.checksum_failures.Value(), 3);
  for (size_t i = 0; i < lease_->header().size(); ++i) {
    const uint32_t block = lease_->header().page(i).block;
    const bool here = block < kBlocks - 1 && block != 100 && block != 101 && block != kBlocks - 2;
    EXPECT_EQ(import->target(i).empty(), here) << block;
  }
  import.reset();
  LeaveRest();
  // Nothing is compared again for a while.
  importing = Begin();
  EXPECT_EQ(Run(*importing).comparisons, 0);
  importing.reset();
  LeaveRest();
  peer_.store->report().CheckInvariants();
  EXPECT_EQ(peer_.store->caches().Match(peer_cache_, names_)->hit_blocks, 100);
}

TEST_F(ImportPiecesTest, OneThatIsGivenUpLeavesNothing) {
  Offer("fake");
  PeerHas(kBlocks / 3);
  const uint64_t before = used_bytes();
  int all = 0;
  for (int pieces = 0; pieces <= all; ++pieces) {
    auto importing = Begin();
    Run(*importing, pieces == 0 ? INT32_MAX : pieces);
    if (pieces == 0) {
      auto import = importing->Commit();
      Arrive(*import, 0, lease_->header().size() / 2);
      import.reset();
      peer_.executor.FinishAll();
      LeaveRest();
      auto counted = Begin();
      all = Run(*counted).pieces;
      EXPECT_GT(all, 10);
    }
    importing.reset();
    peer_.store->report().CheckInvariants();
    LeaveRest();
    EXPECT_EQ(used_bytes(), before) << pieces;
    EXPECT_TRUE(peer_.store->report().SequenceIds().empty());
  }
  EXPECT_EQ(peer_.store_metrics.import_leases.Value(), 0);
}

TEST_F(ImportPiecesTest, WhereThereIsNoRoomNothingIsTaken) {
  Offer("raw");
  const CacheId other = peer_.Open(MakeConfig("raw", 1));
  std::vector<SequenceId> fillers;
  const Text text = MakeText(100 * kPage, 77);
  do fillers.push_back(peer_.store->Create(other, {})->sequence);
  while (peer_.AppendAll(other, fillers.back(), text, 0, 100 * kPage).ok());
  const uint64_t before = used_bytes();
  auto importing = Begin();
  Run(*importing);
  EXPECT_TRUE(absl::IsResourceExhausted(importing->status())) << importing->status();
  importing.reset();
  LeaveRest();
  EXPECT_EQ(used_bytes(), before);
  // Room that goes while it is being made: what it has taken goes back.
  for (int i = 0; i < 5; ++i) {
    Leave(fillers.back());
    fillers.pop_back();
  }
  importing = Begin();
  const uint64_t begun = used_bytes();
  while (used_bytes() == begun) Run(*importing, 1);
  const SequenceId more = peer_.store->Create(other, {})->sequence;
  for (int at = 0; peer_.AppendAll(other, more, MakeText(2000 * kPage, 5), at, kPage).ok(); at += kPage) {
  }
  Run(*importing);
  EXPECT_TRUE(absl::IsResourceExhausted(importing->status())) << importing->status();
  importing.reset();
  Leave(more);
  for (const SequenceId filler : fillers) Leave(filler);
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(ImportPiecesTest, OneThatIsDroppedWhileItIsCommittedEnds) {
  Offer("fake");
  auto import = *peer_.store->imports().Import(lease_->header());
  ASSERT_TRUE(import->Extend(*lease_->trailer()).ok());
  Arrive(*import, 0, pages_.size());
  const auto shown = import->Show();
  ASSERT_TRUE(shown.ok());
  ASSERT_TRUE(import->CommitNext());
  Leave(*shown);
  peer_.store->report().CheckInvariants();
  EXPECT_FALSE(import->CommitNext());
  EXPECT_TRUE(import->committed().ok());
  import.reset();
  peer_.executor.FinishAll();
  peer_.store->report().CheckInvariants();
  EXPECT_TRUE(peer_.store->report().SequenceIds().empty());
}

TEST_F(ImportPiecesTest, AWithdrawnPageThatComesMeanwhileIsALie) {
  Offer("declining", /*encodes_late=*/true);
  ASSERT_FALSE(lease_->trailer()->withdrawn.empty());
  auto import = *peer_.store->imports().Import(lease_->header());
  const uint32_t last = lease_->trailer()->withdrawn.back();
  import->BeginExtend(*lease_->trailer());
  bool lied = false;
  while (import->ExtendNext()) {
    if (std::exchange(lied, true)) continue;
    const ArrivedPage arrived{last, 0};
    ASSERT_TRUE(import->Arrived({&arrived, 1}).ok());
  }
  EXPECT_TRUE(absl::IsInvalidArgument(import->extended())) << import->extended();
  EXPECT_EQ(DetailOf(import->extended()).bound, "one that never came");
  import.reset();
  peer_.executor.FinishAll();
  LeaveRest();
  EXPECT_EQ(used_bytes(), 0u);
}

}  // namespace
}  // namespace kvmanager
