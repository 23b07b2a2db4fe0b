// Blocks that go to a disk and come back, one rule after the other, and at random with restarts. The disk is what the
// test says.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "kvmanager/store/fake_disk.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::FakeDisk;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeRawPage;
using testing::MakeText;
using testing::TestDevice;
using testing::TestStore;
using testing::Text;

class PageStoreDiskTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (test_ == nullptr) return;
    Finish();
    test_->store->report().CheckInvariants();
  }
  TestStore& test() {
    if (test_ == nullptr) {
      test_ = std::make_unique<TestStore>(pool_bytes_, device_bytes_, true, EvictionKind::kLru, &disk_);
      test_->store->long_calls().OnLeftovers([this] { left_ = true; });
    }
    return *test_;
  }
  PageStore& store() { return *test().store; }
  // What the daemon does in turns of its loop, until nothing is left.
  void Turns() {
    while (std::exchange(left_, false)) {
      while (store().long_calls().ReleaseSome()) {
      }
    }
  }
  void Finish() {
    do {
      Turns();
      test().executor.FinishAll();
      test().device.mover.FinishAll();
      disk_.FinishAll();
    } while (left_ || test().executor.jobs() + test().device.mover.moves() + disk_.writes() + disk_.reads() > 0);
  }
  // The daemon has died; the disk has what was written.
  void Restart() {
    Finish();
    test_ = nullptr;
  }
  // Published blocks that nobody uses, encoded.
  void Publish(CacheId cache, const Text& text, int blocks) {
    const SequenceId sequence = store().Create(cache, {})->sequence;
    ASSERT_TRUE(test().AppendAll(cache, sequence, text, 0, blocks * kPage + 1).ok());
    ASSERT_TRUE(store().Publish(sequence, Names(cache, text, blocks)).ok());
    test().executor.FinishAll();
    store().Drop(sequence);
    Turns();
  }
  // The cache as it is opened after a restart: the disk alone has the text's first blocks.
  CacheId OnDiskAlone(const std::string& codec, const Text& text, int blocks) {
    Publish(test().Open(MakeConfig(codec, 0)), text, blocks);
    Restart();
    return test().Open(MakeConfig(codec, 0));
  }
  // Fills the pool, has the disk give up everything, and publishes 8 blocks more.
  void ExpectWrittenAgain(CacheId cache) {
    uint32_t texts = 0;
    for (; test().store_metrics.evicted_blocks.Value() == 0; ++texts) {
      Publish(cache, MakeText(9 * kPage, 1000 * texts), 8);
      Finish();
    }
    while (!disk_.stored.empty()) disk_.Evict(disk_.stored.begin()->first);
    store().report().CheckInvariants();
    Publish(cache, MakeText(9 * kPage, 1000 * texts), 8);
    Finish();
    EXPECT_GT(disk_.stored.size(), 8u);
  }
  std::vector<BlockName> Names(CacheId cache, const Text& text, size_t blocks) {
    auto names = test().Names(cache, text);
    names.resize(blocks);
    return names;
  }
  std::unique_ptr<DiskLoad> Load(CacheId cache, std::vector<BlockName> names) {
    auto load = store().long_calls().BeginLoad(cache, std::move(names), 0);
    EXPECT_NE(load, nullptr);
    testing::LoadAll(*load, [this] { Finish(); });
    return load;
  }
  // What a client's call does.
  CreateResult LoadAndCreate(CacheId cache, std::vector<BlockName> names) {
    const auto load = Load(cache, names);
    return *store().Create(cache, names);
  }
  // Every page of the sequence's first blocks, as it is stored.
  void ExpectStored(CacheId cache, const Text& text, int blocks) {
    const auto codec = store().caches().codec(cache);
    const auto reads = store().caches().ReadBlocks(cache, 0, Names(cache, text, blocks), UINT64_MAX, 64);
    ASSERT_TRUE(reads.ok() && (*reads)->blocks() == static_cast<size_t>(blocks)) << (*reads)->blocks();
    const size_t layers = (*reads)->pages().size() / blocks;
    for (size_t i = 0; i < (*reads)->pages().size(); ++i) {
      const StoredPage& page = (*reads)->pages()[i];
      const uint32_t block = static_cast<uint32_t>(i / layers);
      const int layer = static_cast<int>(page.layer);
      auto expected = MakeRawPage(codec->layout(), text, block, kPage, layer);
      if (!page.raw) expected = testing::MakeEncodedPage(*codec, expected, block, layer);
      ASSERT_EQ(page.bytes, expected.size());
      EXPECT_EQ(std::memcmp(page.data, expected.data(), expected.size()), 0) << "page " << i;
    }
  }

  FakeDisk disk_;  // outlives the stores
  uint64_t pool_bytes_ = 16 << 20, device_bytes_ = 0;
  std::unique_ptr<TestStore> test_;
  bool left_ = false;  // something for ReleaseSome
};

