// Blocks that a client reads where they lie. Of SmallCache a raw page has half of a slab's bytes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/client_testing.h"
#include "client/fake_daemon.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

using absl::StatusCode;

constexpr uint64_t kRange = UINT64_MAX;

std::string Words(const std::vector<uint64_t>& words) {
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t));
}

/// A reply of one layer: places are pairs of slab and offset.
FakeDaemon::Blocks Reply(const std::vector<uint64_t>& places, std::string raw, uint64_t bytes = 0) {
  const uint32_t blocks = uint32_t(places.size() / 2);
  std::vector<uint64_t> checksums(blocks);
  for (uint32_t i = 0; i < blocks; ++i) checksums[i] = 1000 + i;
  return {
      .blocks = blocks, .bytes = bytes, .raw = std::move(raw), .places = Words(places), .checksums = Words(checksums)};
}

uint8_t ByteAt(uint64_t address) { return *reinterpret_cast<const uint8_t*>(address); }

class MappedBlocksTest : public ::testing::Test {
 protected:
  absl::StatusOr<MappedBlocks> Map(const FakeDaemon::Blocks& reply, TensorView pages = {},
                                   std::shared_ptr<SlabPinner> pinner = nullptr) {
    daemon_.SetBlocks(reply);
    return cache_->MapBlocks({0, names_, pages}, std::move(pinner));
  }

  FakeDaemon daemon_{FakeDaemon::Behaviour{.features = {"map-blocks"}}};
  std::unique_ptr<Client> client_ = ConnectTo(daemon_);
  std::unique_ptr<Cache> cache_ = *client_->OpenCache(SmallCache());
  const std::vector<BlockName> names_ = std::vector<BlockName>(4);
};

TEST_F(MappedBlocksTest, AddressesAreInSlabsThatAreMappedOnceAndInTheRange) {
  auto arena = *client_->CreateArena(8192);
  arena->data()[64] = 77;
  auto mapped = Map(Reply({7, 64, kRange, 64, 8, 0, 7, 65536}, {1, 0, 0, 1}, 128), arena->View(0, 4096));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(mapped->blocks, 4u);
  EXPECT_EQ(mapped->bytes, 128u);
  EXPECT_EQ(mapped->raw, std::string("\1\0\0\1", 4));
  EXPECT_EQ(mapped->checksums, (std::vector<uint64_t>{1000, 1001, 1002, 1003}));
  ASSERT_EQ(mapped->pages.size(), 4u);
  EXPECT_EQ(ByteAt(mapped->pages[0]), 7);
  EXPECT_EQ(ByteAt(mapped->pages[1]), 77);
  EXPECT_EQ(ByteAt(mapped->pages[2]), 8);
  EXPECT_EQ(mapped->pages[3] - mapped->pages[0], 65536u - 64);
  EXPECT_EQ(mapped->pinned, absl::OkStatus());
  EXPECT_EQ(daemon_.seen().slabs_asked, 2);
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 2);

  const auto again = Map(Reply({8, 64, 7, 0}, {0, 0}));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->pages[0], mapped->pages[2] + 64);
  EXPECT_EQ(daemon_.seen().slabs_asked, 2);
  // A page that reaches beyond its slab gives wrong bytes, and no signal.
  const auto last = Map(Reply({7, 131008}, {0}));
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(ByteAt(last->pages[0] + 63), 7);
  EXPECT_EQ(ByteAt(last->pages[0] + 64), 0);
  EXPECT_EQ(ByteAt(last->pages[0] + 65535), 0);
}

TEST_F(MappedBlocksTest, TheLeaseIsReleasedOrDropped) {
  auto mapped = Map(Reply({7, 0}, {0}));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  ASSERT_NE(mapped->lease, nullptr);
  daemon_.Await([](const auto& seen) { return seen.leases_alive == 1; });
  EXPECT_TRUE(mapped->lease->Release().ok());
  EXPECT_EQ(daemon_.seen().corrupt_block, UINT32_MAX);
  EXPECT_EQ(mapped->lease->Release(1).code(), StatusCode::kUnavailable);
  EXPECT_EQ(daemon_.seen().corrupt_block, 1u);
  mapped->lease.reset();
  daemon_.Await([](const auto& seen) { return seen.leases_alive == 0; });
  auto none = Map({.lease = false});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->lease, nullptr);
}

