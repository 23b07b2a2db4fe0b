// The transport as its users see it: hand-offs that succeed, fail, stall and are cancelled. hostile_test.cc has the bad
// peers.
#include <numeric>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/types/optional.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

class TransportTest : public testing::Test {
 protected:
  void SetUp() override { receiver_side_ = Make(ReceiverOptions()); }

  TcpTransport::Options ReceiverOptions() {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &receiver_metrics_;
    return options;
  }
  TcpTransport::Options SenderOptions() {
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    return options;
  }
  std::unique_ptr<TcpTransport> Make(TcpTransport::Options options) {
    auto made = TcpTransport::Create(std::move(options));
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  using Result = absl::StatusOr<SendResult>;
  Outcome Send(const std::vector<Page>& pages, SendRequest request) {
    return SendAll(*sender_side_, std::move(request), PagesOf(pages));
  }
  Outcome Send(const std::vector<Page>& pages) { return Send(pages, RequestOf(pages, peer())); }
  Result SendAndWait(const std::vector<Page>& pages) { return Send(pages).done.get(); }
  std::string peer() const { return receiver_side_->listen_address(); }
  // What the sender is told of the receiver's own error: whose it is, and all of it.
  void ExpectAnswer(const absl::Status& got, const absl::Status& answered) {
    EXPECT_EQ(got.code(), answered.code());
    EXPECT_EQ(got.message(), absl::StrCat("peer ", peer(), " answered: ", answered.message()));
    EXPECT_EQ(DetailOf(got).field, DetailOf(answered).field);
    EXPECT_EQ(DetailOf(got).value, DetailOf(answered).value);
    EXPECT_EQ(DetailOf(got).bound, DetailOf(answered).bound);
  }

  Metrics sender_registry_, receiver_registry_;
  TransportMetrics sender_metrics_{&sender_registry_}, receiver_metrics_{&receiver_registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> receiver_side_;
  std::unique_ptr<TcpTransport> sender_side_ = Make(SenderOptions());
};

TEST_F(TransportTest, ManyPagesOfOddSizesSomeSkipped) {
  std::mt19937_64 random(7);
  std::vector<size_t> sizes(300);
  for (size_t& size : sizes) size = 1 + random() % (random() % 10 == 0 ? 70000 : 300);
  const std::vector<Page> pages = RandomPages(sizes, 8);
  size_t skipped_bytes = 0;
  for (size_t i = 0; i < pages.size(); i += 1 + random() % 5) {
    receiver_.skip.insert(i);
    skipped_bytes += sizes[i];
  }
  const size_t bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0}) - skipped_bytes;
  const Result result = SendAndWait(pages);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->bytes_sent, bytes);
  EXPECT_EQ(result->pages_skipped, receiver_.skip.size());
  EXPECT_EQ(result->pages_sent, pages.size() - receiver_.skip.size());
  EXPECT_GT(result->seconds, 0);
  std::vector<Page> expected = pages;
  for (const size_t i : receiver_.skip) expected[i].clear();
  ASSERT_EQ(receiver_.completed().size(), 1u);
  EXPECT_EQ(receiver_.completed()[0], expected);
  EXPECT_EQ(receiver_.aborts(), 0u);
  receiver_.WaitUntilNoneLives();

  EXPECT_EQ(sender_metrics_.sent.socket_bytes.Value(), bytes);
  EXPECT_EQ(receiver_metrics_.received.socket_bytes.Value(), bytes);
  EXPECT_EQ(receiver_metrics_.received.pages.Value(), result->pages_sent);
  EXPECT_EQ(sender_metrics_.sent.pages_skipped.Value(), result->pages_skipped);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kOk).Value(), 1);
  EXPECT_EQ(receiver_metrics_.received.transfers(TransferResult::kOk).Value(), 1);
  EXPECT_EQ(sender_metrics_.sent.active.Value(), 0);
  ASSERT_EQ(sender_side_->Peers().size(), 1u);
  EXPECT_EQ(sender_side_->Peers()[0].peer, peer());
  EXPECT_EQ(sender_side_->Peers()[0].bytes, bytes);
  ASSERT_EQ(receiver_side_->Peers().size(), 1u);
  EXPECT_EQ(receiver_side_->Peers()[0].peer, "127.0.0.1");
  EXPECT_TRUE(receiver_side_->Peers()[0].incoming);
}

