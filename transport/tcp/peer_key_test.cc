#include "transport/tcp/peer_key.h"

#include <gtest/gtest.h>

#include <random>

#include "transport/tcp/wire.h"

namespace kvmanager::tcp {
namespace {

const std::string kKey(kPeerKeyBytesMin, 'k');
const std::string kOther = std::string(kPeerKeyBytesMin - 1, 'k') + "K";

absl::Span<const uint8_t> Span(absl::string_view s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }

/// One side of an exchange whose bytes the test carries.
class Side {
 public:
  Side(absl::string_view key, AuthRole role) : exchange_(key, role) { out_ = exchange_.Begin(); }
  /// Takes of `bytes` what it wants, and says what is left.
  std::string Take(std::string bytes) {
    while (status_.ok() && exchange_.wants() > 0 && bytes.size() >= exchange_.wants()) {
      const size_t wanted = exchange_.wants();
      absl::StatusOr<std::string> next = exchange_.Read(Span(bytes).first(wanted));
      status_ = next.status();
      if (next.ok()) out_ += *next;
      bytes.erase(0, wanted);
    }
    return bytes;
  }
  std::string Out() { return std::exchange(out_, {}); }
  bool done() const { return status_.ok() && exchange_.wants() == 0; }
  const absl::Status& status() const { return status_; }

