// Peers that lie, trickle, stop, or speak something else: an error where one can be told, everything given back, the
// transport lives on.
#include <thread>

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
  /// Writes `bytes` on a connection and nothing more; what the receiver said until it closed.
  std::string Exchange(const std::string& bytes) {
    RawSocket socket = Connect();
    socket.Write(bytes);
    socket.EndWriting();
    return socket.ReadToEnd();
  }
  /// The error that the receiver says on this connection, whatever else it says before.
  absl::Status ErrorOn(RawSocket& socket) {
    for (;;) {
      absl::StatusOr<Frame> frame = socket.ReadFrame();
      if (!frame.ok()) return absl::UnknownError("closed without an error");
      if (auto* error = std::get_if<ErrorFrame>(&*frame)) {
        EXPECT_EQ(socket.ReadToEnd(), "");
        return error->status;
      }
    }
  }
  /// The error that it answers to `bytes` with, the connection still open for writing.
  absl::Status ErrorOf(const std::string& bytes) {
    RawSocket socket = Connect();
    socket.Write(bytes);
    return ErrorOn(socket);
  }
  Token NextToken() {
    Token token = kToken;
    token[0] = static_cast<uint8_t>(++tokens_);
    token[1] = static_cast<uint8_t>(tokens_ >> 8);
    return token;
  }
  /// A hand-off of pages_ up to its ACCEPT: its control connection.
  RawSocket Open(const Token& token) {
    RawSocket control = Connect();
    control.Write(OfferOf(pages_, token));
    control.Expect<HelloFrame>();
    EXPECT_EQ(control.Expect<AcceptFrame>().wanted.count, pages_.size());
    return control;
  }
  RawSocket DataConnection(const Token& token) {
    RawSocket connection = Connect();
    connection.Write(JoinOf(1, token));
    connection.Expect<HelloFrame>();
    connection.Expect<JoinedFrame>();
    return connection;
  }
  /// The error that ends a hand-off whose data connection carries `bytes`.
  absl::Status ErrorOfConnection(const std::string& bytes) {
    const Token token = NextToken();
    RawSocket control = Open(token);
    RawSocket connection = DataConnection(token);
    connection.Write(bytes);
    return ErrorOn(control);
  }
  void ExpectAlive() {
    receiver_.skip.clear();
    const size_t before = receiver_.completions();
    const Token token = NextToken();
    RawSocket control = Open(token);
    RawSocket connection = DataConnection(token);
    connection.Write(PagesFrameOf(pages_, {2, 0}) + PagesFrameOf(pages_, {3, 1}));
    control.Write(EncodeTrailer(NothingMore()));
    std::set<uint32_t> got;
    for (;;) {
      absl::StatusOr<Frame> frame = control.ReadFrame();
      ASSERT_TRUE(frame.ok()) << frame.status();
      if (const auto* arrived = std::get_if<GotFrame>(&*frame))
        got.insert(arrived->pages.begin(), arrived->pages.end());
      if (std::holds_alternative<DoneFrame>(*frame)) break;
    }
    EXPECT_EQ(got, (std::set<uint32_t>{0, 1, 2, 3}));
    EXPECT_EQ(receiver_.completions(), before + 1);
    EXPECT_EQ(receiver_.newest(), pages_);
    receiver_.WaitUntilNoneLives();
  }

  const std::vector<Page> pages_ = RandomPages({5, 40, 1, 17}, 4);
  int tokens_ = 0;
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> transport_;
};

TEST_F(HostileTest, GoodStreamsByteByByte) {
  RawSocket control = Connect();
  for (const char c : OfferOf(pages_)) ASSERT_TRUE(control.Write(std::string(1, c)));
  control.Expect<HelloFrame>();
  control.Expect<AcceptFrame>();
  RawSocket connection = Connect();
  for (const char c : DataStreamOf(pages_)) ASSERT_TRUE(connection.Write(std::string(1, c)));
  for (const char c : EncodeTrailer(NothingMore())) ASSERT_TRUE(control.Write(std::string(1, c)));
  for (;;) {
    absl::StatusOr<Frame> frame = control.ReadFrame();
    ASSERT_TRUE(frame.ok()) << frame.status();
    if (std::holds_alternative<DoneFrame>(*frame)) break;
  }
  EXPECT_EQ(receiver_.newest(), pages_);
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
  Restart(100);  // a hand-off whose sender has gone is kept so long
  const std::string offer = OfferOf(pages_);
  for (size_t size = 0; size < offer.size(); ++size) Exchange(offer.substr(0, size));
  EXPECT_EQ(receiver_.offers(), 0u);
  const std::string stream = DataStreamOf(pages_);
  const Token token = NextToken();
  RawSocket control = Open(token);
  for (size_t size = 0; size < stream.size(); ++size) Exchange(stream.substr(0, size));  // of a token that nobody has
  control.Close();
  receiver_.WaitForAborts(1);
  EXPECT_EQ(receiver_.completions(), 0u);
  receiver_.WaitUntilNoneLives();
  ExpectAlive();
}

