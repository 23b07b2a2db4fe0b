// What tenants are guaranteed of a pool, and may have at most.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::Text;

class TenantQuotasTest : public testing::PageStoreTest {
 protected:
  TenantQuotasTest() { pool_bytes_ = 64 * kSlabBytes; }

  static constexpr uint64_t kSlabBytes = 2 << 20;
  static constexpr int kRun = 128;  // blocks: a slab

  CacheId Open(const std::string& tenant) { return test().Open(MakeConfig("raw", 0, tenant)); }
  absl::Status SetQuota(const std::string& tenant, uint64_t guaranteed_slabs, std::optional<uint64_t> most_slabs) {
    Quotas::InPool& quota = quotas_.tenants[tenant].host;
    quota.guaranteed_bytes = guaranteed_slabs * kSlabBytes;
    quota.most_bytes = std::nullopt;
    if (most_slabs.has_value()) quota.most_bytes = *most_slabs * kSlabBytes;
    return store().report().SetQuotas(quotas_);
  }
  // A slab of K and V in a sequence.
  absl::Status Fill(CacheId cache, uint32_t salt, SequenceId* sequence) {
    *sequence = Create(cache);
    return test().AppendAll(cache, *sequence, MakeText(kRun * kPage, salt), 0, kRun * kPage);
  }
  // Slabs that a tenant keeps until it is refused.
  int Hoard(CacheId cache, uint32_t salt, absl::Status* refused) {
    SequenceId sequence;
    int slabs = 0;
    while ((*refused = Fill(cache, salt++, &sequence)).ok()) ++slabs;
    store().Drop(sequence);
    return slabs;
  }
  std::vector<BlockName> Publish(CacheId cache, uint32_t salt) {
    SequenceId sequence;
    EXPECT_TRUE(Fill(cache, salt, &sequence).ok());
    auto names = Names(cache, MakeText(kRun * kPage, salt), kRun);
    EXPECT_TRUE(store().Publish(sequence, names).ok());
    store().Drop(sequence);
    return names;
  }
  int Hits(CacheId cache, const std::vector<BlockName>& names) {
    return store().caches().Match(cache, names)->hit_blocks;
  }
  PoolShare ShareOf(const std::string& payer) {
    for (const PoolShare& share : store().report().Shares()) {
      if (share.payer == payer) return share;
    }
    return {};
  }

  Quotas quotas_;
};

TEST_F(TenantQuotasTest, WhoHasItsMostEvictsItsOwn) {
  ASSERT_TRUE(SetQuota("b", 0, 8).ok());
  const CacheId a = Open("a"), b = Open("b");
  const auto prefix = Publish(a, 1);
  std::vector<BlockName> last;
  for (uint32_t i = 0; i < 40; ++i) {
    last = Publish(b, 100 + i);
    EXPECT_LE(ShareOf("b").bytes, 8 * kSlabBytes);
  }
  EXPECT_EQ(Hits(b, last), kRun);
  EXPECT_EQ(Hits(a, prefix), kRun);
  EXPECT_GE(test().pool->free_slabs(), 50u) << "it evicted its own while there was room";
  absl::Status refused;
  EXPECT_EQ(Hoard(b, 1000, &refused), 8);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(refused.message(), "share is at most 16777216")) << refused;
  store().report().CheckInvariants();
}

TEST_F(TenantQuotasTest, AGuaranteeIsKeptForWhoHasIt) {
  ASSERT_TRUE(SetQuota("a", 16, std::nullopt).ok());
  const CacheId b = Open("b"), c = Open("c");
  absl::Status refused;
  const int others = Hoard(b, 1000, &refused) + Hoard(c, 2000, &refused);
  EXPECT_GE(others, 46);
  EXPECT_LE(others, 48);
  const CacheId a = Open("a");
  EXPECT_EQ(Hoard(a, 1, &refused), 16);
  EXPECT_EQ(ShareOf("a").bytes, 16 * kSlabBytes);
  store().report().CheckInvariants();
}

TEST_F(TenantQuotasTest, NobodyElseEvictsWhatIsGuaranteed) {
  ASSERT_TRUE(SetQuota("a", 16, std::nullopt).ok());
  const CacheId a = Open("a"), b = Open("b");
  std::vector<std::vector<BlockName>> prefixes;
  for (uint32_t i = 0; i < 48; ++i) prefixes.push_back(Publish(a, 1 + i));
  absl::Status refused;
  // What is not guaranteed is shared by halves: a has 40 with its guarantee.
  const int got = Hoard(b, 1000, &refused);
  EXPECT_GE(got, 23);
  EXPECT_LE(got, 24);
  int found = 0;
  for (const auto& names : prefixes) found += Hits(a, names) == kRun;
  EXPECT_GE(found, 39);
  // Others come: each takes from who has most.
  for (const char* name : {"c", "d", "e", "f", "g", "h"}) Hoard(Open(name), 10000 + 100 * uint32_t(name[0]), &refused);
  EXPECT_GE(ShareOf("a").bytes, 16 * kSlabBytes);
  found = 0;
  for (const auto& names : prefixes) found += Hits(a, names) == kRun;
  EXPECT_GE(found, 16);
  // It takes back what it is guaranteed, and evicts its own for more.
  Publish(a, 77);
  store().report().CheckInvariants();
}

TEST_F(TenantQuotasTest, OfAllPoolsAPercentage) {
  quotas_.most_percent = 25;
  ASSERT_TRUE(SetQuota("listed", 0, 32).ok());
  absl::Status refused;
  EXPECT_EQ(Hoard(Open("uid:3/x"), 1, &refused), 16);
  EXPECT_EQ(Hoard(Open("listed"), 1000, &refused), 32);
}

TEST_F(TenantQuotasTest, GuaranteesThatDoNotFitAreRefusedAndChangeNothing) {
  ASSERT_TRUE(SetQuota("a", 40, 50).ok());
  const absl::Status refused = SetQuota("b", 25, std::nullopt);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(refused).field, "host_bytes.guaranteed");
  EXPECT_TRUE(absl::StrContains(DetailOf(refused).value, ", for a")) << refused;
  EXPECT_TRUE(absl::StrContains(DetailOf(refused).bound, absl::StrCat("at most ", 64 * kSlabBytes))) << refused;
  EXPECT_EQ(ShareOf("a").guaranteed_bytes, 40 * kSlabBytes);
  EXPECT_EQ(ShareOf("b").guaranteed_bytes, 0u);
  ASSERT_TRUE(SetQuota("b", 24, std::nullopt).ok());
  // Once they are taken away, nobody is left.
  quotas_.tenants.clear();
  ASSERT_TRUE(store().report().SetQuotas(quotas_).ok());
  EXPECT_TRUE(store().report().Shares().empty());
}

}  // namespace
}  // namespace kvmanager
