// Certificates and keys for tests, made as they are needed. Nothing is random but the keys; no file is written, unless
// asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kvmanager/base/tls.h"

namespace kvmanager::testing {

struct PemPair {
  std::string certificate, key;
};

struct CertificateOptions {
  std::string common_name;
  std::vector<std::string> names;  // of subjectAltName, as OpenSSL writes them: "DNS:a", "IP:127.0.0.1", "URI:..."
  std::string usage = "serverAuth,clientAuth";  // extendedKeyUsage; empty: none
  int64_t begins_s = -3600, ends_s = 3600;      // from now
  std::string names_der;                        // in place of names: what subjectAltName holds, well-formed or not
};

/// Signs certificates. One thread.
class TestAuthority {
 public:
  explicit TestAuthority(absl::string_view name = "test authority");
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  const std::string& certificate() const { return certificate_; }
  PemPair Sign(const CertificateOptions& options);
  /// Of a daemon on this host.
  PemPair Daemon() { return Sign({"daemon", {"DNS:localhost", "IP:127.0.0.1"}}); }
  /// Of a client of this name.
  PemPair Client(const std::string& name) { return Sign({name, {}, "clientAuth"}); }

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
  std::string certificate_;
};

/// Writes a file that its owner alone can read.
void WriteSecret(const std::string& path, absl::string_view text);

/// What a side that accepts or dials is made of; authorities: of whom it takes certificates, empty: of none.
std::shared_ptr<const TlsContext> AcceptContext(const PemPair& own, const std::string& authorities,
                                                bool certificate_required = false, bool daemons_only = false);
std::shared_ptr<const TlsContext> DialContext(const PemPair& own, const std::string& authorities);

/// Mutual, of two daemons that both have `own`.
TlsContexts PeerContexts(const PemPair& own, const std::string& authorities);

}  // namespace kvmanager::testing
