// Peers that lie, trickle, stop, or speak something else: an error where one can be told, everything given back, the
// transport lives on.
#include "kvmanager/base/status.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

class HostileTest : public testing::Test {
 protected:
  void SetUp() override { Restart(SendRequest::kStallMsDefault); }
  void Restart(int64_t stall_ms) {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &metrics_;
    options.stall_ms = stall_ms;
    auto made = TcpTransport::Create(options);
    ASSERT_TRUE(made.ok()) << made.status();
    transport_ = *std::move(made);
  }
  RawSocket Connect() { return RawSocket::Connect(transport_->listen_address()); }
  /// Writes `bytes` and nothing more; what the receiver said until it closed.
  std::string Exchange(const std::string& bytes) {
    RawSocket socket = Connect();
    socket.Write(bytes);
    socket.EndWriting();
    return socket.ReadToEnd();
  }
  /// The error that the receiver answers to `bytes` with, its connection still open for writing.
  absl::Status ErrorOf(const std::string& bytes) {
    RawSocket socket = Connect();
    socket.Write(bytes);
    for (;;) {
      absl::StatusOr<Frame> frame = socket.ReadFrame();
      if (!frame.ok()) return absl::UnknownError("closed without an error");
      if (auto* error = std::get_if<ErrorFrame>(&*frame)) {
        EXPECT_EQ(socket.ReadToEnd(), "");
        return error->status;
      }
    }
  }
  void ExpectAlive() {
    const size_t before = receiver_.completed().size();
    const std::string answer = Exchange(StreamOf(pages_));
    EXPECT_EQ(receiver_.completed().size(), before + 1);
    EXPECT_EQ(receiver_.completed().back(), pages_);
    const std::string done = EncodeDone("ticket");
    ASSERT_GE(answer.size(), done.size());
    EXPECT_EQ(answer.substr(answer.size() - done.size()), done);
    EXPECT_EQ(receiver_.live, 0);
  }

  const std::vector<Page> pages_ = RandomPages({5, 40, 1, 17}, 4);
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> transport_;
};

TEST_F(HostileTest, GoodStreamByteByByte) {
  RawSocket socket = Connect();
  for (const char c : StreamOf(pages_)) ASSERT_TRUE(socket.Write(std::string(1, c)));
  socket.EndWriting();
  socket.ReadToEnd();
  ASSERT_EQ(receiver_.completed().size(), 1u);
  EXPECT_EQ(receiver_.completed()[0], pages_);
}

