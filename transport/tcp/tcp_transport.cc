#include "transport/tcp/tcp_transport.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/io_thread.h"
#include "transport/tcp/peer_key.h"

namespace kvmanager {
namespace {

absl::Status CheckOptions(const TcpTransport::Options& options) {
  if (options.metrics == nullptr) return InvalidField("metrics", "null", "given");
  if (!options.listen.empty() && options.receiver == nullptr) {
    return InvalidField("receiver", "null", "given where peer-listen is");
  }
  if (!options.peer_key.empty() &&
      (options.peer_key.size() < tcp::kPeerKeyBytesMin || options.peer_key.size() > tcp::kPeerKeyBytesMax)) {
    return InvalidField("peer_key bytes", options.peer_key.size(),
                        absl::StrCat("0, or ", tcp::kPeerKeyBytesMin, "..", tcp::kPeerKeyBytesMax));
  }
  if (options.send_bytes_per_s != 0 && options.send_bytes_per_s < tcp::RateLimit::kBytesPerSMin) {
    return InvalidField("send_bytes_per_s", options.send_bytes_per_s,
                        absl::StrCat("0 or at least ", tcp::RateLimit::kBytesPerSMin));
  }
  if (options.send_bytes_per_s != 0 && !options.memory.empty()) {
    return InvalidField("send_bytes_per_s", options.send_bytes_per_s, "0 where memory is shared: copies have no limit");
  }
  if (options.stall_ms < 1 || options.stall_ms > tcp::kStallMsMax) {
    return InvalidField("stall_ms", options.stall_ms, absl::StrCat("1..", tcp::kStallMsMax));
  }
  if (options.connections < 1 || options.connections > tcp::kConnectionsMax) {
    return InvalidField("connections", options.connections, absl::StrCat("1..", tcp::kConnectionsMax));
  }
  if (options.connections_max < 1 || options.connections_max > tcp::kConnectionsMax) {
    return InvalidField("connections_max", options.connections_max, absl::StrCat("1..", tcp::kConnectionsMax));
  }
  if (options.copy_threads < 1 || options.copy_threads > TcpTransport::kCopyThreadsMax) {
    return InvalidField("copy_threads", options.copy_threads, absl::StrCat("1..", TcpTransport::kCopyThreadsMax));
  }
  if (options.memory.size() > tcp::kRegionsMax) {
    return InvalidField("memory regions", options.memory.size(), absl::StrCat("at most ", tcp::kRegionsMax));
  }
  if (options.window_bytes < 1) return InvalidField("window_bytes", options.window_bytes, "at least 1");
  if (options.incoming_max < 1) return InvalidField("incoming_max", options.incoming_max, "at least 1");
  if (options.idle_ms < 1) return InvalidField("idle_ms", options.idle_ms, "at least 1");
  if (options.outgoing_max < 1) return InvalidField("outgoing_max", options.outgoing_max, "at least 1");
  return absl::OkStatus();
}

}  // namespace

TcpTransport::TcpTransport(std::unique_ptr<tcp::IoThread> io_thread) : io_thread_(std::move(io_thread)) {}
TcpTransport::~TcpTransport() { io_thread_->Shutdown(); }

absl::StatusOr<std::unique_ptr<TcpTransport>> TcpTransport::Create(Options options) {
  KV_RETURN_IF_ERROR(CheckOptions(options));
  try {
    std::sort(options.memory.begin(), options.memory.end(),
              [](const SharedMemory& a, const SharedMemory& b) { return a.data < b.data; });
    auto io_thread = std::make_unique<tcp::IoThread>(std::move(options));
    KV_RETURN_IF_ERROR(io_thread->Listen());
    io_thread->Run();
    return std::unique_ptr<TcpTransport>(new TcpTransport(std::move(io_thread)));
  } catch (
      const std::exception& error) {  // Asio and std::thread throw where the system has no descriptor or thread left
    return absl::ResourceExhaustedError(absl::StrCat("starting the transport: ", error.what()));
  }
}

uint64_t TcpTransport::Begin(SendRequest request, SendEvents events) {
  return io_thread_->Begin(std::move(request), std::move(events));
}
void TcpTransport::Post(uint64_t transfer, std::vector<SendPage> pages) {
  io_thread_->Post(transfer, std::move(pages));
}
void TcpTransport::Finish(uint64_t transfer, HandOffPart trailer) { io_thread_->Finish(transfer, std::move(trailer)); }
void TcpTransport::Cancel(uint64_t transfer) { io_thread_->Cancel(transfer); }
void TcpTransport::Probe(std::string peer, absl::AnyInvocable<void(absl::StatusOr<ReceiverLoad>)> done) {
  io_thread_->Ask(std::move(peer), std::move(done));
}
std::vector<PeerInfo> TcpTransport::Peers() const { return io_thread_->Peers(); }
std::string TcpTransport::listen_address() const { return io_thread_->listen_address(); }
int TcpTransport::listen_fd() { return io_thread_->listen_fd(); }

}  // namespace kvmanager
