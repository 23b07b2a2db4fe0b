// Two tenants and a stranger on one daemon: who may administer it, who opens which tenant, and that principals who use
// the same names share nothing.
//
// What needs another user runs as root alone, and says so elsewhere: a thread's effective user is what the daemon sees
// of a connection that it makes.
#include "tests/two_tenants.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/raw_rpc.h"

namespace kvmanager::testing {
namespace {

constexpr char kToken[] = "a token that only team-b has";
constexpr char kOtherToken[] = "a token that only team-c has";
constexpr int kPermissionDenied = 7;

std::string DigestOf(absl::string_view token) {
  return Sha256({reinterpret_cast<const uint8_t*>(token.data()), token.size()}).ToHex();
}

class AdministrationTest : public TwoTenantsTest {
 protected:
  /// Every method of Admin, to see what is answered.
  static std::vector<std::pair<std::string, absl::Status>> AdministerWith(Client& client) {
    absl::Status retained = client.Retain(1, {}, {}).status();
    if (absl::IsNotFound(retained)) retained = absl::OkStatus();  // there is no cache yet
    return {{"status", client.Status().status()},
            {"caches", client.Caches().status()},
            {"sequences", client.Sequences().status()},
            {"peers", client.Peers().status()},
            {"recompute", client.Recompute().status()},
            {"metrics", client.MetricsText().status()},
            {"limits", client.Limits().status()},
            {"explain", client.Explain(0, {}).status()},
            {"retain", retained},
            {"drain", client.Drain(true)},
            {"undrain", client.Drain(false)},
            {"purge", client.Purge(Client::kAllCaches).status()}};
  }
};

// Without the client library, which would connect to the right socket.
TEST_F(AdministrationTest, TheEnginesSocketHasNoAdmin) {
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  RawRpc raw;
  const auto engine = raw.Connect(daemon->listen());
  ASSERT_NE(engine, nullptr);
  auto refused = engine->daemon.adminRequest().send().wait(raw.wait());
  EXPECT_TRUE(Refuses(refused.getError(), kPermissionDenied, "Admin"));
  EXPECT_TRUE(absl::StrContains(refused.getError().getMessage().cStr(), daemon->admin()));
  // What a client of an earlier version does: it calls at once.
  api::Admin::Client admin = refused.getAdmin();
  const auto ends = [&](auto request, const char* method) {
    bool threw = false;
    try {
      (void)request.send().wait(raw.wait());
    } catch (const kj::Exception& error) {
      threw = absl::StrContains(error.getDescription().cStr(), "admin socket");
    }
    EXPECT_TRUE(threw) << method << " was answered";
  };
  ends(admin.statusRequest(), "status");
  ends(admin.cachesRequest(), "caches");
  ends(admin.sequencesRequest(), "sequences");
  ends(admin.peersRequest(), "peers");
  ends(admin.drainRequest(), "drain");
  ends(admin.undrainRequest(), "undrain");
  auto purge = admin.purgeRequest();
  purge.setAll(true);
  ends(kj::mv(purge), "purge");
  ends(admin.recomputeRequest(), "recompute");
  ends(admin.metricsRequest(), "metrics");
  ends(admin.limitsRequest(), "limits");
  ends(admin.explainRequest(), "explain");
  ends(admin.retainRequest(), "retain");
  // The connection lives, and nothing was switched.
  (void)engine->daemon.pingRequest().send().wait(raw.wait());
  const auto operators = raw.Connect(daemon->admin());
  ASSERT_NE(operators, nullptr);
  auto given = operators->daemon.adminRequest().send().wait(raw.wait());
  ASSERT_EQ(given.getError().getCode(), 0) << given.getError().getMessage().cStr();
  EXPECT_FALSE(given.getAdmin().statusRequest().send().wait(raw.wait()).getStatus().getDraining());
}

TEST_F(AdministrationTest, TheAdminSocketIsItsUsersAlone) {
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  EXPECT_EQ(daemon->admin(), absl::StrCat(daemon->listen(), ".admin"));
  struct stat file;
  ASSERT_EQ(lstat(PathOf("kv.sock.admin").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, mode_t{0600}) << "whatever the umask";
  ASSERT_EQ(lstat(PathOf("kv.sock").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, mode_t{0777});
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  for (const auto& [method, status] : AdministerWith(*client)) EXPECT_OK(status) << method;
  // Who connects there needs no other connection.
  ASSERT_OK_AND_ASSIGN(auto direct, Client::Connect(daemon->admin(), {}));
  for (const auto& [method, status] : AdministerWith(*direct)) EXPECT_OK(status) << method;
  ASSERT_OK_AND_ASSIGN(auto cache, direct->OpenCache(Options("x")));
  EXPECT_EQ(cache->description().options.tenant, "x");
}

TEST_F(AdministrationTest, AnotherUserDoesNotAdminister) {
  NEEDS_ROOT();
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  {
    const As alice(kAlice);
    ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
    for (const auto& [method, status] : AdministerWith(*client)) {
      EXPECT_TRUE(NamesField(status, absl::StatusCode::kPermissionDenied, "admin_address")) << method;
    }
    EXPECT_OK(client->Ping());
  }
  // The file's mode is not all that keeps others out.
  ASSERT_EQ(chmod(PathOf("kv.sock.admin").c_str(), 0666), 0);
  {
    const As alice(kAlice);
    const int fd = ConnectSocket(daemon->admin());
    ASSERT_GE(fd, 0);
    EXPECT_TRUE(ClosedByPeer(fd));
    close(fd);
    EXPECT_FALSE(Client::Connect(daemon->admin(), {.connect_ms = 100}).ok());
  }
  EXPECT_OK(Client::Connect(daemon->admin(), {}));
  EXPECT_GT(Scrape(*daemon)->Sum("kvmanager_connections_refused_total"), 0);
}

TEST_F(AdministrationTest, ItsSocketCanBeElsewhereOrNowhere) {
  {
    ASSERT_OK_AND_ASSIGN(auto daemon, Start({"--admin-listen", "none"}));
    EXPECT_EQ(daemon->admin(), "");
    ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
    EXPECT_TRUE(NamesField(client->Status().status(), absl::StatusCode::kFailedPrecondition, "admin_address"));
  }
  const std::string elsewhere = absl::StrCat("unix:", PathOf("operators"));
  ASSERT_OK_AND_ASSIGN(auto daemon, Start({"--admin-listen", elsewhere}));
  EXPECT_EQ(daemon->admin(), elsewhere);
  ASSERT_OK_AND_ASSIGN(auto unknowing, Client::Connect(daemon->listen(), {}));
  EXPECT_TRUE(NamesField(unknowing->Status().status(), absl::StatusCode::kFailedPrecondition, "admin_address"));
  ASSERT_OK_AND_ASSIGN(auto knowing, Client::Connect(daemon->listen(), {.admin_address = elsewhere}));
  EXPECT_OK(knowing->Status());
  // Another daemon's is no use.
  ASSERT_OK_AND_ASSIGN(auto other, Start({}, "other.sock"));
  ASSERT_OK_AND_ASSIGN(auto mistaken, Client::Connect(daemon->listen(), {.admin_address = other->admin()}));
  EXPECT_TRUE(NamesField(mistaken->Drain(true), absl::StatusCode::kFailedPrecondition, "admin_address"));
  ASSERT_OK_AND_ASSIGN(auto there, Client::Connect(other->listen(), {}));
  EXPECT_FALSE(there->Status()->draining);
  // Over TCP nobody knows where it is.
  Proxy proxy(daemon->listen());
  ASSERT_OK_AND_ASSIGN(auto far, Client::Connect("tcp:" + proxy.address(), {}));
  EXPECT_TRUE(NamesField(far->Status().status(), absl::StatusCode::kFailedPrecondition, "admin_address"));
}

TEST_F(AdministrationTest, ItIsThereAgainWhenTheDaemonIs) {
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  ASSERT_OK(client->Status());
  daemon->Kill();
  EXPECT_CODE(client->Status(), kUnavailable);
  daemon.reset();
  ASSERT_OK_AND_ASSIGN(daemon, Start());
  ASSERT_OK(client->Reconnect());
  EXPECT_OK(client->Status());
}

// As many as one user can open: they fill the engines' bound, not the administrators'.
TEST_F(AdministrationTest, IdleConnectionsDoNotLockItOut) {
  constexpr int kIdle = 5000;
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  std::vector<int> idle;
  for (int i = 0; i < kIdle; ++i) {
    const int fd = ConnectSocket(daemon->listen());
    if (fd < 0) break;
    idle.push_back(fd);
  }
  EXPECT_GT(idle.size(), 500u) << "this process has no more descriptors";
  EXPECT_TRUE(Eventually([&] {
    return idle.size() < 4096 || Scrape(*daemon)->Sum("kvmanager_connections_refused_total") > 0;
  })) << "they do not fill it";
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->admin(), {}));
  EXPECT_OK(client->Status());
  EXPECT_OK(client->Caches());
  for (const std::string& address : {daemon->admin(), daemon->listen()}) {
    const absl::StatusOr<CommandResult> kvctl =
        RunCommand({DataPath("client/cli/kvctl"), "--connect", address, "status"});
    ASSERT_OK(kvctl);
    EXPECT_EQ(kvctl->status, 0) << kvctl->output;
  }
  for (const int fd : idle) close(fd);
}

TEST_F(TwoTenantsTest, EqualNamesOfTwoUsersShareNothing) {
  NEEDS_ROOT();
  ASSERT_OK_AND_ASSIGN(auto daemon, Start({"--listen", "tcp:127.0.0.1:0"}));
  const std::string tcp = daemon->listen().substr(daemon->listen().find(',') + 1);
  const std::string unix_socket = absl::StrCat("unix:", PathOf("kv.sock"));
  struct User {
    std::string full_name;
    std::unique_ptr<Client> client;
    std::unique_ptr<Cache> cache;
    Source source;
    std::vector<BlockName> names;
  };
  std::vector<User> users(4);
  const char* const full_names[] = {"default", "uid:61001/default", "uid:61002/default", "tcp:/default"};
  std::set<std::string> digests;
  for (size_t i = 0; i < users.size(); ++i) {
    User& user = users[i];
    user.full_name = full_names[i];
    const uid_t uids[] = {0, kAlice, kBob, 0};
    ASSERT_OK_AND_ASSIGN(user.client, ConnectAs(uids[i], i == 3 ? tcp : unix_socket));
    ASSERT_OK_AND_ASSIGN(user.cache, user.client->OpenCache(Options("default")));
    EXPECT_EQ(user.cache->description().options.tenant, user.full_name);
    digests.insert(user.cache->description().digest.ToHex());
    // The same text, of which each computes something else.
    user.source = Source{7, Kind::kNormal, Options("default")};
    user.names = Names(*user.cache, user.source, 4);
  }
  EXPECT_EQ(digests.size(), users.size()) << "each has block names of its own";
  Publish(*users[0].cache, users[0].source, users[0].names);
  EXPECT_EQ(Hits(*users[0].cache, users[0].names), 4);
  for (size_t i = 1; i < users.size(); ++i) {
    EXPECT_EQ(Hits(*users[i].cache, users[i].names), 0) << users[i].full_name;
    EXPECT_EQ(Hits(*users[i].cache, users[0].names), 0) << users[i].full_name << " knows another's names";
  }
  // Poison: Alice publishes other values under root's names, in her cache.
  const Source wrong{8, Kind::kNormal, Options("default")};
  Publish(*users[1].cache, wrong, users[0].names);
  for (const size_t i : {2, 3}) EXPECT_EQ(Hits(*users[i].cache, users[0].names), 0) << users[i].full_name;
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, users[0].cache->CreateSequence(users[0].names));
  ASSERT_EQ(hit.match.hit_blocks, 4);
  const Source& right = users[0].source;
  const std::vector<uint8_t> k = right.K(0, 0, 64);
  std::vector<uint8_t> got_k(k.size()), got_v(k.size());
  const client::StepEntry entry{hit.sequence->id(), 0, 64};
  ASSERT_OK(users[0].cache->Read({.layer = 0,
                                  .entries = {&entry, 1},
                                  .k = client::TensorView::Inline(got_k.data(), got_k.size()),
                                  .v = client::TensorView::Inline(got_v.data(), got_v.size())}));
  EXPECT_EQ(got_k, k) << "root reads what root published";
  // Each sees its own counts.
  ASSERT_OK_AND_ASSIGN(const client::CacheDescription bobs, users[2].cache->Refresh());
  EXPECT_EQ(bobs.published_blocks, 0u);
  EXPECT_EQ(bobs.sequences, 0u);
  ASSERT_OK_AND_ASSIGN(const client::CacheDescription alices, users[1].cache->Refresh());
  EXPECT_EQ(alices.published_blocks, 4u);
  // Slabs are of one tenant each, and so is a series of metrics.
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, users[0].client->Status());
  const client::PoolDescription& pool = status.pools.at(0);
  EXPECT_LT(pool.free_slabs, pool.capacity_bytes / pool.slab_bytes);
  EXPECT_TRUE(Eventually([&] { return Scrape(*daemon)->Sum("kvmanager_tenant_published_blocks") == 8; }));
  std::set<std::string> series;
  auto blocks = Scrape(*daemon);
  for (const auto& [sample, value] : blocks->families["kvmanager_tenant_published_blocks"].samples) {
    if (value == 4) series.insert(sample);
  }
  EXPECT_EQ(series.size(), 2u);
  int payers = 0;
  auto pools = Scrape(*daemon);
  for (const auto& [sample, value] : pools->families["kvmanager_tenant_pool_bytes"].samples) {
    payers += absl::StrContains(sample, "of=\"used\"") && value > 0;
  }
  EXPECT_EQ(payers, 2);
}

