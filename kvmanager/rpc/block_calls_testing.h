// Calls that read and write whole blocks, with an arena of eight blocks.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvmanager/rpc/block_calls.h"
#include "kvmanager/rpc/calls_testing.h"

namespace kvmanager::testing {

using ReadCall = TestCall<api::Cache::ReadBlocksResults>;
using WriteCall = TestCall<api::Cache::WriteBlocksResults>;
using Bytes = std::vector<uint8_t>;
using Change = std::function<void(api::BlocksRequest::Builder)>;

class BlockCallsTest : public CallsTest {
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

}  // namespace kvmanager::testing
