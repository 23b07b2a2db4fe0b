#include "kvmanager/memory/shown_slabs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

std::optional<SlotPool::SlabPlace> ShownSlabs::Showable(PageId id) const {
  const SlabAllocator::Place place = allocator_.PlaceOf(id);
  if (regions_.empty()) return std::nullopt;
  const SlabBindings bindings(&allocator_);
  if (!bindings.IsShowable(place.slab)) {
    // It is not cut, so it is unclean.
    if (bindings.IsBindable(place.slab)) NoteLacking(bindings.AccountOf(place.slab));
    return std::nullopt;
  }
  return SlotPool::SlabPlace{place.slab, place.offset};
}

bool ShownSlabs::HasOthers(const PoolShares::Account& account) const {
  const auto& payers = allocator_.shares().by_excess();
  return payers.size() > (account.charge > 0 ? 1 : 0) || withheld_ > 0;
}

uint64_t ShownSlabs::MostBeside(const PoolShares::Account& account) const {
  return std::max(allocator_.capacity_bytes() / 2, account.guaranteed_bytes);
}

bool ShownSlabs::MayBind(const PoolShares::Account& account, uint64_t most) const {
  const uint64_t bytes = (account.bound + 1) * allocator_.slab_bytes();
  return bytes <= account.guaranteed_bytes || bytes + withheld_ * allocator_.slab_bytes() <= most;
}

bool ShownSlabs::MayBindFree(const PoolShares::Account& account) const {
  const uint64_t bytes = account.charge + allocator_.slab_bytes();
  return bytes <= account.guaranteed_bytes || bytes + withheld_ * allocator_.slab_bytes() <= account.most_bytes;
}

absl::StatusOr<int> ShownSlabs::Show(uint32_t slab) {
  SlabBindings bindings(&allocator_);
  if (slab >= regions_.size() || !bindings.IsShowable(slab)) {
    return absl::FailedPreconditionError("the slab is not to be mapped");
  }
  if (!bindings.IsBound(slab)) {
    const PoolShares::Account& account = bindings.AccountOf(slab);
    const auto is_too_much = [&] { return HasOthers(account) && !MayBind(account, MostBeside(account)); };
    if (is_too_much()) TakeBack();
    if (is_too_much()) {
      return FieldError(
          absl::StatusCode::kFailedPrecondition, "mapped slabs",
          absl::StrCat((account.bound + withheld_ + 1) * allocator_.slab_bytes(), " bytes of this tenant"),
          absl::StrCat("at most ", MostBeside(account), " while others have memory"));
    }
  }
  KV_ASSIGN_OR_RETURN(const int fd, regions_[slab]->OpenForReading());
  if (!bindings.IsBound(slab)) {
    bindings.Bind(slab);
    Add(slab, /*ahead=*/false);
  }
  return fd;
}

absl::StatusOr<std::vector<uint32_t>> ShownSlabs::Bind(TenantId tenant, uint64_t bytes) {
  KV_ASSIGN_OR_RETURN(Binding binding, BeginBind(tenant, bytes));
  while (BindSome(&binding)) {
  }
  return BoundTo(tenant);
}

absl::StatusOr<ShownSlabs::Binding> ShownSlabs::BeginBind(TenantId tenant, uint64_t bytes) const {
  if (regions_.empty()) return absl::FailedPreconditionError("the memory of this daemon is not to be mapped");
  return Binding{tenant, bytes, NowNs() < quiet_until_ns_ ? 0 : std::min(kBindLooks, shown_.size())};
}

bool ShownSlabs::BindSome(Binding* binding) {
  if (binding->looks > 0) {
    const size_t looks = std::min(kLooksOfPiece, binding->looks);
    LookAt(looks);
    binding->looks -= looks;
    if (binding->looks == 0 && clock_ != nullptr) quiet_until_ns_ = NowNs() + kQuietNs;
    return true;
  }
  const TenantId tenant = binding->tenant;
  SlabBindings bindings(&allocator_);
  uint64_t wanted = binding->bytes / allocator_.slab_bytes();
  for (const Shown& shown : shown_) {
    if (bindings.IsBoundTo(shown.slab, tenant) && wanted > 0) --wanted;
  }
  const auto may_have_more = [&] {
    const PoolShares::Account& account = bindings.AccountOfTenant(tenant);
    const uint64_t most =
        HasOthers(account) ? MostBeside(account)
                           : std::max(allocator_.capacity_bytes() / kParts * kAloneNumerator, account.guaranteed_bytes);
    return wanted > 0 && MayBind(account, most);
  };
  size_t left = kBindsOfPiece;
  const auto add = [&](uint32_t slab) {
    Add(slab, /*ahead=*/true);
    --wanted;
    --left;
  };
  for (uint32_t slab = 0; slab < regions_.size() && left > 0 && may_have_more(); ++slab) {
    if (bindings.IsBound(slab) || !allocator_.IsOf(slab, tenant) || !bindings.IsShowable(slab)) continue;
    bindings.Bind(slab);
    add(slab);
  }
  while (left > 0 && may_have_more() && MayBindFree(bindings.AccountOfTenant(tenant))) {
    const std::optional<uint32_t> slab = bindings.BindFree(tenant);
    if (!slab.has_value()) break;
    add(*slab);
  }
  if (left == 0) return true;
  if (may_have_more()) NoteLacking(bindings.AccountOfTenant(tenant));
  return false;
}

