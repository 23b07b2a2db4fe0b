#include "kvmanager/daemon/tls_files.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/private_file.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::StatusOr<TlsContext::Pem> ReadPem(absl::string_view flag, const std::string& path) {
  KV_ASSIGN_OR_RETURN(PrivateFile file, ReadPrivateFile(flag, path, {.bytes_max = TlsContext::kFileBytesMax}));
  return TlsContext::Pem{absl::StrCat(flag, " ", path), std::move(file.text)};
}

}  // namespace

absl::StatusOr<TlsContexts> ReadTlsFiles(const Options& options) {
  TlsContexts contexts;
  if (options.tls_cert.empty()) return contexts;
  TlsContext::Options clients;
  clients.accepts = true;
  KV_ASSIGN_OR_RETURN(clients.certificate, ReadPem("--tls-cert", options.tls_cert));
  clients.key.field = absl::StrCat("--tls-key ", options.tls_key);
  KV_ASSIGN_OR_RETURN(PrivateFile key, ReadPrivateFile("--tls-key", options.tls_key,
                                                       {.secret = true, .bytes_max = TlsContext::kFileBytesMax}));
  clients.key.text = std::move(key.text);
  if (!options.tls_ca.empty()) {
    KV_ASSIGN_OR_RETURN(clients.authorities, ReadPem("--tls-ca", options.tls_ca));
    clients.certificate_required = options.tls_clients_required;
  }
  TlsContext::Options peers = clients;
  KV_ASSIGN_OR_RETURN(contexts.clients, TlsContext::Make(std::move(clients)));
  if (!PeersSpeakTls(options)) return contexts;
  peers.certificate_required = peers.daemons_only = true;
  KV_ASSIGN_OR_RETURN(contexts.peers_in, TlsContext::Make(peers));
  peers.accepts = false;
  KV_ASSIGN_OR_RETURN(contexts.peers_out, TlsContext::Make(std::move(peers)));
  return contexts;
}

}  // namespace kvmanager
