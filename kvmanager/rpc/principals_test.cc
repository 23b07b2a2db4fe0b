#include "kvmanager/rpc/principals.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

constexpr uid_t kOwn = 950;
constexpr absl::string_view kToken = "a token of team-a", kOther = "a token of team-b";

Digest DigestOf(absl::string_view token) {
  return Sha256({reinterpret_cast<const uint8_t*>(token.data()), token.size()});
}
Proof User(uid_t uid) { return {.uid = uid}; }
Proof Certified(std::string name) { return {.certificate = std::move(name)}; }
Proof Shown(absl::string_view token) { return {.token = DigestOf(token)}; }

std::string Teams() {
  return absl::StrCat("{\"tenants\": [{\"name\": \"team-a\", \"uids\": [1001, 1002], \"token_sha256\": [\"",
                      DigestOf(kToken).ToHex(), "\"]}, {\"name\": \"team-b\", \"token_sha256\": [\"",
                      DigestOf(kOther).ToHex(),
                      "\"], \"certificates\": [\"b.example\", \"spiffe://x/b\"]}, {\"name\": \"nobody's\"}]}");
}
Principals WithTeams() {
  Principals principals(kOwn);
  auto table = ParseTenants(Teams());
  EXPECT_TRUE(table.ok()) << table.status();
  if (table.ok()) principals.SetTable(*std::move(table));
  return principals;
}

TEST(PrincipalsTest, WithoutAFileEachUserHasNamesOfItsOwn) {
  const Principals principals(kOwn);
  EXPECT_EQ(*principals.TenantOf(User(kOwn), "default"), "default");
  EXPECT_EQ(*principals.TenantOf(User(0), "default"), "default");
  EXPECT_EQ(*principals.TenantOf(User(0), ""), "");
  EXPECT_EQ(*principals.TenantOf(User(1001), "default"), "uid:1001/default");
  EXPECT_EQ(*principals.TenantOf(User(1001), ""), "uid:1001/");
  EXPECT_EQ(*principals.TenantOf(User(1002), "1/x"), "uid:1002/1/x");
  EXPECT_EQ(*principals.TenantOf({}, "x"), "tcp:/x");
  EXPECT_EQ(*principals.TenantOf({}, ""), "tcp:/");
}

TEST(PrincipalsTest, ACertificateHasNamesOfItsOwn) {
  const Principals principals(kOwn);
  EXPECT_EQ(*principals.TenantOf(Certified("a.example"), "x"), "cert:a.example/x");
  EXPECT_EQ(*principals.TenantOf(Certified("a.example"), ""), "cert:a.example/");
  EXPECT_EQ(*principals.TenantOf(Certified("spiffe://x/a"), "b"), "cert:spiffe:%2f%2fx%2fa/b");
  // No two certificates meet in one name.
  EXPECT_EQ(*principals.TenantOf(Certified("a"), "b/c"), "cert:a/b/c");
  EXPECT_EQ(*principals.TenantOf(Certified("a/b"), "c"), "cert:a%2fb/c");
  EXPECT_EQ(*principals.TenantOf(Certified("a%2fb"), "c"), "cert:a%252fb/c");
  EXPECT_TRUE(absl::IsInvalidArgument(principals.TenantOf(Certified(std::string(200, '/')), "").status()));
}

TEST(PrincipalsTest, AListedCertificateOpensItsTenantAlone) {
  const Principals principals = WithTeams();
  EXPECT_EQ(*principals.TenantOf(Certified("b.example"), "team-b"), "team-b");
  EXPECT_EQ(*principals.TenantOf(Certified("spiffe://x/b"), "team-b"), "team-b");
  for (const char* other : {"B.example", "b.example ", "sub.b.example", "b", "*", "spiffe://x/B"}) {
    EXPECT_TRUE(absl::IsPermissionDenied(principals.TenantOf(Certified(other), "team-b").status())) << other;
  }
  EXPECT_TRUE(absl::IsPermissionDenied(principals.TenantOf(Certified("b.example"), "team-a").status()));
  EXPECT_EQ(*principals.TenantOf(Certified("b.example"), "mine"), "cert:b.example/mine");
}

