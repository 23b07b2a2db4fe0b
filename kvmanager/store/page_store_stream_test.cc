// Hand-offs of sequences that still grow, to a receiver that reads what has arrived.
#include <gtest/gtest.h>

#include <algorithm>

#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::Deliver;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::TestStore;
using testing::Text;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

class StreamTest : public PageStoreTest {
 protected:
  std::unique_ptr<AttendLease> AttendPeer(SequenceId sequence, int layer, uint64_t position, int tokens = 1) {
    const AttendEntry entry{sequence, position, tokens};
    auto lease = peer_.store->Attend(peer_.store->Describe(sequence)->cache, layer, {&entry, 1});
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  // A sequence whose raw pages are there and whose encoded ones, `waiting`, are still to come.
  void ShowAtPeer(const std::string& codec, int lag, int tokens) {
    cache_ = test().Open(MakeConfig(codec, lag));
    a_ = Filled(cache_, text_, tokens);
    out_ = *store().exports().Whole(a_);
    test().executor.FinishAll();
    auto in = peer_.store->imports().Import(out_->header());
    ASSERT_TRUE(in.ok()) << in.status();
    in_ = *std::move(in);
    waiting_ = out_->TakeReady();
    EXPECT_FALSE(in_->can_show());
    ASSERT_TRUE(in_->Extend(*out_->trailer()).ok());
    for (const ExportedPage& page : out_->trailer_pages()) {
      EXPECT_FALSE(in_->can_show());
      ASSERT_TRUE(Deliver(*in_, page).ok());
    }
    ASSERT_TRUE(in_->can_show());
    const auto shown = in_->Show();
    ASSERT_TRUE(shown.ok()) << shown.status();
    b_ = *shown;
    peer_.executor.FinishAll();
    peer_.store->report().CheckInvariants();
  }
  // The first two pages of a sequence of 5 pages and 3 tokens are raw, and have no encoded form.
  void ExpectSinks(TestStore& there, SequenceId received, const CacheConfig& config) {
    const AttendEntry entry{received, 5 * kPage + 2, 1};
    const auto lease = *there.store->Attend(there.store->Describe(received)->cache, 1, {&entry, 1});
    ASSERT_TRUE(lease->ready() && lease->status().ok());
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(lease->pages(0)[i].raw != nullptr && lease->pages(0)[i].encoded == nullptr) << i;
      EXPECT_TRUE(testing::RawPrefixEquals(config.layout, lease->pages(0)[i].raw,
                                           MakeRawPage(config.layout, text_, i, kPage, 1), kPage));
    }
  }
  void DeliverLayer(int layer) {
    for (const ExportedPage& page : waiting_) {
      if (out_->header().pages[page.page].layer == static_cast<uint32_t>(layer)) {
        ASSERT_TRUE(Deliver(*in_, page).ok());
      }
    }
  }

  TestStore peer_{16 << 20};
  const Text text_ = MakeText(10 * kPage);
  CacheId cache_ = 0;
  SequenceId a_ = 0, b_ = 0;
  std::unique_ptr<ExportLease> out_;
  std::unique_ptr<ImportLease> in_;
  std::vector<ExportedPage> waiting_;
};

