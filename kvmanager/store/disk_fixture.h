// The fixture of the tests of what outlives a store: a disk, which is what the test says, and host memory that is kept.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/store/fake_disk.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager::testing {

class PageStoreOnDiskTest : public PageStoreTest {
 protected:
  void TearDown() override {
    if (test_ != nullptr && test_->store != nullptr) Finish();
    PageStoreTest::TearDown();
    test_ = nullptr;  // else the disk would be gone before it: the base has it
  }
  std::unique_ptr<TestStore> MakeStore() override {
    auto made = std::make_unique<TestStore>(pool_bytes_, device_bytes_, moves_, EvictionKind::kLru,
                                            has_disk_ ? &disk_ : nullptr, is_kept_ ? &keeper_ : nullptr);
    made->store->long_calls().OnLeftovers([this] { left_ = true; });
    return made;
  }
  // What the daemon does in turns of its loop, until nothing is left. As there, what asks for a turn during one is not
  // heard: that one has to say that it goes on.
  void Turns() {
    if (!left_) return;
    while (store().long_calls().ReleaseSome()) {
    }
    left_ = false;
  }
  void FinishEncodes() {
    test().executor.FinishAll();
    test().device.executor.FinishAll();
  }
  void Finish() {
    do {
      Turns();
      FinishEncodes();
      test().device.mover.FinishAll();
      disk_.FinishAll();
    } while (left_ || test().executor.jobs() + test().device.executor.jobs() + test().device.mover.moves() +
                              disk_.writes() + disk_.reads() >
                          0);
  }
  // The daemon has died; the disk has what was written.
  void Restart() {
    Finish();
    Kill();
  }
  void Kill() {
    disk_.LoseAll();
    test_ = nullptr;
  }
  // Blocks that nobody uses, encoded; their writes have begun. A GPU's kernels are taken to have written its pages.
  std::vector<BlockName> Publish(CacheId cache, const Text& text, int blocks) {
    const SequenceId sequence = Create(cache);
    const CacheConfig config = store().caches().Describe(cache)->config;
    absl::Status status;
    if (config.device == CacheConfig::kHost) {
      status = test().AppendAll(cache, sequence, text, 0, blocks * kPage);
    } else {
      AppendEntry entry;
      entry.sequence = sequence;
      entry.tokens = blocks * kPage;
      status = store().Append(cache, {0, config.layers}, {&entry, 1});
    }
    EXPECT_TRUE(status.ok()) << status;
    FinishEncodes();
    auto names = Names(cache, text, blocks);
    EXPECT_TRUE(store().Publish(sequence, names).ok());
    store().Drop(sequence);
    Turns();
    return names;
  }
  // Up to where it waits for the disk.
  std::unique_ptr<DiskLoad> BeginLoad(CacheId cache, std::vector<BlockName> names) {
    auto load = store().long_calls().BeginLoad(cache, &names, 0);
    EXPECT_NE(load, nullptr);
    while (load->DoPiece()) {
    }
    return load;
  }
  std::unique_ptr<DiskLoad> Load(CacheId cache, std::vector<BlockName> names) {
    auto load = BeginLoad(cache, std::move(names));
    LoadAll(*load, [this] { Finish(); });
    return load;
  }
  // What a client's call does.
  CreateResult LoadAndCreate(CacheId cache, std::vector<BlockName> names) {
    const auto load = Load(cache, names);
    return *store().Create(cache, names);
  }
  // Every page of the text's first blocks, as it is stored.
  void ExpectStored(CacheId cache, const Text& text, int blocks) {
    const auto codec = store().caches().codec(cache);
    const auto reads = store().caches().ReadBlocks(cache, 0, Names(cache, text, blocks), {UINT64_MAX, 64});
    ASSERT_TRUE(reads.ok() && (*reads)->blocks() == static_cast<size_t>(blocks)) << (*reads)->blocks();
    const size_t layers = (*reads)->pages().size() / blocks;
    for (size_t i = 0; i < (*reads)->pages().size(); ++i) {
      const StoredPage& page = (*reads)->pages()[i];
      const uint32_t block = static_cast<uint32_t>(i / layers);
      const int layer = static_cast<int>(page.layer);
      auto expected = MakeRawPage(codec->layout(), text, block, kPage, layer);
      if (!page.raw) expected = MakeEncodedPage(*codec, expected, block, layer);
      ASSERT_EQ(page.bytes, expected.size());
      EXPECT_EQ(std::memcmp(page.data, expected.data(), expected.size()), 0) << "page " << i;
    }
  }

  FakeDisk disk_;
  TestKeeper keeper_;
  bool has_disk_ = true;
  bool is_kept_ = false;
  bool left_ = false;  // something for ReleaseSome
};

}  // namespace kvmanager::testing
