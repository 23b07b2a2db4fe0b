// The store's books of indexes on a GPU: memory taken and given back, jobs, what forks share, what tables are told. The
// GPU is slots in host memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/pq/pq.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::PageStoreTest;
using testing::TestDevice;

constexpr char kPq[] = "pq:m=2,bits=4,ratio=0.2,sinks=2,iterations=1";
constexpr uint64_t kChunkTokens = 1024;
constexpr int kLayers = 2;

class DeviceIndexTest : public PageStoreTest {
 protected:
  DeviceIndexTest() {
    pool_bytes_ = 4 << 20;
    device_bytes_ = 32 << 20;
  }
  CacheId Open(const std::string& tenant = "a") {
    if (!registered_) RegisterPq(test().registry);
    registered_ = true;
    CacheConfig config = MakeConfig(kPq, 1, tenant, kLayers);
    config.device = TestDevice::kOrdinal;
    return test().Open(config);
  }
  SequenceId Make(CacheId cache, uint64_t prompt) { return store().Create(cache, {}, prompt)->sequence; }
  absl::Status Extend(CacheId cache, SequenceId sequence, uint64_t position, int tokens) {
    AppendEntry entry;
    entry.sequence = sequence;
    entry.position = position;
    entry.tokens = tokens;
    const absl::Status status = store().Append(cache, {0, kLayers}, {&entry, 1});
    if (status.ok()) FillPages(cache, sequence);
    return status;
  }
  // Training reads what kernels would have written.
  void FillPages(CacheId cache, SequenceId sequence) {
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<PagePlace> changes;
      ASSERT_TRUE(store().tables().TakeChanges(sequence, layer, &changes, TableKeeper::kProcess).ok());
      for (const PagePlace& place : changes) {
        if (!place.raw.valid() || place.encoded.valid()) continue;
        std::memset(test().device.pool->Data(place.raw), 0x3c, test().device.pool->SlotBytes(place.raw));
      }
    }
  }
  absl::StatusOr<std::unique_ptr<AttendLease>> Read(CacheId cache, SequenceId sequence, uint64_t position,
                                                    int tokens = 1) {
    const AttendEntry entry{sequence, position, tokens};
    return store().Attend(cache, {0, kLayers}, {&entry, 1});
  }
  // Places of the index, since the last time.
  std::vector<PagePlace> IndexChanges(SequenceId sequence, int layer = 0) {
    std::vector<PagePlace> all, index;
    EXPECT_TRUE(store().tables().TakeChanges(sequence, layer, &all).ok());
    std::copy_if(all.begin(), all.end(), std::back_inserter(index),
                 [](const PagePlace& place) { return place.encoded.valid(); });
    return index;
  }
  static std::vector<uint32_t> PlacesOf(const std::vector<PagePlace>& changes) {
    std::vector<uint32_t> places;
    for (const PagePlace& change : changes) places.push_back(change.page);
    return places;
  }
  double IndexBytes() { return test().store_metrics.index_bytes.Value(); }
  testing::ManualExecutor& executor() { return test().device.executor; }
  using Places = std::vector<uint32_t>;

 private:
  bool registered_ = false;
};

TEST_F(DeviceIndexTest, APromptsEndTakesACodebookAndCodesAreTakenAsTokensCome) {
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 40);
  ASSERT_TRUE(Extend(cache, sequence, 0, 39).ok());
  EXPECT_EQ(executor().jobs(), 0u);
  EXPECT_EQ(IndexBytes(), 0);
  EXPECT_EQ(PlacesOf(IndexChanges(sequence)), Places());
  ASSERT_TRUE(Extend(cache, sequence, 39, 1).ok());
  EXPECT_EQ(executor().jobs(), size_t{kLayers});
  EXPECT_EQ(PlacesOf(IndexChanges(sequence)), Places{0});
  ASSERT_TRUE(Extend(cache, sequence, 40, 1).ok());
  EXPECT_EQ(PlacesOf(IndexChanges(sequence)), Places{1});
  EXPECT_EQ(PlacesOf(IndexChanges(sequence)), Places());
  // Its first queries read everything; those behind wait until the index is there.
  auto prompt = Read(cache, sequence, 30, 10);
  ASSERT_TRUE(prompt.ok() && (*prompt)->ready());
  EXPECT_EQ((*prompt)->sparse_from(0), 40u);
  auto query = Read(cache, sequence, 40);
  ASSERT_TRUE(query.ok());
  EXPECT_FALSE((*query)->ready());
  executor().FinishAll();
  EXPECT_TRUE((*query)->ready());
  EXPECT_EQ(test().store_metrics.index_trainings.Value(), kLayers);
  ASSERT_TRUE(Extend(cache, sequence, 41, int(kChunkTokens)).ok());
  EXPECT_EQ(PlacesOf(IndexChanges(sequence)), Places{2});
  EXPECT_GT(IndexBytes(), 0);
  store().report().CheckInvariants();
  prompt->reset(), query->reset();
  store().Drop(sequence);
  EXPECT_EQ(IndexBytes(), 0);
  store().tables().CollectReleased();
  EXPECT_EQ(test().device.pool->slot_bytes_used(), 0u);
}

