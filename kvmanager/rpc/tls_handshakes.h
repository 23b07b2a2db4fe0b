// Carries clients over TCP through the handshake of TLS, before anything else of theirs is looked at.
//
// A handshake has limits::kTlsHandshakeMs and a place among limits::kTlsHandshakesMax. Where all are taken the oldest
// gives its place to the next: whoever opens connections and says nothing keeps nobody out. Signing and verifying run
// on workers. What a client says beyond the handshake stays in the socket, but for OpenSSL's buffer of 64 KiB.
//
// Made and destroyed on the loop's thread, within the event loop's life.
#pragma once

#include <kj/async.h>
#include <kj/io.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/functional/any_invocable.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/tls.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/rpc_metrics.h"

namespace kvmanager {

class TlsHandshakes final : private kj::TaskSet::ErrorHandler {
 public:
  /// Everything outlives it.
  struct Parts {
    EventLoop* loop = nullptr;
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    ConnectionMetrics* metrics = nullptr;
  };
  /// fd: tls's; not before the latter is gone may it be closed.
  using Done = absl::AnyInvocable<void(kj::AutoCloseFd fd, std::unique_ptr<TlsLink> tls)>;

  explicit TlsHandshakes(const Parts& parts);
  ~TlsHandshakes();

  /// fd: connected, non-blocking. done: called once if the handshake succeeds; else the connection is closed, and
  /// counted as ended.
  void Start(int fd, std::shared_ptr<const TlsContext> context, Done done);
  size_t size() const { return handshakes_.size(); }

 private:
  class Handshake;
  void Log(const std::string& peer, const absl::Status& why);
  void taskFailed(kj::Exception&& exception) override;

  const Parts parts_;
  uint64_t next_id_ = 1;
  absl::btree_map<uint64_t, std::unique_ptr<Handshake>> handshakes_;  // the oldest first
  int64_t logged_ns_ = 0;
  uint64_t unlogged_ = 0;
  std::unique_ptr<kj::TaskSet> tasks_;
};

}  // namespace kvmanager
