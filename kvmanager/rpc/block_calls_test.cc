// Calls that read and write whole blocks: what arenas hold, what is refused, and what a call holds until when.
#include "kvmanager/rpc/block_calls.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "kvmanager/base/checksum.h"
#include "kvmanager/rpc/calls_testing.h"
#include "kvmanager/rpc/limits.h"

namespace kvmanager {
namespace {

using testing::DetailOfReply;
using testing::kPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::Text;

using ReadCall = testing::TestCall<api::Cache::ReadBlocksResults>;
using WriteCall = testing::TestCall<api::Cache::WriteBlocksResults>;
using Bytes = std::vector<uint8_t>;
using Change = std::function<void(api::BlocksRequest::Builder)>;

class BlockCallsTest : public testing::CallsTest {
 public:
  BlockCallsTest() {
    server_->on_read_blocks = [this](ReadBlocksContext& context) { return calls_.Read(session_, *bound_, context); };
    server_->on_bind_slabs = [this](auto& context) { return calls_.BindSlabs(session_, *bound_, context); };
    server_->on_map_slab = [this](auto& context) { return calls_.MapSlab(session_, *bound_, context); };
    server_->on_write_blocks = [this](WriteBlocksContext& context) { return calls_.Write(session_, *bound_, context); };
  }
  ~BlockCallsTest() noexcept override {}

 protected:
  void Open() {
    OpenCache("raw", 0, nullptr);
    block_bytes_ = config_.layout.raw_bytes() * config_.layers;
    arena_ = AddArena(kBlocks * block_bytes_);
  }
  uint8_t* ArenaAt(size_t block, size_t layer = 0) {
    return session_->ArenaBytes(arena_).data() + block * block_bytes_ + layer * config_.layout.raw_bytes();
  }
  // Block `block` of the text, from block `at` of the arena on.
  void Put(const Text& text, uint32_t block, size_t at) {
    for (int layer = 0; layer < config_.layers; ++layer) {
      const Bytes page = MakeRawPage(config_.layout, text, block, kPage, layer);
      std::memcpy(ArenaAt(at, layer), page.data(), page.size());
    }
  }
  bool Holds(const Text& text, uint32_t block, size_t at) {
    for (int layer = 0; layer < config_.layers; ++layer) {
      const Bytes page = MakeRawPage(config_.layout, text, block, kPage, layer);
      if (!std::equal(page.begin(), page.end(), ArenaAt(at, layer))) return false;
    }
    return true;
  }
  void Fill(const Text& text, uint32_t first, size_t blocks, api::BlocksRequest::Builder request) {
    const auto names = Names(cache(), text, first + blocks);
    request.setFirstBlock(first);
    auto list = request.initNames(static_cast<uint32_t>(blocks));
    for (uint32_t i = 0; i < blocks; ++i) {
      const BlockName& name = names[first + i];
      list[i].setKey(kj::arrayPtr(name.key.bytes.data(), name.key.bytes.size()));
      list[i].setTokens(kj::arrayPtr(name.tokens.bytes.data(), name.tokens.bytes.size()));
    }
    SetArena(request.initPages(), arena_, 0, blocks * block_bytes_);
  }
  std::unique_ptr<WriteCall> Write(
      const Text& text, uint32_t first, size_t blocks, const Change& change = [](api::BlocksRequest::Builder) {}) {
    auto sent = client_.writeBlocksRequest();
    auto request = sent.initRequest();
    Fill(text, first, blocks, request);
    const Bytes forms(blocks * config_.layers, 0);
    request.setRaw(kj::arrayPtr(forms.data(), forms.size()));
    change(request);
    return Send<api::Cache::WriteBlocksResults>(kj::mv(sent));
  }
  std::unique_ptr<ReadCall> Read(
      const Text& text, uint32_t first, size_t blocks, const Change& change = [](api::BlocksRequest::Builder) {}) {
    auto sent = client_.readBlocksRequest();
    auto request = sent.initRequest();
    Fill(text, first, blocks, request);
    change(request);
    return Send<api::Cache::ReadBlocksResults>(kj::mv(sent));
  }
  absl::StatusCode Release(api::BlocksLease::Client& lease, uint32_t corrupt = UINT32_MAX) {
    auto request = lease.releaseRequest();
    request.setCorruptBlock(corrupt);
    return StatusOf(request.send());
  }
  template <typename From>
  absl::StatusCode MapStatus(From& from, uint32_t slab) {
    auto request = from.mapSlabRequest();
    request.setSlab(slab);
    return StatusOf(request.send());
  }
  absl::StatusOr<std::vector<uint32_t>> BindSlabs(uint64_t bytes) {
    auto request = client_.bindSlabsRequest();
    request.setBytes(bytes);
    std::optional<absl::StatusOr<std::vector<uint32_t>>> bound;
    auto waiting = request.send()
                       .then([&](auto response) {
                         const auto code = static_cast<absl::StatusCode>(response.getStatus().getCode());
                         if (code != absl::StatusCode::kOk) return void(bound = absl::Status(code, ""));
                         std::vector<uint32_t> slabs;
                         for (const uint32_t slab : response.getSlabs()) slabs.push_back(slab);
                         bound = std::move(slabs);
                       })
                       .eagerlyEvaluate(nullptr);
    loop_.Run([&] { return bound.has_value(); });
    return *bound;
  }
  // By a lease, or of bindSlabs.
  template <typename From>
  std::unique_ptr<Region> Map(From& from, uint32_t slab) {
    auto request = from.mapSlabRequest();
    request.setSlab(slab);
    std::unique_ptr<Region> region;
    auto waiting = request.send()
                       .then([&](auto response) {
                         EXPECT_EQ(response.getBytes(), test().pool->slab_bytes());
                         api::Slab::Client slab = response.getSlab();
                         auto descriptor = slab.getFd();
                         // The capability keeps the descriptor open until it is mapped.
                         return descriptor.then([&, slab = kj::mv(slab)](kj::Maybe<int> fd) {
                           auto mapped = Region::Map(dup(KJ_ASSERT_NONNULL(fd)), test().pool->slab_bytes(), false);
                           EXPECT_TRUE(mapped.ok()) << mapped.status();
                           region = *std::move(mapped);
                         });
                       })
                       .eagerlyEvaluate(nullptr);
    loop_.Run([&] { return region != nullptr; });
    return region;
  }
  template <typename Promise>
  absl::StatusCode StatusOf(Promise promise) {
    std::optional<int> code;
    auto waiting = promise.then([&](auto response) { code = response.getStatus().getCode(); }).eagerlyEvaluate(nullptr);
    loop_.Run([&] { return code.has_value(); });
    return static_cast<absl::StatusCode>(*code);
  }
  void Wipe() { std::memset(ArenaAt(0), 0xee, kBlocks * block_bytes_); }
  void Store(const Text& text, uint32_t blocks) {
    for (uint32_t i = 0; i < blocks; ++i) Put(text, i, i);
    auto call = Write(text, 0, blocks);
    RunUntilEnded(call);
    ASSERT_EQ(call->reply().getBlocks(), blocks) << call->reply().getStatus().getMessage().cStr();
  }

