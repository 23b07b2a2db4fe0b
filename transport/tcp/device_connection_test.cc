// Hand-offs out of a GPU's memory into another's, with a copier whose GPUs are this host's memory.
#include <poll.h>
#include <sys/mman.h>

#include <map>
#include <thread>

#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/memory/region.h"
#include "transport/device_copier.h"
#include "transport/tcp/local.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

constexpr GpuName kGpu = {1, 2, 3};
constexpr int kDevice = 5;

/// Copies on a thread of its own, unless it is told to hold. Fields are set before use.
class FakeCopier final : public DeviceCopier {
 public:
  struct Memory final : Source {
    std::unique_ptr<Region> region;
    uint64_t bytes = 0;
  };
  std::shared_ptr<Source> Open(const DeviceSlab& slab) override {
    auto memory = std::make_shared<Memory>();
    memory->bytes = slab.bytes;
    EXPECT_EQ(slab.gpu, kGpu);
    auto region = Region::Map(slab.fd, slab.bytes, /*writable=*/false);
    if (region.ok()) memory->region = *std::move(region);
    ++opened;
    return memory;
  }
  void Copy(int device, std::vector<std::shared_ptr<Source>> sources, std::vector<Page> pages, Copied copied) override {
    EXPECT_EQ(device, kDevice);
    auto work = [this, sources = std::move(sources), pages = std::move(pages), copied = std::move(copied)]() mutable {
      for (Page& page : pages) {
        const auto& from = static_cast<const Memory&>(*page.from);
        if (from.region == nullptr || fail) {
          return copied(FieldError(absl::StatusCode::kFailedPrecondition, "gpu", "out of reach", "one to copy from"),
                        {});
        }
        std::copy_n(from.region->data() + page.offset, page.bytes, page.to);
        page.checksum = XXH3_64bits(page.to, page.bytes) ^ (wrong ? 1 : 0);
      }
      ++copies;
      copied(absl::OkStatus(), std::move(pages));
    };
    if (!hold) return workers_.Post(WorkerPool::Priority::kEncode, std::move(work));
    MutexLock lock(mutex_);
    held_.push_back(std::move(work));
    came_.notify_all();
  }
  void Sweep() override {}
  void WaitForHeld() {
    MutexLock lock(mutex_);
    while (held_.empty()) lock.Wait(came_);
  }
  void Release() {
    MutexLock lock(mutex_);
    for (auto& work : held_) workers_.Post(WorkerPool::Priority::kEncode, std::move(work));
    held_.clear();
  }

  bool hold = false, fail = false, wrong = false;
  std::atomic<int> opened{0}, copies{0};

 private:
  Mutex mutex_;
  std::condition_variable came_;
  std::vector<absl::AnyInvocable<void()>> held_ ABSL_GUARDED_BY(mutex_);
  WorkerPool workers_{1};
};

/// A receiver whose targets are on kDevice, if the sender's pages are a GPU's.
class DeviceReceiver final : public HandOffReceiver {
 public:
  explicit DeviceReceiver(TestReceiver* inner) : inner_(inner) {}
  void Offer(std::string peer, HandOffPart first, int64_t room_ms, OfferReply reply) override {
    gpu = first.gpu;
    const bool of_gpu = first.gpu != GpuName();
    OfferReply wrapped;
    wrapped.waiting = std::move(reply.waiting);
    wrapped.done = [this, of_gpu, done = std::move(reply.done)](absl::StatusOr<Accepted> accepted) mutable {
      if (accepted.ok() && of_gpu) accepted->device = device;
      done(std::move(accepted));
    };
    inner_->Offer(std::move(peer), std::move(first), room_ms, std::move(wrapped));
  }
  ReceiverLoad Load() const override { return inner_->Load(); }
  GpuName gpu = {};
  int device = kDevice;

 private:
  TestReceiver* const inner_;
};

