#include "kvmanager/rpc/principals.h"

#include <openssl/crypto.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kvmanager/base/byte_text.h"
#include "kvmanager/base/json_text.h"
#include "kvmanager/base/private_file.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/tls.h"
#include "kvmanager/store/cache_config.h"

namespace kvmanager {
namespace {

using nlohmann::json;

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  for (const absl::string_view prefix :
       {Principals::kUidPrefix, Principals::kTcpPrefix, Principals::kCertificatePrefix}) {
    if (absl::StartsWith(name, prefix)) {
      return InvalidField(
          field, name,
          absl::StrCat("a name that does not begin with ", Principals::kUidPrefix, ", ", Principals::kTcpPrefix, " or ",
                       Principals::kCertificatePrefix, ": these are put before the names of other users"));
    }
  }
  return absl::OkStatus();
}

// Such that no two names give one text, and none a '/'.
std::string Escaped(absl::string_view name) {
  std::string text;
  for (const unsigned char c : name) {
    if (absl::ascii_isalnum(c) || absl::string_view(".:@_-").find(char(c)) != absl::string_view::npos) {
      text.push_back(char(c));
    } else {
      absl::StrAppend(&text, "%", absl::Hex(c, absl::kZeroPad2));
    }
  }
  return text;
}

// prefix: what stands before the name.
absl::Status CheckLength(absl::string_view field, absl::string_view prefix, absl::string_view name) {
  if (prefix.size() + name.size() <= CacheConfig::kTextBytesMax) return absl::OkStatus();
  const size_t left = CacheConfig::kTextBytesMax - std::min(prefix.size(), CacheConfig::kTextBytesMax);
  return InvalidField(field, absl::StrCat(name.size(), " bytes"), absl::StrCat("at most ", left, " bytes"));
}

// Every token is looked at, whichever matches.
bool HasToken(const ListedTenant& tenant, const Digest& token) {
  bool found = false;
  for (const Digest& each : tenant.tokens) {
    found |= CRYPTO_memcmp(each.bytes.data(), token.bytes.data(), token.bytes.size()) == 0;
  }
  return found;
}

absl::StatusOr<const json*> List(const json& tenant, const char* member, absl::string_view field, size_t entries_max) {
  static const json kEmpty = json::array();
  const auto found = tenant.find(member);
  if (found == tenant.end()) return &kEmpty;
  if (!found->is_array() || found->size() > entries_max) {
    return InvalidField(field, found->is_array() ? absl::StrCat(found->size(), " long") : "no list",
                        absl::StrCat("a list of at most ", entries_max));
  }
  return &*found;
}

absl::StatusOr<Digest> ParseDigest(absl::string_view field, const json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  bool hexadecimal = text.size() == 64;
  for (const unsigned char c : text) hexadecimal &= absl::ascii_isxdigit(c);
  // The value is not shown: somebody may have written the token itself.
  if (!hexadecimal) {
    return InvalidField(field, "something else",
                        "64 hexadecimal digits: printf %s TOKEN | sha256sum (not the token itself)");
  }
  Digest digest;
  const std::string bytes = absl::HexStringToBytes(text);
  std::memcpy(digest.bytes.data(), bytes.data(), bytes.size());
  return digest;
}

absl::StatusOr<uint64_t> ParseMember(const std::string& field, const json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  if (!value.is_string()) {
    return InvalidField(field, JsonText(value), "a number of bytes, 0 or more, such as 8589934592 or \"8GiB\"");
  }
  return ParseBytes(field, value.get<std::string>());
}

absl::StatusOr<Quotas::InPool> ParseQuota(const std::string& at, const json& value) {
  if (!value.is_object()) return InvalidField(at, "no object", "{\"guaranteed\": BYTES, \"most\": BYTES}");
  Quotas::InPool quota;
  for (const auto& [member, bytes] : value.items()) {
    const std::string field = absl::StrCat(at, ".", member);
    if (member == "guaranteed") {
      KV_ASSIGN_OR_RETURN(quota.guaranteed_bytes, ParseMember(field, bytes));
    } else if (member == "most") {
      KV_ASSIGN_OR_RETURN(quota.most_bytes, ParseMember(field, bytes));
    } else {
      return InvalidField(at, member, "{\"guaranteed\": BYTES, \"most\": BYTES}");
    }
  }
  if (quota.most_bytes.has_value() && *quota.most_bytes < quota.guaranteed_bytes) {
    return InvalidField(at + ".most", *quota.most_bytes,
                        absl::StrCat("at least ", quota.guaranteed_bytes, ", what is guaranteed"));
  }
  return quota;
}

constexpr absl::string_view kMembers = "an object of name, uids, token_sha256, certificates, host_bytes and gpu_bytes";

absl::StatusOr<ListedTenant> ParseTenant(const std::string& at, const json& tenant) {
  for (const auto& [member, value] : tenant.items()) {
    if (member != "name" && member != "uids" && member != "token_sha256" && member != "certificates" &&
        member != "host_bytes" && member != "gpu_bytes") {
      return InvalidField(at, member, kMembers);
    }
  }
  ListedTenant result;
  for (const auto& [member, quota] : {std::pair("host_bytes", &result.quota.host), {"gpu_bytes", &result.quota.gpu}}) {
    if (const auto found = tenant.find(member); found != tenant.end()) {
      KV_ASSIGN_OR_RETURN(*quota, ParseQuota(absl::StrCat(at, ".", member), *found));
    }
  }
  KV_ASSIGN_OR_RETURN(const json* const uids, List(tenant, "uids", at + ".uids", Principals::kUidsMax));
  for (const json& uid : *uids) {
    // -1 is no user's.
    if (!uid.is_number_unsigned() || uid.get<uint64_t>() >= std::numeric_limits<uid_t>::max()) {
      return InvalidField(at + ".uids", JsonText(uid),
                          absl::StrCat("numbers of users: 0..", std::numeric_limits<uid_t>::max() - 1));
    }
    result.uids.insert(uid.get<uid_t>());
  }
  KV_ASSIGN_OR_RETURN(const json* const tokens,
                      List(tenant, "token_sha256", at + ".token_sha256", Principals::kTokensMax));
  for (const json& token : *tokens) {
    KV_ASSIGN_OR_RETURN(const Digest digest, ParseDigest(at + ".token_sha256", token));
    result.tokens.push_back(digest);
  }
  KV_ASSIGN_OR_RETURN(const json* const certificates,
                      List(tenant, "certificates", at + ".certificates", Principals::kCertificatesMax));
  for (const json& name : *certificates) {
    if (!name.is_string() || name.get_ref<const std::string&>().empty() ||
        name.get_ref<const std::string&>().size() > TlsContext::kNameBytesMax) {
      return InvalidField(at + ".certificates", JsonText(name),
                          absl::StrCat("names of certificates, 1..", TlsContext::kNameBytesMax, " bytes each"));
    }
    result.certificates.insert(name.get<std::string>());
  }
  return result;
}

}  // namespace