TEST_F(HostileTest, Garbage) {
  std::mt19937_64 random(5);
  for (const size_t size : {1, 24, 100, 5000}) {
    std::string bytes(size, 0);
    for (char& c : bytes) c = static_cast<char>(random());
    Exchange(bytes);
  }
  EXPECT_EQ(ErrorOf("GET / HTTP/1.1\r\nHost: here\r\n\r\n").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_GT(metrics_.protocol_errors.Value(), 0);
  EXPECT_EQ(receiver_.offers(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, TruncatedAtEveryLength) {
  const std::string stream = StreamOf(pages_);
  for (size_t size = 0; size < stream.size(); ++size) Exchange(stream.substr(0, size));
  EXPECT_TRUE(receiver_.completed().empty());
  EXPECT_EQ(receiver_.aborts(), receiver_.offers());
  EXPECT_GT(receiver_.offers(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, SenderThatDiesAmongPages) {
  const std::string stream = StreamOf(pages_);
  {
    RawSocket socket = Connect();
    socket.Write(stream.substr(0, stream.size() - 40));
    receiver_.WaitForOffers(1);
  }
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(receiver_.completed().empty());
  ExpectAlive();
}

TEST_F(HostileTest, SenderThatHangs) {
  Restart(50);
  const std::string stream = StreamOf(pages_);
  for (const size_t missing : {size_t{40}, stream.size() - 30, stream.size() - 3, stream.size()}) {
    EXPECT_EQ(ErrorOf(stream.substr(0, stream.size() - missing)).code(), absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(receiver_.live, 0);
}

TEST_F(HostileTest, ByteFlippedInFlight) {
  for (const size_t page : {0, 1, 2, 3}) {
    std::vector<Page> changed = pages_;
    changed[page].back() ^= 0x10;
    std::string stream = StreamOf(pages_);
    const std::string good = PageFrameOf(page, pages_[page]);
    stream.replace(stream.find(good), good.size(), PageFrameOf(page, changed[page]));
    const absl::Status status = ErrorOf(stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(DetailOf(status).field, absl::StrCat("checksum of page ", page));
  }
  EXPECT_EQ(metrics_.checksum_failures.Value(), 4);
  EXPECT_EQ(receiver_.aborts(), 4u);
  EXPECT_TRUE(receiver_.completed().empty());
  ExpectAlive();
}

TEST_F(HostileTest, PagesOutOfTurn) {
  const SendRequest request = RequestOf(pages_, "");
  const std::string head = EncodeHello() + EncodeOffer(request.pages, request.manifest);
  const std::string first = PageFrameOf(0, pages_[0]);
  EXPECT_EQ(DetailOf(ErrorOf(head + PageFrameOf(1, pages_[1]))).field, "page");
  EXPECT_EQ(DetailOf(ErrorOf(head + first + first)).field, "page");
  EXPECT_EQ(DetailOf(ErrorOf(head + PageFrameOf(0, pages_[1]))).field, "page 0 bytes");
  EXPECT_EQ(DetailOf(ErrorOf(head + first + EncodeEnd({1, 5}))).field, "frame type among pages");
  EXPECT_EQ(DetailOf(ErrorOf(head + head)).field, "frame type");
  std::string all = head;
  for (size_t i = 0; i < pages_.size(); ++i) all += PageFrameOf(i, pages_[i]);
  EXPECT_EQ(DetailOf(ErrorOf(all + EncodeEnd({3, 63}))).field, "pages sent");
  EXPECT_EQ(DetailOf(ErrorOf(all + EncodeEnd({4, 64}))).field, "bytes sent");
  EXPECT_EQ(DetailOf(ErrorOf(all + PageFrameOf(3, pages_[3]))).field, "frame type after pages");
  EXPECT_EQ(receiver_.aborts(), 8u);
  EXPECT_TRUE(receiver_.completed().empty());
  ExpectAlive();
}

TEST_F(HostileTest, PageThatTheReceiverSkipped) {
  receiver_.skip = {0};
  EXPECT_EQ(DetailOf(ErrorOf(StreamOf(pages_))).field, "page");
  EXPECT_EQ(receiver_.aborts(), 1u);
}

TEST_F(HostileTest, LengthsOverTheirLimits) {
  const auto header = [](FrameType type, uint32_t page, uint64_t bytes) {
    std::string out(kHeaderBytes, 0);
    PutHeader({type, page, bytes}, reinterpret_cast<uint8_t*>(out.data()));
    return EncodeHello() + out;
  };
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kOffer, 0, kOfferBytesMax + 1))).field, "OFFER body bytes");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kOffer, 0, ~uint64_t{0}))).field, "OFFER body bytes");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kOffer, 7, 100))).field, "frame page");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kPage, 0, 100))).field, "first frame's type");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kAnswer, 0, 100))).field, "first frame's type");
  std::string offer = StreamOf(pages_);
  offer[kHelloBytes + 16 + 3] = 0x7f;
  EXPECT_EQ(DetailOf(ErrorOf(offer)).field, "offer manifest bytes");
  EXPECT_EQ(receiver_.offers(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, VersionsThatDoNotMeet) {
  const absl::Status status = ErrorOf(EncodeHello({9, 2, 0}));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(DetailOf(status).value, "2..9");
  ExpectAlive();
}

TEST_F(HostileTest, CancelledBySender) {
  const std::string stream = StreamOf(pages_);
  Exchange(EncodeHello() + EncodeCancel());
  const SendRequest request = RequestOf(pages_, "");
  const std::string head = EncodeHello() + EncodeOffer(request.pages, request.manifest);
  Exchange(head + EncodeCancel());
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  Exchange(head + PageFrameOf(0, pages_[0]) + EncodeCancel());
  EXPECT_EQ(receiver_.WaitForAborts(2)[1].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(metrics_.received.transfers(TransferResult::kCancelled).Value(), 2);
  ExpectAlive();
}

TEST_F(HostileTest, RandomMutationsOfAGoodStream) {
  std::mt19937_64 random(6);
  const std::string stream = StreamOf(pages_);
  for (int i = 0; i < 300; ++i) {
    std::string bytes = stream;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
    }
    if (random() % 4 == 0) bytes.erase(random() % bytes.size(), 1 + random() % 8);
    if (random() % 4 == 0)
      bytes.insert(random() % bytes.size(), std::string(1 + random() % 8, static_cast<char>(random())));
    Exchange(bytes);
  }
  EXPECT_EQ(receiver_.live, 0);
  EXPECT_EQ(receiver_.offers(), receiver_.aborts() + receiver_.completed().size());
  for (const auto& completed : receiver_.completed()) EXPECT_EQ(completed, pages_);  // a change of the manifest alone
  ExpectAlive();
}

TEST_F(HostileTest, ReceiversThatLieAreUnavailable) {
  const auto answer_with = [&](const std::string& bytes) {
    RawSocket listener = RawSocket::Listen();
    std::promise<absl::StatusOr<SendResult>> promise;
    transport_->Send(RequestOf(pages_, listener.address()),
                     [&](absl::StatusOr<SendResult> result) { promise.set_value(std::move(result)); });
    RawSocket connection = listener.Accept();
    connection.Write(bytes);
    connection.EndWriting();
    return promise.get_future().get().status();
  };
  const std::string hello = EncodeHello();
  EXPECT_EQ(answer_with("SSH-2.0-OpenSSH_9.2p1 Debian\r\n").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(EncodeHello({9, 2, 0})).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(answer_with(hello + EncodeAnswer({3, {7}})).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + EncodeDone("early")).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + EncodeAnswer({4, {15}}) + EncodeDone("early")).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + EncodeAnswer({4, {0}}) + EncodeAnswer({4, {0}})).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + EncodeCancel()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + std::string(16, '\xff')).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(hello + EncodeError(absl::PermissionDeniedError("no"))).code(),
            absl::StatusCode::kPermissionDenied);
  std::mt19937_64 random(7);
  const std::string good = hello + EncodeAnswer({4, {0}}) + EncodeDone("t");
  for (int i = 0; i < 100; ++i) {
    std::string bytes = good;
    bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)answer_with(bytes);  // OK or an error: never a hang or a crash
  }
  ExpectAlive();
}

}  // namespace
}  // namespace kvmanager::tcp
