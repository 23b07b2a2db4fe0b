#include "kvmanager/daemon/options_trust.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// Of "HOST:PORT", which was parsed before.
bool IsLoopbackListener(absl::string_view text) {
  const auto parsed = ParseHostPort("", text);
  return parsed.ok() && IsLoopback(parsed->host);
}

// Without TLS. With it nobody reads along, and who connects has a namespace of its own.
bool IsOpenTcp(const Options& options, absl::string_view listen) {
  return options.tls_cert.empty() && absl::ConsumePrefix(&listen, "tcp:") && !IsLoopbackListener(listen);
}

bool IsOpenToPeers(const Options& options) {
  return !options.peer_listen.empty() && options.peer_key.empty() && !PeersSpeakTls(options) &&
         !IsLoopbackListener(options.peer_listen);
}

absl::Status CheckTls(absl::string_view peer_tls, const Options& options) {
  for (const auto& [flag, path] : {std::pair("--tls-cert", &options.tls_cert), std::pair("--tls-key", &options.tls_key),
                                   std::pair("--tls-ca", &options.tls_ca)}) {
    if (std::error_code error; !path->empty() && !std::filesystem::is_regular_file(*path, error)) {
      return InvalidField(flag, *path, "a file that exists");
    }
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return InvalidField(options.tls_cert.empty() ? "--tls-cert" : "--tls-key", "missing",
                        "the other half of --tls-cert FILE --tls-key FILE");
  }
  if (options.tls_cert.empty() && !options.tls_ca.empty()) {
    return InvalidField("--tls-ca", options.tls_ca, "beside --tls-cert FILE and --tls-key FILE");
  }
  if (options.tls_clients_required && options.tls_ca.empty()) {
    return InvalidField("--tls-clients", "require", "allow without --tls-ca FILE, which says whose certificates count");
  }
  if (options.tls_ca.empty() && peer_tls == "on") {
    return InvalidField("--peer-tls", "on", "off without --tls-ca FILE");
  }
  const bool peers = !options.peer_listen.empty() || !options.hand_off_peers.empty();
  if (!options.tls_cert.empty() && options.tls_ca.empty() && options.peer_tls && peers) {
    return InvalidField("--tls-ca", "missing",
                        "who signs the certificates of peers; or --peer-tls off: peers then speak no TLS");
  }
  if (PeersSpeakTls(options) && !options.peer_ucx_key.empty()) {
    return InvalidField("--peer-ucx-key", options.peer_ucx_key,
                        "left out where peers speak TLS, since UCX encrypts nothing; or --peer-tls off");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTrust(const std::vector<std::string>& peer_tenants, absl::string_view peer_tls, Options* options) {
  if (std::error_code error;
      !options->peer_key.empty() && !std::filesystem::is_regular_file(options->peer_key, error)) {
    return InvalidField("--peer-key", options->peer_key, "a file that exists");
  }
  KV_RETURN_IF_ERROR(CheckTls(peer_tls, *options));
  for (const std::string& listen : options->listen) {
    if (options->insecure || !IsOpenTcp(*options, listen)) continue;
    return InvalidField("--listen", listen,
                        "unix:PATH, or a loopback address such as tcp:127.0.0.1:PORT: whoever reaches another is a "
                        "client, without a password, and who is on the way reads along; --tls-cert FILE and --tls-key "
                        "FILE make it TLS, --insecure allows it as it is");
  }
  const bool open_to_peers = IsOpenToPeers(*options);
  if (open_to_peers && !options->insecure) {
    return InvalidField("--peer-listen", options->peer_listen,
                        "a loopback address, or --tls-cert, --tls-key and --tls-ca FILE, or --peer-key FILE beside it: "
                        "without them whoever reaches it may bring sequences; --insecure allows it");
  }
  std::vector<std::string> tenants;
  for (const std::string& text : peer_tenants) {
    for (const absl::string_view name : absl::StrSplit(text, ',')) tenants.emplace_back(name);
  }
  if (tenants.size() > Options::kPeerTenantsMax) {
    return InvalidField("--peer-tenants", absl::StrCat(tenants.size(), " names"),
                        absl::StrCat("at most ", Options::kPeerTenantsMax, " names"));
  }
  if (tenants.empty() && open_to_peers) {
    return InvalidField("--peer-tenants", "missing",
                        absl::StrCat("the tenants whose sequences whoever reaches --peer-listen ", options->peer_listen,
                                     " may bring, or any"));
  }
  if (!tenants.empty()) options->peer_tenants = std::move(tenants);
  return absl::OkStatus();
}

std::vector<std::string> OpenListeners(const Options& options) {
  std::vector<std::string> open;
  for (const std::string& listen : options.listen) {
    if (IsOpenTcp(options, listen)) open.push_back(absl::StrCat("--listen ", listen));
  }
  if (IsOpenToPeers(options)) open.push_back(absl::StrCat("--peer-listen ", options.peer_listen));
  return open;
}

}  // namespace kvmanager
