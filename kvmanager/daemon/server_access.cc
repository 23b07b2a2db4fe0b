#include "kvmanager/daemon/server_access.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <ctime>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/private_file.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/tls_files.h"
#include "transport/tcp/peer_key.h"

namespace kvmanager {
namespace {

constexpr mode_t kAdminMode = 0600;
constexpr char kListen[] = "--listen", kAdminListen[] = "--admin-listen";

}  // namespace

ServerAccess::ServerAccess(const Options* options) : options_(*options), principals_(geteuid()) {}

absl::Status ServerAccess::ReadFiles() {
  KV_ASSIGN_OR_RETURN(TlsContexts contexts, ReadTlsFiles(options_));
  SetTls(std::move(contexts));
  if (options_.tenants.empty()) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(tenants_, kvmanager::ReadTenants(options_.tenants, principals_.own_uid()));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ServerAccess::ReadPeerKey() const {
  if (options_.peer_key.empty()) return std::string();
  return ReadKey("--peer-key", options_.peer_key, tcp::kPeerKeyBytesMin, tcp::kPeerKeyBytesMax);
}

absl::StatusOr<std::string> ServerAccess::ReadKey(absl::string_view flag, const std::string& path, size_t bytes_min,
                                                  size_t bytes_max) {
  KV_ASSIGN_OR_RETURN(PrivateFile file, ReadPrivateFile(flag, path,
                                                        {.secret = true,
                                                         .bytes_min = bytes_min,
                                                         .bytes_max = bytes_max,
                                                         .made_by = absl::StrCat("openssl rand -out ", path, " 32")}));
  return std::move(file.text);
}

void ServerAccess::SetTls(TlsContexts contexts) {
  if (contexts.clients == nullptr) return;
  if (const std::string warning = contexts.clients->DateWarning(time(nullptr)); !warning.empty()) {
    spdlog::warn("--tls-cert {}: {}", options_.tls_cert, warning);
  }
  spdlog::info("TLS with the certificate of {}: clients over TCP{}", contexts.clients->description(),
               contexts.peers_in == nullptr ? "; not peers" : ", peers");
  tls_.Set(std::move(contexts));
}

absl::Status ServerAccess::SetTable(TenantTable table) {
  absl::Status status = store_->report().SetQuotas(Principals::QuotasOf(table, options_.tenant_most_percent));
  if (!status.ok()) {
    const ErrorDetail detail = DetailOf(status);
    return WithDetail(absl::Status(status.code(), absl::StrCat("--tenants ", options_.tenants, ": ", status.message())),
                      detail);
  }
  if (options_.device_pool_bytes == 0) {
    for (const auto& [name, tenant] : table) {
      if (tenant.quota.gpu == Quotas::InPool()) continue;
      spdlog::warn(
          "--tenants {}: gpu_bytes of {} bounds nothing: without --device-pool-bytes there is no pool on a GPU",
          options_.tenants, name);
      break;
    }
  }
  principals_.SetTable(std::move(table));
  return absl::OkStatus();
}

absl::Status ServerAccess::Open(PageStore* store, DaemonFacts* facts) {
  store_ = store;
  KV_RETURN_IF_ERROR(SetTable(std::move(tenants_)));
  for (const std::string& address : options_.listen) {
    KV_ASSIGN_OR_RETURN(std::unique_ptr<ListenSocket> socket,
                        ListenSocket::Bind(address, {.inherited = FindHanded(options_.sockets, kListen, address)}));
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
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ListenSocket> admin,
                      ListenSocket::Bind(facts->admin_listen, {.flag = kAdminListen,
                                                               .mode = kAdminMode,
                                                               .admin = true,
                                                               .inherited = FindHanded(options_.sockets, kAdminListen,
                                                                                       facts->admin_listen)}));
  sockets_.push_back(std::move(admin));
  return absl::OkStatus();
}

void ServerAccess::HandOver(std::vector<HandedSocket>* sockets) {
  for (size_t i = 0; i < sockets_.size(); ++i) {
    const bool admin = sockets_[i]->admin();
    // By what was asked for: a port that was 0 stays.
    HandSocket(admin ? kAdminListen : kListen, admin ? sockets_[i]->address() : options_.listen[i], sockets_[i]->fd(),
               sockets);
    sockets_[i]->LeaveFile();
  }
}

void ServerAccess::ReadFilesAgain(WorkerPool* workers, MessageQueue* queue, kj::Promise<void>* reading) {
  if (reads_) {
    reads_again_ = true;
    return;
  }
  *reading = ReadBoth(workers, queue).eagerlyEvaluate(nullptr);
}

kj::Promise<void> ServerAccess::ReadBoth(WorkerPool* workers, MessageQueue* queue) {
  reads_ = true;
  return kj::joinPromises(kj::arr(ReadTenantsAgain(workers, queue), ReadTlsAgain(workers, queue)))
      .then([this, workers, queue]() -> kj::Promise<void> {
        reads_ = false;
        if (std::exchange(reads_again_, false)) return ReadBoth(workers, queue);
        return kj::READY_NOW;
      });
}

kj::Promise<void> ServerAccess::ReadTlsAgain(WorkerPool* workers, MessageQueue* queue) {
  if (options_.tls_cert.empty()) return kj::READY_NOW;
  using MaybeContexts = absl::StatusOr<TlsContexts>;
  return OnWorker<MaybeContexts>(workers, queue, WorkerPool::kDaemon,
                                 [options = options_] { return ReadTlsFiles(options); })
      .then([this](MaybeContexts contexts) {
        if (contexts.ok()) return SetTls(*std::move(contexts));
        spdlog::error("TLS stays as it was: {}", std::string(contexts.status().message()));
      });
}

kj::Promise<void> ServerAccess::ReadTenantsAgain(WorkerPool* workers, MessageQueue* queue) {
  if (options_.tenants.empty()) return kj::READY_NOW;
  using MaybeTable = absl::StatusOr<TenantTable>;
  return OnWorker<MaybeTable>(
             workers, queue, WorkerPool::kDaemon,
             [path = options_.tenants, own = principals_.own_uid()] { return kvmanager::ReadTenants(path, own); })
      .then([this](MaybeTable table) {
        const absl::Status status = table.ok() ? SetTable(*std::move(table)) : table.status();
        if (!status.ok()) {
          spdlog::error("the tenants stay as they were: {}", std::string(status.message()));
          return;
        }
        spdlog::info("read {} tenants from {}", principals_.tenants(), options_.tenants);
      });
}

}  // namespace kvmanager
