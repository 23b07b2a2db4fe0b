// Shares of a pool: what tenants take from one another, and what not. The pool has 64 slabs, as one of 2 GiB has.
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/shown_slabs.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::Text;

class TenantSharesTest : public testing::PageStoreTest {
 protected:
  TenantSharesTest() { pool_bytes_ = 64 * kSlabBytes; }

  static constexpr uint64_t kSlabBytes = 2 << 20;
  static constexpr int kRun = 64;  // blocks of a sequence: half a slab
  static constexpr uint64_t kBlockBytes = 2 * 8192;

  CacheId Open(const std::string& tenant) { return test().Open(MakeConfig("raw", 0, tenant)); }
  // What a tenant gets until it is refused, in sequences that it keeps.
  uint64_t Hoard(CacheId cache, uint32_t salt, std::vector<SequenceId>* held) {
    uint64_t blocks = 0;
    for (bool ok = true; ok;) {
      held->push_back(Create(cache));
      const Text text = MakeText(kRun * kPage, ++salt);
      for (int i = 0; i < kRun && ok; ++i, blocks += ok) {
        ok = test().AppendAll(cache, held->back(), text, i * kPage, kPage).ok();
      }
    }
    return blocks * kBlockBytes;
  }
  // Publishes a sequence of `blocks` and drops it.
  std::vector<BlockName> Publish(CacheId cache, uint32_t salt, int blocks = kRun) {
    const Text text = MakeText(blocks * kPage, salt);
    const SequenceId sequence = Create(cache);
    const absl::Status status = test().AppendAll(cache, sequence, text, 0, blocks * kPage);
    EXPECT_TRUE(status.ok()) << status;
    auto names = Names(cache, text, blocks);
    EXPECT_EQ(store().Publish(sequence, names).ok(), status.ok());
    store().Drop(sequence);
    return names;
  }
  int Hits(CacheId cache, const std::vector<BlockName>& names) {
    return store().caches().Match(cache, names)->hit_blocks;
  }
};

TEST_F(TenantSharesTest, TenantsOfOneTokenLeaveNearlyAll) {
  for (const int tenants : {64, 1000}) {
    SCOPED_TRACE(tenants);
    test_ = nullptr;
    std::vector<SequenceId> held;
    for (int i = 0; i < tenants; ++i) {
      held.push_back(Create(Open(absl::StrCat("uid:", i, "/x"))));
      ASSERT_TRUE(test().AppendAll(store().Describe(held.back())->cache, held.back(), MakeText(1), 0, 1).ok());
    }
    const uint64_t all = 64 * kSlabBytes;
    const uint64_t got = Hoard(Open("honest"), 1, &held);
    EXPECT_GE(got, tenants == 64 ? all / 100 * 96 : all / 100 * 84) << got << " of " << all;
    store().report().CheckInvariants();
  }
}

TEST_F(TenantSharesTest, ANeighbourThatWritesForEverTakesNoPrefix) {
  const CacheId a = Open("uid:1/a"), b = Open("uid:2/b");
  const auto names = Publish(a, 1, 32);
  ASSERT_EQ(Hits(a, names), 32);
  for (uint32_t i = 0; i < 400; ++i) Publish(b, 1000 + i);  // three times the pool
  EXPECT_EQ(Hits(a, names), 32);
  // Nor by what it keeps.
  std::vector<SequenceId> held;
  EXPECT_GE(Hoard(b, 100000, &held), 60 * kSlabBytes);
  EXPECT_EQ(Hits(a, names), 32);
}

TEST_F(TenantSharesTest, OneUserOfManyNamesHasOneShare) {
  const CacheId a = Open("uid:1/a");
  std::vector<std::vector<BlockName>> prefixes;
  for (uint32_t i = 0; i < 58; ++i) prefixes.push_back(Publish(a, 1 + i));  // 29 slabs of 64
  for (uint32_t i = 0; i < 100; ++i) {
    const CacheId b = Open(absl::StrCat("uid:2/name", i));
    for (uint32_t j = 0; j < 4; ++j) Publish(b, 1000 + 10 * i + j);
  }
  for (const auto& names : prefixes) EXPECT_EQ(Hits(a, names), kRun);
  store().report().CheckInvariants();
}

// Who has less takes from who has more until they are equal, and no further.
TEST_F(TenantSharesTest, ANewcomerTakesItsShareOfAFullPool) {
  const CacheId a = Open("uid:1/a"), b = Open("uid:2/b");
  for (uint32_t i = 0; i < 140; ++i) Publish(a, 1 + i);
  std::vector<SequenceId> held;
  const uint64_t got = Hoard(b, 10000, &held);
  EXPECT_GE(got, 30 * kSlabBytes);
  EXPECT_LE(got, 33 * kSlabBytes);
}

// Blocks are evicted for nobody while slabs hold nothing that no process maps any more.
TEST_F(TenantSharesTest, WhatNobodyMapsIsTakenBackBeforeBlocksAreEvicted) {
  const CacheId a = Open("uid:1/a"), b = Open("uid:2/b");
  const auto binding = store().caches().BeginBind(a, 40 * kSlabBytes).value();
  while (binding->DoPiece()) {
  }
  const std::vector<uint32_t> bound = *binding->result();
  ASSERT_EQ(bound.size(), 40u);
  std::vector<int> open;
  for (const uint32_t slab : bound) open.push_back(store().caches().ShowSlab(a, slab)->fd);
  std::vector<std::vector<BlockName>> prefixes;
  for (uint32_t i = 0; i < 30; ++i) prefixes.push_back(Publish(b, 1 + i));  // 15 slabs of the other 24
  for (const int fd : open) close(fd);
  test().clock.AdvanceNs(ShownSlabs::kMapWithinNs);
  for (uint32_t i = 30; i < 110; ++i) prefixes.push_back(Publish(b, 1 + i));  // 40 slabs more
  for (const auto& names : prefixes) ASSERT_EQ(Hits(b, names), kRun);
}

}  // namespace
}  // namespace kvmanager
