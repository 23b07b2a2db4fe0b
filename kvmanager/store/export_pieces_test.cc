// Hand-offs of very many pages, listed and finished in pieces: the same as at once, with the books right between two
// pieces, whatever becomes of the sequence meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/simulated_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeText;
using testing::SimulatedStore;
using testing::TestStore;
using testing::Text;
using Next = LongCall::Next;

constexpr int kBlocks = 1500;  // of two layers: six pieces
constexpr int kTokens = kBlocks * kPage + 3;

CacheConfig Config(const std::string& codec) {
  CacheConfig config = testing::MakeConfig(codec, 1);
  config.layout.kv_heads = 1;
  config.layout.head_dim = 32;
  return config;
}

// What is sent of each page, in the order of the hand-off.
struct Sent {
  using Page = std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>;  // layer, block, bytes, checksum
  std::vector<uint32_t> aged;
  std::vector<Page> encoded, raw;
  size_t named = 0, named_later = 0, withdrawn = 0;
};

class ExportPiecesTest : public testing::PageStoreTest {
 protected:
  ExportPiecesTest() { pool_bytes_ = 64 << 20; }
  void ReleaseAll() {
    for (; store().long_calls().ReleaseSome(); ++releases_) store().report().CheckInvariants();
  }
  // All that a finished lease sends.
  Sent Take(ExportLease& lease) {
    test().executor.FinishAll();
    ReleaseAll();
    EXPECT_NE(lease.trailer(), nullptr);
    Sent sent;
    sent.aged = lease.header().aged;
    std::vector<bool> seen(lease.header().size());
    for (std::vector<ExportedPage> pages; !(pages = lease.TakeReady(100)).empty();) {
      EXPECT_LE(pages.size(), 100u);
      for (const ExportedPage& page : pages) {
        EXPECT_FALSE(seen[page.page]);
        seen[page.page] = true;
        sent.encoded.push_back(PageOf(lease.header().page(page.page), page));
      }
    }
    for (const uint32_t page : lease.trailer()->withdrawn) {
      EXPECT_FALSE(seen[page]);
      seen[page] = true;
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), false), 0);
    for (size_t i = 0; i < lease.trailer()->pages.size(); ++i) {
      EXPECT_EQ(lease.trailer_pages()[i].page, lease.header().size() + i);
      sent.raw.push_back(PageOf(lease.trailer()->pages[i], lease.trailer_pages()[i]));
    }
    EXPECT_TRUE(std::is_sorted(sent.raw.begin(), sent.raw.end()));
    EXPECT_TRUE(std::is_sorted(lease.trailer()->withdrawn.begin(), lease.trailer()->withdrawn.end()));
    std::sort(sent.encoded.begin(), sent.encoded.end());
    for (const HandOffBlock& block : lease.header().blocks) sent.named += block.named;
    for (const HandOffBlock& block : lease.trailer()->blocks) sent.named_later += block.named;
    sent.withdrawn = lease.trailer()->withdrawn.size();
    return sent;
  }
  static Sent::Page PageOf(const HandOffPage& page, const ExportedPage& sent) {
    EXPECT_EQ(sent.bytes.size(), page.bytes);
    const uint64_t checksum = testing::Checksum({sent.bytes.begin(), sent.bytes.end()});
    EXPECT_EQ(sent.checksum, checksum);
    return {page.layer, page.block, page.bytes, checksum};
  }
  // What a store sends of kTokens tokens that nobody touches.
  Sent Expected(const std::string& codec) {
    TestStore other(64 << 20);
    const CacheId cache = other.Open(Config(codec));
    const SequenceId sequence = other.store->Create(cache, {})->sequence;
    KV_CHECK(other.AppendAll(cache, sequence, text_, 0, kTokens).ok());
    other.executor.FinishAll();
    return Take(**other.store->exports().Whole(sequence));
  }
  static void ExpectEqual(const Sent& sent, const Sent& expected) {
    EXPECT_EQ(sent.aged, expected.aged);
    EXPECT_TRUE(sent.raw == expected.raw);
    EXPECT_TRUE(sent.encoded == expected.encoded);
  }
  std::unique_ptr<ExportBeginning> BeginWhole(SequenceId sequence) {
    auto begun = store().exports().BeginWhole(sequence, {});
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *std::move(begun);
  }
  // Calls `between` behind each piece but the last.
  absl::StatusOr<std::unique_ptr<ExportLease>> Run(
      ExportBeginning& beginning, const std::function<void(int piece)>& between = [](int) {}) {
    int pieces = 0;
    for (Next next; (next = beginning.DoPiece()) != Next::kDone; ++pieces) {
      EXPECT_EQ(next, Next::kPiece);
      store().report().CheckInvariants();
      between(pieces);
      store().report().CheckInvariants();
    }
    EXPECT_GE(pieces, 5);
    return beginning.Commit();
  }

  const Text text_ = MakeText(kTokens + 200 * kPage);
  int releases_ = 0;
};

