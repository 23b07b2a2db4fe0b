// Data connections whose pages the receiver reads out of described memory: over UCX's TCP and shared memory, and over
// memory that the test plays, which can lie, fail and be silent.
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

#include "kvmanager/memory/region.h"
#include "transport/remote_memory.h"
#include "transport/tcp/test_util.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kRegionBytes = 8 << 20;
constexpr int64_t kStallMs = 1000;

std::unique_ptr<Region> MakeRegion(size_t bytes, uint64_t seed) {
  auto region = Region::Create({.bytes = bytes, .sharing = Region::Sharing::kReadOnly});
  EXPECT_TRUE(region.ok()) << region.status();
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy((*region)->data() + i, &word, 8);
  }
  return *std::move(region);
}

/// Memory of this process, read with memcpy; a description is the address of the memory and the context. Fields are set
/// before use, but for `mute`.
class PlayedMemory final : public RemoteMemory {
 public:
  explicit PlayedMemory(std::vector<absl::Span<const uint8_t>> memory) : memory_(std::move(memory)) {
    std::sort(memory_.begin(), memory_.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
  }
  ~PlayedMemory() override { Speak(); }

  std::atomic<bool> mute = false;     // reads do not end
  std::atomic<bool> broken = false;   // they fail
  std::atomic<bool> corrupt = false;  // the first byte of each is another
  std::atomic<uint64_t> reads = 0;
  std::atomic<int> pieces = 0;  // that are held

  absl::Span<const absl::Span<const uint8_t>> memory() const override { return memory_; }
  std::string Describe(size_t index, Context context) const override {
    return absl::StrCat(reinterpret_cast<uintptr_t>(memory_[index].data()), " ", memory_[index].size(), " ") +
           std::string(context.begin(), context.end());
  }
  absl::StatusOr<std::shared_ptr<Source>> Open(absl::Span<const uint8_t> description, Context context) override {
    const std::string text(description.begin(), description.end());
    size_t at = 0, bytes = 0;
    int head = 0;
    if (std::sscanf(text.c_str(), "%zu %zu%n", &at, &bytes, &head) != 2) return absl::UnavailableError("no memory");
    if (text.substr(head) != " " + std::string(context.begin(), context.end()))
      return absl::UnavailableError("not for this");
    return std::shared_ptr<Source>(std::make_shared<PlayedSource>(reinterpret_cast<const uint8_t*>(at), bytes));
  }
  void Read(std::shared_ptr<Source> from, uint64_t offset, uint64_t bytes, Done done) override {
    ++reads;
    EXPECT_LE(offset + bytes, from->bytes());
    if (broken) return done(absl::UnavailableError("it broke"));
    auto piece = std::make_unique<PlayedPiece>(this, static_cast<PlayedSource&>(*from).data + offset, bytes);
    if (corrupt) piece->copy[0] ^= 1;
    if (!mute) return done(std::unique_ptr<Piece>(std::move(piece)));
    MutexLock lock(mutex_);
    held_.emplace_back(std::move(done), std::move(piece));
  }
  /// Reads that were not answered are, late.
  void Speak() {
    std::deque<std::pair<Done, std::unique_ptr<Piece>>> held;
    {
      MutexLock lock(mutex_);
      held.swap(held_);
    }
    for (auto& [done, piece] : held) done(std::move(piece));
  }

 private:
  struct PlayedSource final : Source {
    PlayedSource(const uint8_t* at, uint64_t size) : data(at), size(size) {}
    uint64_t bytes() const override { return size; }
    const uint8_t* const data;
    const uint64_t size;
  };
  struct PlayedPiece final : Piece {
    PlayedPiece(PlayedMemory* owner, const uint8_t* from, size_t bytes) : owner(owner), copy(from, from + bytes) {
      ++owner->pieces;
    }
    ~PlayedPiece() override { --owner->pieces; }
    absl::Span<const uint8_t> bytes() const override { return copy; }
    PlayedMemory* const owner;
    Page copy;
  };
  std::vector<absl::Span<const uint8_t>> memory_;
  Mutex mutex_;
  std::deque<std::pair<Done, std::unique_ptr<Piece>>> held_ ABSL_GUARDED_BY(mutex_);
};

class DataConnectionTest {
 protected:
  DataConnectionTest() : first_(MakeRegion(kRegionBytes, 1)), second_(MakeRegion(kRegionBytes, 2)) {}
  void StartWith(RemoteMemory* sender, RemoteMemory* receiver, int64_t stall_ms = SendRequest::kStallMsDefault) {
    TcpTransport::Options options;
    options.metrics = &receiver_metrics_;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.remote_memory = receiver;
    options.stall_ms = stall_ms;
    receiving_ = *TcpTransport::Create(options);
    TcpTransport::Options sending;
    sending.metrics = &sender_metrics_;
    sending.remote_memory = sender;
    sending.stall_ms = stall_ms;
    sender_ = *TcpTransport::Create(sending);
  }
  std::vector<SendPage> PagesIn(size_t count, uint64_t seed, std::vector<Page>* bytes) {
    std::mt19937_64 random(seed);
    std::vector<SendPage> pages;
    for (uint32_t i = 0; i < count; ++i) {
      const Region& region = random() % 2 == 0 ? *first_ : *second_;
      const size_t size = 1 + random() % 60000;
      const absl::Span<const uint8_t> at(region.data() + random() % (region.bytes() - size), size);
      pages.push_back({i, at, XXH3_64bits(at.data(), at.size())});
      bytes->emplace_back(at.begin(), at.end());
    }
    return pages;
  }
  SendRequest RequestFor(const std::vector<SendPage>& pages) {
    SendRequest request;
    request.peer = receiving_->listen_address();
    request.header.manifest = "manifest";
    for (const SendPage& page : pages) request.header.page_bytes.push_back(page.bytes.size());
    return request;
  }
  absl::StatusOr<SendResult> Send(const std::vector<SendPage>& pages) {
    return SendAll(*sender_, RequestFor(pages), pages).done.get();
  }
  /// A hand-off of some pages here and there, whose bytes arrive.
  SendResult HandOver(size_t pages, uint64_t seed) {
    std::vector<Page> bytes;
    const absl::StatusOr<SendResult> result = Send(PagesIn(pages, seed, &bytes));
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return {};
    EXPECT_TRUE(receiver_.newest() == bytes);
    EXPECT_EQ(result->pages_sent, pages);
    return *result;
  }
  double ReadBytes() { return receiver_metrics_.received.ucx_bytes.Value(); }
  double SocketBytes() { return receiver_metrics_.received.socket_bytes.Value(); }

