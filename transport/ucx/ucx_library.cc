#include "transport/ucx/ucx_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvmanager::ucx {

absl::StatusOr<Library> Library::Load(const std::vector<std::string>& settings) {
  for (const std::string& setting : settings) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(setting, absl::MaxSplits('=', 1));
    ::setenv(absl::StrCat("UCX_", parts.first).c_str(), parts.second.c_str(), /*overwrite=*/1);
  }
  for (const auto& [name, value] : {std::pair("UCX_HANDLE_ERRORS", "none"),
                                    {"UCX_ERROR_SIGNALS", ""},
                                    {"UCX_DEBUG_SIGNO", "0"},
                                    {"UCX_MEM_EVENTS", "n"},
                                    {"UCX_VFS_ENABLE", "n"},
                                    {"UCX_LOG_FILE", "stderr"},
                                    {"UCX_POSIX_ERROR_HANDLING", "y"},
                                    {"UCX_WARN_UNUSED_ENV_VARS", "n"}}) {
    ::setenv(name, value, /*overwrite=*/0);
  }
  void* const handle = ::dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return absl::UnavailableError(absl::StrCat("UCX cannot be loaded: ", ::dlerror()));
  Library library;
#define KV_UCX_FIND(name)                                                     \
  library.name = reinterpret_cast<decltype(&::name)>(::dlsym(handle, #name)); \
  if (library.name == nullptr) return absl::UnavailableError("libucp.so.0 lacks " #name);
  KV_UCX_FUNCTIONS(KV_UCX_FIND)
#undef KV_UCX_FIND
  return library;
}

}  // namespace kvmanager::ucx
