// Hand-offs that go out, over a transport that does what a test says. Pages are a store's own.
#include "kvmanager/handoff/outgoing_hand_offs.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"
#include "kvmanager/store/store_fixture.h"
#include "monitoring/metrics.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;

absl::Status Full() { return absl::ResourceExhaustedError("pool_bytes is used up"); }

class FakeTransport final : public Transport {
 public:
  struct Transfer {
    SendRequest request;
    SendEvents events;
    std::vector<uint32_t> posted;
    size_t most_at_once = 0;
    std::optional<HandOffPart> last;
    bool cancelled = false;
  };

  uint64_t Begin(SendRequest request, SendEvents events) override {
    transfers.push_back({std::move(request), std::move(events), {}, 0, std::nullopt});
    return transfers.size() - 1;
  }
  void Post(uint64_t transfer, std::vector<SendPage> pages) override {
    transfers[transfer].most_at_once = std::max(transfers[transfer].most_at_once, pages.size());
    for (const SendPage& page : pages) transfers[transfer].posted.push_back(page.page);
  }
  void Finish(uint64_t transfer, HandOffPart last) override { transfers[transfer].last = std::move(last); }
  void Cancel(uint64_t transfer) override {
    transfers[transfer].cancelled = true;
    End(transfer, absl::CancelledError("cancelled"));
  }
  void Probe(std::string peer, absl::AnyInvocable<void(absl::StatusOr<ReceiverLoad>)> done) override {
    const auto found = loads.find(peer);
    done(found == loads.end() ? absl::StatusOr<ReceiverLoad>(absl::UnavailableError("nobody there")) : found->second);
  }
  std::vector<PeerInfo> Peers() const override { return {}; }
  std::string listen_address() const override { return ""; }

  void End(uint64_t transfer, absl::StatusOr<SendResult> result) {
    auto done = std::move(transfers[transfer].events.done);
    transfers[transfer].events.done = nullptr;
    if (done) done(std::move(result));
  }

  std::deque<Transfer> transfers;
  std::map<std::string, ReceiverLoad> loads;
};

class OutgoingHandOffsTest : public testing::PageStoreTest {
 public:
  ~OutgoingHandOffsTest() noexcept override {}

 protected:
  // 5 pages and 3 tokens of 2 layers.
  SequenceId Make(const std::string& codec) {
    const SequenceId sequence = Filled(test().Open(MakeConfig(codec, 1)), MakeText(5 * kPage + 3), 5 * kPage + 3);
    test().executor.FinishAll();
    return sequence;
  }
  BeginExport Lists(SequenceId sequence) {
    return [this, sequence](KeptRaw kept_raw) {
      ++listed_;
      return store().exports().BeginWhole(sequence, {.kept_raw = kept_raw});
    };
  }
  static HandOffTargets To(std::vector<std::string> peers, int64_t timeout_ms = 10000, int64_t room_ms = 0) {
    return {std::move(peers), room_ms, timeout_ms, false, ""};
  }
  kj::Promise<void> Send(SequenceId sequence, HandOffTargets targets) {
    auto sending = outgoing()
                       .Send(Lists(sequence), std::move(targets), std::make_shared<const std::string>("blob"))
                       .then([this](absl::StatusOr<SentHandOff> sent) { sent_.emplace(std::move(sent)); })
                       .eagerlyEvaluate(nullptr);
    loop_.RunReady();
    return sending;
  }
  void Accept(uint64_t transfer) {
    transport_.transfers[transfer].events.accepted("ticket");
    loop_.RunReady();
  }
  void End(uint64_t transfer, absl::StatusOr<SendResult> result) {
    transport_.End(transfer, std::move(result));
    loop_.RunReady();
  }
  const OutgoingHandOffs& outgoing() {
    if (!outgoing_.has_value()) {
      outgoing_.emplace(OutgoingHandOff::Parts{
          .transport = &transport_, .loop = &loop_, .metrics = &hand_off_metrics_, .turns = &turns_});
    }
    return *outgoing_;
  }

  Metrics metrics_;
  HandOffMetrics hand_off_metrics_{&metrics_};
  FakeTransport transport_;
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  HandOffTurns turns_{&queue_};
  std::optional<OutgoingHandOffs> outgoing_;
  int listed_ = 0;
  std::optional<absl::StatusOr<SentHandOff>> sent_;
};