class DeviceConnectionTest : public testing::Test {
 protected:
  DeviceConnectionTest() {
    for (int i = 0; i < 2; ++i) {
      auto region = Region::Create({.bytes = kSlabBytes, .sharing = Region::Sharing::kReadOnly});
      EXPECT_TRUE(region.ok()) << region.status();
      std::mt19937_64 random(i);
      for (size_t at = 0; at < kSlabBytes; ++at) (*region)->data()[at] = static_cast<uint8_t>(random());
      regions_.push_back(*std::move(region));
      DeviceSlab slab;
      slab.gpu = kGpu;
      slab.name = {static_cast<uint8_t>(i + 1)};
      slab.data = regions_[i]->data();
      slab.bytes = kSlabBytes;
      slab.fd = regions_[i]->fd();
      slabs_.push_back(slab);
    }
    TcpTransport::Options sending;
    sending.metrics = &sender_metrics_;
    sender_ = *TcpTransport::Create(sending);
  }
  void Receive(bool local_connections = true, bool copier = true) {
    TcpTransport::Options options;
    options.metrics = &receiver_metrics_;
    options.listen = "127.0.0.1:0";
    options.receiver = &device_receiver_;
    options.local_connections = local_connections;
    options.device_copier = copier ? &copier_ : nullptr;
    receiving_ = *TcpTransport::Create(options);
  }
  std::vector<SendPage> PagesIn(size_t count, uint64_t seed, std::vector<Page>* bytes) {
    std::mt19937_64 random(seed);
    std::vector<SendPage> pages;
    for (uint32_t i = 0; i < count; ++i) {
      const DeviceSlab& slab = slabs_[random() % 2];
      const size_t size = 1 + random() % 2000;
      const absl::Span<const uint8_t> at(slab.data + random() % ((kSlabBytes - size) / 16) * 16, size);
      pages.push_back({i, at, XXH3_64bits(at.data(), at.size()), 0, &slab});
      bytes->emplace_back(at.begin(), at.end());
    }
    return pages;
  }
  Outcome Start(const std::vector<SendPage>& pages) {
    SendRequest request;
    request.peer = receiving_->listen_address();
    request.header.manifest = "manifest";
    request.header.gpu = kGpu;
    for (const SendPage& page : pages) request.header.page_bytes.push_back(page.bytes.size());
    return SendAll(*sender_, std::move(request), pages);
  }
  absl::StatusOr<SendResult> Send(const std::vector<SendPage>& pages) { return Start(pages).done.get(); }
  static void ExpectRefused(const absl::StatusOr<SendResult>& result) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_EQ(DetailOf(result.status()).field, "gpu");
  }
  /// A hand-off of one page of 100 bytes whose sender is the test: a control and a data connection.
  void Play(bool local = true) {
    HandOffPart part;
    part.manifest = "manifest";
    part.page_bytes = {100};
    part.gpu = kGpu;
    Token token = kToken;
    token[0] = ++tokens_;
    control_ = RawSocket::Connect(receiving_->listen_address());
    control_.Write(EncodeHello({}) + EncodeOffer(token, 0, part, ThisHost()));
    control_.Expect<HelloFrame>();
    const AcceptFrame accept = control_.Expect<AcceptFrame>();
    ASSERT_FALSE(accept.local_name.empty());
    local_name_ = accept.local_name;
    connection_ = local ? ConnectLocally(accept.local_name) : RawSocket::Connect(receiving_->listen_address());
    connection_.Write(JoinOf(1, token));
    connection_.Expect<HelloFrame>();
    connection_.Expect<JoinedFrame>();
  }
  static RawSocket ConnectLocally(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    RawSocket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address),
                        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
              0);
    return socket;
  }
  void WriteRegion(bool of_gpu, uint32_t number = 0) {
    RegionFrame region;
    region.region = number;
    region.bytes = kSlabBytes;
    if (of_gpu) region.gpu = kGpu;
    const std::string frame = EncodeRegion(region);
    EXPECT_EQ(SendWithDescriptor(connection_.fd(), RawSocket::Span(frame), slabs_[0].fd, MSG_DONTWAIT),
              static_cast<ssize_t>(frame.size()));
  }
  std::string ErrorField() {
    for (;;) {
      absl::StatusOr<Frame> frame = control_.ReadFrame();
      if (!frame.ok()) return "closed";
      if (auto* error = std::get_if<ErrorFrame>(&*frame)) return DetailOf(error->status).field;
    }
  }

  static constexpr size_t kSlabBytes = 1 << 20;
  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<DeviceSlab> slabs_;
  Metrics sender_registry_, receiver_registry_;
  TransportMetrics sender_metrics_{&sender_registry_}, receiver_metrics_{&receiver_registry_};
  FakeCopier copier_;
  TestReceiver receiver_;
  DeviceReceiver device_receiver_{&receiver_};
  std::unique_ptr<TcpTransport> receiving_, sender_;
  RawSocket control_{-1}, connection_{-1};
  std::string local_name_;  // of the receiver's Unix socket, once played
  uint8_t tokens_ = 0;
};

