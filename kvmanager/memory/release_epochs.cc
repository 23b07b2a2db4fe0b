#include "kvmanager/memory/release_epochs.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<ReleaseEpochs::HolderId> ReleaseEpochs::AddHolder(const ReleaseCounter* counter) {
  KV_CHECK(counter != nullptr);
  HolderId id;
  if (!free_holders_.empty()) {
    id = free_holders_.back();
    free_holders_.pop_back();
  } else {
    if (holders_.size() == kHoldersMax) {
      return FieldError(absl::StatusCode::kResourceExhausted, "streams that run plans", absl::StrCat(kHoldersMax + 1),
                        absl::StrCat("at most ", kHoldersMax));
    }
    id = static_cast<HolderId>(holders_.size());
    holders_.emplace_back();
    holders_.back().open.resize(kOpenPlansMax);
  }
  Holder& holder = holders_[id];
  holder.counter = counter;
  holder.first = holder.count = 0;
  holder.newest = 0;
  return id;
}

ReleaseEpochs::Holder& ReleaseEpochs::Live(HolderId holder) {
  KV_CHECK(holder < holders_.size() && holders_[holder].counter != nullptr);
  return holders_[holder];
}

uint32_t ReleaseEpochs::open_plans(HolderId holder) const {
  KV_CHECK(holder < holders_.size() && holders_[holder].counter != nullptr);
  return holders_[holder].count;
}

void ReleaseEpochs::RemoveHolder(HolderId holder) {
  Live(holder).counter = nullptr;
  holders_[holder].count = 0;
  free_holders_.push_back(holder);
}

void ReleaseEpochs::ReadCounter(Holder* holder) {
  if (holder->count == 0) return;
  const uint64_t released = holder->counter->released.load(std::memory_order_acquire);
  if (released > holder->newest) return;
  // Only the epoch of a plan releases: a value between two was never given to this holder.
  uint32_t plans = 0;
  while (plans < holder->count && holder->open[(holder->first + plans) % kOpenPlansMax] < released) ++plans;
  if (plans == holder->count || holder->open[(holder->first + plans) % kOpenPlansMax] != released) return;
  ++plans;
  holder->first = (holder->first + plans) % kOpenPlansMax;
  holder->count -= plans;
}

bool ReleaseEpochs::HasRoom(HolderId id) {
  Holder& holder = Live(id);
  if (holder.count == kOpenPlansMax) ReadCounter(&holder);
  return holder.count < kOpenPlansMax;
}

absl::StatusOr<uint64_t> ReleaseEpochs::OpenPlan(HolderId id) {
  Holder& holder = Live(id);
  if (!HasRoom(id)) {
    return FieldError(absl::StatusCode::kResourceExhausted, "unreleased plans of one stream",
                      absl::StrCat(kOpenPlansMax + 1), absl::StrCat("at most ", kOpenPlansMax));
  }
  holder.newest = ++newest_epoch_;
  holder.open[(holder.first + holder.count) % kOpenPlansMax] = holder.newest;
  ++holder.count;
  return holder.newest;
}

void ReleaseEpochs::Retire(PageId slot) { retired_.push_back(Retired{slot, newest_epoch_}); }

void ReleaseEpochs::Collect(std::vector<PageId>* reusable) {
  if (retired_.empty()) return;
  uint64_t oldest = UINT64_MAX;
  for (Holder& holder : holders_) {
    if (holder.counter == nullptr) continue;
    ReadCounter(&holder);
    if (holder.count > 0) oldest = std::min(oldest, holder.oldest());
  }
  while (!retired_.empty() && retired_.front().epoch < oldest) {
    reusable->push_back(retired_.front().slot);
    retired_.pop_front();
  }
}

}  // namespace kvmanager