TEST_F(MappedBlocksTest, SlabsAreUnmappedBeforeTheConnectionEnds) {
  auto mapped = Map(Reply({7, 0}, {0}));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  client_.reset();
  cache_.reset();
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 1);  // a lease keeps the connection
  daemon_.Change([](auto& seen) { seen.mapped_at_the_end = -1; });
  mapped->lease.reset();
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 0);
  daemon_.Await([](const auto& seen) { return seen.connections_open == 0; });
  EXPECT_EQ(daemon_.seen().mapped_at_the_end, 0);
}

TEST_F(MappedBlocksTest, ReconnectVoidsLeasesAndMapsAnew) {
  auto mapped = Map(Reply({7, 0}, {0}));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  daemon_.Stop();
  daemon_.Start();
  EXPECT_FALSE(client_->connected());
  ASSERT_TRUE(client_->Reconnect().ok());
  EXPECT_EQ(mapped->lease->Release().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(ByteAt(mapped->pages[0]), 7);  // a GPU may still read there
  cache_ = *client_->OpenCache(SmallCache());
  auto anew = Map(Reply({7, 0}, {0}));
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_EQ(daemon_.seen().slabs_asked, 2);
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 2);
  mapped->lease.reset();
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 1);
}

TEST_F(MappedBlocksTest, RepliesThatCannotBeAreRefused) {
  auto arena = *client_->CreateArena(8192);
  FakeDaemon::Blocks few = Reply({7, 0, 7, 64}, {0, 0}), many = Reply({7, 0, 7, 0, 7, 0, 7, 0, 7, 0}, {0, 0, 0, 0, 0});
  FakeDaemon::Blocks bare = Reply({7, 0}, {0});
  few.checksums.pop_back();
  FakeDaemon::Blocks short_places = Reply({7, 0, 7, 64}, {0, 0});
  short_places.places.resize(16);
  bare.lease = false;
  FakeDaemon::Blocks endless = Reply({7, 0}, {0});
  endless.blocks = UINT32_MAX;
  const FakeDaemon::Blocks wrong[] = {
      few,
      many,
      bare,
      short_places,
      endless,
      Reply({7, 0}, {0, 0}),
      Reply({7, 1}, {0}),
      Reply({7, FakeDaemon::kSlabBytes}, {0}),
      Reply({7, FakeDaemon::kSlabBytes - 64}, {1}),
      Reply({7, 65536 + 64}, {1}),
      Reply({7, UINT64_MAX - 63}, {1}),
      Reply({7, UINT64_MAX - 63}, {0}),
      Reply({kRange, 0}, {0}),
      Reply({kRange, 128}, {0}, 128),
      Reply({kRange, 0}, {1}, 128),
      Reply({kRange, UINT64_MAX - 63}, {0}, 128),
      Reply({kRange, 0}, {0}, 4097),
      Reply({uint64_t{1} << 32, 0}, {0}),
      Reply({FakeDaemon::kBareSlab, 0}, {0}),
      Reply({FakeDaemon::kShortSlab, 0}, {0}),
      Reply({FakeDaemon::kOpenSlab, 0}, {0}),
      Reply({7, 0, FakeDaemon::kOpenSlab, 0}, {0, 0}),
  };
  for (size_t i = 0; i < std::size(wrong); ++i) {
    EXPECT_EQ(Map(wrong[i], arena->View(0, 4096)).status().code(), StatusCode::kInternal) << i;
  }
  EXPECT_EQ(Map(Reply({7, 0, FakeDaemon::kRefusedSlab, 0}, {0, 0})).status().code(), StatusCode::kFailedPrecondition);
  daemon_.Await([](const auto& seen) { return seen.leases_alive == 0; });
  EXPECT_TRUE(Map(Reply({7, 0}, {0})).ok());
  std::vector<uint8_t> elsewhere(4096);
  EXPECT_EQ(DetailOf(Map(Reply({7, 0}, {0}), TensorView::Inline(elsewhere.data(), 4096)).status()).field, "pages");
}

