#include "kvmanager/base/tls.h"

#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/tls_testing.h"

namespace kvmanager {
namespace {

using testing::AcceptContext;
using testing::CertificateOptions;
using testing::DialContext;
using testing::PemPair;
using testing::TestAuthority;
using Step = TlsLink::Step;

// Two ends of one connection in this thread.
struct Pair {
  Pair(std::shared_ptr<const TlsContext> accepts, std::shared_ptr<const TlsContext> dials,
       const std::string& name = "localhost") {
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    server = std::make_unique<TlsLink>(std::move(accepts), fds[0]);
    client = std::make_unique<TlsLink>(std::move(dials), fds[1], name);
  }
  ~Pair() {
    server.reset();
    client.reset();
    for (const int fd : fds) ::close(fd);
  }

  // True if both are through. The last bytes of one side reach the other, which may refuse them then.
  bool Shake() {
    Step of_server = Step::kWantRead, of_client = Step::kWantRead;
    for (int i = 0; i < 100 && (of_server != Step::kDone || of_client != Step::kDone); ++i) {
      if (of_client != Step::kDone) of_client = client->Handshake();
      if (of_server != Step::kDone) of_server = server->Handshake();
      if (of_server == Step::kFailed || of_client == Step::kFailed) {
        if (of_client == Step::kDone) client->Read(&byte, 1);
        if (of_client != Step::kFailed && of_client != Step::kDone) client->Handshake();
        if (of_server != Step::kFailed && of_server != Step::kDone) server->Handshake();
        return false;
      }
    }
    return of_server == Step::kDone && of_client == Step::kDone;
  }