TEST_F(HostileTest, ConnectionCutAtEveryLengthGoesOn) {
  const Token token = NextToken();
  RawSocket control = Open(token);
  const std::string frame = PagesFrameOf(pages_, {0, 1, 2, 3});
  for (size_t size = 0; size < frame.size() - 17; ++size) {
    RawSocket connection = Connect();
    connection.Write(JoinOf(1, token));
    connection.Expect<HelloFrame>();
    const JoinedFrame joined = connection.Expect<JoinedFrame>();
    // What has arrived is not sent again.
    std::vector<uint32_t> missing;
    for (uint32_t i = 0; i < pages_.size(); ++i) {
      if (!joined.arrived.has(i)) missing.push_back(i);
    }
    const std::string rest = PagesFrameOf(pages_, missing);
    connection.Write(rest.substr(0, std::min(size, rest.size() - 1)));
    connection.EndWriting();
    connection.ReadToEnd();
  }
  RawSocket connection = DataConnection(token);
  RawSocket again = Connect();
  again.Write(JoinOf(1, token));  // the same connection: the first of the two ends
  again.Expect<HelloFrame>();
  const JoinedFrame joined = again.Expect<JoinedFrame>();
  EXPECT_EQ(connection.ReadToEnd(), "");
  std::vector<uint32_t> missing;
  for (uint32_t i = 0; i < pages_.size(); ++i) {
    if (!joined.arrived.has(i)) missing.push_back(i);
  }
  again.Write(PagesFrameOf(pages_, missing));
  control.Write(EncodeTrailer(NothingMore()));
  for (;;) {
    absl::StatusOr<Frame> said = control.ReadFrame();
    ASSERT_TRUE(said.ok()) << said.status();
    if (std::holds_alternative<DoneFrame>(*said)) break;
  }
  EXPECT_EQ(receiver_.newest(), pages_);
}