TEST_F(MappedBlocksTest, CallsUnderWayMapASlabOnce) {
  daemon_.SetBlocks(Reply({7, 0, 9, 0}, {0, 0}));
  std::vector<Pending<absl::StatusOr<MappedBlocks>>> pending;
  for (int i = 0; i < 4; ++i) pending.push_back(cache_->MapBlocksAsync({0, names_, {}}, nullptr));
  cache_.reset();
  pending.pop_back();
  for (auto& each : pending) {
    while (!each.ready()) {
    }
    const auto mapped = each.Wait();
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    EXPECT_EQ(ByteAt(mapped->pages[1]), 9);
  }
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 2);
}

/// Pins so many slabs, then fails.
class FakePinner final : public SlabPinner {
 public:
  explicit FakePinner(int most, std::vector<const uint8_t*>* pinned) : most_(most), pinned_(*pinned) {}
  absl::Status Pin(const uint8_t* data, size_t bytes) override {
    EXPECT_EQ(bytes, FakeDaemon::kSlabBytes);
    if (++tried_ > most_) return absl::ResourceExhaustedError("no more");
    pinned_.push_back(data);
    return absl::OkStatus();
  }
  void Unpin(const uint8_t* data) override {
    EXPECT_GE(ByteAt(reinterpret_cast<uintptr_t>(data)), 7);  // it is still mapped
    EXPECT_EQ(std::erase(pinned_, data), 1u);
  }
  int tried_ = 0;

 private:
  const int most_;
  std::vector<const uint8_t*>& pinned_;
};

TEST_F(MappedBlocksTest, SlabsArePinnedOnceAGpuIsNamed) {
  std::vector<const uint8_t*> pinned;
  const auto pinner = std::make_shared<FakePinner>(1, &pinned);
  ASSERT_TRUE(Map(Reply({7, 0}, {0})).ok());
  ASSERT_TRUE(Map(Reply({7, 0}, {0}), {}, pinner).ok());
  ASSERT_EQ(pinned.size(), 1u);
  EXPECT_EQ(ByteAt(reinterpret_cast<uintptr_t>(pinned[0])), 7);
  const auto more = Map(Reply({8, 0, 9, 0}, {0, 0}), {}, pinner);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(more->pinned, absl::ResourceExhaustedError("no more"));
  EXPECT_EQ(Map(Reply({10, 0}, {0}), {}, pinner)->pinned, absl::OkStatus());
  EXPECT_EQ(pinner->tried_, 2);
  cache_.reset();
  client_.reset();
  // A lease of `more` keeps the connection.
  EXPECT_EQ(pinned.size(), 1u);
}

TEST_F(MappedBlocksTest, SlabsAreMappedAndPinnedAheadOfNeed) {
  FakeDaemon::Blocks reply = Reply({8, 64}, {0});
  for (uint32_t slab = 7; slab < 47; ++slab) reply.bound.push_back(slab);
  reply.bound[3] = FakeDaemon::kRefusedSlab;  // it was taken back meanwhile
  daemon_.SetBlocks(reply);
  EXPECT_EQ(*cache_->BindSlabs(0, nullptr), 0u);
  EXPECT_EQ(*cache_->BindSlabs(FakeDaemon::kSlabBytes * 3 / 2, nullptr), FakeDaemon::kSlabBytes);
  EXPECT_EQ(daemon_.seen().bound_bytes, FakeDaemon::kSlabBytes * 3 / 2);
  const auto all = cache_->BindSlabs(uint64_t{1} << 62, nullptr);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(*all, 39 * FakeDaemon::kSlabBytes);
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 39);
  EXPECT_EQ(daemon_.seen().slabs_asked, 41);  // once each, but for the one that was refused twice
  auto mapped = Map(reply);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(ByteAt(mapped->pages[0]), 8);
  EXPECT_EQ(daemon_.seen().slabs_asked, 41);
  std::vector<const uint8_t*> pinned;
  reply.bound = {7, FakeDaemon::kBareSlab};
  daemon_.SetBlocks(reply);
  EXPECT_EQ(cache_->BindSlabs(FakeDaemon::kSlabBytes, std::make_shared<FakePinner>(3, &pinned)).status(),
            absl::ResourceExhaustedError("no more"));
  EXPECT_EQ(pinned.size(), 3u);
  EXPECT_EQ(cache_->BindSlabs(uint64_t{1} << 40, nullptr).status().code(), StatusCode::kInternal);
  mapped->lease.reset();
  cache_.reset();
  client_.reset();
  EXPECT_TRUE(pinned.empty());
}