TEST_F(TwoTenantsTest, ATicketIsOfItsTenant) {
  NEEDS_ROOT();
  ASSERT_OK_AND_ASSIGN(auto here, Start());
  ASSERT_OK_AND_ASSIGN(auto there, Start({}, "there.sock"));
  ASSERT_OK_AND_ASSIGN(auto alice, ConnectAs(kAlice, here->listen()));
  ASSERT_OK_AND_ASSIGN(auto cache, alice->OpenCache(Options("x")));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), Source{1, Kind::kNormal, Options("x")}, 0, 100, 50));
  ASSERT_OK_AND_ASSIGN(const client::HandOffOutcome sent, made.sequence->HandOff(there->peer(), ""));
  for (const uid_t stranger : {uid_t{0}, kBob}) {
    ASSERT_OK_AND_ASSIGN(auto client, ConnectAs(stranger, there->listen()));
    ASSERT_OK_AND_ASSIGN(auto other, client->OpenCache(Options("x")));
    EXPECT_FALSE(other->Claim(sent.ticket).ok()) << "user " << stranger;
  }
  ASSERT_OK_AND_ASSIGN(auto at_home, ConnectAs(kAlice, there->listen()));
  ASSERT_OK_AND_ASSIGN(auto hers, at_home->OpenCache(Options("x")));
  ASSERT_OK_AND_ASSIGN(const client::ClaimedSequence claimed, hers->Claim(sent.ticket));
  EXPECT_EQ(claimed.tokens, 100u);
}

