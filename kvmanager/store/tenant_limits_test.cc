// What one tenant may hold, so that others find room.
#include <string>
#include <vector>

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
  EXPECT_TRUE(store.Fork(source, &copies).ok());
}

}  // namespace
}  // namespace kvmanager
