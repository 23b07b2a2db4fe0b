// Connection: one client's RPC connection, the event loop that drives it, and how a call is waited for.
//
// Invariants
//  1. A thread has at most one ThreadLoop, which all of its connections share; it goes with the last of them.
//  2. KJ objects are touched on the loop's thread alone, and in the process that made them: after fork() the child
//     leaks what it inherited, since destroying it would edit the parent's epoll set, which both share.
//  3. A connection's generation counts its links. A handle remembers the generation that it was made in, and is void in
//     others.
//  4. kj::Exception ends here: everything that leaves is an absl::Status.
//
// Owner: shared by the Client, its handles and its pending calls, because each may be destroyed last.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-unix.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/dial.h"
#include "client/fork_guard.h"
#include "client/wire.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/api/socket_stream.h"

namespace kvmanager::client {

class HostSlabs;

/// The event loop of this thread's connections.
class ThreadLoop {
 public:
  /// This thread's. FAILED_PRECONDITION if something else on the thread owns a KJ event loop.
  static absl::StatusOr<std::shared_ptr<ThreadLoop>> OfThisThread();

  ThreadLoop() : loop(port), scope(std::in_place, loop) {}

  kj::UnixEventPort port;
  kj::EventLoop loop;
  std::optional<kj::WaitScope> scope;  // none once a child has disowned the loop
  /// Answers and deadlines so far of calls that are waited for later. Who looks at several of them in turn drives the
  /// loop, and so the ones it has looked at: it blocks only if this has not grown since before it began.
  uint64_t news = 0;
  const uint64_t forks = ForkCount();
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  static absl::StatusOr<std::shared_ptr<Connection>> Open(Address address, const Client::Options& options);
  ~Connection();
  Connection(const Connection&) = delete;

  const Client::Options& options() const { return options_; }
  const Address& address() const { return address_; }
  uint64_t generation() const { return generation_; }
  uint64_t boot_epoch() const { return boot_epoch_; }
  uint64_t message_bytes_max() const { return message_bytes_max_; }
  const std::string& peer_address() const { return peer_address_; }
  /// The daemon says where pages lie in its memory: Cache::MapBlocksAsync.
  bool maps_blocks() const { return maps_blocks_; }
  /// Of this link. Never nullptr.
  const std::shared_ptr<HostSlabs>& slabs() const { return slabs_; }
  /// The daemon has Admin on another socket than this one.
  bool admin_elsewhere() const { return admin_elsewhere_; }

  /// True in a child of the process that made this connection.
  bool forked() const { return forks_ != ForkCount(); }
  bool Connected();
  /// For another thread, to see its end; it does not keep the connection. REQUIRES: Usable().ok(). Not valid(), and
  /// errno set, when this process has no descriptor left.
  GuardedFd DuplicateSocket() const;
  absl::Status Reconnect();

  /// Whether something of `generation` may be used now, without asking the daemon: FAILED_PRECONDITION in a forked
  /// child, on another thread and for a void handle, UNAVAILABLE when the connection is lost.
  absl::Status Usable(uint64_t generation) const;
  absl::Status Usable() const { return Usable(generation_); }

  /// REQUIRES: Usable().ok(), here and below.
  api::Daemon::Client& daemon();
  api::Admin::Client& admin();

  /// `promise`, or DEADLINE_EXCEEDED (and the call cancelled) after `deadline_ms`. R: absl::Status or StatusOr.
  template <typename R>
  kj::Promise<R> WithDeadline(kj::Promise<R> promise, int64_t deadline_ms);

  /// Runs the loop until `promise` is there: spinning up to busy_poll_us, then waiting.
  template <typename R>
  R Await(kj::Promise<R>& promise);

  /// Sends `request` and waits: read(response) gives the result, an R.
  template <typename R, typename Request, typename Read>
  R Call(Request&& request, Read read);

  /// The same, to be waited for later. What was asked is on its way when this returns.
  template <typename R, typename Request, typename Read>
  Pending<R> CallLater(Request&& request, Read read, int64_t deadline_ms);

  /// The same where read(response) gives a promise of the result. It is called as soon as the answer is there, by
  /// whoever drives the loop; the connection lives as long as the promise.
  template <typename R, typename Request, typename Read>
  Pending<R> CallOn(Request&& request, Read read, int64_t deadline_ms);

  /// Lets go of a capability, or of a call: it is gone on the wire when this returns. Never throws, never blocks; in a
  /// forked child the object is leaked.
  template <typename T>
  void Release(T&& object) noexcept;

  /// Runs what can run without waiting.
  void Pump() noexcept;

 private:
  struct Link;

  Connection(Address address, const Client::Options& options, std::shared_ptr<ThreadLoop> loop);
  absl::Status Dial(std::chrono::steady_clock::time_point until);
  absl::Status Hello(int64_t deadline_ms);
  absl::Status FromException(const kj::Exception& e);
  absl::Status Lost() const;
  /// `promise`, which counts news, to be waited for.
  template <typename R>
  Pending<R> Later(kj::Promise<R> promise, int64_t deadline_ms);
  static kj::Exception Caught();
  /// To be attached to what is eagerly evaluated: counts when that is done.
  auto CountNews() {
    return kj::defer([loop = loop_.get()] { ++loop->news; });
  }

