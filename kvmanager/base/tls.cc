#include "kvmanager/base/tls.h"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kReadAheadBytes = 64 << 10;
constexpr int kSecurityLevel = 2;   // 112 bits
constexpr int kAlertReason = 1000;  // above it are alerts: SSL_AD_REASON_OFFSET

template <typename T, void (*kFree)(T*)>
struct Freed {
  void operator()(T* object) const { kFree(object); }
};
using X509Ptr = std::unique_ptr<X509, Freed<X509, X509_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY, EVP_PKEY_free>>;
using NamesPtr = std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES, GENERAL_NAMES_free>>;
using BioPtr = std::unique_ptr<BIO, Freed<BIO, BIO_free_all>>;

// OpenSSL's newest error as text; its queue is empty afterwards.
std::string TakeError() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  const char* const reason = error == 0 ? nullptr : ERR_reason_error_string(error);
  return reason == nullptr ? "unknown error" : reason;
}

BioPtr Memory(const std::string& text) { return BioPtr(BIO_new_mem_buf(text.data(), int(text.size()))); }

int NoPassphrase(char*, int, int, void*) { return 0; }

std::string DateOf(const ASN1_TIME* time) {
  tm parts = {};
  char text[32];
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "an unknown date";
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts));
}

// INT64_MAX: unknown.
int64_t UnixSecondsOf(const ASN1_TIME* time) {
  tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? int64_t{timegm(&parts)} : INT64_MAX;
}

// "": not fit for a name.
std::string TextOf(const ASN1_STRING* string) {
  unsigned char* bytes = nullptr;
  const int size = ASN1_STRING_to_UTF8(&bytes, string);
  if (size < 0) return "";
  std::string text(reinterpret_cast<char*>(bytes), size_t(size));
  OPENSSL_free(bytes);
  const bool control = std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 127; });
  return control || text.size() > TlsContext::kNameBytesMax ? "" : text;
}

std::string NameOf(X509* certificate) {
  const NamesPtr names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (const int type : {GEN_URI, GEN_DNS}) {
    for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
      const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
      if (name->type == type) return TextOf(type == GEN_URI ? name->d.uniformResourceIdentifier : name->d.dNSName);
    }
  }
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  return at < 0 ? "" : TextOf(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
}

// The names under which a server's certificate may be dialled, for people.
std::string HostsOf(X509* certificate) {
  const NamesPtr names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::string hosts;
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    std::string host;
    if (name->type == GEN_DNS) host = TextOf(name->d.dNSName);
    if (name->type == GEN_IPADD) {
      char text[INET6_ADDRSTRLEN] = "";
      const ASN1_OCTET_STRING* const ip = name->d.iPAddress;
      if (ip->length != 4 && ip->length != 16) continue;  // whoever signs may write any length
      inet_ntop(ip->length == 4 ? AF_INET : AF_INET6, ip->data, text, sizeof text);
      host = text;
    }
    if (!host.empty()) absl::StrAppend(&hosts, hosts.empty() ? "" : ", ", host);
  }
  return hosts.empty() ? "no host" : hosts;
}

// A socket that does not block and raises no signal, as OpenSSL reads and writes it. Its data is the link.
int SocketWrite(BIO* bio, const char* bytes, int size);
int SocketRead(BIO* bio, char* bytes, int size);
long SocketControl(BIO* bio, int command, long, void*);

BIO_METHOD* SocketMethod() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvmanager socket");
    KV_CHECK(made != nullptr);
    BIO_meth_set_write(made, SocketWrite);
    BIO_meth_set_read(made, SocketRead);
    BIO_meth_set_ctrl(made, SocketControl);
    return made;
  }();
  return method;
}

}  // namespace

struct TlsCallbacks {
  struct Socket {
    TlsLink* link;
    int fd;
  };

  static int Verify(int ok, X509_STORE_CTX* store) {
    auto* const ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto* const link = static_cast<TlsLink*>(SSL_get_app_data(ssl));
    X509* const certificate = X509_STORE_CTX_get_current_cert(store);
    if (ok != 1) {
      link->refused_ = Why(*link, X509_STORE_CTX_get_error(store), certificate);
      return 0;
    }
    if (X509_STORE_CTX_get_error_depth(store) != 0) return 1;
    link->peer_name_ = NameOf(certificate);
    if (!link->dials_ && link->peer_name_.empty()) {
      link->refused_ = absl::StrCat(
          "it has no name of 1..", TlsContext::kNameBytesMax,
          " bytes without control characters; give it a URI or DNS name in subjectAltName, or a common name");
    } else if (const uint32_t usage = X509_get_extended_key_usage(certificate);
               link->context_->options().daemons_only &&
               ((X509_get_extension_flags(certificate) & EXFLAG_XKUSAGE) == 0 || (usage & XKU_SSL_SERVER) == 0)) {
      link->refused_ = "it is not a daemon's; make it with extendedKeyUsage=serverAuth,clientAuth";
    } else {
      return 1;
    }
    X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
    return 0;
  }

  static std::string Why(const TlsLink& link, int error, X509* certificate) {
    const std::string& authorities = link.context_->options().authorities.field;
    switch (error) {
      case X509_V_ERR_CERT_HAS_EXPIRED:
        return absl::StrCat("it has expired on ", DateOf(X509_get0_notAfter(certificate)), "; renew it");
      case X509_V_ERR_CERT_NOT_YET_VALID:
        return absl::StrCat("it is valid from ", DateOf(X509_get0_notBefore(certificate)), " on; compare the clocks");
      case X509_V_ERR_HOSTNAME_MISMATCH:
      case X509_V_ERR_IP_ADDRESS_MISMATCH:
        return absl::StrCat("it is for ", HostsOf(certificate), ", not for ", link.name_,
                            "; connect to a name that it has, or say which one is meant");
      case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
      case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
      case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
      case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
      case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        return absl::StrCat("it is not signed by an authority of ",
                            authorities.empty() ? std::string("the system; name the file of yours") : authorities);
      case X509_V_ERR_INVALID_PURPOSE:
        return absl::StrCat("it is not for ", link.dials_ ? "servers" : "clients",
                            "; make it with extendedKeyUsage=", link.dials_ ? "serverAuth" : "clientAuth");
      default:
        return X509_verify_cert_error_string(error);
    }
  }

  static void Message(int sent, int, int content, const void* bytes, size_t size, SSL* ssl, void*) {
    if (sent != 0 || content != SSL3_RT_HANDSHAKE || size == 0) return;
    if (*static_cast<const uint8_t*>(bytes) != SSL3_MT_KEY_UPDATE) return;
    auto* const link = static_cast<TlsLink*>(SSL_get_app_data(ssl));
    // Reading then fails as if the other side had gone.
    if (++link->key_updates_ == TlsLink::kKeyUpdatesMax) {
      ::shutdown(static_cast<Socket*>(BIO_get_data(SSL_get_rbio(ssl)))->fd, SHUT_RDWR);
    }
  }

  static void NoteError(Socket& socket, int error) { socket.link->error_ = error; }
  static void NoteEnd(Socket& socket) { socket.link->eof_ = true; }
  static bool Ended(const Socket& socket) { return socket.link->eof_; }
};