  std::unique_ptr<Region> first_, second_;
  Metrics sender_registry_, receiver_registry_;
  TransportMetrics sender_metrics_{&sender_registry_}, receiver_metrics_{&receiver_registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> receiving_, sender_;
};

class PlayedConnectionTest : public DataConnectionTest, public testing::Test {
 protected:
  PlayedConnectionTest() { StartWith(&theirs_, &ours_, kStallMs); }
  ~PlayedConnectionTest() override {
    sender_.reset();
    receiving_.reset();
    ours_.Speak();
    EXPECT_EQ(ours_.pieces, 0);
  }
  /// A hand-off of one page of 100 bytes that the test plays the sender of.
  void Play() {
    HandOffPart part;
    part.manifest = "manifest";
    part.page_bytes = {100};
    token_ = kToken;
    token_[0] = ++tokens_;
    control_ = RawSocket::Connect(receiving_->listen_address());
    control_.Write(EncodeHello({}) + EncodeOffer(token_, 0, part));
    EXPECT_EQ(control_.Expect<HelloFrame>().features, kFeatures | kFeatureRemoteMemory);
    control_.Expect<AcceptFrame>();
    connection_ = RawSocket::Connect(receiving_->listen_address());
    connection_.Write(JoinOf(1, token_));
    connection_.Expect<HelloFrame>();
    connection_.Expect<JoinedFrame>();
  }
  std::string Described(uint32_t region = 0) { return EncodeMemory({region, theirs_.Describe(0, token_)}); }
  std::string ErrorField() {
    for (;;) {
      absl::StatusOr<Frame> frame = control_.ReadFrame();
      if (!frame.ok()) return "closed";
      if (auto* error = std::get_if<ErrorFrame>(&*frame)) return DetailOf(error->status).field;
    }
  }

