// Hand-offs of sequences that grow on a GPU: what is offered has been written, or copied to the host; what arrives on a
// GPU is read layer by layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>

#include "kvmanager/base/status.h"
#include "kvmanager/store/simulated_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::CopyIn;
using testing::CopyOpenPages;
using testing::ImportTo;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::SimulatedStore;
using testing::Text;

constexpr uint64_t kGpuBytes = 16 << 20;

// What a lease offers, which must be what the text says at once.
class Collector {
 public:
  Collector(ExportLease* lease, std::shared_ptr<const Codec> codec, Text text)
      : lease_(*lease), codec_(std::move(codec)), text_(std::move(text)) {}
  std::vector<ExportedPage> Take() {
    std::vector<ExportedPage> pages = lease_.TakeReady();
    for (const ExportedPage& page : pages) {
      const HandOffPage& of = lease_.header().pages[page.page];
      Expect(of, !codec_->info().keeps_raw(static_cast<int>(of.layer), uint64_t{of.block} * kPage), page);
    }
    taken_ += pages.size();
    return pages;
  }
  // The trailer, which is there; the first was taken.
  std::vector<ExportedPage> TakeLast() {
    const HandOffTrailer& last = *lease_.trailer();
    EXPECT_EQ(taken_ + last.withdrawn.size(), lease_.header().pages.size());
    CopyOpenPages(lease_);
    for (size_t i = 0; i < last.pages.size(); ++i) Expect(last.pages[i], false, lease_.trailer_pages()[i]);
    return {lease_.trailer_pages().begin(), lease_.trailer_pages().end()};
  }
  size_t taken() const { return taken_; }

 private:
  void Expect(const HandOffPage& page, bool encoded, const ExportedPage& sent) const {
    const CacheConfig& config = lease_.header().config;
    const uint64_t left = lease_.header().tokens - uint64_t{page.block} * kPage;
    const int tokens = static_cast<int>(std::min<uint64_t>(kPage, left)), layer = static_cast<int>(page.layer);
    std::vector<uint8_t> bytes = MakeRawPage(config.layout, text_, page.block, tokens, layer);
    if (encoded) bytes = MakeEncodedPage(*codec_, bytes, page.block, layer);
    ASSERT_EQ(sent.bytes.size(), bytes.size());
    EXPECT_EQ(std::memcmp(sent.bytes.data(), bytes.data(), bytes.size()), 0)
        << "page " << page.block << " of layer " << layer;
    if (config.device == CacheConfig::kHost) {
      EXPECT_EQ(sent.checksum, testing::Checksum(bytes));
    }
  }

  ExportLease& lease_;
  const std::shared_ptr<const Codec> codec_;
  const Text text_;
  size_t taken_ = 0;
};

TEST(PageStoreDeviceStream, OffersAPageThatTravelsRawOnceItIsWritten) {
  SimulatedStore a(kGpuBytes);
  const CacheId cache = a.Open(MakeConfig("raw", 0));
  const Text text = MakeText(5 * kPage);
  const SequenceId sequence = a.Create(cache);
  a.hold_writes = true;
  ASSERT_TRUE(a.Extend(cache, sequence, text, 0, kPage).ok());  // before it begins
  auto lease = *a.ExportGrowing(sequence, 3 * kPage + 5);
  Collector offered(lease.get(), a.store().caches().codec(cache), text);
  int told = 0;
  lease->OnReady([&told] { ++told; });
  EXPECT_TRUE(offered.Take().empty());
  a.RunWrites(1);
  EXPECT_EQ(told, 1);
  EXPECT_EQ(offered.Take().size(), 2u);
  // In parts, of which the last fills it; the layers apart.
  ASSERT_TRUE(a.Extend(cache, sequence, text, kPage, 9).ok());
  ASSERT_TRUE(a.Extend(cache, sequence, text, kPage + 9, kPage - 9, 0, 1).ok());
  ASSERT_TRUE(a.Extend(cache, sequence, text, kPage + 9, kPage - 9, 1, 1).ok());
  a.RunWrites(1);
  EXPECT_TRUE(offered.Take().empty());
  a.RunWrites(1);
  EXPECT_EQ(offered.Take().size(), 1u);
  a.RunWrites(1);
  EXPECT_EQ(offered.Take().size(), 1u);
  // Complete, and not written: the trailer waits.
  ASSERT_TRUE(a.Extend(cache, sequence, text, 2 * kPage, kPage + 5).ok());
  ASSERT_TRUE(lease->Finish().ok());
  EXPECT_TRUE(offered.Take().empty());
  EXPECT_EQ(lease->trailer(), nullptr);
  EXPECT_TRUE(a.store().exports().AwaitsWrites(sequence));
  a.RunWrites();
  EXPECT_FALSE(a.store().exports().AwaitsWrites(sequence));
  EXPECT_EQ(offered.Take().size(), 2u);
  ASSERT_NE(lease->trailer(), nullptr);
  EXPECT_EQ(offered.TakeLast().size(), 2u);
}

