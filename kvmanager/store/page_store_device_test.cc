// The store's books of caches on a GPU, one rule after the other. Kernels are what a test does with the bytes.
#include <gtest/gtest.h>

#include <cstring>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::PageStoreTest;
using testing::TestDevice;
using testing::Text;

class PageStoreDeviceTest : public PageStoreTest {
 protected:
  PageStoreDeviceTest() {
    pool_bytes_ = 4 << 20;
    device_bytes_ = 16 << 20;
  }
  CacheId OpenOnDevice(const std::string& codec, int lag_pages, int layers = 2, const std::string& tenant = "a") {
    CacheConfig config = MakeConfig(codec, lag_pages, tenant, layers);
    config.device = TestDevice::kOrdinal;
    return test().Open(config);
  }
  // layers: 0 for all.
  absl::Status Extend(CacheId cache, SequenceId sequence, uint64_t position, int tokens, int first = 0,
                      int layers = 0) {
    AppendEntry entry;
    entry.sequence = sequence;
    entry.position = position;
    entry.tokens = tokens;
    if (layers == 0) layers = store().caches().Describe(cache)->config.layers;
    return store().Append(cache, {first, layers}, {&entry, 1});
  }
  SequenceId Extended(CacheId cache, int tokens) {
    const SequenceId sequence = Create(cache);
    EXPECT_TRUE(Extend(cache, sequence, 0, tokens).ok());
    return sequence;
  }
  // Of one query, in every layer.
  std::unique_ptr<AttendLease> Read(CacheId cache, SequenceId sequence, uint64_t position, int tokens = 1) {
    const AttendEntry entry{sequence, position, tokens};
    auto lease = store().Attend(cache, {0, store().caches().Describe(cache)->config.layers}, {&entry, 1});
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  std::vector<PagePlace> Changes(SequenceId sequence, int layer = 0) {
    std::vector<PagePlace> changes;
    EXPECT_TRUE(store().tables().TakeChanges(sequence, layer, &changes).ok());
    return changes;
  }
  std::vector<uint32_t> ChangedPages(SequenceId sequence, int layer = 0) {
    std::vector<uint32_t> pages;
    for (const PagePlace& place : Changes(sequence, layer)) pages.push_back(place.page);
    return pages;
  }
  TestDevice& device() { return test().device; }
  bool AwaitsRelease() { return store().tables().AwaitsRelease(TestDevice::kOrdinal); }
  static void ExpectWrongMemory(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(DetailOf(status).field, "device") << status;
  }

  using Pages = std::vector<uint32_t>;
  static constexpr uint64_t kRawBytes = 2 * 4 * kPage * 32 * 2;
};

TEST_F(PageStoreDeviceTest, HostMemoryWantsKeysAndValuesOfOneLayer) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const SequenceId sequence = Filled(cache, MakeText(kPage), 5);
  const absl::Status without = store().Append(cache, 0, {{sequence, 5, 1}});
  EXPECT_EQ(DetailOf(without).field, "entries[0]") << without;
  const absl::Status layers = Extend(cache, sequence, 5, 1);
  EXPECT_EQ(DetailOf(layers).field, "layers") << layers;
  const AttendEntry query{sequence, 0, 1};
  EXPECT_EQ(DetailOf(store().Attend(cache, {0, 2}, {&query, 1}).status()).field, "layers");
  EXPECT_EQ(store().Describe(sequence)->tokens, 5u);
  EXPECT_FALSE(store().tables().OwnsSlab(cache, TestDevice::kOrdinal, 0));
  EXPECT_FALSE(AwaitsRelease());
}

// What it told tables of in host memory nobody follows, and it is told all the same.
TEST_F(PageStoreDeviceTest, TablesOfHostMemoryCanBeFollowed) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const SequenceId sequence = Filled(cache, MakeText(kPage), 5);
  EXPECT_EQ(ChangedPages(sequence), Pages({0}));
  EXPECT_EQ(ChangedPages(sequence), Pages());
}

