// What one tenant may hold, so that others find room.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;

class TenantLimitsTest : public testing::PageStoreTest {
 protected:
  CacheId Open(const std::string& tenant) {
    CacheConfig config = MakeConfig("raw", 0);
    config.tenant = tenant;
    return test().Open(config);
  }
};

TEST_F(TenantLimitsTest, HalfOfAllSequences) {
  const CacheId busy = Open("busy"), too = Open("busy"), other = Open("other");
  std::vector<SequenceId> held;
  while (held.size() < SequenceTable::kTenantSequencesMax) held.push_back(Create(busy));
  for (const CacheId cache : {busy, too}) {
    const absl::Status refused = store().Create(cache, {}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(DetailOf(refused).field, "open sequences of this tenant");
  }
  std::vector<OpenCopy> copies;
  EXPECT_EQ(store().Fork(held[0], &copies).status().code(), absl::StatusCode::kResourceExhausted);
  held.push_back(Create(other));
  store().Drop(held[0]);
  held[0] = Create(busy);
  for (const SequenceId sequence : held) store().Drop(sequence);
}

TEST_F(TenantLimitsTest, OfOneUserWhateverItsNames) {
  const CacheId caches[] = {Open("uid:7/a"), Open("uid:7/b"), Open("uid:7/")};
  std::vector<SequenceId> held;
  while (held.size() < SequenceTable::kTenantSequencesMax) held.push_back(Create(caches[held.size() % 3]));
  for (const CacheId cache : caches) {
    EXPECT_EQ(DetailOf(store().Create(cache, {}).status()).field, "open sequences of this tenant");
  }
  held.push_back(Create(Open("uid:77/a")));
  for (const SequenceId sequence : held) store().Drop(sequence);
}

// What sequences leave is counted until it is given back, which takes turns: else forks that are dropped, or cropped
// first, would have no bound.
TEST_F(TenantLimitsTest, WhatSequencesLeaveIsCountedUntilItIsGivenBack) {
  constexpr int kBlocks = 1200;  // more than are given back at once
  testing::TestStore large(192 << 20);
  PageStore& store = *large.store;
  const CacheId cache = large.Open(MakeConfig("raw", 0));
  const SequenceId first = store.Create(cache, {})->sequence;
  ASSERT_TRUE(large.AppendAll(cache, first, MakeText(kBlocks * kPage), 0, kBlocks * kPage).ok());
  std::vector<OpenCopy> copies;
  const auto counted = [&] { return store.report().Use().tenant_shared_blocks; };
  const auto release = [&] {
    while (store.long_calls().ReleaseSome()) {
    }
  };
  EXPECT_EQ(counted(), 0u);
  uint64_t before = 0;
  for (int n = 0; n < 6; ++n) {
    const auto fork = store.Fork(first, &copies);
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_EQ(counted(), before + kBlocks);
    if (n % 2 == 1) {
      ASSERT_TRUE(store.Crop(*fork, 0, &copies).ok());
    }
    store.Drop(*fork);
    EXPECT_GT(counted(), before + kBlocks / 10);
    before = counted();
  }
  release();
  EXPECT_EQ(counted(), 0u);
  store.Drop(first);
  release();
  EXPECT_EQ(counted(), 0u);
}

TEST_F(TenantLimitsTest, HalfOfAllCaches) {
  const auto open = [this](const std::string& tenant, size_t number) {
    CacheConfig config = MakeConfig("raw", 0, tenant, 1);
    config.model = absl::StrCat("model ", number);
    return store().caches().Open(config);
  };
  std::vector<SequenceId> held;
  for (size_t i = 0; i < CacheDirectory::kTenantCachesMax; ++i) held.push_back(Create(*open("busy", i)));
  const absl::Status refused = open("busy", held.size()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(refused).field, "open caches of this tenant");
  EXPECT_TRUE(open("busy", 0).ok()) << "it is open";
  EXPECT_TRUE(open("other", 0).ok());
  // What nobody uses makes room, of its own tenant alone.
  store().Drop(held[0]);
  EXPECT_TRUE(open("busy", held.size()).ok());
  EXPECT_EQ(store().report().Use().tenant_caches, CacheDirectory::kTenantCachesMax);
  store().report().CheckInvariants();
  held.erase(held.begin());
  for (const SequenceId sequence : held) store().Drop(sequence);
}

TEST_F(TenantLimitsTest, HalfOfAllPagesThatCallsRead) {
  constexpr int kTokens = static_cast<int>(kTenantLeasePagesMax / kStepEntriesMax) * kPage;
  struct Of {
    CacheId cache;
    SequenceId sequence;
  };
  const auto make = [this](const std::string& tenant) {
    CacheConfig config = MakeConfig("raw", 0, tenant, 1);
    config.layout.kv_heads = config.query_heads = 1;
    config.layout.head_dim = 16;
    Of of{test().Open(config), 0};
    of.sequence = Create(of.cache);
    const std::vector<uint8_t> zeros(kTokens * 32);
    const AppendEntry append{of.sequence, 0, kTokens, zeros.data(), zeros.data()};
    EXPECT_TRUE(store().Append(of.cache, 0, {&append, 1}).ok());
    return of;
  };
  const auto attend = [this](const Of& of, size_t entries) {
    return store().Attend(of.cache, 0, std::vector<AttendEntry>(entries, {of.sequence, kTokens - 1, 1}));
  };
  const Of busy = make("busy"), other = make("other");
  auto all = attend(busy, kStepEntriesMax);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(store().report().Use().tenant_lease_pages, kTenantLeasePagesMax);
  EXPECT_EQ(DetailOf(attend(busy, 1).status()).field, "pages under this tenant's attend leases");
  EXPECT_TRUE(attend(other, 1).ok());
  all->reset();
  const auto release = [this] {
    while (store().long_calls().ReleaseSome()) {
    }
  };
  release();
  EXPECT_TRUE(attend(busy, 1).ok());
  release();
  EXPECT_EQ(store().report().Use().tenant_lease_pages, 0u);
}

TEST_F(TenantLimitsTest, HalfOfAllPagesThatClientsReadWhereTheyLie) {
  pool_bytes_ = 64 << 20;
  constexpr int kBlocks = kTransferPagesMax;
  struct Of {
    CacheId cache;
    std::vector<BlockName> names;
  };
  const auto make = [this](const std::string& tenant) {
    CacheConfig config = MakeConfig("raw", 0, tenant, 1);
    config.layout.kv_heads = config.query_heads = 1;
    config.layout.head_dim = 16;
    const Of of{test().Open(config), Names(test().Open(config), MakeText(kBlocks * kPage), kBlocks)};
    const SequenceId sequence = Create(of.cache);
    const std::vector<uint8_t> zeros(kBlocks * kPage * 32);
    const AppendEntry append{sequence, 0, kBlocks * kPage, zeros.data(), zeros.data()};
    EXPECT_TRUE(store().Append(of.cache, 0, {&append, 1}).ok());
    EXPECT_TRUE(store().Publish(sequence, of.names).ok());
    store().Drop(sequence);
    return of;
  };
  const auto read = [this](const Of& of, size_t blocks) {
    return store().caches().ReadBlocks(of.cache, 0, absl::MakeConstSpan(of.names).subspan(0, blocks),
                                       {UINT64_MAX, 64, /*mapped=*/true});
  };
  const Of busy = make("busy"), other = make("other");
  std::vector<std::unique_ptr<BlockReads>> leases;
  for (uint64_t pages = 0; pages < kTenantMappedPagesMax; pages += kBlocks)
    leases.push_back(read(busy, kBlocks).value());
  EXPECT_EQ(store().report().Use().tenant_mapped_pages, kTenantMappedPagesMax);
  EXPECT_EQ(DetailOf(read(busy, 1).status()).field, "pages that this tenant reads where they lie");
  EXPECT_TRUE(read(other, 1).ok());
  leases.pop_back();
  EXPECT_TRUE(read(busy, 1).ok());
  leases.clear();
  EXPECT_EQ(store().report().Use().mapped_pages, 0u);
}

TEST_F(TenantLimitsTest, BlocksThatForksShare) {
  constexpr int kBlocks = 1024;
  constexpr size_t kForks = SequenceTable::kTenantSharedBlocksMax / kBlocks;
  static_assert(kForks < SequenceTable::kTenantSequencesMax);
  testing::TestStore large(128 << 20);
  PageStore& store = *large.store;
  CacheConfig config = MakeConfig("raw", 0);
  config.tenant = "busy";
  const CacheId busy = large.Open(config);
  config.tenant = "other";
  const CacheId other = large.Open(config);
  const SequenceId source = store.Create(busy, {})->sequence, others = store.Create(other, {})->sequence;
  ASSERT_TRUE(large.AppendAll(busy, source, MakeText(kBlocks * kPage), 0, kBlocks * kPage).ok());
  std::vector<OpenCopy> copies;
  std::vector<SequenceId> forks;
  while (forks.size() < kForks) forks.push_back(*store.Fork(source, &copies));
  const absl::Status refused = store.Fork(source, &copies).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(refused).field, "blocks that this tenant's sequences began with");
  EXPECT_TRUE(store.Create(busy, {}).ok());
  EXPECT_TRUE(store.Fork(others, &copies).ok());
  store.Drop(forks[0]);
  while (store.long_calls().ReleaseSome()) {
  }
  EXPECT_TRUE(store.Fork(source, &copies).ok());
}

}  // namespace
}  // namespace kvmanager