absl::StatusOr<TenantTable> ParseTenants(absl::string_view text) {
  const json parsed = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  constexpr absl::string_view kForm =
      "{\"tenants\": [{\"name\": ..., \"uids\": [...], \"token_sha256\": [...], \"certificates\": [...], "
      "\"host_bytes\": {\"guaranteed\": ..., \"most\": ...}, \"gpu_bytes\": {...}}]}";
  if (parsed.is_discarded() || !parsed.is_object()) return InvalidField("the file", "no JSON object", kForm);
  for (const auto& [member, value] : parsed.items()) {
    if (member != "tenants") return InvalidField("the file", absl::StrCat("one with \"", member, "\""), kForm);
  }
  const auto tenants = parsed.find("tenants");
  if (tenants == parsed.end() || !tenants->is_array()) return InvalidField("tenants", "no list", kForm);
  if (tenants->size() > Principals::kTenantsMax) {
    return InvalidField("tenants", absl::StrCat(tenants->size(), " long"),
                        absl::StrCat("at most ", Principals::kTenantsMax, " long"));
  }
  TenantTable table;
  for (size_t i = 0; i < tenants->size(); ++i) {
    const json& tenant = (*tenants)[i];
    const std::string at = absl::StrCat("tenants[", i, "]");
    if (!tenant.is_object()) return InvalidField(at, "no object", kMembers);
    const auto name = tenant.find("name");
    if (name == tenant.end() || !name->is_string()) return InvalidField(at + ".name", "missing", "a string");
    const std::string text_of_name = name->get<std::string>();
    if (text_of_name.empty()) return InvalidField(at + ".name", "empty", "the name that clients ask for");
    KV_RETURN_IF_ERROR(CheckName(at + ".name", text_of_name));
    KV_RETURN_IF_ERROR(CheckLength(at + ".name", "", text_of_name));
    KV_ASSIGN_OR_RETURN(ListedTenant listed, ParseTenant(at, tenant));
    if (!table.emplace(text_of_name, std::move(listed)).second) {
      return InvalidField(at + ".name", text_of_name, "a name that is listed once");
    }
  }
  return table;
}