TEST(PageStoreDeviceStream, WhatIsDroppedAfterItIsCompleteIsSentAllTheSame) {
  for (const char* codec : {"raw", "fake"}) {
    SimulatedStore a(kGpuBytes);
    const CacheId cache = a.Open(MakeConfig(codec, 0));
    const Text text = MakeText(3 * kPage);
    const SequenceId sequence = a.Create(cache);
    a.hold_writes = true;
    auto lease = *a.ExportGrowing(sequence, 2 * kPage + 3);
    Collector offered(lease.get(), a.store().caches().codec(cache), text);
    ASSERT_TRUE(a.Extend(cache, sequence, text, 0, 2 * kPage + 3).ok());
    ASSERT_TRUE(lease->Finish().ok());
    a.store().Drop(sequence);
    a.store().report().CheckInvariants();
    EXPECT_EQ(lease->trailer(), nullptr);
    a.RunWrites();
    EXPECT_FALSE(offered.Take().empty());
    ASSERT_NE(lease->trailer(), nullptr);
    EXPECT_FALSE(offered.TakeLast().empty());
    lease = nullptr;
    EXPECT_EQ(a.used_bytes(), 0u);
  }
}

TEST(PageStoreDeviceStream, RefusesWhatItCannotSend) {
  SimulatedStore a(kGpuBytes), moving(kGpuBytes, /*moves=*/true);
  const CacheId cache = a.Open(MakeConfig("fake", 0)), other = moving.Open(MakeConfig("fake", 0));
  const SequenceId sequence = a.Create(cache), there = moving.Create(other);
  ASSERT_TRUE(a.Extend(cache, sequence, MakeText(kPage), 0, 5).ok());
  EXPECT_EQ(a.store().exports().Growing(sequence, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a.store().exports().Growing(sequence, 40, {.way = ExportWay::kByHost}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  moving.test().device.mover.is_ready = false;
  EXPECT_EQ(moving.store().exports().Growing(there, 40, {.way = ExportWay::kByHost}).status().code(),
            absl::StatusCode::kUnavailable);
  moving.test().device.mover.is_ready = true;
  EXPECT_EQ(moving.store().exports().Growing(there, 100000, {.way = ExportWay::kByHost}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(moving.store().caches().List().size(), 1u);  // none on the host
}

TEST(PageStoreDeviceStream, ByTheHostPagesGoAsTheyAreCopied) {
  SimulatedStore a(kGpuBytes, /*moves=*/true);
  const CacheId cache = a.Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId sequence = a.Create(cache);
  auto lease = *a.ExportGrowing(sequence, 4 * kPage + 5, ExportWay::kByHost);
  EXPECT_EQ(lease->header().config.device, CacheConfig::kHost);
  Collector offered(lease.get(), a.store().caches().codec(cache), text);
  int told = 0;
  lease->OnReady([&told] { ++told; });
  ASSERT_TRUE(a.Extend(cache, sequence, text, 0, 3 * kPage).ok());
  auto& mover = a.test().device.mover;
  auto& workers = a.test().executor;
  EXPECT_EQ(mover.moves(), 1u);
  EXPECT_TRUE(offered.Take().empty());
  mover.FinishAll();
  EXPECT_EQ(told, 0);  // workers look at it first
  workers.FinishAll();
  EXPECT_EQ(told, 1);
  EXPECT_EQ(offered.Take().size(), 6u);
  ASSERT_TRUE(a.Extend(cache, sequence, text, 3 * kPage, kPage + 5).ok());
  ASSERT_TRUE(lease->Finish().ok());
  // It goes on, beyond the open page.
  ASSERT_TRUE(a.Extend(cache, sequence, text, 4 * kPage + 5, kPage).ok());
  EXPECT_EQ(lease->trailer(), nullptr);
  while (mover.moves() > 0) {
    mover.FinishOne();
    workers.FinishAll();
    a.store().report().CheckInvariants();
  }
  ASSERT_NE(lease->trailer(), nullptr);
  offered.Take();
  EXPECT_EQ(offered.TakeLast().size(), 4u);
  lease = nullptr;
  a.store().report().CheckInvariants();
  EXPECT_EQ(a.test().pool->used_bytes(), 0u);
}

TEST(PageStoreDeviceStream, ByTheHostWhatIsNoPageIsNotSent) {
  for (const bool moved : {true, false}) {
    SimulatedStore a(kGpuBytes, /*moves=*/true);
    const CacheId cache = a.Open(MakeConfig("raw", 0));
    const Text text = MakeText(2 * kPage);
    const SequenceId sequence = a.Create(cache);
    auto lease = *a.ExportGrowing(sequence, 2 * kPage, ExportWay::kByHost);
    int told = 0;
    lease->OnReady([&told] { ++told; });
    ASSERT_TRUE(a.Extend(cache, sequence, text, 0, kPage).ok());
    std::vector<PagePlace> places;
    ASSERT_TRUE(a.store().tables().TakeChanges(sequence, 0, &places, TableKeeper::kProcess).ok());
    std::memset(a.test().device.pool->Data(places[0].raw), 0xff, 16);  // NaN: engines write there
    a.test().device.mover.FinishOne(moved);
    a.test().executor.FinishAll();
    EXPECT_EQ(told, 1);
    EXPECT_EQ(lease->status().code(), moved ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable);
    EXPECT_TRUE(lease->TakeReady().empty());
    ASSERT_TRUE(a.Extend(cache, sequence, text, kPage, kPage).ok());
    ASSERT_TRUE(lease->Finish().ok());
    EXPECT_EQ(lease->trailer(), nullptr);
    lease = nullptr;
    a.store().report().CheckInvariants();
    EXPECT_EQ(a.test().pool->used_bytes(), 0u);
  }
}

TEST(PageStoreDeviceStream, ByTheHostWhatIsGivenUpWhilePagesMoveStaysUntilTheyHave) {
  SimulatedStore a(kGpuBytes, /*moves=*/true);
  const CacheId cache = a.Open(MakeConfig("fake", 0));
  const SequenceId sequence = a.Create(cache);
  auto lease = *a.ExportGrowing(sequence, 5 * kPage, ExportWay::kByHost);
  ASSERT_TRUE(a.Extend(cache, sequence, MakeText(3 * kPage), 0, 3 * kPage).ok());
  ASSERT_EQ(a.test().device.mover.moves(), 1u);
  lease = nullptr;
  a.store().Drop(sequence);
  a.store().report().CheckInvariants();
  EXPECT_GT(a.test().pool->used_bytes(), 0u);
  EXPECT_GT(a.used_bytes(), 0u);
  a.test().device.mover.FinishAll();
  a.store().report().CheckInvariants();
  EXPECT_EQ(a.test().pool->used_bytes(), 0u);
  EXPECT_EQ(a.used_bytes(), 0u);
}

TEST(PageStoreDeviceStream, ALayerIsReadWhileTheNextArrives) {
  for (const char* codec : {"fake", "raw"}) {
    SCOPED_TRACE(codec);
    SimulatedStore a(kGpuBytes), b(kGpuBytes);
    const CacheId from = a.Open(MakeConfig(codec, 0)), to = b.Open(MakeConfig(codec, 0));
    const Text text = MakeText(6 * kPage);
    const int tokens = 4 * kPage + 3;
    const SequenceId sequence = a.Create(from);
    ASSERT_TRUE(a.Extend(from, sequence, text, 0, tokens).ok());
    const auto lease = *a.ExportGrowing(sequence, tokens);
    Collector offered(lease.get(), a.store().caches().codec(from), text);
    auto import = *ImportTo(b, lease->header());
    ASSERT_TRUE(lease->Finish().ok());
    std::vector<ExportedPage> pages = offered.Take();
    ASSERT_TRUE(import->Extend(*lease->trailer()).ok());
    for (const ExportedPage& page : offered.TakeLast()) ASSERT_TRUE(CopyIn(*import, page).ok());
    ASSERT_TRUE(import->can_show());
    const SequenceId there = *import->Show();
    b.store().report().CheckInvariants();
    const auto layer_of = [&](const ExportedPage& page) { return lease->header().pages[page.page].layer; };
    for (const ExportedPage& page : pages) {
      if (layer_of(page) == 0) {
        ASSERT_TRUE(CopyIn(*import, page).ok());
      }
    }
    // The first layer is here; all of them, as an engine in its own process asks, are not; nor is the second.
    ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, there, text, tokens, 0, 1));
    const AttendEntry newest{there, static_cast<uint64_t>(tokens) - 1, 1};
    auto all = *b.store().Attend(to, {0, 2}, {&newest, 1});
    auto second = *b.store().Attend(to, {1, 1}, {&newest, 1});
    EXPECT_FALSE(all->ready() || second->ready());
    bool told = false;
    second->OnReady([&told] { told = true; });
    // What is needed is waited for alone, and it goes on meanwhile.
    const AttendEntry early{there, kPage - 1, 1};
    EXPECT_FALSE((*b.store().Attend(to, {1, 1}, {&early, 1}))->ready());
    const auto page0 = std::find_if(pages.begin(), pages.end(), [&](const ExportedPage& page) {
      return layer_of(page) == 1 && lease->header().pages[page.page].block == 0;
    });
    ASSERT_TRUE(CopyIn(*import, *page0).ok());
    pages.erase(page0);
    EXPECT_TRUE((*b.store().Attend(to, {1, 1}, {&early, 1}))->ready());
    ASSERT_TRUE(b.Extend(to, there, text, tokens, kPage).ok());
    ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, there, text, tokens + kPage, 0, 1));
    EXPECT_FALSE(told);
    for (const ExportedPage& page : pages) {
      if (layer_of(page) == 1) {
        ASSERT_TRUE(CopyIn(*import, page).ok());
      }
    }
    EXPECT_TRUE(told && all->ready());
    EXPECT_TRUE(import->complete() && import->Commit().ok());
    ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, there, text, tokens + kPage));
  }
}