  static constexpr size_t kBlocks = 8;  // of the arena
  size_t block_bytes_ = 0;
  uint32_t arena_ = 0;
  BlockCallMetrics call_metrics_{&metrics_};
  TakingTurns turns_{&queue_};
  const BlockCalls::Parts call_parts_{&store(), &*workers_,     &queue_, &clock_,
                                      &drain_,  &call_metrics_, &turns_, BlockCalls::Maps::kEverybody};
  const BlockCalls calls_{call_parts_};
};

TEST(BlockCallsWorkersTest, AQuarterOfTheCpusIsLeftToOthers) {
  EXPECT_EQ(BlockCalls::WorkersOf(1), 1);
  EXPECT_EQ(BlockCalls::WorkersOf(3), 3);
  EXPECT_EQ(BlockCalls::WorkersOf(4), 3);
  EXPECT_EQ(BlockCalls::WorkersOf(16), 12);
}

TEST_F(BlockCallsTest, WhatIsWrittenIsRead) {
  Open();
  const Text text = MakeText(8 * kPage);
  Store(text, 6);
  EXPECT_EQ(call_metrics_.written_bytes.Value(), 6.0 * block_bytes_);
  Wipe();
  auto call = Read(text, 2, 6);
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 4u);
  EXPECT_EQ(call->reply().getReason(), api::MissReason::NOT_FOUND);
  EXPECT_EQ(call->reply().getBytes(), 4 * block_bytes_);
  EXPECT_EQ(call->reply().getRaw().size(), 4u * config_.layers);
  for (uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(Holds(text, 2 + i, i)) << i;
  EXPECT_EQ(*ArenaAt(4), 0xee);
  EXPECT_EQ(call_metrics_.read_bytes.Value(), 4.0 * block_bytes_);
  // As many as fit.
  Wipe();
  call = Read(text, 0, 6, [&](auto request) { SetArena(request.initPages(), arena_, 0, 3 * block_bytes_ - 64); });
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 2u);
  EXPECT_EQ(call->reply().getReason(), api::MissReason::NONE);
  EXPECT_EQ(*ArenaAt(2), 0xee);
}

TEST_F(BlockCallsTest, WhatIsThereIsCountedAndNotCopied) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 3);
  Wipe();  // NaN, which would be refused
  Put(text, 3, 3);
  auto call = Write(text, 0, 4);
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 1u);
  EXPECT_EQ(call->reply().getPresent(), 3u);
  EXPECT_EQ(call->reply().getBytes(), block_bytes_);
}

