#include "transport/ucx/ucx_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/ucx/ucx_server.h"

namespace kvmanager {

std::string UcxBuild() { return absl::StrCat("built with UCX ", UCP_API_MAJOR, ".", UCP_API_MINOR); }

int RunUcxProcess() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // should UCX not return when the daemon ends
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  ::prctl(PR_SET_NAME, "kvmanager-ucx");
  char bytes[sizeof(ucx::PacketHead) + ucx::kPayloadBytesMax];
  const ssize_t n = ::recv(ucx::kSocketFd, bytes, sizeof(bytes), 0);
  if (n <= 0) return 1;
  const absl::optional<ucx::Packet> set_up = ucx::ParsePacket({bytes, static_cast<size_t>(n)});
  if (!set_up.has_value() || set_up->head.type != ucx::PacketType::kSetUp) return 1;
  const size_t settings_at = std::min(sizeof(uint64_t) * set_up->head.memory, set_up->payload.size());
  absl::StatusOr<ucx::Library> library =
      ucx::Library::Load(absl::StrSplit(set_up->payload.substr(settings_at), '\n', absl::SkipEmpty()));
  absl::Status status = library.status();
  if (status.ok()) {
    // Not ended with care: what peers still do with UCX's memory ends with the process.
    auto* const server = new ucx::Server(*library);
    status = server->Start(*set_up);
    if (status.ok()) {
      server->Run();
      ::_exit(0);
    }
  }
  const std::string failed =
      ucx::EncodePacket({{.type = ucx::PacketType::kFailed}, std::string(status.message()).substr(0, 1000)});
  ::send(ucx::kSocketFd, failed.data(), failed.size(), MSG_NOSIGNAL);
  ::_exit(1);
}

}  // namespace kvmanager
