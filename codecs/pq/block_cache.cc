#include "codecs/pq/block_cache.h"

#include <algorithm>
#include <tuple>

#include "kvmanager/base/status.h"

namespace kvmanager::pq {

BlockCache::BlockCache(uint32_t blocks, size_t block_bytes, Parameters::CachePolicy policy)
    : block_bytes_(block_bytes), policy_(policy), slots_(blocks), data_(new uint8_t[blocks * block_bytes]) {
  KV_CHECK(blocks > 0);
  slot_of_.reserve(blocks + 1);
}

const uint8_t* BlockCache::Find(uint64_t block) const {
  const auto found = slot_of_.find(block);
  return found == slot_of_.end() ? nullptr : data_.get() + found->second * block_bytes_;
}

size_t BlockCache::Victim() const {
  size_t victim = slots_.size();
  const auto rank = [this](const Slot& s) {
    return policy_ == Parameters::CachePolicy::kLfu ? std::tuple(s.uses, s.last_call, s.block)
                                                    : std::tuple(s.last_call, uint64_t{0}, s.block);
  };
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.uses == 0) return i;
    if (slot.admitted == call_) continue;
    if (victim == slots_.size() || rank(slot) < rank(slots_[victim])) victim = i;
  }
  return victim;
}

void BlockCache::Update(absl::Span<const Use> uses, absl::FunctionRef<void(uint64_t, uint8_t*)> fill, Counts* counts) {
  ++call_;
  ranked_.clear();
  for (const Use& use : uses) {
    const auto found = slot_of_.find(use.block);
    if (found == slot_of_.end()) {
      counts->misses += use.tokens;
    } else {
      counts->hits += use.tokens;
      ++slots_[found->second].uses;
      slots_[found->second].last_call = call_;
    }
    if (use.may_enter) ranked_.push_back(use);
  }
  const size_t admitted = std::min(ranked_.size(), slots_.size());
  std::partial_sort(ranked_.begin(), ranked_.begin() + admitted, ranked_.end(), [](const Use& a, const Use& b) {
    return std::tuple(b.tokens, a.block) < std::tuple(a.tokens, b.block);
  });
  for (size_t i = 0; i < admitted; ++i) {
    const auto found = slot_of_.find(ranked_[i].block);
    if (found != slot_of_.end()) slots_[found->second].admitted = call_;
  }
  for (size_t i = 0; i < admitted; ++i) {
    const uint64_t block = ranked_[i].block;
    if (slot_of_.contains(block)) continue;
    const size_t at = Victim();
    KV_CHECK(at < slots_.size());
    Slot& slot = slots_[at];
    if (slot.uses != 0) {
      slot_of_.erase(slot.block);
      ++counts->evictions;
    }
    slot = {block, 1, call_, call_};
    slot_of_.emplace(block, at);
    fill(block, data_.get() + at * block_bytes_);
  }
}

}  // namespace kvmanager::pq