TEST_F(MappedBlocksTest, ManySlabsAreMappedSomeAtOnce) {
  std::vector<uint64_t> places;
  for (uint32_t slab = 1; slab <= 40; ++slab) places.insert(places.end(), {slab, 0});
  const std::vector<BlockName> names(40);
  daemon_.SetBlocks(Reply(places, std::string(40, 0)));
  const auto mapped = cache_->MapBlocks({0, names, {}});
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  for (uint32_t i = 0; i < 40; ++i) EXPECT_EQ(ByteAt(mapped->pages[i]), 1 + i);
  EXPECT_EQ(daemon_.seen().slabs_asked, 40);
  EXPECT_LE(daemon_.seen().slabs_sent_most, 32);  // 16, and those whose end the daemon has not heard of
}

TEST_F(MappedBlocksTest, SlabsThatTheDaemonWantsBackAreUnmapped) {
  std::vector<const uint8_t*> pinned;
  const auto pinner = std::make_shared<FakePinner>(9, &pinned);
  auto mapped = Map(Reply({7, 0, 8, 0}, {0, 0}), {}, pinner);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(pinned.size(), 2u);
  FakeDaemon::Blocks reply = Reply({7, 64}, {0});
  reply.unmap = {8, 9, 8, UINT32_MAX};
  auto again = Map(reply);
  ASSERT_TRUE(again.ok()) << again.status();
  // The daemon may have ended the lease, but this process may read there until it lets go of it.
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 2);
  EXPECT_EQ(ByteAt(mapped->pages[1]), 8);
  mapped->lease.reset();
  again->lease.reset();
  again = Map(reply);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(FakeDaemon::MappedSlabs(), 1);
  ASSERT_EQ(pinned.size(), 1u);
  EXPECT_EQ(ByteAt(reinterpret_cast<uintptr_t>(pinned[0])), 7);
  EXPECT_EQ(daemon_.seen().slabs_asked, 2);
  again = Map(Reply({8, 0}, {0}));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ByteAt(again->pages[0]), 8);
  EXPECT_EQ(daemon_.seen().slabs_asked, 3);
  again->lease.reset();
  cache_.reset();
  client_.reset();
  EXPECT_TRUE(pinned.empty());
}

TEST_F(MappedBlocksTest, AForkedChildHasNoPartOfThem) {
  std::vector<const uint8_t*> pinned;
  auto mapped = Map(Reply({7, 0}, {0}), {}, std::make_shared<FakePinner>(1, &pinned));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool unmapped = FakeDaemon::MappedSlabs() == 0;
    mapped->lease.reset();
    cache_.reset();
    client_.reset();
    ::_exit(unmapped && pinned.size() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ByteAt(mapped->pages[0]), 7);
  mapped->lease.reset();
  cache_.reset();
  client_.reset();
  EXPECT_TRUE(pinned.empty());
}

TEST(Client, BlocksAreMappedOnlyWhereTheDaemonSaysSo) {
  FakeDaemon daemon, far(FakeDaemon::Behaviour{.tcp = true, .features = {"map-blocks"}});
  const std::vector<BlockName> names(1);
  auto client = ConnectTo(daemon);
  EXPECT_EQ((*client->OpenCache(SmallCache()))->MapBlocks({0, names, {}}).status().code(), StatusCode::kUnimplemented);
  client = ConnectTo(far);
  EXPECT_EQ((*client->OpenCache(SmallCache()))->MapBlocks({0, names, {}}).status().code(),
            StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvmanager::client
