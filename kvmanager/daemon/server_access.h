// Where clients of a daemon connect, and which of them open which tenant: its listening sockets and its principals.
//
// Owned by the server's wiring. Made on any thread; ReadTenantsAgain is the loop's.
#pragma once

#include <kj/async.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/rpc/daemon_facts.h"
#include "kvmanager/rpc/listen_socket.h"
#include "kvmanager/rpc/principals.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class ServerAccess {
 public:
  /// options: outlives this.
  explicit ServerAccess(const Options* options);

  /// Of Options::tenants. Errors: ReadTenants's.
  absl::Status ReadTenants();
  /// Gives `store`, which outlives this one's use, what tenants may have of the pools; binds Options::listen and the
  /// admin socket, and writes what was bound into `facts`. Errors: PageStore::SetQuotas's, ListenSocket's.
  absl::Status Open(PageStore* store, DaemonFacts* facts);

  const std::vector<std::unique_ptr<ListenSocket>>& sockets() const { return sockets_; }
  const Principals* principals() const { return &principals_; }

  /// The same file, on a worker. Errors are logged, and leave what is known. Dropping the promise gives it up.
  kj::Promise<void> ReadTenantsAgain(WorkerPool* workers, MessageQueue* queue);

 private:
  absl::Status SetTable(TenantTable table);

  const Options& options_;
  PageStore* store_ = nullptr;
  TenantTable tenants_;  // until Open
  Principals principals_;
  std::vector<std::unique_ptr<ListenSocket>> sockets_;
};

}  // namespace kvmanager