TEST_F(BlockCallsTest, APageThatIsWrongRefusesAllAndLeavesNothing) {
  Open();
  const Text text = MakeText(4 * kPage);
  for (uint32_t i = 0; i < 4; ++i) Put(text, i, i);
  for (const size_t block : {3, 1}) {  // the first wrong one is named, whoever found the others
    ArenaAt(block, 1)[0] = 0x00;
    ArenaAt(block, 1)[1] = 0x7c;
    auto call = Write(text, 0, 4);
    RunUntilEnded(call);
    EXPECT_EQ(call->reply().getStatus().getCode(), int(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(DetailOfReply(call->reply().getStatus()).field,
              absl::StrCat("pages[block ", block, "][layer 1].k[head 0][token 0][channel 0]"));
  }
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  EXPECT_EQ(store().caches().Match(cache(), Names(cache(), text, 4))->hit_blocks, 0);
}

TEST_F(BlockCallsTest, AChecksumThatIsWrongEndsTheReadBeforeItsBlock) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 4);
  {
    auto reads = store().caches().ReadBlocks(cache(), 0, Names(cache(), text, 4), {UINT64_MAX, 64});
    (*reads)->pages()[2 * config_.layers].data[9] ^= 1;
  }
  auto call = Read(text, 0, 4);
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 2u);
  EXPECT_EQ(call->reply().getReason(), api::MissReason::CHECKSUM);
  EXPECT_EQ(call->reply().getBytes(), 2 * block_bytes_);
  EXPECT_EQ(store().caches().Match(cache(), Names(cache(), text, 4))->hit_blocks, 2);
}

// A page of a reply of a mapped read.
struct Placed {
  uint64_t slab, offset, checksum;
};
Placed PlacedAt(api::BlocksReply::Reader reply, size_t page) {
  Placed placed;
  std::memcpy(&placed.slab, reply.getPlaces().begin() + page * 16, 8);
  std::memcpy(&placed.offset, reply.getPlaces().begin() + page * 16 + 8, 8);
  std::memcpy(&placed.checksum, reply.getChecksums().begin() + page * 8, 8);
  return placed;
}

void AskForMapping(api::BlocksRequest::Builder request) {
  request.setMapped(true);
  request.initPages();  // none
}

