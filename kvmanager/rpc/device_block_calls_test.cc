// Blocks that are written out of an arena on a GPU: here its memory is the host's, and copies end when the test says
// so.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "kvmanager/memory/page_mover.h"
#include "kvmanager/rpc/block_calls_testing.h"

namespace kvmanager {
namespace {

using testing::BlockCallsTest;
using testing::Bytes;
using testing::kPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::Text;

class TestMover final : public PageMover {
 public:
  bool ready() const override { return why_not.ok(); }
  absl::Status status() const override { return why_not; }
  void Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) override {
    EXPECT_EQ(direction, PageDirection::kDemote);
    moves_.push_back({std::move(copies), std::move(done)});
  }
  size_t moves() const { return moves_.size(); }
  void Finish(bool moved = true) {
    auto [copies, done] = std::move(moves_.front());
    moves_.pop_front();
    for (const PageCopy& copy : copies) {
      if (moved) std::memcpy(copy.host, copy.device, copy.bytes);
    }
    done(moved);
  }

  absl::Status why_not;

 private:
  std::deque<std::pair<std::vector<PageCopy>, absl::AnyInvocable<void(bool)>>> moves_;
};

class DeviceBlockCallsTest : public BlockCallsTest {
 public:
  DeviceBlockCallsTest() {
    BlockCalls::Parts parts = call_parts_;
    parts.device_arena = [this](const Session&, uint32_t id) -> BlockCalls::DeviceBytes {
      if (id != kDeviceArena) return {};
      return {{memory_->data(), memory_->size()}, memory_, &mover_};
    };
    device_calls_ = std::make_unique<BlockCalls>(parts);
    server_->on_write_blocks = [this](WriteBlocksContext& context) {
      return device_calls_->Write(session_, *bound_, context);
    };
  }

 protected:
  static constexpr uint32_t kDeviceArena = 7700;

  // Blocks of the text to the arena's first bytes.
  void Fill(const Text& text, uint32_t blocks) {
    memory_->assign(kBlocks * block_bytes_, 0xee);
    for (uint32_t block = 0; block < blocks; ++block) {
      for (int layer = 0; layer < config_.layers; ++layer) {
        const Bytes page = MakeRawPage(config_.layout, text, block, kPage, layer);
        std::memcpy(memory_->data() + block * block_bytes_ + layer * page.size(), page.data(), page.size());
      }
    }
  }
  auto WriteFromDevice(const Text& text, uint32_t blocks) {
    return Write(text, 0, blocks,
                 [&](auto request) { SetArena(request.initPages(), kDeviceArena, 0, blocks * block_bytes_); });
  }
  static int CodeOf(const auto& call) { return call->reply().getStatus().getCode(); }
  size_t Hits(const Text& text, uint32_t blocks) {
    return store().caches().Match(cache(), Names(cache(), text, blocks))->hit_blocks;
  }

  const std::shared_ptr<Bytes> memory_ = std::make_shared<Bytes>();
  TestMover mover_;
  std::unique_ptr<BlockCalls> device_calls_;
};

TEST_F(DeviceBlockCallsTest, WhatADeviceCopiedIsRead) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  auto call = WriteFromDevice(text, 4);
  ASSERT_EQ(mover_.moves(), 1);
  EXPECT_FALSE(call->ended());
  EXPECT_EQ(Hits(text, 4), 0);
  mover_.Finish();
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 4);
  EXPECT_EQ(call->reply().getBytes(), 4 * block_bytes_);
  Wipe();
  auto read = Read(text, 0, 4);
  RunUntilEnded(read);
  ASSERT_EQ(read->reply().getBlocks(), 4);
  for (uint32_t block = 0; block < 4; ++block) EXPECT_TRUE(Holds(text, block, block));
  // What is there is not copied again.
  call = WriteFromDevice(text, 4);
  RunUntilEnded(call);
  EXPECT_EQ(mover_.moves(), 0);
  EXPECT_EQ(call->reply().getPresent(), 4);
}