TEST_F(StreamTest, PagesAreOfferedAsLayersAreAppendedAndEncoded) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const int tokens = 5 * kPage + 3;
  const SequenceId a = Create(cache);
  auto out = *store().exports().Growing(a, tokens);
  EXPECT_EQ(out->header().tokens, static_cast<uint64_t>(tokens));
  EXPECT_EQ(out->header().blocks.size(), 5u);
  EXPECT_EQ(out->header().aged, (std::vector<uint32_t>{4, 4}));
  ASSERT_EQ(out->header().pages.size(), 8u);
  int told = 0;
  out->OnReady([&told] { ++told; });
  EXPECT_EQ(told, 0);
  // The first layer in two chunks, before the second has anything.
  ASSERT_TRUE(test().Append(cache, a, text_, 0, 2 * kPage + 5, 0).ok());
  EXPECT_TRUE(out->TakeReady().empty());
  test().executor.FinishAll();
  EXPECT_EQ(told, 1);
  std::vector<ExportedPage> ready = out->TakeReady();
  ASSERT_EQ(ready.size(), 2u);
  const auto codec = store().caches().codec(cache);
  for (const ExportedPage& page : ready) {
    const HandOffPage& named = out->header().pages[page.page];
    EXPECT_EQ(named.layer, 0u);
    const auto raw = MakeRawPage(codec->layout(), text_, named.block, kPage, 0);
    const auto expected = MakeEncodedPage(*codec, raw, named.block, 0);
    ASSERT_EQ(page.bytes.size(), expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), page.bytes.begin()));
    EXPECT_EQ(page.checksum, testing::Checksum(expected));
  }
  const absl::Status early = out->Finish();
  EXPECT_EQ(early.code(), kPrecondition);
  EXPECT_NE(early.message().find("0 in layer 1"), absl::string_view::npos) << early;
  ASSERT_TRUE(test().Append(cache, a, text_, 2 * kPage + 5, 3 * kPage - 2, 0).ok());
  test().executor.FinishAll();
  EXPECT_EQ(out->TakeReady().size(), 2u);
  // Not beyond its end, and not back.
  EXPECT_EQ(test().Append(cache, a, text_, 0, tokens + 1, 1).code(), kPrecondition);
  ASSERT_TRUE(test().Append(cache, a, text_, 0, tokens, 1).ok());
  EXPECT_EQ(test().Append(cache, a, text_, tokens, 1, 0).code(), kPrecondition);
  EXPECT_EQ(store().Crop(a, tokens - 1).code(), kPrecondition);
  store().report().CheckInvariants();
  // Finish waits for what is still to be encoded.
  ASSERT_TRUE(out->Finish().ok());
  EXPECT_EQ(out->Finish().code(), kPrecondition);
  EXPECT_EQ(out->trailer(), nullptr);
  ASSERT_TRUE(test().AppendAll(cache, a, text_, tokens, 2 * kPage).ok());  // it goes on
  told = 0;
  test().executor.FinishAll();
  EXPECT_GE(told, 1);
  ASSERT_NE(out->trailer(), nullptr);
  EXPECT_EQ(out->TakeReady().size(), 4u);
  EXPECT_TRUE(out->trailer()->withdrawn.empty());
  ASSERT_EQ(out->trailer_pages().size(), 4u);  // of each layer the lag and the open page
  for (size_t i = 0; i < 4; ++i) {
    const HandOffPage& page = out->trailer()->pages[i];
    const auto raw = MakeRawPage(codec->layout(), text_, page.block, page.block == 5 ? 3 : kPage, page.layer);
    EXPECT_TRUE(std::equal(raw.begin(), raw.end(), out->trailer_pages()[i].bytes.begin()));
  }
  store().report().CheckInvariants();
}

