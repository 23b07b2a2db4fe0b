// Blocks that are copied between arenas and pages: what arenas hold, what is refused, and what a call holds until when.
#include <gtest/gtest.h>

#include <cstring>
#include <set>

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
using testing::Text;

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
