// Hand-offs between caches on GPUs of two stores: the books of both, while a test copies the bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/simulated_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::CopyIn;
using testing::CopyOpenPages;
using testing::ImportTo;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::SimulatedStore;
using testing::TestDevice;
using testing::Text;

using Gpu = SimulatedStore;

absl::StatusOr<SequenceId> HandOver(ExportLease& from, Gpu& to) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<ImportLease> import, ImportTo(to, from.header()));
  CopyOpenPages(from);
  const std::vector<testing::SentPage> pages = testing::TakeAll(from);
  KV_RETURN_IF_ERROR(import->Extend(*from.trailer()));
  // What is read raw comes last here: then it can be shown.
  size_t last = 0;
  const auto of_last = [&](const testing::SentPage& page) {
    return page.bytes.page >= from.header().size() && !import->target(page.bytes.page).empty();
  };
  for (const testing::SentPage& page : pages) last += of_last(page);
  for (const testing::SentPage& page : pages) {
    EXPECT_EQ(import->can_show(), last == 0);
    KV_RETURN_IF_ERROR(CopyIn(*import, page.bytes));
    last -= of_last(page);
  }
  EXPECT_TRUE(import->can_show() && import->complete());
  KV_ASSIGN_OR_RETURN(const SequenceId sequence, import->Show());
  KV_RETURN_IF_ERROR(import->Commit());
  return sequence;
}

TEST(PageStoreDeviceHandOff, ReadsTheSameAtTheOtherEnd) {
  for (const char* codec : {"raw", "fake", "declining", "sinks", "uneven"}) {
    for (int lag = 0; lag < 3; ++lag) {
      for (const int tokens : {1, kPage - 1, kPage, 3 * kPage, 5 * kPage + 7}) {
        SCOPED_TRACE(::testing::Message() << codec << ", lag " << lag << ", " << tokens << " tokens");
        Gpu a, b;
        const CacheConfig config = MakeConfig(codec, lag);
        const CacheId from = a.Open(config);
        const Text text = MakeText(8 * kPage);
        const SequenceId sequence = a.Create(from);
        ASSERT_TRUE(a.Extend(from, sequence, text, 0, tokens).ok());
        auto lease = a.store().exports().Whole(sequence);
        ASSERT_TRUE(lease.ok()) << lease.status();
        // It goes on meanwhile: what is sent stays.
        ASSERT_TRUE(a.Extend(from, sequence, text, tokens, kPage + 3).ok());
        const auto received = HandOver(**lease, b);
        ASSERT_TRUE(received.ok()) << received.status();
        a.store().report().CheckInvariants();
        b.store().report().CheckInvariants();
        lease->reset();
        const CacheId to = b.store().Describe(*received)->cache;
        EXPECT_EQ(b.store().caches().Describe(to)->config.device, TestDevice::kOrdinal);
        ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *received, text, tokens));
        ASSERT_TRUE(b.Extend(to, *received, text, tokens, 2 * kPage).ok());
        ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *received, text, tokens + 2 * kPage));
        ASSERT_NO_FATAL_FAILURE(a.ExpectReads(from, sequence, text, tokens + kPage + 3));
        a.store().Drop(sequence);
        b.store().Drop(*received);
        EXPECT_EQ(a.used_bytes() + b.used_bytes(), 0u);
      }
    }
  }
}

// The sequence may be shown before its first pages are here: who reads part of a sink waits for it, however the pages
// arrive.
TEST(PageStoreDeviceHandOff, AReadOfPartOfASinkWaitsUntilItIsHere) {
  Gpu a, b;
  const CacheConfig config = MakeConfig("sinks", 0);
  const CacheId from = a.Open(config), to = b.Open(config);
  const Text text = MakeText(6 * kPage);
  const SequenceId sequence = a.Create(from);
  ASSERT_TRUE(a.Extend(from, sequence, text, 0, 5 * kPage + 3).ok());
  const auto lease = a.store().exports().Whole(sequence);
  ASSERT_TRUE(lease.ok()) << lease.status();
  const auto import = ImportTo(b, (*lease)->header());
  ASSERT_TRUE(import.ok()) << import.status();
  CopyOpenPages(**lease);
  const std::vector<testing::SentPage> pages = testing::TakeAll(**lease);
  ASSERT_TRUE((*import)->Extend(*(*lease)->trailer()).ok());
  const size_t first_pages = (*lease)->header().size();
  for (const testing::SentPage& page : pages) {
    if (page.bytes.page >= first_pages) {
      ASSERT_TRUE(CopyIn(**import, page.bytes).ok());
    }
  }
  ASSERT_TRUE((*import)->can_show());
  const auto received = (*import)->Show();
  ASSERT_TRUE(received.ok()) << received.status();
  const AttendEntry entry{*received, 3, 1};
  const auto read = b.store().Attend(to, {0, 1}, {&entry, 1});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE((*read)->ready());
  for (const testing::SentPage& page : pages) {
    if (page.bytes.page < first_pages) {
      ASSERT_TRUE(CopyIn(**import, page.bytes).ok());
    }
  }
  EXPECT_TRUE((*read)->ready());
  EXPECT_TRUE((*import)->Commit().ok());
  const auto again = b.store().Attend(to, {0, 1}, {&entry, 1});
  ASSERT_TRUE(again.ok() && (*again)->ready()) << again.status();
  b.store().report().CheckInvariants();
}

