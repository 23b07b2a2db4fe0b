// Data connections between daemons of one host: pages that the receiver copies out of the sender's memory.
#include "transport/tcp/local.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/memory/region.h"
#include "transport/tcp/copy_hash.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

std::unique_ptr<Region> MakeRegion(size_t bytes, uint64_t seed) {
  auto region = Region::Create({.bytes = bytes, .sharing = Region::Sharing::kReadOnly});
  EXPECT_TRUE(region.ok()) << region.status();
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < bytes; ++i) (*region)->data()[i] = static_cast<uint8_t>(random());
  return *std::move(region);
}
SharedMemory MemoryOf(const Region& region) { return {region.data(), region.bytes(), region.fd()}; }

/// A Unix socket, which speaks as the others do.
RawSocket ConnectLocally(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  RawSocket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
            0);
  return socket;
}

class LocalTest : public testing::Test {
 protected:
  LocalTest() : first_(MakeRegion(1 << 20, 1)), second_(MakeRegion(1 << 20, 2)) {
    TcpTransport::Options options;
    options.metrics = &receiver_metrics_;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.local_connections = true;
    receiving_ = *TcpTransport::Create(options);
    TcpTransport::Options sending;
    sending.metrics = &sender_metrics_;
    sending.memory = {MemoryOf(*second_), MemoryOf(*first_)};
    sender_ = *TcpTransport::Create(sending);
  }
  /// Pages here and there in both regions, and the bytes they have.
  std::vector<SendPage> PagesIn(size_t count, uint64_t seed, std::vector<Page>* bytes) {
    std::mt19937_64 random(seed);
    std::vector<SendPage> pages;
    for (uint32_t i = 0; i < count; ++i) {
      const Region& region = random() % 2 == 0 ? *first_ : *second_;
      const size_t size = 1 + random() % 20000;
      const absl::Span<const uint8_t> at(region.data() + random() % (region.bytes() - size), size);
      pages.push_back({i, at, XXH3_64bits(at.data(), at.size())});
      bytes->emplace_back(at.begin(), at.end());
    }
    return pages;
  }
  absl::StatusOr<SendResult> Send(const std::vector<SendPage>& pages) {
    SendRequest request;
    request.peer = receiving_->listen_address();
    request.header.manifest = "manifest";
    for (const SendPage& page : pages) request.header.page_bytes.push_back(page.bytes.size());
    return SendAll(*sender_, request, pages).done.get();
  }
  /// A hand-off of one page of 100 bytes whose sender is the test: a control and a local connection.
  void Play() {
    HandOffPart part;
    part.manifest = "manifest";
    part.page_bytes = {100};
    Token token = kToken;
    token[0] = ++tokens_;
    token[1] = 0;
    control_ = RawSocket::Connect(receiving_->listen_address());
    control_.Write(EncodeHello({}) + EncodeOffer(token, 0, part, ThisHost()));
    control_.Expect<HelloFrame>();
    const AcceptFrame accept = control_.Expect<AcceptFrame>();
    ASSERT_FALSE(accept.local_name.empty());
    connection_ = ConnectLocally(accept.local_name);
    connection_.Write(JoinOf(1, token));
    connection_.Expect<HelloFrame>();
    connection_.Expect<JoinedFrame>();
  }
  /// A receiver, played by the test, that names a Unix socket where the sender finds nothing: the sender uses TCP.
  void ExpectTcpInstead(const std::string& local_name) {
    RawSocket listener = RawSocket::Listen();
    std::vector<Page> bytes;
    const std::vector<SendPage> pages = PagesIn(1, 8, &bytes);
    SendRequest request;
    request.peer = listener.address();
    request.header = PartOf(bytes);
    Outcome out = SendAll(*sender_, request, pages);
    RawSocket control = listener.Accept();
    control.Write(EncodeHello({}));
    control.Expect<HelloFrame>();
    control.Expect<OfferFrame>();
    PageBitmap wanted(1);
    wanted.Add(0);
    control.Write(EncodeAccept({1 << 20, 4, "ticket", wanted, local_name}));
    RawSocket connection = listener.Accept();
    connection.Write(EncodeHello({}));
    connection.Expect<HelloFrame>();
    EXPECT_EQ(connection.Expect<JoinFrame>().connection, 1u);
    connection.Write(EncodeJoined({false, PageBitmap(1)}));
    EXPECT_EQ(connection.Expect<PagesFrame>().pages.size(), 1u);
    control.Expect<TrailerFrame>();
    control.Write(EncodeExtended({}) + EncodeGot(1 << 20, {0}) + EncodeEmpty(FrameType::kDone));
    EXPECT_TRUE(out.done.get().ok());
  }
  void WriteRegion(const RegionFrame& region, int fd) {
    const std::string frame = EncodeRegion(region);
    EXPECT_EQ(SendWithDescriptor(connection_.fd(), RawSocket::Span(frame), fd, MSG_DONTWAIT),
              static_cast<ssize_t>(frame.size()));
  }
  std::string ErrorField() {
    for (;;) {
      absl::StatusOr<Frame> frame = control_.ReadFrame();
      if (!frame.ok()) return "closed";
      if (auto* error = std::get_if<ErrorFrame>(&*frame)) return DetailOf(error->status).field;
    }
  }

