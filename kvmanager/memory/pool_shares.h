// Who pays for the slabs of a pool: what each payer has, is guaranteed and may have at most. A SlabAllocator owns one
// and tells it what it hands out. Single-threaded.
//
// A payer's excess is what it has beyond its guarantee. Memory goes from the payer with the largest excess to those
// with less, never the other way (max-min fairness): so nobody loses what is within its guarantee and an equal part of
// the rest.
//
// Invariants: 1. charge is the sum of a payer's areas: those in use, and slabs that are bound to its tenants.
// 2. by_excess_ has exactly the payers with a charge. 3. reserved_slabs_ is the sum of what guarantees still lack.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>

#include "absl/container/node_hash_map.h"

namespace kvmanager {

/// The number of whoever pays for a tenant's memory, in a pool; the store hands them out.
using PayerId = uint32_t;

/// Of one pool. Guarantees are rounded up to whole slabs; the sum of all must fit the pool.
struct PoolQuota {
  uint64_t guaranteed_bytes = 0;
  uint64_t most_bytes = UINT64_MAX;
  friend bool operator==(const PoolQuota&, const PoolQuota&) = default;
};

class PoolShares {
 public:
  static constexpr size_t kSizes = 3;  // of areas: slabs, and small slabs of two sizes

  struct Account {
    PayerId payer = 0;
    uint64_t guaranteed_bytes = 0;  // whole slabs
    uint64_t most_bytes = UINT64_MAX;
    uint64_t charge = 0;
    std::array<uint32_t, kSizes> reclaimable{};  // areas, not bound, of which every slot in use is reclaimable
    uint32_t bound = 0;                          // slabs, withdrawn ones not
    int64_t excess() const { return static_cast<int64_t>(charge) - static_cast<int64_t>(guaranteed_bytes); }
  };

  explicit PoolShares(uint64_t slab_bytes) : slab_bytes_(slab_bytes) {}

  Account* Of(PayerId payer);  // made where there is none; stays where it is
  const Account* Find(PayerId payer) const;
  void SetQuota(PayerId payer, const PoolQuota& quota);
  /// Forgets a payer that has nothing; false: it has something.
  bool Forget(PayerId payer);
  void Add(Account* account, uint64_t bytes) { SetCharge(account, account->charge + bytes); }
  void Remove(Account* account, uint64_t bytes) { SetCharge(account, account->charge - bytes); }

  /// Of `free` slabs, those that a payer who has `charge` may take: the rest is kept for guarantees of others.
  uint64_t UsableSlabs(uint64_t free, const Account& account, uint64_t charge) const;

  /// Slabs that guarantees lack, but for that of `account`; nullptr: of all.
  uint64_t ReservedBeside(const Account* account) const {
    return reserved_slabs_ - (account == nullptr ? 0 : LackingSlabs(*account, account->charge));
  }

  /// By excess, the largest last. Payers without a charge are not there.
  using ByExcess = std::set<std::pair<int64_t, Account*>>;
  const ByExcess& by_excess() const { return by_excess_; }

  const absl::node_hash_map<PayerId, Account>& accounts() const { return accounts_; }
  void CheckInvariants() const;

 private:
  void SetCharge(Account* account, uint64_t charge);
  uint64_t LackingSlabs(const Account& account, uint64_t charge) const {
    return charge >= account.guaranteed_bytes ? 0 : (account.guaranteed_bytes - charge + slab_bytes_ - 1) / slab_bytes_;
  }
  void List(Account* account, bool listed);

  const uint64_t slab_bytes_;
  absl::node_hash_map<PayerId, Account> accounts_;
  ByExcess by_excess_;
  uint64_t reserved_slabs_ = 0;
};

}  // namespace kvmanager
