// What eviction by cost learns and counts, by example. That it does what it says: eviction_policy_test.cc, against a
// reference.
#include "kvmanager/eviction/cost_eviction.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

// Conversations return, single prompts do not: once that is learned the former stay, though they are older.
TEST(CostEvictionTest, KeepsWhatIsExpectedToReturn) {
  const auto policy = MakeCostEviction();
  std::vector<Evictable> talk(4), once(4);
  uint64_t id = 1;
  const auto use = [&](std::vector<Evictable>& blocks, bool known) {
    EvictionRun run;
    for (uint32_t i = 0; i < blocks.size(); ++i) {
      blocks[i].index = i;
      blocks[i].bytes = 10;
      if (known) {
        policy->Found(&run, &blocks[i]);
      } else {
        blocks[i].id = id++;
        blocks[i].notes = {};
        policy->Named(&run, &blocks[i]);
      }
    }
    for (size_t i = blocks.size(); i-- > 0;) policy->Touch(&blocks[i], &run);
  };
  use(talk, false);
  for (int round = 0; round < 2000; ++round) {
    use(talk, true);
    for (int other = 0; other < 20; ++other) use(once, false);
  }
  for (auto* const blocks : {&talk, &once}) {
    for (Evictable& block : *blocks) policy->Add(&block);
  }
  EXPECT_LT(talk[0].last_use, once[0].last_use);
  for (int i = 0; i < 3; ++i) {
    Evictable* const victim = policy->Victim(0);
    EXPECT_TRUE(victim >= once.data() && victim < once.data() + once.size()) << i;
    policy->Remove(victim);
  }
}

// Prompts that never return, written in pieces as vLLM's connector does, each a run of its own; the first block, a
// sink, takes more bytes. The newest stay, and are whole.
TEST(CostEvictionTest, OfPromptsInPiecesTheNewestStay) {
  constexpr uint32_t kPieces[] = {4, 8, 16, 32, 32, 32, 4};
  constexpr uint32_t kBlocks = 128;
  for (const size_t fit : {30, 100, 350}) {
    const auto policy = MakeCostEviction();
    std::vector<std::vector<Evictable>> prompts(fit * 8 / 5, std::vector<Evictable>(kBlocks));
    const uint64_t capacity = fit * (kBlocks * 10 + 45);
    uint64_t used = 0, id = 1;
    for (auto& blocks : prompts) {
      uint32_t first = 0;
      for (const uint32_t count : kPieces) {
        EvictionRun run;
        for (uint32_t i = first; i < first + count; ++i) {
          Evictable& block = blocks[i];
          block.index = i;
          block.tokens = 64;
          block.id = id++;
          block.bytes = i == 0 ? 55 : 10;
          while (used + block.bytes > capacity) {
            Evictable* const victim = policy->Victim(0);
            policy->Evicted(*victim);
            policy->Remove(victim);
            used -= victim->bytes;
            victim->bytes = 0;
          }
          used += block.bytes;
          policy->Named(&run, &block);
        }
        for (uint32_t i = first + count; i-- > first;) {
          policy->Touch(&blocks[i], &run);
          policy->Add(&blocks[i]);
        }
        first += count;
      }
    }
    size_t whole = 0;
    while (whole < prompts.size() &&
           std::all_of(prompts[prompts.size() - 1 - whole].begin(), prompts[prompts.size() - 1 - whole].end(),
                       [](const Evictable& block) { return block.bytes > 0; })) {
      ++whole;
    }
    EXPECT_GE(whole, fit * 98 / 100) << fit;
  }
}

// Of runs of two kinds, of which nothing is known yet, the one used last has more bytes, or is nearer to the beginning.
TEST(CostEvictionTest, CountsBytesAndPosition) {
  for (const bool by_position : {false, true}) {
    CostEvictionOptions options;
    if (by_position) options.equal_cost_tokens = 1000;
    const auto policy = MakeCostEviction(options);
    Evictable blocks[2];
    for (uint32_t i = 0; i < 2; ++i) {
      blocks[i].id = i + 1;
      blocks[i].tokens = 64;
      blocks[i].index = i == 0 ? 100 : 0;
      blocks[i].bytes = by_position || i == 0 ? 10 : 11;
      const EvictionRun run{.blocks = 200, .fresh = i, .last = 200};
      policy->Touch(&blocks[i], &run);
      policy->Add(&blocks[i]);
    }
    EXPECT_EQ(policy->Victim(0), &blocks[1]) << by_position;
  }
}

}  // namespace
}  // namespace kvmanager