TEST_F(PageStoreDiskTest, WritesWhatIsPublishedOnceItIsEncoded) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(4 * kPage);
  const SequenceId sequence = store().Create(cache, {})->sequence;
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 0, 3 * kPage).ok());
  ASSERT_EQ(store().Publish(sequence, Names(cache, text, 3))->published, 3);
  EXPECT_EQ(disk_.writes(), 0u);  // to be encoded
  EXPECT_EQ(test().store_metrics.unwritten_blocks.Value(), 3);
  Turns();  // and found to be so
  test().executor.FinishAll();
  Turns();
  EXPECT_EQ(disk_.writes(), 3u);
  store().report().CheckInvariants();
  disk_.FinishAll();
  EXPECT_EQ(disk_.stored.size(), 3u);
  for (const auto& [name, stored] : disk_.stored) {
    EXPECT_EQ(stored.payer, "a");
    EXPECT_EQ(stored.record.tokens, static_cast<uint32_t>(kPage));
    for (size_t layer = 0; layer < stored.pages.size(); ++layer) {
      const auto raw = MakeRawPage(store().caches().codec(cache)->layout(), text, stored.block.index, kPage, layer);
      EXPECT_EQ(stored.pages[layer], testing::MakeEncodedPage(*store().caches().codec(cache), raw, stored.block.index,
                                                              static_cast<int>(layer)));
      EXPECT_EQ(stored.record.pages[layer].checksum, testing::Checksum(stored.pages[layer]));
    }
  }
}

TEST_F(PageStoreDiskTest, FindsAfterARestartWhatWasWritten) {
  for (const char* codec : {"fake", "declining", "uneven", "sinks", "raw"}) {
    SCOPED_TRACE(codec);
    const Text text = MakeText(6 * kPage, 3);
    Publish(test().Open(MakeConfig(codec, 1)), text, 5);
    Restart();
    const CacheId cache = test().Open(MakeConfig(codec, 1));
    const auto names = Names(cache, text, 6);
    EXPECT_EQ(store().Create(cache, names)->match.hit_blocks, 0);  // without a load
    const auto match = store().caches().Match(cache, names);
    EXPECT_EQ(match->hit_blocks, 5);
    EXPECT_EQ(match->reason, MissReason::kNotFound);
    const auto created = LoadAndCreate(cache, names);
    EXPECT_EQ(created.match.hit_blocks, 5);
    ExpectStored(cache, text, 5);
    EXPECT_EQ(disk_.writes(), 0u);  // it has them
    store().Drop(created.sequence);
  }
}

TEST_F(PageStoreDiskTest, EvictsWithoutLossWhatWasWritten) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  std::vector<Text> texts;
  for (uint32_t i = 0; i < 400; ++i) {
    texts.push_back(MakeText(9 * kPage, 1000 * i));
    Publish(cache, texts.back(), 8);
    Finish();
  }
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(disk_.stored.size(), 400u * 8);
  for (const Text& text : {texts[0], texts[200], texts[399]}) {
    const auto created = LoadAndCreate(cache, Names(cache, text, 8));
    EXPECT_EQ(created.match.hit_blocks, 8);
    ExpectStored(cache, text, 8);
    store().Drop(created.sequence);
  }
}

// A block is read once, and a call that is dropped meanwhile takes nothing from the others.
TEST_F(PageStoreDiskTest, SharesOneReadAmongThoseWhoWait) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  std::vector<std::unique_ptr<DiskLoad>> loads;
  for (int i = 0; i < 3; ++i) {
    loads.push_back(store().long_calls().BeginLoad(cache, Names(cache, text, 4), 0));
    while (loads.back()->DoPiece()) {
    }
    EXPECT_FALSE(loads.back()->done());
  }
  EXPECT_EQ(disk_.reads(), 4u);
  loads[0] = nullptr;
  store().report().CheckInvariants();
  int woken = 0;
  for (int i = 1; i < 3; ++i) loads[i]->OnMore([&] { ++woken; });
  Finish();
  EXPECT_EQ(woken, 2);
  for (int i = 1; i < 3; ++i) {
    testing::LoadAll(*loads[i], [this] { Finish(); });
    EXPECT_EQ(store().Create(cache, Names(cache, text, 4))->match.hit_blocks, 4);
  }
}

