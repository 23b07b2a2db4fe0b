#include "client/device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/handles.h"
#include "kvmanager/memory/device_region.h"

namespace kvmanager::client {
namespace {

constexpr int kAbandonMsMin = 1, kAbandonMsMax = 250;
constexpr int kLooksPerStall = 8;

/// Values only grow; any thread.
class Newest {
 public:
  void Note(uint64_t value) {
    uint64_t seen = value_.load(std::memory_order_relaxed);
    while (seen < value && !value_.compare_exchange_weak(seen, value)) {
    }
  }
  uint64_t value() const { return value_.load(); }

 private:
  std::atomic<uint64_t> value_{0};
};

/// Sees the end of a connection while the engine's thread is elsewhere, and abandons `done` from then on: a daemon that
/// still runs may overwrite it. Ends the connection where a stream waits for `done` and that has not moved for
/// stall_ms, though the engine's streams have written all that they were to write.
class Watcher {
 public:
  Watcher(GuardedFd socket, SharedSemaphores* words, int64_t stall_ms)
      : socket_(std::move(socket)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        words_(*words),
        stall_(std::chrono::milliseconds(stall_ms)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~Watcher() {
    if (forks_ != ForkCount()) {
      new std::thread(std::move(thread_));  // it runs in the parent
      return;
    }
    stop_.store(true);
    Wake();
    thread_.join();
    close(wake_);
  }
  Watcher(const Watcher&) = delete;

  void WillWrite(SharedSemaphores::Word word, uint64_t value) {
    (word == SharedSemaphores::Word::kReady ? ready_ : released_).Note(value);
  }
  void WaitsForDone(uint64_t value) { awaited_.Note(value); }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  void Abandon() {
    lost_.store(true, std::memory_order_release);
    Wake();
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
  }
  void Run() {
    while (!stop_.load() && !lost()) {
      // POLLRDHUP alone: what the connection reads is none of this thread's business.
      pollfd fds[] = {{socket_.get(), POLLRDHUP, 0}, {wake_, POLLIN, 0}};
      const int look_ms = static_cast<int>(std::max<int64_t>(1, stall_ / std::chrono::milliseconds(kLooksPerStall)));
      if (poll(fds, 2, look_ms) < 0 && errno != EINTR) break;
      if (fds[0].revents != 0) lost_.store(true, std::memory_order_release);
      if (Stalled()) {
        // The words of a daemon that goes on later are of no use: what waited for them has passed.
        shutdown(socket_.get(), SHUT_RDWR);
        lost_.store(true, std::memory_order_release);
      }
    }
    for (int pause_ms = kAbandonMsMin; !stop_.load(); pause_ms = std::min(2 * pause_ms, kAbandonMsMax)) {
      words_.Abandon(SharedSemaphores::Word::kDone);
      uint64_t drained;
      (void)!read(wake_, &drained, sizeof drained);
      if (stop_.load()) return;
      pollfd wake{wake_, POLLIN, 0};
      poll(&wake, 1, pause_ms);
    }
  }

  bool Stalled() {
    const auto now = std::chrono::steady_clock::now();
    const uint64_t done = words_.Load(SharedSemaphores::Word::kDone);
    const bool owes = words_.Load(SharedSemaphores::Word::kReady) < ready_.value() ||
                      words_.Load(SharedSemaphores::Word::kReleased) < released_.value();
    if (owes || done >= awaited_.value() || done != done_seen_) {
      done_seen_ = done;
      moved_ = now;
    }
    return now - moved_ >= stall_;
  }

  const uint64_t forks_ = ForkCount();
  const GuardedFd socket_;  // a duplicate: seen by this thread alone
  const int wake_;
  SharedSemaphores& words_;
  const std::chrono::nanoseconds stall_;
  Newest ready_, released_, awaited_;  // as the engine's streams will write or want them
  // The thread's.
  uint64_t done_seen_ = 0;
  std::chrono::steady_clock::time_point moved_ = std::chrono::steady_clock::now();
  std::atomic<bool> stop_{false}, lost_{false};
  std::thread thread_;
};

class DeviceArenaImpl final : public ArenaHandle {
 public:
  DeviceArenaImpl(std::shared_ptr<Connection> connection, api::Arena::Client cap, uint32_t id,
                  std::shared_ptr<const Device> device, std::unique_ptr<DeviceRegion> region)
      : ArenaHandle(std::move(connection), std::move(cap), id),
        device_(std::move(device)),
        region_(std::move(region)) {}
  absl::Span<uint8_t> data() const override { return {region_->data(), region_->slab_bytes()}; }

 private:
  const std::shared_ptr<const Device> device_;  // shared by the device's handles
  const std::unique_ptr<DeviceRegion> region_;
};

class DeviceClientImpl final : public DeviceClient {
 public:
  DeviceClientImpl(std::shared_ptr<Connection> connection, api::DeviceStream::Client cap, DeviceDescription description,
                   std::shared_ptr<const Device> device, std::unique_ptr<SharedSemaphores> words, GuardedFd socket)
      : description_(std::move(description)),
        device_(std::move(device)),
        words_(std::move(words)),
        handle_(std::in_place, std::move(connection), std::move(cap)),
        watcher_(std::in_place, std::move(socket), words_.get(), handle_->connection().options().deadline_ms) {}

  ~DeviceClientImpl() override {
    handle_.reset();
    // Whatever still waits passes, however late the daemon's stream writes.
    watcher_->Abandon();
    words_->Unpin();
    watcher_.reset();
  }

  const DeviceDescription& description() const override { return description_; }
  const Device& device() const override { return *device_; }
  SharedSemaphores& words() override { return *words_; }
  bool lost() const override { return watcher_->lost(); }
  absl::Status EnqueueReady(CUstream_st* stream, uint64_t value) override {
    return Write(stream, SharedSemaphores::Word::kReady, value);
  }
  absl::Status EnqueueReleased(CUstream_st* stream, uint64_t epoch) override {
    return Write(stream, SharedSemaphores::Word::kReleased, epoch);
  }
  absl::Status EnqueueWaitDone(CUstream_st* stream, uint64_t value) override {
    watcher_->WaitsForDone(value);
    return device_->EnqueueWait(stream, words_->Address(SharedSemaphores::Word::kDone), value);
  }

  absl::StatusOr<std::unique_ptr<Arena>> CreateArena(uint64_t bytes) override {
    KV_RETURN_IF_ERROR(handle_->Usable());
    Connection& connection = handle_->connection();
    auto request = connection.daemon().createDeviceArenaRequest();
    request.setDevice(description_.ordinal);
    request.setBytes(bytes);
    struct Made {
      api::Arena::Client cap;
      uint32_t id;
      uint64_t bytes;
    };
    using Result = absl::StatusOr<Made>;
    auto made = connection.Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return Made{response.getArena(), response.getId(), response.getBytes()};
    });
    if (!made.ok()) return made.status();
    KV_ASSIGN_OR_RETURN(const int fd, DescriptorOf(connection, made->cap));
    KV_ASSIGN_OR_RETURN(auto region, DeviceRegion::Reserve(device_.get(), made->bytes, /*slabs=*/1));
    KV_RETURN_IF_ERROR(region->Import(0, fcntl(fd, F_DUPFD_CLOEXEC, 0), /*writable=*/true));
    return std::make_unique<DeviceArenaImpl>(handle_->shared_connection(), std::move(made->cap), made->id, device_,
                                             std::move(region));
  }