TEST_F(DeviceIndexTest, WhoNeedsAnIndexThatCouldNotBeMadeHearsSoAndOthersGoOn) {
  const CacheId cache = Open();
  const SequenceId lost = Make(cache, 40);
  ASSERT_TRUE(Extend(cache, lost, 0, 41).ok());
  auto query = Read(cache, lost, 40);
  ASSERT_TRUE(query.ok());
  bool told = false;
  (*query)->OnReady([&] { told = true; });
  executor().train_failure = absl::ResourceExhaustedError("no memory to pin");
  executor().FinishAll();
  EXPECT_TRUE(told);
  query->reset();
  const absl::Status status = Read(cache, lost, 40).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("the index of sequence ", lost))) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "no memory to pin")) << status;
  EXPECT_TRUE(Read(cache, lost, 30, 10).ok());  // queries of the prompt need none
  executor().train_failure = absl::OkStatus();
  const SequenceId next = Make(cache, 40);
  ASSERT_TRUE(Extend(cache, next, 0, 41).ok());
  executor().FinishAll();
  query = Read(cache, next, 40);
  EXPECT_TRUE(query.ok() && (*query)->ready());
  EXPECT_EQ(test().store_metrics.index_trainings.Value(), kLayers);
  query->reset();
  store().report().CheckInvariants();
  store().Drop(lost);
  store().Drop(next);
  EXPECT_EQ(IndexBytes(), 0);
  store().tables().CollectReleased();
  EXPECT_EQ(test().device.pool->slot_bytes_used(), 0u);
}

TEST_F(DeviceIndexTest, ThePlaceOfAnIndexKeepsThePageBesideIt) {
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 20);
  ASSERT_TRUE(Extend(cache, sequence, 0, 30).ok());
  std::vector<PagePlace> changes;
  ASSERT_TRUE(store().tables().TakeChanges(sequence, 0, &changes).ok());
  ASSERT_EQ(changes.size(), 4u);  // two pages, a codebook, a chunk
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(changes[i].page, i);
    EXPECT_FALSE(changes[i].encoded.valid());
    EXPECT_EQ(changes[2 + i].page, i);
    EXPECT_TRUE(changes[2 + i].encoded.valid());
    EXPECT_EQ(changes[2 + i].raw, changes[i].raw);
  }
  executor().FinishAll();
}