TEST_F(TransportTest, NothingWantedOrNothingOffered) {
  EXPECT_TRUE(SendAndWait({}).ok());
  receiver_.skip = {0, 1};
  const Result result = SendAndWait(RandomPages({10, 20}, 1));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_skipped, 2u);
  EXPECT_EQ(result->bytes_sent, 0u);
}

TEST_F(TransportTest, SixtyFourMebibytes) {
  std::vector<size_t> sizes(250, 256 << 10);
  sizes.push_back((1 << 20) + 1);
  sizes.insert(sizes.end(), 64, 11 << 10);
  const std::vector<Page> pages = RandomPages(sizes, 9);
  const Result result = SendAndWait(pages);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.completed()[0] == pages);
}

TEST_F(TransportTest, EveryByteIsCounted) {
  // The receiver's last word may overtake that of the worker which wrote what it is about.
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(40, 16 << 10), 12);
  for (int round = 0; round < 400; ++round) {
    const Result result = SendAndWait(pages);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->bytes_sent, uint64_t{40} * (16 << 10));
    ASSERT_EQ(result->bytes_resent, 0u);
    ASSERT_EQ(result->resumes, 0u);
  }
}

TEST_F(TransportTest, LargestManifestArrives) {
  SendRequest request = RequestOf({}, peer());
  request.header.manifest.assign(HandOffPart::kManifestBytesMax, 'm');
  EXPECT_TRUE(Send({}, request).done.get().ok());
}

TEST_F(TransportTest, PagesGoWhileOthersAreStillMade) {
  const std::vector<Page> pages = RandomPages({1000, 2000, 300000, 4000, 5000, 6000}, 11);
  SendRequest request = RequestOf({pages[0], pages[1], pages[2], pages[3]}, peer());
  Outcome out = Begin(*sender_side_, request);
  EXPECT_EQ(out.ticket.get(), "ticket");  // before any page
  sender_side_->Post(out.id, {PageOf(pages, 2)});
  receiver_.WaitForArrivals(1);
  sender_side_->Post(out.id, {PageOf(pages, 0)});
  receiver_.WaitForArrivals(2);
  HandOffPart last = PartOf({pages[4], pages[5]});
  last.withdrawn = {3};
  sender_side_->Finish(out.id, last);
  sender_side_->Post(out.id, {PageOf(pages, 5), PageOf(pages, 4)});
  receiver_.WaitForArrivals(4);
  EXPECT_TRUE(receiver_.completed().empty());
  sender_side_->Post(out.id, {PageOf(pages, 1)});
  const Result result = out.done.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_sent, 5u);
  std::vector<Page> expected = pages;
  std::fill(expected[3].begin(), expected[3].end(), 0);
  EXPECT_TRUE(receiver_.completed()[0] == expected);
}

TEST_F(TransportTest, EverythingIsSaidBeforeTheReceiverIsReached) {
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(600, 1000), 15);
  Outcome out = Begin(*sender_side_, RequestOf({pages.begin(), pages.begin() + 500}, peer()));
  HandOffPart last = PartOf({pages.begin() + 500, pages.end()});
  last.withdrawn = {7};
  sender_side_->Finish(out.id, last);
  for (uint32_t i = 600; i-- > 0;) {
    if (i != 7) sender_side_->Post(out.id, {PageOf(pages, i)});
  }
  const Result result = out.done.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_sent, 599u);
  std::vector<Page> expected = pages;
  std::fill(expected[7].begin(), expected[7].end(), 0);
  EXPECT_TRUE(receiver_.completed()[0] == expected);
}

TEST_F(TransportTest, PagesOfTheTrailerGoAhead) {
  // A slow link: the header's pages cannot all have gone when the trailer comes.
  TcpTransport::Options options = SenderOptions();
  options.send_bytes_per_s = 8 << 20;
  sender_side_ = Make(options);
  std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 64 << 10), 12);
  pages.push_back(RandomPages({100}, 13)[0]);
  Outcome out = Begin(*sender_side_, RequestOf({pages.begin(), pages.begin() + 64}, peer()));
  std::vector<SendPage> posted = PagesOf(pages);
  const SendPage urgent = posted.back();
  posted.pop_back();
  sender_side_->Post(out.id, posted);
  sender_side_->Finish(out.id, PartOf({pages[64]}));
  sender_side_->Post(out.id, {urgent});
  const Result result = out.done.get();
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<uint32_t> order = receiver_.arrivals();
  const auto place = std::find(order.begin(), order.end(), 64u) - order.begin();
  EXPECT_LT(place, 60) << "of " << order.size();
}