  absl::StatusOr<int> MapSlab(uint32_t cache_id, uint32_t slab) override {
    using Result = absl::StatusOr<api::Slab::Client>;
    KV_RETURN_IF_ERROR(handle_->Usable());
    auto request = handle_->cap().mapSlabRequest();
    request.setCacheId(cache_id);
    request.setSlab(slab);
    KV_ASSIGN_OR_RETURN(auto cap, handle_->connection().Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return response.getSlab();
    }));
    KV_ASSIGN_OR_RETURN(const int fd, DescriptorOf(handle_->connection(), cap));
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
  }

  absl::StatusOr<uint64_t> Copy(const TensorView& from, const TensorView& to, uint64_t ready) override {
    using Result = absl::StatusOr<uint64_t>;
    KV_RETURN_IF_ERROR(handle_->Usable());
    if (from.arena == nullptr || to.arena == nullptr) return InvalidField("arena", "none", "a device arena");
    if (from.bytes != to.bytes)
      return InvalidField("bytes of `to`", to.bytes, absl::StrCat(from.bytes, ", as of `from`"));
    auto request = handle_->cap().copyRequest();
    auto copy = request.initRequest();
    const auto offset = [](const TensorView& view) {
      return static_cast<uint64_t>(static_cast<uint8_t*>(view.data) - view.arena->data().data());
    };
    copy.setFromArena(static_cast<const ArenaHandle*>(from.arena)->id());
    copy.setFromOffset(offset(from));
    copy.setToArena(static_cast<const ArenaHandle*>(to.arena)->id());
    copy.setToOffset(offset(to));
    copy.setBytes(from.bytes);
    copy.setReady(ready);
    return handle_->connection().Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return response.getDone();
    });
  }

 private:
  absl::Status Write(CUstream_st* stream, SharedSemaphores::Word word, uint64_t value) {
    watcher_->WillWrite(word, value);
    return device_->EnqueueWrite(stream, words_->Address(word), value);
  }

  const DeviceDescription description_;
  const std::shared_ptr<const Device> device_;  // shared with the arenas, which may be destroyed later
  const std::unique_ptr<SharedSemaphores> words_;
  std::optional<Handle<api::DeviceStream::Client>> handle_;
  std::optional<Watcher> watcher_;
};

