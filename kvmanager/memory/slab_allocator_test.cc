#include "kvmanager/memory/slab_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/slab_bindings.h"
#include "kvmanager/memory/slab_forecast.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = 64 << 10;

SlabAllocator::Options Slabs(uint32_t slabs) {
  SlabAllocator::Options options;
  options.slab_bytes = kSlabBytes;
  options.slabs = slabs;
  options.limit = "test-pool-bytes";
  return options;
}

absl::Status NothingToClean(const SlabAllocator::Place&) { return absl::OkStatus(); }

bool CanAllocate(const SlabAllocator& allocator, TenantId tenant, size_t bytes, uint64_t count, bool reclaim = false) {
  const SlabAllocator::SlotsWanted wanted{bytes, count};
  return SlabForecast(allocator).CanAllocate(tenant, {&wanted, 1}, reclaim);
}

TEST(SlabAllocator, CleansOnceWhenASlabChangesTenant) {
  SlabAllocator allocator(Slabs(1));
  std::vector<uint32_t> cleaned;
  const auto clean = [&](const SlabAllocator::Place& area) {
    cleaned.push_back(area.slab);
    return absl::OkStatus();
  };
  for (const TenantId tenant : {1, 1, 2, 2, 1}) {
    const auto id = allocator.Allocate(tenant, 4096, clean);
    ASSERT_TRUE(id.ok());
    allocator.Free(*id);
  }
  EXPECT_EQ(cleaned, (std::vector<uint32_t>{0, 0}));
}

TEST(SlabAllocator, WhatCannotBeCleanedStaysFree) {
  SlabAllocator allocator(Slabs(1));
  const auto first = allocator.Allocate(1, 4096, NothingToClean);
  ASSERT_TRUE(first.ok());
  allocator.Free(*first);
  const auto refuse = [](const SlabAllocator::Place&) { return absl::UnavailableError("the device is gone"); };
  EXPECT_EQ(allocator.Allocate(2, 4096, refuse).status().code(), absl::StatusCode::kUnavailable);
  allocator.CheckInvariants();
  EXPECT_EQ(allocator.free_slabs(), 1u);
  int cleanings = 0;
  EXPECT_TRUE(allocator
                  .Allocate(2, 4096,
                            [&](const SlabAllocator::Place&) {
                              ++cleanings;
                              return absl::OkStatus();
                            })
                  .ok());
  EXPECT_EQ(cleanings, 1);
}

class UncleanSlotsTest : public ::testing::Test {
 protected:
  UncleanSlotsTest() : allocator_(CleanSlots()) {}
  static SlabAllocator::Options CleanSlots() {
    SlabAllocator::Options options = Slabs(1);
    options.clean_slots = true;
    return options;
  }
  // A slot, and whether it was to be cleaned.
  std::pair<PageId, bool> Take(TenantId tenant, size_t bytes, bool cleans) {
    bool unclean = false;
    const auto id = allocator_.Allocate(tenant, bytes, [&](const SlabAllocator::Place& slot) {
      EXPECT_EQ(slot.bytes, bytes);
      unclean = true;
      return cleans ? absl::OkStatus() : absl::CancelledError("later");
    });
    EXPECT_TRUE(id.ok()) << id.status();
    allocator_.CheckInvariants();
    return {*id, unclean};
  }
  // Whether a slot had to be cleaned, which it was, and is freed.
  bool WasUnclean(TenantId tenant, size_t bytes) {
    const auto [id, unclean] = Take(tenant, bytes, true);
    allocator_.Free(id);
    return unclean;
  }

  SlabAllocator allocator_;
};