TEST_F(HostileTest, SenderThatDiesAmongPages) {
  Restart(100);
  {
    const Token token = NextToken();
    RawSocket control = Open(token);
    RawSocket connection = DataConnection(token);
    connection.Write(PagesFrameOf(pages_, {0, 1}));
    receiver_.WaitForArrivals(2);
  }
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(receiver_.completions(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, SenderThatFallsSilent) {
  Restart(50);
  for (const std::string& said :
       {std::string(), EncodeHello({}), EncodeHello({}) + "\1", OfferOf(pages_).substr(0, 60)}) {
    RawSocket socket = Connect();
    socket.Write(said);
    const std::string all = socket.ReadToEnd();  // an error, or closed: it ends
  }
  RawSocket control = Open(NextToken());
  EXPECT_EQ(ErrorOn(control).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kDeadlineExceeded);
  receiver_.WaitUntilNoneLives();
}

TEST_F(HostileTest, FirstFrameThatTrickles) {
  Restart(100);
  RawSocket socket = Connect();
  const std::string offer = OfferOf(pages_);
  bool open = true;
  for (size_t i = 0; open && i < offer.size(); ++i) {
    open = socket.Write(offer.substr(i, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // slow, not to wait for something
  }
  EXPECT_FALSE(open);
  EXPECT_EQ(receiver_.offers(), 0u);
}

TEST_F(HostileTest, PageChangedOnItsWayIsAskedForAgain) {
  const Token token = NextToken();
  RawSocket control = Open(token);
  for (int attempt = 0; attempt < kBadPagesMax; ++attempt) {
    RawSocket connection = DataConnection(token);
    std::string frame = PagesFrameOf(pages_, {static_cast<uint32_t>(attempt % 4)});
    frame.back() = static_cast<char>(frame.back() ^ 0x10);
    connection.Write(frame);
    EXPECT_EQ(connection.ReadToEnd(), "");
  }
  RawSocket connection = DataConnection(token);
  std::string frame = PagesFrameOf(pages_, {1});
  frame.back() = static_cast<char>(frame.back() ^ 0x10);
  connection.Write(frame);
  const absl::Status status = ErrorOn(control);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(DetailOf(status).field, "checksum of page 1");
  EXPECT_EQ(metrics_.checksum_failures.Value(), kBadPagesMax + 1);
  EXPECT_EQ(receiver_.aborts(), 1u);
  EXPECT_EQ(receiver_.completions(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, PagesOutOfTurn) {
  const std::string first = PagesFrameOf(pages_, {0});
  std::vector<Page> more = pages_;
  more.push_back({1});
  EXPECT_EQ(DetailOf(ErrorOfConnection(PagesFrameOf(more, {4}))).field, "page");
  EXPECT_EQ(DetailOf(ErrorOfConnection(first + first)).field, "page");
  EXPECT_EQ(DetailOf(ErrorOfConnection(PagesFrameOf(pages_, {1, 1}))).field, "page");
  EXPECT_EQ(DetailOf(ErrorOfConnection(EncodeEmpty(FrameType::kDone))).field, "frame type on a data connection");
  EXPECT_EQ(DetailOf(ErrorOfConnection(EncodeJoin({kToken, 1}))).field, "frame type on a data connection");
  EXPECT_EQ(receiver_.aborts(), 5u);
  receiver_.skip = {0};
  EXPECT_EQ(DetailOf(ErrorOfConnection(first)).field, "page");
  EXPECT_EQ(receiver_.completions(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, ControlFramesOutOfTurn) {
  const auto error_of = [&](const std::string& bytes) {
    RawSocket control = Open(NextToken());
    control.Write(bytes);
    return ErrorOn(control);
  };
  HandOffPart last = NothingMore();
  EXPECT_EQ(DetailOf(error_of(PagesFrameOf(pages_, {0}))).field, "frame type here");
  EXPECT_EQ(DetailOf(error_of(EncodeEmpty(FrameType::kDone))).field, "frame type here");
  EXPECT_EQ(error_of(EncodeTrailer(last) + EncodeTrailer(last)).code(), absl::StatusCode::kInvalidArgument);
  last.withdrawn = {4};
  EXPECT_EQ(DetailOf(error_of(EncodeTrailer(last))).field, "withdrawn[0]");
  const Token token = NextToken();
  RawSocket control = Open(token);
  RawSocket connection = DataConnection(token);
  connection.Write(PagesFrameOf(pages_, {1}));
  receiver_.WaitForArrivals(1);
  last.withdrawn = {1};
  control.Write(EncodeTrailer(last));
  EXPECT_EQ(DetailOf(ErrorOn(control)).field, "withdrawn[0]");
  EXPECT_EQ(ErrorOf(OfferOf(pages_, token)).code(), absl::StatusCode::kAlreadyExists);
  receiver_.hold_offers = true;
  RawSocket early = Connect();
  early.Write(OfferOf(pages_, NextToken()) + EncodeTrailer(NothingMore()));
  EXPECT_EQ(ErrorOn(early).code(), absl::StatusCode::kInvalidArgument);
  receiver_.ReleaseOffers();
  receiver_.hold_offers = false;
  ExpectAlive();
}

TEST_F(HostileTest, JoinsOfNothing) {
  EXPECT_EQ(ErrorOf(JoinOf(0)).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorOf(JoinOf(1)).code(), absl::StatusCode::kNotFound);
  const Token token = NextToken();
  RawSocket control = Open(token);
  EXPECT_EQ(DetailOf(ErrorOf(JoinOf(TcpTransport::kConnectionsMaxDefault + 1, token))).field, "connection");
  EXPECT_EQ(DetailOf(ErrorOf(JoinOf(kConnectionsMax + 1, token))).field, "JOIN connection");
  control.Write(EncodeEmpty(FrameType::kCancel));
  receiver_.WaitForAborts(1);
  ExpectAlive();
}

TEST_F(HostileTest, LengthsOverTheirLimits) {
  const auto header = [](FrameType type, uint64_t bytes) {
    std::string out = EncodeEmpty(FrameType::kPing);
    out[0] = static_cast<char>(type);
    for (int i = 0; i < 8; ++i) out[8 + i] = static_cast<char>(bytes >> (8 * i));
    return EncodeHello({}) + out;
  };
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kOffer, 64 << 20))).field, "OFFER body bytes");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kOffer, ~uint64_t{0}))).field, "OFFER body bytes");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kPages, 32))).field, "frame type here");
  EXPECT_EQ(DetailOf(ErrorOf(header(FrameType::kAccept, 100))).field, "frame type here");
  EXPECT_EQ(receiver_.offers(), 0u);
  ExpectAlive();
}

