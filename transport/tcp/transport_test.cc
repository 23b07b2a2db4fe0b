// The transport as its users see it: hand-offs that succeed, fail, stall and are cancelled. hostile_test.cc has the bad
// peers.
#include <numeric>

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
  std::future<Result> Send(SendRequest request, uint64_t* id = nullptr) {
    auto promise = std::make_shared<std::promise<Result>>();
    std::future<Result> future = promise->get_future();
    const uint64_t transfer =
        sender_side_->Send(std::move(request), [promise](Result result) { promise->set_value(std::move(result)); });
    if (id != nullptr) *id = transfer;
    return future;
  }
  Result SendAndWait(const std::vector<Page>& pages) { return Send(RequestOf(pages, peer())).get(); }
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
  EXPECT_EQ(result->ticket, "ticket");
  EXPECT_EQ(result->bytes_sent, bytes);
  EXPECT_EQ(result->pages_skipped, receiver_.skip.size());
  EXPECT_EQ(result->pages_sent, pages.size() - receiver_.skip.size());
  EXPECT_GT(result->seconds, 0);
  std::vector<Page> expected = pages;
  for (const size_t i : receiver_.skip) expected[i].clear();
  ASSERT_EQ(receiver_.completed().size(), 1u);
  EXPECT_EQ(receiver_.completed()[0], expected);
  EXPECT_EQ(receiver_.aborts(), 0u);
  EXPECT_EQ(receiver_.live, 0);

  EXPECT_EQ(sender_metrics_.sent.bytes.Value(), bytes);
  EXPECT_EQ(receiver_metrics_.received.bytes.Value(), bytes);
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

TEST_F(TransportTest, LargestManifestArrives) {
  SendRequest request = RequestOf({}, peer());
  request.manifest.assign(SendRequest::kManifestBytesMax, 'm');
  EXPECT_TRUE(Send(request).get().ok());
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
  EXPECT_EQ(receiver_.live, 0);
}

TEST_F(TransportTest, TargetsOfTheWrongSizeAreNeverWritten) {
  receiver_.target_size_error = -1;
  EXPECT_EQ(SendAndWait(RandomPages({100}, 1)).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
  EXPECT_EQ(receiver_.live, 0);
}

TEST_F(TransportTest, WrongChecksumIsDataLossAndNothingCompletes) {
  const std::vector<Page> pages = RandomPages({1000, 300000, 1000}, 2);
  SendRequest request = RequestOf(pages, peer());
  request.pages[1].checksum ^= 1;
  const Result result = Send(request).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_EQ(DetailOf(result.status()).field, "checksum of page 1");
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(receiver_.completed().empty());
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), 1);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kChecksum).Value(), 1);
  EXPECT_TRUE(SendAndWait(pages).ok());
}