TEST_F(TransportTest, TrailerThatIsWrongNamesTheField) {
  const std::vector<Page> pages = RandomPages({100, 200}, 1);
  const auto field_of = [&](absl::FunctionRef<void(uint64_t id)> wrong) {
    Outcome out = Begin(*sender_side_, RequestOf(pages, peer()));
    EXPECT_EQ(out.ticket.get(), "ticket");
    wrong(out.id);
    const Result result = out.done.get();
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    return DetailOf(result.status()).field;
  };
  EXPECT_EQ(field_of([&](uint64_t id) {
              HandOffPart last = NothingMore();
              last.withdrawn = {2};
              sender_side_->Finish(id, last);
            }),
            "withdrawn[0]");
  EXPECT_EQ(field_of([&](uint64_t id) {
              sender_side_->Post(id, {PageOf(pages, 1)});
              HandOffPart last = NothingMore();
              last.withdrawn = {1};
              sender_side_->Finish(id, last);
            }),
            "withdrawn[0]");
  EXPECT_EQ(field_of([&](uint64_t id) {
              sender_side_->Post(id, {PageOf(pages, 1), PageOf(pages, 1)});
            }),
            "posted page");
  EXPECT_EQ(field_of([&](uint64_t id) { sender_side_->Post(id, {{0, pages[1], 0}}); }), "page 0 bytes");
  EXPECT_EQ(field_of([&](uint64_t id) { sender_side_->Post(id, {{2, pages[1], 0}}); }), "posted page");
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
}

TEST_F(TransportTest, RefusedTrailerReachesTheSender) {
  receiver_.refuse_last = FieldError(absl::StatusCode::kResourceExhausted, "slots", "9", "at most 8");
  ExpectAnswer(SendAndWait(RandomPages({100}, 1)).status(), receiver_.refuse_last);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
  receiver_.WaitUntilNoneLives();
}

TEST_F(TransportTest, FullReceiverLetsItWait) {
  receiver_.hold_offers = true;
  const std::vector<Page> pages = RandomPages({100}, 1);
  Outcome out = Send(pages);
  receiver_.WaitForOffers(1);
  while (*out.waits == 0) std::this_thread::yield();
  receiver_.ReleaseOffers();
  EXPECT_EQ(out.done.get().status(), absl::OkStatus());
}

TEST_F(TransportTest, ProbeTellsTheLoad) {
  receiver_.hold_offers = true;
  const std::vector<Page> pages = RandomPages({100, 50}, 1);
  Outcome out = Send(pages);
  receiver_.WaitForOffers(1);
  std::promise<absl::StatusOr<ReceiverLoad>> promise;
  sender_side_->Probe(peer(), [&](absl::StatusOr<ReceiverLoad> load) { promise.set_value(std::move(load)); });
  const absl::StatusOr<ReceiverLoad> load = promise.get_future().get();
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->capacity_bytes, 1000u);
  EXPECT_EQ(load->free_bytes, 600u);
  EXPECT_EQ(load->waiting_offers, 3u);
  EXPECT_EQ(load->active_transfers, 1u);
  EXPECT_EQ(load->queued_bytes, 150u);
  receiver_.ReleaseOffers();
  EXPECT_TRUE(out.done.get().ok());
  std::promise<absl::StatusOr<ReceiverLoad>> nobody;
  sender_side_->Probe("127.0.0.1:1", [&](absl::StatusOr<ReceiverLoad> l) { nobody.set_value(std::move(l)); });
  EXPECT_EQ(nobody.get_future().get().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(TransportTest, RefusalReachesTheSenderWithItsDetail) {
  receiver_.refuse = FieldError(absl::StatusCode::kResourceExhausted, "slots", "9", "at most 8");
  const Result result = SendAndWait(RandomPages({100}, 1));
  ExpectAnswer(result.status(), receiver_.refuse);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kRefused).Value(), 1);
  EXPECT_EQ(receiver_metrics_.received.transfers(TransferResult::kRefused).Value(), 1);
  EXPECT_EQ(sender_side_->Peers()[0].failures, 1u);
}

TEST_F(TransportTest, FailedCompleteReachesTheSender) {
  receiver_.fail_complete = absl::AbortedError("drained meanwhile");
  ExpectAnswer(SendAndWait(RandomPages({100}, 1)).status(), receiver_.fail_complete);
  EXPECT_EQ(receiver_.aborts(), 0u);
  receiver_.WaitUntilNoneLives();
}