  std::unique_ptr<Region> first_, second_;
  Metrics sender_registry_, receiver_registry_;
  TransportMetrics sender_metrics_{&sender_registry_}, receiver_metrics_{&receiver_registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> receiving_, sender_;
  RawSocket control_{-1}, connection_{-1};
  uint8_t tokens_ = 0;
};

TEST(CopyHash, HashesWhatItStoresWhoeverWritesMeanwhile) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "what is tested is a race";
#endif
  constexpr size_t kBytes = 40000;
  std::vector<std::atomic<uint64_t>> from(kBytes / 8);
  std::vector<uint64_t> to(kBytes / 8 + 2);
  auto* const target = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(to.data()) + 15) / 16 * 16);
  std::atomic<bool> over{false};
  std::thread writes([&] {
    for (uint64_t word = 1; !over; ++word) {
      for (auto& each : from) each.store(word, std::memory_order_relaxed);
    }
  });
  CopyHash copy;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t hash = copy.Copy(reinterpret_cast<const uint8_t*>(from.data()), target, kBytes);
    EXPECT_EQ(hash, Checksum(target, kBytes));
  }
  over = true;
  writes.join();
}

TEST(CopyHash, CopiesAndHashes) {
  CopyHash copy;
  std::mt19937_64 random(1);
  const Page from = RandomPages({100000}, 2)[0];
  for (int i = 0; i < 500; ++i) {
    const size_t at = random() % 64, size = random() % (i % 10 == 0 ? 90000 : 300), to_at = random() % 64;
    Page to(size + 200, 0xee);
    EXPECT_EQ(copy.Copy(&from[at], &to[to_at], size), XXH3_64bits(&from[at], size));
    EXPECT_TRUE(std::equal(to.begin() + to_at, to.begin() + to_at + size, from.begin() + at));
    for (size_t j = 0; j < to.size(); ++j) {
      if (j >= to_at && j < to_at + size) continue;
      ASSERT_EQ(to[j], 0xee) << j;
    }
  }
}

TEST_F(LocalTest, PagesAreCopiedOutOfTheSendersMemory) {
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(700, 3, &bytes);
  const absl::StatusOr<SendResult> result = Send(pages);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.newest() == bytes);
  EXPECT_EQ(result->pages_sent, 700u);
  for (const TcpTransport* const side : {sender_.get(), receiving_.get()}) {
    ASSERT_EQ(side->Peers().size(), 1u);
    EXPECT_EQ(side->Peers()[0].bytes, result->bytes_sent);
    EXPECT_EQ(side->Peers()[0].copied_bytes, result->bytes_sent);
  }
  // Again, with the regions known and the transports as they were.
  bytes.clear();
  EXPECT_TRUE(Send(PagesIn(100, 4, &bytes)).ok());
  EXPECT_TRUE(receiver_.newest() == bytes);
}

TEST_F(LocalTest, PagesElsewhereGoThroughTheSocket) {
  std::vector<Page> bytes;
  std::vector<SendPage> pages = PagesIn(50, 5, &bytes);
  const std::vector<Page> others = RandomPages(std::vector<size_t>(50, 3000), 6);
  for (size_t i = 0; i < others.size(); ++i) {
    pages.push_back({static_cast<uint32_t>(pages.size()), others[i], XXH3_64bits(others[i].data(), others[i].size())});
    bytes.push_back(others[i]);
  }
  const absl::StatusOr<SendResult> result = Send(pages);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.newest() == bytes);
}

TEST_F(LocalTest, ReceiverWithoutLocalConnectionsIsReachedByTcp) {
  TcpTransport::Options options;
  options.metrics = &receiver_metrics_;
  options.listen = "127.0.0.1:0";
  options.receiver = &receiver_;
  receiving_ = *TcpTransport::Create(options);
  std::vector<Page> bytes;
  EXPECT_TRUE(Send(PagesIn(100, 7, &bytes)).ok());
  EXPECT_TRUE(receiver_.newest() == bytes);
}

TEST_F(LocalTest, MemoryThatCannotBeMappedGoesByTcp) {
  TcpTransport::Options options;
  options.metrics = &sender_metrics_;
  const std::string path = absl::StrCat("/proc/self/fd/", first_->fd());
  const int unreadable = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(unreadable, 0);
  options.memory = {{first_->data(), first_->bytes(), unreadable}, MemoryOf(*second_)};
  sender_ = *TcpTransport::Create(options);
  std::vector<Page> bytes;
  const absl::StatusOr<SendResult> result = Send(PagesIn(300, 10, &bytes));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.newest() == bytes);
  EXPECT_EQ(result->bytes_resent, 0u);
  double sum = 0;
  for (const Page& page : bytes) sum += static_cast<double>(page.size());
  EXPECT_EQ(sender_metrics_.sent.socket_bytes.Value() + sender_metrics_.sent.copied_bytes.Value(), sum);
  EXPECT_GT(receiver_metrics_.received.socket_bytes.Value(), 0);
  EXPECT_EQ(receiver_metrics_.protocol_errors.Value(), 0);
  ::close(unreadable);
}