TEST_F(BlockCallsTest, MappedPagesStayWhereTheyLieAndAreReadThere) {
  Open();
  const Text text = MakeText(8 * kPage);
  Store(text, 6);
  Wipe();
  auto call = Read(text, 1, 7, AskForMapping);
  ASSERT_TRUE(call->ended());  // no worker was asked
  const auto reply = call->reply();
  EXPECT_EQ(reply.getBlocks(), 5u);
  EXPECT_EQ(reply.getReason(), api::MissReason::NOT_FOUND);
  EXPECT_EQ(reply.getBytes(), 0u);
  EXPECT_EQ(*ArenaAt(0), 0xee);
  ASSERT_EQ(reply.getRaw().size(), 5u * config_.layers);
  ASSERT_EQ(reply.getPlaces().size(), 16u * 5 * config_.layers);
  ASSERT_EQ(reply.getChecksums().size(), 8u * 5 * config_.layers);
  auto lease = reply.getLease();
  std::map<uint64_t, std::unique_ptr<Region>> slabs;
  for (size_t i = 0; i < 5u * config_.layers; ++i) {
    const Placed at = PlacedAt(reply, i);
    ASSERT_LT(at.slab, test().pool->slabs());
    if (slabs[at.slab] == nullptr) slabs[at.slab] = Map(lease, static_cast<uint32_t>(at.slab));
    const Bytes want = MakeRawPage(config_.layout, text, 1 + static_cast<uint32_t>(i) / config_.layers, kPage,
                                   static_cast<int>(i) % config_.layers);
    ASSERT_LE(at.offset + want.size(), slabs[at.slab]->bytes());
    EXPECT_TRUE(std::equal(want.begin(), want.end(), slabs[at.slab]->data() + at.offset)) << i;
    EXPECT_EQ(at.checksum, Checksum(want.data(), want.size()));
  }
  // They are held until they are released, and no longer.
  EXPECT_EQ(*store().caches().Purge(cache()), 1u);
  EXPECT_EQ(Release(lease), absl::StatusCode::kOk);
  EXPECT_EQ(Release(lease), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*store().caches().Purge(cache()), 5u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  // The slabs are the tenant's as long as somebody maps them.
  EXPECT_EQ(test().pool->shown()->count(), slabs.size());
  slabs.clear();
  test().pool->shown()->TakeBack();
  EXPECT_EQ(test().pool->shown()->count(), 0u);
}

TEST_F(BlockCallsTest, ALeaseEndsWithItsCapability) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 4);
  auto call = Read(text, 0, 4, AskForMapping);
  EXPECT_EQ(*store().caches().Purge(cache()), 0u);
  EXPECT_EQ(store().report().Use().mapped_pages, 4u * config_.layers);
  EXPECT_EQ(uses_.Most().mapped_pages, 4u * config_.layers);
  EXPECT_EQ(store().report().Use().lease_pages, 0u);  // calls of others go on
  call = nullptr;
  loop_.RunReady();
  EXPECT_EQ(store().report().Use().mapped_pages, 0u);
  EXPECT_EQ(uses_.Most().mapped_pages, 0u);
  EXPECT_EQ(*store().caches().Purge(cache()), 4u);
}

TEST_F(BlockCallsTest, ALeaseEndsByItself) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 4);
  BlockCalls::Parts parts = call_parts_;
  TurnWatch watch(&metrics_);
  Disposals disposals(&turns_, &watch);
  parts.timer = &loop_.timer();
  parts.lease_ms = 20;
  for (Disposals* const where : {static_cast<Disposals*>(nullptr), &disposals}) {
    parts.disposals = where;
    const BlockCalls calls(parts);
    server_->on_read_blocks = [&](ReadBlocksContext& context) { return calls.Read(session_, *bound_, context); };
    auto released = Read(text, 0, 4, AskForMapping), kept = Read(text, 0, 4, AskForMapping);
    auto first = released->reply().getLease(), second = kept->reply().getLease();
    const uint32_t slab = static_cast<uint32_t>(PlacedAt(kept->reply(), 0).slab);
    EXPECT_EQ(Release(first), absl::StatusCode::kOk);
    EXPECT_EQ(MapStatus(second, slab), absl::StatusCode::kOk);
    EXPECT_EQ(store().report().Use().mapped_pages, 4u * config_.layers);
    EXPECT_EQ(*store().caches().Purge(cache()), 0u);
    loop_.Run([&] { return store().report().Use().mapped_pages == 0; });
    EXPECT_EQ(uses_.Most().mapped_pages, 0u);
    EXPECT_EQ(uses_.Most().block_leases, 2u);
    // Who copied all the while learns that it may have copied anything.
    EXPECT_EQ(Release(second), absl::StatusCode::kUnavailable);
    EXPECT_EQ(Release(second, 1), absl::StatusCode::kUnavailable);
    EXPECT_EQ(MapStatus(second, slab), absl::StatusCode::kUnavailable);
    EXPECT_EQ(Release(first), absl::StatusCode::kFailedPrecondition);
  }
  loop_.RunReady();
  EXPECT_EQ(*store().caches().Purge(cache()), 4u);
}

TEST_F(BlockCallsTest, ABlockOfWhichAReaderSaysThatItIsCorruptIsCompared) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 4);
  auto call = Read(text, 0, 4, AskForMapping);
  auto lease = call->reply().getLease();
  EXPECT_EQ(Release(lease, 4), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Release(lease, 2), absl::StatusCode::kOk);  // it is not
  EXPECT_EQ(store().caches().Match(cache(), Names(cache(), text, 4))->hit_blocks, 4);
  {
    auto reads = store().caches().ReadBlocks(cache(), 0, Names(cache(), text, 4), {UINT64_MAX, 64});
    (*reads)->pages()[2 * config_.layers + 1].data[9] ^= 1;
  }
  call = Read(text, 0, 4, AskForMapping);
  EXPECT_EQ(call->reply().getBlocks(), 4u);  // who reads compares
  lease = call->reply().getLease();
  EXPECT_EQ(Release(lease, 2), absl::StatusCode::kOk);
  EXPECT_EQ(store().caches().Match(cache(), Names(cache(), text, 4))->hit_blocks, 2);
}

