// TLS 1.3 on connected sockets (OpenSSL): TlsContext holds certificates and what is asked of the other side, TlsLink is
// one connection, TlsSwitch what a daemon uses at the moment.
//
// A side that dials always checks that the other's certificate is signed by its authorities and has the name or the IP
// address that it dialled, among the subject's alternative names. There is no way around it, no version below 1.3, no
// compression, no renegotiation, no session ticket and no early data.
//
// The name of a certificate, by which others know its owner, is one text: its first URI among the subject's alternative
// names, else its first DNS name there, else the subject's common name. It has 1..kNameBytesMax bytes and no control
// character; a certificate without one is refused.
//
// TlsContext: immutable, any thread. TlsSwitch: any thread. TlsLink: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/mutex.h"

struct ssl_st;
struct ssl_ctx_st;

namespace kvmanager {

class TlsContext {
 public:
  static constexpr size_t kFileBytesMax = 1 << 20;  // of each of the PEM files
  static constexpr size_t kNameBytesMax = 200;
  static constexpr int64_t kExpiresSoonS = 7 * 24 * 3600;
  static constexpr uint64_t kRekeyBytes = uint64_t{1} << 36;  // far below what AES-GCM allows for a key

  /// A PEM text, and what errors call it: "--tls-cert /etc/kvmanager/tls.crt".
  struct Pem {
    std::string field, text;
  };
  struct Options {
    bool accepts = false;  // else it dials
    Pem certificate;       // the chain, this side's own first; empty: none, of a side that dials
    Pem key;               // of it; without a passphrase
    Pem authorities;       // whose certificates are taken; empty: the system's for who dials, none for who accepts
    bool certificate_required = false;   // of who accepts: the other side must show a certificate
    bool daemons_only = false;           // of who accepts: it must say extendedKeyUsage=serverAuth, as a daemon's does
    uint64_t rekey_bytes = kRekeyBytes;  // written under one key
  };

  /// Errors: INVALID_ARGUMENT naming the field.
  static absl::StatusOr<std::shared_ptr<const TlsContext>> Make(Options options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  ssl_ctx_st* get() const { return context_; }
  const Options& options() const { return options_; }  // without the key's text
  /// Of its own certificate, for people: "NAME, until DATE"; empty: it has none.
  const std::string& description() const { return description_; }
  /// What people should know of its dates: it has expired, does so within kExpiresSoonS, or is not valid yet; empty:
  /// nothing.
  std::string DateWarning(int64_t now_unix_s) const;

 private:
  TlsContext() = default;
  absl::Status Load();

  Options options_;
  ssl_ctx_st* context_ = nullptr;
  std::string description_;
  int64_t from_unix_s_ = INT64_MIN, until_unix_s_ = INT64_MAX;  // its own certificate is valid
};

/// What a daemon uses for connections that begin now; nullptr: no TLS there.
struct TlsContexts {
  std::shared_ptr<const TlsContext> clients;              // that connect
  std::shared_ptr<const TlsContext> peers_in, peers_out;  // both or none
};

class TlsSwitch {
 public:
  void Set(TlsContexts contexts);
  TlsContexts Get() const;

 private:
  mutable Mutex mutex_;
  TlsContexts contexts_ ABSL_GUARDED_BY(mutex_);
};

class TlsLink {
 public:
  enum class Step { kDone, kWantRead, kWantWrite, kFailed };
  static constexpr size_t kRecordBytes = 16 << 10;  // the most that one Read gives
  static constexpr int kKeyUpdatesMax = 1024;  // that the other side may begin: each costs more to obey than to send

  /// fd: a connected stream socket; it stays open while this lives, which neither blocks on it nor closes it. name: of
  /// the other side, a host's name or IP address, which its certificate must have; needed where the context dials.
  TlsLink(std::shared_ptr<const TlsContext> context, int fd, std::string name = "");
  /// Says that no more comes, if the socket takes it.
  ~TlsLink();
  TlsLink(const TlsLink&) = delete;
  TlsLink& operator=(const TlsLink&) = delete;

  /// Goes on with the handshake as far as the socket allows.
  Step Handshake();
  /// Bytes read, 0 at an end that the other side announced, -1: nothing now, -2: failure() says why it is over. It may
  /// give less than the socket has: only -1 means that the socket has nothing more.
  int64_t Read(void* to, size_t bytes_max);
  /// Bytes taken, -1: the socket takes nothing now, and the next Write must begin with the same bytes; -2.
  int64_t Write(const void* from, size_t bytes);
  /// No more is written: the other side is told.
  void EndWriting();

  /// Why a step failed. UNAUTHENTICATED: one of both sides refused the other's certificate, and which;
  /// FAILED_PRECONDITION: the other side does not speak TLS, or not this version; UNAVAILABLE: the connection ended,
  /// perhaps cut off by somebody else; DATA_LOSS: bytes that are no TLS, or were changed.
  const absl::Status& failure() const { return failure_; }
  /// Of the other side's certificate; empty: it showed none. After the handshake.
  const std::string& peer_name() const { return peer_name_; }

 private:
  friend struct TlsCallbacks;
  Step After(int result, bool handshake);
  absl::Status WhyFailed(int error, bool handshake, bool* plain) const;

  const std::shared_ptr<const TlsContext> context_;  // shared: the switch may have moved on
  const std::string name_;
  ssl_st* ssl_ = nullptr;
  bool dials_ = false, done_ = false, ended_ = false;
  bool eof_ = false;  // of the socket
  int error_ = 0;     // errno of the socket's last call
  int key_updates_ = 0;
  uint64_t written_ = 0;  // under the present key
  std::string refused_;   // why this side refused the other's certificate
  std::string peer_name_;
  absl::Status failure_;
};

}  // namespace kvmanager