absl::StatusOr<TenantTable> ReadTenants(const std::string& path, uid_t own_uid) {
  KV_ASSIGN_OR_RETURN(const PrivateFile file,
                      ReadPrivateFile("--tenants", path, {.bytes_max = Principals::kFileBytesMax, .owner = own_uid}));
  absl::StatusOr<TenantTable> table = ParseTenants(file.text);
  if (!table.ok()) {
    const ErrorDetail detail = DetailOf(table.status());
    return WithDetail(absl::InvalidArgumentError(absl::StrCat("--tenants ", path, ": ", table.status().message())),
                      detail);
  }
  if ((file.mode & S_IROTH) != 0) {
    for (const auto& [name, tenant] : *table) {
      if (tenant.tokens.empty()) continue;
      return InvalidField("--tenants", absl::StrCat(path, ", which has digests of tokens and which others can read"),
                          absl::StrCat("a file that its owner and group alone can read: chmod o-r ", path));
    }
  }
  return table;
}

Quotas Principals::QuotasOf(const TenantTable& table, int64_t most_percent) {
  Quotas quotas;
  quotas.most_percent = static_cast<uint64_t>(most_percent);
  for (const auto& [name, tenant] : table) {
    if (tenant.quota != Quotas::Tenant()) quotas.tenants.emplace(name, tenant.quota);
  }
  return quotas;
}

absl::StatusOr<Digest> Principals::CheckToken(absl::string_view token) const {
  if (token.size() < kTokenBytesMin || token.size() > kTokenBytesMax) {
    return InvalidField("token", absl::StrCat(token.size(), " bytes long"),
                        absl::StrCat(kTokenBytesMin, "..", kTokenBytesMax, " bytes long"));
  }
  const Digest digest = Sha256({reinterpret_cast<const uint8_t*>(token.data()), token.size()});
  bool found = false;
  for (const auto& [name, tenant] : table_) found |= HasToken(tenant, digest);
  if (found) return digest;
  return FieldError(absl::StatusCode::kPermissionDenied, "token", "unknown here",
                    table_.empty() ? "left out: this daemon knows no tokens (--tenants FILE)"
                                   : "one whose SHA-256 the daemon's --tenants FILE lists");
}

absl::StatusOr<std::string> Principals::TenantOf(const Proof& proof, absl::string_view asked) const {
  KV_RETURN_IF_ERROR(CheckName("tenant", asked));
  if (const auto listed = table_.find(asked); listed != table_.end()) {
    const ListedTenant& tenant = listed->second;
    const bool user = proof.uid.has_value() && tenant.uids.contains(*proof.uid);
    const bool token = proof.token.has_value() && HasToken(tenant, *proof.token);
    const bool certificate = proof.certificate.has_value() && tenant.certificates.contains(*proof.certificate);
    if (user || token || certificate) return std::string(asked);
    std::string who = "a client without a user";
    if (proof.uid.has_value()) who = absl::StrCat("user ", *proof.uid);
    if (proof.certificate.has_value()) who = absl::StrCat("the certificate ", *proof.certificate);
    return FieldError(absl::StatusCode::kPermissionDenied, "tenant",
                      absl::StrCat(asked, " asked for by ", who, proof.token.has_value() ? " with a token" : ""),
                      "one whose user, token or certificate this is: the daemon's --tenants FILE says whose it is");
  }
  std::string prefix;
  if (proof.certificate.has_value()) {
    prefix = absl::StrCat(kCertificatePrefix, Escaped(*proof.certificate), "/");
  } else if (!proof.uid.has_value()) {
    prefix = absl::StrCat(kTcpPrefix, "/");
  } else if (*proof.uid != 0 && *proof.uid != own_uid_) {
    prefix = absl::StrCat(kUidPrefix, *proof.uid, "/");
  }
  KV_RETURN_IF_ERROR(CheckLength("tenant", prefix, asked));
  return absl::StrCat(prefix, asked);
}

}  // namespace kvmanager