// What the codec keeps raw whatever is in it is sent like an encoded page, not withdrawn and sent at the end.
TEST_F(StreamTest, SinksAreSentAsSoonAsTheyAreFull) {
  const CacheConfig config = MakeConfig("sinks", 1);
  const CacheId cache = test().Open(config);
  const int tokens = 5 * kPage + 3;
  const SequenceId a = Create(cache);
  auto out = *store().exports().Growing(a, tokens);
  ASSERT_EQ(out->header().pages.size(), 8u);
  for (const HandOffPage& page : out->header().pages) {
    EXPECT_EQ(page.bytes == config.layout.raw_bytes(), page.block < 2) << page.block;  // two pages of sinks
  }
  ASSERT_TRUE(test().AppendAll(cache, a, text_, 0, 3 * kPage).ok());
  test().executor.FinishAll();
  const std::vector<ExportedPage> early = out->TakeReady();
  ASSERT_EQ(early.size(), 6u);
  size_t raw = 0;
  for (const ExportedPage& page : early) {
    const HandOffPage& of = out->header().pages[page.page];
    if (of.block >= 2) continue;
    ++raw;
    const auto expected = MakeRawPage(config.layout, text_, of.block, kPage, static_cast<int>(of.layer));
    ASSERT_EQ(page.bytes.size(), expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), page.bytes.begin()));
    EXPECT_EQ(page.checksum, testing::Checksum(expected));
  }
  EXPECT_EQ(raw, 4u);

  // The receiver keeps raw slots for them and none for an encoding; a lie about their form is refused.
  TestStore there{16 << 20};
  for (const size_t page : {0, 2}) {  // a sink in no form that there is, an encoded page that claims to be raw
    HandOffHeader lies = out->header();
    lies.pages[page].bytes = config.layout.raw_bytes() - (page == 0 ? 1 : 0);
    EXPECT_EQ(there.store->imports().Import(lies).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(there.pool->used_bytes(), 0u);
  }
  auto in = *there.store->imports().Import(out->header());
  there.store->report().CheckInvariants();
  std::vector<uint8_t> infinite(early[0].bytes.begin(), early[0].bytes.end());
  infinite[0] = 0x00, infinite[1] = 0x7c;
  ASSERT_EQ(out->header().pages[early[0].page].block, 0u);
  std::copy(infinite.begin(), infinite.end(), in->target(early[0].page).begin());
  EXPECT_EQ(in->Validate(early[0].page).status().code(), absl::StatusCode::kInvalidArgument);
  for (const ExportedPage& page : early) ASSERT_TRUE(testing::Deliver(*in, page).ok());
  there.store->report().CheckInvariants();
  EXPECT_EQ(there.executor.jobs(), 0u);
  EXPECT_EQ(there.store_metrics.sink_pages.Value(), 4);

  ASSERT_TRUE(test().AppendAll(cache, a, text_, 3 * kPage, 2 * kPage + 3).ok());
  ASSERT_TRUE(out->Finish().ok());
  test().executor.FinishAll();
  ASSERT_NE(out->trailer(), nullptr);
  EXPECT_TRUE(out->trailer()->withdrawn.empty());
  HandOffTrailer lies = *out->trailer();
  lies.withdrawn = {0};
  EXPECT_EQ(in->Extend(lies).code(), absl::StatusCode::kInvalidArgument);
  std::vector<testing::SentPage> rest;
  for (const ExportedPage& page : out->TakeReady()) rest.push_back({out->header().pages[page.page], true, false, page});
  for (size_t i = 0; i < out->trailer()->pages.size(); ++i) {
    rest.push_back({out->trailer()->pages[i], false, false, out->trailer_pages()[i]});
  }
  const auto received = testing::Receive(*in, *out->trailer(), rest);
  ASSERT_TRUE(received.ok()) << received.status();
  there.executor.FinishAll();
  there.store->report().CheckInvariants();
  ExpectSinks(there, *received, config);
}

// What a daemon of an earlier build takes: nothing that stays raw is in the header.
TEST_F(StreamTest, SinksGoWithTheTrailerToAnEarlierBuild) {
  const CacheConfig config = MakeConfig("sinks", 1);
  const CacheId cache = test().Open(config);
  const int tokens = 5 * kPage + 3;
  const SequenceId a = Create(cache);
  auto out = *store().exports().Growing(a, tokens, {.kept_raw = KeptRaw::kWithTrailer});
  for (const HandOffPage& page : out->header().pages) EXPECT_GE(page.block, 2u);
  ASSERT_TRUE(test().AppendAll(cache, a, text_, 0, tokens).ok());
  test().executor.FinishAll();
  TestStore there{16 << 20};
  auto in = *there.store->imports().Import(out->header());
  ASSERT_TRUE(out->Finish().ok());
  test().executor.FinishAll();
  ASSERT_NE(out->trailer(), nullptr);
  const auto received = testing::Receive(*in, *out->trailer(), testing::TakeAll(*out));
  ASSERT_TRUE(received.ok()) << received.status();
  there.executor.FinishAll();
  there.store->report().CheckInvariants();
  store().report().CheckInvariants();
  ExpectSinks(there, *received, config);
}