TEST_F(HostileTest, VersionsThatDoNotMeet) {
  const absl::Status status = ErrorOf(EncodeHello({9, 3, 0, 1}));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(DetailOf(status).value, "3..9");
  ExpectAlive();
}

TEST_F(HostileTest, CancelledBySender) {
  Exchange(EncodeHello({}) + EncodeEmpty(FrameType::kCancel));
  const Token token = NextToken();
  RawSocket control = Open(token);
  control.Write(EncodeEmpty(FrameType::kCancel));
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(metrics_.received.transfers(TransferResult::kCancelled).Value(), 1);
  ExpectAlive();
}

TEST_F(HostileTest, RandomMutationsOfAGoodStream) {
  Restart(100);
  std::mt19937_64 random(6);
  for (int i = 0; i < 300; ++i) {
    const Token token = NextToken();
    std::string streams[2] = {OfferOf(pages_, token) + EncodeTrailer(NothingMore()), DataStreamOf(pages_)};
    std::copy(token.begin(), token.end(), streams[1].begin() + kHelloBytes + kHeaderBytes);
    std::string& bytes = streams[random() % 2];
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
    }
    if (random() % 4 == 0) bytes.erase(random() % bytes.size(), 1 + random() % 8);
    if (random() % 4 == 0)
      bytes.insert(random() % bytes.size(), std::string(1 + random() % 8, static_cast<char>(random())));
    RawSocket control = Connect();
    control.Write(streams[0]);
    Exchange(streams[1]);
    control.Close();
  }
  while (receiver_.offers() > receiver_.aborts() + receiver_.completions())
    receiver_.WaitForAborts(receiver_.aborts() + 1);
  receiver_.WaitUntilNoneLives();
  for (const auto& completed : receiver_.completed()) EXPECT_EQ(completed, pages_);
  ExpectAlive();
}

TEST_F(HostileTest, ReceiversThatLieAreUnavailable) {
  const auto answer_with = [&](const std::string& bytes) {
    RawSocket listener = RawSocket::Listen();
    SendRequest request = RequestOf(pages_, listener.address());
    request.stall_ms = 40;  // a connection that ends is tried again for so long
    Outcome out = SendAll(*transport_, request, PagesOf(pages_));
    RawSocket connection = listener.Accept();
    connection.Write(bytes);
    connection.EndWriting();
    listener.Close();
    return out.done.get().status();
  };
  const std::string hello = EncodeHello({});
  PageBitmap all(4), other(3);
  for (uint32_t i = 0; i < 4; ++i) all.Add(i);
  const std::string accept = EncodeAccept({1000, 1, "ticket", all});
  EXPECT_EQ(answer_with("SSH-2.0-OpenSSH_9.2p1 Debian\r\n").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer_with(EncodeHello({9, 3, 0, 1})).code(), absl::StatusCode::kUnimplemented);
  for (const std::string& lie :
       {EncodeAccept({1000, 1, "t", other}), EncodeEmpty(FrameType::kDone), accept + EncodeEmpty(FrameType::kDone),
        accept + EncodeGot(1, {0}), accept + EncodeGot(1, {77}), accept + EncodeExtended({other}),
        accept + EncodeJoined({false, all}), EncodeEmpty(FrameType::kCancel), EncodeOffer(kToken, 0, PartOf(pages_)),
        std::string(16, '\xff')}) {
    const absl::Status status = answer_with(hello + lie);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("broke the protocol"), absl::string_view::npos) << status;
  }
  EXPECT_EQ(answer_with(hello + EncodeError(absl::PermissionDeniedError("no"))).code(),
            absl::StatusCode::kPermissionDenied);
  std::mt19937_64 random(7);
  const std::string good =
      hello + EncodeAccept({1000, 1, "ticket", PageBitmap(4)}) + EncodeExtended({}) + EncodeEmpty(FrameType::kDone);
  for (int i = 0; i < 40; ++i) {
    std::string bytes = good;
    bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)answer_with(bytes);  // OK or an error: never a hang or a crash
  }
  ExpectAlive();
}

}  // namespace
}  // namespace kvmanager::tcp
