// Links that break, and bytes that change on their way: a proxy between two transports does both.
#include <algorithm>
#include <thread>

#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

/// Passes connections on to a listening transport, and spoils them: once `budget` bytes have passed in both directions
/// together, the connection at hand is cut, or all are, or one byte of what it carries is changed.
class Proxy {
 public:
  enum class Fault { kNone, kCut, kCutAll, kFlip };

  explicit Proxy(const std::string& to) : to_(to), listener_(RawSocket::Listen()), address_(listener_.address()) {
    accepting_ = std::thread([this] { Accept(); });
  }
  ~Proxy() {
    stopping_ = true;
    listener_.EndBoth();
    accepting_.join();
    {
      MutexLock lock(mutex_);
      for (auto& pair : pairs_) pair->Cut();
    }
    for (auto& thread : threads_) thread.join();
  }
  const std::string& address() const { return address_; }
  /// The next fault, after `bytes` more.
  void Spoil(Fault fault, int64_t bytes) {
    fault_ = fault;
    budget_ = bytes;
  }
  /// Changes a byte of what the sender says on a connection to come: the `nth` from now, from 1; the byte counted from
  /// 0.
  void FlipIn(int nth, int64_t byte) {
    flip_byte_ = byte;
    flip_in_ = nth;
  }
  int faults() const { return faults_; }

 private:
  struct Pair {
    Pair(RawSocket a, RawSocket b) : near(std::move(a)), far(std::move(b)) {}
    void Cut() {
      near.EndBoth();
      far.EndBoth();
    }
    RawSocket near, far;
    int64_t flip = -1;  // of the bytes from near
  };

  void Accept() {
    for (;;) {
      RawSocket near = listener_.Accept();
      if (stopping_ || !near.valid()) return;
      auto pair = std::make_shared<Pair>(std::move(near), RawSocket::Connect(to_));
      if (--flip_in_ == 0) pair->flip = flip_byte_;
      MutexLock lock(mutex_);
      pairs_.push_back(pair);
      threads_.emplace_back([this, pair] { Pump(*pair, pair->near, pair->far); });
      threads_.emplace_back([this, pair] { Pump(*pair, pair->far, pair->near); });
    }
  }
  void Pump(Pair& pair, RawSocket& from, RawSocket& to) {
    std::vector<char> chunk(16 << 10);
    int64_t passed = 0;
    for (;;) {
      const ssize_t n = from.ReadSome(chunk.data(), chunk.size());
      if (n <= 0) break;
      if (&from == &pair.near && pair.flip >= passed && pair.flip < passed + n) {
        char& byte = chunk[pair.flip - passed];
        byte = static_cast<char>(byte ^ 0x10);
        ++faults_;
      }
      passed += n;
      const int64_t before = budget_.fetch_sub(n);
      if (before > 0 && before <= n) {  // this chunk has the byte
        const Fault fault = fault_.exchange(Fault::kNone);
        if (fault != Fault::kNone) ++faults_;
        if (fault == Fault::kFlip) chunk[before - 1] = static_cast<char>(chunk[before - 1] ^ 0x20);
        if (fault == Fault::kCut || fault == Fault::kCutAll) {
          to.WriteFrom(chunk.data(), before - 1);
          if (fault == Fault::kCut) break;
          MutexLock lock(mutex_);
          for (auto& other : pairs_) other->Cut();
          break;
        }
      }
      if (!to.WriteFrom(chunk.data(), n)) break;
    }
    pair.Cut();
  }

  const std::string to_;
  RawSocket listener_;
  const std::string address_;
  std::atomic<bool> stopping_{false};
  std::atomic<Fault> fault_{Fault::kNone};
  std::atomic<int64_t> budget_{0};
  std::atomic<int> faults_{0};
  std::atomic<int> flip_in_{0};  // connections to come; below 1: in none
  std::atomic<int64_t> flip_byte_{0};
  Mutex mutex_;
  std::vector<std::shared_ptr<Pair>> pairs_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
};

