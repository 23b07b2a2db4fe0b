// Two UcxMemory objects of one process, over UCX's TCP and shared memory.
#include "transport/ucx/ucx_memory.h"

#include <cstring>
#include <deque>
#include <future>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/region.h"
#include "transport/ucx/description.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager {
namespace {

constexpr size_t kBytes = 8 << 20;
constexpr uint8_t kHandOff[] = {1, 2, 3};
using Settings = std::vector<std::pair<std::string, std::string>>;

std::unique_ptr<Region> MakeRegion(size_t bytes, uint64_t seed) {
  auto region = Region::Create({.bytes = bytes, .sharing = Region::Sharing::kReadOnly});
  EXPECT_TRUE(region.ok()) << region.status();
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy((*region)->data() + i, &word, 8);
  }
  return *std::move(region);
}

struct Way {
  const char* name;
  Settings settings;
};

class UcxMemoryTest : public testing::TestWithParam<Way> {
 protected:
  static constexpr const char* kKey = "a key that all daemons here have";
  static UcxMemory::Options OptionsOf(const std::string& key = kKey) {
    UcxMemory::Options options;
    options.program = {"transport/ucx/ucx_process_main"};
    options.key = key;
    options.staging_bytes = 4 << 20;
    options.settings = GetParam().settings;
    return options;
  }
  UcxMemoryTest() : first_(MakeRegion(kBytes, 1)), second_(MakeRegion(kBytes, 2)) {}
  void SetUp() override {
    UcxMemory::Options options = OptionsOf();
    options.memory = {{first_->data(), kBytes, first_->fd()}, {second_->data(), kBytes, second_->fd()}};
    auto sender = UcxMemory::Create(options);
    if (!IsUcxBuilt()) {
      EXPECT_EQ(sender.status().code(), absl::StatusCode::kUnavailable);
      GTEST_SKIP() << sender.status();
    }
    ASSERT_TRUE(sender.ok()) << sender.status();
    sender_ = *std::move(sender);
    auto reader = UcxMemory::Create(OptionsOf());
    ASSERT_TRUE(reader.ok()) << reader.status();
    reader_ = *std::move(reader);
  }
  static absl::Span<const uint8_t> Bytes(const std::string& s) {
    return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
  }
  std::shared_ptr<RemoteMemory::Source> Open(size_t index) {
    auto source = reader_->Open(Bytes(sender_->Describe(index, kHandOff)), kHandOff);
    EXPECT_TRUE(source.ok()) << source.status();
    return *std::move(source);
  }
  using Read = std::future<absl::StatusOr<std::unique_ptr<RemoteMemory::Piece>>>;
  Read Begin(const std::shared_ptr<RemoteMemory::Source>& from, uint64_t offset, uint64_t bytes) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<std::unique_ptr<RemoteMemory::Piece>>>>();
    Read read = promise->get_future();
    reader_->Read(from, offset, bytes, [promise](auto piece) { promise->set_value(std::move(piece)); });
    return read;
  }

  std::unique_ptr<Region> first_, second_;
  std::unique_ptr<UcxMemory> sender_, reader_;
};

TEST_P(UcxMemoryTest, ReadsWhatIsThere) {
  const auto here = Open(0), there = Open(1);
  EXPECT_EQ(here->bytes(), kBytes);
  std::mt19937_64 random(3);
  struct Expected {
    Read read;
    const uint8_t* from;
    size_t bytes;
  };
  std::deque<Expected> reads;
  const auto expect_next = [&] {
    const auto piece = reads.front().read.get();
    ASSERT_TRUE(piece.ok()) << piece.status();
    ASSERT_EQ((*piece)->bytes().size(), reads.front().bytes);
    EXPECT_EQ(std::memcmp((*piece)->bytes().data(), reads.front().from, reads.front().bytes), 0);
    reads.pop_front();
  };
  for (int i = 0; i < 400; ++i) {
    const bool other = random() % 2 == 0;
    const size_t bytes = i == 0 ? 4 << 20 : 1 + random() % (i % 20 == 0 ? 1 << 20 : 70000);
    const size_t offset = i == 1 ? kBytes - bytes : random() % (kBytes - bytes);
    const absl::Span<const uint8_t> memory = sender_->memory()[other ? 1 : 0];
    reads.push_back({Begin(other ? there : here, offset, bytes), memory.data() + offset, bytes});
    if (reads.size() > 20) expect_next();
  }
  while (!reads.empty()) expect_next();
  EXPECT_TRUE(reader_->idle());
}