  int fds[2];
  std::unique_ptr<TlsLink> server, client;
  char byte = 0;
};

class TlsTest : public ::testing::Test {
 protected:
  TestAuthority authority_;
  const PemPair daemon_ = authority_.Daemon();
};

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST_F(TlsTest, CarriesBytesBothWays) {
  Pair pair(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
  ASSERT_TRUE(pair.Shake()) << pair.client->failure() << pair.server->failure();
  EXPECT_EQ(pair.server->peer_name(), "");
  std::string sent(200000, '\0'), got;
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = char(i * 7 + i / 251);
  for (TlsLink* from : {pair.client.get(), pair.server.get()}) {
    TlsLink* const to = from == pair.client.get() ? pair.server.get() : pair.client.get();
    got.clear();
    size_t written = 0;
    std::string some(50000, '\0');
    while (got.size() < sent.size()) {
      if (written < sent.size()) {
        const int64_t n = from->Write(sent.data() + written, sent.size() - written);
        ASSERT_GE(n, -1);
        if (n > 0) written += size_t(n);
      }
      for (int64_t n; (n = to->Read(some.data(), some.size())) != -1;) {
        ASSERT_GT(n, 0);
        got.append(some, 0, size_t(n));
      }
    }
    EXPECT_EQ(got, sent);
  }
  pair.client->EndWriting();
  EXPECT_EQ(pair.server->Read(&pair.byte, 1), 0);
}

TEST_F(TlsTest, KnowsTheOneWhoConnects) {
  const struct {
    CertificateOptions certificate;
    std::string name;
  } cases[] = {
      {{"team a", {}, "clientAuth"}, "team a"},
      {{"team a", {"DNS:a.example", "URI:spiffe://x/a", "URI:spiffe://x/b"}, "clientAuth"}, "spiffe://x/a"},
      {{"team a", {"IP:10.0.0.1", "DNS:a.example", "DNS:b.example"}, "clientAuth"}, "a.example"},
      {{"team a", {"IP:10.0.0.1"}, ""}, "team a"},
  };
  for (const auto& [certificate, name] : cases) {
    Pair pair(AcceptContext(daemon_, authority_.certificate(), true),
              DialContext(authority_.Sign(certificate), authority_.certificate()));
    ASSERT_TRUE(pair.Shake()) << pair.client->failure() << pair.server->failure();
    EXPECT_EQ(pair.server->peer_name(), name);
  }
}

TEST_F(TlsTest, RefusesWhomItMust) {
  TestAuthority other("another authority");
  const std::string own = authority_.certificate();
  const struct {
    std::string what;
    PemPair client;
    bool daemons_only;
    std::string at_server, at_client;
  } cases[] = {
      {"none", {}, false, "it showed no certificate", "this side showed none"},
      {"other authority", other.Client("a"), false, "not signed by an authority of ca.pem",
       "does not know the authority"},
      {"expired", authority_.Sign({"a", {}, "clientAuth", -3600, -60}), false, "has expired on 20", "it has expired"},
      {"not yet", authority_.Sign({"a", {}, "clientAuth", 600, 3600}), false, "compare the clocks", "log says why"},
      {"for servers", authority_.Sign({"a", {}, "serverAuth"}), false, "extendedKeyUsage=clientAuth", "log says why"},
      {"no name", authority_.Sign({"", {}, "clientAuth"}), false, "it has no name", "log says why"},
      {"control characters", authority_.Sign({"a\nb", {}, "clientAuth"}), false, "it has no name", "log says why"},
      {"a client to a daemon", authority_.Client("a"), true, "not a daemon's", "log says why"},
      {"no usage to a daemon", authority_.Sign({"a", {}, ""}), true, "not a daemon's", "log says why"},
  };
  for (const auto& [what, client, daemons_only, at_server, at_client] : cases) {
    Pair pair(AcceptContext(daemon_, own, true, daemons_only), DialContext(client, own));
    EXPECT_FALSE(pair.Shake()) << what;
    EXPECT_EQ(pair.server->failure().code(), absl::StatusCode::kUnauthenticated) << what << pair.server->failure();
    EXPECT_NE(Text(pair.server->failure()).find(at_server), std::string::npos) << what << pair.server->failure();
    EXPECT_EQ(pair.client->failure().code(), absl::StatusCode::kUnauthenticated) << what << pair.client->failure();
    EXPECT_NE(Text(pair.client->failure()).find(at_client), std::string::npos) << what << pair.client->failure();
    EXPECT_EQ(pair.server->Read(&pair.byte, 1), -2);
  }
  Pair daemons(AcceptContext(daemon_, own, true, true), DialContext(daemon_, own));
  EXPECT_TRUE(daemons.Shake()) << daemons.client->failure() << daemons.server->failure();
}

TEST_F(TlsTest, ChecksWhomItDials) {
  TestAuthority other("another authority");
  const std::string own = authority_.certificate();
  const struct {
    std::string what, name;
    PemPair server;
    std::string at_client;
  } cases[] = {
      {"another name", "elsewhere.example", daemon_, "it is for localhost, 127.0.0.1, not for elsewhere.example"},
      {"another address", "127.0.0.2", daemon_, "it is for localhost, 127.0.0.1, not for 127.0.0.2"},
      {"the common name does not count", "daemon", daemon_, "not for daemon"},
      {"no alternative names", "daemon", authority_.Sign({"daemon"}), "it is for no host, not for daemon"},
      {"an address of 5 bytes", "localhost",
       authority_.Sign({"d", {}, "serverAuth", -3600, 3600, std::string("\x30\x07\x87\x05\1\2\3\4\5", 9)}),
       "it is for no host, not for localhost"},
      {"other authority", "localhost", other.Daemon(), "not signed by an authority of ca.pem"},
      {"expired", "localhost", authority_.Sign({"d", {"DNS:localhost"}, "serverAuth", -3600, -60}),
       "has expired on 20"},
      {"of a client", "localhost", authority_.Sign({"d", {"DNS:localhost"}, "clientAuth"}), "=serverAuth"},
  };
  for (const auto& [what, name, server, at_client] : cases) {
    Pair pair(AcceptContext(server, ""), DialContext({}, own), name);
    EXPECT_FALSE(pair.Shake()) << what;
    EXPECT_EQ(pair.client->failure().code(), absl::StatusCode::kUnauthenticated) << what << pair.client->failure();
    EXPECT_NE(Text(pair.client->failure()).find(at_client), std::string::npos) << what << pair.client->failure();
  }
  for (const char* name : {"localhost", "127.0.0.1"}) {
    Pair pair(AcceptContext(daemon_, ""), DialContext({}, own), name);
    EXPECT_TRUE(pair.Shake()) << pair.client->failure();
  }
}

TEST_F(TlsTest, SaysWhenTheOtherSideIsPlain) {
  for (const std::string& garbage : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(64, '\0'),
                                     std::string("KVMA\1\0\0\0 and so on, as another protocol would", 45)}) {
    Pair server(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
    ASSERT_EQ(::write(server.fds[1], garbage.data(), garbage.size()), ssize_t(garbage.size()));
    EXPECT_EQ(server.server->Handshake(), Step::kFailed);
    EXPECT_EQ(server.server->failure().code(), absl::StatusCode::kFailedPrecondition) << server.server->failure();
    uint8_t told[16];
    EXPECT_EQ(::recv(server.fds[1], told, sizeof told, 0), 7);
    EXPECT_EQ(told[0], 21);  // an alert
    Pair client(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
    ASSERT_EQ(::write(client.fds[0], garbage.data(), garbage.size()), ssize_t(garbage.size()));
    while (client.client->Handshake() == Step::kWantRead) {
    }
    EXPECT_EQ(Text(client.client->failure()), "localhost does not speak TLS");
  }
  Pair gone(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
  ::shutdown(gone.fds[0], SHUT_RDWR);
  EXPECT_EQ(gone.client->Handshake(), Step::kFailed);
  EXPECT_EQ(gone.client->failure().code(), absl::StatusCode::kUnavailable) << gone.client->failure();
}

// An end that nobody announced, and a changed byte, are errors: neither is an end nor data.
TEST_F(TlsTest, NoticesWhoCutsOrChangesTheStream) {
  Pair cut(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
  ASSERT_TRUE(cut.Shake());
  ASSERT_EQ(cut.client->Write("abc", 3), 3);
  ::shutdown(cut.fds[1], SHUT_WR);
  char some[16];
  EXPECT_EQ(cut.server->Read(some, sizeof some), 3);
  EXPECT_EQ(cut.server->Read(some, sizeof some), -2);
  EXPECT_EQ(cut.server->failure().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(Text(cut.server->failure()).find("close_notify"), std::string::npos) << cut.server->failure();

  Pair changed(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
  ASSERT_TRUE(changed.Shake());
  ASSERT_EQ(changed.client->Write("abc", 3), 3);
  char record[256];
  const ssize_t bytes = ::recv(changed.fds[0], record, sizeof record, 0);
  ASSERT_GT(bytes, 10);
  record[bytes - 1] ^= 1;
  ASSERT_EQ(::send(changed.fds[1], record, size_t(bytes), 0), bytes);
  EXPECT_EQ(changed.server->Read(some, sizeof some), -2);
  EXPECT_EQ(changed.server->failure().code(), absl::StatusCode::kDataLoss) << changed.server->failure();
}

TEST_F(TlsTest, ChangesItsKeyAndBoundsTheOthersChanges) {
  TlsContext::Options options;
  options.accepts = false;
  options.authorities = {"ca", authority_.certificate()};
  options.rekey_bytes = 1;  // a key for each Write
  auto dials = TlsContext::Make(options);
  ASSERT_TRUE(dials.ok());
  Pair pair(AcceptContext(daemon_, ""), *dials);
  ASSERT_TRUE(pair.Shake());
  int carried = 0;
  for (; carried < 2 * TlsLink::kKeyUpdatesMax; ++carried) {
    if (pair.client->Write("x", 1) != 1 || pair.server->Read(&pair.byte, 1) != 1 || pair.byte != 'x') break;
  }
  EXPECT_GE(carried, TlsLink::kKeyUpdatesMax - 1);
  EXPECT_LE(carried, TlsLink::kKeyUpdatesMax + 1);
  EXPECT_EQ(pair.server->Read(&pair.byte, 1), -2);
  EXPECT_EQ(pair.server->failure().code(), absl::StatusCode::kDataLoss) << pair.server->failure();
}

TEST_F(TlsTest, WarnsOfDates) {
  constexpr int64_t kDay = 24 * 3600;
  const int64_t now = time(nullptr);
  const auto context =
      AcceptContext(authority_.Sign({.common_name = "kv2", .names = {}, .begins_s = -kDay, .ends_s = 30 * kDay}), "");
  EXPECT_EQ(context->DateWarning(now), "");
  EXPECT_EQ(context->DateWarning(now + 22 * kDay), "");
  const std::string soon = context->DateWarning(now + 24 * kDay), late = context->DateWarning(now + 31 * kDay),
                    early = context->DateWarning(now - 2 * kDay);
  EXPECT_NE(soon.find("kv2, until "), std::string::npos) << soon;
  EXPECT_NE(soon.find("expires within 7 days"), std::string::npos) << soon;
  EXPECT_NE(late.find("has expired"), std::string::npos) << late;
  EXPECT_NE(early.find("not valid yet"), std::string::npos) << early;
  EXPECT_EQ(DialContext({}, authority_.certificate())->DateWarning(now), "") << "it has none";
}

TEST_F(TlsTest, TakesNoEarlierVersion) {
  Pair pair(AcceptContext(daemon_, ""), DialContext({}, authority_.certificate()));
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_max_proto_version(context, TLS1_2_VERSION);
  SSL* const ssl = SSL_new(context);
  SSL_set_fd(ssl, pair.fds[1]);
  SSL_set_connect_state(ssl);
  EXPECT_EQ(SSL_do_handshake(ssl), -1);
  EXPECT_EQ(pair.server->Handshake(), Step::kFailed);
  EXPECT_EQ(pair.server->failure().code(), absl::StatusCode::kFailedPrecondition) << pair.server->failure();
  SSL_free(ssl);
  SSL_CTX_free(context);
}

TEST_F(TlsTest, NamesTheFileThatIsWrong) {
  const auto made = [&](const PemPair& own, const std::string& authorities) {
    TlsContext::Options options;
    options.accepts = true;
    options.certificate = {"--tls-cert c", own.certificate};
    options.key = {"--tls-key k", own.key};
    options.authorities = {"--tls-ca a", authorities};
    const auto context = TlsContext::Make(options);
    return context.ok() ? std::string() : Text(context.status());
  };
  EXPECT_EQ(made(daemon_, authority_.certificate()), "");
  EXPECT_NE(made({"x", daemon_.key}, "").find("--tls-cert c"), std::string::npos);
  EXPECT_NE(made({daemon_.certificate, "x"}, "").find("--tls-key k"), std::string::npos);
  EXPECT_NE(made({daemon_.certificate, authority_.Daemon().key}, "").find("--tls-key k"), std::string::npos);
  EXPECT_NE(made(daemon_, "x").find("--tls-ca a"), std::string::npos);
}

}  // namespace
}  // namespace kvmanager