TEST_F(ExportPiecesTest, AreWhatIsListedAtOnce) {
  for (const char* codec : {"raw", "fake", "declining", "uneven", "sinks"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(Config(codec));
    const SequenceId sequence = Filled(cache, text_, kTokens);
    const auto beginning = BeginWhole(sequence);
    auto lease = Run(*beginning);
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_TRUE((*lease)->finished());
    const Sent sent = Take(**lease);
    EXPECT_EQ(sent.withdrawn > 0, std::string(codec) == "declining");  // it was encoded after it was listed
    Sent expected = Expected(codec);
    EXPECT_EQ(expected.withdrawn, 0u);
    ExpectEqual(sent, expected);
    EXPECT_TRUE(store().Crop(sequence, kPage).ok());
    store().Drop(sequence);
    lease->reset();
    releases_ = 0;
    ReleaseAll();
    EXPECT_GE(releases_, 4);
    EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  }
}

TEST_F(ExportPiecesTest, ASequenceMayGrowAndBePublishedMeanwhile) {
  for (const char* codec : {"raw", "fake", "declining", "sinks"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(Config(codec));
    const SequenceId sequence = Filled(cache, text_, kTokens);
    const auto beginning = BeginWhole(sequence);
    int tokens = kTokens;
    auto lease = Run(*beginning, [&](int piece) {
      // What was open is filled; pages age that it reads raw as it is sent.
      ASSERT_TRUE(test().AppendAll(cache, sequence, text_, tokens, 3 * kPage).ok());
      tokens += 3 * kPage;
      if (piece % 2 == 0) test().executor.FinishAll();
      if (piece == 1) {
        ASSERT_TRUE(store().Publish(sequence, Names(cache, text_, 1000)).ok());
      }
      if (piece < 5) {
        EXPECT_EQ(store().Crop(sequence, kPage).code(), absl::StatusCode::kFailedPrecondition);
      }
    });
    ASSERT_TRUE(lease.ok()) << lease.status();
    const Sent sent = Take(**lease);
    ExpectEqual(sent, Expected(codec));
    EXPECT_EQ(sent.named + sent.named_later, 1000u);
    store().Drop(sequence);
  }
}

// The block that others found first takes the place of one that was listed in part.
TEST_F(ExportPiecesTest, EqualBlocksMayTakeThePlaceOfItsOwn) {
  const CacheId cache = test().Open(Config("fake"));
  const SequenceId first = Filled(cache, text_, kTokens);
  const SequenceId sequence = Filled(cache, text_, kTokens - 1);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text_, kTokens - 1, 1).ok());  // by which its pages age
  test().executor.FinishAll();
  ASSERT_TRUE(store().Publish(first, Names(cache, text_, 1400)).ok());
  const auto beginning = BeginWhole(sequence);
  auto lease = Run(*beginning, [&](int piece) {
    if (piece != 3) return;
    EXPECT_EQ(store().Publish(sequence, Names(cache, text_, 1400))->shared, 1400);
    store().Drop(first);
  });
  ASSERT_TRUE(lease.ok()) << lease.status();
  const Sent sent = Take(**lease);
  ExpectEqual(sent, Expected("fake"));
  EXPECT_EQ(sent.named + sent.named_later, 1400u);
}

TEST_F(ExportPiecesTest, ASequenceThatGoesMeanwhileIsNotSent) {
  for (const int last : {0, 3, 5}) {
    const CacheId cache = test().Open(Config("fake"));
    const SequenceId sequence = Filled(cache, text_, kTokens);
    test().executor.FinishAll();
    auto beginning = BeginWhole(sequence);
    for (int i = 0; i <= last; ++i) ASSERT_EQ(beginning->DoPiece(), Next::kPiece);
    store().Drop(sequence);
    store().report().CheckInvariants();
    while (beginning->DoPiece() != Next::kDone) store().report().CheckInvariants();
    const auto lease = beginning->Commit();
    EXPECT_EQ(lease.status(), absl::NotFoundError(absl::StrCat("sequence ", sequence, " does not exist")));
    beginning = nullptr;
    ReleaseAll();
    EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  }
}

