#include "transport/tcp/peer_key.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kVersionAt = 8, kRefusedAt = 10;
constexpr char kHelloMagic[8] = {'K', 'V', 'M', 'P', 'A', 'G', 'E', '\0'};

std::string Head() {
  std::string head(kAuthHeadBytes, '\0');
  std::memcpy(head.data(), kAuthMagic, sizeof(kAuthMagic));
  head[kVersionAt] = static_cast<char>(kAuthVersion & 0xff);
  head[kVersionAt + 1] = static_cast<char>(kAuthVersion >> 8);
  return head;
}

template <size_t size>
void Append(const std::array<uint8_t, size>& bytes, std::string* out) {
  out->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

bool Same(absl::Span<const uint8_t> bytes, const Proof& proof) {
  return bytes.size() == proof.size() && CRYPTO_memcmp(bytes.data(), proof.data(), proof.size()) == 0;
}

bool Begins(absl::Span<const uint8_t> bytes, const char (&magic)[8]) {
  return bytes.size() >= sizeof(magic) && std::memcmp(bytes.data(), magic, sizeof(magic)) == 0;
}

}  // namespace

Proof ProofOf(absl::string_view key, AuthRole of, const Nonce& dialer, const Nonce& acceptor) {
  std::string text = of == AuthRole::kDialer ? "kvmanager dialer" : "kvmanager acceptor";
  Append(dialer, &text);
  Append(acceptor, &text);
  Proof proof;
  unsigned size = 0;
  KV_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const uint8_t*>(text.data()),
                text.size(), proof.data(), &size) != nullptr &&
           size == proof.size());
  return proof;
}

std::string EncodeChallenge(const Nonce& nonce) {
  std::string out = Head();
  Append(nonce, &out);
  return out;
}

std::string EncodeAnswer(const Nonce& nonce, const Proof& proof) {
  std::string out = EncodeChallenge(nonce);
  Append(proof, &out);
  return out;
}

std::string EncodeRefusal() {
  std::string out = Head();
  out.resize(kRefusalBytes);
  out[kRefusedAt] = 1;
  return out;
}

bool IsAuthMagic(absl::Span<const uint8_t> bytes) { return Begins(bytes, kAuthMagic); }

absl::Status PeerWantsKey() {
  return absl::UnauthenticatedError("the peer wants a key: start this daemon with --peer-key FILE, of the same bytes");
}

AuthExchange::AuthExchange(absl::string_view key, AuthRole role) : key_(key), role_(role) {
  KV_CHECK(key.size() >= kPeerKeyBytesMin && key.size() <= kPeerKeyBytesMax);
  KV_CHECK(RAND_bytes(ours_.data(), static_cast<int>(ours_.size())) == 1);
}

std::string AuthExchange::Begin() const { return role_ == AuthRole::kDialer ? EncodeChallenge(ours_) : std::string(); }

absl::Status AuthExchange::CheckHead(absl::Span<const uint8_t> head) const {
  if (Begins(head, kHelloMagic)) {
    return absl::UnauthenticatedError("the peer has no key: start it with --peer-key FILE, of the same bytes");
  }
  if (!IsAuthMagic(head)) return absl::UnauthenticatedError("the peer speaks another protocol");
  if (role_ == AuthRole::kDialer && head[kRefusedAt] == 1) {
    return absl::UnauthenticatedError("the peer refused the exchange of keys");
  }
  const std::string good = Head();
  const int version = head[kVersionAt] | head[kVersionAt + 1] << 8;
  if (version != kAuthVersion) {
    return absl::UnauthenticatedError(absl::StrCat("the peer's exchange of keys is of version ", version,
                                                   "; this daemon knows version ", kAuthVersion));
  }
  if (std::memcmp(head.data(), good.data(), good.size()) != 0) {
    return absl::UnauthenticatedError("the peer speaks another protocol");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> AuthExchange::Read(absl::Span<const uint8_t> bytes) {
  KV_CHECK(wants_ > 0 && bytes.size() == wants_);
  if (!head_read_) {
    KV_RETURN_IF_ERROR(CheckHead(bytes));
    head_read_ = true;
    wants_ = (role_ == AuthRole::kDialer ? kAnswerBytes : kChallengeBytes) - kAuthHeadBytes;
    return std::string();
  }
  if (role_ == AuthRole::kAcceptor && !answered_) {
    std::copy(bytes.begin(), bytes.end(), theirs_.begin());
    answered_ = true;
    wants_ = kProofBytes;
    return EncodeAnswer(ours_, ProofOf(key_, AuthRole::kAcceptor, theirs_, ours_));
  }
  if (role_ == AuthRole::kAcceptor) {
    if (!Same(bytes, ProofOf(key_, AuthRole::kDialer, theirs_, ours_))) {
      return absl::UnauthenticatedError("the peer did not prove the key");
    }
    wants_ = 0;
    return std::string();
  }
  std::copy_n(bytes.begin(), kNonceBytes, theirs_.begin());
  // Nobody draws the same nonce: it is this one's, sent back.
  if (theirs_ == ours_ || !Same(bytes.subspan(kNonceBytes), ProofOf(key_, AuthRole::kAcceptor, ours_, theirs_))) {
    return absl::UnauthenticatedError("the peer did not prove the key: its --peer-key is another, or it is a stranger");
  }
  wants_ = 0;
  std::string proof;
  Append(ProofOf(key_, AuthRole::kDialer, ours_, theirs_), &proof);
  return proof;
}

}  // namespace kvmanager::tcp
