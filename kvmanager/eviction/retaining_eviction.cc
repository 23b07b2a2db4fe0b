#include "kvmanager/eviction/retaining_eviction.h"

#include <limits>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

auto RankOf(const Evictable& block) {
  const Retention& retention = block.retention;
  const int64_t end = retention.until_ns() == 0 ? std::numeric_limits<int64_t>::max() : retention.until_ns();
  return std::tuple(retention.priority(), end, block.last_use);
}

auto EndOf(const Evictable& block) { return std::pair(block.retention.until_ns(), block.last_use); }

}  // namespace

void RetainingEviction::Touch(Evictable* block, const EvictionRun* run) {
  const bool is_here = block->evictable && !block->retention.is_of_policy();
  if (is_here) Take(block);
  policy_->Touch(block, run);
  if (is_here) Put(block);
}

void RetainingEviction::Add(Evictable* block) {
  EndSome(block->payer, ends_at_once_);
  Put(block);
}

void RetainingEviction::Remove(Evictable* block) {
  if (block->retention.is_of_policy()) return policy_->Remove(block);
  Take(block);
}

void RetainingEviction::Retain(Evictable* block, Retention retention) {
  KV_CHECK(retention.priority() <= Retention::kPriorityMax);
  if (retention.is_of_policy()) retention = {};
  if (block->retention == retention) return;
  const bool is_evictable = block->evictable;
  if (is_evictable) Remove(block);
  block->retention = retention;
  if (is_evictable) Put(block);
}

void RetainingEviction::Put(Evictable* block) {
  if (block->retention.until_ns() != 0 && block->retention.has_ended(clock_->NowNs())) block->retention = {};
  if (block->retention.is_of_policy()) return policy_->Add(block);
  KV_CHECK(!block->evictable);
  Payer& payer = payers_[block->payer];
  payer.ranks.Add(RankOf(*block), block);
  if (block->retention.until_ns() != 0) {
    payer.ends.Add(EndOf(*block), block);
    NoteNextEnd(block->payer, &payer);
  }
  Count(*block, /*more=*/true);
  block->evictable = true;
}

void RetainingEviction::Take(Evictable* block) {
  const auto of = payers_.find(block->payer);
  KV_CHECK(block->evictable && of != payers_.end());
  Payer& payer = of->second;
  payer.ranks.Remove(RankOf(*block), block);
  if (block->retention.until_ns() != 0) {
    payer.ends.Remove(EndOf(*block), block);
    NoteNextEnd(block->payer, &payer);
  }
  Count(*block, /*more=*/false);
  block->evictable = false;
  if (payer.ranks.empty()) payers_.erase(of);
}

void RetainingEviction::NoteNextEnd(uint32_t id, Payer* payer) {
  const Evictable* const first = payer->ends.First(Of::kAll);
  const int64_t end = first == nullptr ? 0 : first->retention.until_ns();
  if (end == payer->next_end) return;
  if (payer->next_end != 0) next_ends_.erase({payer->next_end, id});
  if (end != 0) next_ends_.emplace(end, id);
  payer->next_end = end;
}

void RetainingEviction::EndFirst(uint32_t payer) {
  Evictable* const block = payers_.find(payer)->second.ends.First(Of::kAll);
  Take(block);
  block->retention = {};
  policy_->Add(block);
}

void RetainingEviction::EndSome(int blocks_max) {
  if (next_ends_.empty()) return;
  const int64_t now = clock_->NowNs();
  for (int i = 0; i < blocks_max && !next_ends_.empty() && next_ends_.begin()->first <= now; ++i) {
    EndFirst(next_ends_.begin()->second);
  }
}

// Those of a payer before others'.
void RetainingEviction::EndSome(uint32_t first_payer, int blocks_max) {
  if (next_ends_.empty()) return;
  const int64_t now = clock_->NowNs();
  for (; blocks_max > 0; --blocks_max) {
    const auto of = payers_.find(first_payer);
    if (of == payers_.end() || of->second.next_end == 0 || of->second.next_end > now) break;
    EndFirst(first_payer);
  }
  EndSome(blocks_max);
}

Evictable* RetainingEviction::LowerableVictim(uint32_t id) {
  EndSome(id, ends_at_once_);
  return policy_->LowerableVictim(id);
}

Evictable* RetainingEviction::Next(uint32_t id, Of which) {
  EndSome(id, ends_at_once_);
  const auto next = [&] {
    if (which == Of::kAll) return policy_->Victim(id);
    return which == Of::kKept ? policy_->KeptVictim(id) : policy_->UnkeptVictim(id);
  };
  const auto of = payers_.find(id);
  if (of == payers_.end()) return next();
  const Payer& payer = of->second;
  Evictable* const first = payer.ranks.First(which);
  // One that has ended and was not noticed, too: it is not worth a walk to the next.
  if (first != nullptr && first->retention.priority() < Retention::kOfPolicy) return first;
  Evictable* const of_policy = next();
  // More have ended than were noticed: the policy might name one of these.
  Evictable* const ended = payer.next_end == 0 ? nullptr : payer.ends.First(which);
  if (ended != nullptr && ended->retention.has_ended(clock_->NowNs()) &&
      (of_policy == nullptr || ended->last_use < of_policy->last_use)) {
    return ended;
  }
  return of_policy != nullptr ? of_policy : first;
}

void RetainingEviction::Count(const Evictable& block, bool more) {
  if (block.retention.priority() < Retention::kOfPolicy) return;
  kept_longer_.blocks += more ? 1 : -1;
  kept_longer_.bytes = more ? kept_longer_.bytes + block.bytes : kept_longer_.bytes - block.bytes;
}

void RetainingEviction::CheckInvariants() const {
  size_t ending = 0;
  for (const auto& [id, payer] : payers_) {
    const Evictable* const first = payer.ends.First(Of::kAll);
    KV_CHECK(!payer.ranks.empty() && payer.next_end == (first == nullptr ? 0 : first->retention.until_ns()));
    const Evictable* const least = payer.ranks.First(Of::kAll);
    KV_CHECK(least->evictable && least->payer == id && !least->retention.is_of_policy());
    if (payer.next_end == 0) continue;
    ++ending;
    KV_CHECK(next_ends_.contains({payer.next_end, id}));
  }
  KV_CHECK(next_ends_.size() == ending);
}

std::unique_ptr<RetainingEviction> MakeRetainingEviction(EvictionKind kind, const Clock* clock) {
  return std::make_unique<RetainingEviction>(MakeEviction(kind), clock);
}

}  // namespace kvmanager
