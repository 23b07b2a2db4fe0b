#include "transport/ucx/ucx_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/status.h"
#include "transport/ucx/process_wire.h"
#ifdef KVMANAGER_UCX  // as BUILD found
#include "transport/ucx/ucx_server.h"
#endif

namespace kvmanager {

#ifdef KVMANAGER_UCX

bool IsUcxBuilt() { return true; }
std::string UcxBuild() { return absl::StrCat("built with UCX ", UCP_API_MAJOR, ".", UCP_API_MINOR); }

namespace {

/// Returns with an error alone.
absl::Status Serve(const ucx::Packet& set_up) {
  const size_t settings_at = std::min(sizeof(uint64_t) * set_up.head.memory, set_up.payload.size());
  KV_ASSIGN_OR_RETURN(const ucx::Library library,
                      ucx::Library::Load(absl::StrSplit(set_up.payload.substr(settings_at), '\n', absl::SkipEmpty())));
  // Not ended with care: what peers still do with UCX's memory ends with the process.
  auto* const server = new ucx::Server(library);
  KV_RETURN_IF_ERROR(server->Start(set_up));
  server->Run();
  ::_exit(0);
}

}  // namespace

#else

bool IsUcxBuilt() { return false; }
std::string UcxBuild() { return "built without UCX: ucp/api/ucp.h was not found"; }

namespace {

absl::Status Serve(const ucx::Packet&) { return absl::UnavailableError(UcxBuild()); }

}  // namespace

#endif

int RunUcxProcess() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // should UCX not return when the daemon ends
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  ::prctl(PR_SET_NAME, "kvmanager-ucx");
  char bytes[sizeof(ucx::PacketHead) + ucx::kPayloadBytesMax];
  const ssize_t n = ::recv(ucx::kSocketFd, bytes, sizeof(bytes), 0);
  if (n <= 0) return 1;
  const absl::optional<ucx::Packet> set_up = ucx::ParsePacket({bytes, static_cast<size_t>(n)});
  if (!set_up.has_value() || set_up->head.type != ucx::PacketType::kSetUp) return 1;
  const absl::Status status = Serve(*set_up);
  const std::string failed =
      ucx::EncodePacket({{.type = ucx::PacketType::kFailed}, std::string(status.message()).substr(0, 1000)});
  ::send(ucx::kSocketFd, failed.data(), failed.size(), MSG_NOSIGNAL);
  ::_exit(1);
}

}  // namespace kvmanager