// What a daemon of an earlier build sends: it names a sink as an encoded page, withdraws it, and sends it at the end.
TEST_F(StreamTest, SinksOfAnEarlierBuildComeWithTheTrailer) {
  const CacheConfig config = MakeConfig("sinks", 1);
  const CacheId cache = test().Open(config);
  const SequenceId a = Filled(cache, text_, 5 * kPage + 3);
  test().executor.FinishAll();
  auto out = *store().exports().Whole(a);
  HandOffHeader first = out->header();
  HandOffTrailer last = *out->trailer();
  std::vector<testing::SentPage> sent, at_end;
  for (const ExportedPage& page : out->TakeReady()) {
    HandOffPage& of = first.pages[page.page];
    (of.block < 2 ? at_end : sent).push_back({of, of.block >= 2, false, page});
    if (of.block >= 2) continue;
    of.bytes = store().caches().codec(cache)->info().encoded_bytes;
    last.withdrawn.push_back(page.page);
  }
  ASSERT_EQ(last.withdrawn.size(), 4u);
  for (size_t i = 0; i < last.pages.size(); ++i)
    at_end.push_back({last.pages[i], false, false, out->trailer_pages()[i]});
  const auto place = [](const testing::SentPage& page) { return std::pair(page.page.layer, page.page.block); };
  std::sort(at_end.begin(), at_end.end(), [&](const auto& x, const auto& y) { return place(x) < place(y); });
  std::sort(last.withdrawn.begin(), last.withdrawn.end());
  last.pages.clear();
  for (testing::SentPage& page : at_end) {
    page.bytes.page = static_cast<uint32_t>(first.size() + last.pages.size());
    last.pages.push_back(page.page);
    sent.push_back(page);
  }
  TestStore there{16 << 20};
  auto in = *there.store->imports().Import(first);
  there.store->report().CheckInvariants();
  for (const uint32_t page : last.withdrawn) EXPECT_TRUE(in->target(page).empty());  // nothing may come in this form
  HandOffTrailer without = last;
  without.pages.erase(without.pages.begin());
  EXPECT_EQ(in->Extend(without).code(), absl::StatusCode::kInvalidArgument);
  const auto received = testing::Receive(*in, last, sent);
  ASSERT_TRUE(received.ok()) << received.status();
  there.executor.FinishAll();
  there.store->report().CheckInvariants();
  ExpectSinks(there, *received, config);
}

TEST_F(StreamTest, BoundsOfTheTokensAreNamed) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const SequenceId a = Filled(cache, text_, 20);
  EXPECT_EQ(store().exports().Growing(a, 19).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store().exports().Growing(a, UINT64_MAX).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store().exports().Growing(99, 20).status().code(), absl::StatusCode::kNotFound);
  auto out = *store().exports().Growing(a, 21);
  store().Drop(a);
  EXPECT_EQ(out->Finish().code(), absl::StatusCode::kNotFound);
  store().report().CheckInvariants();
}

// A hand-off under way does not keep raw forms that nobody reads.
TEST_F(StreamTest, PinnedPagesGiveUpTheirRawForm) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const SequenceId a = Create(cache);
  auto out = *store().exports().Growing(a, 6 * kPage + 1);
  uint64_t used = 0;
  for (int page = 0; page < 6; ++page) {
    ASSERT_TRUE(test().AppendAll(cache, a, text_, page * kPage, kPage).ok());
    test().executor.FinishAll();
  }
  ASSERT_TRUE(test().AppendAll(cache, a, text_, 6 * kPage, 1).ok());
  store().report().CheckInvariants();
  used = test().pool->used_bytes();
  out = nullptr;
  EXPECT_EQ(test().pool->used_bytes(), used);
}

