#include "client/fake_daemon.h"

#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/debug.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager::client {
namespace {

void SetFieldError(api::Status::Builder status, const char* field, const char* value, const char* bound) {
  status.setCode(3);
  status.setMessage(kj::str(field, " is ", value, ", must be ", bound));
  status.setField(field);
  status.setValue(value);
  status.setBound(bound);
}

/// A promise that never comes; its destruction counts as a cancellation.
template <typename Context>
kj::Promise<void> Held(FakeDaemon& daemon, Context context) {
  context.allowCancellation();
  daemon.Change([](auto& seen) { ++seen.calls_held; });
  return kj::Promise<void>(kj::NEVER_DONE).attach(kj::defer([&daemon] {
    daemon.Change([](auto& seen) { ++seen.calls_cancelled; });
  }));
}

class ArenaServer final : public api::Arena::Server {
 public:
  ArenaServer(FakeDaemon& daemon, uint64_t bytes)
      : daemon_(daemon), fd_(::memfd_create("arena", MFD_CLOEXEC)), bytes_(bytes) {
    KJ_SYSCALL(::ftruncate(fd_, off_t(bytes)));
    data_ = static_cast<uint8_t*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    daemon_.Change([](auto& seen) { ++seen.arenas_alive; });
  }
  ~ArenaServer() {
    ::munmap(data_, bytes_);
    daemon_.Change([](auto& seen) { --seen.arenas_alive; });
  }
  kj::Maybe<int> getFd() override { return int(fd_); }
  uint8_t* data() { return data_; }

 private:
  FakeDaemon& daemon_;
  kj::AutoCloseFd fd_;
  uint64_t bytes_;
  uint8_t* data_;
};

class HandOffServer final : public api::HandOff::Server {
 public:
  explicit HandOffServer(uint64_t room_ms) : room_ms_(room_ms) {}
  kj::Promise<void> finish(FinishContext context) override {
    auto reply = context.getResults().initReply();
    reply.setTicket(context.getParams().getBlob());
    reply.setPagesSent(room_ms_);
    reply.setResumes(2);
    return kj::READY_NOW;
  }

 private:
  const uint64_t room_ms_;
};

class SequenceServer final : public api::Sequence::Server {
 public:
  SequenceServer(FakeDaemon& daemon, uint64_t id) : daemon_(daemon), id_(id) {
    daemon_.Change([](auto& seen) { ++seen.sequences_alive; });
  }
  ~SequenceServer() {
    daemon_.Change([](auto& seen) { --seen.sequences_alive; });
  }

  kj::Promise<void> fork(ForkContext context) override {
    auto reply = context.getResults().initReply();
    reply.setSequence(kj::heap<SequenceServer>(daemon_, id_ + 1000));
    reply.setSequenceId(id_ + 1000);
    return kj::READY_NOW;
  }
  kj::Promise<void> crop(CropContext context) override {
    if (context.getParams().getTokens() > 100)
      SetFieldError(context.getResults().initStatus(), "tokens", "101", "at most 100");
    return kj::READY_NOW;
  }
  kj::Promise<void> publish(PublishContext context) override {
    auto reply = context.getResults().initReply();
    reply.setPublished(context.getParams().getNames().size());
    return kj::READY_NOW;
  }
  kj::Promise<void> handOff(HandOffContext context) override {
    if (context.getParams().getPeer() == "held:1") return Held(daemon_, context);
    auto reply = context.getResults().initReply();
    reply.setTicket(context.getParams().getBlob());
    reply.setPagesSent(context.getParams().getTimeoutMs());
    return kj::READY_NOW;
  }
  kj::Promise<void> beginHandOff(BeginHandOffContext context) override {
    if (context.getParams().getPeer() == "held:1") return Held(daemon_, context);
    if (context.getParams().getTokens() > 100) {
      SetFieldError(context.getResults().initStatus(), "tokens", "101", "at most 100");
      return kj::READY_NOW;
    }
    context.getResults().setTicket(kj::StringPtr("early").asBytes());
    context.getResults().setHandOff(kj::heap<HandOffServer>(context.getParams().getRoomMs()));
    return kj::READY_NOW;
  }
  kj::Promise<void> info(InfoContext context) override {
    context.getResults().initInfo().setSequenceId(id_);
    return kj::READY_NOW;
  }