TEST_F(TransportTest, TargetsOfTheWrongSizeAreNeverWritten) {
  receiver_.target_size_error = -1;
  EXPECT_EQ(SendAndWait(RandomPages({100}, 1)).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
  receiver_.WaitUntilNoneLives();
}

TEST_F(TransportTest, WrongChecksumIsDataLossAndNothingCompletes) {
  // The sender's memory has changed since the checksum was made: sending it again does not help.
  const std::vector<Page> pages = RandomPages({1000, 300000, 1000}, 2);
  std::vector<SendPage> posted = PagesOf(pages);
  posted[1].checksum ^= 1;
  const Result result = SendAll(*sender_side_, RequestOf(pages, peer()), posted).done.get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_EQ(DetailOf(result.status()).field, "checksum of page 1");
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(receiver_.completed().empty());
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), 4);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kChecksum).Value(), 1);
  EXPECT_TRUE(SendAndWait(pages).ok());
}

TEST_F(TransportTest, WrongChecksumEarlyInALongTransferStillTellsWhy) {
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 256 << 10), 2);
  std::vector<SendPage> posted = PagesOf(pages);
  posted[0].checksum ^= 1;
  EXPECT_EQ(SendAll(*sender_side_, RequestOf(pages, peer()), posted).done.get().status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(TransportTest, NobodyListensThere) {
  std::string closed;
  {
    RawSocket listener = RawSocket::Listen();
    closed = listener.address();
  }
  const Result result = Send({}, RequestOf({}, closed)).done.get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(result.status().message().find(closed), absl::string_view::npos);
  EXPECT_EQ(sender_side_->Peers()[0].failures, 1u);
}

TEST_F(TransportTest, BadRequestsNameTheField) {
  const std::vector<Page> pages = RandomPages({4}, 1);
  const auto field_of = [&](SendRequest request) {
    const absl::Status status = Send({}, std::move(request)).done.get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return DetailOf(status).field;
  };
  EXPECT_EQ(field_of(RequestOf(pages, "nowhere")), "peer");
  EXPECT_EQ(field_of(RequestOf(pages, "127.0.0.1:0")), "peer");
  SendRequest request = RequestOf(pages, peer());
  request.header.manifest.clear();
  EXPECT_EQ(field_of(request), "manifest bytes");
  request.header.manifest.assign(HandOffPart::kManifestBytesMax + 1, 'm');
  EXPECT_EQ(field_of(request), "manifest bytes");
  request = RequestOf(pages, peer());
  request.header.page_bytes.push_back(0);
  EXPECT_EQ(field_of(request), "page 1 bytes");
  request = RequestOf(pages, peer());
  request.stall_ms = -1;
  EXPECT_EQ(field_of(request), "stall_ms");
  request = RequestOf(pages, peer());
  request.room_ms = -1;
  EXPECT_EQ(field_of(request), "room_ms");
  request = RequestOf(pages, peer());
  request.header.page_bytes.Append(HandOffPart::kPagesMax + 1, 1);
  EXPECT_EQ(field_of(request), "pages");
}

TEST_F(TransportTest, BadOptionsNameTheField) {
  const auto field_of = [](TcpTransport::Options options) {
    return DetailOf(TcpTransport::Create(std::move(options)).status()).field;
  };
  EXPECT_EQ(field_of({}), "metrics");
  TcpTransport::Options options = ReceiverOptions();
  options.receiver = nullptr;
  EXPECT_EQ(field_of(options), "receiver");
  options = ReceiverOptions();
  options.listen = "127.0.0.1";
  EXPECT_EQ(field_of(options), "peer-listen");
  options = SenderOptions();
  options.send_bytes_per_s = 1;
  EXPECT_EQ(field_of(options), "send_bytes_per_s");
  const uint8_t shared = 0;
  options.send_bytes_per_s = 1 << 20;
  options.memory = {{&shared, 1, 0}};
  EXPECT_EQ(field_of(options), "send_bytes_per_s");
  options = SenderOptions();
  options.stall_ms = 0;
  EXPECT_EQ(field_of(options), "stall_ms");
  options = SenderOptions();
  options.connections = 0;
  EXPECT_EQ(field_of(options), "connections");
  options.connections = 1;
  options.connections_max = kConnectionsMax + 1;
  EXPECT_EQ(field_of(options), "connections_max");
  options.connections_max = 1;
  options.window_bytes = 0;
  EXPECT_EQ(field_of(options), "window_bytes");
  options = ReceiverOptions();
  RawSocket listener = RawSocket::Listen();
  options.listen = listener.address();
  EXPECT_EQ(TcpTransport::Create(options).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sender_side_->listen_address(), "");
}

TEST_F(TransportTest, PeersByNameAndIPv6) {
  const std::vector<Page> pages = RandomPages({1000}, 1);
  const std::string port = peer().substr(peer().rfind(':'));
  EXPECT_TRUE(Send(pages, RequestOf(pages, "localhost" + port)).done.get().ok());
  TcpTransport::Options options = ReceiverOptions();
  options.listen = "[::1]:0";
  auto other = TcpTransport::Create(options);
  if (!other.ok()) GTEST_SKIP() << "no IPv6 loopback: " << other.status();
  EXPECT_TRUE(Send(pages, RequestOf(pages, (*other)->listen_address())).done.get().ok());
}

TEST_F(TransportTest, SilentReceiverIsADeadline) {
  RawSocket listener = RawSocket::Listen();  // never accepts
  SendRequest request = RequestOf({}, listener.address());
  request.stall_ms = 50;
  const Result result = Send({}, request).done.get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kTimeout).Value(), 1);
}