// Pages outlive their sequence, also those that are still to be encoded, and those whose block another replaced.
TEST_F(StreamTest, TheSequenceMayGoWhileItIsSent) {
  const CacheId cache = test().Open(MakeConfig("declining", 0));
  const SequenceId a = Filled(cache, text_, 4 * kPage + 1);
  test().executor.FinishAll();
  ASSERT_TRUE(store().Publish(a, Names(cache, text_, 4)).ok());
  const SequenceId b = Create(cache);
  auto out = *store().exports().Growing(b, 4 * kPage + 1);
  ASSERT_TRUE(test().AppendAll(cache, b, text_, 0, 4 * kPage).ok());
  ASSERT_TRUE(test().AppendAll(cache, b, text_, 4 * kPage, 1).ok());
  EXPECT_EQ(store().Publish(b, Names(cache, text_, 4))->shared, 4);
  ASSERT_TRUE(out->Finish().ok());
  store().Drop(b);
  EXPECT_EQ(out->trailer(), nullptr);
  test().executor.FinishAll();
  store().report().CheckInvariants();
  ASSERT_NE(out->trailer(), nullptr);
  for (const HandOffBlock& block : out->trailer()->blocks) EXPECT_TRUE(block.named);
  const auto codec = store().caches().codec(cache);
  for (const testing::SentPage& sent : testing::TakeAll(*out)) {
    const int tokens = sent.page.block == 4 ? 1 : kPage;
    auto expected = MakeRawPage(codec->layout(), text_, sent.page.block, tokens, sent.page.layer);
    if (sent.encoded) expected = MakeEncodedPage(*codec, expected, sent.page.block, sent.page.layer);
    ASSERT_EQ(sent.bytes.bytes.size(), expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), sent.bytes.bytes.begin()));
    EXPECT_EQ(sent.bytes.checksum, testing::Checksum(expected));
  }
  out = nullptr;
  store().report().CheckInvariants();
}

TEST_F(StreamTest, ALayerIsReadWhileTheNextArrives) {
  const int tokens = 5 * kPage + 3;
  ShowAtPeer("fake", 1, tokens);
  EXPECT_TRUE(peer_.store->Describe(b_)->arriving);
  const CacheId cache = peer_.store->Describe(b_)->cache;
  // It decodes: appends at once, attends when the layer is there.
  ASSERT_TRUE(peer_.AppendAll(cache, b_, text_, tokens, 1).ok());
  auto first = AttendPeer(b_, 0, tokens), second = AttendPeer(b_, 1, tokens);
  EXPECT_FALSE(first->ready());
  // Who reads pages back waits for the same ones.
  const AttendEntry whole{b_, 0, tokens}, newest{b_, 4 * kPage, kPage};
  auto read = *peer_.store->Load(cache, 0, {&whole, 1});
  EXPECT_FALSE(read->ready());
  EXPECT_TRUE((*peer_.store->Load(cache, 0, {&newest, 1}))->ready());
  bool called = false;
  first->OnReady([&called] { called = true; });
  DeliverLayer(0);
  EXPECT_TRUE(called && first->ready() && first->status().ok());
  EXPECT_FALSE(second->ready());
  ASSERT_TRUE(read->ready() && read->status().ok());
  EXPECT_EQ(read->pages(0)[1].encoded, first->pages(0)[1].encoded);
  read = nullptr;
  const auto codec = peer_.store->caches().codec(cache);
  for (uint32_t i = 0; i < 4; ++i) {
    const auto raw = MakeRawPage(codec->layout(), text_, i, kPage, 0);
    const auto encoded = MakeEncodedPage(*codec, raw, i, 0);
    EXPECT_TRUE(std::equal(encoded.begin(), encoded.end(), first->pages(0)[i].encoded));
  }
  const auto open = MakeRawPage(codec->layout(), text_, 5, 4, 0);
  EXPECT_TRUE(RawPrefixEquals(codec->layout(), first->pages(0)[5].raw, open, 4));
  // Until it is here as a whole nobody else may have it.
  EXPECT_EQ(peer_.store->Fork(b_).status().code(), kPrecondition);
  EXPECT_EQ(peer_.store->Crop(b_, tokens).code(), kPrecondition);
  EXPECT_EQ(peer_.store->Publish(b_, Names(cache_, text_, 1)).status().code(), kPrecondition);
  EXPECT_EQ(peer_.store->exports().Whole(b_).status().code(), kPrecondition);
  EXPECT_EQ(peer_.store->Copy(b_, 0).status().code(), kPrecondition);
  EXPECT_EQ(in_->Commit().code(), kPrecondition);
  DeliverLayer(1);
  EXPECT_TRUE(second->ready());
  ASSERT_TRUE(in_->complete());
  ASSERT_TRUE(in_->Commit().ok());
  EXPECT_FALSE(peer_.store->Describe(b_)->arriving);
  in_ = nullptr;
  peer_.store->report().CheckInvariants();
  EXPECT_TRUE(peer_.store->Fork(b_).ok());
  EXPECT_TRUE(peer_.store->Publish(b_, Names(cache_, text_, 5)).ok());
}