TEST(PrincipalsTest, NobodyAsksForAFullName) {
  const Principals principals(kOwn);
  for (const Proof& proof : {User(kOwn), User(0), User(1001), Proof{}}) {
    for (const char* forged : {"uid:1001/x", "uid:", "uid:0/", "tcp:/x", "tcp:", "cert:a/x"}) {
      const auto tenant = principals.TenantOf(proof, forged);
      EXPECT_TRUE(absl::IsInvalidArgument(tenant.status())) << forged;
      EXPECT_EQ(DetailOf(tenant.status()).field, "tenant");
    }
  }
  EXPECT_EQ(*principals.TenantOf(User(0), "UID:1001/x"), "UID:1001/x");  // another name than the user's
  EXPECT_EQ(*principals.TenantOf(User(0), "uid"), "uid");
}

TEST(PrincipalsTest, FullNamesHaveTheLengthOfNames) {
  const Principals principals(kOwn);
  const std::string longest(CacheConfig::kTextBytesMax, 'x');
  EXPECT_TRUE(principals.TenantOf(User(0), longest).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(principals.TenantOf(User(0), longest + "x").status()));
  const auto refused = principals.TenantOf(User(1001), longest);
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status()));
  EXPECT_EQ(DetailOf(refused.status()).bound, "at most 247 bytes");
  EXPECT_EQ(principals.TenantOf(User(1001), longest.substr(0, 247))->size(), longest.size());
}

TEST(PrincipalsTest, AListedTenantIsItsUsersAndItsTokensAlone) {
  const Principals principals = WithTeams();
  EXPECT_EQ(principals.tenants(), 3u);
  for (const Proof& proof : {User(1001), User(1002), Shown(kToken), Proof{.uid = 7, .token = DigestOf(kToken)}}) {
    EXPECT_EQ(*principals.TenantOf(proof, "team-a"), "team-a");
  }
  EXPECT_EQ(*principals.TenantOf(Shown(kOther), "team-b"), "team-b");
  const std::vector<Proof> strangers = {User(0), User(kOwn),    User(1003),
                                        Proof{}, Shown(kOther), Proof{.uid = 0, .token = DigestOf(kOther)}};
  for (const Proof& proof : strangers) {
    const auto tenant = principals.TenantOf(proof, "team-a");
    EXPECT_TRUE(absl::IsPermissionDenied(tenant.status())) << *tenant;
    EXPECT_EQ(DetailOf(tenant.status()).field, "tenant");
  }
  for (const Proof& proof : {User(0), User(1001), Shown(kToken)}) {
    EXPECT_TRUE(absl::IsPermissionDenied(principals.TenantOf(proof, "nobody's").status()));
    EXPECT_TRUE(absl::IsPermissionDenied(principals.TenantOf(proof, "team-b").status()));
  }
}

TEST(PrincipalsTest, NamesThatAreNotListedAreAsWithoutAFile) {
  const Principals principals = WithTeams();
  EXPECT_EQ(*principals.TenantOf(User(0), "team-c"), "team-c");
  EXPECT_EQ(*principals.TenantOf(User(1001), "team-c"), "uid:1001/team-c");
  EXPECT_EQ(*principals.TenantOf(User(1001), "team-"), "uid:1001/team-");
  EXPECT_EQ(*principals.TenantOf(Shown(kToken), "team-c"), "tcp:/team-c");
  EXPECT_TRUE(absl::IsInvalidArgument(principals.TenantOf(User(1001), "uid:1001/team-c").status()));
}