TEST_F(DeviceConnectionTest, PagesGoFromSlabToTargetInLargeFrames) {
  Receive();
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(5000, 1, &bytes);
  const absl::StatusOr<SendResult> result = Send(pages);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.newest() == bytes);
  EXPECT_EQ(device_receiver_.gpu, kGpu);
  EXPECT_EQ(result->pages_sent, 5000u);
  EXPECT_EQ(copier_.opened, 2);
  EXPECT_LE(copier_.copies, 1 + 5000 / static_cast<int>(kDevicePagesPerFrameMax) + 1);
  // Pages of host memory still come as before.
  std::vector<Page> others = RandomPages(std::vector<size_t>(20, 3000), 6);
  EXPECT_TRUE(SendAll(*sender_, RequestOf(others, receiving_->listen_address()), PagesOf(others)).done.get().ok());
  EXPECT_TRUE(receiver_.newest() == others);
}

TEST_F(DeviceConnectionTest, WhereNoGpuCanTakeThemTheOfferIsRefused) {
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(3, 2, &bytes);
  Receive(/*local_connections=*/false);
  ExpectRefused(Send(pages));
  Receive(/*local_connections=*/true, /*copier=*/false);
  ExpectRefused(Send(pages));
  EXPECT_EQ(receiver_.offers(), 0u);
  Receive();
  device_receiver_.device = -1;  // a receiver that is wrong itself
  EXPECT_EQ(Send(pages).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
}

TEST_F(DeviceConnectionTest, AReceiverThatKnowsOfNoGpusIsNotOffered) {
  RawSocket listener = RawSocket::Listen();
  SendRequest request;
  request.peer = listener.address();
  request.header.manifest = "manifest";
  request.header.gpu = kGpu;
  Outcome out = Begin(*sender_, std::move(request));
  RawSocket control = listener.Accept();
  HelloFrame hello;
  hello.features = 0;
  control.Write(EncodeHello(hello));
  control.Expect<HelloFrame>();
  ExpectRefused(out.done.get());
}

TEST_F(DeviceConnectionTest, UnixSocketOutOfReachIsTold) {
  RawSocket listener = RawSocket::Listen();
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(1, 8, &bytes);
  SendRequest request;
  request.peer = listener.address();
  request.header = PartOf(bytes);
  request.header.gpu = kGpu;
  Outcome out = SendAll(*sender_, std::move(request), pages);
  RawSocket control = listener.Accept();
  control.Write(EncodeHello({}));
  control.Expect<HelloFrame>();
  EXPECT_EQ(control.Expect<OfferFrame>().part.gpu, kGpu);
  PageBitmap wanted(1);
  wanted.Add(0);
  control.Write(EncodeAccept({1 << 20, 4, "ticket", wanted, "kvmanager-nobody-listens-here"}));
  ExpectRefused(out.done.get());
}

TEST_F(DeviceConnectionTest, WhatAGpuCannotCopyEndsTheHandOffWithTheReason) {
  copier_.fail = true;
  Receive();
  std::vector<Page> bytes;
  ExpectRefused(Send(PagesIn(3, 2, &bytes)));
  EXPECT_EQ(receiver_.WaitForAborts(1).size(), 1u);
}

TEST_F(DeviceConnectionTest, WrongBytesAreAskedForAgainAndThenDataLoss) {
  copier_.wrong = true;
  Receive();
  std::vector<Page> bytes;
  EXPECT_EQ(Send(PagesIn(3, 2, &bytes)).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver_metrics_.checksum_failures.Value(), kBadPagesMax + 1);
}

TEST_F(DeviceConnectionTest, TargetsAreGivenBackOnceNobodyWritesThem) {
  copier_.hold = true;
  Receive();
  std::vector<Page> bytes;
  const std::vector<SendPage> pages = PagesIn(30, 2, &bytes);
  Outcome out = Start(pages);
  copier_.WaitForHeld();
  sender_->Cancel(out.id);
  EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  // The copies are still to come. Others need not wait for them.
  const std::vector<Page> others = RandomPages(std::vector<size_t>(20, 3000), 6);
  EXPECT_TRUE(SendAll(*sender_, RequestOf(others, receiving_->listen_address()), PagesOf(others)).done.get().ok());
  EXPECT_EQ(receiver_.aborts(), 0u);
  copier_.Release();
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(copier_.copies, 1);
}

TEST_F(DeviceConnectionTest, AConnectionIsMadeAgainOnceNobodyWritesWhatTheOldOneBrought) {
  copier_.hold = true;
  Receive();
  Play();
  WriteRegion(/*of_gpu=*/true);
  const std::string announced = EncodeLocal({{0, 0, 0, XXH3_64bits(slabs_[0].data, 100)}});
  connection_.Write(announced);
  copier_.WaitForHeld();
  Token token = kToken;
  token[0] = tokens_;
  connection_ = ConnectLocally(local_name_);
  connection_.Write(JoinOf(1, token));
  connection_.Expect<HelloFrame>();
  // The transport has had time to read JOIN.
  const std::vector<Page> others = RandomPages({3000}, 6);
  EXPECT_TRUE(SendAll(*sender_, RequestOf(others, receiving_->listen_address()), PagesOf(others)).done.get().ok());
  pollfd answer = {connection_.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&answer, 1, 0), 0);
  copier_.Release();
  EXPECT_FALSE(connection_.Expect<JoinedFrame>().arrived.has(0));
  WriteRegion(/*of_gpu=*/true);
  connection_.Write(announced);
  copier_.WaitForHeld();
  copier_.Release();
  EXPECT_EQ(control_.Expect<GotFrame>().pages, std::vector<uint32_t>{0});
}