TEST_F(TransportTest, ReceiverThatStopsReadingIsADeadline) {
  TcpTransport::Options options = SenderOptions();
  options.connections = 1;
  sender_side_ = Make(options);
  RawSocket listener = RawSocket::Listen();
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 1 << 20), 1);
  SendRequest request = RequestOf(pages, listener.address());
  request.stall_ms = 200;
  Outcome out = Send(pages, request);
  PlayedReceiver receiver(64);
  receiver.Accept(listener);
  // It answers pings, and takes no page.
  std::atomic<bool> over{false};
  std::thread pings([&] {
    while (!over && receiver.control.Write(EncodeEmpty(FrameType::kPing))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  const absl::Status status = out.done.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("without a page taken"), absl::string_view::npos) << status;
  over = true;
  pings.join();
}

TEST_F(TransportTest, ReceiverThatFallsSilentIsADeadline) {
  TcpTransport::Options options = SenderOptions();
  options.connections = 1;
  sender_side_ = Make(options);
  RawSocket listener = RawSocket::Listen();
  const std::vector<Page> pages = RandomPages({100}, 1);
  SendRequest request = RequestOf(pages, listener.address());
  request.stall_ms = 100;
  Outcome out = Send(pages, request);
  PlayedReceiver receiver(1);
  receiver.Accept(listener);
  const absl::Status status = out.done.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("without a sign"), absl::string_view::npos) << status;
}

TEST_F(TransportTest, SlowAnswerIsNoStall) {
  receiver_.hold_offers = true;
  const std::vector<Page> pages = RandomPages({100}, 1);
  SendRequest request = RequestOf(pages, peer());
  request.stall_ms = 50;
  Outcome out = Send(pages, request);
  receiver_.WaitForOffers(1);
  EXPECT_EQ(out.done.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  receiver_.ReleaseOffers();
  EXPECT_EQ(out.done.get().status(), absl::OkStatus());
}

TEST_F(TransportTest, ReceiverThatDiesIsUnavailable) {
  for (const int stage : {0, 1, 2}) {
    absl::optional<RawSocket> listener(RawSocket::Listen());
    const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 1 << 20), 1);
    SendRequest request = RequestOf(pages, listener->address());
    request.stall_ms = 200;
    Outcome out = Send(pages, request);
    if (stage < 2) {
      RawSocket connection = listener->Accept();
      listener.reset();
      if (stage > 0) connection.Write(EncodeHello({}));
    } else {
      PlayedReceiver receiver(64);
      receiver.Accept(*listener);
      listener.reset();
      receiver.connection.Read(1000000);
    }
    EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kUnavailable) << stage;
  }
}

TEST_F(TransportTest, CancelBeforeTheAnswer) {
  receiver_.hold_offers = true;
  const std::vector<Page> pages = RandomPages({100}, 1);
  Outcome out = Send(pages);
  receiver_.WaitForOffers(1);
  sender_side_->Cancel(out.id + 1);  // unknown: ignored
  sender_side_->Cancel(out.id);
  EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  receiver_.ReleaseOffers();
  receiver_.WaitForAborts(1);
  receiver_.WaitUntilNoneLives();
  EXPECT_TRUE(receiver_.completed().empty());
  sender_side_->Cancel(out.id);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kCancelled).Value(), 1);
}

TEST_F(TransportTest, CancelAmongPages) {
  const std::vector<Page> pages = RandomPages({1000, 2000}, 1);
  Outcome out = Begin(*sender_side_, RequestOf(pages, peer()));
  sender_side_->Post(out.id, {PageOf(pages, 0)});
  receiver_.WaitForArrivals(1);
  sender_side_->Cancel(out.id);
  EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  receiver_.WaitUntilNoneLives();
}

