// What two tenants may have of one daemon's memory: a user has one share, and the file of --tenants gives guarantees
// and bounds.
#include <signal.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/logged_daemon.h"
#include "tests/two_tenants.h"

namespace kvmanager::testing {
namespace {

// A user who gives its tenants a hundred names has one share, and takes nothing from who has less.
TEST_F(TwoTenantsTest, ManyNamesOfOneUserAreOneShare) {
  NEEDS_ROOT();
  ASSERT_OK_AND_ASSIGN(auto daemon, Start());  // 64 MiB
  ASSERT_OK_AND_ASSIGN(auto bob, ConnectAs(kBob, daemon->listen()));
  ASSERT_OK_AND_ASSIGN(auto cache, bob->OpenCache(Options("x")));
  std::vector<std::vector<BlockName>> prefixes;
  for (uint32_t i = 0; i < 32; ++i) {
    const Source source{i + 1, Kind::kNormal, Options("x")};
    prefixes.push_back(Names(*cache, source, 4));
    Publish(*cache, source, prefixes.back());
  }
  ASSERT_OK_AND_ASSIGN(auto alice, ConnectAs(kAlice, daemon->listen()));
  for (uint32_t i = 0; i < 100; ++i) {
    const CacheOptions options = Options(absl::StrCat("name", i));
    ASSERT_OK_AND_ASSIGN(auto other, alice->OpenCache(options));
    for (uint32_t j = 0; j < 4; ++j) {
      const Source source{1000 + 10 * i + j, Kind::kNormal, options};
      Publish(*other, source, Names(*other, source, 4));
    }
  }
  EXPECT_GT(Scrape(*daemon)->Sum("kvmanager_evicted_blocks_total"), 0);
  for (const auto& names : prefixes) EXPECT_EQ(Hits(*cache, names), 4);
}

TEST_F(TwoTenantsTest, QuotasOfTheFile) {
  WriteTenants("{\"tenants\": [{\"name\": \"a\", \"host_bytes\": {\"guaranteed\": \"1TiB\"}}]}");
  EXPECT_FALSE(Start({"--tenants", PathOf("tenants.json")}).ok());
  const auto tenants = [&](const std::string& quota) {
    return absl::StrCat("{\"tenants\": [{\"name\": \"a\", \"uids\": [", getuid(), "], \"host_bytes\": ", quota, "}]}");
  };
  {
    // A bound of memory that the daemon has not is said to be none.
    WriteTenants("{\"tenants\": [{\"name\": \"a\", \"gpu_bytes\": {\"most\": \"8MiB\"}}]}");
    const DaemonLog log(directory_.path());
    ASSERT_OK_AND_ASSIGN(auto logged, DaemonProcess::Start({.program = log.program(),
                                                            .more_flags = {"--tenants", PathOf("tenants.json")}}));
    EXPECT_TRUE(log.Says("gpu_bytes of a bounds nothing")) << log.Text();
  }
  WriteTenants(tenants("{\"guaranteed\": \"4MiB\", \"most\": \"8MiB\"}"));
  ASSERT_OK_AND_ASSIGN(auto daemon, Start({"--tenants", PathOf("tenants.json"), "--tenant-most-percent", "25"}));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const auto hoard = [&](const std::string& tenant, std::vector<CreatedSequence>* held) {
    uint64_t bytes = 0;
    ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(Options(tenant)));
    while (bytes < (64 << 20)) {
      ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
      const Source source{1, Kind::kNormal, Options(tenant)};
      const absl::Status status = Load(*cache, made.sequence->id(), source, 0, 256, 64);
      held->push_back(std::move(made));
      if (!status.ok()) {
        EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
        EXPECT_TRUE(absl::StrContains(status.message(), "share is at most")) << status;
        break;
      }
      bytes += 4 * 65536;
    }
  };
  std::vector<CreatedSequence> held;
  hoard("a", &held);
  hoard("b", &held);
  ASSERT_OK_AND_ASSIGN(const auto caches, client->Caches());
  for (const auto& cache : caches) {
    const uint64_t most = cache.options.tenant == "a" ? 8 << 20 : 16 << 20;
    EXPECT_LE(cache.resident_raw_bytes + cache.resident_encoded_bytes, most) << cache.options.tenant;
    EXPECT_GE(cache.resident_raw_bytes + cache.resident_encoded_bytes, most - (1 << 20)) << cache.options.tenant;
  }
  held.clear();
  // Guarantees that do not fit are not believed, and the next file is.
  WriteTenants(tenants("{\"guaranteed\": \"65MiB\"}"));
  kill(daemon->pid(), SIGHUP);
  WriteTenants(tenants("{\"guaranteed\": \"32MiB\"}"));
  kill(daemon->pid(), SIGHUP);
  EXPECT_TRUE(Eventually([&] {
    auto pools = Scrape(*daemon);
    for (const auto& [sample, value] : pools->families["kvmanager_tenant_pool_bytes"].samples) {
      if (absl::StrContains(sample, "of=\"guaranteed\"") && value == (32 << 20)) return true;
    }
    return false;
  }));
}

}  // namespace
}  // namespace kvmanager::testing