TEST_F(UncleanSlotsTest, AreCleanedOnceEach) {
  EXPECT_FALSE(WasUnclean(1, 4096));
  EXPECT_FALSE(WasUnclean(1, 4096));
  const auto [kept, first] = Take(2, 4096, true);
  EXPECT_TRUE(first);
  EXPECT_TRUE(WasUnclean(2, 4096));
  EXPECT_FALSE(WasUnclean(2, 4096));
  allocator_.Free(kept);
  // Slots that it never had may still hold what the first wrote.
  EXPECT_TRUE(WasUnclean(2, 2048));
  EXPECT_TRUE(WasUnclean(2, kSlabBytes));
  EXPECT_FALSE(WasUnclean(2, 2048)) << "that was all of it";
  EXPECT_TRUE(WasUnclean(1, 2048));
}

TEST_F(UncleanSlotsTest, StayUncleanUntilTheirUserHasCleanedThem) {
  WasUnclean(1, 4096);
  const auto [kept, of_kept] = Take(2, 4096, true);
  auto [id, unclean] = Take(2, 4096, false);
  EXPECT_TRUE(unclean);
  allocator_.Free(id);
  std::tie(id, unclean) = Take(2, 4096, false);
  EXPECT_TRUE(unclean) << "it was freed before";
  allocator_.NoteCleaned(id);
  allocator_.Free(id);
  EXPECT_FALSE(WasUnclean(2, 4096));
  allocator_.Free(kept);
}

// Behind the last slot of an area there may be bytes that no slot had.
TEST_F(UncleanSlotsTest, TheRestOfAnAreaIsUncleanToo) {
  WasUnclean(1, kSlabBytes);
  EXPECT_TRUE(WasUnclean(2, kSlabBytes - 1024));
  EXPECT_TRUE(WasUnclean(2, 1024));
}

TEST(SlabAllocator, BoundSlabsStayTheirTenantsUntilRestored) {
  SlabAllocator allocator(Slabs(1));
  const auto id = allocator.Allocate(1, kSlabBytes, NothingToClean);
  ASSERT_TRUE(id.ok());
  SlabBindings(&allocator).Bind(0);
  allocator.Free(*id);
  EXPECT_EQ(allocator.free_slabs(), 0u);
  EXPECT_EQ(allocator.kept_slabs(), 1u);
  EXPECT_FALSE(CanAllocate(allocator, 2, 1024, 1));
  const auto refused = allocator.Allocate(2, 1024, NothingToClean);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.status().message()).find("others may map"), std::string::npos);
  EXPECT_TRUE(CanAllocate(allocator, 1, 1024, kSlabBytes / 1024));
  const auto again = allocator.Allocate(1, 1024, NothingToClean);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(allocator.kept_slabs(), 0u);
  allocator.Free(*again);
  SlabBindings(&allocator).Withdraw(0);
  allocator.CheckInvariants();
  EXPECT_FALSE(CanAllocate(allocator, 1, 1024, 1));
  EXPECT_FALSE(allocator.Allocate(1, 1024, NothingToClean).ok());
  SlabBindings(&allocator).Restore(0);
  EXPECT_EQ(allocator.kept_slabs(), 0u);
  EXPECT_FALSE(allocator.IsCurrent(*again));
  EXPECT_TRUE(
      allocator.Allocate(2, 1024, [](const SlabAllocator::Place&) { return absl::InternalError("already clean"); })
          .ok());
  allocator.CheckInvariants();
}

