// Clients of a daemon over TLS: who is refused and is told why, who is served meanwhile, and what a certificate opens.
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/tls_testing.h"
#include "tests/harness.h"
#include "tests/logged_daemon.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

constexpr char kFailed[] = "kvmanager_connections_ended_total";
constexpr char kTls[] = "reason=\"tls\"";

class TlsClientTest : public ::testing::Test {
 protected:
  std::string PathOf(absl::string_view name) const { return absl::StrCat(directory_.path(), "/", name); }
  /// Writes NAME.crt and NAME.key.
  void Write(const std::string& name, const PemPair& pair) {
    WriteSecret(PathOf(name + ".crt.next"), pair.certificate);
    WriteSecret(PathOf(name + ".key.next"), pair.key);
    for (const char* end : {".crt", ".key"}) {
      ASSERT_EQ(rename(PathOf(name + end + ".next").c_str(), PathOf(name + end).c_str()), 0);
    }
  }
  void Start(std::vector<std::string> more_flags = {}) { StartWith(authority_.Daemon(), std::move(more_flags)); }
  void StartWith(const PemPair& own, std::vector<std::string> more_flags = {}) {
    Write("daemon", own);
    WriteSecret(PathOf("ca.crt"), authority_.certificate());
    DaemonOptions options;
    options.listen = "tcp:127.0.0.1:0";
    options.program = log_.program();
    options.peers = false;
    options.hand_off_peers = "";
    options.more_flags = {"--tls-cert", PathOf("daemon.crt"), "--tls-key", PathOf("daemon.key")};
    options.more_flags.insert(options.more_flags.end(), more_flags.begin(), more_flags.end());
    auto daemon = DaemonProcess::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    tls_ = absl::StrCat("tls:", daemon_->listen().substr(4));
  }
  /// own: of the client, "": none.
  Client::Options With(const std::string& own = "") const {
    Client::Options options;
    options.connect_ms = 3000;
    options.tls_ca = PathOf("ca.crt");
    if (!own.empty()) {
      options.tls_cert = PathOf(own + ".crt");
      options.tls_key = PathOf(own + ".key");
    }
    return options;
  }
  absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& own = "") {
    return Client::Connect(tls_, With(own));
  }
  void ExpectRefused(const Client::Options& options, absl::StatusCode code, const std::string& words) {
    const auto refused = Client::Connect(tls_, options);
    ASSERT_FALSE(refused.ok()) << words;
    EXPECT_EQ(refused.status().code(), code) << refused.status();
    EXPECT_TRUE(absl::StrContains(refused.status().message(), words)) << refused.status();
  }
  double Failed() const {
    const auto page = Scrape(*daemon_);
    EXPECT_OK(page);
    return page->Sum(kFailed, {kTls});
  }
  /// Blocks of `source` that another client of this tenant finds.
  static int Hits(Cache& cache, const Source& source) {
    const auto found = cache.Match({{Names(cache, source, 4)}});
    EXPECT_OK(found);
    return found.ok() ? (*found)[0].hit_blocks : -1;
  }
  static void Publish(Cache& cache, const Source& source) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache.CreateSequence());
    ASSERT_OK(Load(cache, made.sequence->id(), source, 0, 4 * 64 + 1, 65));
    ASSERT_OK(made.sequence->Publish(Names(cache, source, 4)));
  }
  static CacheOptions Tenant(const std::string& name) {
    CacheOptions options = SmallCache("raw", 0);
    options.tenant = name;
    return options;
  }

  TestAuthority authority_, other_{"another authority"};
  const TempDir directory_;
  const DaemonLog log_{directory_.path()};
  std::unique_ptr<DaemonProcess> daemon_;
  std::string tls_;
};