TEST_F(ExportPiecesTest, ABeginningThatGoesLeavesTheSequence) {
  const CacheId cache = test().Open(Config("fake"));
  const SequenceId sequence = Filled(cache, text_, kTokens);
  auto beginning = BeginWhole(sequence);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(beginning->DoPiece(), Next::kPiece);
  beginning = nullptr;
  EXPECT_TRUE(store().Crop(sequence, kPage).ok());
  ReleaseAll();
  EXPECT_GE(releases_, 1);
  test().executor.FinishAll();
  EXPECT_TRUE(test().AppendAll(cache, sequence, text_, kPage, 2 * kPage).ok());
}

TEST_F(ExportPiecesTest, OneThatGrowsIsListedWhileItDoes) {
  for (const char* codec : {"raw", "fake", "declining", "sinks"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(Config(codec));
    const SequenceId sequence = Create(cache);
    // The first layer is ahead of the second, and what is listed first goes on beside what is listed later.
    ASSERT_TRUE(test().Append(cache, sequence, text_, 0, 700 * kPage + 5, 0).ok());
    ASSERT_TRUE(test().Append(cache, sequence, text_, 0, 20 * kPage, 1).ok());
    auto begun = store().exports().BeginGrowing(sequence, kTokens, {});
    ASSERT_TRUE(begun.ok()) << begun.status();
    int tokens[2] = {700 * kPage + 5, 20 * kPage};
    auto lease = Run(**begun, [&](int piece) {
      for (int layer = 0; layer < 2; ++layer) {
        ASSERT_TRUE(test().Append(cache, sequence, text_, tokens[layer], 50 * kPage, layer).ok());
        tokens[layer] += 50 * kPage;
      }
      if (piece % 2 == 1) test().executor.FinishAll();
      EXPECT_EQ(test().Append(cache, sequence, text_, tokens[0], kTokens + 1 - tokens[0], 0).code(),
                absl::StatusCode::kFailedPrecondition);
    });
    ASSERT_TRUE(lease.ok()) << lease.status();
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(test().Append(cache, sequence, text_, tokens[layer], kTokens - tokens[layer], layer).ok());
    }
    ASSERT_TRUE((*lease)->Finish().ok());
    EXPECT_EQ((*lease)->Finish().code(), absl::StatusCode::kFailedPrecondition);
    // It goes on at once, and is cropped once its names are read.
    ASSERT_TRUE(test().AppendAll(cache, sequence, text_, kTokens, 100 * kPage).ok());
    EXPECT_EQ(store().Crop(sequence, kPage).code(), absl::StatusCode::kFailedPrecondition);
    ReleaseAll();
    ASSERT_TRUE(store().Crop(sequence, kPage).ok());
    store().Drop(sequence);
    ExpectEqual(Take(**lease), Expected(codec));
  }
}

// Its names are then not told; nothing else is missing.
TEST_F(ExportPiecesTest, OneThatGoesAfterItIsCompleteIsSent) {
  const CacheId cache = test().Open(Config("declining"));
  const SequenceId sequence = Create(cache);
  auto lease = *store().exports().Growing(sequence, kTokens);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text_, 0, kTokens).ok());
  ASSERT_TRUE(store().Publish(sequence, Names(cache, text_, kBlocks)).ok());
  ASSERT_TRUE(lease->Finish().ok());
  store().Drop(sequence);
  store().report().CheckInvariants();
  const Sent sent = Take(*lease);
  ExpectEqual(sent, Expected("declining"));
  EXPECT_LT(sent.named_later, static_cast<size_t>(kBlocks));
}

// Each that is encoded costs what it is, not what is awaited.
TEST_F(ExportPiecesTest, PagesAreOfferedOneByOneAsTheyAreEncoded) {
  pool_bytes_ = 256 << 20;
  const CacheId cache = test().Open(Config("fake"));
  const SequenceId sequence = Create(cache);
  constexpr int kMany = 20000;
  const Text text = MakeText(kMany * kPage);
  auto lease = *store().exports().Growing(sequence, kMany * kPage);
  for (int layer = 0; layer < 2; ++layer) {
    for (int i = 0; i < kMany; ++i) {
      ASSERT_TRUE(test().Append(cache, sequence, text, uint64_t(i) * kPage, kPage, layer).ok());
    }
  }
  const size_t pages = lease->header().pages.size();
  EXPECT_GE(pages, 2u * (kMany - 2));
  EXPECT_TRUE(lease->TakeReady().empty());
  size_t taken = 0;
  while (test().executor.jobs() > 0) {
    test().executor.FinishOne(test().executor.jobs() - 1);
    const size_t ready = lease->TakeReady().size();
    ASSERT_LE(ready, 1u);
    taken += ready;
  }
  EXPECT_EQ(taken, pages);
}