TEST_P(UcxMemoryTest, ReadsWaitForStaging) {
  const auto source = Open(0);
  auto first = Begin(source, 0, 3 << 20).get();  // held: of 4 MiB, too much for another
  ASSERT_TRUE(first.ok()) << first.status();
  Read second = Begin(source, 1 << 20, 2 << 20), third = Begin(source, 0, 10);
  EXPECT_FALSE(reader_->idle());
  first->reset();
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(third.get().ok());
  EXPECT_EQ(Begin(source, 0, (4 << 20) + 1).get().status().code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxMemoryTest, PeersComeAndGo) {
  for (int i = 0; i < 20; ++i) {
    auto source = Open(i % 2);
    Read read = Begin(source, 100, 5000);
    if (i % 3 == 0) source.reset();  // perhaps before it is read
    const auto piece = read.get();
    if (i % 3 != 0) {
      EXPECT_TRUE(piece.ok()) << piece.status();
    }
    if (piece.ok()) {
      EXPECT_EQ(std::memcmp((*piece)->bytes().data(), sender_->memory()[i % 2].data() + 100, 5000), 0);
    }
  }
}

TEST_P(UcxMemoryTest, PiecesAndSourcesMayEndLast) {
  auto source = Open(0);
  auto piece = Begin(source, 0, 1000).get();
  ASSERT_TRUE(piece.ok()) << piece.status();
  std::vector<Read> late;
  for (int i = 0; i < 50; ++i) late.push_back(Begin(source, 0, 1 << 20));
  reader_.reset();
  EXPECT_EQ(std::memcmp((*piece)->bytes().data(), sender_->memory()[0].data(), 1000), 0);
  sender_.reset();
}

TEST_P(UcxMemoryTest, WhatIsNotSealedForThisReachesNoUcx) {
  const std::string good = sender_->Describe(0, kHandOff);
  const uint8_t other[] = {1, 2, 4};
  EXPECT_EQ(reader_->Open(Bytes(good), other).status().code(), absl::StatusCode::kUnavailable);
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1 << i % 8);
    EXPECT_EQ(reader_->Open(Bytes(bad), kHandOff).status().code(), absl::StatusCode::kUnavailable) << i;
    EXPECT_EQ(reader_->Open(Bytes(good.substr(0, i)), kHandOff).status().code(), absl::StatusCode::kUnavailable) << i;
  }
  reader_ = *UcxMemory::Create(OptionsOf("another key of 16 bytes"));
  EXPECT_EQ(reader_->Open(Bytes(good), kHandOff).status().code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxMemoryTest, APeerThatIsGoneFails) {
  auto source = Open(0);
  ASSERT_TRUE(Begin(source, 0, 1000).get().ok());
  const std::string gone = sender_->Describe(0, kHandOff);
  sender_.reset();
  // Of an address where nobody is any more; within the time in which UCX notices, and it need not.
  auto again = reader_->Open(Bytes(gone), kHandOff);
  ASSERT_TRUE(again.ok()) << again.status();
  Read read = Begin(*again, 0, 1000), other = Begin(source, 0, 1000);
  source.reset();
  again->reset();  // what nobody wants ends, one way or the other
  read.wait();
  other.wait();
}

const Way kWays[] = {{"Tcp", {{"TLS", "tcp"}, {"NET_DEVICES", "lo"}}},
                     {"SharedMemory", {{"TLS", "posix,cma"}}},
                     {"SharedMemoryByMessages", {{"TLS", "posix"}}},
                     {"TcpAndCma", {{"TLS", "tcp,cma"}, {"NET_DEVICES", "lo"}}}};
INSTANTIATE_TEST_SUITE_P(Ways, UcxMemoryTest, testing::ValuesIn(kWays),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvmanager
