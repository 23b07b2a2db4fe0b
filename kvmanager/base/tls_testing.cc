#include "kvmanager/base/tls_testing.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_join.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

std::string TextOf(BIO* bio) {
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(bio, &bytes);
  std::string text(bytes, size_t(size));
  BIO_free(bio);
  return text;
}

std::string PemOf(X509* certificate) {
  BIO* const bio = BIO_new(BIO_s_mem());
  KV_CHECK(PEM_write_bio_X509(bio, certificate) == 1);
  return TextOf(bio);
}

std::string PemOf(EVP_PKEY* key) {
  BIO* const bio = BIO_new(BIO_s_mem());
  KV_CHECK(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return TextOf(bio);
}

void Extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  KV_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

void ExtendRaw(X509* certificate, int nid, const std::string& der) {
  ASN1_OCTET_STRING* const value = ASN1_OCTET_STRING_new();
  KV_CHECK(ASN1_OCTET_STRING_set(value, reinterpret_cast<const unsigned char*>(der.data()), int(der.size())) == 1);
  X509_EXTENSION* const extension = X509_EXTENSION_create_by_NID(nullptr, nid, 0, value);
  KV_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
  ASN1_OCTET_STRING_free(value);
}

X509* Begin(EVP_PKEY* key, const std::string& name, int64_t begins_s, int64_t ends_s, long serial) {
  X509* const made = X509_new();
  X509_set_version(made, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made), serial);
  X509_gmtime_adj(X509_getm_notBefore(made), long(begins_s));
  X509_gmtime_adj(X509_getm_notAfter(made), long(ends_s));
  X509_set_pubkey(made, key);
  if (!name.empty()) {
    KV_CHECK(X509_NAME_add_entry_by_txt(X509_get_subject_name(made), "CN", MBSTRING_UTF8,
                                        reinterpret_cast<const unsigned char*>(name.data()), int(name.size()), -1,
                                        0) == 1);
  }
  return made;
}

TlsContext::Options Options(bool accepts, const PemPair& own, const std::string& authorities) {
  TlsContext::Options options;
  options.accepts = accepts;
  options.certificate = {"certificate", own.certificate};
  options.key = {"key", own.key};
  options.authorities = {"ca.pem", authorities};
  return options;
}

std::shared_ptr<const TlsContext> Made(TlsContext::Options options) {
  auto made = TlsContext::Make(std::move(options));
  KV_CHECK(made.ok());
  return *std::move(made);
}

}  // namespace

struct TestAuthority::Impl {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = nullptr;
  long serial = 1;
};

TestAuthority::TestAuthority(absl::string_view name) : impl_(std::make_unique<Impl>()) {
  X509*& own = impl_->certificate;
  own = Begin(impl_->key, std::string(name), -7200, 7200, impl_->serial++);
  X509_set_issuer_name(own, X509_get_subject_name(own));
  Extend(own, own, NID_basic_constraints, "critical,CA:TRUE");
  Extend(own, own, NID_key_usage, "critical,keyCertSign");
  Extend(own, own, NID_subject_key_identifier, "hash");
  KV_CHECK(X509_sign(own, impl_->key, EVP_sha256()) > 0);
  certificate_ = PemOf(own);
}

TestAuthority::~TestAuthority() {
  X509_free(impl_->certificate);
  EVP_PKEY_free(impl_->key);
}

PemPair TestAuthority::Sign(const CertificateOptions& options) {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const made = Begin(key, options.common_name, options.begins_s, options.ends_s, impl_->serial++);
  X509_set_issuer_name(made, X509_get_subject_name(impl_->certificate));
  Extend(made, impl_->certificate, NID_basic_constraints, "critical,CA:FALSE");
  if (!options.usage.empty()) Extend(made, impl_->certificate, NID_ext_key_usage, options.usage);
  if (!options.names.empty()) {
    Extend(made, impl_->certificate, NID_subject_alt_name, absl::StrJoin(options.names, ","));
  }
  if (!options.names_der.empty()) ExtendRaw(made, NID_subject_alt_name, options.names_der);
  KV_CHECK(X509_sign(made, impl_->key, EVP_sha256()) > 0);
  PemPair result{PemOf(made), PemOf(key)};
  X509_free(made);
  EVP_PKEY_free(key);
  return result;
}

void WriteSecret(const std::string& path, absl::string_view text) {
  ::unlink(path.c_str());
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  KV_CHECK(fd >= 0 && ::write(fd, text.data(), text.size()) == ssize_t(text.size()));
  ::close(fd);
}

std::shared_ptr<const TlsContext> AcceptContext(const PemPair& own, const std::string& authorities,
                                                bool certificate_required, bool daemons_only) {
  TlsContext::Options options = Options(true, own, authorities);
  options.certificate_required = certificate_required;
  options.daemons_only = daemons_only;
  return Made(std::move(options));
}

std::shared_ptr<const TlsContext> DialContext(const PemPair& own, const std::string& authorities) {
  return Made(Options(false, own, authorities));
}

TlsContexts PeerContexts(const PemPair& own, const std::string& authorities) {
  return {nullptr, AcceptContext(own, authorities, true, true), DialContext(own, authorities)};
}

}  // namespace kvmanager::testing