// Random operations against a model of who may use which slab: a slab never changes tenant while bound, nor uncleaned.
TEST(SlabAllocator, RandomOperationsAgainstAModel) {
  struct ModelSlab {
    int slots = 0;
    bool bound = false, withdrawn = false;
    TenantId written_by = 0;  // 0: nobody since it was cleaned
    TenantId owner = 0;       // while bound
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    SlabAllocator allocator(Slabs(5));
    for (const TenantId tenant : {1, 2, 3}) allocator.SetPayer(tenant, 7);  // who may take all of its own
    std::vector<ModelSlab> slabs(5);
    std::map<PageId, TenantId> held;
    std::map<PageId, bool> reclaimable;
    const size_t sizes[] = {1, 5000, 20000, 40000, kSlabBytes};
    for (int step = 0; step < 2000; ++step) {
      const uint32_t slab = random() % slabs.size();
      ModelSlab& model = slabs[slab];
      switch (random() % 8) {
        case 0:
        case 1:
        case 2: {
          const TenantId tenant = 1 + random() % 3;
          const size_t bytes = sizes[random() % std::size(sizes)];
          const bool foretold = CanAllocate(allocator, tenant, bytes, 1);
          const auto id = allocator.Allocate(tenant, bytes, [&](const SlabAllocator::Place& cleaned) {
            EXPECT_NE(slabs[cleaned.slab].written_by, tenant);
            EXPECT_FALSE(slabs[cleaned.slab].bound);
            slabs[cleaned.slab].written_by = 0;
            return absl::OkStatus();
          });
          ASSERT_EQ(id.ok(), foretold);
          if (!id.ok()) break;
          ModelSlab& used = slabs[allocator.PlaceOf(*id).slab];
          ASSERT_FALSE(used.withdrawn);
          ASSERT_TRUE(!used.bound || used.owner == tenant);
          ASSERT_TRUE(used.written_by == 0 || used.written_by == tenant);
          used.written_by = tenant;
          ++used.slots;
          held[*id] = tenant;
          if (random() % 3 == 0) {
            allocator.SetReclaimable(*id, true);
            reclaimable[*id] = true;
          }
          break;
        }
        case 3:
        case 4:
        case 5: {
          if (held.empty()) break;
          const auto it = std::next(held.begin(), random() % held.size());
          --slabs[allocator.PlaceOf(it->first).slab].slots;
          if (reclaimable.erase(it->first) > 0) allocator.SetReclaimable(it->first, false);
          allocator.Free(it->first);
          held.erase(it);
          break;
        }
        case 6:
          if (model.slots > 0) {
            SlabBindings(&allocator).Bind(slab);
            model.bound = true;
            model.owner = model.written_by;
          } else {
            const TenantId tenant = 1 + random() % 3;
            const bool any = std::any_of(slabs.begin(), slabs.end(), [&](const ModelSlab& each) {
              return each.slots == 0 && !each.bound && (each.written_by == 0 || each.written_by == tenant);
            });
            const auto bound = SlabBindings(&allocator).BindFree(tenant);
            ASSERT_EQ(bound.has_value(), any);
            if (!any) break;
            ASSERT_TRUE(slabs[*bound].slots == 0 && !slabs[*bound].bound);
            ASSERT_TRUE(slabs[*bound].written_by == 0 || slabs[*bound].written_by == tenant);
            slabs[*bound].bound = true;
            slabs[*bound].owner = tenant;
          }
          break;
        case 7:
          if (model.withdrawn) {
            SlabBindings(&allocator).Restore(slab);
            model = ModelSlab();
          } else if (model.bound && model.slots == 0) {
            SlabBindings(&allocator).Withdraw(slab);
            model.withdrawn = true;
          }
          break;
      }
      allocator.CheckInvariants();
      for (uint32_t i = 0; i < slabs.size(); ++i) ASSERT_EQ(allocator.InUse(i), slabs[i].slots > 0);
    }
    // What reclaiming gives is foretold with bound slabs too.
    const TenantId tenant = 1 + random() % 3;
    uint64_t count = 0;
    while (CanAllocate(allocator, tenant, 20000, count + 1, /*reclaim=*/true)) ++count;
    for (const auto& [id, marked] : reclaimable) {
      allocator.SetReclaimable(id, false);
      allocator.Free(id);
    }
    for (uint64_t i = 0; i <= count; ++i) {
      ASSERT_EQ(allocator.Allocate(tenant, 20000, NothingToClean).ok(), i < count);
    }
  }
}

