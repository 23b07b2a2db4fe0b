// Interface of the policies that choose which published block goes first when memory is short.
//
// A policy names victims; it never moves bytes and never changes a block's state. It knows exactly the evictable blocks
// of one tier: published, without holders, pins and jobs. The store owns one for each tier, and `kvctl simulate` runs
// the same classes on traces. One thread; no call takes longer than O(log n) of the blocks, and a bounded piece of
// upkeep.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// What a client wants of a block: that it is kept longer, or less long, than the policy would keep it
/// (retaining_eviction.h).
struct Retention {
  static constexpr uint8_t kOfPolicy = 50;  // the policy decides
  static constexpr uint8_t kPriorityMax = 100;

  Retention() = default;
  /// until_ns: of the policy's clock, rounded up to a microsecond; 0: no end.
  Retention(uint8_t priority, int64_t until_ns)
      : until_us_(static_cast<uint64_t>((until_ns + 999) / 1000)), priority_(priority) {}

  /// Below kOfPolicy it goes before all others, above behind them.
  uint8_t priority() const { return priority_; }
  /// From then on the policy decides; 0: no end.
  int64_t until_ns() const { return static_cast<int64_t>(until_us_) * 1000; }
  bool is_of_policy() const { return priority_ == kOfPolicy; }
  bool has_ended(int64_t now_ns) const { return until_us_ != 0 && until_ns() <= now_ns; }
  bool operator==(const Retention&) const = default;

 private:
  uint64_t until_us_ : 56 = 0;
  uint64_t priority_ : 8 = kOfPolicy;
};

/// What a policy knows of a block. The store's Block is one.
struct Evictable {
  /// The policy's own notes.
  struct Notes {
    uint64_t order = 0;            // place in a queue
    uint32_t entry = UINT32_MAX;   // of a ReturnModel; UINT32_MAX: none
    uint8_t kind = 1;              // what sort of run used it last
    uint8_t from_end = UINT8_MAX;  // blocks behind it in that run
    uint8_t frequency = 0;
    uint8_t queue = 0;
  };

  uint64_t id = 0;        // of its name, uniformly distributed: what is remembered of it when it is gone
  uint64_t bytes = 0;     // of its slots
  uint64_t last_use = 0;  // order of uses: a parent's is above its children's
  Notes notes;
  Retention retention;     // RetainingEviction's: changed by its Retain alone while the block is evictable
  uint32_t index = 0;      // place in its sequence
  uint32_t payer = 0;      // PayerId: who pays for it
  uint32_t tokens = 0;     // of a block: it begins at token index * tokens
  bool evictable = false;  // the policy has it
  bool kept = false;       // the next lower tier had a copy when it was last looked for
  bool can_lower = false;  // it could be encoded again in fewer bytes (Codec::rung)

  /// This is a copy of `other` in another tier, is used alike and retained alike. Not of one that is evictable.
  void CopyUse(const Evictable& other) {
    notes.kind = other.notes.kind;
    notes.from_end = other.notes.from_end;
    if (!other.retention.is_of_policy()) retention = other.retention;
  }
};

/// What is known of one use of a chain of blocks by one sequence: it begins with the first block that was asked for and
/// ends when the blocks are given back. A value of the sequence.
struct EvictionRun {
  uint32_t blocks = 0;  // that the policy was told of
  uint32_t fresh = 0;   // of them, those behind the ones that it had seen before
  uint32_t last = 0;    // place of the last one
  bool later = false;   // it goes on where an earlier run had ended: the next turn of a conversation
};

enum class EvictionKind : uint8_t { kLru = 0, kS3Fifo, kCost };
/// "lru", "s3fifo", "cost". Errors: INVALID_ARGUMENT naming `field`.
absl::StatusOr<EvictionKind> ParseEvictionKind(absl::string_view field, absl::string_view text);
const char* EvictionKindName(EvictionKind kind);

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// A run begins with `block`, or goes on with it: it was found by its name. Of a chain, parents first.
  virtual void Found(EvictionRun* run, Evictable* block) = 0;
  /// `block` was given its name, behind what `run` has. run: nullptr: nothing is known of it.
  virtual void Named(EvictionRun* run, Evictable* block) = 0;
  /// `block` was used now. Of a chain, the last block is touched first, so that leaves go before their parents. run:
  /// what used it; nullptr: what is known of its last use stays.
  virtual void Touch(Evictable* block, const EvictionRun* run) = 0;
  /// `block` became evictable; its last Touch counts. Until Remove, `kept`, `can_lower`, `payer` and `bytes` stay as
  /// they are.
  virtual void Add(Evictable* block) = 0;
  /// `block` is evictable no more.
  virtual void Remove(Evictable* block) = 0;
  /// `block`, which is evictable, is going to lose its memory: it may be remembered by its id.
  virtual void Evicted(const Evictable& block) = 0;
  /// The next to go of those that a payer pays for, or nullptr. It stays known until Remove.
  virtual Evictable* Victim(uint32_t payer) = 0;
  /// The next to go of those that are kept elsewhere, or are not, or nullptr.
  virtual Evictable* KeptVictim(uint32_t payer) = 0;
  virtual Evictable* UnkeptVictim(uint32_t payer) = 0;
  /// The next to go of those that could be lowered instead, or nullptr.
  virtual Evictable* LowerableVictim(uint32_t payer) = 0;
};

/// The policy itself; that of a tier is a RetainingEviction around it.
std::unique_ptr<EvictionPolicy> MakeEviction(EvictionKind kind);

}  // namespace kvmanager
