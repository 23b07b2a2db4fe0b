#include "kvmanager/daemon/server_ucx.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/server_access.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<UcxMemory>> OpenUcx(const Options& options, const PagePool& pool) {
  if (options.peer_ucx_key.empty()) return nullptr;
  UcxMemory::Options ucx;
  ucx.program = {"/proc/self/exe", kUcxProcessFlag};
  KV_ASSIGN_OR_RETURN(ucx.key, ServerAccess::ReadKey("--peer-ucx-key", options.peer_ucx_key, UcxMemory::kKeyBytesMin,
                                                     UcxMemory::kKeyBytesMax));
  for (const auto& region : pool.regions()) ucx.memory.push_back({region->data(), region->bytes(), region->fd()});
  absl::StatusOr<std::unique_ptr<UcxMemory>> made = UcxMemory::Create(std::move(ucx));
  if (made.ok()) return made;
  return absl::Status(made.status().code(), absl::StrCat("--peer-ucx-key asks for UCX, but ", made.status().message(),
                                                         "; leave the option out to do without"));
}

std::string DescribeUcx(const UcxMemory* ucx) {
  if (ucx == nullptr) return absl::StrCat("off, ", UcxBuild());
  if (ucx->process() == 0) return "its process has ended, and is started anew";
  return absl::StrCat("UCX ", ucx->version(), ", process ", ucx->process());
}

}  // namespace kvmanager