TEST_F(TwoTenantsTest, ForgedNamesAreRefused) {
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());
  std::vector<uid_t> who = {getuid()};
  if (getuid() == 0) who.push_back(kAlice);
  for (const uid_t uid : who) {
    auto client = uid == getuid() ? Client::Connect(daemon->listen(), {}) : ConnectAs(uid, daemon->listen());
    ASSERT_OK(client);
    for (const char* name : {"uid:61001/x", "uid:0/x", "uid:", "tcp:/x", "tcp:"}) {
      EXPECT_TRUE(NamesField(OpenStatus(**client, name), absl::StatusCode::kInvalidArgument, "tenant")) << name;
    }
    EXPECT_OK(OpenStatus(**client, "x"));
  }
}

TEST_F(TwoTenantsTest, ListedTenantsAreOfTheirUsersAndTokens) {
  NEEDS_ROOT();
  WriteTenants(absl::StrCat("{\"tenants\": [{\"name\": \"team-a\", \"uids\": [", kAlice,
                            "]}, {\"name\": \"team-b\", \"token_sha256\": [\"", DigestOf(kToken), "\"]}]}"));
  ASSERT_OK_AND_ASSIGN(auto daemon, Start({"--listen", "tcp:127.0.0.1:0", "--tenants", PathOf("tenants.json")}));
  const std::string tcp = daemon->listen().substr(daemon->listen().find(',') + 1);
  const std::string socket = absl::StrCat("unix:", PathOf("kv.sock"));
  ASSERT_OK_AND_ASSIGN(auto alice, ConnectAs(kAlice, socket));
  ASSERT_OK_AND_ASSIGN(auto bob, ConnectAs(kBob, socket));
  ASSERT_OK_AND_ASSIGN(auto root, Client::Connect(socket, {}));
  ASSERT_OK_AND_ASSIGN(auto operators, Client::Connect(daemon->admin(), {}));
  ASSERT_OK_AND_ASSIGN(auto far, Client::Connect(tcp, {}));
  ASSERT_OK_AND_ASSIGN(auto shown, Client::Connect(tcp, {.token = kToken}));
  ASSERT_OK_AND_ASSIGN(auto bob_shown, ConnectAs(kBob, socket, {.token = kToken}));
  const auto full_name = [](Client& client, const char* tenant) {
    const auto cache = client.OpenCache(Options(tenant));
    return cache.ok() ? (*cache)->description().options.tenant
                      : std::string(absl::StatusCodeToString(cache.status().code()));
  };
  EXPECT_EQ(full_name(*alice, "team-a"), "team-a");
  for (Client* const other : {bob.get(), root.get(), operators.get(), far.get(), shown.get(), bob_shown.get()}) {
    EXPECT_EQ(full_name(*other, "team-a"), "PERMISSION_DENIED");
  }
  EXPECT_EQ(full_name(*shown, "team-b"), "team-b");
  EXPECT_EQ(full_name(*bob_shown, "team-b"), "team-b");
  for (Client* const other : {alice.get(), bob.get(), root.get(), operators.get(), far.get()}) {
    EXPECT_EQ(full_name(*other, "team-b"), "PERMISSION_DENIED");
  }
  EXPECT_EQ(full_name(*bob_shown, "own"), "uid:61002/own");
  EXPECT_EQ(full_name(*shown, "own"), "tcp:/own");
  // Tokens that are nobody's, or none.
  EXPECT_TRUE(
      NamesField(Client::Connect(tcp, {.token = kOtherToken}).status(), absl::StatusCode::kPermissionDenied, "token"));
  EXPECT_TRUE(
      NamesField(Client::Connect(tcp, {.token = "short"}).status(), absl::StatusCode::kInvalidArgument, "token"));

  // What a file that does not fit says is not believed.
  ASSERT_OK_AND_ASSIGN(auto kept, shown->OpenCache(Options("team-b")));
  const auto reread = [&] { kill(daemon->pid(), SIGHUP); };
  WriteTenants("{\"tenants\": 1}");
  reread();
  // team-c instead of team-b; what was opened stays open.
  WriteTenants(absl::StrCat("{\"tenants\": [{\"name\": \"team-a\", \"uids\": [", kAlice,
                            "]}, {\"name\": \"team-c\", \"token_sha256\": [\"", DigestOf(kOtherToken), "\"]}]}"));
  EXPECT_EQ(full_name(*alice, "team-a"), "team-a");
  EXPECT_EQ(full_name(*bob, "team-a"), "PERMISSION_DENIED");
  reread();
  EXPECT_TRUE(Eventually([&] { return full_name(*bob, "team-c") == "PERMISSION_DENIED"; }));
  EXPECT_EQ(full_name(*shown, "team-c"), "PERMISSION_DENIED");
  EXPECT_EQ(full_name(*shown, "team-b"), "tcp:/team-b") << "no more listed";
  EXPECT_OK(kept->Refresh());
  ASSERT_OK_AND_ASSIGN(auto team_c, Client::Connect(tcp, {.token = kOtherToken}));
  EXPECT_EQ(full_name(*team_c, "team-c"), "team-c");

  // However many signals come, the last one's file is what counts.
  for (int i = 0; i <= 500; ++i) {
    if (i % 100 == 0) {
      WriteTenants(absl::StrCat("{\"tenants\": [{\"name\": \"team-", i, "\", \"token_sha256\": [\"",
                                DigestOf(kOtherToken), "\"]}]}"));
    }
    reread();
  }
  EXPECT_TRUE(Eventually([&] { return full_name(*team_c, "team-500") == "team-500"; }));
  EXPECT_EQ(full_name(*team_c, "team-400"), "tcp:/team-400");
}

TEST_F(TwoTenantsTest, ADaemonDoesNotStartWithAFileThatOthersWrite) {
  WriteTenants("{\"tenants\": []}");
  for (const mode_t mode : {0666, 0620}) {
    ASSERT_EQ(chmod(PathOf("tenants.json").c_str(), mode), 0);
    EXPECT_FALSE(Start({"--tenants", PathOf("tenants.json")}).ok());
  }
  ASSERT_EQ(chmod(PathOf("tenants.json").c_str(), 0644), 0);
  EXPECT_OK(Start({"--tenants", PathOf("tenants.json")}));
}

}  // namespace
}  // namespace kvmanager::testing
