// Blocks that a client reads where they lie: leases, slabs that it maps, and what may not be mapped.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>

#include "kvmanager/base/checksum.h"
#include "kvmanager/rpc/block_calls_testing.h"
#include "kvmanager/rpc/limits.h"

namespace kvmanager {
namespace {

using testing::BlockCallsTest;
using testing::Bytes;
using testing::Change;
using testing::DetailOfReply;
using testing::kPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::ReadCall;
using testing::Text;

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

}  // namespace
}  // namespace kvmanager