TEST_F(DeviceIndexTest, ForksShareFullChunksAndCropsGiveUpTheRest) {
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 40);
  ASSERT_TRUE(Extend(cache, sequence, 0, int(2 * kChunkTokens + 100)).ok());
  executor().FinishAll();
  const auto source = IndexChanges(sequence);
  ASSERT_EQ(PlacesOf(source), (Places{0, 1, 2, 3}));
  std::vector<OpenCopy> copies;
  const SequenceId fork = *store().Fork(sequence, &copies);
  const auto forked = IndexChanges(fork);
  ASSERT_EQ(PlacesOf(forked), (Places{0, 1, 2}));
  for (size_t i = 0; i < forked.size(); ++i) EXPECT_EQ(forked[i].encoded, source[i].encoded);
  EXPECT_EQ(executor().jobs(), 0u);
  ASSERT_TRUE(Read(cache, fork, 2 * kChunkTokens + 99).ok());
  const auto own = IndexChanges(fork);
  ASSERT_EQ(PlacesOf(own), Places{3});
  EXPECT_NE(own[0].encoded, source[3].encoded);
  store().report().CheckInvariants();

  // Inside a shared chunk: another takes its place before new tokens are coded.
  ASSERT_TRUE(store().Crop(fork, kChunkTokens + 50, &copies).ok());
  ASSERT_TRUE(Extend(cache, fork, kChunkTokens + 50, 1).ok());
  const auto cropped = IndexChanges(fork);
  ASSERT_EQ(PlacesOf(cropped), Places{2});
  EXPECT_NE(cropped[0].encoded, source[2].encoded);
  // Into the prompt: the index is made again.
  ASSERT_TRUE(store().Crop(fork, 30, &copies).ok());
  ASSERT_TRUE(Extend(cache, fork, 30, 20).ok());
  const auto again = IndexChanges(fork);
  ASSERT_EQ(PlacesOf(again), (Places{0, 1}));
  EXPECT_NE(again[0].encoded, source[0].encoded);
  EXPECT_EQ(executor().jobs(), size_t{kLayers});
  store().report().CheckInvariants();
  // Dropped under its training: memory stays until that ends.
  store().Drop(fork);
  store().report().CheckInvariants();
  executor().FinishAll();
  store().Drop(sequence);
  store().tables().CollectReleased();
  store().report().CheckInvariants();
  EXPECT_EQ(test().device.pool->slot_bytes_used(), 0u);
}

TEST_F(DeviceIndexTest, APromptThatIsFoundIsTrainedOnWithTheFirstCall) {
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 64);
  ASSERT_TRUE(Extend(cache, sequence, 0, 64).ok());
  executor().FinishAll();
  const testing::Text text = testing::MakeText(64);
  const std::vector<BlockName> names = test().Names(cache, text);
  ASSERT_TRUE(store().Publish(sequence, names).ok());
  const SequenceId found = store().Create(cache, names, 64)->sequence;
  EXPECT_EQ(executor().jobs(), 0u);
  ASSERT_TRUE(Extend(cache, found, 64, 1).ok());
  EXPECT_EQ(executor().jobs(), size_t{kLayers});
  auto lease = Read(cache, found, 64);
  ASSERT_TRUE(lease.ok());
  EXPECT_FALSE((*lease)->ready());
  executor().FinishAll();
  EXPECT_TRUE((*lease)->ready());
}

TEST_F(DeviceIndexTest, WhatGrowsIsHandedOverByTheHostWithWhatItsIndexIsMadeOf) {
  moves_ = true;
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 100);
  EXPECT_EQ(DetailOf(store().exports().Growing(sequence, 100).status()).field, "device");
  const auto lease = *store().exports().Growing(sequence, 100, {.way = ExportWay::kByHost});
  ASSERT_TRUE(Extend(cache, sequence, 0, 100).ok());
  ASSERT_TRUE(lease->Finish().ok());
  EXPECT_EQ(test().device.mover.moves(), 0u);
  store().exports().Written(sequence, 0, std::vector<uint64_t>(kLayers, 100));
  while (test().device.mover.moves() > 0) {
    EXPECT_EQ(lease->trailer(), nullptr);
    test().device.mover.FinishOne();
    test().executor.FinishAll();
  }
  ASSERT_NE(lease->trailer(), nullptr);
  EXPECT_EQ(lease->trailer()->index.prompt_tokens, 100u);
  EXPECT_EQ(lease->TakeReady().size() + lease->trailer_pages().size(), kLayers * ((100u + kPage - 1) / kPage));
}

TEST_F(DeviceIndexTest, WhatDoesNotFitIsRefusedAndChangesNothing) {
  device_bytes_ = 4 << 20;  // two slabs: of pages, of codebooks
  const CacheId cache = Open();
  const SequenceId sequence = Make(cache, 40);
  ASSERT_TRUE(Extend(cache, sequence, 0, 40).ok());
  executor().FinishAll();
  const absl::Status full = Extend(cache, sequence, 40, 1);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(store().Describe(sequence)->tokens, 40u);
  EXPECT_TRUE(Read(cache, sequence, 39).ok());
  store().report().CheckInvariants();
}

}  // namespace
}  // namespace kvmanager