TEST_F(PageStoreDeviceTest, OpensNoCacheOnAGpuThatIsNotThere) {
  for (const int ordinal : {TestDevice::kOrdinal + 1, 1023}) {
    CacheConfig config = MakeConfig("fake", 1);
    config.device = ordinal;
    ExpectWrongMemory(store().caches().Open(config).status());
  }
  CacheConfig config = MakeConfig("fake", 1);
  config.device = CacheConfig::kHost - 1;
  EXPECT_EQ(DetailOf(store().caches().Open(config).status()).field, "device");
  EXPECT_TRUE(store().caches().List().empty());
  EXPECT_FALSE(store().tables().AwaitsRelease(TestDevice::kOrdinal + 1));
}

TEST_F(PageStoreDeviceTest, EqualDigestsInTwoMemoriesAreTwoCachesWithEqualKeys) {
  const CacheId host = test().Open(MakeConfig("fake", 1)), gpu = OpenOnDevice("fake", 1);
  EXPECT_NE(host, gpu);
  EXPECT_EQ(OpenOnDevice("fake", 1), gpu);
  EXPECT_EQ(test().Open(MakeConfig("fake", 1)), host);
  EXPECT_EQ(store().caches().Describe(host)->digest, store().caches().Describe(gpu)->digest);
  const Text text = MakeText(3 * kPage);
  const auto names = Names(host, text, 2), gpu_names = Names(gpu, text, 2);
  EXPECT_EQ(names[1].key, gpu_names[1].key);

  const SequenceId on_host = Filled(host, text, 2 * kPage);
  test().executor.FinishAll();
  ASSERT_EQ(store().Publish(on_host, names)->published, 2);
  EXPECT_EQ(device().pool->used_bytes(), 0u);
  EXPECT_EQ(store().caches().Match(gpu, names)->hit_blocks, 0);
  const uint64_t host_bytes = test().pool->used_bytes();
  const SequenceId on_gpu = Extended(gpu, 2 * kPage);
  EXPECT_EQ(test().pool->used_bytes(), host_bytes);
  EXPECT_EQ(test().executor.jobs(), 0u);
  device().executor.FinishAll();
  EXPECT_EQ(store().Publish(on_gpu, names)->published, 2);
  EXPECT_EQ(*store().caches().Purge(host), 0u);
  store().Drop(on_host);
  EXPECT_EQ(*store().caches().Purge(host), 2u);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  EXPECT_EQ(store().caches().Match(gpu, names)->hit_blocks, 2);
}