TEST_F(TlsClientTest, ServesClientsThatKnowItsAuthority) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto client, Connect());
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(Tenant("t")));
  const Source source{5, Kind::kNormal, Tenant("t")};
  ASSERT_NO_FATAL_FAILURE(Publish(*cache, source));
  EXPECT_EQ(Hits(*cache, source), 4);
  Client::Options by_name = With();
  by_name.tls_name = "localhost";
  EXPECT_OK(Client::Connect(tls_, by_name).status());

  by_name.tls_name = "elsewhere.example";
  ExpectRefused(by_name, absl::StatusCode::kUnauthenticated,
                "it is for localhost, 127.0.0.1, not for elsewhere.example");
  Client::Options unknown = With();
  WriteSecret(PathOf("other.crt"), other_.certificate());
  unknown.tls_ca = PathOf("other.crt");
  ExpectRefused(unknown, absl::StatusCode::kUnauthenticated, "not signed by an authority of tls_ca");
  unknown.tls_ca = "";
  ExpectRefused(unknown, absl::StatusCode::kUnauthenticated, "not signed by an authority of the system");
  EXPECT_EQ(Hits(*cache, source), 4);
}

TEST_F(TlsClientTest, EachSideSaysThatOneOfThemIsPlain) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Client::Options quick;
  quick.connect_ms = 3000;
  const auto plain = Client::Connect(daemon_->listen(), quick);
  ASSERT_EQ(plain.status().code(), absl::StatusCode::kFailedPrecondition) << plain.status();
  EXPECT_TRUE(absl::StrContains(plain.status().message(), "connect to " + tls_)) << plain.status();
  EXPECT_EQ(Client::Connect(daemon_->listen(), With()).status().code(), absl::StatusCode::kInvalidArgument);

  DaemonOptions options;
  options.listen = "tcp:127.0.0.1:0";
  ASSERT_OK_AND_ASSIGN(const auto other, DaemonProcess::Start(options));
  tls_ = absl::StrCat("tls:", other->listen().substr(4));
  const auto refused = Client::Connect(tls_, With());
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(absl::StrContains(refused.status().message(), "--tls-cert")) << refused.status();
  EXPECT_OK(Client::Connect(other->listen(), {}).status());
}

TEST_F(TlsClientTest, CertificatesAreRefusedWithAReason) {
  ASSERT_NO_FATAL_FAILURE(Start({"--tls-ca", PathOf("ca.crt"), "--tls-clients", "require"}));
  Write("good", authority_.Client("a.example"));
  Write("other", other_.Client("a.example"));
  Write("expired", authority_.Sign({"a.example", {}, "clientAuth", -3600, -60}));
  Write("early", authority_.Sign({"a.example", {}, "clientAuth", 600, 3600}));
  ASSERT_OK_AND_ASSIGN(const auto client, Connect("good"));
  ExpectRefused(With(), absl::StatusCode::kUnauthenticated, "asks for a certificate, and this side showed none");
  ExpectRefused(With("other"), absl::StatusCode::kUnauthenticated, "does not know the authority that signed it");
  ExpectRefused(With("expired"), absl::StatusCode::kUnauthenticated, "it has expired");
  ExpectRefused(With("early"), absl::StatusCode::kUnauthenticated, "refused this side's certificate");
  // Counted once the daemon has ended the connection: a client may hear of its refusal before.
  EXPECT_TRUE(Eventually([&] { return Failed() == 4; })) << Failed();
  EXPECT_OK(client->Ping());
}

TEST_F(TlsClientTest, TheDaemonsFilesAreChecked) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Client::Options options = With();
  Write("good", authority_.Client("a"));
  options.tls_cert = PathOf("good.crt");
  ExpectRefused(options, absl::StatusCode::kInvalidArgument, "tls_key");
  options.tls_key = PathOf("good.key");
  ASSERT_EQ(chmod(options.tls_key.c_str(), 0644), 0);
  ExpectRefused(options, absl::StatusCode::kInvalidArgument, "chmod 600");

  ASSERT_EQ(chmod(PathOf("daemon.key").c_str(), 0640), 0);
  ASSERT_OK_AND_ASSIGN(
      const auto child,
      ChildProcess::Start({DataPath("kvmanager/daemon/kvmanagerd"), "--listen", "tcp:127.0.0.1:0", "--host-pool-bytes",
                           "64MiB", "--tls-cert", PathOf("daemon.crt"), "--tls-key", PathOf("daemon.key")}));
  ASSERT_OK_AND_ASSIGN(const int status, child->Wait());
  EXPECT_EQ(status, 2);
}