TEST_F(BlockCallsTest, PagesThatMayNotBeMappedAreCopiedBesideTheOthers) {
  Open();
  const Text text = MakeText(4 * kPage);
  {
    // Bytes of another tenant are left in the slab that is free, so it is not shown.
    std::vector<PageId> rest;
    while (test().pool->free_slabs() > 1) rest.push_back(test().pool->Allocate(99, test().pool->slab_bytes()).value());
    const PageId other = test().pool->Allocate(99, 4096).value();
    test().pool->Free(other);
    Store(text, 4);
    for (const PageId id : rest) test().pool->Free(id);
  }
  auto call = Read(text, 0, 4, AskForMapping);
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 0u);
  EXPECT_FALSE(call->reply().hasLease());
  Wipe();
  call = Read(text, 0, 4, [](auto request) { request.setMapped(true); });
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 4u);
  EXPECT_FALSE(call->reply().hasLease());
  EXPECT_EQ(call->reply().getBytes(), 4 * block_bytes_);
  for (size_t i = 0; i < 4u * config_.layers; ++i) {
    const Placed at = PlacedAt(call->reply(), i);
    EXPECT_EQ(at.slab, UINT64_MAX);
    EXPECT_EQ(at.offset, i * config_.layout.raw_bytes());
  }
  for (uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(Holds(text, i, i)) << i;
}

TEST_F(BlockCallsTest, SlabsAreBoundAndMappedBeforeTheyHoldBlocks) {
  Open();
  PagePool& pool = *test().pool;
  const auto bound = BindSlabs(2 * pool.slab_bytes() + 7);
  ASSERT_TRUE(bound.ok()) << bound.status();
  ASSERT_EQ(bound->size(), 2u);
  EXPECT_EQ(*BindSlabs(0), *bound);
  std::map<uint64_t, std::unique_ptr<Region>> slabs;
  for (const uint32_t slab : *bound) slabs[slab] = Map(client_, slab);
  uint32_t other = 0;
  while (slabs.contains(other)) ++other;
  EXPECT_EQ(MapStatus(client_, other), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(MapStatus(client_, UINT32_MAX), absl::StatusCode::kFailedPrecondition);
  // What is stored lies there.
  const Text text = MakeText(4 * kPage);
  Store(text, 4);
  auto call = Read(text, 0, 4, AskForMapping);
  EXPECT_EQ(call->reply().getBlocks(), 4u);
  EXPECT_EQ(call->reply().getUnmap().size(), 0u);
  for (size_t i = 0; i < 4u * config_.layers; ++i) {
    const Placed at = PlacedAt(call->reply(), i);
    ASSERT_TRUE(slabs.contains(at.slab)) << i;
    const Bytes want = MakeRawPage(config_.layout, text, static_cast<uint32_t>(i) / config_.layers, kPage,
                                   static_cast<int>(i) % config_.layers);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), slabs[at.slab]->data() + at.offset)) << i;
  }
}

TEST_F(BlockCallsTest, ReadersAreAskedForSlabsThatOthersCouldHave) {
  Open();
  PagePool& pool = *test().pool;
  const Text text = MakeText(2 * kPage);
  Store(text, 2);
  EXPECT_EQ(Read(text, 0, 2, AskForMapping)->reply().getUnmap().size(), 0u);
  const std::vector<uint32_t> kept = pool.shown()->Bind(99, 2 * pool.slab_bytes()).value();
  std::vector<int> descriptors;
  for (const uint32_t slab : kept) descriptors.push_back(pool.shown()->ShowBound(99, slab).value());
  EXPECT_EQ(Read(text, 0, 2, AskForMapping)->reply().getUnmap().size(), 0u);
  test().clock.AdvanceNs(ShownSlabs::kMapWithinNs);
  std::vector<PageId> rest;
  while (pool.free_slabs() > 0) rest.push_back(pool.Allocate(98, pool.slab_bytes()).value());
  const auto call = Read(text, 0, 2, AskForMapping);
  const auto unmap = call->reply().getUnmap();
  std::set<uint32_t> asked;
  for (const uint32_t slab : unmap) asked.insert(slab);
  EXPECT_EQ(asked, std::set<uint32_t>(kept.begin(), kept.end()));
  const auto copied = Read(text, 0, 2);
  RunUntilEnded(copied);
  EXPECT_EQ(copied->reply().getUnmap().size(), 0u);
  for (const int fd : descriptors) close(fd);
  pool.shown()->TakeBack();
  EXPECT_EQ(pool.free_slabs(), kept.size());
  for (const PageId id : rest) pool.Free(id);
}