/// A listening Unix socket of another user, in the abstract namespace; -1 if this process may not be one.
int ListenAsAnotherUser(const std::string& name) {
  int listener = -1;
  std::thread([&] {
    // The bare system call is this thread's alone.
    if (::syscall(SYS_setresuid, -1, 65534, -1) != 0) return;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    EXPECT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener, 1), 0);
  }).join();
  return listener;
}

TEST_F(LocalTest, AnotherUsersSocketGetsNothing) {
  const std::string name = NewLocalName();
  const int listener = ListenAsAnotherUser(name);
  if (listener < 0) GTEST_SKIP() << "only root can be another user";
  ExpectTcpInstead(name);
  // It was connected, and then closed without a byte or a descriptor.
  const int connection = ::accept(listener, nullptr, nullptr);
  ASSERT_GE(connection, 0);
  uint8_t byte;
  EXPECT_EQ(::recv(connection, &byte, 1, 0), 0);
  ::close(connection);
  ::close(listener);
}

TEST_F(LocalTest, UnixSocketOutOfReachFallsBackToTcp) { ExpectTcpInstead("kvmanager-nobody-listens-here"); }

TEST_F(LocalTest, SenderOfAnotherHostIsToldNoUnixSocket) {
  RawSocket control = RawSocket::Connect(receiving_->listen_address());
  HostId other = ThisHost();
  other[0] ^= 1;
  HandOffPart part;
  part.manifest = "manifest";
  control.Write(EncodeHello({}) + EncodeOffer(kToken, 0, part, other));
  control.Expect<HelloFrame>();
  EXPECT_EQ(control.Expect<AcceptFrame>().local_name, "");
}

TEST_F(LocalTest, HostileConnectionsEndTheHandOff) {
  const uint64_t checksum = XXH3_64bits(first_->data(), 100);
  Play();
  WriteRegion({0, first_->bytes()}, first_->fd());
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}}));
  control_.Expect<GotFrame>();  // so it goes well

  Play();
  WriteRegion({0, first_->bytes()}, -1);
  EXPECT_EQ(ErrorField(), "REGION");
  Play();
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "region");
  for (const uint64_t offset : {first_->bytes() - 99, first_->bytes() + 1, ~uint64_t{0}}) {
    Play();
    WriteRegion({0, first_->bytes()}, first_->fd());
    connection_.Write(EncodeLocal({{0, 0, offset, checksum}}));
    EXPECT_EQ(ErrorField(), "offset");
  }
  Play();
  WriteRegion({0, first_->bytes() + 4096}, first_->fd());  // larger than it is: reading there would be fatal
  EXPECT_EQ(ErrorField(), "region");
  Play();
  const int shrinks = ::memfd_create("shrinks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(::ftruncate(shrinks, 4096), 0);
  WriteRegion({0, 4096}, shrinks);
  ::close(shrinks);
  EXPECT_EQ(ErrorField(), "region");
  Play();
  WriteRegion({0, first_->bytes()}, first_->fd());
  WriteRegion({0, second_->bytes()}, second_->fd());
  EXPECT_EQ(ErrorField(), "region");
  Play();
  connection_.Write(EncodeEmpty(FrameType::kDone));
  EXPECT_EQ(ErrorField(), "frame type on a data connection");
  Play();
  WriteRegion({0, first_->bytes()}, first_->fd());
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}, {0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "page");
  // Frames of local connections on a TCP connection.
  const std::vector<Page> pages = RandomPages({100}, 1);
  RawSocket control = RawSocket::Connect(receiving_->listen_address());
  control.Write(OfferOf(pages));
  control.Expect<HelloFrame>();
  control.Expect<AcceptFrame>();
  RawSocket connection = RawSocket::Connect(receiving_->listen_address());
  connection.Write(JoinOf(1) + EncodeLocal({{0, 0, 0, checksum}}));
  for (;;) {
    absl::StatusOr<Frame> frame = control.ReadFrame();
    ASSERT_TRUE(frame.ok()) << frame.status();
    if (auto* error = std::get_if<ErrorFrame>(&*frame)) {
      EXPECT_EQ(DetailOf(error->status).field, "frame type on a data connection");
      break;
    }
  }
  EXPECT_EQ(receiver_.completions(), 0u);
}

TEST_F(LocalTest, ChangedMemoryIsAskedForAgainAndThenDataLoss) {
  std::vector<Page> bytes;
  std::vector<SendPage> pages = PagesIn(3, 9, &bytes);
  pages[1].checksum ^= 1;
  const absl::StatusOr<SendResult> result = Send(pages);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), kBadPagesMax + 1);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
}

}  // namespace
}  // namespace kvmanager::tcp