TEST_F(PageStoreDeviceTest, ExtendIsAllOrNothing) {
  const CacheId cache = OpenOnDevice("fake", 1, 3);
  const SequenceId a = Create(cache), b = Create(cache);
  ASSERT_TRUE(Extend(cache, a, 0, 5, 1, 1).ok());
  const uint64_t used = device().pool->used_bytes();
  const auto unchanged = [&] {
    store().report().CheckInvariants();
    EXPECT_EQ(device().pool->used_bytes(), used);
    EXPECT_TRUE(ChangedPages(a, 0).empty() && ChangedPages(a, 2).empty() && ChangedPages(b, 0).empty());
    EXPECT_EQ(device().executor.jobs(), 0u);
  };
  const auto extend = [&](std::vector<AppendEntry> entries, int first, int layers) {
    return store().Append(cache, {first, layers}, entries);
  };
  // Layer 1 is ahead of the others.
  const absl::Status status = extend({{b, 0, 2 * kPage}, {a, 0, 2 * kPage}}, 0, 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(DetailOf(status).field, "entries[1].position");
  EXPECT_NE(status.message().find("layer 1"), absl::string_view::npos) << status;
  unchanged();
  EXPECT_EQ(extend({{b, 0, 1}, {b, 0, 1}}, 0, 3).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(extend({{b, 0, 1}, {a, 0, 0}}, 0, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(extend({{b, 0, 1}, {99, 0, 1}}, 0, 1).code(), absl::StatusCode::kNotFound);
  for (const auto& [first, layers] : {std::pair(-1, 1), {0, 0}, {0, 4}, {3, 1}, {1, 3}, {2, 1 << 30}}) {
    EXPECT_EQ(extend({{b, 0, 1}}, first, layers).code(), absl::StatusCode::kInvalidArgument) << first << " " << layers;
  }
  unchanged();
  ASSERT_TRUE(extend({{b, 0, 1}, {a, 0, 5}}, 0, 1).ok());
  ASSERT_TRUE(Extend(cache, a, 0, 5, 2, 1).ok());
  EXPECT_TRUE(Extend(cache, a, 5, 1).ok());
}

TEST_F(PageStoreDeviceTest, ExtendThatDoesNotFitInEveryLayerChangesNothing) {
  device_bytes_ = 6 << 20;  // of 2 MiB slabs, one of which is for encoded pages
  const CacheId cache = OpenOnDevice("fake", 1, 3);
  const int pages = static_cast<int>((4 << 20) / kRawBytes / 2);  // fit in two layers, not in three
  const SequenceId a = Create(cache);
  const absl::Status status = Extend(cache, a, 0, pages * kPage);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(device().pool->used_bytes(), 0u);
  EXPECT_EQ(store().Describe(a)->tokens, 0u);
  for (int layer = 0; layer < 3; ++layer) EXPECT_TRUE(Changes(a, layer).empty());
  EXPECT_FALSE(AwaitsRelease());
  EXPECT_TRUE(Extend(cache, a, 0, pages / 2 * kPage).ok());
}

TEST_F(PageStoreDeviceTest, ChangesOfAppendSealAndDecline) {
  const CacheId cache = OpenOnDevice("declining", 0);
  const SequenceId a = Create(cache);
  EXPECT_TRUE(Changes(a).empty());
  ASSERT_TRUE(Extend(cache, a, 0, 5).ok());
  auto changes = Changes(a);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].page, 0u);
  EXPECT_FALSE(changes[0].encoded.valid());
  const PageId raw = changes[0].raw;
  std::memset(device().pool->Data(raw), 4, kRawBytes);  // to be declined
  ASSERT_TRUE(Extend(cache, a, 5, 3).ok());
  EXPECT_TRUE(Changes(a).empty());  // the same page, of which no slot changed
  ASSERT_TRUE(Extend(cache, a, 8, 2 * kPage).ok());
  changes = Changes(a);
  ASSERT_EQ(changes.size(), 3u);
  EXPECT_EQ(changes[0].raw, raw);
  EXPECT_TRUE(changes[0].encoded.valid() && changes[1].encoded.valid());
  EXPECT_NE(changes[0].encoded, changes[1].encoded);
  EXPECT_EQ(changes[2].page, 2u);
  EXPECT_FALSE(changes[2].encoded.valid());
  EXPECT_EQ(ChangedPages(a, 1), (Pages{0, 1, 2}));  // a layer's own
  std::memset(device().pool->Data(changes[1].raw), 5, kRawBytes);
  ASSERT_FALSE(Read(cache, a, 2 * kPage + 7)->ready());
  device().executor.FinishAll();
  // A step that reads finds out what was declined.
  ASSERT_TRUE(Read(cache, a, 2 * kPage + 7)->ready());
  changes = Changes(a);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].page, 0u);
  EXPECT_EQ(changes[0].raw, raw);
  EXPECT_FALSE(changes[0].encoded.valid());
  ASSERT_TRUE(Read(cache, a, 2 * kPage + 7)->ready());
  EXPECT_TRUE(Changes(a).empty());
}