TEST_F(PageStoreDiskTest, NobodyIsLeftWaitingWhenAllLoadsAreDropped) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  auto load = store().long_calls().BeginLoad(cache, Names(cache, text, 4), 0);
  while (load->DoPiece()) {
  }
  load->OnMore([] { FAIL() << "its owner has gone"; });
  load = nullptr;
  Finish();
  EXPECT_EQ(store().caches().Describe(cache)->published_blocks, 4u);  // read all the same
}

TEST_F(PageStoreDiskTest, AFlippedByteLosesItsBlockAndNoOther) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  const FakeDisk::Name wrong{store().caches().Describe(cache)->digest, names[2].key};
  disk_.stored.at(wrong).pages[1][77] ^= 4;
  const auto created = LoadAndCreate(cache, names);
  EXPECT_EQ(created.match.hit_blocks, 2);
  EXPECT_FALSE(disk_.stored.contains(wrong));  // erased
  EXPECT_EQ(disk_.stored.size(), 3u);
  EXPECT_EQ(test().store_metrics.checksum_failures.Value(), 1);
  store().Drop(created.sequence);
}

// Of another place, other tokens, other forms: somebody wrote that who knew the name.
TEST_F(PageStoreDiskTest, TakesNoBlockThatDiffersFromItsName) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("sinks", text, 4);
  const auto names = Names(cache, text, 4);
  const auto stored = [&](int i) -> FakeDisk::Stored& {
    return disk_.stored.at({store().caches().Describe(cache)->digest, names[static_cast<size_t>(i)].key});
  };
  const auto hits = [&] {
    const auto created = LoadAndCreate(cache, names);
    store().Drop(created.sequence);
    return created.match.hit_blocks;
  };
  stored(1).block.raw[0] = 0;  // the codec keeps its pages raw
  EXPECT_EQ(hits(), 1);
  stored(1).block.raw[0] = 3;
  stored(3).block.layers = 3;
  EXPECT_EQ(hits(), 3);
  stored(3).block.layers = 2;
  stored(3).block.index = 2;
  stored(2).block.tokens.bytes[0] ^= 1;
  EXPECT_EQ(hits(), 3);  // block 2 is in memory by now
  stored(3).block.index = 3;
  EXPECT_EQ(hits(), 4);
}

TEST_F(PageStoreDiskTest, ADiskThatFailsIsAMiss) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  auto load = store().long_calls().BeginLoad(cache, names, 0);
  testing::LoadAll(*load, [&] {
    while (disk_.reads() > 0) disk_.FinishRead(absl::UnavailableError("an I/O error"));
  });
  EXPECT_EQ(store().Create(cache, names)->match.hit_blocks, 0);
  load = nullptr;
  EXPECT_EQ(LoadAndCreate(cache, names).match.hit_blocks, 4);  // it was the moment's
}

// What the disk does not take stays in memory, and is written later or lost.
TEST_F(PageStoreDiskTest, ADiskThatTakesNothingCostsNothing) {
  pool_bytes_ = 4 << 20;
  disk_.takes = false;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  for (uint32_t i = 0; i < 200; ++i) Publish(cache, MakeText(9 * kPage, 1000 * i), 8);
  EXPECT_EQ(disk_.writes(), 0u);
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  disk_.takes = true;
  Publish(cache, MakeText(9 * kPage, 777), 8);
  Finish();
  EXPECT_GT(disk_.stored.size(), 100u);
}

// While a disk is slow, blocks that it has go first, though others were used before them.
TEST_F(PageStoreDiskTest, WhatTheDiskHasGoesBeforeWhatItDoesNotHaveYet) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  std::vector<Text> written;
  while (test().store_metrics.evicted_blocks.Value() == 0) {
    written.push_back(MakeText(9 * kPage, 1000 * written.size()));
    Publish(cache, written.back(), 8);
    Finish();
  }
  disk_.writes_max = 0;
  const Text waiting = MakeText(9 * kPage, 777);
  const auto hits = [&](const Text& text) { return store().caches().Match(cache, Names(cache, text, 8))->hit_blocks; };
  const auto crowd = [&](uint32_t first) {
    for (const Text& text : written) hits(text);
    for (uint32_t i = 0; i < 5; ++i) Publish(cache, MakeText(9 * kPage, first + 1000 * i), 8);
  };
  Publish(cache, waiting, 8);
  crowd(333);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 6u * 8);
  disk_.takes = false;  // it has failed: what it has is no better than the rest
  EXPECT_EQ(hits(waiting), 8);
  crowd(444);
  crowd(555);
  EXPECT_LT(hits(waiting), 8);
}

