// The transport's thread: runs all network I/O of a transport, listens, and accepts and makes connections. Owned by
// TcpTransport. Call Listen and Run first, from one thread; then the methods of Transport from any thread; then
// Shutdown, once, from any thread but this one.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvmanager/base/tls.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/outgoing.h"
#include "transport/tcp/probe.h"

namespace kvmanager::tcp {

class IoThread {
 public:
  static constexpr int64_t kAcceptRetryMs = 100;  // after the process ran out of descriptors or memory
  static constexpr int kBacklog = 128;
  static constexpr int64_t kSweepMs = 2000;   // of slabs of other daemons' GPUs that nobody uses
  static constexpr size_t kProbesMax = 1024;  // peers asked at once

  explicit IoThread(TcpTransport::Options options);
  absl::Status Listen();
  void Run();
  void Shutdown();

  uint64_t Begin(SendRequest request, SendEvents events);
  void Post(uint64_t transfer, std::vector<SendPage> pages);
  void Finish(uint64_t transfer, HandOffPart trailer);
  void Cancel(uint64_t transfer);
  void Ask(std::string peer, Probe::Done done);
  std::vector<PeerInfo> Peers() const { return loop_.peers.List(); }
  const std::string& listen_address() const { return listen_address_; }
  int listen_fd() { return acceptor_.is_open() ? acceptor_.native_handle() : -1; }

 private:
  absl::Status ListenLocally();
  template <typename SomeAcceptor>
  void Accept(SomeAcceptor& acceptor, Timer& retry);
  void SweepSlabs();
  /// The peer shows its certificate first, and proves the key; tls: nullptr: plain.
  void Authenticate(Socket socket, std::shared_ptr<const TlsContext> tls, std::string host, std::string peer);
  void ExchangeKeys(std::list<Loop::Authenticating>::iterator at, Socket socket, std::string peer);
  void OnAccepted(Socket socket, std::string host, std::string peer);
  /// Calls `call` of a transfer that has not ended, on the transport's thread.
  void With(uint64_t transfer, absl::AnyInvocable<void(Outgoing&)> call);

  Loop loop_;
  asio::executor_work_guard<Executor> work_;
  Acceptor acceptor_;
  LocalAcceptor local_acceptor_;
  Timer accept_timer_, local_accept_timer_, sweep_timer_;
  std::string listen_address_;
  std::atomic<uint64_t> next_transfer_{1};
  std::thread thread_;
};

}  // namespace kvmanager::tcp
