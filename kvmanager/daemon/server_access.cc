#include "kvmanager/daemon/server_access.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr mode_t kAdminMode = 0600;

}  // namespace

ServerAccess::ServerAccess(const Options* options) : options_(*options), principals_(geteuid()) {}

absl::Status ServerAccess::ReadTenants() {
  if (options_.tenants.empty()) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(TenantTable tenants, kvmanager::ReadTenants(options_.tenants, principals_.own_uid()));
  principals_.SetTable(std::move(tenants));
  return absl::OkStatus();
}

absl::Status ServerAccess::Bind(DaemonFacts* facts) {
  for (const std::string& address : options_.listen) {
    KV_ASSIGN_OR_RETURN(std::unique_ptr<ListenSocket> socket, ListenSocket::Bind(address));
    sockets_.push_back(std::move(socket));
  }
  facts->listen = absl::StrJoin(sockets_, ",",
                                [](std::string* out, const auto& socket) { absl::StrAppend(out, socket->address()); });
  facts->admin_listen = AdminAddress(options_);
  if (facts->admin_listen.empty()) {
    spdlog::warn("nobody can administer this daemon: {}",
                 options_.admin_listen == "none"
                     ? "--admin-listen is none"
                     : "--listen has no Unix socket with room for PATH.admin; name one with --admin-listen unix:PATH");
    return absl::OkStatus();
  }
  KV_ASSIGN_OR_RETURN(
      std::unique_ptr<ListenSocket> admin,
      ListenSocket::Bind(facts->admin_listen, {.flag = "--admin-listen", .mode = kAdminMode, .admin = true}));
  sockets_.push_back(std::move(admin));
  return absl::OkStatus();
}

kj::Promise<void> ServerAccess::ReadTenantsAgain(WorkerPool* workers, MessageQueue* queue) {
  if (options_.tenants.empty()) return kj::READY_NOW;
  using MaybeTable = absl::StatusOr<TenantTable>;
  return OnWorker<MaybeTable>(
             workers, queue, WorkerPool::kDaemon,
             [path = options_.tenants, own = principals_.own_uid()] { return kvmanager::ReadTenants(path, own); })
      .then([this](MaybeTable table) {
        if (!table.ok()) {
          spdlog::error("the tenants stay as they were: {}", std::string(table.status().message()));
          return;
        }
        principals_.SetTable(*std::move(table));
        spdlog::info("read {} tenants from {}", principals_.tenants(), options_.tenants);
      });
}

}  // namespace kvmanager
