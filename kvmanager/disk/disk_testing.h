// What tests of the disk share: a loop, blocks with known bytes, a directory that goes.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/block_disk_parts.h"
#include "kvmanager/disk/disk_metrics.h"
#include "kvmanager/disk/rocksdb_tsan.h"
#include "monitoring/metrics.h"

namespace kvmanager::testing {

/// A directory of this test alone, in $TEST_TMPDIR.
class TestFolder {
 public:
  TestFolder() {
    const char* const base = std::getenv("TEST_TMPDIR");
    std::string name = absl::StrCat(base != nullptr ? base : "/tmp", "/disk-XXXXXX");
    KV_CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A block whose name and bytes follow from a number.
struct TestBlock {
  DiskRecord record;
  std::vector<std::vector<uint8_t>> pages;

  std::vector<const uint8_t*> sources() const {
    std::vector<const uint8_t*> sources;
    for (const auto& page : pages) sources.push_back(page.data());
    return sources;
  }
};

inline Digest TestDigest(uint64_t number) { return Sha256({reinterpret_cast<const uint8_t*>(&number), sizeof number}); }

/// pages: 0: of the number; page_bytes_max: the mean is half of it.
inline TestBlock MakeTestBlock(uint64_t cache, uint64_t number, size_t pages = 0, uint32_t page_bytes_max = 20000) {
  std::mt19937_64 random(number * 2654435761 + cache);
  TestBlock block;
  block.record.cache = TestDigest(cache);
  block.record.name = {TestDigest(number * 2), TestDigest(number * 2 + 1)};
  block.record.index = static_cast<uint32_t>(number % 50);
  block.record.tokens = 64;
  if (pages == 0) pages = 1 + random() % 9;
  for (size_t i = 0; i < pages; ++i) {
    std::vector<uint8_t> page(1 + random() % page_bytes_max);
    for (size_t at = 0; at < page.size(); at += 8) {
      const uint64_t word = random();
      std::memcpy(page.data() + at, &word, std::min<size_t>(8, page.size() - at));
    }
    block.record.pages.push_back(
        {static_cast<uint32_t>(page.size()), random() % 3 == 0, Checksum(page.data(), page.size())});
    block.pages.push_back(std::move(page));
  }
  return block;
}

/// The thread of the test as the loop.
class TestLoop {
 public:
  MessageQueue& queue() { return queue_; }
  /// False: it did not happen within a minute or five.
  bool RunUntil(absl::FunctionRef<bool()> done) {
    for (int waited = 0; !done();) {
      if (queue_.RunSome()) continue;
      if (!queue_.PrepareSleep()) continue;
      pollfd fd = {queue_.fd(), POLLIN, 0};
      waited += poll(&fd, 1, 1000) == 0 ? 1 : 0;
      queue_.Awake();
      if (waited > 300) return false;
    }
    return true;
  }

 private:
  MessageQueue queue_;
};

/// A disk, its metrics, and calls that wait.
class TestDisk {
 public:
  TestDisk(TestLoop* loop, BlockDisk::Options options, BlockDiskParts parts = {})
      : loop_(loop), metrics_(&registry_), opened_(OpenBlockDisk(options, parts, &loop->queue(), &metrics_)) {}

  const absl::Status& status() const { return opened_.status(); }
  BlockDisk& operator*() { return **opened_; }
  BlockDisk* operator->() { return opened_->get(); }
  Metrics& registry() { return registry_; }
  DiskMetrics& metrics() { return metrics_; }
  void Close() { opened_ = absl::UnavailableError("closed"); }

  bool Load() {
    return status().ok() && loop_->RunUntil([&] { return (*this)->loaded(); });
  }
  bool Write(const TestBlock& block, absl::string_view payer = "payer") {
    int result = -1;
    (*this)->Write(block.record, payer, block.sources(), [&](bool durable) { result = durable ? 1 : 0; });
    KV_CHECK(loop_->RunUntil([&] { return result >= 0; }));
    return result == 1;
  }
  /// Reads it and compares each page with its checksum, as a reader does: DATA_LOSS.
  absl::Status Read(const TestBlock& block) {
    std::vector<std::vector<uint8_t>> pages;
    std::vector<BlockDisk::Target> targets;
    for (const DiskPage& page : block.record.pages) pages.emplace_back(page.bytes);
    for (auto& page : pages) targets.push_back({page.data(), static_cast<uint32_t>(page.size())});
    absl::StatusOr<std::vector<uint64_t>> result = absl::UnknownError("");
    bool is_done = false;
    (*this)->Read(block.record.cache, block.record.name.key, targets, [&](auto checksums) {
      result = std::move(checksums);
      is_done = true;
    });
    KV_CHECK(loop_->RunUntil([&] { return is_done; }));
    if (!result.ok()) return result.status();
    return Compare(block, *result, pages);
  }
  static absl::Status Compare(const TestBlock& block, const std::vector<uint64_t>& checksums,
                              const std::vector<std::vector<uint8_t>>& pages) {
    for (size_t i = 0; i < pages.size(); ++i) {
      if (Checksum(pages[i].data(), pages[i].size()) != checksums[i]) return absl::DataLossError("checksum");
      if (pages[i] != block.pages[i]) return absl::InternalError("other bytes with the same checksum");
      if (checksums[i] != block.record.pages[i].checksum) return absl::InternalError("other checksum");
    }
    return absl::OkStatus();
  }
  bool Has(const TestBlock& block) {
    const DiskBlock* const found = (*this)->Find(block.record.cache, block.record.name.key);
    if (found == nullptr) return false;
    EXPECT_EQ(found->tokens, block.record.name.tokens);
    EXPECT_EQ(found->index, block.record.index);
    EXPECT_EQ(found->layers, block.record.pages.size());
    for (uint32_t l = 0; l < found->layers; ++l) EXPECT_EQ(found->IsRaw(l), block.record.pages[l].raw);
    return true;
  }

 private:
  TestLoop* const loop_;
  Metrics registry_;
  DiskMetrics metrics_;
  absl::StatusOr<std::unique_ptr<BlockDisk>> opened_;
};

/// Changes one bit of a file, durably.
inline void Flip(const std::string& path, uint64_t at) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  uint8_t byte;
  ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
  byte ^= 4;
  ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
}

/// The host's file system, of which tests change a part.
class RealFiles : public DiskFiles {
 public:
  int Open(const std::string& path, bool create, bool* direct) override { return files_->Open(path, create, direct); }
  void Close(int fd) override { files_->Close(fd); }
  int Sync(int fd) override { return files_->Sync(fd); }
  int SyncFolder(const std::string& path) override { return files_->SyncFolder(path); }
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override { return files_->Reserve(fd, offset, bytes); }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override { return files_->Punch(fd, offset, bytes); }
  int Unlink(const std::string& path) override { return files_->Unlink(path); }
  int Replace(const std::string& path, absl::string_view bytes) override { return files_->Replace(path, bytes); }

 private:
  const std::unique_ptr<DiskFiles> files_ = MakeDiskFiles();
};

}  // namespace kvmanager::testing