struct Opened {
  api::DeviceStream::Client cap;
  DeviceDescription description;
};

absl::StatusOr<Opened> Ask(Connection& connection, int ordinal) {
  using Result = absl::StatusOr<Opened>;
  auto request = connection.daemon().openDeviceRequest();
  request.setOrdinal(ordinal);
  return connection.Call<Result>(std::move(request), [](auto& response) -> Result {
    KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
    const auto info = response.getInfo();
    DeviceDescription description{.ordinal = info.getOrdinal(),
                                  .name = ToString(info.getName()),
                                  .pool_bytes = info.getPoolBytes(),
                                  .slab_bytes = info.getSlabBytes(),
                                  .slabs = info.getSlabs(),
                                  .samples_queries = info.getSamplesQueries()};
    if (info.getUuid().size() != description.uuid.size()) {
      return absl::InternalError(absl::StrCat("the daemon's name of a GPU has ", info.getUuid().size(),
                                              " bytes, expected ", description.uuid.size()));
    }
    std::memcpy(description.uuid.data(), info.getUuid().begin(), description.uuid.size());
    return Opened{response.getStream(), std::move(description)};
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceClient>> DeviceClient::Open(Client* client, int ordinal) {
  const std::shared_ptr<Connection> connection = ConnectionOf(client);
  KV_RETURN_IF_ERROR(connection->Usable());
  KV_ASSIGN_OR_RETURN(Opened opened, Ask(*connection, ordinal));
  auto device = Device::OpenByUuid(opened.description.uuid);
  if (!device.ok()) {
    return absl::Status(
        device.status().code(),
        absl::StrCat("the daemon's GPU ", ordinal, " (", opened.description.name, "): ", device.status().message()));
  }
  KV_ASSIGN_OR_RETURN(const int fd, DescriptorOf(*connection, opened.cap));
  KV_ASSIGN_OR_RETURN(auto words, SharedSemaphores::Import(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
  KV_RETURN_IF_ERROR(words->Pin(device->get()));
  GuardedFd socket = connection->DuplicateSocket();
  if (!socket.valid())
    return absl::ResourceExhaustedError(absl::StrCat("duplicating a socket: ", std::strerror(errno)));
  return std::make_unique<DeviceClientImpl>(connection, std::move(opened.cap), std::move(opened.description),
                                            std::shared_ptr<const Device>(*std::move(device)), std::move(words),
                                            std::move(socket));
}

}  // namespace kvmanager::client