TEST_F(PageStoreDiskTest, AFailedWriteIsDoneAgainWhenTheDiskTakesBlocks) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(3 * kPage);
  Publish(cache, text, 2);
  disk_.takes = false;
  while (disk_.writes() > 0) disk_.FinishWrite(/*durable=*/false);
  EXPECT_TRUE(disk_.stored.empty());
  EXPECT_EQ(store().report().Use().unwritten_blocks, 2u);
  EXPECT_EQ(store().Create(cache, Names(cache, text, 2))->match.hit_blocks, 2);
  disk_.takes = true;
  store().long_calls().LookAgain();
  Finish();
  EXPECT_EQ(disk_.stored.size(), 2u);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 0u);
}

TEST_F(PageStoreDiskTest, APurgeLeavesNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 0)), other = test().Open(MakeConfig("fake", 0, "b"));
  const Text text = MakeText(5 * kPage);
  Publish(other, text, 4);
  Finish();
  Publish(cache, text, 4);
  disk_.FinishWrite();  // two are there, two on their way
  disk_.FinishWrite();
  EXPECT_EQ(*store().caches().Purge(cache), 2u + 2u);  // two in memory are pinned until they are written
  Finish();
  EXPECT_EQ(disk_.stored.size(), 4u);  // the other's
  const CacheId again = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(store().caches().Describe(again)->published_blocks, 0u);
  EXPECT_EQ(LoadAndCreate(again, Names(again, text, 4)).match.hit_blocks, 0);
  EXPECT_EQ(store().caches().PurgeAll(), 8u);
  EXPECT_TRUE(disk_.stored.empty());
}

TEST_F(PageStoreDiskTest, APurgeDuringALoadNamesNothing) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  auto load = store().long_calls().BeginLoad(cache, Names(cache, text, 4), 0);
  while (load->DoPiece()) {
  }
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  testing::LoadAll(*load, [this] { Finish(); });
  load = nullptr;
  const CacheId again = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(store().caches().Describe(again)->published_blocks, 0u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

// Blocks that only memory has are written once more when little room is left.
TEST_F(PageStoreDiskTest, WhatTheDiskEvictsIsNotKept) {
  pool_bytes_ = 4 << 20;
  ExpectWrittenAgain(test().Open(MakeConfig("raw", 0)));
}

// Or when room is left in slots of other sizes alone.
TEST_F(PageStoreDiskTest, WhatTheDiskEvictsIsNotKeptWithOtherSlotsFree) {
  pool_bytes_ = 4 << 20;
  const CacheId small = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage, 1);
  const SequenceId sequence = store().Create(small, {})->sequence;
  ASSERT_TRUE(test().AppendAll(small, sequence, text, 0, kPage + 1).ok());
  test().executor.FinishAll();
  ExpectWrittenAgain(test().Open(MakeConfig("raw", 0)));
  EXPECT_LT(test().pool->slot_bytes_used(), pool_bytes_ * 3 / 4);
}

// From the disk to the host, and from there to the GPU.
TEST_F(PageStoreDiskTest, AGpusCacheFindsWhatTheDiskHas) {
  const Text text = MakeText(5 * kPage);
  Publish(test().Open(MakeConfig("fake", 0)), text, 4);
  Restart();
  device_bytes_ = 4 << 20;
  CacheConfig config = MakeConfig("fake", 0);
  config.device = TestDevice::kOrdinal;
  const CacheId cache = test().Open(config);
  const auto names = Names(cache, text, 4);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 4);
  const auto load = Load(cache, names);
  auto lease = store().Fetch(cache, names);
  ASSERT_TRUE(lease.ok());
  Finish();
  const auto created = (*lease)->Commit();
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->match.hit_blocks, 4);
}

TEST_F(PageStoreDiskTest, ALoadTakesWhatThereIsRoomFor) {
  const Text text = MakeText(200 * kPage + 1);
  const int blocks = 200;
  pool_bytes_ = 16 << 20;
  Publish(test().Open(MakeConfig("raw", 0)), text, blocks);
  Restart();
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const SequenceId holder = store().Create(cache, {})->sequence;
  const Text other = MakeText(100 * kPage, 5);
  ASSERT_TRUE(test().AppendAll(cache, holder, other, 0, 100 * kPage).ok());
  const auto created = LoadAndCreate(cache, Names(cache, text, blocks));
  EXPECT_GT(created.match.hit_blocks, 0);
  EXPECT_LT(created.match.hit_blocks, blocks);
  store().report().CheckInvariants();
}

