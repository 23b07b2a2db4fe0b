// Where clients of a daemon connect, and which of them open which tenant: its listening sockets, its principals, and
// what it speaks TLS with.
//
// Owned by the server's wiring. Made on any thread; ReadFilesAgain is the loop's.
#pragma once

#include <kj/async.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/tls.h"
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

  /// Of Options::tenants, and of TLS. Errors: ReadTenants's, ReadTlsFiles's.
  absl::Status ReadFiles();
  /// Of Options::peer_key; empty: none. Errors: ReadKey's.
  absl::StatusOr<std::string> ReadPeerKey() const;
  /// A secret that daemons share, from a file that its owner alone can read. Errors: ReadPrivateFile's.
  static absl::StatusOr<std::string> ReadKey(absl::string_view flag, const std::string& path, size_t bytes_min,
                                             size_t bytes_max);
  /// Gives `store`, which outlives this one's use, what tenants may have of the pools; binds Options::listen and the
  /// admin socket, and writes what was bound into `facts`. Errors: StoreReport::SetQuotas's, ListenSocket's.
  absl::Status Open(PageStore* store, DaemonFacts* facts);

  /// Adds duplicates of the sockets, whose files stay.
  void HandOver(std::vector<HandedSocket>* sockets);

  const std::vector<std::unique_ptr<ListenSocket>>& sockets() const { return sockets_; }
  const Principals* principals() const { return &principals_; }
  const TlsSwitch* tls() const { return &tls_; }

  /// The same files, on a worker. Errors are logged, and leave what is known. Connections stay as they are. Where they
  /// are being read already, they are read once more behind that, however often this is called. *reading: gets the
  /// promise of it, and is destroyed with the event loop at the latest, which gives it up.
  void ReadFilesAgain(WorkerPool* workers, MessageQueue* queue, kj::Promise<void>* reading);

 private:
  kj::Promise<void> ReadBoth(WorkerPool* workers, MessageQueue* queue);
  kj::Promise<void> ReadTenantsAgain(WorkerPool* workers, MessageQueue* queue);
  kj::Promise<void> ReadTlsAgain(WorkerPool* workers, MessageQueue* queue);
  void SetTls(TlsContexts contexts);
  absl::Status SetTable(TenantTable table);

  const Options& options_;
  PageStore* store_ = nullptr;
  TenantTable tenants_;  // until Open
  Principals principals_;
  TlsSwitch tls_;
  std::vector<std::unique_ptr<ListenSocket>> sockets_;
  bool reads_ = false;        // the files are being read
  bool reads_again_ = false;  // and are to be read once more
};

}  // namespace kvmanager
