// How two daemons prove to each other that they have the same key (--peer-key), before anything else is said on a TCP
// connection. Only bytes in and bytes out; a value of one thread. peer_auth.h carries them over a socket.
//
// D dials and A accepts. Integers are little-endian, lengths fixed:
//   D: CHALLENGE  0  8  magic "KVMAUTH\0"
//                 8  2  version, 1
//                10  6  zero
//                16 32  D's nonce
//   A: ANSWER     0 16  as CHALLENGE
//                16 32  A's nonce
//                48 32  HMAC-SHA256(key, "kvmanager acceptor" D's nonce A's nonce)
//   D: PROOF      0 32  HMAC-SHA256(key, "kvmanager dialer" D's nonce A's nonce)
// Then both go on as without a key: HELLO (wire.h) follows. In place of ANSWER, or after a wrong PROOF, A may send
//   REFUSAL       0  8  magic, 8 2 version
//                10  1  1
//                11 13  zero
// and closes: as long as HELLO, so that a peer without a key reads it in that place.
//
// A nonce is 32 random bytes, of each connection anew: what was said on one is worth nothing on another. The two proofs
// are of different texts, so that neither can be sent back as the other. The exchange says who is there when the
// connection begins; what follows is neither encrypted nor authenticated.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::tcp {

inline constexpr size_t kPeerKeyBytesMin = 32, kPeerKeyBytesMax = 4096;
inline constexpr char kAuthMagic[8] = {'K', 'V', 'M', 'A', 'U', 'T', 'H', '\0'};
inline constexpr uint16_t kAuthVersion = 1;
inline constexpr size_t kNonceBytes = 32, kProofBytes = 32;
inline constexpr size_t kAuthHeadBytes = 16;  // of CHALLENGE, ANSWER and REFUSAL: which of them it is
inline constexpr size_t kChallengeBytes = kAuthHeadBytes + kNonceBytes;
inline constexpr size_t kAnswerBytes = kChallengeBytes + kProofBytes;
inline constexpr size_t kRefusalBytes = 24;

// What a peer that has not proved the key may take.
inline constexpr int64_t kAuthMs = 2000;                 // for the whole exchange
inline constexpr size_t kAuthenticatingMax = 256;        // accepted connections in it at once
inline constexpr size_t kAuthenticatingOfHostMax = 128;  // of those, of one host
inline constexpr size_t kAuthDrainBytes = 64 << 10;      // read after a refusal, so that it is not lost

using Nonce = std::array<uint8_t, kNonceBytes>;
using Proof = std::array<uint8_t, kProofBytes>;

enum class AuthRole { kDialer, kAcceptor };

/// The proof that `of` sends.
Proof ProofOf(absl::string_view key, AuthRole of, const Nonce& dialer, const Nonce& acceptor);
std::string EncodeChallenge(const Nonce& nonce);
std::string EncodeAnswer(const Nonce& nonce, const Proof& proof);
std::string EncodeRefusal();

/// Whether `bytes` begin as CHALLENGE, ANSWER and REFUSAL do.
bool IsAuthMagic(absl::Span<const uint8_t> bytes);

/// UNAUTHENTICATED: a peer that has a key said so to a daemon that has none.
absl::Status PeerWantsKey();

/// One side of the exchange.
class AuthExchange {
 public:
  /// key: kPeerKeyBytesMin..Max bytes, which outlive this.
  AuthExchange(absl::string_view key, AuthRole role);
  /// What to send at first; empty: nothing.
  std::string Begin() const;
  /// How many bytes of the peer are to be read next. 0: both have the key, once everything was sent.
  size_t wants() const { return wants_; }
  /// Takes wants() bytes; returns what to send next. UNAUTHENTICATED: the peer has not proved the key. Nothing may
  /// follow; an acceptor sends EncodeRefusal().
  absl::StatusOr<std::string> Read(absl::Span<const uint8_t> bytes);

 private:
  absl::Status CheckHead(absl::Span<const uint8_t> head) const;

  const absl::string_view key_;
  const AuthRole role_;
  Nonce ours_;
  Nonce theirs_ = {};
  bool head_read_ = false, answered_ = false;
  size_t wants_ = kAuthHeadBytes;
};

}  // namespace kvmanager::tcp