TEST_F(DeviceConnectionTest, TheEndOfTheTransportWaitsForWhatAGpuWrites) {
  copier_.hold = true;
  Receive();
  std::vector<Page> bytes;
  Outcome out = Start(PagesIn(30, 2, &bytes));
  copier_.WaitForHeld();
  sender_->Cancel(out.id);
  EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  std::thread ends([&] { receiving_ = nullptr; });
  copier_.Release();
  ends.join();
  EXPECT_EQ(receiver_.WaitForAborts(1)[0].code(), absl::StatusCode::kCancelled);
  receiver_.WaitUntilNoneLives();
}

TEST_F(DeviceConnectionTest, PostedPagesAreWhereTheirOfferSays) {
  Receive();
  std::vector<Page> bytes;
  for (const auto& change : std::map<int, std::function<void(SendPage&)>>{
           {0, [](SendPage& page) { page.slab = nullptr; }},
           {1,
            [this](SendPage& page) {
              page.bytes = {slabs_[0].data + kSlabBytes - 16, page.bytes.size()};
            }},
           {2, [](SendPage& page) {
              page.bytes = {page.bytes.data() + 1, page.bytes.size()};
            }}}) {
    bytes.clear();
    std::vector<SendPage> pages = PagesIn(1, 4, &bytes);
    change.second(pages[0]);
    EXPECT_EQ(Send(pages).status().code(), absl::StatusCode::kInvalidArgument) << change.first;
  }
  std::vector<Page> others = RandomPages({3000}, 6);
  std::vector<SendPage> posted = PagesOf(others);
  posted[0].slab = &slabs_[0];
  EXPECT_EQ(SendAll(*sender_, RequestOf(others, receiving_->listen_address()), posted).done.get().status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(DeviceConnectionTest, HostileConnectionsEndTheHandOff) {
  Receive();
  const uint64_t checksum = XXH3_64bits(slabs_[0].data, 100);
  Play();
  WriteRegion(/*of_gpu=*/true);
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}}));
  control_.Expect<GotFrame>();  // so it goes well

  Play();
  WriteRegion(/*of_gpu=*/false);
  EXPECT_EQ(ErrorField(), "REGION gpu");
  Play();
  WriteRegion(/*of_gpu=*/true);
  WriteRegion(/*of_gpu=*/true);
  EXPECT_EQ(ErrorField(), "region");
  Play();
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "region");
  for (const uint64_t offset : {uint64_t{kSlabBytes - 96}, uint64_t{kSlabBytes + 16}, ~uint64_t{15}, uint64_t{8}}) {
    Play();
    WriteRegion(/*of_gpu=*/true);
    connection_.Write(EncodeLocal({{0, 0, offset, checksum}}));
    EXPECT_EQ(ErrorField(), "offset");
  }
  Play();
  WriteRegion(/*of_gpu=*/true);
  connection_.Write(EncodeLocal({{0, 0, 0, checksum}, {0, 0, 0, checksum}}));
  EXPECT_EQ(ErrorField(), "page");
  // Bytes in a stream cannot be written into a GPU.
  const std::vector<Page> pages = RandomPages({100}, 1);
  for (const bool local : {true, false}) {
    Play(local);
    connection_.Write(PagesFrameOf(pages, {0}));
    EXPECT_EQ(ErrorField(), "frame type on a data connection");
  }
  EXPECT_EQ(receiver_.completions(), 0u);
}

}  // namespace
}  // namespace kvmanager::tcp