// Texts are published, asked for, evicted by others, purged; writes and reads end when they like; daemons die.
TEST_F(PageStoreDiskTest, RandomOperations) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto upto = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  pool_bytes_ = 2 << 20;
  device_bytes_ = 2 << 20;
  constexpr uint32_t kTexts = 60;
  std::vector<Text> texts;
  for (uint32_t i = 0; i < kTexts; ++i) {
    texts.push_back(MakeText(16, 10 * (i % 5)));  // some begin alike
    for (int token = 16; token < 9 * kPage; ++token) texts.back().Add(1000 * i + static_cast<uint32_t>(token));
  }
  const char* const codecs[] = {"fake", "declining", "sinks", "raw"};
  const auto open = [&](bool device) {
    CacheConfig config = MakeConfig(codecs[upto(4)], 1);
    if (device) config.device = TestDevice::kOrdinal;
    return test().Open(config);
  };
  std::vector<std::unique_ptr<DiskLoad>> loads;
  const auto hits = [&](CacheId cache, const Text& text, int blocks) {
    const auto created = LoadAndCreate(cache, Names(cache, text, static_cast<size_t>(blocks)));
    const int found = created.match.hit_blocks;
    if (found > 0) ExpectStored(cache, text, found);
    store().Drop(created.sequence);
    return found;
  };
  int found = 0, restarts = 0;
  for (int step = 0; step < 3000; ++step) {
    const Text& text = texts[upto(kTexts)];
    const int blocks = 1 + static_cast<int>(upto(8));
    if (upto(2) == 0) store().long_calls().ReleaseSome();
    switch (upto(13)) {
      case 0:
      case 1:
      case 2: {
        const CacheId cache = open(false);
        const auto created = store().Create(cache, {});
        if (!test().AppendAll(cache, created->sequence, text, 0, blocks * kPage).ok()) {
          store().Drop(created->sequence);
          break;
        }
        if (upto(2) == 0) test().executor.FinishAll();
        ASSERT_TRUE(store().Publish(created->sequence, Names(cache, text, static_cast<size_t>(blocks))).ok());
        store().Drop(created->sequence);
        break;
      }
      case 3:
      case 4:
        found += hits(open(false), text, blocks);
        break;
      case 5: {
        const CacheId cache = open(upto(3) == 0);
        auto load = store().long_calls().BeginLoad(cache, Names(cache, text, static_cast<size_t>(blocks)), 0);
        for (uint32_t pieces = upto(4); pieces > 0 && load->DoPiece(); --pieces) {
        }
        loads.push_back(std::move(load));
        if (loads.size() > 4) loads.erase(loads.begin() + upto(4));
        break;
      }
      case 6:
        if (disk_.writes() > 0) disk_.FinishWrite(upto(8) > 0);
        break;
      case 7:
        if (disk_.reads() > 0) disk_.FinishRead(upto(8) > 0 ? absl::OkStatus() : absl::UnavailableError("I/O"));
        break;
      case 8:
        if (!disk_.stored.empty() && disk_.reads() == 0) {
          auto which = disk_.stored.begin();
          std::advance(which, upto(static_cast<uint32_t>(disk_.stored.size())));
          if (upto(2) == 0) {
            disk_.Evict(which->first);
          } else {
            which->second.pages[0][upto(64)] ^= 1;
          }
        }
        break;
      case 9:
        disk_.takes = upto(4) > 0;
        test().executor.FinishAll();
        break;
      case 10:
        if (upto(10) == 0) ASSERT_TRUE(store().caches().Purge(open(false)).ok());
        while (store().long_calls().ReleaseSome()) {
        }
        break;
      case 11:
        if (upto(20) > 0) break;
        loads.clear();
        Finish();
        store().report().CheckInvariants();
        Restart();
        ++restarts;
        break;
      case 12: {
        const CacheId cache = open(upto(3) == 0);
        const auto names = Names(cache, text, static_cast<size_t>(blocks));
        const auto retained = store().caches().Retain(cache, names, 25 * upto(5), upto(2) * upto(50));
        ASSERT_TRUE(retained.ok()) << retained.status();
        ASSERT_LE(retained->blocks, names.size());
        test().clock.AdvanceNs(10000000);
        break;
      }
    }
    if (step % 16 == 0) store().report().CheckInvariants();
  }
  loads.clear();
  EXPECT_GT(found, 0);
  EXPECT_GT(restarts, 0);
}

}  // namespace
}  // namespace kvmanager