namespace {

int SocketWrite(BIO* bio, const char* bytes, int size) {
  auto& socket = *static_cast<TlsCallbacks::Socket*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  ssize_t n;
  do {
    n = ::send(socket.fd, bytes, size_t(size), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    BIO_set_retry_write(bio);
  } else if (n < 0) {
    TlsCallbacks::NoteError(socket, errno);
  }
  return int(n);
}

int SocketRead(BIO* bio, char* bytes, int size) {
  auto& socket = *static_cast<TlsCallbacks::Socket*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  ssize_t n;
  do {
    n = ::recv(socket.fd, bytes, size_t(size), MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n == 0) TlsCallbacks::NoteEnd(socket);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    BIO_set_retry_read(bio);
  } else if (n < 0) {
    TlsCallbacks::NoteError(socket, errno);
  }
  return int(n);
}

long SocketControl(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_FLUSH) return 1;
  if (command == BIO_CTRL_EOF) return TlsCallbacks::Ended(*static_cast<TlsCallbacks::Socket*>(BIO_get_data(bio)));
  return 0;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Make(Options options) {
  std::shared_ptr<TlsContext> result(new TlsContext());
  result->options_ = std::move(options);
  const absl::Status loaded = result->Load();
  OPENSSL_cleanse(result->options_.key.text.data(), result->options_.key.text.size());
  result->options_.key.text.clear();
  ERR_clear_error();
  KV_RETURN_IF_ERROR(loaded);
  return std::shared_ptr<const TlsContext>(std::move(result));
}

std::string TlsContext::DateWarning(int64_t now_unix_s) const {
  if (now_unix_s > until_unix_s_) {
    return absl::StrCat("the certificate of ", description_, ", has expired: others refuse it; renew it");
  }
  if (now_unix_s < from_unix_s_) {
    return absl::StrCat("the certificate of ", description_,
                        ", is not valid yet: others refuse it; compare the clocks");
  }
  if (until_unix_s_ - now_unix_s <= kExpiresSoonS) {
    return absl::StrCat("the certificate of ", description_, ", expires within ", kExpiresSoonS / 86400,
                        " days: renew it, and send SIGHUP");
  }
  return "";
}

TlsContext::~TlsContext() { SSL_CTX_free(context_); }

absl::Status TlsContext::Load() {
  const bool accepts = options_.accepts;
  const Pem &certificate = options_.certificate, &key = options_.key, &authorities = options_.authorities;
  const auto wrong = [](const Pem& pem, absl::string_view what) {
    return InvalidField(pem.field, absl::StrCat("wrong: ", TakeError()), what);
  };
  context_ = SSL_CTX_new(accepts ? TLS_server_method() : TLS_client_method());
  if (context_ == nullptr) return absl::ResourceExhaustedError(absl::StrCat("making a TLS context: ", TakeError()));
  SSL_CTX_set_security_level(context_, kSecurityLevel);
  SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION);
  SSL_CTX_set_options(context_, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_num_tickets(context_, 0);
  SSL_CTX_set_session_cache_mode(context_, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context_,
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_read_ahead(context_, 1);
  SSL_CTX_set_default_read_buffer_len(context_, kReadAheadBytes);
  SSL_CTX_set_msg_callback(context_, TlsCallbacks::Message);

  if (!certificate.text.empty()) {
    const BioPtr chain = Memory(certificate.text);
    const X509Ptr own(PEM_read_bio_X509(chain.get(), nullptr, NoPassphrase, nullptr));
    if (own == nullptr || SSL_CTX_use_certificate(context_, own.get()) != 1) {
      return wrong(certificate, "a certificate in PEM, those that signed it behind it");
    }
    while (X509* const next = PEM_read_bio_X509(chain.get(), nullptr, NoPassphrase, nullptr)) {
      if (SSL_CTX_add0_chain_cert(context_, next) == 1) continue;
      X509_free(next);
      return wrong(certificate, "certificates in PEM");
    }
    ERR_clear_error();
    const KeyPtr secret(PEM_read_bio_PrivateKey(Memory(key.text).get(), nullptr, NoPassphrase, nullptr));
    if (secret == nullptr) return wrong(key, "a private key in PEM without a passphrase");
    if (SSL_CTX_use_PrivateKey(context_, secret.get()) != 1 || SSL_CTX_check_private_key(context_) != 1) {
      return wrong(key, absl::StrCat("the key of ", certificate.field));
    }
    const std::string name = NameOf(own.get());
    description_ = absl::StrCat(name.empty() ? "no name" : name, ", until ", DateOf(X509_get0_notAfter(own.get())));
    from_unix_s_ = UnixSecondsOf(X509_get0_notBefore(own.get()));
    until_unix_s_ = UnixSecondsOf(X509_get0_notAfter(own.get()));
  }
  if (!authorities.text.empty()) {
    const BioPtr list = Memory(authorities.text);
    int count = 0;
    while (const X509Ptr each{PEM_read_bio_X509(list.get(), nullptr, NoPassphrase, nullptr)}) {
      if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context_), each.get()) != 1) {
        return wrong(authorities, "certificates in PEM");
      }
      ++count;
    }
    if (count == 0) return wrong(authorities, "certificates in PEM, of who signs those of others");
  } else if (!accepts) {
    SSL_CTX_set_default_verify_paths(context_);
  }
  int mode = SSL_VERIFY_NONE;
  if (!accepts || !authorities.text.empty()) mode = SSL_VERIFY_PEER;
  if (options_.certificate_required) mode |= SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
  SSL_CTX_set_verify(context_, mode, TlsCallbacks::Verify);
  return absl::OkStatus();
}

