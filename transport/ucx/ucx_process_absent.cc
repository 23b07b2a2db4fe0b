#include <sys/socket.h>

#include "transport/ucx/process_wire.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager {

std::string UcxBuild() { return "built without UCX: ucp/api/ucp.h was not found"; }

int RunUcxProcess() {
  const std::string failed = ucx::EncodePacket({{.type = ucx::PacketType::kFailed}, UcxBuild()});
  ::send(ucx::kSocketFd, failed.data(), failed.size(), MSG_NOSIGNAL);
  return 1;
}

}  // namespace kvmanager
