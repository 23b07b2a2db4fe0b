// Random operations on a disk against a model: while nothing fails, while calls fail, across restarts and power cuts.
//
// The seed is printed; KVMANAGER_DISK_SEED sets it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/disk_state.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/power_cut_testing.h"

namespace kvmanager::testing {
namespace {

#ifdef KVMANAGER_SANITIZED
constexpr int kSteps = 2500, kCuts = 20;
#else
constexpr int kSteps = 6000, kCuts = 60;
#endif
constexpr int kCaches = 3, kNumbers = 300;

uint64_t Seed() {
  const char* const text = std::getenv("KVMANAGER_DISK_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  std::printf("KVMANAGER_DISK_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

class Walk {
 public:
  Walk(uint64_t seed, bool threads, uint32_t page_bytes_max) : random_(seed), page_bytes_max_(page_bytes_max) {
    options_.directory = folder_.path() + "/d";
    options_.bytes = uint64_t{64} << 20;
    options_.eviction = static_cast<EvictionKind>(seed % 3);
    parts_.clock = &clock_;
    make_io_ = threads ? MakeThreadIo : MakeUringIo;
    parts_.make_io = make_io_;
  }

  void UsePower(PowerCut* power) {
    power_ = power;
    parts_.make_io = [this] { return power_->WrapIo(make_io_()); };
    parts_.files = power->files();
    parts_.index_files = power->file_system();
  }

  void Open() {
    disk_ = std::make_unique<TestDisk>(&loop_, options_, parts_);
    ASSERT_TRUE(disk_->Load()) << disk_->status();
    is_made_anew_ = disk_->metrics().errors("index").Value() > 0;
    ASSERT_TRUE(loop_.RunUntil([&] { return (*disk_)->use().used_bytes <= (*disk_)->use().capacity_bytes; }));
    failed_.clear();
    (*disk_)->OnGone([this](const CacheDigest& cache, const BlockKey& key, DiskLoss) {
      const auto found = names_.find({cache, key});
      ASSERT_TRUE(found != names_.end());
      EXPECT_EQ(there_.erase(found->second), 1u) << "was not there";
      may_be_.insert(found->second);
      failed_.erase(found->second);
    });
  }
  // All that is on its way ends.
  void Settle() {
    ASSERT_TRUE(loop_.RunUntil([&] { return (*disk_)->use().writing_bytes == 0 && reads_ == 0; }));
  }
  void Close() {
    ASSERT_NO_FATAL_FAILURE(Settle());
    disk_->Close();
    may_be_.clear();
  }
  // Of an index that nobody has open: some file of it, or all. subtle: also what only its seal tells of, behind an end
  // that was none of power.
  void DamageIndex(bool subtle) {
    const std::filesystem::path index = options_.directory + "/index";
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(index)) {
      const std::string name = entry.path().filename();
      const bool is_found = name == "CURRENT" || name.starts_with("MANIFEST");
      if (entry.file_size() > 0 && (is_found || (subtle && name.ends_with(".log")))) files.push_back(entry.path());
    }
    if (files.empty()) return;
    std::sort(files.begin(), files.end());
    const std::filesystem::path& file = files[random_() % files.size()];
    const uint64_t at = random_() % std::filesystem::file_size(file), how = random_() % (subtle ? 4 : 2);
    if (how == 0) std::filesystem::remove_all(index);
    if (how == 1) std::filesystem::remove(file);
    if (how == 2) std::filesystem::resize_file(file, at);
    if (how == 3) {
      std::fstream of(file, std::ios::in | std::ios::out | std::ios::binary);
      of.seekg(static_cast<std::streamoff>(at));
      const char byte = static_cast<char>(of.get() ^ 16);
      of.seekp(static_cast<std::streamoff>(at));
      of.put(byte);
    }
  }
  void CloseCut() {
    power_->Cut();
    disk_->Close();
    on_way_.clear();
    reads_ = 0;
    power_->Lose();
  }
  // Exactly what is there is there.
  void CheckAll() {
    clock_.AdvanceNs(FailedReads::kNs);
    failed_.clear();
    EXPECT_EQ((*disk_)->use().blocks, there_.size());
    for (const int number : there_) {
      const TestBlock block = Block(number);
      ASSERT_TRUE(disk_->Has(block)) << number;
      const absl::Status status = disk_->Read(block);
      ASSERT_TRUE(status.ok()) << number << ": " << status;
    }
    (*disk_)->CheckInvariants();
  }
  // Behind a power cut: all that was there, and perhaps what was on its way, or going, whole. An index that was made
  // anew also has what was torn on its way, until it is read, and what was evicted, which may be too much.
  void CheckCut() {
    const bool was_too_much = disk_->metrics().evicted_blocks.Value() > 0;
    for (int number = 0; number < kCaches * kNumbers; ++number) {
      const TestBlock block = Block(number);
      EXPECT_FALSE(purged_.contains(number) && disk_->Has(block)) << number << " was purged";
      if (!disk_->Has(block)) {
        EXPECT_TRUE(there_.count(number) == 0 || (is_made_anew_ && was_too_much)) << number << " is lost";
        there_.erase(number);
        continue;
      }
      const absl::Status status = disk_->Read(block);
      if (absl::IsDataLoss(status) && is_made_anew_ && there_.count(number) == 0) {
        there_.insert(number);
        (*disk_)->Erase(block.record.cache, block.record.name.key);
        continue;
      }
      EXPECT_TRUE(status.ok()) << number << (there_.count(number) != 0 ? " was durable: " : ": ") << status;
      there_.insert(number);
    }
    may_be_.clear();
    (*disk_)->CheckInvariants();
  }

  void Step() {
    const int number = static_cast<int>(random_() % (kCaches * kNumbers));
    const TestBlock block = Block(number);
    const CacheDigest& cache = block.record.cache;
    const BlockKey& key = block.record.name.key;
    const uint64_t what = random_() % 1000;
    if (what < 500) {
      if (there_.count(number) != 0 || on_way_.count(number) != 0 || !(*disk_)->CanWrite(Bytes(block))) return;
      auto kept = std::make_shared<TestBlock>(block);
      const int turn = on_way_[number] = written_[number] = ++turns_;
      purged_.erase(number);
      names_[{cache, key}] = number;
      (*disk_)->Write(block.record, std::to_string(random_() % 4), kept->sources(), [=, this](bool durable) {
        const bool erased = on_way_.count(number) == 0 || on_way_[number] != turn;
        if (erased) {
          EXPECT_FALSE(durable);
          return;
        }
        on_way_.erase(number);
        if (durable) there_.insert(number);
        if (!durable) may_be_.insert(number);
        EXPECT_EQ(disk_->Has(*kept), durable);
      });
    } else if (what < 800) {
      const auto failed = failed_.find(number);
      const bool is_found = failed == failed_.end() || clock_.NowNs() >= failed->second;
      EXPECT_EQ(disk_->Has(block), there_.count(number) != 0 && is_found) << number;
      if (what < 650 || reads_ > 20) return;
      StartRead(number, block);
    } else if (what < 880) {
      on_way_.erase(number);
      (*disk_)->Erase(cache, key);
      EXPECT_FALSE(disk_->Has(block));
    } else if (what < 884) {
      for (auto it = on_way_.begin(); it != on_way_.end();) {
        it = it->first % kCaches == number % kCaches ? on_way_.erase(it) : std::next(it);
      }
      size_t expected = 0;
      for (const int each : there_) expected += each % kCaches == number % kCaches ? 1 : 0;
      EXPECT_EQ((*disk_)->EraseCache(cache), expected);
      NotePurge(number % kCaches);
    } else if (what < 886) {
      on_way_.clear();
      const size_t expected = there_.size();
      EXPECT_EQ((*disk_)->EraseAll(), expected);
      EXPECT_EQ((*disk_)->use().blocks, 0u);
      for (int of = 0; of < kCaches; ++of) NotePurge(of);
    } else if (what < 950) {
      std::vector<BlockName> names;
      for (int i = number; i < number + 30; i += kCaches) names.push_back(Block(i).record.name);
      (*disk_)->NoteUse(cache, names);
    } else if (what < 960) {
      clock_.AdvanceNs(static_cast<int64_t>(random_() % 3000000000));
    } else {
      int looked = 0;
      ASSERT_TRUE(loop_.RunUntil([&] { return ++looked > 3 || (on_way_.empty() && reads_ == 0); }));
    }
    loop_.queue().RunSome();
    (*disk_)->CheckInvariants();
    EXPECT_EQ((*disk_)->use().blocks, there_.size());
    EXPECT_LE((*disk_)->use().used_bytes, (*disk_)->use().capacity_bytes);
  }

  std::mt19937_64& random() { return random_; }

 private:
  // What is not written again must not come back once that is answered.
  void NotePurge(int of) {
    (*disk_)->WhenErased([this, of, turn = turns_](const absl::Status& status) {
      if (!status.ok()) return;
      for (int number = of; number < kCaches * kNumbers; number += kCaches) {
        if (written_[number] <= turn) purged_.insert(number);
      }
    });
  }
  TestBlock Block(int number) { return MakeTestBlock(number % kCaches, number, 0, page_bytes_max_); }
  static uint64_t Bytes(const TestBlock& block) {
    uint64_t bytes = 0;
    for (const DiskPage& page : block.record.pages) bytes += page.bytes;
    return bytes;
  }
  void StartRead(int number, const TestBlock& block) {
    auto kept = std::make_shared<TestBlock>(block);
    auto pages = std::make_shared<std::vector<std::vector<uint8_t>>>();
    std::vector<BlockDisk::Target> targets;
    for (const DiskPage& page : block.record.pages) pages->emplace_back(page.bytes);
    for (auto& page : *pages) targets.push_back({page.data(), static_cast<uint32_t>(page.size())});
    ++reads_;
    const bool was_there = there_.count(number) != 0;
    (*disk_)->Read(block.record.cache, block.record.name.key, targets, [=, this](auto checksums) {
      --reads_;
      if (checksums.ok()) {
        const absl::Status status = TestDisk::Compare(*kept, *checksums, *pages);
        EXPECT_TRUE(status.ok()) << number << ": " << status;
        EXPECT_TRUE(was_there);
        failed_.erase(number);
        return;
      }
      // Erased meanwhile, or an error that was injected: never a loss.
      EXPECT_FALSE(absl::IsDataLoss(checksums.status())) << number << ": " << checksums.status();
      if (absl::IsUnavailable(checksums.status())) {
        EXPECT_TRUE(may_fail_ || power_ != nullptr) << checksums.status();
        failed_[number] = clock_.NowNs() + FailedReads::kNs;
      }
    });
  }

 public:
  bool may_fail_ = false;

 private:
  std::mt19937_64 random_;
  const uint32_t page_bytes_max_;
  TestFolder folder_;
  TestLoop loop_;
  ManualClock clock_;
  BlockDisk::Options options_;
  BlockDiskParts parts_;
  std::function<std::unique_ptr<DiskIo>()> make_io_;
  PowerCut* power_ = nullptr;
  std::unique_ptr<TestDisk> disk_;
  std::map<std::pair<CacheDigest, BlockKey>, int> names_;
  std::set<int> there_;            // durable, and not gone
  std::set<int> may_be_;           // gone, but perhaps not durably
  std::map<int, int> on_way_;      // and in which turn
  std::map<int, int> written_;     // in which turn last
  std::set<int> purged_;           // durably, and not written again
  std::map<int, int64_t> failed_;  // that could not be read, and until when they are not found
  int turns_ = 0, reads_ = 0;
  bool is_made_anew_ = false;  // the index, when it was opened
};

class BlockDiskRandomTest : public ::testing::TestWithParam<bool> {
 protected:
  ~BlockDiskRandomTest() override { KV_CHECK(SetFailpoints("").ok()); }
};
INSTANTIATE_TEST_SUITE_P(Io, BlockDiskRandomTest, ::testing::Bool(),
                         [](const auto& of) { return std::string(of.param ? "Threads" : "Uring"); });

// Blocks of 50 KiB in the mean: some hundred fill the disk.
TEST_P(BlockDiskRandomTest, AgainstAModel) {
  const uint64_t seed = Seed();
  for (const bool small : {false, true}) {
    Walk walk(seed, GetParam(), small ? 3000 : 60000);
    ASSERT_NO_FATAL_FAILURE(walk.Open());
    for (int i = 0; i < kSteps; ++i) {
      ASSERT_NO_FATAL_FAILURE(walk.Step());
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", step " << i;
      if (walk.random()() % 700 != 0) continue;
      ASSERT_NO_FATAL_FAILURE(walk.Close());
      if (walk.random()() % 2 == 0) walk.DamageIndex(/*subtle=*/true);
      ASSERT_NO_FATAL_FAILURE(walk.Open());
      ASSERT_NO_FATAL_FAILURE(walk.CheckAll());
    }
    ASSERT_NO_FATAL_FAILURE(walk.Close());
  }
}

TEST_P(BlockDiskRandomTest, WhileCallsFail) {
  const uint64_t seed = Seed();
  Walk walk(seed, GetParam(), 40000);
  walk.may_fail_ = true;
  ASSERT_NO_FATAL_FAILURE(walk.Open());
  for (int i = 0; i < kSteps; ++i) {
    if (i % 200 == 0) {
      ASSERT_NO_FATAL_FAILURE(walk.Settle());  // no thread passes a failpoint while they are set
      ASSERT_TRUE(
          SetFailpoints(
              i % 400 == 0 ? "" : absl::StrCat("disk.write=1/30,disk.read=1/50,disk.sync=1/20,seed=", seed % 1000 + i))
              .ok());
    }
    ASSERT_NO_FATAL_FAILURE(walk.Step());
    ASSERT_FALSE(HasFailure()) << "seed " << seed << ", step " << i;
    if (walk.random()() % 700 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(walk.Close());
    ASSERT_TRUE(SetFailpoints("").ok());
    ASSERT_NO_FATAL_FAILURE(walk.Open());
    ASSERT_NO_FATAL_FAILURE(walk.CheckAll());
  }
  ASSERT_NO_FATAL_FAILURE(walk.Close());
}

TEST_P(BlockDiskRandomTest, PowerCuts) {
  const uint64_t seed = Seed();
  PowerCut power(seed + 1, /*error_every=*/seed % 2 == 0 ? 0 : 60);
  Walk walk(seed, GetParam(), 30000);
  walk.UsePower(&power);
  ASSERT_NO_FATAL_FAILURE(walk.Open());
  for (int cut = 0; cut < kCuts; ++cut) {
    const uint64_t steps = walk.random()() % 150;
    for (uint64_t i = 0; i < steps; ++i) ASSERT_NO_FATAL_FAILURE(walk.Step());
    ASSERT_FALSE(HasFailure()) << "seed " << seed << ", cut " << cut;
    ASSERT_NO_FATAL_FAILURE(walk.CloseCut());
    if (walk.random()() % 3 == 0) walk.DamageIndex(/*subtle=*/false);
    ASSERT_NO_FATAL_FAILURE(walk.Open());
    ASSERT_NO_FATAL_FAILURE(walk.CheckCut());
    ASSERT_FALSE(HasFailure()) << "seed " << seed << ", cut " << cut;
  }
}

// RocksDB writes no more after an error of its log: it is opened anew. Removals that failed are made up for.
TEST_P(BlockDiskRandomTest, TheIndexFailsForAWhile) {
  TestFolder folder;
  TestLoop loop;
  ManualClock clock;
  PowerCut power(1);
  BlockDisk::Options options;
  options.directory = folder.path() + "/d";
  options.bytes = BlockDisk::kBytesMin;
  BlockDiskParts parts;
  parts.clock = &clock;
  parts.make_io = GetParam() ? MakeThreadIo : MakeUringIo;
  parts.index_files = power.file_system();
  const TestBlock before = MakeTestBlock(1, 1), erased = MakeTestBlock(1, 2);
  {
    TestDisk disk(&loop, options, parts);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(disk.Write(before));
    ASSERT_TRUE(disk.Write(erased));
    for (int failure = 0; failure < 3; ++failure) {
      power.FailIndex(true);
      const TestBlock block = MakeTestBlock(1, 10 + failure);
      EXPECT_FALSE(disk.Write(block));
      EXPECT_FALSE(disk->CanWrite(1));
      if (failure == 1) disk->Erase(erased.record.cache, erased.record.name.key);
      EXPECT_TRUE(disk.Read(before).ok());
      power.FailIndex(false);
      clock.AdvanceNs(60000000000);
      ASSERT_TRUE(disk->CanWrite(1));
      ASSERT_TRUE(disk.Write(MakeTestBlock(1, 20 + failure)));
      disk->CheckInvariants();
    }
    EXPECT_GE(disk.metrics().errors("index").Value(), 3.0);
  }
  TestDisk disk(&loop, options, parts);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_TRUE(disk.Read(before).ok());
  EXPECT_FALSE(disk.Has(erased));
  for (int failure = 0; failure < 3; ++failure) {
    EXPECT_FALSE(disk.Has(MakeTestBlock(1, 10 + failure)));
    EXPECT_TRUE(disk.Read(MakeTestBlock(1, 20 + failure)).ok());
  }
  EXPECT_EQ(disk->use().blocks, 4u);
}

}  // namespace
}  // namespace kvmanager::testing