TEST_F(OutgoingHandOffsTest, OnePayerLeavesOthersRoom) {
  const SequenceId sequence = Make("fake");
  const auto send = [&](const char* payer) {
    HandOffTargets targets = To({absl::StrCat("peer:", 1 + transport_.transfers.size() / limits::kTenantToPeerMax)});
    targets.payer = payer;
    sent_.reset();
    return Send(sequence, std::move(targets));
  };
  std::vector<kj::Promise<void>> sending;
  for (size_t i = 0; i < limits::kTenantOutgoingMax; ++i) sending.push_back(send("a"));
  EXPECT_FALSE(sent_.has_value());
  sending.push_back(send("a"));
  ASSERT_TRUE(sent_.has_value());
  EXPECT_TRUE(absl::IsResourceExhausted(sent_->status())) << sent_->status();
  EXPECT_EQ(DetailOf(sent_->status()).field, "hand-offs being sent of this tenant");
  EXPECT_EQ(listed_, static_cast<int>(limits::kTenantOutgoingMax)) << "nothing was listed for it";
  sending.push_back(send("b"));
  EXPECT_FALSE(sent_.has_value());
  EXPECT_EQ(outgoing().active().all(), limits::kTenantOutgoingMax + 1);
  EXPECT_EQ(outgoing().active().most(), limits::kTenantOutgoingMax);
  End(0, absl::UnavailableError("cut off"));
  sending.push_back(send("a"));
  EXPECT_FALSE(sent_.has_value());
  for (size_t i = 1; i < transport_.transfers.size(); ++i) End(i, absl::UnavailableError("cut off"));
  EXPECT_EQ(outgoing().active().all(), 0u);
}

TEST_F(OutgoingHandOffsTest, OnePayerLeavesOthersRoomAtAPeer) {
  const SequenceId sequence = Make("fake");
  const auto send = [&](const char* payer, const char* peer) {
    HandOffTargets targets = To({peer});
    targets.payer = payer;
    sent_.reset();
    return Send(sequence, std::move(targets));
  };
  std::vector<kj::Promise<void>> sending;
  for (size_t i = 0; i < limits::kTenantToPeerMax; ++i) sending.push_back(send("a", "a:1"));
  EXPECT_FALSE(sent_.has_value());
  sending.push_back(send("a", "a:1"));
  ASSERT_TRUE(sent_.has_value());
  EXPECT_EQ(DetailOf(sent_->status()).field, "hand-offs being sent to a:1 of this tenant");
  for (const auto& [payer, peer] : {std::pair("a", "b:2"), {"b", "a:1"}}) {
    sending.push_back(send(payer, peer));
    EXPECT_FALSE(sent_.has_value()) << payer << " " << peer;
  }
  EXPECT_EQ(outgoing().most_to_peer(), limits::kTenantToPeerMax);
  for (size_t i = 0; i < transport_.transfers.size(); ++i) End(i, absl::UnavailableError("cut off"));
  EXPECT_EQ(outgoing().most_to_peer(), 0u);
}

TEST_F(OutgoingHandOffsTest, SendsEveryPageOnceAndTheTrailer) {
  const SequenceId sequence = Make("fake");
  auto sending = Send(sequence, To({"a:1"}));
  ASSERT_EQ(transport_.transfers.size(), 1u);
  FakeTransport::Transfer& transfer = transport_.transfers[0];
  EXPECT_EQ(transfer.request.peer, "a:1");
  EXPECT_EQ(outgoing().active().all(), 1u);
  Accept(0);
  ASSERT_TRUE(transfer.last.has_value());
  std::vector<uint32_t> posted = transfer.posted;
  std::sort(posted.begin(), posted.end());
  ASSERT_EQ(posted.size(), 2u * 6);  // the open page included
  for (uint32_t i = 0; i < posted.size(); ++i) EXPECT_EQ(posted[i], i);
  EXPECT_FALSE(sent_.has_value());
  SendResult result;
  result.pages_sent = posted.size();
  End(0, result);
  ASSERT_TRUE(sent_.has_value() && sent_->ok()) << sent_->status();
  EXPECT_EQ((*sent_)->ticket, "ticket");
  EXPECT_EQ((*sent_)->peer, "a:1");
  EXPECT_EQ((*sent_)->result.pages_sent, 12u);
  EXPECT_EQ(outgoing().active().all(), 0u);
  EXPECT_EQ(hand_off_metrics_.send_failed.Value(), 0);
}

TEST_F(OutgoingHandOffsTest, OffersSinksInTheTrailerToAPeerThatRefusesThemInTheHeader) {
  const SequenceId sequence = Make("sinks");
  auto sending = Send(sequence, To({"a:1"}));
  ASSERT_EQ(transport_.transfers.size(), 1u);
  const size_t with_sinks = transport_.transfers[0].request.header.page_bytes.size();
  const absl::Status refused = InvalidField("pages[0].bytes", 16384, "7936");
  ASSERT_TRUE(WantsKeptRawInTrailer(refused));
  End(0, refused);
  ASSERT_EQ(transport_.transfers.size(), 2u);
  EXPECT_EQ(transport_.transfers[1].request.header.page_bytes.size(), with_sinks - 2 * 2);  // two sinks a layer
  EXPECT_EQ(hand_off_metrics_.send_failed.Value(), 0);
  Accept(1);
  End(1, SendResult());
  ASSERT_TRUE(sent_.has_value() && sent_->ok()) << sent_->status();
}

