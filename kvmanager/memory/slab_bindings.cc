#include "kvmanager/memory/slab_bindings.h"

#include <algorithm>
#include <iterator>

#include "kvmanager/base/status.h"

namespace kvmanager {

void SlabBindings::Bind(uint32_t slab) {
  KV_CHECK(slab < of_.slabs_.size());
  SlabAllocator::Slab& at = of_.slabs_[slab];
  KV_CHECK(!at.withdrawn && at.cut == nullptr && (at.area.in_use || at.bound));
  if (at.bound) return;
  of_.Count({slab, 0, 0}, false);
  at.bound = true;
  ++at.area.account->bound;
  of_.Count({slab, 0, 0}, true);
}

std::optional<uint32_t> SlabBindings::BindFree(TenantId tenant) {
  PoolShares::Account* const account = of_.shares_.Of(of_.PayerOf(tenant));
  const SlabAllocator::Room room = of_.RoomNow(tenant, *account);
  if (room.slabs == 0 || room.bytes < of_.slab_bytes_) return std::nullopt;
  // The last is what is taken next.
  const auto found = std::find_if(of_.free_slabs_.rbegin(), of_.free_slabs_.rend(), [&](uint32_t slab) {
    const SlabAllocator::Area& area = of_.slabs_[slab].area;
    return !area.written || area.tenant == tenant;
  });
  if (found == of_.free_slabs_.rend()) return std::nullopt;
  const uint32_t slab = *found;
  of_.free_slabs_.erase(std::next(found).base());
  SlabAllocator::Slab& at = of_.slabs_[slab];
  at.area.tenant = tenant;
  at.area.account = account;
  at.bound = true;
  ++account->bound;
  of_.shares_.Add(account, of_.slab_bytes_);
  of_.kept_free_[tenant].push_back(slab);
  ++of_.kept_slabs_;
  return slab;
}

void SlabBindings::Unbind(uint32_t slab) {
  KV_CHECK(slab < of_.slabs_.size() && of_.slabs_[slab].bound && !of_.slabs_[slab].withdrawn);
  SlabAllocator::Slab& at = of_.slabs_[slab];
  --at.area.account->bound;
  if (at.area.in_use) {
    of_.Count({slab, 0, 0}, false);
    at.bound = false;
    return of_.Count({slab, 0, 0}, true);
  }
  of_.TakeKept(slab);
  --of_.kept_slabs_;
  at.bound = false;
  of_.shares_.Remove(at.area.account, of_.slab_bytes_);
  at.area.account = nullptr;
  of_.free_slabs_.push_back(slab);
}

void SlabBindings::Withdraw(uint32_t slab) {
  KV_CHECK(slab < of_.slabs_.size() && of_.slabs_[slab].bound && !of_.slabs_[slab].area.in_use);
  SlabAllocator::Slab& at = of_.slabs_[slab];
  KV_CHECK(!at.withdrawn);
  of_.TakeKept(slab);
  at.withdrawn = true;
  --at.area.account->bound;
  of_.shares_.Remove(at.area.account, of_.slab_bytes_);
  at.area.account = nullptr;
}

void SlabBindings::Withhold(uint32_t slab) {
  const auto free = std::find(of_.free_slabs_.begin(), of_.free_slabs_.end(), slab);
  KV_CHECK(free != of_.free_slabs_.end());
  of_.free_slabs_.erase(free);
  of_.slabs_[slab].bound = of_.slabs_[slab].withdrawn = of_.slabs_[slab].withheld = true;
  ++of_.kept_slabs_;
}

std::optional<uint32_t> SlabBindings::WithdrawWritten() {
  const auto written = std::find_if(of_.free_slabs_.begin(), of_.free_slabs_.end(),
                                    [&](uint32_t slab) { return of_.slabs_[slab].area.written; });
  if (written == of_.free_slabs_.end()) return std::nullopt;
  const uint32_t slab = *written;
  of_.free_slabs_.erase(written);
  of_.slabs_[slab].bound = of_.slabs_[slab].withdrawn = true;
  ++of_.kept_slabs_;
  return slab;
}

void SlabBindings::Restore(uint32_t slab) {
  KV_CHECK(slab < of_.slabs_.size() && of_.slabs_[slab].withdrawn);
  SlabAllocator::Slab& at = of_.slabs_[slab];
  if (!at.withheld) at.area.written = false;
  at.withdrawn = at.bound = at.withheld = false;
  --of_.kept_slabs_;
  of_.free_slabs_.push_back(slab);
}

}  // namespace kvmanager