  const Address address_;
  const Client::Options options_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const uint64_t forks_ = ForkCount();
  std::shared_ptr<ThreadLoop> loop_;  // shared by the thread's connections: see invariant 1
  std::unique_ptr<Link> link_;
  uint64_t generation_ = 0;
  uint64_t boot_epoch_ = 0;
  uint64_t message_bytes_max_ = kMessageBytesMax;
  std::string peer_address_;
  bool admin_elsewhere_ = false;
  bool maps_blocks_ = false;
  std::shared_ptr<HostSlabs> slabs_;  // shared with the link's leases
};

/// A capability that remembers where it came from. Released, and off the wire, when it is destroyed.
template <typename Cap>
class Handle {
 public:
  Handle(std::shared_ptr<Connection> connection, Cap cap)
      : connection_(std::move(connection)), generation_(connection_->generation()), cap_(std::move(cap)) {}
  ~Handle() noexcept { connection_->Release(std::move(cap_)); }
  Handle(const Handle&) = delete;

  Connection& connection() const { return *connection_; }
  const std::shared_ptr<Connection>& shared_connection() const { return connection_; }
  uint64_t generation() const { return generation_; }
  absl::Status Usable() const { return connection_->Usable(generation_); }
  /// REQUIRES: Usable().ok().
  Cap& cap() { return *cap_; }

 private:
  std::shared_ptr<Connection> connection_;  // shared: a handle may outlive its Client
  const uint64_t generation_;
  std::optional<Cap> cap_;
};

/// A Pending that already has its value.
template <typename R>
Pending<R> Ready(R value) {
  class State final : public Pending<R>::State {
   public:
    explicit State(R value) : value_(std::move(value)) {}
    bool ready() override { return true; }
    R Wait() override { return std::move(value_); }

   private:
    R value_;
  };
  return Pending<R>(std::make_unique<State>(std::move(value)));
}

// Templates.

template <typename R>
kj::Promise<R> Connection::WithDeadline(kj::Promise<R> promise, int64_t deadline_ms) {
  // atTime, of the clock as it is now: the timer's own idea of the time is as old as the loop's last turn.
  const kj::TimePoint at = kj::systemPreciseMonotonicClock().now() + deadline_ms * kj::MILLISECONDS;
  auto late = loop_->port.getTimer().atTime(at).attach(CountNews()).eagerlyEvaluate(nullptr);
  return promise.exclusiveJoin(late.then([deadline_ms]() -> R {
    return absl::DeadlineExceededError(
        absl::StrCat("no answer from the daemon within ", deadline_ms, " ms; the call was cancelled"));
  }));
}

template <typename R>
R Connection::Await(kj::Promise<R>& promise) {
  try {
    if (options_.busy_poll_us > 0) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(options_.busy_poll_us);
      while (!promise.poll(*loop_->scope) && std::chrono::steady_clock::now() < until) {
      }
    }
    return promise.wait(*loop_->scope);
  } catch (...) {
    return FromException(Caught());
  }
}

template <typename R, typename Request, typename Read>
R Connection::Call(Request&& request, Read read) {
  try {
    auto promise = WithDeadline<R>(request.send().then([&read](auto&& response) -> R { return read(response); }),
                                   options_.deadline_ms);
    R result = Await(promise);
    if (!result.ok()) Pump();  // a cancelled call is to be cancelled there too
    return result;
  } catch (...) {
    return FromException(Caught());
  }
}

template <typename R>
Pending<R> Connection::Later(kj::Promise<R> promise, int64_t deadline_ms) {
  class State final : public Pending<R>::State {
   public:
    State(std::shared_ptr<Connection> connection, kj::Promise<R> promise)
        : connection_(std::move(connection)), promise_(std::move(promise)) {}
    ~State() noexcept override {
      if (promise_.has_value()) connection_->Release(std::move(promise_));
    }
    bool ready() override {
      if (!promise_.has_value() || connection_->forked()) return true;
      try {
        return promise_->poll(*connection_->loop_->scope);
      } catch (...) {
        return true;
      }
    }
    R Wait() override {
      KV_CHECK(promise_.has_value());
      if (connection_->forked() || connection_->thread_ != std::this_thread::get_id()) return connection_->Usable();
      R result = connection_->Await(*promise_);
      promise_.reset();
      if (!result.ok()) connection_->Pump();  // a cancelled call is to be cancelled there too
      return result;
    }

   private:
    std::shared_ptr<Connection> connection_;  // shared: a pending call may outlive its Client
    std::optional<kj::Promise<R>> promise_;
  };
  auto state = std::make_unique<State>(shared_from_this(), WithDeadline<R>(std::move(promise), deadline_ms));
  Pump();
  return Pending<R>(std::move(state));
}

template <typename R, typename Request, typename Read>
Pending<R> Connection::CallLater(Request&& request, Read read, int64_t deadline_ms) {
  try {
    return Later<R>(request.send()
                        .attach(CountNews())
                        .eagerlyEvaluate(nullptr)
                        .then([read = std::move(read)](auto&& response) mutable -> R { return read(response); }),
                    deadline_ms);
  } catch (...) {
    return Ready<R>(FromException(Caught()));
  }
}

template <typename R, typename Request, typename Read>
Pending<R> Connection::CallOn(Request&& request, Read read, int64_t deadline_ms) {
  try {
    return Later<R>(
        request.send()
            .then([read = std::move(read)](auto&& response) mutable -> kj::Promise<R> { return read(response); })
            .attach(CountNews())
            .eagerlyEvaluate(nullptr),
        deadline_ms);
  } catch (...) {
    return Ready<R>(FromException(Caught()));
  }
}

template <typename T>
void Connection::Release(T&& object) noexcept {
  using Object = std::decay_t<T>;
  if (forked()) {
    new Object(std::forward<T>(object));  // invariant 2
    return;
  }
  KV_CHECK(thread_ == std::this_thread::get_id());
  try {
    { Object gone(std::forward<T>(object)); }
  } catch (...) {
    return;  // the link is broken, and with it every lease
  }
  Pump();
}

}  // namespace kvmanager::client
