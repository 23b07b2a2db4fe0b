// Who may open which tenant: gives the tenant's full name for what a connection proved of itself and what it asks for.
//
// A principal is the user of a Unix socket's other end, whoever shows a token, or whoever has a certificate of TLS. A
// tenant that --tenants FILE lists is opened by the users and certificates listed there and by whoever shows one of its
// tokens, and by nobody else. Other names are in namespaces: plain for the daemon's own user and root, "uid:N/" before
// the names of every other user, "cert:NAME/" before those of a certificate (base/tls.h says what its name is), "tcp:/"
// before those of clients without either. In NAME every byte but letters, digits and ".:@_-" is written as %XX, so no
// name of a certificate reaches into another's namespace. A full name is part of a cache's digest, so principals of
// different full names share no block, and neither memory nor hand-offs.
//
// Owned by the daemon's wiring. The loop's thread; ReadTenants may run on any.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/quotas.h"

namespace kvmanager {

/// What a connection has proved of itself.
struct Proof {
  std::optional<uid_t> uid;                     // of the process that connected to a Unix socket
  std::optional<Digest> token;                  // SHA-256 of the token that it showed
  std::optional<std::string> certificate = {};  // name of the one with which it connected
  bool admin = false;                           // it came to the admin socket, and may have Admin
  bool unix_socket = false;                     // it shares this host, and can be given memory
};

/// The tenants that a file lists, by name.
struct ListedTenant {
  absl::flat_hash_set<uid_t> uids;
  absl::flat_hash_set<std::string> certificates;  // by name, exactly
  std::vector<Digest> tokens;                     // SHA-256 of each
  Quotas::Tenant quota;                           // of the pools
};
using TenantTable = absl::flat_hash_map<std::string, ListedTenant>;

/// {"tenants": [{"name": "team-a", "uids": [1001, 1002], "token_sha256": ["<64 hexadecimal digits>"], "certificates":
/// ["team-a.example"], "host_bytes": {"guaranteed": "8GiB", "most": "32GiB"}, "gpu_bytes": {"guaranteed": "4GiB"}}]};
/// all but the name may be left out. Errors: INVALID_ARGUMENT naming the member, its value and its bound.
absl::StatusOr<TenantTable> ParseTenants(absl::string_view text);

/// The file's table. It must be a regular file of root or of `own_uid`, which nobody else can write, nor others read if
/// it has tokens. Errors: ReadPrivateFile's and ParseTenants's.
absl::StatusOr<TenantTable> ReadTenants(const std::string& path, uid_t own_uid);

class Principals {
 public:
  static constexpr size_t kTokenBytesMin = 16, kTokenBytesMax = 1024;
  static constexpr size_t kTenantsMax = 4096;
  static constexpr size_t kUidsMax = 1024;            // of one tenant
  static constexpr size_t kTokensMax = 64;            // of one tenant
  static constexpr size_t kCertificatesMax = 1024;    // of one tenant
  static constexpr uint64_t kFileBytesMax = 4 << 20;  // of --tenants
  static constexpr absl::string_view kUidPrefix = "uid:", kTcpPrefix = "tcp:", kCertificatePrefix = "cert:";

  /// own_uid: of the daemon.
  explicit Principals(uid_t own_uid) : own_uid_(own_uid) {}

  uid_t own_uid() const { return own_uid_; }
  /// Caches that are open stay open.
  void SetTable(TenantTable table) { table_ = std::move(table); }
  size_t tenants() const { return table_.size(); }
  /// Of the tenants of `table`; most_percent: for everybody else.
  static Quotas QuotasOf(const TenantTable& table, int64_t most_percent);
  Quotas quotas(int64_t most_percent) const { return QuotasOf(table_, most_percent); }

  /// SHA-256 of a token that some tenant has. Errors: INVALID_ARGUMENT (length), PERMISSION_DENIED (nobody's).
  absl::StatusOr<Digest> CheckToken(absl::string_view token) const;

  /// The full name of the tenant that a connection means by `asked`. Errors: INVALID_ARGUMENT (a name that would be too
  /// long, or could be taken for a full name), PERMISSION_DENIED (a listed tenant, not this principal's).
  absl::StatusOr<std::string> TenantOf(const Proof& proof, absl::string_view asked) const;

 private:
  const uid_t own_uid_;
  TenantTable table_;
};

}  // namespace kvmanager