TEST_F(PageStoreDeviceTest, AnIdentityPageHasOneSlotForGood) {
  const CacheId cache = OpenOnDevice("raw", 0);
  const SequenceId a = Extended(cache, 3);
  const PageId slot = Changes(a)[0].raw;
  ASSERT_TRUE(Extend(cache, a, 3, 3 * kPage).ok());
  const auto changes = Changes(a);
  ASSERT_EQ(changes.size(), 4u);
  EXPECT_EQ(changes[0].raw, slot);
  for (const PagePlace& place : changes) EXPECT_TRUE(place.raw.valid() && !place.encoded.valid());
  EXPECT_EQ(device().executor.jobs(), 0u);
  EXPECT_TRUE(Read(cache, a, 3 * kPage)->ready());
}

TEST_F(PageStoreDeviceTest, ChangesOfPrefixHitAndFork) {
  const CacheId cache = OpenOnDevice("fake", 1);
  const Text text = MakeText(4 * kPage);
  const SequenceId a = Extended(cache, 3 * kPage + 4);
  const auto of_a = Changes(a);
  ASSERT_EQ(of_a.size(), 4u);
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 2)).ok());
  EXPECT_TRUE(Changes(a).empty());  // named, but where they were
  const auto hit = store().Create(cache, Names(cache, text, 2));
  ASSERT_EQ(hit->match.hit_blocks, 2);
  const auto of_hit = Changes(hit->sequence);
  ASSERT_EQ(of_hit.size(), 2u);
  EXPECT_EQ(of_hit[1].encoded, of_a[1].encoded);

  std::vector<OpenCopy> copies;
  const auto fork = store().Fork(a, &copies);
  ASSERT_TRUE(fork.ok()) << fork.status();
  ASSERT_EQ(copies.size(), 2u);
  const auto of_fork = Changes(*fork);
  ASSERT_EQ(of_fork.size(), 4u);
  EXPECT_EQ(of_fork[2].raw, of_a[2].raw);
  EXPECT_EQ(copies[0].layer, 0u);
  EXPECT_EQ(copies[0].tokens, 4);
  EXPECT_EQ(copies[0].from, of_a[3].raw);
  EXPECT_EQ(copies[0].to, of_fork[3].raw);
  EXPECT_EQ(copies[1].layer, 1u);
  EXPECT_TRUE(Changes(a).empty());
  // At a boundary nothing is to be copied.
  ASSERT_TRUE(Extend(cache, a, 3 * kPage + 4, kPage - 4).ok());
  copies.clear();
  ASSERT_TRUE(store().Fork(a, &copies).ok());
  EXPECT_TRUE(copies.empty());
}

TEST_F(PageStoreDeviceTest, ChangesOfCrop) {
  const CacheId cache = OpenOnDevice("fake", 1);
  const SequenceId a = Extended(cache, 3 * kPage + 4);
  const auto before = Changes(a);
  Changes(a, 1);
  std::vector<OpenCopy> copies;
  // Inside the open page: it stays where it is.
  ASSERT_TRUE(store().Crop(a, 3 * kPage + 2, &copies).ok());
  EXPECT_TRUE(copies.empty());
  EXPECT_TRUE(Changes(a).empty());
  // Inside a sealed page that is read raw: others may share it.
  ASSERT_TRUE(store().Crop(a, 2 * kPage + 9, &copies).ok());
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(copies[0].from, before[2].raw);
  EXPECT_EQ(copies[0].tokens, 9);
  auto changes = Changes(a);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].page, 2u);
  EXPECT_EQ(changes[0].raw, copies[0].to);
  EXPECT_NE(changes[0].raw, before[2].raw);
  EXPECT_FALSE(changes[0].encoded.valid());
  // Inside a page that is read encoded.
  const absl::Status aged = store().Crop(a, 3, &copies);
  EXPECT_EQ(aged.code(), absl::StatusCode::kFailedPrecondition) << aged;
  EXPECT_EQ(copies.size(), 2u);
  // At a boundary: pages go, and are named again once they are there again.
  copies.clear();
  ASSERT_TRUE(store().Crop(a, kPage, &copies).ok());
  EXPECT_TRUE(copies.empty());
  EXPECT_TRUE(Changes(a).empty());
  EXPECT_TRUE(Changes(a, 1).empty());
  ASSERT_TRUE(Extend(cache, a, kPage, 2 * kPage).ok());
  EXPECT_EQ(ChangedPages(a), (Pages{1, 2}));
  EXPECT_EQ(ChangedPages(a, 1), (Pages{1, 2}));
  // Of what changed and is gone nothing is told.
  ASSERT_TRUE(Extend(cache, a, 3 * kPage, kPage).ok());
  ASSERT_TRUE(store().Crop(a, 3 * kPage, &copies).ok());
  EXPECT_TRUE(Changes(a).empty());
}

