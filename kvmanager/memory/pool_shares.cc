#include "kvmanager/memory/pool_shares.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

PoolShares::Account* PoolShares::Of(PayerId payer) {
  Account& account = accounts_[payer];
  account.payer = payer;
  return &account;
}

const PoolShares::Account* PoolShares::Find(PayerId payer) const {
  const auto found = accounts_.find(payer);
  return found == accounts_.end() ? nullptr : &found->second;
}

void PoolShares::List(Account* account, bool listed) {
  const uint64_t lacking = LackingSlabs(*account, account->charge);
  if (listed) {
    reserved_slabs_ += lacking;
    if (account->charge > 0) by_excess_.emplace(account->excess(), account);
  } else {
    reserved_slabs_ -= lacking;
    if (account->charge > 0) by_excess_.erase({account->excess(), account});
  }
}

void PoolShares::SetCharge(Account* account, uint64_t charge) {
  List(account, false);
  account->charge = charge;
  List(account, true);
}

void PoolShares::SetQuota(PayerId payer, const PoolQuota& quota) {
  Account* const account = Of(payer);
  List(account, false);
  account->guaranteed_bytes = (quota.guaranteed_bytes + slab_bytes_ - 1) / slab_bytes_ * slab_bytes_;
  account->most_bytes = std::max(quota.most_bytes, account->guaranteed_bytes);
  List(account, true);
}

bool PoolShares::Forget(PayerId payer) {
  const auto found = accounts_.find(payer);
  if (found == accounts_.end()) return true;
  if (found->second.charge > 0) return false;
  List(&found->second, false);
  accounts_.erase(found);
  return true;
}

uint64_t PoolShares::UsableSlabs(uint64_t free, const Account& account, uint64_t charge) const {
  const uint64_t others = ReservedBeside(&account);
  return std::max(free > others ? free - others : 0, std::min(free, LackingSlabs(account, charge)));
}

void PoolShares::CheckInvariants() const {
  uint64_t reserved = 0, charged = 0;
  for (const auto& [payer, account] : accounts_) {
    KV_CHECK(account.payer == payer && account.guaranteed_bytes % slab_bytes_ == 0);
    reserved += LackingSlabs(account, account.charge);
    charged += account.charge > 0;
  }
  KV_CHECK(reserved == reserved_slabs_ && charged == by_excess_.size());
  for (const auto& [excess, account] : by_excess_) KV_CHECK(account->excess() == excess && account->charge > 0);
}

}  // namespace kvmanager
