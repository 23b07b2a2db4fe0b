// Binds slabs of a SlabAllocator to their tenants: processes of a tenant may map such a slab, so it stays that tenant's
// while it is free too, and is never cut. A view: made for a call, and not kept.
//
// A bound slab is in use, or free for its tenant alone, or withdrawn: nobody's, until its memory is as new.
#pragma once

#include <cstdint>
#include <optional>

#include "kvmanager/memory/slab_allocator.h"

namespace kvmanager {

class SlabBindings {
 public:
  using Account = PoolShares::Account;

  explicit SlabBindings(SlabAllocator* of) : of_(*of) {}

  /// Whether others may be shown all of a slab's bytes as its tenant's: it is not cut, clean, and in use or bound.
  bool IsShowable(uint32_t slab) const {
    const SlabAllocator::Slab& at = of_.slabs_[slab];
    return at.area.in_use ? at.area.unclean.empty() : at.bound && !at.withdrawn && at.area.tenant != kSeveral;
  }
  bool IsBound(uint32_t slab) const { return of_.slabs_[slab].bound; }
  bool IsBoundTo(uint32_t slab, TenantId tenant) const {
    return IsBound(slab) && !IsWithdrawn(slab) && of_.slabs_[slab].area.tenant == tenant;
  }
  bool IsBindable(uint32_t slab) const { return of_.slabs_[slab].area.in_use; }
  bool IsWithdrawn(uint32_t slab) const { return of_.slabs_[slab].withdrawn; }
  /// The payer of a slab that is in use and not cut, or bound and not withdrawn.
  const Account& AccountOf(uint32_t slab) const { return *of_.slabs_[slab].area.account; }
  const Account& AccountOfTenant(TenantId tenant) const { return of_.AccountOf(tenant); }

  /// Binds a slab that is in use and not cut, or bound already, to its tenant.
  void Bind(uint32_t slab);
  /// Binds a slab that is free to a tenant: one that nobody else has written since it was cleaned, and that Allocate
  /// could give it, which gives it first from now on. Nothing: there is none.
  std::optional<uint32_t> BindFree(TenantId tenant);
  /// A bound slab that is not withdrawn, in use or free, is as if it never was bound: its bytes are its tenant's still.
  void Unbind(uint32_t slab);
  /// Takes a bound slab that is free away from its tenant; nobody can use it.
  void Withdraw(uint32_t slab);
  /// The same of a slab that is free and not bound.
  void Withhold(uint32_t slab);
  /// The same of a free slab that a tenant wrote, the last that would be used, to be cleaned. Nothing: there is none.
  std::optional<uint32_t> WithdrawWritten();
  /// Gives a withdrawn slab, whose bytes are nobody's now, to whoever asks; of one that was withheld they are as
  /// before.
  void Restore(uint32_t slab);

 private:
  static constexpr TenantId kSeveral = SlabAllocator::kSeveral;

  SlabAllocator& of_;
};

}  // namespace kvmanager