// Beginning and ending them is faster than giving back what they list.
TEST_F(ExportPiecesTest, OfOnePayerAreBoundedUntilWhatTheyHeldIsGivenBack) {
  const SequenceId empty = Create(test().Open(Config("raw")));
  const uint64_t tokens = uint64_t{65536} * kPage;  // of two layers 131,072 pages
  const auto begin = [&] { return store().exports().BeginGrowing(empty, tokens, {}); };
  std::vector<std::unique_ptr<ExportBeginning>> begun;
  for (uint64_t pages = 0; pages < kTenantSentPagesMax; pages += 131072) {
    auto made = begin();
    ASSERT_TRUE(made.ok()) << made.status();
    begun.push_back(*std::move(made));
    EXPECT_EQ(store().report().Use().tenant_sent_pages, pages + 131072);
  }
  const absl::Status refused = begin().status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(DetailOf(refused).field, "pages of hand-offs being sent of this tenant");
  EXPECT_EQ(DetailOf(refused).bound, "at most 8388608");
  // One that lists all of them, and goes.
  begun.back()->DoAll();
  begun.pop_back();
  store().report().CheckInvariants();
  EXPECT_TRUE(absl::IsResourceExhausted(begin().status()));
  ReleaseAll();
  EXPECT_GT(releases_, 1u);
  EXPECT_TRUE(begin().ok());
  begun.clear();
  ReleaseAll();
  EXPECT_EQ(store().report().Use().sent_pages, 0u);
}

// By way of the host; and directly, where what is written is told at once of very many pages.
TEST_F(ExportPiecesTest, GoOutOfAGpu) {
  for (const ExportWay way : {ExportWay::kByHost, ExportWay::kDirect}) {
    for (const char* codec : {"raw", "declining"}) {
      SCOPED_TRACE(codec);
      constexpr int kFew = 700;
      SimulatedStore gpu(16 << 20, /*moves=*/true);
      const CacheId cache = gpu.Open(Config(codec));
      const SequenceId sequence = gpu.Create(cache);
      gpu.hold_writes = gpu.hold_encodes = true;
      ASSERT_TRUE(gpu.Extend(cache, sequence, text_, 0, kFew * kPage + 3).ok());
      auto begun = gpu.store().exports().BeginGrowing(sequence, kFew * kPage + 3, {.way = way});
      ASSERT_TRUE(begun.ok()) << begun.status();
      while ((*begun)->DoPiece() != Next::kDone) gpu.store().report().CheckInvariants();
      auto lease = (*begun)->Commit();
      ASSERT_TRUE(lease.ok()) << lease.status();
      EXPECT_TRUE((*lease)->TakeReady().empty());
      ASSERT_TRUE((*lease)->Finish().ok());
      gpu.RunWrites();
      gpu.store().exports().Written(sequence, 0, std::vector<uint64_t>(2, kFew * kPage + 3));
      gpu.test().device.executor.FinishAll();
      size_t taken = 0;
      for (bool more = true; more;) {
        more = gpu.store().long_calls().ReleaseSome();
        gpu.test().device.mover.FinishAll();
        gpu.test().executor.FinishAll();  // looks at what has come
        gpu.store().report().CheckInvariants();
        const size_t ready = (*lease)->TakeReady(50).size();
        EXPECT_LE(ready, 50u);
        taken += ready;
        more |= ready > 0;
      }
      ASSERT_TRUE((*lease)->status().ok()) << (*lease)->status();
      ASSERT_NE((*lease)->trailer(), nullptr);
      EXPECT_EQ(taken + (*lease)->trailer()->withdrawn.size(), (*lease)->header().size());
      EXPECT_EQ((*lease)->trailer_pages().size(), (*lease)->trailer()->pages.size());
      for (const ExportedPage& page : (*lease)->trailer_pages()) EXPECT_FALSE(page.bytes.empty());
      lease->reset();
      gpu.store().Drop(sequence);
      while (gpu.store().long_calls().ReleaseSome()) gpu.store().report().CheckInvariants();
      EXPECT_EQ(gpu.used_bytes(), 0u);
      EXPECT_EQ(gpu.test().pool->slot_bytes_used(), 0u);
    }
  }
}

}  // namespace
}  // namespace kvmanager