TEST(PageStoreDeviceStream, WhoWaitsForASequenceThatBreaksIsTold) {
  SimulatedStore a(kGpuBytes), b(kGpuBytes);
  const CacheId from = a.Open(MakeConfig("raw", 0)), to = b.Open(MakeConfig("raw", 0));
  const Text text = MakeText(3 * kPage);
  const SequenceId sequence = a.Create(from);
  ASSERT_TRUE(a.Extend(from, sequence, text, 0, 2 * kPage + 1).ok());
  const auto lease = *a.store().exports().Whole(sequence);
  Collector offered(lease.get(), a.store().caches().codec(from), text);
  auto import = *ImportTo(b, lease->header());
  offered.Take();
  ASSERT_TRUE(import->Extend(*lease->trailer()).ok());
  for (const ExportedPage& page : offered.TakeLast()) ASSERT_TRUE(CopyIn(*import, page).ok());
  const SequenceId there = *import->Show();
  const AttendEntry newest{there, 2 * kPage, 1};
  auto read = *b.store().Attend(to, {0, 2}, {&newest, 1});
  bool told = false;
  read->OnReady([&told] { told = true; });
  EXPECT_FALSE(told);
  import->Break(absl::UnavailableError("its sender died"));
  EXPECT_TRUE(told);
  EXPECT_EQ(b.store().Attend(to, {0, 2}, {&newest, 1}).status().code(), absl::StatusCode::kUnavailable);
  read = nullptr;
  import = nullptr;
  b.store().report().CheckInvariants();
  b.store().Drop(there);
  b.store().report().CheckInvariants();
  EXPECT_EQ(b.used_bytes(), 0u);
}