// Hundreds that say nothing, or half of what they should, or something else: nobody else waits for them, and none
// stays.
TEST_F(TlsClientTest, HalfHandshakesKeepNobodyOut) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(const auto honest, Connect());
  // The first bytes of a handshake that goes well.
  std::string hello;
  {
    Proxy proxy(daemon_->listen().substr(4));
    proxy.Record();
    Client::Options options = With();
    EXPECT_OK(Client::Connect(absl::StrCat("tls:", proxy.address()), options).status());
    hello = proxy.Recorded().substr(0, 200);
  }
  ASSERT_EQ(hello.size(), 200u);
  const double before = Failed();
  constexpr int kStrangers = 700;  // more than have a place
  std::vector<int> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    strangers.push_back(ConnectSocket(daemon_->listen()));
    ASSERT_GE(strangers.back(), 0);
    if (i % 3 == 1) WriteAll(strangers.back(), hello);
    if (i % 3 == 2) WriteAll(strangers.back(), "nothing that anybody understands, but long enough to be a hello");
    if (i % 100 == 0) EXPECT_OK(honest->Ping());
  }
  EXPECT_OK(Connect().status());
  EXPECT_OK(honest->Ping());
  for (const int fd : strangers) {
    EXPECT_TRUE(ClosedByPeer(fd));
    close(fd);
  }
  EXPECT_TRUE(Eventually([&] { return Failed() == before + kStrangers; })) << Failed() - before;
  EXPECT_OK(Connect().status());
  EXPECT_OK(honest->Ping());
}