TEST_F(BlockCallsTest, LeasesOfAConnectionAreBounded) {
  Open();
  const Text text = MakeText(kPage);
  Store(text, 1);
  std::vector<std::unique_ptr<ReadCall>> calls;
  for (size_t i = 0; i < limits::kBlockLeasesMax; ++i) calls.push_back(Read(text, 0, 1, AskForMapping));
  EXPECT_TRUE(calls.back()->reply().hasLease());
  auto refused = Read(text, 0, 1, AskForMapping);
  EXPECT_EQ(DetailOfReply(refused->reply().getStatus()).bound, absl::StrCat("below ", limits::kBlockLeasesMax));
  auto lease = calls.back()->reply().getLease();
  EXPECT_EQ(MapStatus(lease, 7), absl::StatusCode::kInvalidArgument);
  calls.pop_back();
  lease = nullptr;
  loop_.RunReady();
  EXPECT_TRUE(Read(text, 0, 1, AskForMapping)->reply().hasLease());
}

TEST_F(BlockCallsTest, CallsThatNobodyWaitsForLeaveNothing) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 2);
  const uint64_t used = test().pool->slot_bytes_used();
  BlockWorkers();
  auto write = Write(text, 2, 2);
  auto read = Read(text, 0, 2);
  EXPECT_EQ(test().pool->slot_bytes_used(), 2 * used);
  write = nullptr;
  read = nullptr;
  session_->RemoveArena(arena_);  // workers may still be at it
  EndWork();
  EXPECT_EQ(test().pool->slot_bytes_used(), used);
  EXPECT_EQ(*store().caches().Purge(cache()), 2u);
}

TEST_F(BlockCallsTest, RequestsThatAreWrongNameTheField) {
  Open();
  const Text text = MakeText(2 * kPage);
  const auto write_field = [&](const Change& change) {
    auto call = Write(text, 0, 2, change);
    RunUntilEnded(call);
    EXPECT_NE(call->reply().getStatus().getCode(), 0);
    return DetailOfReply(call->reply().getStatus()).field;
  };
  const auto read_field = [&](const Change& change) {
    auto call = Read(text, 0, 2, change);
    RunUntilEnded(call);
    EXPECT_NE(call->reply().getStatus().getCode(), 0);
    return DetailOfReply(call->reply().getStatus()).field;
  };
  for (const auto& field : {std::function<std::string(const Change&)>(write_field), {read_field}}) {
    EXPECT_EQ(field([](auto request) { request.initPages(); }), "pages");
    EXPECT_EQ(field([](auto request) { SetInline(request.initPages(), Bytes(64)); }), "pages");
    EXPECT_EQ(field([&](auto request) { SetArena(request.initPages(), 99, 0, 64); }), "pages.arena.id");
    EXPECT_EQ(field([&](auto request) { SetArena(request.initPages(), arena_, 32, 64); }), "pages.arena.offset");
    EXPECT_EQ(field([&](auto request) { SetArena(request.initPages(), arena_, 64, kBlocks * block_bytes_); }),
              "pages.arena.offset");
    EXPECT_EQ(field([](auto request) { request.initNames(0); }), "names");
    EXPECT_EQ(field([](auto request) { request.initNames(2); }), "names[0].key");
    EXPECT_EQ(field([](auto request) { request.setFirstBlock(65535); }), "firstBlock");
  }
  EXPECT_EQ(write_field([&](auto request) { SetArena(request.initPages(), arena_, 0, block_bytes_); }),
            "pages.arena.bytes");
  EXPECT_EQ(write_field([](auto request) { request.initRaw(3); }), "raw");
  EXPECT_EQ(read_field([](auto request) { request.initRaw(1); }), "raw");
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

TEST_F(BlockCallsTest, ADaemonThatDrainsRefuses) {
  Open();
  const Text text = MakeText(kPage);
  drain_.Set(true);
  auto write = Write(text, 0, 1);
  RunUntilEnded(write);
  EXPECT_EQ(write->reply().getStatus().getCode(), int(absl::StatusCode::kUnavailable));
  auto read = Read(text, 0, 1);
  RunUntilEnded(read);
  EXPECT_EQ(read->reply().getStatus().getCode(), int(absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace kvmanager
