#include "kvmanager/eviction/return_model.h"

#include <algorithm>
#include <cmath>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// The least uses of each bucket.
const std::array<uint64_t, ReturnModel::kAges>& Bounds() {
  static const auto bounds = [] {
    std::array<uint64_t, ReturnModel::kAges> made{};
    double bound = ReturnModel::kFirstAge;
    for (int age = 1; age < ReturnModel::kAges; ++age, bound *= ReturnModel::kAgeRatio) {
      made[age] = static_cast<uint64_t>(bound);
    }
    return made;
  }();
  return bounds;
}

double Width(int age) { return static_cast<double>(Bounds()[age + 1] - Bounds()[age]); }

}  // namespace

ReturnModel::ReturnModel() {
  open_.fill(kNoEntry);
  Evaluate();
}

int ReturnModel::AgeOf(uint64_t uses) {
  const auto& bounds = Bounds();
  return static_cast<int>(std::upper_bound(bounds.begin(), bounds.end(), uses) - bounds.begin()) - 1;
}

uint64_t ReturnModel::LeastOf(int age) { return Bounds()[age]; }

uint32_t ReturnModel::Use(int kind, uint64_t now) {
  uint32_t& open = open_[kind];
  if (!Has(open) || now - At(open).at >= kAdvanceEvery) {
    if (next_ >= UINT32_MAX - 1) return kNoEntry;  // after 2^38 uses nothing is learned any more
    if (entries_.size() < kEntriesMax) entries_.emplace_back();
    open = next_++;
    At(open) = {now, 0, static_cast<uint8_t>(kind)};
  }
  ++At(open).waiting;
  return open;
}

void ReturnModel::Drop(uint32_t entry) {
  if (Has(entry) && At(entry).waiting > 0) --At(entry).waiting;
}

void ReturnModel::Return(uint32_t entry, uint64_t now) {
  if (!Has(entry) || At(entry).waiting == 0) return;
  --At(entry).waiting;
  returned_[At(entry).kind][AgeOf(now - At(entry).at)] += 1;
}

void ReturnModel::Advance(uint64_t now) {
  const uint32_t oldest = next_ - static_cast<uint32_t>(entries_.size());
  for (int age = 0; age < kAges; ++age) {
    uint32_t& at = aged_[age];
    for (at = std::max(at, oldest); at < next_ && At(at).at + Bounds()[age] < now; ++at) {
      // The open entries may get more blocks.
      if (At(at).at + kAdvanceEvery > now) break;
      reached_[At(at).kind][age] += At(at).waiting;
    }
  }
}

void ReturnModel::Evaluate() {
  // Of all kinds: what is believed, and what was seen.
  std::array<double, kAges> hazard{}, seen{};
  double likelier = 1;  // than the prior has it, by the ages before: who never returns soon hardly returns late
  for (int age = 0; age + 1 < kAges; ++age) {
    double returned = 0, reached = 0;
    for (int kind = 0; kind < kKinds; ++kind) {
      returned += returned_[kind][age];
      reached += reached_[kind][age];
    }
    // Before anything is known, the chance to return in the next moment falls with age, so that the order is LRU's.
    const auto waited = [](int of) { return static_cast<double>(Bounds()[of]) + kFirstAge; };
    const double prior = 1 - std::pow(waited(age) / waited(age + 1), kPriorPower);
    hazard[age] = std::min(0.999, (returned + kPriorBlocks * prior * likelier) / (reached + kPriorBlocks));
    likelier = hazard[age] / prior;
    seen[age] = reached > 0 ? std::min(1.0, returned / reached) : 0;
  }
  for (int kind = 0; kind < kKinds; ++kind) {
    double returned = 0, expected = 0;
    for (int age = 0; age + 1 < kAges; ++age) {
      returned += returned_[kind][age];
      expected += reached_[kind][age] * seen[age];
    }
    // By what was seen alone: where nothing has returned, a kind of many blocks is no worse than one of few.
    const double factor = (returned + kPriorReturns) / (expected + kPriorReturns);
    for (int age = 0; age + 1 < kAges; ++age) hazard_[kind][age] = 1 - std::pow(1 - hazard[age], factor);
    for (int age = 0; age < kAges; ++age) {
      double stays = 1, returns = 0, time = 0, best = 0;
      for (int until = age; until + 1 < kAges; ++until) {
        const double hazard_then = hazard_[kind][until];
        returns += stays * hazard_then;
        time += stays * (1 - hazard_then / 2) * Width(until);
        stays *= 1 - hazard_then;
        best = std::max(best, returns / time);
      }
      worth_[kind][age] = best;
    }
    for (int age = 0; age < kAges; ++age) {
      reached_[kind][age] *= kFade;
      returned_[kind][age] *= kFade;
    }
  }
}

}  // namespace kvmanager