 private:
  FakeDaemon& daemon_;
  const uint64_t id_;
};

class SlabServer final : public api::Slab::Server {
 public:
  SlabServer(FakeDaemon& daemon, uint32_t slab)
      : daemon_(daemon), fd_(::memfd_create("kv_fake_slab", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    const std::string bytes(slab == FakeDaemon::kShortSlab ? FakeDaemon::kSlabBytes / 2 : FakeDaemon::kSlabBytes,
                            char(slab));
    KJ_REQUIRE(::write(fd_, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
    const int seals = slab == FakeDaemon::kOpenSlab ? 0 : F_SEAL_SHRINK | F_SEAL_GROW;
    KJ_SYSCALL(::fcntl(fd_, F_ADD_SEALS, seals));
    if (slab == FakeDaemon::kBareSlab) fd_ = nullptr;
    daemon_.Change([](auto& seen) { seen.slabs_sent_most = std::max(seen.slabs_sent_most, ++seen.slabs_sent); });
  }
  ~SlabServer() {
    daemon_.Change([](auto& seen) { --seen.slabs_sent; });
  }
  kj::Maybe<int> getFd() override {
    if (fd_.get() < 0) return nullptr;
    return fd_.get();
  }

 private:
  FakeDaemon& daemon_;
  kj::AutoCloseFd fd_;
};

template <typename Context>
kj::Promise<void> MapSlab(FakeDaemon& daemon, Context& context) {
  const uint32_t slab = context.getParams().getSlab();
  daemon.Change([](auto& seen) { ++seen.slabs_asked; });
  auto results = context.getResults();
  if (slab == FakeDaemon::kRefusedSlab) {
    results.initStatus().setCode(9);
    return kj::READY_NOW;
  }
  results.setSlab(kj::heap<SlabServer>(daemon, slab));
  results.setBytes(FakeDaemon::kSlabBytes);
  return kj::READY_NOW;
}

class BlocksLeaseServer final : public api::BlocksLease::Server {
 public:
  explicit BlocksLeaseServer(FakeDaemon& daemon) : daemon_(daemon) {
    daemon_.Change([](auto& seen) { ++seen.leases_alive; });
  }
  ~BlocksLeaseServer() {
    daemon_.Change([](auto& seen) { --seen.leases_alive; });
  }
  kj::Promise<void> release(ReleaseContext context) override {
    const uint32_t corrupt = context.getParams().getCorruptBlock();
    daemon_.Change([&](auto& seen) { seen.corrupt_block = corrupt; });
    if (corrupt == 1) context.getResults().initStatus().setCode(14);
    return kj::READY_NOW;
  }
  kj::Promise<void> mapSlab(MapSlabContext context) override { return MapSlab(daemon_, context); }

 private:
  FakeDaemon& daemon_;
};

/// Of one connection.
struct Arenas {
  std::map<uint32_t, ArenaServer*> by_id;
  uint32_t next_id = 1;
};

class CacheServer final : public api::Cache::Server {
 public:
  CacheServer(FakeDaemon& daemon, std::shared_ptr<Arenas> arenas) : daemon_(daemon), arenas_(std::move(arenas)) {
    daemon_.Change([](auto& seen) { ++seen.caches_alive; });
  }
  ~CacheServer() {
    daemon_.Change([](auto& seen) { --seen.caches_alive; });
  }

  static void Describe(api::CacheConfig::Reader config, api::CacheInfo::Builder info) {
    info.setCacheId(7);
    info.setConfig(config);
    const kj::byte digest[32] = {1, 2, 3};
    info.setDigest(capnp::Data::Reader(digest, 32));
  }

  kj::Promise<void> match(MatchContext context) override {
    const auto requests = context.getParams().getRequests();
    auto results = context.getResults().initResults(requests.size());
    for (uint i = 0; i < requests.size(); ++i) {
      results[i].setHitBlocks(requests[i].getPrefix().size());
      results[i].setReason(static_cast<api::MissReason>(i));
    }
    return kj::READY_NOW;
  }
  kj::Promise<void> createSequences(CreateSequencesContext context) override {
    const auto requests = context.getParams().getRequests();
    auto replies = context.getResults().initReplies(requests.size());
    for (uint i = 0; i < requests.size(); ++i) {
      if (requests[i].getPrefix().size() == 3) {  // the fake's stand-in for a request that is refused
        SetFieldError(replies[i].initStatus(), "prefix", "3", "not 3");
        continue;
      }
      replies[i].setSequence(kj::heap<SequenceServer>(daemon_, i + 1));
      replies[i].setSequenceId(i + 1);
      replies[i].initMatch().setHitBlocks(requests[i].getPrefix().size());
    }
    return kj::READY_NOW;
  }
  kj::Promise<void> step(StepContext context) override {
    const auto request = context.getParams().getRequest();
    if (request.getLayer() == FakeDaemon::kHeldLayer) return Held(daemon_, context);
    auto reply = context.getResults().initReply();
    if (request.getLayer() == FakeDaemon::kRefusedLayer) {
      SetFieldError(reply.initStatus(), "layer", "98", "0..31");
      return kj::READY_NOW;
    }
    uint32_t tokens = 0;
    for (const auto entry : request.getEntries()) tokens += entry.getTokens();
    daemon_.Change([&](auto& seen) { seen.last_step_tokens = tokens; });
    reply.setRawPairs(tokens);
    const auto q = request.getQ();
    if (q.isInline()) {
      reply.setOut(q.getInline());
      if (request.getWantLse()) reply.initLse(q.getInline().size() / 128 / 4 * 4);  // d = 128, float32
    } else if (q.isArena()) {
      const auto from = q.getArena(), to = request.getOut().getArena();
      std::memcpy(arenas_->by_id.at(to.getId())->data() + to.getOffset(),
                  arenas_->by_id.at(from.getId())->data() + from.getOffset(), from.getBytes());
    }
    return kj::READY_NOW;
  }
  kj::Promise<void> readBlocks(ReadBlocksContext context) override {
    const FakeDaemon::Blocks blocks = daemon_.blocks();
    const auto data = [](const std::string& bytes) { return kj::StringPtr(bytes.data(), bytes.size()).asBytes(); };
    auto reply = context.getResults().initReply();
    reply.setBlocks(blocks.blocks);
    reply.setBytes(blocks.bytes);
    reply.setRaw(data(blocks.raw));
    reply.setPlaces(data(blocks.places));
    reply.setChecksums(data(blocks.checksums));
    if (blocks.lease) reply.setLease(kj::heap<BlocksLeaseServer>(daemon_));
    reply.setUnmap(kj::arrayPtr(blocks.unmap.data(), blocks.unmap.size()));
    return kj::READY_NOW;
  }
  kj::Promise<void> bindSlabs(BindSlabsContext context) override {
    const uint64_t bytes = context.getParams().getBytes();
    daemon_.Change([&](auto& seen) { seen.bound_bytes = bytes; });
    const std::vector<uint32_t> bound = daemon_.blocks().bound;
    context.getResults().setSlabs(
        kj::arrayPtr(bound.data(), std::min<uint64_t>(bound.size(), bytes / FakeDaemon::kSlabBytes)));
    return kj::READY_NOW;
  }
  kj::Promise<void> mapSlab(MapSlabContext context) override { return MapSlab(daemon_, context); }
  kj::Promise<void> claim(ClaimContext context) override {
    auto results = context.getResults();
    results.setTokens(64);
    results.setBlob(context.getParams().getTicket());
    auto reply = results.initReply();
    reply.setSequence(kj::heap<SequenceServer>(daemon_, 42));
    reply.setSequenceId(42);
    return kj::READY_NOW;
  }

 private:
  FakeDaemon& daemon_;
  std::shared_ptr<Arenas> arenas_;
};

class AdminServer final : public api::Admin::Server {
 public:
  explicit AdminServer(FakeDaemon& daemon) : daemon_(daemon) {}
  kj::Promise<void> status(StatusContext context) override {
    auto status = context.getResults().initStatus();
    status.setVersion("fake");
    auto pool = status.initPools(1)[0];
    pool.setTier("host");
    pool.setCapacityBytes(1 << 30);
    return kj::READY_NOW;
  }
  kj::Promise<void> caches(CachesContext context) override {
    capnp::MallocMessageBuilder message;
    auto config = message.initRoot<api::CacheConfig>();
    config.setModel("m");
    CacheServer::Describe(config.asReader(), context.getResults().initCaches(1)[0]);
    return kj::READY_NOW;
  }
  kj::Promise<void> sequences(SequencesContext context) override {
    context.getResults().initSequences(2)[1].setTokens(77);
    return kj::READY_NOW;
  }
  kj::Promise<void> peers(PeersContext context) override {
    const auto named = context.getParams().getPeers();
    auto peers = context.getResults().initPeers(1 + named.size());
    peers[0].setPeer("10.0.0.2:7000");
    if (context.getParams().getLoad()) {
      peers[0].initLoad().setFreeBytes(77);
      peers[0].getLoad().setQueuedBytes(5);
    }
    for (uint i = 0; i < named.size(); ++i) {
      peers[1 + i].setPeer(named[i]);
      peers[1 + i].initLoadError().setCode(14);
      peers[1 + i].getLoadError().setMessage("gone");
    }
    return kj::READY_NOW;
  }
  kj::Promise<void> drain(DrainContext) override {
    daemon_.Change([](auto& seen) { seen.draining = true; });
    return kj::READY_NOW;
  }
  kj::Promise<void> undrain(UndrainContext) override {
    daemon_.Change([](auto& seen) { seen.draining = false; });
    return kj::READY_NOW;
  }
  kj::Promise<void> purge(PurgeContext context) override {
    const bool all = context.getParams().getAll();
    daemon_.Change([&](auto& seen) { seen.purge_all = all; });
    context.getResults().setBlocks(all ? 9 : context.getParams().getCacheId());
    return kj::READY_NOW;
  }

 private:
  FakeDaemon& daemon_;
};

class DaemonServer final : public api::Daemon::Server {
 public:
  DaemonServer(FakeDaemon& daemon, uint64_t boot_epoch) : daemon_(daemon), boot_epoch_(boot_epoch) {}

  kj::Promise<void> hello(HelloContext context) override {
    if (daemon_.behaviour().silent_hello) return Held(daemon_, context);
    const std::string name(context.getParams().getRequest().getClient().cStr());
    daemon_.Change([&](auto& seen) { seen.client_name = name; });
    auto reply = context.getResults().initReply();
    reply.setApiMajor(daemon_.behaviour().api_major);
    reply.setBootEpoch(boot_epoch_);
    reply.setMessageBytesMax(daemon_.behaviour().message_bytes_max);
    reply.setPeerAddress("127.0.0.1:7000");
    const auto& features = daemon_.behaviour().features;
    auto said = reply.initFeatures(uint(features.size()));
    for (uint i = 0; i < features.size(); ++i) said.set(i, features[i].c_str());
    return kj::READY_NOW;
  }
  kj::Promise<void> openCache(OpenCacheContext context) override {
    const auto config = context.getParams().getConfig();
    auto results = context.getResults();
    if (config.getCodec() == "nope") {
      SetFieldError(results.initStatus(), "codec", "nope", "one of raw, hack");
      return kj::READY_NOW;
    }
    results.setCache(kj::heap<CacheServer>(daemon_, arenas_));
    CacheServer::Describe(config, results.initInfo());
    return kj::READY_NOW;
  }
  kj::Promise<void> createArena(CreateArenaContext context) override {
    auto arena = kj::heap<ArenaServer>(daemon_, context.getParams().getBytes());
    const uint32_t id = arenas_->next_id++;
    arenas_->by_id[id] = arena.get();
    context.getResults().setArena(kj::mv(arena));
    context.getResults().setId(id);
    return kj::READY_NOW;
  }
  kj::Promise<void> admin(AdminContext context) override {
    context.getResults().setAdmin(kj::heap<AdminServer>(daemon_));
    return kj::READY_NOW;
  }
  kj::Promise<void> ping(PingContext context) override {
    if (daemon_.pings_held()) return Held(daemon_, context);
    return kj::READY_NOW;
  }

 private:
  FakeDaemon& daemon_;
  const uint64_t boot_epoch_;
  std::shared_ptr<Arenas> arenas_ = std::make_shared<Arenas>();  // shared with the connection's caches
};

struct ServerConnection {
  ServerConnection(FakeDaemon& daemon, uint64_t boot_epoch, kj::Own<kj::AsyncCapabilityStream> s)
      : stream(kj::mv(s)),
        network(*stream, 1, capnp::rpc::twoparty::Side::SERVER),
        rpc(capnp::makeRpcServer(network, kj::heap<DaemonServer>(daemon, boot_epoch))) {}
  kj::Own<kj::AsyncCapabilityStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
};

class IgnoreErrors final : public kj::TaskSet::ErrorHandler {
  void taskFailed(kj::Exception&&) override {}
};

}  // namespace

FakeDaemon::FakeDaemon(const Behaviour& behaviour) : behaviour_(behaviour) {
  char name[] = "/tmp/kv_fake_XXXXXX";
  KJ_REQUIRE(::mkdtemp(name) != nullptr);
  path_ = std::string(name) + "/s";
  address_ = "unix:" + path_;
  Start();
}

FakeDaemon::~FakeDaemon() {
  Stop();
  ::unlink(path_.c_str());
  ::rmdir(path_.substr(0, path_.size() - 2).c_str());
}

void FakeDaemon::Start() {
  int listening;
  if (behaviour_.tcp) {
    KJ_SYSCALL(listening = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(at);
    KJ_SYSCALL(::bind(listening, reinterpret_cast<sockaddr*>(&at), sizeof(at)));
    KJ_SYSCALL(::getsockname(listening, reinterpret_cast<sockaddr*>(&at), &length));
    address_ = "tcp:127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  } else {
    ::unlink(path_.c_str());
    KJ_SYSCALL(listening = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path, path_.data(), path_.size());
    KJ_SYSCALL(::bind(listening, reinterpret_cast<sockaddr*>(&at), sizeof(at)));
  }
  KJ_SYSCALL(::listen(listening, 16));
  int pipe[2];
  KJ_SYSCALL(::pipe2(pipe, O_CLOEXEC | O_NONBLOCK));
  stop_fd_ = pipe[1];
  const uint64_t boot_epoch = 1000 + boots_++;
  thread_ = std::thread([this, listening, stop = pipe[0], boot_epoch] { Run(listening, stop, boot_epoch); });
}

void FakeDaemon::Stop() {
  if (!thread_.joinable()) return;
  ::close(stop_fd_);
  thread_.join();
}

void FakeDaemon::Run(int listening_fd, int stop_fd, uint64_t boot_epoch) {
  auto io = kj::setupAsyncIo();
  auto stop = io.lowLevelProvider->wrapInputFd(kj::AutoCloseFd(stop_fd));
  kj::AutoCloseFd listening(listening_fd);
  kj::UnixEventPort::FdObserver observer(io.unixEventPort, listening, kj::UnixEventPort::FdObserver::OBSERVE_READ);
  IgnoreErrors ignore;
  kj::TaskSet tasks(ignore);
  kj::Function<kj::Promise<void>()> accept = [&]() -> kj::Promise<void> {
    for (;;) {
      const int fd = ::accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) return observer.whenBecomesReadable().then([&] { return accept(); });
      using Flags = kj::LowLevelAsyncIoProvider::Flags;
      auto connection = kj::heap<ServerConnection>(
          *this, boot_epoch,
          io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(fd), Flags::ALREADY_CLOEXEC | Flags::ALREADY_NONBLOCK));
      Change([](Seen& seen) { ++seen.connections_open; });
      auto gone = connection->network.onDisconnect().then(
          [this] { Change([](Seen& seen) { seen.mapped_at_the_end = MappedSlabs(); }); });
      tasks.add(
          gone.attach(kj::mv(connection), kj::defer([this] { Change([](Seen& seen) { --seen.connections_open; }); })));
    }
  };
  auto accepting = accept().eagerlyEvaluate([](kj::Exception&&) {});
  char byte;
  stop->tryRead(&byte, 1, 1).wait(io.waitScope);
}

FakeDaemon::Seen FakeDaemon::seen() const {
  MutexLock lock(mutex_);
  return seen_;
}

void FakeDaemon::Await(const std::function<bool(const Seen&)>& condition) const {
  MutexLock lock(mutex_);
  while (!condition(seen_)) lock.Wait(changed_);
}

void FakeDaemon::Change(const std::function<void(Seen&)>& change) {
  MutexLock lock(mutex_);
  change(seen_);
  changed_.notify_all();
}

void FakeDaemon::SetBlocks(Blocks blocks) {
  MutexLock lock(mutex_);
  blocks_ = std::move(blocks);
}

FakeDaemon::Blocks FakeDaemon::blocks() const {
  MutexLock lock(mutex_);
  return blocks_;
}

int FakeDaemon::MappedSlabs() {
  std::ifstream maps("/proc/self/maps");
  int mapped = 0;
  for (std::string line; std::getline(maps, line);) mapped += line.find("kv_fake_slab") != std::string::npos;
  return mapped;
}

void FakeDaemon::HoldPings(bool on) {
  MutexLock lock(mutex_);
  pings_held_ = on;
}

bool FakeDaemon::pings_held() const {
  MutexLock lock(mutex_);
  return pings_held_;
}

}  // namespace kvmanager::client
