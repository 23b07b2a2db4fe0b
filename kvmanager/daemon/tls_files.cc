#include "kvmanager/daemon/tls_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/key_file.h"

namespace kvmanager {
namespace {

absl::StatusOr<TlsContext::Pem> ReadPem(absl::string_view flag, const std::string& path) {
  const auto unreadable = [&] {
    return InvalidField(flag, path, absl::StrCat("a file that can be read (", std::strerror(errno), ")"));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return unreadable();
  const auto check_and_read = [&]() -> absl::StatusOr<std::string> {
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return InvalidField(flag, path, "a plain file");
    if (info.st_uid != geteuid() && info.st_uid != 0) {
      return InvalidField(flag, absl::StrCat(path, ", of user ", info.st_uid),
                          absl::StrCat("a file of this daemon's user, ", geteuid(), ", or of root"));
    }
    if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      return InvalidField(flag, absl::StrCat(path, ", which others can write"),
                          absl::StrCat("a file that its owner alone can write: chmod go-w ", path));
    }
    std::string text(TlsContext::kFileBytesMax + 1, '\0');
    size_t bytes = 0;
    while (bytes < text.size()) {
      const ssize_t n = read(fd, text.data() + bytes, text.size() - bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return unreadable();
      if (n == 0) break;
      bytes += static_cast<size_t>(n);
    }
    if (bytes == 0 || bytes > TlsContext::kFileBytesMax) {
      return InvalidField(flag, absl::StrCat(path, bytes == 0 ? ", which is empty" : ", which is too long"),
                          absl::StrCat("1..", TlsContext::kFileBytesMax, " bytes"));
    }
    text.resize(bytes);
    return text;
  };
  absl::StatusOr<std::string> text = check_and_read();
  close(fd);
  KV_RETURN_IF_ERROR(text.status());
  return TlsContext::Pem{absl::StrCat(flag, " ", path), *std::move(text)};
}

}  // namespace

absl::StatusOr<TlsContexts> ReadTlsFiles(const Options& options) {
  TlsContexts contexts;
  if (options.tls_cert.empty()) return contexts;
  TlsContext::Options clients;
  clients.accepts = true;
  KV_ASSIGN_OR_RETURN(clients.certificate, ReadPem("--tls-cert", options.tls_cert));
  clients.key.field = absl::StrCat("--tls-key ", options.tls_key);
  KV_ASSIGN_OR_RETURN(clients.key.text, ReadKeyFile("--tls-key", options.tls_key, 1, TlsContext::kFileBytesMax));
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