TEST_F(OutgoingHandOffsTest, OffersThemTwiceAtMost) {
  const SequenceId sequence = Make("sinks");
  auto sending = Send(sequence, To({"a:1"}));
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(transport_.transfers.size(), i + 1);
    End(i, InvalidField("pages[2].bytes", 7936, "7937"));
  }
  EXPECT_EQ(transport_.transfers.size(), 2u);
  ASSERT_TRUE(sent_.has_value());
  EXPECT_EQ(DetailOf(sent_->status()).field, "pages[2].bytes");
}

TEST_F(OutgoingHandOffsTest, AnotherRefusalIsTheSendersAnswer) {
  for (const absl::Status& refused :
       {Full(), InvalidField("pages[0].layer", 9, "0..1"), absl::DataLossError("a page")}) {
    EXPECT_FALSE(WantsKeptRawInTrailer(refused));
    const size_t before = transport_.transfers.size();
    auto sending = Send(Make("sinks"), To({"a:1"}));
    End(before, refused);
    EXPECT_EQ(transport_.transfers.size(), before + 1);
    ASSERT_TRUE(sent_.has_value());
    EXPECT_EQ(sent_->status().code(), refused.code());
    sent_.reset();
  }
  EXPECT_EQ(hand_off_metrics_.send_failed.Value(), 3);
}

TEST_F(OutgoingHandOffsTest, TriesPeersWithRoomFirstAndThenTheNext) {
  const SequenceId sequence = Make("fake");
  transport_.loads["full:1"] = {.capacity_bytes = 1 << 30, .free_bytes = 0};
  transport_.loads["free:1"] = {.capacity_bytes = 1 << 30, .free_bytes = 1 << 30};
  auto sending = Send(sequence, To({"full:1", "gone:1", "free:1"}));
  ASSERT_EQ(transport_.transfers.size(), 1u);
  EXPECT_EQ(transport_.transfers[0].request.peer, "free:1");
  End(0, Full());  // others were faster
  ASSERT_EQ(transport_.transfers.size(), 2u);
  EXPECT_EQ(transport_.transfers[1].request.peer, "full:1");
  End(1, Full());
  ASSERT_TRUE(sent_.has_value());
  EXPECT_EQ(sent_->status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* const peer : {"full:1", "gone:1", "free:1"}) {
    EXPECT_NE(sent_->status().message().find(peer), std::string::npos) << sent_->status();
  }
}

TEST_F(OutgoingHandOffsTest, WaitsForRoomAtTheBestOnceAllAreFull) {
  const SequenceId sequence = Make("fake");
  transport_.loads["a:1"] = transport_.loads["b:1"] = {.capacity_bytes = 1 << 30, .free_bytes = 1 << 30};
  auto sending = Send(sequence, To({"a:1", "b:1"}, 10000, 500));
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(transport_.transfers.size(), i + 1);
    EXPECT_EQ(transport_.transfers[i].request.room_ms, 0);
    End(i, Full());
  }
  ASSERT_EQ(transport_.transfers.size(), 3u);
  EXPECT_EQ(transport_.transfers[2].request.peer, "a:1");
  EXPECT_EQ(transport_.transfers[2].request.room_ms, 500);
  Accept(2);
  End(2, SendResult());
  ASSERT_TRUE(sent_.has_value() && sent_->ok()) << sent_->status();
}

TEST_F(OutgoingHandOffsTest, CancelsWhatNobodyWaitsForAndLetsGoOfItsPages) {
  const SequenceId sequence = Make("fake");
  {
    auto sending = Send(sequence, To({"a:1"}));
    Accept(0);
    EXPECT_FALSE(transport_.transfers[0].cancelled);
  }
  loop_.RunReady();
  EXPECT_TRUE(transport_.transfers[0].cancelled);
  EXPECT_FALSE(sent_.has_value());
  EXPECT_EQ(outgoing().active().all(), 0u);
  store().Drop(sequence);
  EXPECT_EQ(store().report().SequenceIds().size(), 0u);
}