TEST_F(TransportTest, DestructorFailsSendsAndAbortsReceipts) {
  const std::vector<Page> pages = RandomPages({100, 200}, 1);
  RawSocket listener = RawSocket::Listen();
  Outcome to_silence = Send({}, RequestOf({}, listener.address()));
  Outcome half = Begin(*sender_side_, RequestOf(pages, peer()));
  sender_side_->Post(half.id, {PageOf(pages, 0)});
  receiver_.WaitForArrivals(1);
  RawSocket pending = RawSocket::Connect(peer());
  pending.Write(EncodeHello({}));
  receiver_side_.reset();
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  receiver_.WaitUntilNoneLives();
  EXPECT_TRUE(receiver_.completed().empty());
  sender_side_.reset();
  EXPECT_EQ(to_silence.done.get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(half.done.get().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(TransportTest, HandOffOfferedAfterTheDestructorIsDestroyed) {
  receiver_.hold_offers = true;
  const std::vector<Page> pages = RandomPages({100}, 1);
  Outcome out = Send(pages);
  receiver_.WaitForOffers(1);
  receiver_side_.reset();
  EXPECT_FALSE(out.done.get().ok());
  receiver_.ReleaseOffers();
  receiver_.WaitUntilNoneLives();
  EXPECT_EQ(receiver_.aborts(), 0u);
}

TEST_F(TransportTest, HandOffsAtOnce) {
  std::vector<std::vector<Page>> sent;
  std::vector<Outcome> results;
  for (int i = 0; i < 8; ++i) sent.push_back(RandomPages(std::vector<size_t>(40, 30001 + i), i));
  for (const auto& pages : sent) results.push_back(Send(pages));
  for (auto& result : results) EXPECT_TRUE(result.done.get().ok());
  auto completed = receiver_.completed();
  ASSERT_EQ(completed.size(), sent.size());
  std::sort(completed.begin(), completed.end());
  std::sort(sent.begin(), sent.end());
  EXPECT_TRUE(completed == sent);
  EXPECT_EQ(sender_side_->Peers()[0].transfers, 8u);
}

TEST_F(TransportTest, MoreThanTheLimitsAreRefused) {
  receiver_.hold_offers = true;
  TcpTransport::Options options = ReceiverOptions();
  options.incoming_max = 1;
  receiver_side_ = Make(options);
  const std::vector<Page> pages = RandomPages({100}, 1);
  Outcome first = Send(pages);
  receiver_.WaitForOffers(1);
  EXPECT_EQ(SendAndWait(pages).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(receiver_metrics_.connections_refused.Value(), 1);
  receiver_.ReleaseOffers();
  EXPECT_TRUE(first.done.get().ok());

  TcpTransport::Options few = SenderOptions();
  few.outgoing_max = 1;
  sender_side_ = Make(few);
  RawSocket listener = RawSocket::Listen();
  Outcome stuck = Send({}, RequestOf({}, listener.address()));
  EXPECT_EQ(SendAndWait(pages).status().code(), absl::StatusCode::kResourceExhausted);
  sender_side_.reset();
  EXPECT_EQ(stuck.done.get().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(TransportTest, TooManyBytesAreRefused) {
  TcpTransport::Options options = ReceiverOptions();
  options.transfer_bytes_max = 99;
  receiver_side_ = Make(options);
  EXPECT_EQ(SendAndWait(RandomPages({100}, 1)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(SendAndWait(RandomPages({99}, 1)).ok());
  options.offer_buffer_bytes_max = 1 << 20;
  receiver_side_ = Make(options);
  SendRequest request = RequestOf({}, peer());
  request.header.manifest.assign(4 << 20, 'm');
  EXPECT_EQ(Send({}, request).done.get().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(SendAndWait(RandomPages({99}, 1)).ok());
}

TEST_F(TransportTest, RateLimitedTransferIsTheSame) {
  TcpTransport::Options options = SenderOptions();
  options.send_bytes_per_s = 4 << 20;
  sender_side_ = Make(options);
  const std::vector<Page> pages = RandomPages({1, 100000, 15, 16, 17, 200000, 3}, 3);
  EXPECT_TRUE(SendAndWait(pages).ok());
  EXPECT_TRUE(receiver_.completed()[0] == pages);
}

}  // namespace
}  // namespace kvmanager::tcp
