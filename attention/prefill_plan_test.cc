#include "attention/prefill_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <utility>

#include "attention/device_plan_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/reading_rule.h"

namespace kvmanager {
namespace {

using device::PrefillItem;
using device::PrefillRun;

constexpr int kPageTokens = device::kPrefillPageTokens;

struct Sequence {
  std::vector<DevicePage> pages;
  uint32_t aged = 0;
  uint64_t first_position = 0;
  int tokens = 0;
};

struct Case {
  PrefillPlanner::Options options;
  std::vector<Sequence> batch;
};

Case RandomCase(std::mt19937& random) {
  Case c;
  PrefillPlanner::Options& o = c.options;
  o.layout.kv_heads = uint16_t(1 + random() % 3);
  o.layout.head_dim = 64;
  o.query_heads = o.layout.kv_heads * (1 + random() % device::kPrefillGroupMax);
  o.lag_pages = int(random() % 4);
  o.identity = random() % 4 == 0;
  o.blocks = 1 + int(random() % 40);
  c.batch.resize(1 + random() % 4);
  for (Sequence& s : c.batch) {
    s.tokens = 1 + int(random() % 400);
    const uint64_t context = s.tokens + random() % 3000;
    s.first_position = context - s.tokens;
    s.pages.resize((context + kPageTokens - 1) / kPageTokens);
    for (size_t j = 0; j < s.pages.size(); ++j) {
      const bool own = (j + 1) * kPageTokens > s.first_position;
      // A page whose last token alone asks may be encoded alone.
      const bool last_alone = (j + 1) * kPageTokens == s.first_position + 1;
      const bool encoded = !o.identity && random() % 8 != 0;
      if (!encoded || (own && !last_alone) || random() % 2 == 0) s.pages[j].raw = uint32_t(j);
      if (encoded) s.pages[j].encoded = uint32_t(j);
    }
    s.aged = random() % 2 == 0 ? 0 : uint32_t(random() % (s.pages.size() + 1));
  }
  return c;
}

/// Whether a query on page `own` reads page j encoded.
bool ReadsEncoded(const Case& c, const Sequence& s, uint32_t own, uint32_t j) {
  const bool has_raw = s.pages[j].raw != DevicePage::kNoSlot, has_encoded = s.pages[j].encoded != DevicePage::kNoSlot;
  if (c.options.identity) return false;
  return !ReadingRule::ReadsRaw(has_raw, has_encoded, j >= s.aged, own - j, uint32_t(c.options.lag_pages));
}

struct Planned {
  PrefillPlanSize size;
  std::vector<PrefillItem> items;
  std::vector<PrefillRun> runs;
  DeviceTables tables;
};

void Make(const Case& c, Planned* p) {
  for (const Sequence& s : c.batch) p->tables.Add(s.pages, s.aged, s.first_position, s.tokens);
  p->items.resize(4000);
  p->runs.resize(20000);
  const auto size =
      PrefillPlanner(c.options).Plan(p->tables.sequences(), absl::MakeSpan(p->items), absl::MakeSpan(p->runs));
  ASSERT_TRUE(size.ok()) << size.status();
  p->size = *size;
}

TEST(PrefillPlan, EachTokenReadsEachPageOnceInItsForm) {
  std::mt19937 random(1);
  for (int round = 0; round < 150; ++round) {
    SCOPED_TRACE(round);
    Case c = RandomCase(random);
    if (round % 2 == 1) {
      c.options.apart = true;
      for (int head = 0; head < c.options.layout.kv_heads; ++head) {
        c.options.head_costs.push_back(1 + random() % (2 * device::kPrefillRawPageCost));
      }
    }
    Planned p;
    ASSERT_NO_FATAL_FAILURE(Make(c, &p));
    const auto& sequences = p.tables.sequences();
    std::vector<std::pair<int, int>> owners;  // of each token: sequence, token
    for (int s = 0; s < int(c.batch.size()); ++s) {
      for (int i = 0; i < c.batch[s].tokens; ++i) owners.push_back({s, i});
    }
    using Read = std::tuple<uint32_t, int, uint32_t>;  // token of q, head, page
    std::map<Read, bool> read;                         // encoded
    std::map<std::tuple<uint32_t, int, bool>, std::set<int>> parts;
    std::vector<bool> linked(p.size.items);
    for (uint32_t b = 0; b < uint32_t(c.options.blocks); ++b) {
      for (uint32_t at = b;; at = p.items[at].next) {
        ASSERT_LT(at, p.size.items);
        ASSERT_FALSE(linked[at]);
        linked[at] = true;
        const PrefillItem& item = p.items[at];
        if (item.pages == 0) {
          ASSERT_EQ(at, b);
          ASSERT_EQ(item.next, 0u);
          break;
        }
        ASSERT_LT(item.part, item.parts);
        const bool first_encoded = c.options.apart && p.runs[item.first_run].encoded != 0;
        ASSERT_TRUE(parts[std::tuple(item.first_token, int(item.kv_head), first_encoded)].insert(item.part).second);
        if (item.parts > 1) {
          ASSERT_LE(item.first_part + item.parts, p.size.parts);
        }
        ASSERT_LE(item.tokens * (c.options.query_heads / c.options.layout.kv_heads), device::kPrefillRows);
        uint32_t skip = item.skip, left = item.pages;
        for (uint32_t r = item.first_run; left > 0; ++r) {
          ASSERT_LT(r, p.size.runs);
          const PrefillRun& run = p.runs[r];
          ASSERT_LT(run.token_begin, run.token_end);
          ASSERT_LE(run.token_end, item.tokens);
          ASSERT_TRUE(!c.options.apart || (run.encoded != 0) == first_encoded);
          for (uint32_t k = 0; k < run.pages && left > 0; ++k) {
            if (skip > 0) {
              --skip;
              continue;
            }
            --left;
            for (int i = run.token_begin; i < run.token_end; ++i) {
              const auto [s, token] = owners[item.first_token + i];
              const uint64_t position = c.batch[s].first_position + token;
              ASSERT_EQ(position, uint64_t{item.first_position} + i);
              const uint32_t page = run.position / kPageTokens + k;
              ASSERT_EQ(run.first_page + k, (run.encoded ? sequences[s].encoded_table : sequences[s].raw_table) + page);
              if (uint64_t{page} * kPageTokens > position) continue;  // nothing of it is seen
              ASSERT_TRUE(read.insert({{item.first_token + i, item.kv_head, page}, run.encoded != 0}).second);
            }
          }
        }
        if (item.next == 0) break;
        ASSERT_GE(item.next, uint32_t(c.options.blocks));
      }
    }
    EXPECT_EQ(size_t(std::count(linked.begin(), linked.end(), true)), size_t(p.size.items));
    uint64_t pairs[2] = {0, 0};
    size_t wanted = 0;
    for (uint32_t row = 0; row < owners.size(); ++row) {
      const auto [s, token] = owners[row];
      const uint64_t position = c.batch[s].first_position + token;
      const uint32_t own = uint32_t(position / kPageTokens);
      for (uint32_t page = 0; page <= own; ++page) {
        const bool encoded = ReadsEncoded(c, c.batch[s], own, page);
        pairs[encoded] += page == own ? position % kPageTokens + 1 : kPageTokens;
        for (int head = 0; head < c.options.layout.kv_heads; ++head, ++wanted) {
          const auto found = read.find({row, head, page});
          ASSERT_TRUE(found != read.end()) << row << " " << page;
          ASSERT_EQ(found->second, encoded) << row << " " << page;
        }
      }
    }
    EXPECT_EQ(read.size(), wanted);
    EXPECT_EQ(p.size.raw_pairs, pairs[0]);
    EXPECT_EQ(p.size.encoded_pairs, pairs[1]);
    EXPECT_LE(p.size.parts, PrefillPlanner::PartsMax(c.options.blocks));
    for (const auto& [tile, of_tile] : parts) EXPECT_EQ(*of_tile.rbegin() + 1, int(of_tile.size()));
  }
}

Case OneSequence(uint64_t context, int tokens) {
  Case c;
  c.options.layout.kv_heads = 8, c.options.layout.head_dim = 128;
  c.options.query_heads = 32, c.options.lag_pages = 2, c.options.blocks = 132;
  Sequence s;
  s.tokens = tokens, s.first_position = context - tokens;
  s.pages.resize((context + kPageTokens - 1) / kPageTokens);
  for (size_t j = 0; j < s.pages.size(); ++j) {
    s.pages[j].raw = uint32_t(j);
    if ((j + 1) * kPageTokens <= s.first_position) s.pages[j].encoded = uint32_t(j);
  }
  c.batch.push_back(std::move(s));
  return c;
}

TEST(PrefillPlan, BlocksShareTheWork) {
  for (const auto& [context, tokens] : {std::pair{32768, 64}, {32768, 640}, {34816, 2048}, {8192, 8192}, {256, 256}}) {
    SCOPED_TRACE(tokens);
    const Case c = OneSequence(context, tokens);
    Planned p;
    ASSERT_NO_FATAL_FAILURE(Make(c, &p));
    uint64_t total = 0, most = 0;
    for (int b = 0; b < c.options.blocks; ++b) {
      uint64_t of_block = 0;
      for (uint32_t at = b;; at = p.items[at].next) {
        of_block += p.items[at].pages;
        if (p.items[at].next == 0) break;
      }
      total += of_block;
      most = std::max(most, of_block);
    }
    EXPECT_LE(most, total * 1.15 / c.options.blocks + 8);
  }
}

TEST(PrefillPlan, BuffersMaySuffice) {
  Case c = OneSequence(40000, 8192);
  DeviceTables tables;
  tables.Add(c.batch[0].pages, 0, c.batch[0].first_position, c.batch[0].tokens);
  std::vector<PrefillItem> items(PrefillPlanner::ItemsMax(c.options, 8192));
  std::vector<PrefillRun> runs(8 * PrefillPlanner::TileGroupsMax(c.options, 8192));
  PrefillPlanner planner(c.options);
  const auto size = planner.Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs));
  ASSERT_TRUE(size.ok()) << size.status();
  items.resize(size->items - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(
      planner.Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs)).status()));
  items.resize(size->items);
  EXPECT_TRUE(planner.Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs)).ok());
  runs.resize(size->runs - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(
      planner.Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs)).status()));
}

}  // namespace
}  // namespace kvmanager