class ResumeTest : public testing::Test {
 protected:
  ResumeTest() {
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    sender_ = *TcpTransport::Create(options);
    options.metrics = &zero_copy_metrics_;
    options.zero_copy = ZeroCopyUse::kAlways;
    zero_copy_sender_ = *TcpTransport::Create(options);
    options.metrics = &receiver_metrics_;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    receiving_ = *TcpTransport::Create(options);
    proxy_ = std::make_unique<Proxy>(receiving_->listen_address());
  }
  /// A hand-off of 480 pages and 40 of the trailer, posted in pieces; by default 9 MB or so on two connections.
  absl::StatusOr<SendResult> HandOff(uint64_t seed, size_t page_bytes_max = 33 << 10) {
    return HandOffBy(*sender_, seed, page_bytes_max);
  }
  /// The same, by a sender whose connections write straight from pages for every other pair of seeds.
  absl::StatusOr<SendResult> HandOffByEither(uint64_t seed) {
    return HandOffBy(seed / 2 % 2 == 0 ? *sender_ : *zero_copy_sender_, seed, 33 << 10);
  }
  void ExpectZeroCopies() {
    const TransportMetrics::ZeroCopy& bytes = zero_copy_metrics_.zero_copy;
    EXPECT_EQ(bytes.unconfirmed.Value(), 0);
    const double so = bytes.sent.Value() + bytes.copied.Value() + bytes.refused.Value();
    EXPECT_GT(so, zero_copy_metrics_.sent.socket_bytes.Value() / 2);
  }
  absl::StatusOr<SendResult> HandOffBy(TcpTransport& sender, uint64_t seed, size_t page_bytes_max) {
    std::mt19937_64 random(seed);
    std::vector<size_t> sizes(kPages + kLastPages);
    for (size_t& size : sizes) size = 1 + random() % page_bytes_max;
    pages_ = RandomPages(sizes, seed);
    Outcome out = Begin(sender, RequestOf({pages_.begin(), pages_.begin() + kPages}, proxy_->address()));
    const std::vector<SendPage> posted = PagesOf(pages_);
    for (size_t i = 0; i < kPages; i += kPages / 4) {
      sender.Post(out.id, {posted.begin() + i, posted.begin() + i + kPages / 4});
    }
    sender.Finish(out.id, PartOf({pages_.begin() + kPages, pages_.end()}));
    sender.Post(out.id, {posted.begin() + kPages, posted.end()});
    return out.done.get();
  }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const Page& page : pages_) sum += page.size();
    return sum;
  }
  void ExpectComplete(const absl::StatusOr<SendResult>& result, size_t hand_offs) {
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(receiver_.completions(), hand_offs);
    EXPECT_TRUE(receiver_.newest() == pages_);
    EXPECT_EQ(receiver_.aborts(), 0u);
  }

  static constexpr ptrdiff_t kPages = 480, kLastPages = 40;
  std::vector<Page> pages_;
  Metrics sender_registry_, receiver_registry_;
  TransportMetrics sender_metrics_{&sender_registry_}, receiver_metrics_{&receiver_registry_};
  Metrics zero_copy_registry_;
  TransportMetrics zero_copy_metrics_{&zero_copy_registry_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> receiving_, sender_, zero_copy_sender_;
  std::unique_ptr<Proxy> proxy_;
};

TEST_F(ResumeTest, NothingIsWrongWithTheProxy) {
  const absl::StatusOr<SendResult> result = HandOff(1);
  ExpectComplete(result, 1);
  EXPECT_EQ(result->resumes, 0u);
  EXPECT_EQ(result->bytes_resent, 0u);
}

TEST_F(ResumeTest, CutAtRandomPoints) {
  std::mt19937_64 random(2);
  uint64_t resent = 0, resumes = 0;
  for (int seed = 0; seed < 100; ++seed) {
    proxy_->Spoil(seed % 2 == 0 ? Proxy::Fault::kCut : Proxy::Fault::kCutAll,
                  1 + static_cast<int64_t>(random() % (8 << 20)));
    const absl::StatusOr<SendResult> result = HandOffByEither(100 + seed);
    ExpectComplete(result, seed + 1);
    if (HasFatalFailure()) return;
    resent += result->bytes_resent;
    resumes += result->resumes;
    EXPECT_EQ(result->pages_sent, pages_.size());
    EXPECT_LE(result->bytes_resent, bytes() / 20);
  }
  EXPECT_GT(proxy_->faults(), 80);
  EXPECT_GT(resumes, 60u);
  EXPECT_GT(resent, 0u);
  ExpectZeroCopies();
  receiver_.WaitUntilNoneLives();
}

TEST_F(ResumeTest, FlippedBytesAreNeverTaken) {
  std::mt19937_64 random(3);
  for (int seed = 0; seed < 100; ++seed) {
    proxy_->Spoil(Proxy::Fault::kFlip, 1 + static_cast<int64_t>(random() % (8 << 20)));
    const absl::StatusOr<SendResult> result = HandOffByEither(300 + seed);
    // A hello that is changed into that of another version, or the offer's, may end it; nothing wrong is ever taken.
    if (!result.ok()) continue;
    EXPECT_TRUE(receiver_.newest() == pages_);
  }
  EXPECT_GT(proxy_->faults(), 80);
  EXPECT_GT(receiver_.completions(), 90u);
  EXPECT_GT(receiver_metrics_.checksum_failures.Value(), 50);
  ExpectZeroCopies();
  receiver_.WaitUntilNoneLives();
}