TEST_F(PageStoreDeviceTest, APageThatACropGivesUpStaysForItsCopyUnderAnEarlierPlan) {
  const CacheId cache = OpenOnDevice("raw", 0, 1);
  ReleaseCounter counter;
  const auto holder = *device().epochs.AddHolder(&counter);
  const SequenceId a = Extended(cache, kPage);
  std::vector<OpenCopy> copies;
  const uint64_t plan = *device().epochs.OpenPlan(holder);
  ASSERT_TRUE(store().Crop(a, 3, &copies).ok());
  ASSERT_EQ(copies.size(), 1u);
  std::vector<PageId> reusable;
  device().epochs.Collect(&reusable);
  EXPECT_TRUE(reusable.empty());
  EXPECT_TRUE(device().pool->IsCurrent(copies[0].from));
  counter.released = plan;
  device().epochs.Collect(&reusable);
  ASSERT_EQ(reusable, std::vector<PageId>{copies[0].from});
  device().pool->Free(reusable[0]);
}

TEST_F(PageStoreDeviceTest, ReadWaitsForWhatItsQueriesReadEncoded) {
  const CacheId cache = OpenOnDevice("fake", 1);
  const SequenceId a = Extended(cache, 3 * kPage + 1);  // one job: pages 0 to 2
  EXPECT_TRUE(Read(cache, a, 2 * kPage - 1)->ready());  // own page and the one before: raw
  EXPECT_FALSE(Read(cache, a, 2 * kPage - 1, 2)->ready());
  auto lease = Read(cache, a, 3 * kPage);
  EXPECT_EQ(lease->aged(0), 0u);
  EXPECT_FALSE(lease->ready());
  bool called = false;
  lease->OnReady([&called] { called = true; });
  EXPECT_FALSE(called);
  device().executor.FinishAll();
  EXPECT_TRUE(called && lease->ready());
  EXPECT_TRUE(Read(cache, a, 3 * kPage)->ready());
  // In one of the layers alone.
  ASSERT_TRUE(Extend(cache, a, 3 * kPage + 1, 2 * kPage, 0, 1).ok());
  device().executor.FinishAll();
  ASSERT_TRUE(Extend(cache, a, 3 * kPage + 1, 2 * kPage, 1, 1).ok());
  const AttendEntry query{a, 5 * kPage, 1};
  EXPECT_TRUE((*store().Attend(cache, {0, 1}, {&query, 1}))->ready());
  EXPECT_FALSE((*store().Attend(cache, {1, 1}, {&query, 1}))->ready());
  EXPECT_FALSE(Read(cache, a, 5 * kPage)->ready());
  // Aged for the one layer, not for the other.
  ASSERT_TRUE(Extend(cache, a, 5 * kPage + 1, 1, 1, 1).ok());
  const auto uneven = store().Attend(cache, {0, 2}, {&query, 1});
  EXPECT_EQ(uneven.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*store().Attend(cache, {1, 1}, {&query, 1}))->aged(0), 4u);
}