// Areas of three sizes, payers and quotas, against a model of bytes: who wrote each KiB since it was cleaned.
class SmallSlabsTest : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 1 << 20;  // of a slab: small ones of 64 and 4 KiB
  static constexpr uint32_t kSlabs = 8;
  static constexpr TenantId kTenants = 6;

  static SlabAllocator::Options Options() {
    SlabAllocator::Options options;
    options.slab_bytes = kBytes;
    options.slabs = kSlabs;
    options.small_slabs = true;
    options.limit = "test-pool-bytes";
    return options;
  }
  struct Held {
    TenantId tenant;
    bool reclaimable;
  };
  TenantId& WriterOf(const SlabAllocator::Place& place, uint64_t byte) {
    return written_by_[(place.slab * kBytes + place.offset + byte) / 1024];
  }
  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes) {
    const auto clean = [&](const SlabAllocator::Place& area) {
      for (uint64_t at = 0; at < area.bytes; at += 1024) {
        EXPECT_EQ(live_[(area.slab * kBytes + area.offset + at) / 1024], 0) << "somebody's slot was cleaned";
        WriterOf(area, at) = 0;
      }
      return absl::OkStatus();
    };
    const auto id = allocator_->Allocate(tenant, bytes, clean);
    if (!id.ok()) return id;
    const SlabAllocator::Place place = allocator_->PlaceOf(*id);
    for (uint64_t at = 0; at < place.bytes; at += 64) {
      TenantId& writer = WriterOf(place, at);
      EXPECT_TRUE(writer == 0 || writer == tenant) << "tenant " << tenant << " sees bytes of " << writer;
      writer = tenant;
    }
    for (uint64_t at = 0; at < place.bytes; at += 64) ++live_[(place.slab * kBytes + place.offset + at) / 1024];
    EXPECT_TRUE(held_.emplace(*id, Held{tenant, false}).second);
    return id;
  }
  void Free(PageId id) {
    const SlabAllocator::Place place = allocator_->PlaceOf(id);
    for (uint64_t at = 0; at < place.bytes; at += 64) --live_[(place.slab * kBytes + place.offset + at) / 1024];
    if (held_.at(id).reclaimable) allocator_->SetReclaimable(id, false);
    allocator_->Free(id);
    held_.erase(id);
  }
  PayerId PayerOf(TenantId tenant) const { return 100 + tenant / 2; }
  uint64_t ChargeOf(PayerId payer) const {
    const PoolShares::Account* const account = allocator_->shares().Find(payer);
    return account == nullptr ? 0 : account->charge;
  }

  std::unique_ptr<SlabAllocator> allocator_ = std::make_unique<SlabAllocator>(Options());
  std::vector<TenantId> written_by_ = std::vector<TenantId>(kSlabs * kBytes / 1024, 0);
  std::vector<int> live_ = std::vector<int>(kSlabs * kBytes / 1024, 0);
  std::map<PageId, Held> held_;
};

TEST_F(SmallSlabsTest, FewSlotsHoldLittle) {
  std::vector<PageId> ids;
  for (TenantId tenant = 1; tenant <= 256; ++tenant) ids.push_back(*Allocate(tenant, 4096));
  EXPECT_EQ(allocator_->free_slabs(), kSlabs - 1u);
  // Small ones first, then larger ones, then slabs; one tenant's are charged to it alone.
  std::vector<uint64_t> charges;
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(Allocate(1, 4096).ok());
    if (charges.empty() || charges.back() != ChargeOf(1)) charges.push_back(ChargeOf(1));
  }
  EXPECT_EQ(charges.size(), 7u + 8 + 1);
  EXPECT_EQ(charges.back(), 8u * 4096 + 8 * 65536 + kBytes);
  for (const PageId id : ids) Free(id);
  allocator_->CheckInvariants();
}