std::vector<uint32_t> ShownSlabs::BoundTo(TenantId tenant) const {
  const SlabBindings bindings(&allocator_);
  std::vector<uint32_t> bound;
  for (const Shown& shown : shown_) {
    if (bindings.IsBoundTo(shown.slab, tenant) && bindings.IsShowable(shown.slab)) bound.push_back(shown.slab);
  }
  return bound;
}

absl::StatusOr<int> ShownSlabs::ShowBound(TenantId tenant, uint32_t slab) {
  SlabBindings bindings(&allocator_);
  if (slab >= regions_.size() || !bindings.IsBoundTo(slab, tenant) || !bindings.IsShowable(slab)) {
    return absl::FailedPreconditionError("the slab is not bound to this tenant");
  }
  KV_ASSIGN_OR_RETURN(const int fd, regions_[slab]->OpenForReading());
  // From now on it has readers.
  std::find_if(shown_.begin(), shown_.end(), [&](const Shown& each) { return each.slab == slab; })->ahead = false;
  return fd;
}

std::vector<uint32_t> ShownSlabs::Recalled(TenantId tenant) {
  std::vector<uint32_t> recalled;
  if (allocator_.free_slabs() >= std::max(1u, allocator_.slabs() / static_cast<uint32_t>(kParts))) return recalled;
  SlabBindings bindings(&allocator_);
  const PoolShares::Account& account = bindings.AccountOfTenant(tenant);
  const uint64_t most = HasOthers(account) ? MostBeside(account) : allocator_.capacity_bytes();
  uint64_t own_bound = account.bound * allocator_.slab_bytes();
  for (size_t looks = shown_.size(); looks > 0 && recalled.size() < kRecallsMax; --looks) {
    if (recall_ >= shown_.size()) recall_ = 0;
    const Shown& shown = shown_[recall_++];
    if (allocator_.InUse(shown.slab) || bindings.IsWithdrawn(shown.slab) || IsRecent(shown)) continue;
    if (bindings.IsBoundTo(shown.slab, tenant)) {
      if (own_bound <= most) continue;
      own_bound -= allocator_.slab_bytes();
    }
    recalled.push_back(shown.slab);
  }
  return recalled;
}

std::optional<uint32_t> ShownSlabs::BeginCleaning() {
  const PoolShares& shares = allocator_.shares();
  const uint64_t reserved = shares.ReservedBeside(shares.Find(lacking_));
  if (allocator_.free_slabs() < reserved + kFreeBesideCleaning + 1) return std::nullopt;
  const std::optional<uint32_t> slab = SlabBindings(&allocator_).WithdrawWritten();
  if (slab.has_value()) ++cleaning_;
  return slab;
}

void ShownSlabs::EndCleaning(uint32_t slab) {
  SlabBindings(&allocator_).Restore(slab);
  --cleaning_;
}

bool ShownSlabs::TakeBackNext() {
  Shown& shown = shown_[look_];
  if ((shown.ahead && IsRecent(shown)) || regions_[shown.slab]->HasReaders()) {
    ++look_;
    return false;
  }
  SlabBindings bindings(&allocator_);
  if (bindings.IsWithdrawn(shown.slab)) {
    bindings.Restore(shown.slab);
    --withheld_;
  } else {
    bindings.Unbind(shown.slab);
  }
  shown = shown_.back();
  shown_.pop_back();
  return true;
}

void ShownSlabs::TakeBack() { LookAt(kLooksMax); }

void ShownSlabs::LookAt(size_t looks) {
  for (looks = std::min(looks, shown_.size()); looks > 0; --looks) {
    if (look_ >= shown_.size()) look_ = 0;
    TakeBackNext();
  }
}

bool ShownSlabs::TakeBackOne() {
  if (allocator_.kept_slabs() <= cleaning_ || NowNs() < quiet_until_ns_) return false;
  size_t looks = kLooksMax;
  for (size_t left = shown_.size(); left > 0 && looks > 0; --left) {
    if (look_ >= shown_.size()) look_ = 0;
    if (allocator_.InUse(shown_[look_].slab)) {
      ++look_;
      continue;
    }
    if (TakeBackNext()) {
      looked_in_vain_ = 0;
      return true;
    }
    --looks;
    ++looked_in_vain_;
  }
  // Who is short of memory asks with each block that it evicts.
  if (clock_ != nullptr && looked_in_vain_ >= allocator_.kept_slabs() - cleaning_) {
    quiet_until_ns_ = NowNs() + kQuietNs;
    looked_in_vain_ = 0;
  }
  return false;
}

void ShownSlabs::FindReaders() {
  SlabBindings bindings(&allocator_);
  for (uint32_t slab = 0; slab < regions_.size(); ++slab) {
    if (!regions_[slab]->HasReaders()) continue;
    if (!allocator_.InUse(slab)) {
      bindings.Withhold(slab);
      ++withheld_;
    } else if (bindings.IsBindable(slab)) {
      bindings.Bind(slab);
    } else {
      continue;  // of several tenants: it was never shown
    }
    Add(slab, /*ahead=*/false);
  }
}

}  // namespace kvmanager
