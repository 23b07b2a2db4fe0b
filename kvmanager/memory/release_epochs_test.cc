#include "kvmanager/memory/release_epochs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

namespace kvmanager {
namespace {

PageId Slot(uint32_t number) { return PageId{number, 1}; }

std::vector<PageId> Collected(ReleaseEpochs* epochs) {
  std::vector<PageId> slots;
  epochs->Collect(&slots);
  return slots;
}

TEST(ReleaseEpochs, ASlotWaitsForEveryOlderPlanAndNoNewerOne) {
  ReleaseEpochs epochs;
  ReleaseCounter a_counter, b_counter;
  const auto a = epochs.AddHolder(&a_counter), b = epochs.AddHolder(&b_counter);
  ASSERT_TRUE(a.ok() && b.ok());
  epochs.Retire(Slot(1));
  EXPECT_EQ(Collected(&epochs), std::vector<PageId>{Slot(1)});  // no plan is open
  const uint64_t a_old = *epochs.OpenPlan(*a), b_old = *epochs.OpenPlan(*b);
  epochs.Retire(Slot(2));
  const uint64_t a_new = *epochs.OpenPlan(*a);
  EXPECT_TRUE(Collected(&epochs).empty());
  b_counter.released = b_old;
  EXPECT_TRUE(Collected(&epochs).empty());
  a_counter.released = a_old;
  EXPECT_EQ(Collected(&epochs), std::vector<PageId>{Slot(2)});  // a_new was made after it
  epochs.Retire(Slot(3));
  EXPECT_TRUE(Collected(&epochs).empty());
  a_counter.released = a_new;
  EXPECT_EQ(Collected(&epochs), std::vector<PageId>{Slot(3)});
}

TEST(ReleaseEpochs, OfADeadHolderNothingWaitsOnceItIsRemoved) {
  ReleaseEpochs epochs;
  ReleaseCounter counter;
  const auto holder = epochs.AddHolder(&counter);
  ASSERT_TRUE(epochs.OpenPlan(*holder).ok());
  epochs.Retire(Slot(1));
  EXPECT_TRUE(Collected(&epochs).empty());
  epochs.RemoveHolder(*holder);
  EXPECT_EQ(Collected(&epochs).size(), 1u);
}

TEST(ReleaseEpochs, CountersThatCannotBeRightReleaseNothing) {
  ReleaseEpochs epochs;
  ReleaseCounter counter, other_counter;
  const auto holder = epochs.AddHolder(&counter), other = epochs.AddHolder(&other_counter);
  const uint64_t first = *epochs.OpenPlan(*holder), foreign = *epochs.OpenPlan(*other),
                 second = *epochs.OpenPlan(*holder);
  epochs.RemoveHolder(*other);
  epochs.Retire(Slot(1));
  for (const uint64_t wrong : {uint64_t{0}, foreign, second + 1, UINT64_MAX}) {
    counter.released = wrong;
    EXPECT_TRUE(Collected(&epochs).empty()) << wrong;
    EXPECT_EQ(epochs.open_plans(*holder), 2u);
  }
  counter.released = second;
  EXPECT_EQ(Collected(&epochs).size(), 1u);
  const uint64_t third = *epochs.OpenPlan(*holder);
  epochs.Retire(Slot(2));
  counter.released = first;  // backwards
  EXPECT_TRUE(Collected(&epochs).empty());
  counter.released = third;
  EXPECT_EQ(Collected(&epochs).size(), 1u);
}

TEST(ReleaseEpochs, LimitsAreNamed) {
  ReleaseEpochs epochs;
  ReleaseCounter counter;
  const auto holder = epochs.AddHolder(&counter);
  uint64_t newest = 0;
  for (uint32_t i = 0; i < ReleaseEpochs::kOpenPlansMax; ++i) newest = *epochs.OpenPlan(*holder);
  EXPECT_EQ(epochs.OpenPlan(*holder).status().code(), absl::StatusCode::kResourceExhausted);
  counter.released = newest;
  EXPECT_TRUE(epochs.OpenPlan(*holder).ok());
  for (uint32_t i = 1; i < ReleaseEpochs::kHoldersMax; ++i) ASSERT_TRUE(epochs.AddHolder(&counter).ok());
  EXPECT_EQ(epochs.AddHolder(&counter).status().code(), absl::StatusCode::kResourceExhausted);
}

// Slots in use by plans are listed plan by plan; a slot must come back exactly when no list has it.
TEST(ReleaseEpochs, RandomOperationsAgainstAModel) {
  struct Plan {
    uint64_t epoch;
    std::set<PageId> named;
  };
  struct Model {
    std::unique_ptr<ReleaseCounter> counter = std::make_unique<ReleaseCounter>();
    std::vector<Plan> open;  // oldest first
  };
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    ReleaseEpochs epochs;
    std::map<ReleaseEpochs::HolderId, Model> holders;
    std::set<PageId> current;            // slots that a new plan may name
    std::map<PageId, uint64_t> retired;  // slots given up, and the newest epoch then
    uint32_t slots = 0;
    const auto add = [&] {
      Model model;
      const auto id = epochs.AddHolder(model.counter.get());
      ASSERT_TRUE(id.ok());
      ASSERT_TRUE(holders.emplace(*id, std::move(model)).second);
    };
    add();
    for (int step = 0; step < 3000; ++step) {
      const auto pick = holders.empty() ? holders.end() : std::next(holders.begin(), random() % holders.size());
      switch (random() % 16) {
        case 0:
          if (holders.size() < 6) add();
          break;
        case 1:
          if (pick == holders.end() || random() % 4 != 0) break;
          epochs.RemoveHolder(pick->first);
          holders.erase(pick);
          break;
        case 2:
        case 3:
        case 4:
        case 5:
          current.insert(Slot(slots++));
          break;
        case 6:
        case 7:
        case 8:
          if (current.empty()) break;
          {
            const auto slot = std::next(current.begin(), random() % current.size());
            epochs.Retire(*slot);
            retired.emplace(*slot, epochs.newest_epoch());
            current.erase(slot);
          }
          break;
        case 9:
        case 10:
        case 11: {
          if (pick == holders.end()) break;
          const auto epoch = epochs.OpenPlan(pick->first);
          if (!epoch.ok()) break;
          Plan plan{*epoch, {}};
          plan.named = current;
          pick->second.open.push_back(std::move(plan));
          break;
        }
        case 12:
        case 13: {
          if (pick == holders.end() || pick->second.open.empty()) break;
          auto& open = pick->second.open;
          const size_t count = 1 + random() % open.size();
          pick->second.counter->released = open[count - 1].epoch;
          open.erase(open.begin(), open.begin() + count);
          break;
        }
        default: {
          uint64_t oldest = UINT64_MAX;
          for (const auto& [id, model] : holders) {
            if (!model.open.empty()) oldest = std::min(oldest, model.open.front().epoch);
          }
          const std::vector<PageId> got = Collected(&epochs);
          for (const PageId slot : got) {
            ASSERT_EQ(retired.erase(slot), 1u) << "twice";
            for (const auto& [id, model] : holders) {
              for (const Plan& plan : model.open) ASSERT_EQ(plan.named.count(slot), 0u) << "slot " << slot.slot;
            }
          }
          for (const auto& [slot, epoch] : retired)
            ASSERT_GE(epoch, oldest) << "slot " << slot.slot << " waits for nobody";
          ASSERT_EQ(epochs.retired_slots(), retired.size());
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager
