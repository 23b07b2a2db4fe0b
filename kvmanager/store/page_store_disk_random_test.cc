// Blocks go to a disk and come back at random, with restarts.
#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kvmanager/store/disk_fixture.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::TestDevice;
using testing::Text;

class PageStoreDiskRandomTest : public testing::PageStoreOnDiskTest {};

TEST_F(PageStoreDiskRandomTest, RandomOperations) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto upto = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  pool_bytes_ = 2 << 20;
  device_bytes_ = 2 << 20;
  moves_ = true;
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
        std::vector<BlockName> names = Names(cache, text, static_cast<size_t>(blocks));
        auto load = store().long_calls().BeginLoad(cache, &names, 0);
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
        if (upto(10) == 0) {
          ASSERT_TRUE(store().caches().Purge(open(false)).ok());
        }
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