TEST_F(SmallSlabsTest, RandomOperationsAgainstAModel) {
  const size_t sizes[] = {1024, 3000, 4096, 5000, 40000, 65536, 200000, kBytes};
  int refused = 0, evictions = 0, unforeseen = 0, given = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    allocator_ = std::make_unique<SlabAllocator>(Options());
    std::fill(written_by_.begin(), written_by_.end(), 0);
    std::fill(live_.begin(), live_.end(), 0);
    held_.clear();
    for (TenantId tenant = 1; tenant <= kTenants; ++tenant) allocator_->SetPayer(tenant, PayerOf(tenant));
    std::map<PayerId, PoolQuota> quotas;
    for (PayerId payer = 100; payer <= 103; ++payer) {
      PoolQuota quota;
      if (seed % 3 == 0 && random() % 2) quota.guaranteed_bytes = random() % 3 * kBytes;
      if (seed % 2 == 0 && random() % 2) quota.most_bytes = quota.guaranteed_bytes + random() % (4 * kBytes);
      allocator_->shares().SetQuota(payer, quotas[payer] = quota);
    }
    for (int step = 0; step < 600; ++step) {
      if (random() % 3 == 0 && !held_.empty()) {
        const auto it = std::next(held_.begin(), random() % held_.size());
        if (random() % 3 == 0) {
          Free(it->first);
        } else {
          it->second.reclaimable = !it->second.reclaimable;
          allocator_->SetReclaimable(it->first, it->second.reclaimable);
        }
        continue;
      }
      // As the store does it: whoever is named gives, until there is room.
      const TenantId tenant = 1 + random() % kTenants;
      const PayerId payer = PayerOf(tenant);
      const SlabAllocator::SlotsWanted wanted[] = {{sizes[random() % std::size(sizes)], random() % 8},
                                                   {sizes[random() % std::size(sizes)], random() % 3}};
      const bool foretold = SlabForecast(*allocator_).CanAllocate(tenant, wanted, /*reclaim=*/true);
      bool room = true;
      while (!SlabForecast(*allocator_).CanAllocate(tenant, wanted, /*reclaim=*/false)) {
        room = SlabForecast(*allocator_).CanAllocate(tenant, wanted, /*reclaim=*/true);
        if (!room) break;
        const auto victim_of = [&](PayerId of) {
          return std::find_if(held_.begin(), held_.end(), [&](const auto& each) {
            return each.second.reclaimable && PayerOf(each.second.tenant) == of;
          });
        };
        const auto gives = SlabForecast(*allocator_).NextToGive(tenant, wanted, [&](PayerId of) {
          return victim_of(of) != held_.end();
        });
        if (!gives.has_value()) {
          ++unforeseen;
          room = false;
          break;
        }
        // Nobody loses what is guaranteed, nor to somebody who has more.
        if (*gives != payer) {
          ++given;
          ASSERT_GT(ChargeOf(*gives), quotas[*gives].guaranteed_bytes);
          ASSERT_GT(static_cast<int64_t>(ChargeOf(*gives) - quotas[*gives].guaranteed_bytes),
                    static_cast<int64_t>(ChargeOf(payer)) - static_cast<int64_t>(quotas[payer].guaranteed_bytes));
        }
        Free(victim_of(*gives)->first);
        ++evictions;
      }
      ASSERT_TRUE(foretold || !room);
      refused += !room;
      if (!room) continue;
      const uint64_t before = ChargeOf(payer);
      for (const auto& [bytes, count] : wanted) {
        for (uint64_t i = 0; i < count; ++i) ASSERT_TRUE(Allocate(tenant, bytes).ok());
      }
      if (ChargeOf(payer) > before) {
        ASSERT_LE(ChargeOf(payer), quotas[payer].most_bytes);
      }
      uint64_t kept = 0;
      for (const auto& [each, quota] : quotas) {
        kept += quota.guaranteed_bytes > ChargeOf(each) ? quota.guaranteed_bytes - ChargeOf(each) : 0;
      }
      if (ChargeOf(payer) > std::max(before, quotas[payer].guaranteed_bytes)) {
        ASSERT_LE(kept, allocator_->free_slabs() * kBytes) << "guarantees can be kept";
      }
      allocator_->CheckInvariants();
      ASSERT_FALSE(HasFailure());
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(evictions, 1000);
  EXPECT_GT(given, 100);
  // Only where small slabs of others joined.
  EXPECT_LT(unforeseen * 200, evictions) << unforeseen << " of " << evictions;
}

}  // namespace
}  // namespace kvmanager