TEST_F(TransportTest, WrongChecksumEarlyInALongTransferStillTellsWhy) {
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 256 << 10), 2);
  SendRequest request = RequestOf(pages, peer());
  request.pages[0].checksum ^= 1;
  EXPECT_EQ(Send(request).get().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(TransportTest, NobodyListensThere) {
  std::string closed;
  {
    RawSocket listener = RawSocket::Listen();
    closed = listener.address();
  }
  const Result result = Send(RequestOf(RandomPages({1}, 1), closed)).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(result.status().message().find(closed), absl::string_view::npos);
  EXPECT_EQ(sender_side_->Peers()[0].failures, 1u);
}

TEST_F(TransportTest, BadRequestsNameTheField) {
  const std::vector<Page> pages = RandomPages({4}, 1);
  const auto field_of = [&](SendRequest request) {
    const absl::Status status = Send(std::move(request)).get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return DetailOf(status).field;
  };
  EXPECT_EQ(field_of(RequestOf(pages, "nowhere")), "peer");
  EXPECT_EQ(field_of(RequestOf(pages, "127.0.0.1:0")), "peer");
  SendRequest request = RequestOf(pages, peer());
  request.manifest.clear();
  EXPECT_EQ(field_of(request), "manifest bytes");
  request.manifest.assign(SendRequest::kManifestBytesMax + 1, 'm');
  EXPECT_EQ(field_of(request), "manifest bytes");
  request = RequestOf(pages, peer());
  request.pages.push_back({});
  EXPECT_EQ(field_of(request), "page 1 bytes");
  request = RequestOf(pages, peer());
  request.timeout_ms = -1;
  EXPECT_EQ(field_of(request), "timeout_ms");
  request = RequestOf(pages, peer());
  request.pages.resize(SendRequest::kPagesMax + 1, request.pages[0]);
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
  options = SenderOptions();
  options.stall_ms = 0;
  EXPECT_EQ(field_of(options), "stall_ms");
  options = ReceiverOptions();
  RawSocket listener = RawSocket::Listen();
  options.listen = listener.address();
  EXPECT_EQ(TcpTransport::Create(options).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sender_side_->listen_address(), "");
}

TEST_F(TransportTest, PeersByNameAndIPv6) {
  const std::vector<Page> pages = RandomPages({1000}, 1);
  const std::string port = peer().substr(peer().rfind(':'));
  EXPECT_TRUE(Send(RequestOf(pages, "localhost" + port)).get().ok());
  TcpTransport::Options options = ReceiverOptions();
  options.listen = "[::1]:0";
  auto other = TcpTransport::Create(options);
  if (!other.ok()) GTEST_SKIP() << "no IPv6 loopback: " << other.status();
  EXPECT_TRUE(Send(RequestOf(pages, (*other)->listen_address())).get().ok());
}

TEST_F(TransportTest, SilentReceiverIsADeadline) {
  RawSocket listener = RawSocket::Listen();  // never accepts
  SendRequest request = RequestOf(RandomPages({100}, 1), listener.address());
  request.timeout_ms = 50;
  const Result result = Send(request).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kTimeout).Value(), 1);
}

TEST_F(TransportTest, ReceiverThatStopsReadingIsADeadline) {
  RawSocket listener = RawSocket::Listen();
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 1 << 20), 1);
  SendRequest request = RequestOf(pages, listener.address());
  request.timeout_ms = 100;
  std::future<Result> result = Send(request);
  RawSocket connection = listener.Accept();
  connection.Write(EncodeHello());
  EXPECT_TRUE(std::holds_alternative<HelloFrame>(*connection.ReadFrame()));
  EXPECT_TRUE(std::holds_alternative<OfferFrame>(*connection.ReadFrame()));
  connection.Write(EncodeAnswer({64, std::vector<uint8_t>(8, 0xff)}));
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(TransportTest, SlowAnswerIsADeadlineAndTheLateHandOffIsAborted) {
  receiver_.hold_offers = true;
  SendRequest request = RequestOf(RandomPages({100}, 1), peer());
  request.timeout_ms = 50;
  EXPECT_EQ(Send(request).get().status().code(), absl::StatusCode::kDeadlineExceeded);
  receiver_.WaitForOffers(1);
  receiver_.ReleaseOffers();
  receiver_.WaitForAborts(1);
  EXPECT_EQ(receiver_.live, 0);
  EXPECT_TRUE(receiver_.completed().empty());
}

TEST_F(TransportTest, ReceiverThatDiesIsUnavailable) {
  for (const int stage : {0, 1, 2}) {
    RawSocket listener = RawSocket::Listen();
    const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 1 << 20), 1);
    std::future<Result> result = Send(RequestOf(pages, listener.address()));
    {
      RawSocket connection = listener.Accept();
      if (stage > 0) connection.Write(EncodeHello());
      if (stage > 1) {
        connection.Read(kHelloBytes);
        EXPECT_TRUE(std::holds_alternative<OfferFrame>(*connection.ReadFrame()));
        connection.Write(EncodeAnswer({64, std::vector<uint8_t>(8, 0xff)}));
        connection.Read(1000000);
      }
    }
    EXPECT_EQ(result.get().status().code(), absl::StatusCode::kUnavailable) << stage;
  }
}