TEST(PageStoreDeviceHandOff, WaitsForWhatIsStillEncoded) {
  Gpu a, b;
  const CacheId from = a.Open(MakeConfig("fake", 0));
  const Text text = MakeText(3 * kPage);
  const SequenceId sequence = a.Create(from);
  a.hold_encodes = true;
  ASSERT_TRUE(a.Extend(from, sequence, text, 0, 2 * kPage + 5).ok());
  auto lease = a.store().exports().Whole(sequence);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ((*lease)->trailer(), nullptr);
  EXPECT_TRUE((*lease)->TakeReady().empty());
  EXPECT_EQ((*lease)->open_pages().size(), 2u);
  bool told = false;
  (*lease)->OnReady([&told] { told = true; });
  a.test().device.executor.FinishAll();
  EXPECT_TRUE(told);
  const auto received = HandOver(**lease, b);
  ASSERT_TRUE(received.ok()) << received.status();
}

TEST(PageStoreDeviceHandOff, BlocksThatAreThereAreNotSent) {
  Gpu a, b;
  const CacheConfig config = MakeConfig("fake", 0);
  const CacheId from = a.Open(config), to = b.Open(config);
  const Text text = MakeText(4 * kPage);
  const auto publish = [&](Gpu& gpu, CacheId cache, int blocks) {
    const SequenceId sequence = gpu.Create(cache);
    EXPECT_TRUE(gpu.Extend(cache, sequence, text, 0, blocks * kPage).ok());
    auto names = gpu.test().Names(cache, text);
    names.resize(blocks);
    EXPECT_EQ(gpu.store().Publish(sequence, names)->published, blocks);
    return sequence;
  };
  const SequenceId sequence = publish(a, from, 4);
  b.store().Drop(publish(b, to, 3));
  EXPECT_EQ(b.store().caches().FindOpen(b.store().caches().Describe(to)->digest, TestDevice::kOrdinal), to);
  EXPECT_EQ(b.store().caches().FindOpen(b.store().caches().Describe(to)->digest, CacheConfig::kHost), std::nullopt);
  const auto lease = a.store().exports().Whole(sequence);
  const auto import = ImportTo(b, (*lease)->header());
  ASSERT_TRUE(import.ok()) << import.status();
  ASSERT_TRUE((*import)->Extend(*(*lease)->trailer()).ok());
  int wanted = 0;
  for (const testing::SentPage& page : testing::TakeAll(**lease)) {
    wanted += !(*import)->target(page.bytes.page).empty();
    ASSERT_TRUE(CopyIn(**import, page.bytes).ok());
  }
  // The last block: in page_store.h's sense its pages are the newest, so one form each.
  EXPECT_EQ(wanted, 2);
  const auto received = (*import)->Show();
  ASSERT_TRUE(received.ok() && (*import)->Commit().ok());
  EXPECT_EQ(b.store().caches().Match(to, b.test().Names(to, text))->hit_blocks, 4);
  ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *received, text, 4 * kPage));
}