TEST_F(PageStoreDeviceTest, ReadRefusesWhatIsNotThere) {
  const CacheId cache = OpenOnDevice("fake", 1), other = OpenOnDevice("fake", 2);
  const SequenceId a = Extended(cache, 5);
  const auto read = [&](CacheId of, int first, int layers, AttendEntry entry) {
    return store().Attend(of, {first, layers}, {&entry, 1}).status().code();
  };
  EXPECT_EQ(read(cache, 0, 2, {a, 5, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(cache, 0, 2, {a, 4, 2}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(cache, 0, 2, {a, 4, 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(cache, 1, 2, {a, 4, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(cache, 0, 0, {a, 4, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(other, 0, 2, {a, 4, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(cache, 0, 2, {a + 1, 4, 1}), absl::StatusCode::kNotFound);
  EXPECT_EQ(read(99, 0, 2, {a, 4, 1}), absl::StatusCode::kNotFound);
  EXPECT_EQ(read(cache, 0, 2, {a, 4, 1}), absl::StatusCode::kOk);
}

TEST_F(PageStoreDeviceTest, ReadWaitsForSharedBlocksThatAnotherSequenceEncodes) {
  const CacheId cache = OpenOnDevice("fake", 0);
  const Text text = MakeText(2 * kPage);
  const SequenceId a = Extended(cache, kPage);
  ASSERT_EQ(store().Publish(a, Names(cache, text, 1))->published, 1);
  const auto b = store().Create(cache, Names(cache, text, 1));
  ASSERT_EQ(b->match.hit_blocks, 1);
  ASSERT_TRUE(Extend(cache, b->sequence, kPage, 1).ok());
  auto lease = Read(cache, b->sequence, kPage);
  EXPECT_EQ(lease->aged(0), 1u);
  EXPECT_FALSE(lease->ready());
  store().Drop(a);
  EXPECT_FALSE(lease->ready());
  device().executor.FinishAll();
  EXPECT_TRUE(lease->ready());
}

TEST_F(PageStoreDeviceTest, PagesAppendedAgainBehindACropAreWaitedForAnew) {
  const CacheId cache = OpenOnDevice("fake", 0);
  const SequenceId a = Extended(cache, 3 * kPage + 1);
  device().executor.FinishAll();
  ASSERT_TRUE(Read(cache, a, 3 * kPage)->ready());
  std::vector<OpenCopy> copies;
  ASSERT_TRUE(store().Crop(a, kPage, &copies).ok());
  ASSERT_TRUE(Extend(cache, a, kPage, 2 * kPage + 1).ok());
  EXPECT_TRUE(Read(cache, a, 2 * kPage - 1)->ready());
  EXPECT_FALSE(Read(cache, a, 3 * kPage)->ready());
  device().executor.FinishAll();
  EXPECT_TRUE(Read(cache, a, 3 * kPage)->ready());
}

TEST_F(PageStoreDeviceTest, PublishThatSharesMovesToSlotsThatMayStillBeEncoded) {
  const CacheId cache = OpenOnDevice("fake", 0);
  const Text text = MakeText(3 * kPage);
  // Encoded, and seen to be.
  const SequenceId b = Extended(cache, 2 * kPage);
  ASSERT_TRUE(Extend(cache, b, 2 * kPage, 1).ok());
  device().executor.FinishAll();
  ASSERT_TRUE(Read(cache, b, 2 * kPage)->ready());
  const auto own = Changes(b);
  Changes(b, 1);
  const SequenceId a = Extended(cache, 2 * kPage);
  const auto of_a = Changes(a);
  ASSERT_EQ(store().Publish(a, Names(cache, text, 2))->published, 2);
  ASSERT_EQ(store().Publish(b, Names(cache, text, 2))->shared, 2);
  EXPECT_EQ(ChangedPages(b, 1), (Pages{0, 1}));
  const auto changes = Changes(b);
  ASSERT_EQ(changes.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(changes[i].encoded, of_a[i].encoded);
    EXPECT_NE(changes[i].encoded, own[i].encoded);
  }
  const auto lease = Read(cache, b, 2 * kPage);
  EXPECT_FALSE(lease->ready());
  device().executor.FinishAll();
  EXPECT_TRUE(lease->ready());
}

TEST_F(PageStoreDeviceTest, SlotsGivenUpReturnWithThePlansThatMayNameThem) {
  device_bytes_ = 4 << 20;
  const CacheId cache = OpenOnDevice("fake", 0, 1);
  ReleaseCounter counters[2];
  const auto early = *device().epochs.AddHolder(&counters[0]), late = *device().epochs.AddHolder(&counters[1]);
  const int pages = static_cast<int>((2 << 20) / kRawBytes);  // as many raw ones as fit
  const SequenceId a = Extended(cache, pages * kPage);
  const uint64_t plan = *device().epochs.OpenPlan(early);
  const uint64_t used = device().pool->used_bytes();
  device().executor.FinishAll();
  store().Drop(a);
  EXPECT_EQ(device().pool->used_bytes(), used);
  EXPECT_TRUE(AwaitsRelease());
  store().report().CheckInvariants();
  const SequenceId b = Create(cache);
  EXPECT_EQ(Extend(cache, b, 0, 1).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(AwaitsRelease());
  const uint64_t newer = *device().epochs.OpenPlan(late);  // names nothing of it
  EXPECT_EQ(Extend(cache, b, 0, 1).code(), absl::StatusCode::kResourceExhausted);
  counters[0].released = plan - 1;
  EXPECT_EQ(Extend(cache, b, 0, 1).code(), absl::StatusCode::kResourceExhausted);
  counters[0].released = plan;
  EXPECT_TRUE(Extend(cache, b, 0, 1).ok());
  EXPECT_FALSE(AwaitsRelease());
  EXPECT_EQ(device().pool->used_bytes(), kRawBytes);
  // A holder that is gone holds nothing.
  store().Drop(b);
  const SequenceId c = Create(cache);
  EXPECT_EQ(Extend(cache, c, 0, pages * kPage).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(AwaitsRelease());
  device().epochs.RemoveHolder(late);
  EXPECT_TRUE(Extend(cache, c, 0, pages * kPage).ok());
  EXPECT_LT(plan, newer);
}

TEST_F(PageStoreDeviceTest, RawSlotsOfAgedPagesAreGivenUpToo) {
  const CacheId cache = OpenOnDevice("fake", 0, 1);
  ReleaseCounter counter;
  const auto holder = *device().epochs.AddHolder(&counter);
  const SequenceId a = Extended(cache, kPage);
  const PageId raw = Changes(a)[0].raw;
  device().executor.FinishAll();
  EXPECT_FALSE(AwaitsRelease());  // still the newest page
  const uint64_t plan = *device().epochs.OpenPlan(holder);
  ASSERT_TRUE(Extend(cache, a, kPage, 1).ok());
  EXPECT_TRUE(AwaitsRelease());
  EXPECT_TRUE(device().pool->IsCurrent(raw));
  std::vector<PageId> reusable;
  counter.released = plan;
  device().epochs.Collect(&reusable);
  ASSERT_EQ(reusable, std::vector<PageId>{raw});
  device().pool->Free(raw);
}

TEST_F(PageStoreDeviceTest, WhatWasEvictedUnderKernelsFitsLater) {
  device_bytes_ = 4 << 20;
  const CacheId cache = OpenOnDevice("raw", 0, 1);
  ReleaseCounter counter;
  const auto holder = *device().epochs.AddHolder(&counter);
  const int pages = static_cast<int>((4 << 20) / kRawBytes);  // the whole pool
  const SequenceId a = Extended(cache, pages * kPage);
  ASSERT_EQ(store().Publish(a, Names(cache, MakeText(pages * kPage), pages))->published, pages);
  const uint64_t plan = *device().epochs.OpenPlan(holder);
  store().Drop(a);
  EXPECT_FALSE(AwaitsRelease());  // evictable, not given up
  const SequenceId b = Create(cache);
  const absl::Status status = Extend(cache, b, 0, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(AwaitsRelease());
  store().report().CheckInvariants();
  // Kernels that are slow do not cost a cache everything that it could find: a slab's worth goes at most, however often
  // one asks.
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Extend(cache, b, 0, 1).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), pages / 2);
  EXPECT_EQ(store().caches().Describe(cache)->published_blocks, static_cast<uint64_t>(pages / 2));
  counter.released = plan;
  EXPECT_TRUE(Extend(cache, b, 0, 1).ok());
  EXPECT_FALSE(AwaitsRelease());
  EXPECT_EQ(store().caches().Describe(cache)->published_blocks, static_cast<uint64_t>(pages / 2));
  // Once that has returned, what is evicted next counts anew.
  const uint64_t second = *device().epochs.OpenPlan(holder);
  const int more = static_cast<int>((2 << 20) / kRawBytes) * kPage;
  EXPECT_EQ(Extend(cache, b, 1, more).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(AwaitsRelease());
  counter.released = second;
  EXPECT_TRUE(Extend(cache, b, 1, more).ok());
}

TEST_F(PageStoreDeviceTest, WithoutPlansEvictionMakesRoomAtOnce) {
  device_bytes_ = 4 << 20;
  const CacheId cache = OpenOnDevice("raw", 0, 1);
  const int pages = static_cast<int>((4 << 20) / kRawBytes);
  const SequenceId a = Extended(cache, pages * kPage);
  ASSERT_TRUE(store().Publish(a, Names(cache, MakeText(pages * kPage), pages)).ok());
  store().Drop(a);
  const SequenceId b = Create(cache);
  EXPECT_TRUE(Extend(cache, b, 0, 3 * kPage).ok());
  EXPECT_EQ(store().caches().Describe(cache)->published_blocks, static_cast<uint64_t>(pages - 3));
  EXPECT_TRUE(Extend(cache, b, 3 * kPage, (pages - 3) * kPage).ok());
}

TEST_F(PageStoreDeviceTest, ADroppedSequencesPagesOutliveTheirJobs) {
  const CacheId cache = OpenOnDevice("fake", 0, 1);
  const SequenceId a = Extended(cache, kPage + 1);
  const auto places = Changes(a);
  auto lease = Read(cache, a, kPage);
  store().Drop(a);
  store().report().CheckInvariants();
  ASSERT_TRUE(AwaitsRelease());  // the open page
  std::vector<PageId> reusable;
  device().epochs.Collect(&reusable);
  ASSERT_EQ(reusable, std::vector<PageId>{places[1].raw});
  device().pool->Free(reusable[0]);
  EXPECT_FALSE(AwaitsRelease());
  EXPECT_TRUE(device().pool->IsCurrent(places[0].raw) && device().pool->IsCurrent(places[0].encoded));
  device().executor.FinishAll();
  store().report().CheckInvariants();
  EXPECT_TRUE(lease->ready());  // it pins what it waited for
  EXPECT_FALSE(AwaitsRelease());
  lease = nullptr;
  EXPECT_TRUE(AwaitsRelease());
  reusable.clear();
  device().epochs.Collect(&reusable);
  EXPECT_EQ(reusable.size(), 2u);
  for (const PageId slot : reusable) device().pool->Free(slot);
  EXPECT_EQ(device().pool->used_bytes(), 0u);
}

TEST_F(PageStoreDeviceTest, LeasesAndJobsMayEndAfterTheStore) {
  const CacheId cache = OpenOnDevice("fake", 0, 1);
  const SequenceId a = Extended(cache, kPage + 1);
  const auto lease = Read(cache, a, kPage);
  EXPECT_FALSE(lease->ready());
  test().store = nullptr;
  device().executor.FinishAll();
  EXPECT_FALSE(lease->ready());
  test_ = nullptr;
}

}  // namespace
}  // namespace kvmanager