void TlsSwitch::Set(TlsContexts contexts) {
  MutexLock lock(mutex_);
  std::swap(contexts_, contexts);
}

TlsContexts TlsSwitch::Get() const {
  MutexLock lock(mutex_);
  return contexts_;
}

TlsLink::TlsLink(std::shared_ptr<const TlsContext> context, int fd, std::string name)
    : context_(std::move(context)), name_(std::move(name)), dials_(!context_->options().accepts) {
  ssl_ = SSL_new(context_->get());
  KV_CHECK(ssl_ != nullptr);
  SSL_set_app_data(ssl_, this);
  BIO* const bio = BIO_new(SocketMethod());
  KV_CHECK(bio != nullptr);
  BIO_set_data(bio, new TlsCallbacks::Socket{this, fd});
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_, bio, bio);
  if (!dials_) {
    SSL_set_accept_state(ssl_);
    return;
  }
  SSL_set_connect_state(ssl_);
  KV_CHECK(!name_.empty());
  X509_VERIFY_PARAM* const verified = SSL_get0_param(ssl_);
  X509_VERIFY_PARAM_set_hostflags(verified, X509_CHECK_FLAG_NEVER_CHECK_SUBJECT | X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (X509_VERIFY_PARAM_set1_ip_asc(verified, name_.c_str()) == 1) return;
  ERR_clear_error();
  KV_CHECK(X509_VERIFY_PARAM_set1_host(verified, name_.data(), name_.size()) == 1);
  SSL_set_tlsext_host_name(ssl_, name_.c_str());
}

TlsLink::~TlsLink() {
  if (done_ && failure_.ok()) EndWriting();
  delete static_cast<TlsCallbacks::Socket*>(BIO_get_data(SSL_get_rbio(ssl_)));
  SSL_free(ssl_);
}

TlsLink::Step TlsLink::Handshake() {
  if (!failure_.ok()) return Step::kFailed;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_);
  if (result != 1) return After(result, /*handshake=*/true);
  done_ = true;
  return Step::kDone;
}

int64_t TlsLink::Read(void* to, size_t bytes_max) {
  if (!failure_.ok()) return -2;
  ERR_clear_error();
  const int n = SSL_read(ssl_, to, int(std::min<size_t>(bytes_max, INT_MAX)));
  if (n > 0) return n;
  if (SSL_get_error(ssl_, n) == SSL_ERROR_ZERO_RETURN) return 0;
  return After(n, /*handshake=*/false) == Step::kFailed ? -2 : -1;
}

int64_t TlsLink::Write(const void* from, size_t bytes) {
  if (!failure_.ok()) return -2;
  ERR_clear_error();
  if (written_ >= context_->options().rekey_bytes) {
    written_ = 0;
    SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
  }
  const int n = SSL_write(ssl_, from, int(std::min<size_t>(bytes, INT_MAX)));
  if (n <= 0) return After(n, /*handshake=*/false) == Step::kFailed ? -2 : -1;
  written_ += uint64_t(n);
  return n;
}