TEST_F(StreamTest, ABrokenSequenceSaysWhyAndLeavesNothing) {
  for (const bool says : {true, false}) {
    ShowAtPeer("fake", 1, 5 * kPage + 3);
    const CacheId cache = peer_.store->Describe(b_)->cache;
    DeliverLayer(0);
    auto whole = AttendPeer(b_, 0, 5 * kPage), waits = AttendPeer(b_, 1, 5 * kPage);
    ASSERT_TRUE(whole->ready() && !waits->ready());
    bool called = false;
    waits->OnReady([&called] { called = true; });
    if (says) in_->Break(absl::DeadlineExceededError("the peer was not heard"));
    EXPECT_EQ(called, says);
    in_ = nullptr;
    EXPECT_TRUE(called && waits->ready());
    EXPECT_EQ(waits->status().code(), absl::StatusCode::kUnavailable);
    const bool said = waits->status().message().find("the peer was not heard") != absl::string_view::npos;
    EXPECT_EQ(said, says);
    peer_.store->report().CheckInvariants();
    const auto broken = absl::StatusCode::kUnavailable;
    EXPECT_EQ(peer_.AppendAll(cache, b_, text_, 5 * kPage + 3, 1).code(), broken);
    const AttendEntry entry{b_, 0, 1};
    EXPECT_EQ(peer_.store->Attend(cache, 0, {&entry, 1}).status().code(), broken);
    EXPECT_EQ(peer_.store->Fork(b_).status().code(), broken);
    EXPECT_EQ(peer_.store->Crop(b_, 1).code(), broken);
    EXPECT_EQ(peer_.store->Publish(b_, {}).status().code(), broken);
    EXPECT_EQ(peer_.store->exports().Whole(b_).status().code(), broken);
    EXPECT_TRUE(peer_.store->Describe(b_).ok());
    peer_.store->Drop(b_);
    peer_.store->report().CheckInvariants();
    whole = nullptr;
    waits = nullptr;
    peer_.store->report().CheckInvariants();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    out_ = nullptr;
    store().Drop(a_);
  }
}

// Who waits in one batch for a page that will not come, and for one that is still to be encoded.
TEST_F(StreamTest, ABatchWaitsForItsOtherPages) {
  ShowAtPeer("fake", 0, 3 * kPage + 1);
  const CacheId cache = peer_.store->Describe(b_)->cache;
  const auto other = peer_.store->Create(cache, {});
  ASSERT_TRUE(peer_.AppendAll(cache, other->sequence, text_, 0, 2 * kPage).ok());
  const AttendEntry entries[] = {{b_, 3 * kPage, 1}, {other->sequence, 2 * kPage - 1, 1}};
  auto lease = *peer_.store->Attend(cache, 0, entries);
  in_ = nullptr;
  peer_.store->Drop(b_);
  peer_.store->report().CheckInvariants();
  EXPECT_FALSE(lease->ready());
  peer_.executor.FinishAll();
  ASSERT_TRUE(lease->ready());
  EXPECT_EQ(lease->status().code(), absl::StatusCode::kUnavailable);
  lease = nullptr;
  peer_.store->Drop(other->sequence);
  peer_.store->report().CheckInvariants();
  EXPECT_EQ(peer_.pool->used_bytes(), 0u);
}

TEST_F(StreamTest, ASequenceThatIsDroppedWhileItArrives) {
  ShowAtPeer("fake", 1, 5 * kPage + 3);
  auto waits = AttendPeer(b_, 1, 5 * kPage);
  peer_.store->Drop(b_);
  peer_.store->report().CheckInvariants();
  DeliverLayer(1);
  ASSERT_TRUE(waits->ready() && waits->status().ok());
  waits = nullptr;
  peer_.store->report().CheckInvariants();
  DeliverLayer(0);
  ASSERT_TRUE(in_->complete());
  EXPECT_TRUE(in_->Commit().ok());
  in_ = nullptr;
  peer_.store->report().CheckInvariants();
  EXPECT_EQ(peer_.pool->used_bytes(), 0u);
}

}  // namespace
}  // namespace kvmanager
