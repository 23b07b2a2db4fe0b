#include "client/tls_dial.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

// secret: other users must not be able to read it.
absl::StatusOr<TlsContext::Pem> ReadPem(absl::string_view field, const std::string& path, bool secret) {
  TlsContext::Pem pem{absl::StrCat(field, " ", path), ""};
  if (path.empty()) return pem;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return InvalidField(field, path, absl::StrCat("a file that can be read (", std::strerror(errno), ")"));
  struct stat info = {};
  const bool plain = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  ssize_t n = 0;
  if (plain) {
    pem.text.resize(TlsContext::kFileBytesMax + 1);
    n = ::read(fd, pem.text.data(), pem.text.size());
  }
  ::close(fd);
  if (!plain) return InvalidField(field, path, "a plain file");
  if (secret && (info.st_mode & S_IRWXO) != 0) {
    return InvalidField(field, absl::StrCat(path, ", which every user can read or write"),
                        absl::StrCat("a file of its owner's: chmod 600 ", path));
  }
  if (n <= 0 || size_t(n) > TlsContext::kFileBytesMax) {
    return InvalidField(field, path, absl::StrCat("a file of 1..", TlsContext::kFileBytesMax, " bytes"));
  }
  pem.text.resize(size_t(n));
  return pem;
}

absl::Status Cannot(const Address& address, absl::StatusCode code, absl::string_view why) {
  return absl::Status(code, absl::StrCat("cannot connect to ", address.text, ": ", why));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TlsContext>> MakeTlsContext(const Address& address,
                                                                 const Client::Options& options) {
  const bool any =
      !(options.tls_ca.empty() && options.tls_cert.empty() && options.tls_key.empty() && options.tls_name.empty());
  if (!address.is_tls) {
    if (address.is_unix || !any) return nullptr;
    return InvalidField("address", address.text, "tls:HOST:PORT where tls_ca, tls_cert, tls_key or tls_name are given");
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return InvalidField(options.tls_cert.empty() ? "tls_cert" : "tls_key", "missing",
                        "the other half of tls_cert and tls_key");
  }
  TlsContext::Options made;
  KV_ASSIGN_OR_RETURN(made.authorities, ReadPem("tls_ca", options.tls_ca, /*secret=*/false));
  if (options.tls_ca.empty()) made.authorities.field.clear();
  KV_ASSIGN_OR_RETURN(made.certificate, ReadPem("tls_cert", options.tls_cert, /*secret=*/false));
  KV_ASSIGN_OR_RETURN(made.key, ReadPem("tls_key", options.tls_key, /*secret=*/true));
  return TlsContext::Make(std::move(made));
}

absl::StatusOr<std::unique_ptr<TlsLink>> ShakeHands(std::shared_ptr<const TlsContext> context, const Address& address,
                                                    const Client::Options& options, int fd, int64_t timeout_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  auto link =
      std::make_unique<TlsLink>(std::move(context), fd, options.tls_name.empty() ? address.host : options.tls_name);
  for (;;) {
    const TlsLink::Step step = link->Handshake();
    if (step == TlsLink::Step::kDone) return link;
    if (step == TlsLink::Step::kFailed) return TlsFailure(address, link->failure());
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd waiting{fd, short(step == TlsLink::Step::kWantRead ? POLLIN : POLLOUT), 0};
    const int ready = ::poll(&waiting, 1, int(std::clamp<int64_t>(left.count(), 0, INT32_MAX)));
    if (ready == 0 || (ready < 0 && errno != EINTR)) {
      return Cannot(address, absl::StatusCode::kUnavailable,
                    absl::StrCat("no TLS handshake within ", timeout_ms, " ms; is it a kvmanagerd with --tls-cert?"));
    }
  }
}

absl::Status TlsFailure(const Address& address, const absl::Status& why) {
  std::string text(why.message());
  if (absl::IsFailedPrecondition(why)) {
    absl::StrAppend(&text, "; connect to tcp:", absl::string_view(address.text).substr(4),
                    " if nobody can read along on the way, or start the daemon with --tls-cert");
  } else if (absl::IsUnavailable(why)) {
    absl::StrAppend(&text, "; the daemon's log may say why, if it is one that speaks TLS (--tls-cert)");
  }
  return Cannot(address, why.code(), text);
}

absl::Status SpeaksTls(const Address& address) {
  return Cannot(
      address, absl::StatusCode::kFailedPrecondition,
      absl::StrCat("the daemon speaks TLS there; connect to tls:", absl::string_view(address.text).substr(4)));
}

}  // namespace kvmanager::client