void TlsLink::EndWriting() {
  if (std::exchange(ended_, true) || !done_ || !failure_.ok()) return;
  ERR_clear_error();
  SSL_shutdown(ssl_);
  ERR_clear_error();
}

TlsLink::Step TlsLink::After(int result, bool handshake) {
  const int error = SSL_get_error(ssl_, result);
  if (error == SSL_ERROR_WANT_READ) return Step::kWantRead;
  if (error == SSL_ERROR_WANT_WRITE) return Step::kWantWrite;
  bool plain = false;
  failure_ = WhyFailed(error, handshake, &plain);
  ERR_clear_error();
  // OpenSSL says nothing to who does not speak TLS. This tells it that here somebody does.
  if (plain && !dials_) {
    const uint8_t alert[] = {SSL3_RT_ALERT, 3, 1, 0, 2, SSL3_AL_FATAL, TLS1_AD_PROTOCOL_VERSION};
    const int fd = static_cast<TlsCallbacks::Socket*>(BIO_get_data(SSL_get_wbio(ssl_)))->fd;
    (void)!::send(fd, alert, sizeof alert, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return Step::kFailed;
}

absl::Status TlsLink::WhyFailed(int error, bool handshake, bool* plain) const {
  const std::string other = name_.empty() ? "the other side" : name_;
  if (!refused_.empty()) {
    return absl::UnauthenticatedError(absl::StrCat("this side refused the certificate of ", other, ": ", refused_));
  }
  const unsigned long code = error == SSL_ERROR_SSL ? ERR_peek_error() : 0;
  const int reason = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
  const auto refused = [&](absl::string_view why) {
    return absl::UnauthenticatedError(absl::StrCat(other, " refused this side's certificate: ", why));
  };
  switch (reason) {
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return absl::UnauthenticatedError("this side refused the other: it showed no certificate, and has to");
    case kAlertReason + TLS13_AD_CERTIFICATE_REQUIRED:
      return absl::UnauthenticatedError(
          absl::StrCat(other, " asks for a certificate, and this side showed none; give one and its key"));
    case kAlertReason + TLS1_AD_UNKNOWN_CA:
      return refused("it does not know the authority that signed it");
    case kAlertReason + SSL3_AD_CERTIFICATE_EXPIRED:
      return refused("it has expired; renew it");
    case kAlertReason + SSL3_AD_BAD_CERTIFICATE:
    case kAlertReason + SSL3_AD_UNSUPPORTED_CERTIFICATE:
    case kAlertReason + SSL3_AD_CERTIFICATE_REVOKED:
    case kAlertReason + SSL3_AD_CERTIFICATE_UNKNOWN:
      return refused("its log says why");
    case kAlertReason + SSL3_AD_HANDSHAKE_FAILURE:
      if (done_) return refused("its log says why");
      break;
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
    case SSL_R_PACKET_LENGTH_TOO_LONG:
    case SSL_R_UNEXPECTED_MESSAGE:
      if (!handshake) break;
      *plain = true;
      return absl::FailedPreconditionError(absl::StrCat(other, " does not speak TLS"));
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case kAlertReason + TLS1_AD_PROTOCOL_VERSION:
      return absl::FailedPreconditionError(absl::StrCat(other, " has no TLS 1.3, which is needed"));
    default:
      break;
  }
  if (eof_ || error_ != 0) {
    const char* const how = eof_ ? "was closed" : std::strerror(error_);
    if (key_updates_ >= kKeyUpdatesMax) return absl::DataLossError("the other side changes its key without end");
    if (handshake) return absl::UnavailableError(absl::StrCat("the connection failed in the TLS handshake: ", how));
    return absl::UnavailableError(absl::StrCat("the connection ended without TLS's close_notify: ", how));
  }
  const char* const text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return absl::DataLossError(absl::StrCat("TLS with ", other, ": ", text == nullptr ? "unknown error" : text));
}

}  // namespace kvmanager