TEST_F(ResumeTest, CutOfThePeersFirstBytes) {
  // Before the offer has arrived, among hellos, in the answers: each byte of the beginning.
  for (int64_t at = 60; at < 1200; at += 13) {
    proxy_->Spoil(Proxy::Fault::kCut, at);
    const absl::StatusOr<SendResult> result = HandOff(at);
    if (at < 150 && !result.ok()) {  // before the first hellos were said there is no second try
      EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
      continue;
    }
    ASSERT_TRUE(result.ok()) << at << ": " << result.status();
    EXPECT_TRUE(receiver_.newest() == pages_);
  }
}

TEST_F(ResumeTest, AConnectionsFirstBytesThatChangeCostNothing) {
  const auto first_bytes = static_cast<int64_t>(EncodeHello({}).size() + EncodeJoin({{}, 1}).size());
  for (int64_t at = 0; at < first_bytes; ++at) {
    proxy_ = std::make_unique<Proxy>(receiving_->listen_address());  // that has seen no connection
    proxy_->FlipIn(/*nth=*/2, at);                                   // the first is the one for control
    const absl::StatusOr<SendResult> result = HandOff(at, /*page_bytes_max=*/4 << 10);  // on one connection
    ExpectComplete(result, at + 1);
    if (HasFatalFailure()) return;
    EXPECT_EQ(proxy_->faults(), 1);
  }
}

TEST_F(ResumeTest, TheTrailerIsSaidOnceThoughItIsKnownWhileTheConnectionIsMadeAgain) {
  RawSocket listener = RawSocket::Listen();
  Outcome out = Begin(*sender_, RequestOf({}, listener.address()));
  const auto greet = [&] {
    RawSocket control = listener.Accept();
    control.Write(EncodeHello({}));
    control.Expect<HelloFrame>();
    return control;
  };
  const std::string accept = EncodeAccept({1 << 20, 4, "ticket", PageBitmap(0)});
  {
    RawSocket control = greet();
    control.Expect<OfferFrame>();
    control.Write(accept);
    EXPECT_EQ(out.ticket.get(), "ticket");
  }
  RawSocket control = greet();
  control.Expect<JoinFrame>();
  sender_->Finish(out.id, NothingMore());
  control.Write(EncodeJoined({false, PageBitmap(0)}) + accept);
  control.Expect<TrailerFrame>();
  control.Write(EncodeExtended({PageBitmap(0)}));
  control.Write(EncodeEmpty(FrameType::kDone));
  EXPECT_TRUE(out.done.get().ok());
  EXPECT_EQ(control.ReadToEnd().find(EncodeTrailer(NothingMore())), std::string::npos);
}

/// Jain's index of what 16 senders have got by the time the first has everything: 1 when all have got as much, 1/16
/// when one took all.
double FairnessOfManySenders(const std::vector<Page>& pages) {
  constexpr int kSenders = 16;
  struct Sender {
    Metrics registry;
    TransportMetrics metrics{&registry};
    std::unique_ptr<TcpTransport> transport;
    Outcome out;
  };
  Metrics registry;
  TransportMetrics metrics(&registry);
  TestReceiver receiver;
  receiver.hold_offers = true;
  TcpTransport::Options options;
  options.metrics = &metrics;
  options.listen = "127.0.0.1:0";
  options.receiver = &receiver;
  const std::unique_ptr<TcpTransport> receiving = *TcpTransport::Create(options);
  std::vector<std::unique_ptr<Sender>> senders;
  for (int i = 0; i < kSenders; ++i) {
    senders.push_back(std::make_unique<Sender>());
    Sender& sender = *senders.back();
    TcpTransport::Options sending;
    sending.metrics = &sender.metrics;
    sender.transport = *TcpTransport::Create(sending);
    sender.out = SendAll(*sender.transport, RequestOf(pages, receiving->listen_address()), PagesOf(pages));
  }
  receiver.WaitForOffers(kSenders);
  receiver.ReleaseOffers();
  for (auto& sender : senders) EXPECT_TRUE(sender->out.done.get().ok());
  double sum = 0, squares = 0;
  for (const double share : receiver.shares_at_first_completion()) {
    sum += share;
    squares += share * share;
  }
  return sum * sum / (kSenders * squares);
}

TEST_F(ResumeTest, ManySendersToOneAreFair) {
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(128, 64 << 10), 5);
  // On a busy machine a sender may not have begun when the first has ended: the median of several.
  std::vector<double> rounds(5);
  for (double& fairness : rounds) fairness = FairnessOfManySenders(pages);
  std::sort(rounds.begin(), rounds.end());
  EXPECT_GT(rounds[2], 0.6) << rounds[0] << " .. " << rounds[4];
}

}  // namespace
}  // namespace kvmanager::tcp