TEST_F(TransportTest, CancelBeforeTheAnswer) {
  receiver_.hold_offers = true;
  uint64_t id = 0;
  std::future<Result> result = Send(RequestOf(RandomPages({100}, 1), peer()), &id);
  receiver_.WaitForOffers(1);
  sender_side_->Cancel(id + 1);  // unknown: ignored
  sender_side_->Cancel(id);
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kCancelled);
  receiver_.ReleaseOffers();
  receiver_.WaitForAborts(
      1);  // CANCELLED, or UNAVAILABLE if the connection closed before the frame that says so could be written
  EXPECT_EQ(receiver_.live, 0);
  EXPECT_TRUE(receiver_.completed().empty());
  sender_side_->Cancel(id);
  EXPECT_EQ(sender_metrics_.sent.transfers(TransferResult::kCancelled).Value(), 1);
}

TEST_F(TransportTest, CancelAmongPages) {
  RawSocket listener = RawSocket::Listen();
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(64, 1 << 20), 1);
  uint64_t id = 0;
  std::future<Result> result = Send(RequestOf(pages, listener.address()), &id);
  RawSocket connection = listener.Accept();
  connection.Write(EncodeHello());
  connection.Read(kHelloBytes);
  EXPECT_TRUE(std::holds_alternative<OfferFrame>(*connection.ReadFrame()));
  connection.Write(EncodeAnswer({64, std::vector<uint8_t>(8, 0xff)}));
  EXPECT_EQ(connection.Read(100000).size(), 100000u);
  sender_side_->Cancel(id);
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(connection.ReadToEnd().size(), size_t{64} << 20);
}

TEST_F(TransportTest, DestructorFailsSendsAndAbortsReceipts) {
  const std::vector<Page> pages = RandomPages({100, 200}, 1);
  RawSocket listener = RawSocket::Listen();
  std::future<Result> to_silence = Send(RequestOf(pages, listener.address()));
  RawSocket sender = RawSocket::Connect(peer());
  const std::string stream = StreamOf(pages);
  sender.Write(stream.substr(0, stream.size() - 100));
  receiver_.WaitForOffers(1);
  EXPECT_TRUE(std::holds_alternative<HelloFrame>(*sender.ReadFrame()));
  EXPECT_TRUE(std::holds_alternative<AnswerFrame>(*sender.ReadFrame()));
  sender_side_.reset();
  EXPECT_EQ(to_silence.get().status().code(), absl::StatusCode::kCancelled);
  receiver_side_.reset();
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(receiver_.live, 0);
  EXPECT_TRUE(receiver_.completed().empty());
}

TEST_F(TransportTest, HandOffOfferedAfterTheDestructorIsDestroyed) {
  receiver_.hold_offers = true;
  std::future<Result> result = Send(RequestOf(RandomPages({100}, 1), peer()));
  receiver_.WaitForOffers(1);
  receiver_side_.reset();
  EXPECT_FALSE(result.get().ok());
  receiver_.ReleaseOffers();
  EXPECT_EQ(receiver_.live, 0);
  EXPECT_EQ(receiver_.aborts(), 0u);
}

TEST_F(TransportTest, HandOffsAtOnce) {
  std::vector<std::vector<Page>> sent;
  std::vector<std::future<Result>> results;
  for (int i = 0; i < 8; ++i) sent.push_back(RandomPages(std::vector<size_t>(40, 30001 + i), i));
  for (const auto& pages : sent) results.push_back(Send(RequestOf(pages, peer())));
  for (auto& result : results) EXPECT_TRUE(result.get().ok());
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
  std::future<Result> first = Send(RequestOf(pages, peer()));
  receiver_.WaitForOffers(1);
  EXPECT_EQ(SendAndWait(pages).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(receiver_metrics_.connections_refused.Value(), 1);
  receiver_.ReleaseOffers();
  EXPECT_TRUE(first.get().ok());

  TcpTransport::Options few = SenderOptions();
  few.outgoing_max = 1;
  sender_side_ = Make(few);
  RawSocket listener = RawSocket::Listen();
  std::future<Result> stuck = Send(RequestOf(pages, listener.address()));
  EXPECT_EQ(SendAndWait(pages).status().code(), absl::StatusCode::kResourceExhausted);
  sender_side_.reset();
  EXPECT_EQ(stuck.get().status().code(), absl::StatusCode::kCancelled);
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
  request.manifest.assign(4 << 20, 'm');
  EXPECT_EQ(Send(request).get().status().code(), absl::StatusCode::kResourceExhausted);
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