// One random hand-off: layers grow in any order and chunks, writes, encodes and copies end late, pages arrive in any
// order, the receiver reads and goes on meanwhile, and either end may give up.
class RandomHandOff {
 public:
  explicit RandomHandOff(uint32_t seed) : random_(seed), by_host_(seed % 2 == 0) {}
  struct Counts {
    int committed = 0, broken = 0, early = 0, withdrawn = 0, waited = 0, ready = 0;
  };
  void Run(Counts* counts);

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }

  std::mt19937_64 random_;
  const bool by_host_;
};

void RandomHandOff::Run(Counts* counts) {
  SimulatedStore a(kGpuBytes, by_host_), b(kGpuBytes);
  const char* const codecs[] = {"raw", "fake", "declining", "uneven", "sinks"};
  const int layers = 1 + static_cast<int>(Below(3));
  const CacheConfig config = MakeConfig(codecs[Below(5)], static_cast<int>(Below(3)), "a", layers);
  const CacheId from = a.Open(config), to = b.Open(config);
  const uint64_t tokens = 1 + Below(7 * kPage);
  const Text text = MakeText(9 * kPage, static_cast<uint32_t>(Below(1000)));
  const SequenceId sequence = a.Create(from);
  std::vector<uint64_t> has(layers, 0);
  const auto append = [&](uint64_t chunk) {
    const int layer = static_cast<int>(Below(layers));
    const int n = static_cast<int>(std::min(chunk, tokens - has[layer]));
    if (n == 0) return;
    ASSERT_TRUE(a.Extend(from, sequence, text, has[layer], n, layer, 1).ok());
    has[layer] += n;
  };
  a.hold_writes = a.hold_encodes = true;
  for (uint64_t n = Below(3 * layers); n > 0; --n) append(1 + Below(60));
  std::unique_ptr<ExportLease> out =
      *a.ExportGrowing(sequence, tokens, by_host_ ? ExportWay::kByHost : ExportWay::kDirect);
  Collector offered(out.get(), a.store().caches().codec(from), text);
  std::unique_ptr<ImportLease> in = *ImportTo(b, out->header());
  std::vector<ExportedPage> in_flight;
  std::optional<SequenceId> there;
  uint64_t there_tokens = tokens;
  struct Waiting {
    std::unique_ptr<AttendLease> lease;
    int layer;
  };
  std::vector<Waiting> waiting;
  bool finished = false, extended = false;
  const uint64_t gives_up_at = Below(3) == 0 ? Below(150) : UINT64_MAX;
  for (uint64_t step = 0; !in->complete() && step != gives_up_at; ++step) {
    switch (Below(9)) {
      case 0:
      case 1:
        ASSERT_NO_FATAL_FAILURE(append(Below(3) == 0 ? 1 + Below(40) : tokens));
        break;
      case 2:
        a.RunWrites(1 + Below(3));
        break;
      case 3:  // jobs run behind the writes
        if (a.queued() == 0 && a.test().device.executor.jobs() > 0) {
          a.test().device.executor.FinishOne(Below(a.test().device.executor.jobs()));
        }
        break;
      case 4:
        if (a.test().device.mover.moves() > 0) a.test().device.mover.FinishOne();
        if (a.test().executor.jobs() > 0) a.test().executor.FinishOne(Below(a.test().executor.jobs()));
        break;
      case 5: {
        const bool whole = *std::min_element(has.begin(), has.end()) == tokens;
        if (!finished && (whole || Below(4) == 0)) {
          ASSERT_EQ(out->Finish().ok(), whole);
          finished = whole;
        }
        break;
      }
      case 6:
        if (in_flight.empty()) break;
        std::swap(in_flight[Below(in_flight.size())], in_flight.back());
        ASSERT_TRUE(CopyIn(*in, in_flight.back()).ok());
        in_flight.pop_back();
        break;
      case 7:
        for (const ExportedPage& page : offered.Take()) {
          counts->early += !finished;
          in_flight.push_back(page);
        }
        if (out->trailer() != nullptr && !extended) {
          ASSERT_TRUE(in->Extend(*out->trailer()).ok());
          extended = true;
          counts->withdrawn += static_cast<int>(out->trailer()->withdrawn.size());
          for (const ExportedPage& page : offered.TakeLast()) in_flight.push_back(page);
        }
        break;
      case 8:
        if (!there.has_value() && in->can_show()) {
          there = *in->Show();
        } else if (there.has_value()) {
          if (Below(4) == 0 && there_tokens < 8 * kPage) {
            ASSERT_TRUE(b.Extend(to, *there, text, there_tokens, 1).ok());
            ++there_tokens;
          }
          b.test().device.executor.FinishAll();
          const int layer = static_cast<int>(Below(layers));
          const AttendEntry newest{*there, there_tokens - 1, 1};
          auto lease = *b.store().Attend(to, {layer, 1}, {&newest, 1});
          if (lease->ready()) {
            ++counts->ready;
            ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *there, text, there_tokens, layer, 1));
          } else if (waiting.size() < 4) {
            ++counts->waited;
            waiting.push_back({std::move(lease), layer});
          }
        }
        break;
    }
    ASSERT_TRUE(out->status().ok());
    for (size_t i = 0; i < waiting.size();) {
      if (!waiting[i].lease->ready()) {
        ++i;
        continue;
      }
      const int layer = waiting[i].layer;
      waiting.erase(waiting.begin() + i);
      b.test().device.executor.FinishAll();
      ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *there, text, there_tokens, layer, 1));
    }
    a.store().report().CheckInvariants();
    b.store().report().CheckInvariants();
  }
  if (in->complete()) {
    ++counts->committed;
    if (!there.has_value()) there = *in->Show();
    ASSERT_TRUE(in->Commit().ok());
    ASSERT_NO_FATAL_FAILURE(b.ExpectReads(to, *there, text, there_tokens));
  } else {
    ++counts->broken;
    if (Below(2)) in->Break(absl::CancelledError("a test"));
  }
  if (Below(2)) {
    in = nullptr;
    out = nullptr;
  } else {
    out = nullptr;
    in = nullptr;
  }
  a.store().report().CheckInvariants();
  b.store().report().CheckInvariants();
  for (const Waiting& read : waiting) ASSERT_TRUE(read.lease->ready());
  waiting.clear();
  if (there.has_value()) b.store().Drop(*there);
  a.store().Drop(sequence);
  a.RunWrites();
  a.test().device.executor.FinishAll();
  a.test().device.mover.FinishAll();
  a.test().executor.FinishAll();
  b.test().device.executor.FinishAll();
  a.store().report().CheckInvariants();
  ASSERT_EQ(a.used_bytes() + b.used_bytes() + a.test().pool->used_bytes(), 0u);
}

TEST(PageStoreDeviceStream, RandomHandOffs) {
#ifdef KVMANAGER_SANITIZED
  constexpr uint32_t kHandOffs = 60;
#else
  constexpr uint32_t kHandOffs = 600;
#endif
  RandomHandOff::Counts counts;
  for (uint32_t seed = 0; seed < kHandOffs; ++seed) {
    SCOPED_TRACE(seed);
    ASSERT_NO_FATAL_FAILURE(RandomHandOff(seed).Run(&counts));
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("%d committed, %d broken, %d pages early, %d withdrawn, %d reads waited, %d did not\n", counts.committed,
              counts.broken, counts.early, counts.withdrawn, counts.waited, counts.ready);
  // The walks went where they should.
  EXPECT_GT(counts.committed, 0);
  EXPECT_GT(counts.broken, 0);
  EXPECT_GT(counts.early, 0);
  EXPECT_GT(counts.withdrawn, 0);
  EXPECT_GT(counts.waited, 0);
  EXPECT_GT(counts.ready, 0);
}

}  // namespace
}  // namespace kvmanager
