// How likely blocks return, by the kind of run that used them last and by age: learned from the uses so far.
//
// Age counts uses of blocks, not time: it needs no clock, and says the same of a busy tier and of one that idles. Ages
// are in buckets whose bounds grow by kAgeRatio. For each kind and bucket the model counts blocks that got so old
// unused, and those of them that were used again before the next bound: the hazard. A kind's hazards are those of all
// kinds, times one factor for the kind: few numbers to learn, so that rare kinds are not noise. What was counted fades
// by kFade every kEvaluateEvery uses.
//
// The worth of a block is the greatest rate of returns that keeping it for some time buys: over horizons, the
// probability of a return within the horizon, divided by the time that the block stays in memory until then or until
// it returns. That is Gittins' index for a job whose end is the return (Gittins, "Bandit processes and dynamic
// allocation indices", 1979): blocks compete for memory, and the one of the smallest index goes.
//
// Owned by a policy, on its thread. Calls are O(1), but for Advance and Evaluate, which are some 10 and 100 us.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace kvmanager {

class ReturnModel {
 public:
  static constexpr int kKinds = 17;
  static constexpr int kAges = 40;                  // buckets; the last one has no end
  static constexpr double kFirstAge = 256;          // uses: the end of the first bucket
  static constexpr double kAgeRatio = 1.3;          // the last bound is 5.6 million uses
  static constexpr uint32_t kEntriesMax = 1 << 16;  // of 64 uses or more
  static constexpr uint64_t kAdvanceEvery = 64;     // uses
  static constexpr uint64_t kEvaluateEvery = 1024;  // uses
  static constexpr double kFade = 0.995;
  // Of a bucket, as if so many had been seen; the share that has not returned falls as age to the power, times what
  // the buckets before have taught: where nothing returned soon, what is older is hardly believed to return.
  static constexpr double kPriorBlocks = 20, kPriorPower = 0.3;
  static constexpr double kPriorReturns = 50;  // of a kind, as of all
  static constexpr uint32_t kNoEntry = UINT32_MAX;

  ReturnModel();

  /// A block was used at `now`, by a run of `kind`. The entry to remember with it: of blocks used close to each other.
  uint32_t Use(int kind, uint64_t now);
  /// A block of this entry was used again, or is not to be counted any more. Once for each Use; entries that are too
  /// old are ignored.
  void Return(uint32_t entry, uint64_t now);
  void Drop(uint32_t entry);
  /// What has aged since. To be called every kAdvanceEvery uses.
  void Advance(uint64_t now);
  /// The worth of each kind and age, as of what was counted so far. To be called every kEvaluateEvery uses.
  void Evaluate();

  static int AgeOf(uint64_t uses);   // the bucket
  static uint64_t LeastOf(int age);  // the least uses of a bucket
  /// Returns expected per block and use that it stays in memory, from that age on.
  double worth(int kind, int age) const { return worth_[kind][age]; }
  /// Of those that got so old, the share that is used again before the next bound.
  double hazard(int kind, int age) const { return hazard_[kind][age]; }

 private:
  struct Entry {
    uint64_t at = 0;
    uint32_t waiting = 0;  // blocks not used since
    uint8_t kind = 0;
  };
  using Table = std::array<std::array<double, kAges>, kKinds>;
  bool Has(uint32_t entry) const { return entry != kNoEntry && next_ - entry <= entries_.size() && entry < next_; }
  Entry& At(uint32_t entry) { return entries_[entry % kEntriesMax]; }

  std::vector<Entry> entries_;  // a ring
  uint32_t next_ = 0;           // entries ever
  std::array<uint32_t, kKinds> open_;
  std::array<uint32_t, kAges> aged_{};  // [ages] entries before this one have got so old
  Table reached_{}, returned_{}, hazard_{}, worth_{};
};

}  // namespace kvmanager