// Of very many pages: listed and given to the transport piece by piece, and counted from the first on.
TEST_F(OutgoingHandOffsTest, SendsVeryManyPagesInPieces) {
  pool_bytes_ = 128 << 20;
  constexpr int kBlocks = 12000;
  CacheConfig config = MakeConfig("fake", 1);
  config.layout.kv_heads = 1;
  config.layout.head_dim = 32;
  const SequenceId sequence = Filled(test().Open(config), MakeText(kBlocks * kPage + 3), kBlocks * kPage + 3);
  test().executor.FinishAll();
  const auto send = [&] {
    return outgoing().Send(Lists(sequence), To({"a:1"}), std::make_shared<const std::string>("blob"));
  };
  {
    const auto sending = send();
    EXPECT_EQ(listed_, 1);
    EXPECT_EQ(outgoing().active().all(), 1u);
    EXPECT_EQ(outgoing().most_to_peer(), 1u);
    EXPECT_EQ(store().Crop(sequence, kPage).code(), absl::StatusCode::kFailedPrecondition);
  }
  // Nobody wants it any more.
  EXPECT_EQ(outgoing().active().all(), 0u);
  loop_.RunReady();
  EXPECT_TRUE(transport_.transfers.empty());
  while (store().long_calls().ReleaseSome()) {
  }
  store().report().CheckInvariants();

  auto sending = send()
                     .then([this](absl::StatusOr<SentHandOff> sent) { sent_.emplace(std::move(sent)); })
                     .eagerlyEvaluate(nullptr);
  loop_.RunReady();
  ASSERT_EQ(transport_.transfers.size(), 1u);
  FakeTransport::Transfer& transfer = transport_.transfers[0];
  EXPECT_LE(transfer.most_at_once, OutgoingHandOff::kPagesAtOnce);
  ASSERT_TRUE(transfer.last.has_value());
  EXPECT_EQ(transfer.request.header.page_bytes.size() + transfer.last->page_bytes.size(), 2u * (kBlocks + 1));
  std::vector<uint32_t> posted = transfer.posted;
  std::sort(posted.begin(), posted.end());
  ASSERT_EQ(posted.size(), 2u * (kBlocks + 1));
  for (uint32_t i = 0; i < posted.size(); ++i) EXPECT_EQ(posted[i], i);
  End(0, SendResult());
  ASSERT_TRUE(sent_.has_value() && sent_->ok()) << sent_->status();
  EXPECT_EQ(outgoing().active().all(), 0u);
  EXPECT_TRUE(store().Crop(sequence, kPage).ok());
}

TEST_F(OutgoingHandOffsTest, ASequenceThatIsGoneIsOfferedToNobody) {
  const SequenceId sequence = Make("fake");
  store().Drop(sequence);
  auto sending = Send(sequence, To({"a:1"}));
  EXPECT_TRUE(transport_.transfers.empty());
  ASSERT_TRUE(sent_.has_value());
  EXPECT_EQ(sent_->status().code(), absl::StatusCode::kNotFound);
}

TEST_F(OutgoingHandOffsTest, BeginsWithATicketAndFinishesLater) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const SequenceId sequence = Create(cache);
  BeginExport list = [this, sequence](KeptRaw kept_raw) {
    return store().exports().BeginGrowing(sequence, 2 * kPage, {.kept_raw = kept_raw});
  };
  std::optional<absl::StatusOr<kj::Own<CancelOnDrop>>> begun;
  auto beginning = outgoing()
                       .Begin(std::move(list), To({"a:1"}))
                       .then([&](absl::StatusOr<kj::Own<CancelOnDrop>> made) { begun.emplace(std::move(made)); })
                       .eagerlyEvaluate(nullptr);
  loop_.RunReady();
  EXPECT_FALSE(begun.has_value());
  Accept(0);
  ASSERT_TRUE(begun.has_value() && begun->ok()) << begun->status();
  EXPECT_EQ((***begun)->ticket(), "ticket");
  // Nothing is there yet, so it is refused and goes on.
  std::optional<absl::StatusOr<SentHandOff>> finished;
  const auto finish = [&] {
    return (***begun)
        ->Finish(std::make_shared<const std::string>("blob"))
        .then([&](absl::StatusOr<SentHandOff> sent) { finished.emplace(std::move(sent)); })
        .eagerlyEvaluate(nullptr);
  };
  auto early = finish();
  loop_.RunReady();
  ASSERT_TRUE(finished.has_value());
  EXPECT_EQ(finished->status().code(), absl::StatusCode::kFailedPrecondition);
  finished.reset();
  ASSERT_TRUE(test().AppendAll(cache, sequence, MakeText(2 * kPage), 0, 2 * kPage).ok());
  test().executor.FinishAll();
  auto late = finish();
  loop_.RunReady();
  ASSERT_TRUE(transport_.transfers[0].last.has_value());
  EXPECT_EQ(transport_.transfers[0].posted.size(), 2u * 2);
  End(0, SendResult());
  ASSERT_TRUE(finished.has_value() && finished->ok()) << finished->status();
}

}  // namespace
}  // namespace kvmanager