TEST(PrincipalsTest, ATokenIsSomebodysOrRefused) {
  const Principals principals = WithTeams();
  EXPECT_EQ(*principals.CheckToken(kToken), DigestOf(kToken));
  EXPECT_TRUE(absl::IsPermissionDenied(principals.CheckToken("a token of team-c").status()));
  EXPECT_TRUE(absl::IsPermissionDenied(principals.CheckToken(absl::StrCat(kToken, "\n")).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(principals.CheckToken(DigestOf(kToken).ToHex()).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(Principals(kOwn).CheckToken(kToken).status()));
  for (const size_t bytes : {size_t{0}, Principals::kTokenBytesMin - 1, Principals::kTokenBytesMax + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(principals.CheckToken(std::string(bytes, 'x')).status())) << bytes;
  }
  for (const size_t bytes : {Principals::kTokenBytesMin, Principals::kTokenBytesMax}) {
    EXPECT_TRUE(absl::IsPermissionDenied(principals.CheckToken(std::string(bytes, 'x')).status())) << bytes;
  }
  // What is refused is not told.
  EXPECT_EQ(principals.CheckToken("a secret of somebody").status().message().find("secret"), std::string::npos);
}

TEST(PrincipalsTest, ATokenThatWasTakenAwayOpensNothing) {
  Principals principals = WithTeams();
  const Proof proof = Shown(kToken);
  ASSERT_TRUE(principals.TenantOf(proof, "team-a").ok());
  principals.SetTable(*ParseTenants("{\"tenants\": [{\"name\": \"team-a\", \"uids\": [7]}]}"));
  EXPECT_TRUE(absl::IsPermissionDenied(principals.TenantOf(proof, "team-a").status()));
  EXPECT_EQ(*principals.TenantOf(User(7), "team-a"), "team-a");
}

TEST(PrincipalsTest, QuotasAreThoseOfTheFile) {
  auto table = ParseTenants(
      "{\"tenants\": [{\"name\": \"a\", \"host_bytes\": {\"guaranteed\": \"8GiB\", \"most\": \"1.5TiB\"}},"
      "{\"name\": \"b\", \"gpu_bytes\": {\"guaranteed\": 4096}}, {\"name\": \"c\"}]}");
  ASSERT_TRUE(table.ok()) << table.status();
  Principals principals(kOwn);
  principals.SetTable(*std::move(table));
  const Quotas quotas = principals.quotas(40);
  EXPECT_EQ(quotas.most_percent, 40u);
  ASSERT_EQ(quotas.tenants.size(), 2u);
  EXPECT_EQ(quotas.tenants.at("a").host.guaranteed_bytes, uint64_t{8} << 30);
  EXPECT_EQ(quotas.tenants.at("a").host.most_bytes, uint64_t{3} << 39);
  EXPECT_EQ(quotas.tenants.at("a").gpu, Quotas::InPool());
  EXPECT_EQ(quotas.tenants.at("b").gpu.guaranteed_bytes, 4096u);
  EXPECT_EQ(quotas.tenants.at("b").gpu.most_bytes, std::nullopt);
}

TEST(PrincipalsTest, WhoPaysIsWhoWasProved) {
  const Principals principals(kOwn);
  for (const char* name : {"x", "y/z", ""}) {
    EXPECT_EQ(PayerName(*principals.TenantOf(User(1001), name)), "uid:1001");
    EXPECT_EQ(PayerName(*principals.TenantOf({}, name)), "tcp:");
    EXPECT_EQ(PayerName(*principals.TenantOf(User(kOwn), name)), name);
  }
  EXPECT_EQ(PayerName("cert:host-1/x"), "cert:host-1");
}

TEST(ParseTenantsTest, ErrorsNameMemberValueAndBound) {
  const std::string digest = DigestOf(kToken).ToHex();
  const struct {
    std::string text, field;
  } cases[] = {
      {"", "the file"},
      {"[]", "the file"},
      {"{\"tenants\": []", "the file"},
      {"{\"tenant\": []}", "the file"},
      {"{}", "tenants"},
      {"{\"tenants\": {}}", "tenants"},
      {"{\"tenants\": [1]}", "tenants[0]"},
      {"{\"tenants\": [{}]}", "tenants[0].name"},
      {"{\"tenants\": [{\"name\": 1}]}", "tenants[0].name"},
      {"{\"tenants\": [{\"name\": \"\"}]}", "tenants[0].name"},
      {"{\"tenants\": [{\"name\": \"uid:0/x\"}]}", "tenants[0].name"},
      {"{\"tenants\": [{\"name\": \"tcp:/x\"}]}", "tenants[0].name"},
      {absl::StrCat("{\"tenants\": [{\"name\": \"", std::string(257, 'x'), "\"}]}"), "tenants[0].name"},
      {"{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"a\"}]}", "tenants[1].name"},
      {"{\"tenants\": [{\"name\": \"a\", \"uid\": [1]}]}", "tenants[0]"},
      {"{\"tenants\": [{\"name\": \"a\", \"uids\": 1}]}", "tenants[0].uids"},
      {"{\"tenants\": [{\"name\": \"a\", \"uids\": [-1]}]}", "tenants[0].uids"},
      {"{\"tenants\": [{\"name\": \"a\", \"uids\": [4294967295]}]}", "tenants[0].uids"},
      {"{\"tenants\": [{\"name\": \"a\", \"uids\": [\"root\"]}]}", "tenants[0].uids"},
      {"{\"tenants\": [{\"name\": \"a\", \"uids\": [1.5]}]}", "tenants[0].uids"},
      {"{\"tenants\": [{\"name\": \"cert:a/x\"}]}", "tenants[0].name"},
      {"{\"tenants\": [{\"name\": \"a\", \"certificates\": \"a\"}]}", "tenants[0].certificates"},
      {"{\"tenants\": [{\"name\": \"a\", \"certificates\": [\"\"]}]}", "tenants[0].certificates"},
      {"{\"tenants\": [{\"name\": \"a\", \"certificates\": [1]}]}", "tenants[0].certificates"},
      {absl::StrCat("{\"tenants\": [{\"name\": \"a\", \"certificates\": [\"", std::string(201, 'x'), "\"]}]}"),
       "tenants[0].certificates"},
      {absl::StrCat("{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \"", digest, "\"}]}"),
       "tenants[0].token_sha256"},
      {absl::StrCat("{\"tenants\": [{\"name\": \"a\", \"token_sha256\": [\"", digest, "0\"]}]}"),
       "tenants[0].token_sha256"},
      {"{\"tenants\": [{\"name\": \"a\", \"token_sha256\": [\"my secret token\"]}]}", "tenants[0].token_sha256"},
      {"{\"tenants\": [{\"name\": \"a\", \"token_sha256\": [7]}]}", "tenants[0].token_sha256"},
      {"{\"tenants\": [{\"name\": \"a\", \"host_bytes\": \"8GiB\"}]}", "tenants[0].host_bytes"},
      {"{\"tenants\": [{\"name\": \"a\", \"gpu_bytes\": {\"least\": 1}}]}", "tenants[0].gpu_bytes"},
      {"{\"tenants\": [{\"name\": \"a\", \"host_bytes\": {\"most\": \"8GB\"}}]}", "tenants[0].host_bytes.most"},
      {"{\"tenants\": [{\"name\": \"a\", \"host_bytes\": {\"guaranteed\": -1}}]}", "tenants[0].host_bytes.guaranteed"},
      {"{\"tenants\": [{\"name\": \"a\", \"gpu_bytes\": {\"guaranteed\": \"2MiB\", \"most\": \"1MiB\"}}]}",
       "tenants[0].gpu_bytes.most"},
  };
  for (const auto& [text, field] : cases) {
    const auto table = ParseTenants(text);
    ASSERT_TRUE(absl::IsInvalidArgument(table.status())) << text;
    const ErrorDetail detail = DetailOf(table.status());
    EXPECT_EQ(detail.field, field) << table.status();
    EXPECT_FALSE(detail.value.empty() || detail.bound.empty()) << table.status();
    EXPECT_EQ(table.status().message().find("secret"), std::string::npos) << "a token is not to be logged";
  }
  std::string many = "1";
  for (size_t i = 0; i < Principals::kUidsMax; ++i) many += ",1";
  EXPECT_FALSE(ParseTenants(absl::StrCat("{\"tenants\": [{\"name\": \"a\", \"uids\": [", many, "]}]}")).ok());
}

// What is wrong stands in the error as it was written, and what may stand there is said.
TEST(ParseTenants, ErrorsSayWhatToWrite) {
  const absl::Status negative =
      ParseTenants("{\"tenants\": [{\"name\": \"a\", \"host_bytes\": {\"most\": -5}}]}").status();
  EXPECT_EQ(DetailOf(negative).value, "-5") << negative;
  EXPECT_NE(DetailOf(negative).bound.find("0 or more"), std::string::npos) << negative;
  for (const char* broken : {"{\"tenants\": [{]}", "{}", "{\"tenant\": []}"}) {
    const absl::Status refused = ParseTenants(broken).status();
    for (const char* member : {"uids", "token_sha256", "certificates", "host_bytes", "gpu_bytes"}) {
      EXPECT_NE(DetailOf(refused).bound.find(member), std::string::npos) << refused;
    }
  }
}

// A file nests as deep as it is long.
TEST(ParseTenants, WhatNestsIsRefused) {
  constexpr size_t kDepth = 1 << 20;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  for (const char* member : {"\"uids\": [", "\"certificates\": [", "\"host_bytes\": {\"most\": "}) {
    const char* const end = member[1] == 'h' ? "}" : "]";
    const absl::Status status =
        ParseTenants(absl::StrCat("{\"tenants\": [{\"name\": \"a\", ", member, deep, end, "}]}")).status();
    EXPECT_EQ(DetailOf(status).value, "array") << member;
  }
}

class ReadTenantsTest : public testing::Test {
 protected:
  void SetUp() override { std::ofstream(path_) << Teams(); }
  void TearDown() override { unlink(path_.c_str()); }
  // The file belongs to whoever runs this.
  absl::Status Read(mode_t mode, uid_t own) {
    EXPECT_EQ(chmod(path_.c_str(), mode), 0);
    return ReadTenants(path_, own).status();
  }

  const std::string path_ = testing::TempDir() + "/tenants.json";
  const uid_t me_ = getuid();
};

TEST_F(ReadTenantsTest, ReadsWhatNobodyElseCanWrite) {
  for (const mode_t mode : {0600, 0400, 0640, 0440}) EXPECT_TRUE(Read(mode, me_).ok()) << std::oct << mode;
  EXPECT_EQ(ReadTenants(path_, me_)->size(), 3u);
  for (const mode_t mode : {0620, 0602, 0666, 0664}) {
    const absl::Status refused = Read(mode, me_);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << std::oct << mode;
    EXPECT_NE(refused.message().find("chmod go-w " + path_), std::string::npos) << refused;
  }
}

TEST_F(ReadTenantsTest, OthersReadNoDigestsOfTokens) {
  const absl::Status refused = Read(0644, me_);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_NE(refused.message().find("chmod o-r " + path_), std::string::npos) << refused;
  std::ofstream(path_, std::ios::trunc) << "{\"tenants\": [{\"name\": \"a\", \"uids\": [1001]}]}";
  EXPECT_TRUE(Read(0644, me_).ok());
}

TEST_F(ReadTenantsTest, AnotherUsersFileIsRefused) {
  if (me_ == 0) {
    ASSERT_EQ(chown(path_.c_str(), 1001, 0), 0);
  }
  const uid_t owner = me_ == 0 ? 1001 : me_;
  EXPECT_TRUE(Read(0600, owner).ok());
  const absl::Status refused = Read(0600, owner + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_NE(refused.message().find("chown"), std::string::npos) << refused;
}

TEST_F(ReadTenantsTest, OnlyRegularFiles) {
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTenants(path_ + ".not", me_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTenants(testing::TempDir(), me_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTenants("/dev/zero", me_).status()));
  const std::string fifo = path_ + ".fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTenants(fifo, me_).status()));  // and nobody waits for a writer
  unlink(fifo.c_str());
}

TEST_F(ReadTenantsTest, ErrorsNameTheFile) {
  std::ofstream(path_, std::ios::trunc) << "{}";
  const absl::Status refused = Read(0600, me_);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_NE(refused.message().find(path_), std::string::npos) << refused;
  EXPECT_EQ(truncate(path_.c_str(), int64_t{Principals::kFileBytesMax} + 1), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(Read(0600, me_)));
}

}  // namespace
}  // namespace kvmanager
