// UCX's functions, found when they are asked for. Loading it installs signal handlers and hooks as its environment
// says, so a daemon that does not use it does not load it, and runs where it is not installed. A value of pointers, any
// thread; what is loaded stays.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvmanager::ucx {

#define KV_UCX_FUNCTIONS(X)         \
  X(ucp_get_version)                \
  X(ucp_config_read)                \
  X(ucp_config_modify)              \
  X(ucp_config_release)             \
  X(ucp_init_version)               \
  X(ucp_cleanup)                    \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_get_address)         \
  X(ucp_worker_release_address)     \
  X(ucp_worker_set_am_recv_handler) \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_arm)                 \
  X(ucp_worker_progress)            \
  X(ucp_ep_create)                  \
  X(ucp_ep_close_nbx)               \
  X(ucp_am_send_nbx)                \
  X(ucp_am_recv_data_nbx)           \
  X(ucp_request_free)               \
  X(ucs_status_string)

struct Library {
#define KV_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  KV_UCX_FUNCTIONS(KV_UCX_MEMBER)
#undef KV_UCX_MEMBER

  /// Before other threads are started: `settings` ("TLS=tcp", ...) become its environment, then what that does not say
  /// of signal handlers, hooks and log: none, none, stderr; and of peers that fail: shared memory tells of them.
  /// UNAVAILABLE: it is not installed, or lacks a function.
  static absl::StatusOr<Library> Load(const std::vector<std::string>& settings);
};

}  // namespace kvmanager::ucx