  PlayedMemory theirs_{{{first_->data(), kRegionBytes}, {second_->data(), kRegionBytes}}};
  PlayedMemory ours_{std::vector<absl::Span<const uint8_t>>()};
  RawSocket control_{-1}, connection_{-1};
  Token token_ = {};
  uint8_t tokens_ = 0;
};

TEST_F(PlayedConnectionTest, PagesAreRead) {
  const SendResult result = HandOver(500, 3);
  EXPECT_EQ(ReadBytes(), double(result.bytes_sent));
  EXPECT_EQ(sender_metrics_.sent.ucx_bytes.Value(), double(result.bytes_sent));
  EXPECT_EQ(SocketBytes(), 0);
  EXPECT_EQ(sender_->Peers()[0].copied_bytes, result.bytes_sent);
}

TEST_F(PlayedConnectionTest, PagesElsewhereGoThroughTheSocket) {
  std::vector<Page> bytes;
  std::vector<SendPage> pages = PagesIn(50, 5, &bytes);
  const std::vector<Page> others = RandomPages(std::vector<size_t>(50, 3000), 6);
  for (const Page& other : others) {
    pages.push_back({static_cast<uint32_t>(pages.size()), other, XXH3_64bits(other.data(), other.size())});
    bytes.push_back(other);
  }
  ASSERT_TRUE(Send(pages).ok());
  EXPECT_TRUE(receiver_.newest() == bytes);
}

TEST_F(PlayedConnectionTest, ReadsThatFailGoByTcp) {
  ours_.broken = true;
  const SendResult result = HandOver(300, 7);
  EXPECT_EQ(SocketBytes(), double(result.bytes_sent));
  EXPECT_EQ(result.bytes_resent, 0u);
  EXPECT_EQ(receiver_metrics_.protocol_errors.Value(), 0);
}

TEST_F(PlayedConnectionTest, ReadsThatNeverEndGoByTcpAndEndUnseen) {
  ours_.mute = true;
  const SendResult result = HandOver(300, 8);
  EXPECT_EQ(SocketBytes(), double(result.bytes_sent));
  EXPECT_GT(ours_.reads, 0u);
  ours_.corrupt = true;  // of what was given up nobody copies anything
  const std::vector<Page> before = receiver_.newest();
  ours_.Speak();
  ours_.mute = false;
  EXPECT_TRUE(receiver_.newest() == before);
}

TEST_F(PlayedConnectionTest, ReadsThatEndAfterTheTransportAreHarmless) {
  ours_.mute = true;
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(100, 9, &bytes);
  Outcome out = SendAll(*sender_, RequestFor(pages), pages);
  while (ours_.reads == 0) std::this_thread::yield();
  receiving_.reset();
  EXPECT_FALSE(out.done.get().ok());
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
  ours_.Speak();
}

TEST_F(PlayedConnectionTest, ASendersEndLeavesNothing) {
  ours_.mute = true;
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(100, 9, &bytes);
  Outcome out = SendAll(*sender_, RequestFor(pages), pages);
  while (ours_.reads == 0) std::this_thread::yield();
  sender_->Cancel(out.id);
  EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
  receiver_.WaitUntilNoneLives();
  ours_.Speak();
  ours_.mute = false;
  HandOver(100, 10);
}

TEST_F(PlayedConnectionTest, WrongBytesAreAskedForByTcpAndThenGood) {
  ours_.corrupt = true;
  const SendResult result = HandOver(10, 11);
  EXPECT_EQ(SocketBytes(), double(result.bytes_sent));
  EXPECT_GT(receiver_metrics_.checksum_failures.Value(), 0);
}

TEST_F(PlayedConnectionTest, ChangedMemoryIsDataLoss) {
  std::vector<Page> bytes;
  std::vector<SendPage> pages = PagesIn(3, 9, &bytes);
  pages[1].checksum ^= 1;
  EXPECT_EQ(Send(pages).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), kBadPagesMax + 1);
}

TEST_F(PlayedConnectionTest, SideWithoutItIsReachedByTcp) {
  StartWith(&theirs_, nullptr);
  EXPECT_EQ(SocketBytes(), double(HandOver(50, 12).bytes_sent));
  StartWith(nullptr, &ours_);
  HandOver(50, 13);
  EXPECT_EQ(ReadBytes(), 0);
}

TEST_F(PlayedConnectionTest, LimitedSenderUsesTcp) {
  TcpTransport::Options options;
  options.metrics = &sender_metrics_;
  options.remote_memory = &theirs_;
  options.send_bytes_per_s = uint64_t{1} << 30;
  sender_ = *TcpTransport::Create(options);
  EXPECT_EQ(SocketBytes(), double(HandOver(50, 14).bytes_sent));
}

TEST_F(PlayedConnectionTest, HostileConnectionsEndTheHandOff) {
  const uint8_t* const at = theirs_.memory()[0].data();
  const uint64_t checksum = XXH3_64bits(at, 100);
  Play();
  connection_.Write(Described() + EncodeLocal({{0, 0, 0, checksum}}));
  control_.Expect<GotFrame>();  // so it goes well
  Play();
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "region");
  Play();
  connection_.Write(Described() + EncodeLocal({{0, 1, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "region");
  for (const uint64_t offset : {kRegionBytes - 99, kRegionBytes + 1, ~size_t{0}}) {
    Play();
    connection_.Write(Described() + EncodeLocal({{0, 0, offset, checksum}}));
    EXPECT_EQ(ErrorField(), "offset");
  }
  Play();
  connection_.Write(Described() + Described());
  EXPECT_EQ(ErrorField(), "region");
  Play();
  connection_.Write(Described() + EncodeLocal({{0, 0, 0, checksum}, {0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "page");
  Play();
  connection_.Write(EncodeRegion({0, 4096}));
  EXPECT_EQ(ErrorField(), "frame type on a data connection");
  // A description that was made for another hand-off breaks only the data connection.
  const std::string other = Described();
  Play();
  connection_.Write(other);
  EXPECT_EQ(connection_.ReadToEnd(), "");
  connection_ = RawSocket::Connect(receiving_->listen_address());
  const Page page(at, at + 100);
  connection_.Write(JoinOf(1, token_) + PagesFrameOf({page}, {0}));
  EXPECT_EQ(control_.Expect<GotFrame>().pages, std::vector<uint32_t>{0});
  EXPECT_EQ(receiver_.completions(), 0u);
}

TEST_F(PlayedConnectionTest, TheFrameIsOnlyForSidesThatSaidSo) {
  StartWith(nullptr, nullptr);
  const std::vector<Page> pages = RandomPages({100}, 1);
  RawSocket control = RawSocket::Connect(receiving_->listen_address());
  control.Write(OfferOf(pages));
  EXPECT_EQ(control.Expect<HelloFrame>().features, kFeatures);
  control.Expect<AcceptFrame>();
  RawSocket connection = RawSocket::Connect(receiving_->listen_address());
  connection.Write(JoinOf(1) + EncodeMemory({0, theirs_.Describe(0, kToken)}));
  EXPECT_EQ(DetailOf(control.Expect<ErrorFrame>().status).field, "frame type on a data connection");
}

struct Way {
  const char* name;
  std::vector<std::pair<std::string, std::string>> settings;
};

class UcxConnectionTest : public DataConnectionTest, public testing::TestWithParam<Way> {
 protected:
  UcxConnectionTest() {
    std::unique_ptr<UcxMemory>* const made[] = {&theirs_, &ours_};
    for (int i = 0; i < 2; ++i) {
      UcxMemory::Options options;
      options.program = {"transport/ucx/ucx_process_main"};
      options.key = "a key that all daemons here have";
      options.settings = GetParam().settings;
      if (i == 0) {
        for (const Region* const region : {first_.get(), second_.get()}) {
          options.memory.push_back({region->data(), region->bytes(), region->fd()});
        }
      }
      auto ucx = UcxMemory::Create(options);
      if (!IsUcxBuilt()) {
        EXPECT_EQ(ucx.status().code(), absl::StatusCode::kUnavailable);
      } else if (!ucx.ok()) {
        ADD_FAILURE() << ucx.status();
      } else {
        *made[i] = *std::move(ucx);
      }
    }
  }
  void SetUp() override {
    if (!IsUcxBuilt()) GTEST_SKIP() << UcxBuild();
    ASSERT_TRUE(theirs_ != nullptr && ours_ != nullptr);
    StartWith(theirs_.get(), ours_.get());
  }
  void TearDown() override {
    sender_.reset();
    receiving_.reset();
  }
  void KillProcessOf(UcxMemory& memory) {
    const pid_t process = memory.process();
    if (process != 0) ::kill(process, SIGKILL);
    while (memory.process() == process) std::this_thread::yield();
  }

  std::unique_ptr<UcxMemory> theirs_, ours_;
};

TEST_P(UcxConnectionTest, EqualBytes) {
  for (uint64_t seed = 1; seed < 5; ++seed) HandOver(400, seed);
  EXPECT_GT(ReadBytes(), 0);
  EXPECT_EQ(SocketBytes(), 0);
  EXPECT_TRUE(ours_->idle());
}

TEST_P(UcxConnectionTest, ProcessesThatEndAreMadeAnewAndTcpTakesOver) {
  for (UcxMemory* const memory : {theirs_.get(), ours_.get(), theirs_.get()}) {
    HandOver(200, 6);
    std::vector<Page> bytes;
    const std::vector<SendPage> pages = PagesIn(2000, 7, &bytes);
    Outcome out = SendAll(*sender_, RequestFor(pages), pages);
    KillProcessOf(*memory);
    const absl::StatusOr<SendResult> result = out.done.get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(receiver_.newest() == bytes);
    HandOver(200, 8);  // while there is none
    while (memory->process() == 0) std::this_thread::yield();
    const double before = ReadBytes();
    const SendResult again = HandOver(200, 9);
    EXPECT_EQ(ReadBytes() - before, double(again.bytes_sent));
  }
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), 0);
  EXPECT_TRUE(ours_->idle());
}

TEST_P(UcxConnectionTest, CancelledHandOffsLeaveNothing) {
  for (int i = 0; i < 10; ++i) {
    std::vector<Page> bytes;
    const std::vector<SendPage> pages = PagesIn(1000, 7, &bytes);
    Outcome out = SendAll(*sender_, RequestFor(pages), pages);
    if (i % 2 == 0) receiver_.WaitForArrivals(receiver_.arrivals().size() + 1);
    sender_->Cancel(out.id);
    out.done.wait();
  }
  receiver_.WaitUntilNoneLives();
  HandOver(300, 10);
  EXPECT_NE(theirs_->process(), 0);
}

TEST_P(UcxConnectionTest, AStoppedProcessIsGivenUpForTcp) {
  StartWith(theirs_.get(), ours_.get(), kStallMs);
  HandOver(100, 1);
  ::kill(theirs_->process(), SIGSTOP);
  HandOver(300, 2);
  ::kill(theirs_->process(), SIGCONT);
  HandOver(300, 3);
}

TEST_P(UcxConnectionTest, AnotherKeyMeansTcp) {
  UcxMemory::Options options;
  options.program = {"transport/ucx/ucx_process_main"};
  options.key = "another key of 16 bytes";
  options.settings = GetParam().settings;
  sender_.reset();
  receiving_.reset();
  ours_ = *UcxMemory::Create(options);
  StartWith(theirs_.get(), ours_.get());
  EXPECT_EQ(SocketBytes(), double(HandOver(300, 4).bytes_sent));
}

const Way kWays[] = {{"Tcp", {{"TLS", "tcp"}, {"NET_DEVICES", "lo"}}},
                     {"SharedMemory", {{"TLS", "posix,cma"}}},
                     {"SharedMemoryByMessages", {{"TLS", "posix"}}}};
INSTANTIATE_TEST_SUITE_P(Ways, UcxConnectionTest, testing::ValuesIn(kWays),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvmanager::tcp