 private:
  AuthExchange exchange_;
  absl::Status status_;
  std::string out_;
};

std::string Text(const Proof& proof) { return {proof.begin(), proof.end()}; }

/// Of CHALLENGE or ANSWER.
Nonce NonceIn(const std::string& message) {
  Nonce nonce;
  std::copy_n(message.begin() + kAuthHeadBytes, kNonceBytes, nonce.begin());
  return nonce;
}

TEST(AuthExchange, TheSameKeyOnBothSides) {
  for (const size_t bytes : {kPeerKeyBytesMin, size_t{64}, size_t{65}, kPeerKeyBytesMax}) {
    const std::string key(bytes, 'x');
    Side dialer(key, AuthRole::kDialer), acceptor(key, AuthRole::kAcceptor);
    const std::string challenge = dialer.Out();
    EXPECT_EQ(challenge.size(), kChallengeBytes);
    EXPECT_EQ(acceptor.Take(challenge), "");
    const std::string answer = acceptor.Out();
    EXPECT_EQ(answer.size(), kAnswerBytes);
    EXPECT_FALSE(dialer.done());
    EXPECT_EQ(dialer.Take(answer + "more"), "more");  // it takes no byte that is not of the exchange
    EXPECT_TRUE(dialer.done()) << dialer.status();
    EXPECT_FALSE(acceptor.done());
    EXPECT_EQ(acceptor.Take(dialer.Out() + "more"), "more");
    EXPECT_TRUE(acceptor.done()) << acceptor.status();
    EXPECT_EQ(acceptor.Out() + dialer.Out(), "");
  }
}

// As computed apart from this code: python3 -c "import hmac; print(hmac.new(b'k' * 32, b'kvmanager acceptor' +
// bytes(range(32)) + bytes(range(32, 64)), 'sha256').hexdigest())".
TEST(AuthExchange, ProofsAreThoseOfTheFormat) {
  Nonce dialer, acceptor;
  for (size_t i = 0; i < kNonceBytes; ++i) {
    dialer[i] = static_cast<uint8_t>(i);
    acceptor[i] = static_cast<uint8_t>(kNonceBytes + i);
  }
  const auto hex = [](const Proof& proof) {
    std::string text;
    for (const uint8_t byte : proof) text += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
    return text;
  };
  EXPECT_EQ(hex(ProofOf(kKey, AuthRole::kAcceptor, dialer, acceptor)),
            "7fd78d52e08cfbca1a51e0250d2f0dbcff539616df53e9d65cb50849d6dbea43");
  EXPECT_EQ(hex(ProofOf(kKey, AuthRole::kDialer, dialer, acceptor)),
            "0e4116a964bd981d88965ba0d5a1d478fba86648bea5346adefef4ec19d96b43");
  EXPECT_EQ(EncodeChallenge(dialer).substr(0, 16), std::string("KVMAUTH\0\1\0\0\0\0\0\0\0", 16));
  EXPECT_EQ(EncodeRefusal(), std::string("KVMAUTH\0\1\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0", 24));
  static_assert(kRefusalBytes == kHelloBytes && sizeof(kAuthMagic) == sizeof(kMagic));
}

TEST(AuthExchange, AnotherKeyOnEitherSide) {
  Side dialer(kKey, AuthRole::kDialer), acceptor(kOther, AuthRole::kAcceptor);
  acceptor.Take(dialer.Out());
  dialer.Take(acceptor.Out());
  EXPECT_TRUE(absl::IsUnauthenticated(dialer.status())) << dialer.status();
  EXPECT_EQ(dialer.Out(), "") << "it proved its key to a peer that has another";

  // A dialer that goes on all the same.
  Side strict(kKey, AuthRole::kAcceptor);
  Nonce nonce = {7};
  strict.Take(EncodeChallenge(nonce));
  const Nonce theirs = NonceIn(strict.Out());
  strict.Take(Text(ProofOf(kOther, AuthRole::kDialer, nonce, theirs)));
  EXPECT_TRUE(absl::IsUnauthenticated(strict.status())) << strict.status();
}

TEST(AuthExchange, WhatWasSaidBeforeIsWorthNothing) {
  Side dialer(kKey, AuthRole::kDialer), acceptor(kKey, AuthRole::kAcceptor);
  const std::string challenge = dialer.Out();
  acceptor.Take(challenge);
  const std::string answer = acceptor.Out();
  dialer.Take(answer);
  const std::string proof = dialer.Out();
  acceptor.Take(proof);
  ASSERT_TRUE(acceptor.done());

  Side again(kKey, AuthRole::kAcceptor);
  again.Take(challenge + proof);
  EXPECT_TRUE(absl::IsUnauthenticated(again.status()));
  EXPECT_NE(again.Out(), answer);  // another nonce
  Side anew(kKey, AuthRole::kDialer);
  anew.Out();
  anew.Take(answer);
  EXPECT_TRUE(absl::IsUnauthenticated(anew.status()));
  EXPECT_EQ(anew.Out(), "");
}

// Whoever has no key has only what the two sides say, and may open connections to both.
TEST(AuthExchange, NothingCanBeSentBack) {
  {  // its own nonce, and its own proof were there one
    Side dialer(kKey, AuthRole::kDialer);
    const Nonce nonce = NonceIn(dialer.Out());
    dialer.Take(EncodeAnswer(nonce, ProofOf(kKey, AuthRole::kAcceptor, nonce, nonce)));
    EXPECT_TRUE(absl::IsUnauthenticated(dialer.status()));
    EXPECT_EQ(dialer.Out(), "");
  }
  {  // the acceptor's own proof as the dialer's
    Side acceptor(kKey, AuthRole::kAcceptor);
    acceptor.Take(EncodeChallenge(Nonce{1}));
    acceptor.Take(acceptor.Out().substr(kChallengeBytes));
    EXPECT_TRUE(absl::IsUnauthenticated(acceptor.status()));
  }
  {  // a proof of another connection to the same acceptor, with its nonce as this one's
    Side one(kKey, AuthRole::kAcceptor), two(kKey, AuthRole::kAcceptor);
    one.Take(EncodeChallenge(Nonce{1}));
    two.Take(EncodeChallenge(NonceIn(one.Out())));
    one.Take(two.Out().substr(kChallengeBytes));
    EXPECT_TRUE(absl::IsUnauthenticated(one.status()));
  }
  {  // the proof of one role as the other's
    Side dialer(kKey, AuthRole::kDialer);
    const Nonce nonce = NonceIn(dialer.Out()), mine = {3};
    dialer.Take(EncodeAnswer(mine, ProofOf(kKey, AuthRole::kDialer, nonce, mine)));
    EXPECT_TRUE(absl::IsUnauthenticated(dialer.status()));
  }
}

TEST(AuthExchange, SaysWhatIsMissing) {
  const std::string hello = EncodeHello({});
  Side dialer(kKey, AuthRole::kDialer);
  dialer.Take(hello);
  EXPECT_NE(dialer.status().message().find("the peer has no key: start it with --peer-key FILE"), std::string::npos);
  Side acceptor(kKey, AuthRole::kAcceptor);
  acceptor.Take(hello);
  EXPECT_NE(acceptor.status().message().find("the peer has no key"), std::string::npos);
  Side refused(kKey, AuthRole::kDialer);
  refused.Take(EncodeRefusal());
  EXPECT_NE(refused.status().message().find("refused"), std::string::npos);
  EXPECT_TRUE(IsAuthMagic(Span(EncodeRefusal())));
  EXPECT_FALSE(IsAuthMagic(Span(hello)));
  EXPECT_FALSE(IsAuthMagic(Span("KVMAUTH")));
  std::string newer = EncodeChallenge({});
  newer[8] = 2;
  Side older(kKey, AuthRole::kAcceptor);
  older.Take(newer);
  EXPECT_NE(older.status().message().find("version 2"), std::string::npos) << older.status();
}

TEST(AuthExchange, CutShortItWaits) {
  for (size_t bytes = 0; bytes < kChallengeBytes; ++bytes) {
    Side acceptor(kKey, AuthRole::kAcceptor);
    acceptor.Take(EncodeChallenge({}).substr(0, bytes));
    EXPECT_TRUE(acceptor.status().ok());
    EXPECT_FALSE(acceptor.done());
    EXPECT_EQ(acceptor.Out(), "");
  }
}

TEST(AuthExchange, NoChangedByteAndNoRandomOnesPass) {
  for (size_t at = 0; at < kChallengeBytes; ++at) {
    for (const int bit : {0, 3, 7}) {
      Side dialer(kKey, AuthRole::kDialer), acceptor(kKey, AuthRole::kAcceptor);
      std::string challenge = dialer.Out();
      challenge[at] = static_cast<char>(challenge[at] ^ 1 << bit);
      acceptor.Take(challenge);
      if (acceptor.status().ok()) dialer.Take(acceptor.Out());
      EXPECT_FALSE(acceptor.status().ok() && dialer.status().ok()) << "byte " << at;
      EXPECT_FALSE(dialer.done());
    }
  }
  for (size_t at = 0; at < kAnswerBytes; ++at) {
    Side dialer(kKey, AuthRole::kDialer), acceptor(kKey, AuthRole::kAcceptor);
    acceptor.Take(dialer.Out());
    std::string answer = acceptor.Out();
    answer[at] = static_cast<char>(answer[at] ^ 0x10);
    dialer.Take(answer);
    EXPECT_FALSE(dialer.done()) << "byte " << at;
  }
  for (size_t at = 0; at < kProofBytes; ++at) {
    Side dialer(kKey, AuthRole::kDialer), acceptor(kKey, AuthRole::kAcceptor);
    acceptor.Take(dialer.Out());
    dialer.Take(acceptor.Out());
    std::string proof = dialer.Out();
    proof[at] = static_cast<char>(proof[at] ^ 0x10);
    acceptor.Take(proof);
    EXPECT_FALSE(acceptor.done()) << "byte " << at;
  }
  std::mt19937_64 random(17);
  for (int round = 0; round < 2000; ++round) {
    const AuthRole role = round % 2 == 0 ? AuthRole::kDialer : AuthRole::kAcceptor;
    Side side(kKey, role);
    std::string bytes(256, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (round % 3 > 0) bytes.replace(0, kAuthHeadBytes, EncodeChallenge({}).substr(0, kAuthHeadBytes));
    side.Take(bytes);
    EXPECT_FALSE(side.done());
    EXPECT_TRUE(absl::IsUnauthenticated(side.status()));
  }
}

}  // namespace
}  // namespace kvmanager::tcp