// Somebody on the path who cuts or changes the stream is noticed, and others are served.
TEST_F(TlsClientTest, AChangedByteEndsTheConnection) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(const auto honest, Connect());
  Proxy proxy(daemon_->listen().substr(4));
  const std::string address = absl::StrCat("tls:", proxy.address());
  for (const Proxy::Fault fault : {Proxy::Fault::kFlip, Proxy::Fault::kCut}) {
    ASSERT_OK_AND_ASSIGN(const auto client, Client::Connect(address, With()));
    ASSERT_OK_AND_ASSIGN(const auto cache, client->OpenCache(Tenant("t")));
    ASSERT_OK_AND_ASSIGN(const CreatedSequence made, cache->CreateSequence());
    proxy.Spoil(fault, 20000);
    const Source source{5, Kind::kNormal, Tenant("t")};
    EXPECT_FALSE(Load(*cache, made.sequence->id(), source, 0, 256, 64).ok());
    EXPECT_EQ(client->Ping().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(proxy.faults(), 2);
  EXPECT_OK(honest->Ping());
}

TEST_F(TlsClientTest, CertificatesAreTenantsOfTheirOwn) {
  std::ofstream(PathOf("tenants.json")) << R"({"tenants": [{"name": "team-c", "certificates": ["spiffe://x/c"]}]})";
  ASSERT_EQ(chmod(PathOf("tenants.json").c_str(), 0600), 0);
  ASSERT_NO_FATAL_FAILURE(Start({"--tls-ca", PathOf("ca.crt"), "--tenants", PathOf("tenants.json")}));
  Write("a", authority_.Client("a.example"));
  Write("b", authority_.Client("b.example"));
  Write("c", authority_.Sign({"c", {"URI:spiffe://x/c"}, "clientAuth"}));
  ASSERT_OK_AND_ASSIGN(const auto a, Connect("a"));
  ASSERT_OK_AND_ASSIGN(const auto b, Connect("b"));
  ASSERT_OK_AND_ASSIGN(const auto c, Connect("c"));
  ASSERT_OK_AND_ASSIGN(const auto nobody, Connect());
  const CacheOptions same = Tenant("t");
  const Source source{5, Kind::kNormal, same};
  ASSERT_OK_AND_ASSIGN(const auto of_a, a->OpenCache(same));
  ASSERT_OK_AND_ASSIGN(const auto of_b, b->OpenCache(same));
  ASSERT_OK_AND_ASSIGN(const auto of_nobody, nobody->OpenCache(same));
  ASSERT_NO_FATAL_FAILURE(Publish(*of_a, source));
  EXPECT_EQ(Hits(*of_a, source), 4);
  EXPECT_EQ(Hits(*of_b, source), 0);
  EXPECT_EQ(Hits(*of_nobody, source), 0);
  // Nor by naming the other's namespace, or what is in it.
  for (const char* forged : {"cert:a.example/t", "cert:a.example", "tcp:/t"}) {
    EXPECT_EQ(b->OpenCache(Tenant(forged)).status().code(), absl::StatusCode::kInvalidArgument) << forged;
  }
  const auto forged = of_b->Match({{Names(*of_a, source, 4)}});
  ASSERT_OK(forged);
  EXPECT_EQ((*forged)[0].hit_blocks, 0);

  ASSERT_OK_AND_ASSIGN(const auto of_c, c->OpenCache(Tenant("team-c")));
  ASSERT_NO_FATAL_FAILURE(Publish(*of_c, source));
  for (Client* const other : {a.get(), b.get(), nobody.get()}) {
    EXPECT_EQ(other->OpenCache(Tenant("team-c")).status().code(), absl::StatusCode::kPermissionDenied);
  }
}

// Connections stay; those that begin afterwards see the new certificate. A file that is wrong changes nothing.
TEST_F(TlsClientTest, AHangUpReadsCertificatesAgain) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(const auto before, Connect());
  WriteSecret(PathOf("other.crt"), other_.certificate());
  Client::Options next = With();
  next.tls_ca = PathOf("other.crt");
  next.connect_ms = 1000;
  ASSERT_FALSE(Client::Connect(tls_, next).ok());
  Write("daemon", other_.Daemon());
  daemon_->process().Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return Client::Connect(tls_, next).ok(); }));
  EXPECT_FALSE(Connect().ok());
  EXPECT_OK(before->Ping());

  WriteSecret(PathOf("daemon.crt"), "no certificate");
  daemon_->process().Signal(SIGHUP);
  WriteSecret(PathOf("other.crt"), other_.certificate());
  for (int i = 0; i < 20; ++i) EXPECT_OK(Client::Connect(tls_, next).status());
  EXPECT_OK(before->Ping());
}

TEST_F(TlsClientTest, TheLogWarnsOfDates) {
  constexpr int64_t kDay = 24 * 3600;
  const auto own = [&](int64_t begins_s, int64_t ends_s) {
    return authority_.Sign({.common_name = "kv2", .names = {"IP:127.0.0.1"}, .begins_s = begins_s, .ends_s = ends_s});
  };
  ASSERT_NO_FATAL_FAILURE(StartWith(own(-2 * kDay, -kDay)));
  EXPECT_TRUE(log_.Says("has expired")) << log_.Text();
  EXPECT_TRUE(log_.Says(PathOf("daemon.crt"))) << "which file it is";
  EXPECT_FALSE(Connect().ok());
  Write("daemon", own(kDay, 30 * kDay));
  daemon_->process().Signal(SIGHUP);
  EXPECT_TRUE(log_.Says("is not valid yet")) << log_.Text();
  Write("daemon", own(-kDay, 30 * kDay));
  daemon_->process().Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return Connect().ok(); }));
  EXPECT_FALSE(absl::StrContains(log_.Text(), "expires within"));
  Write("daemon", own(-kDay, 6 * kDay));
  daemon_->process().Signal(SIGHUP);
  EXPECT_TRUE(log_.Says("expires within 7 days")) << log_.Text();
}

}  // namespace
}  // namespace kvmanager::testing
