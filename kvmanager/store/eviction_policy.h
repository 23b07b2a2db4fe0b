// Which published block goes first when memory is short. Names victims; never moves bytes and never changes a state.
//
// Owned by the store, on its thread. It knows exactly the evictable blocks: published, without holders, pins and jobs.
#pragma once

#include <memory>

#include "kvmanager/memory/pool_shares.h"
#include "kvmanager/store/block.h"

namespace kvmanager {

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// `block` was used now. Of a chain, the last block is touched first, so that leaves go before their parents.
  virtual void Touch(Block* block) = 0;
  /// `block` became evictable; its last Touch counts. Until Remove, `kept` stays as it is.
  virtual void Add(Block* block) = 0;
  /// `block` is evictable no more.
  virtual void Remove(Block* block) = 0;
  /// The next to go of those that a payer pays for, or nullptr. It stays known until Remove.
  virtual Block* Victim(PayerId payer) const = 0;
  /// The next to go of those that are not kept elsewhere, or nullptr.
  virtual Block* UnkeptVictim(PayerId payer) const = 0;
};

/// Least recently used first.
std::unique_ptr<EvictionPolicy> MakeLruEviction();

}  // namespace kvmanager