// The daemon looks at its own copy: what the arena has when the copy began does not count.
TEST_F(DeviceBlockCallsTest, WhatIsNotFiniteIsRefused) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  auto call = WriteFromDevice(text, 4);
  (*memory_)[2 * block_bytes_] = 0x00;
  (*memory_)[2 * block_bytes_ + 1] = 0x7c;
  mover_.Finish();
  RunUntilEnded(call);
  EXPECT_EQ(CodeOf(call), int(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(testing::DetailOfReply(call->reply().getStatus()).field,
            "pages[block 2][layer 0].k[head 0][token 0][channel 0]");
  EXPECT_EQ(test().pool->slot_bytes_used(), 0);
  EXPECT_EQ(Hits(text, 4), 0);
}

// Of raw pages the daemon makes checksums itself, whatever the client says.
TEST_F(DeviceBlockCallsTest, ChecksumsOfRawPagesAreTheDaemons) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  const Bytes checksums(8 * 4 * config_.layers, 0x5a);
  const auto with_checksums = [&](auto request) {
    SetArena(request.initPages(), kDeviceArena, 0, 4 * block_bytes_);
    request.setChecksums(kj::arrayPtr(checksums.data(), checksums.size()));
  };
  auto call = Write(text, 0, 4, with_checksums);
  mover_.Finish();
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getBlocks(), 4);
  Wipe();
  auto read = Read(text, 0, 4);
  RunUntilEnded(read);
  EXPECT_EQ(read->reply().getBlocks(), 4);
}

TEST_F(DeviceBlockCallsTest, ChecksumsAreOfAllPagesAndOfDeviceArenasAlone) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  for (const bool on_device : {false, true}) {
    const Bytes checksums(on_device ? 8 : 8 * 4 * config_.layers, 1);
    auto call = Write(text, 0, 4, [&](auto request) {
      SetArena(request.initPages(), on_device ? kDeviceArena : arena_, 0, 4 * block_bytes_);
      request.setChecksums(kj::arrayPtr(checksums.data(), checksums.size()));
    });
    RunUntilEnded(call);
    EXPECT_EQ(CodeOf(call), int(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(testing::DetailOfReply(call->reply().getStatus()).field, "checksums");
  }
  EXPECT_EQ(test().pool->slot_bytes_used(), 0);
}

TEST_F(DeviceBlockCallsTest, AGpuThatFailsStoresNothing) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  auto call = WriteFromDevice(text, 4);
  mover_.Finish(/*moved=*/false);
  RunUntilEnded(call);
  EXPECT_EQ(CodeOf(call), int(absl::StatusCode::kUnavailable));
  call = nullptr;
  loop_.RunReady();
  EXPECT_EQ(test().pool->slot_bytes_used(), 0);
  EXPECT_EQ(Hits(text, 4), 0);
}

TEST_F(DeviceBlockCallsTest, NothingBeginsBeforeTheHostIsPinned) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  mover_.why_not = absl::UnavailableError("the host pool is being pinned");
  for (const uint32_t blocks : {4, 0}) {  // of none: a client asks so whether it could write
    auto call = WriteFromDevice(text, blocks);
    RunUntilEnded(call);
    EXPECT_EQ(CodeOf(call), int(absl::StatusCode::kUnavailable));
  }
  mover_.why_not = absl::OkStatus();
  auto call = WriteFromDevice(text, 0);
  RunUntilEnded(call);
  EXPECT_EQ(CodeOf(call), 0);
  EXPECT_EQ(mover_.moves(), 0);
}

// Slots and arena are held until the copies have ended, whoever waits for them.
TEST_F(DeviceBlockCallsTest, ACallThatIsCancelledHoldsWhatIsCopied) {
  Open();
  const Text text = MakeText(4 * kPage);
  Fill(text, 4);
  const long users = memory_.use_count();
  auto call = WriteFromDevice(text, 4);
  ASSERT_EQ(mover_.moves(), 1);
  call = nullptr;
  loop_.RunReady();
  EXPECT_EQ(test().pool->slot_bytes_used(), 4 * block_bytes_);
  EXPECT_GT(memory_.use_count(), users);
  mover_.Finish();
  loop_.RunReady();
  EXPECT_EQ(test().pool->slot_bytes_used(), 0);
  EXPECT_EQ(memory_.use_count(), users);
  EXPECT_EQ(Hits(text, 4), 0);
}

TEST_F(DeviceBlockCallsTest, BlocksAreNotReadIntoIt) {
  Open();
  const Text text = MakeText(4 * kPage);
  Store(text, 2);
  auto call = Read(text, 0, 2, [&](auto request) { SetArena(request.initPages(), kDeviceArena, 0, 2 * block_bytes_); });
  RunUntilEnded(call);
  EXPECT_EQ(CodeOf(call), int(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace kvmanager