TEST(PageStoreDeviceHandOff, WhatEndsEarlyLeavesNothing) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    Gpu a, b;
    const CacheConfig config = MakeConfig(round % 2 == 0 ? "declining" : "raw", round % 3);
    const CacheId from = a.Open(config);
    const Text text = MakeText(8 * kPage);
    const SequenceId sequence = a.Create(from);
    ASSERT_TRUE(a.Extend(from, sequence, text, 0, 5 * kPage + 3).ok());
    auto lease = *a.store().exports().Whole(sequence);
    auto import = *ImportTo(b, lease->header());
    CopyOpenPages(*lease);
    std::vector<testing::SentPage> pages = testing::TakeAll(*lease);
    const bool extended = random() % 4 != 0;
    if (extended) {
      ASSERT_TRUE(import->Extend(*lease->trailer()).ok());
    }
    const size_t first_pages = lease->header().pages.size();
    std::erase_if(pages, [&](const auto& page) { return !extended && page.bytes.page >= first_pages; });
    std::shuffle(pages.begin(), pages.end(), random);
    pages.resize(random() % (pages.size() + 1) * 9 / 10);
    for (const testing::SentPage& page : pages) {
      ASSERT_TRUE(CopyIn(*import, page.bytes).ok());
    }
    if (random() % 2 == 0) import->Break(absl::UnavailableError("the sender is gone"));
    if (random() % 2 == 0) lease.reset();
    a.store().Drop(sequence);
    a.store().report().CheckInvariants();
    b.store().report().CheckInvariants();
    import.reset();
    lease.reset();
    b.test().device.executor.FinishAll();
    EXPECT_EQ(a.used_bytes() + b.used_bytes(), 0u);
  }
}

TEST(PageStoreDeviceHandOff, AFullPoolRefusesAndKeepsNothing) {
  Gpu a, b(2 << 20);
  const CacheId from = a.Open(MakeConfig("raw", 0));
  const Text text = MakeText(200 * kPage);
  const SequenceId sequence = a.Create(from);
  ASSERT_TRUE(a.Extend(from, sequence, text, 0, 200 * kPage).ok());
  const auto lease = a.store().exports().Whole(sequence);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(ImportTo(b, (*lease)->header()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(b.store().caches().List().empty());
  EXPECT_EQ(b.used_bytes(), 0u);
}

// Sequences of two stores that grow, are handed to and fro, forked from one another by hand-offs, and dropped; some
// hand-offs end early. What is read is right at every step.
TEST(PageStoreDeviceHandOff, RandomOperations) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Gpu gpus[2];
    const char* const codecs[] = {"raw", "fake", "declining", "sinks"};
    const CacheConfig config = MakeConfig(codecs[seed % 4], static_cast<int>(seed % 3));
    const CacheId caches[2] = {gpus[0].Open(config), gpus[1].Open(config)};
    struct Live {
      int gpu;
      SequenceId id;
      uint32_t salt;
      int tokens;
    };
    std::vector<Live> live;
    for (int i = 0; i < 120; ++i) {
      const int what = static_cast<int>(random() % 10);
      if (live.empty() || (what == 0 && live.size() < 6)) {
        const int gpu = static_cast<int>(random() % 2);
        live.push_back({gpu, gpus[gpu].Create(caches[gpu]), static_cast<uint32_t>(random() % 1000), 0});
        continue;
      }
      Live& one = live[random() % live.size()];
      const Text text = MakeText(600, one.salt);
      Gpu& gpu = gpus[one.gpu];
      if (what < 4 || one.tokens == 0) {
        const int more = 1 + static_cast<int>(random() % (2 * kPage));
        if (one.tokens + more > 600) continue;
        ASSERT_TRUE(gpu.Extend(caches[one.gpu], one.id, text, one.tokens, more).ok());
        one.tokens += more;
      } else if (what < 6) {
        ASSERT_NO_FATAL_FAILURE(gpu.ExpectReads(caches[one.gpu], one.id, text, one.tokens));
      } else if (what < 9) {
        const int other = 1 - one.gpu;
        const auto lease = gpu.store().exports().Whole(one.id);
        ASSERT_TRUE(lease.ok()) << lease.status();
        gpu.test().device.executor.FinishAll();  // what it received raw
        if (random() % 4 == 0) {
          ASSERT_TRUE(ImportTo(gpus[other], (*lease)->header()).ok());  // and given up
          continue;
        }
        const auto received = HandOver(**lease, gpus[other]);
        ASSERT_TRUE(received.ok()) << received.status();
        live.push_back({other, *received, one.salt, one.tokens});
      } else if (live.size() > 2) {
        gpu.store().Drop(one.id);
        live.erase(live.begin() + (&one - live.data()));
      }
      gpus[0].store().report().CheckInvariants();
      gpus[1].store().report().CheckInvariants();
    }
    for (const Live& one : live) {
      if (one.tokens > 0) {
        ASSERT_NO_FATAL_FAILURE(
            gpus[one.gpu].ExpectReads(caches[one.gpu], one.id, MakeText(600, one.salt), one.tokens));
      }
      gpus[one.gpu].store().Drop(one.id);
    }
    for (Gpu& gpu : gpus) {
      gpu.test().device.executor.FinishAll();
      EXPECT_EQ(gpu.used_bytes(), 0u);
    }
  }
}

}  // namespace
}  // namespace kvmanager
