#include "attention/device_plan.h"

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
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::PageForm;

struct Sequence {
  std::vector<DevicePage> pages;
  uint32_t aged = 0;
  uint64_t first_position = 0;
  int tokens = 0;
};

/// Slots are numbered so that a slot says what it is: 4 * (1000 * sequence + page) + form.
std::vector<Sequence> RandomBatch(std::mt19937& random, int page_tokens, bool identity) {
  std::vector<Sequence> batch(1 + random() % 5);
  for (size_t s = 0; s < batch.size(); ++s) {
    const uint64_t context = 1 + random() % (random() % 3 == 0 ? 50 : 4000);
    const int tokens = 1 + random() % std::min<uint64_t>(context, random() % 2 == 0 ? 1 : 16);
    std::vector<DevicePage> pages((context + page_tokens - 1) / page_tokens);
    for (size_t j = 0; j < pages.size(); ++j) {
      const uint32_t name = 4 * uint32_t(1000 * s + j);
      const bool near_end = (j + 2) * page_tokens > context - tokens;
      const bool encoded = !identity && !near_end && random() % 8 != 0;
      if (!encoded || random() % 4 == 0) pages[j].raw = name;
      if (encoded) pages[j].encoded = name + 1;
    }
    const uint32_t aged = random() % 2 == 0 ? 0 : uint32_t(random() % (pages.size() + 1));
    batch[s] = {std::move(pages), aged, context - tokens, tokens};
  }
  return batch;
}

/// The items of all blocks in the order of the parts, each of which one block has.
std::vector<AttendItem> ItemsByPart(const std::vector<AttendItem>& items, int blocks, const DevicePlanSize& size) {
  using Tile = std::tuple<uint32_t, uint16_t, uint16_t>;  // first token, head, first row
  std::map<Tile, std::map<uint32_t, std::vector<AttendItem>>> tiles;
  std::vector<bool> place_taken(size.parts);
  std::vector<bool> linked(size.items);
  for (uint32_t b = 0; b < uint32_t(blocks); ++b) {
    if (items[b].pages == 0) {
      EXPECT_EQ(items[b].next, 0u);
      continue;
    }
    uint32_t open = UINT32_MAX;
    for (uint32_t at = b;; at = items[at].next) {
      EXPECT_LT(at, size.items);
      EXPECT_FALSE(linked[at]);
      linked[at] = true;
      const AttendItem& item = items[at];
      EXPECT_LT(item.part, item.parts);
      std::vector<AttendItem>& part = tiles[{item.first_token, item.kv_head, item.first_row}][item.part];
      if (open == UINT32_MAX) {
        EXPECT_TRUE(part.empty());
        open = item.part;
      }
      EXPECT_EQ(item.part, open);
      part.push_back(item);
      if (item.ends_tile) open = UINT32_MAX;
      if (item.next == 0) break;
      EXPECT_GE(item.next, uint32_t(blocks));
    }
    EXPECT_EQ(open, UINT32_MAX);
  }
  std::vector<AttendItem> flat;
  for (const auto& [name, parts] : tiles) {
    const AttendItem& first = parts.begin()->second.front();
    EXPECT_EQ(parts.size(), first.parts);
    for (const auto& [part, list] : parts) {
      EXPECT_LT(part, first.parts);
      if (first.parts > 1) {
        EXPECT_LT(first.first_part + part, size.parts);
        EXPECT_FALSE(place_taken[first.first_part + part]);
        place_taken[first.first_part + part] = true;
      }
      for (const AttendItem& item : list) {
        EXPECT_EQ(item.parts, first.parts);
        EXPECT_EQ(item.first_part, first.first_part);
        EXPECT_EQ(item.rows, first.rows);
        flat.push_back(item);
      }
    }
  }
  return flat;
}

TEST(DevicePlan, EveryRowReadsEveryPageOnceInTheFormThatTheRulesSay) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 400; ++trial) {
    DevicePlanner::Options o;
    o.layout.kv_heads = 1 + random() % 4;
    o.layout.head_dim = 128;
    o.layout.page_tokens = random() % 2 == 0 ? 64 : 16;
    const int group = 1 + random() % 16;
    o.query_heads = o.layout.kv_heads * group;
    o.lag_pages = random() % 3;
    o.blocks = 1 + random() % 200;
    o.warps = 8;
    o.encoded_cost = 1 + random() % 40000;
    o.identity = random() % 5 == 0;
    const std::vector<Sequence> batch = RandomBatch(random, o.layout.page_tokens, o.identity);
    DeviceTables tables;
    for (const Sequence& s : batch) tables.Add(s.pages, s.aged, s.first_position, s.tokens);
    const std::vector<uint32_t>& slots = tables.slots();
    std::vector<AttendItem> items(100000);
    DevicePlanner planner(o);
    const auto planned = planner.Plan(tables.sequences(), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok()) << planned.status();
    ASSERT_LE(planned->parts, 2u * o.blocks);
    const std::vector<AttendItem> in_order = ItemsByPart(items, o.blocks, *planned);

    // By (row token, query head): the slots that it reads, in order, and what it sees of the last.
    struct Row {
      std::vector<uint32_t> slots;
      std::vector<PageForm> forms;
      int last_visible = 0;
    };
    std::map<std::pair<uint32_t, uint32_t>, Row> rows;
    for (const AttendItem& item : in_order) {
      ASSERT_GE(item.pages, 1u);
      ASSERT_LE(item.first_page + item.pages, slots.size());
      ASSERT_GE(item.rows, 1);
      ASSERT_LE(item.rows, planned->rows_max);
      ASSERT_LE(planned->rows_max, device::kTileRows);
      for (int r = 0; r < item.rows; ++r) {
        const int at = item.first_row + r, token = at / group;
        Row& row = rows[{item.first_token + token, item.kv_head * group + at % group}];
        for (uint32_t p = 0; p < item.pages; ++p) {
          row.slots.push_back(slots[item.first_page + p]);
          row.forms.push_back(item.form);
        }
        row.last_visible = std::min<int>(o.layout.page_tokens, item.last_visible + token);
      }
    }
    uint32_t row_token = 0;
    uint64_t encoded_pairs = 0, raw_pairs = 0;
    for (const Sequence& s : batch) {
      for (int token = 0; token < s.tokens; ++token, ++row_token) {
        const uint64_t position = s.first_position + token;
        const uint32_t own = uint32_t(position / o.layout.page_tokens);
        std::vector<uint32_t> wanted;
        std::vector<PageForm> forms;
        for (uint32_t j = 0; j <= own; ++j) {
          const DevicePage& page = s.pages[j];
          const bool raw = ReadingRule::ReadsRaw(page.raw != DevicePage::kNoSlot, page.encoded != DevicePage::kNoSlot,
                                                 j >= s.aged, own - j, uint32_t(o.lag_pages));
          wanted.push_back(raw ? page.raw : page.encoded);
          forms.push_back(raw ? PageForm::kRaw : PageForm::kEncoded);
          const uint64_t seen = j == own ? position % o.layout.page_tokens + 1 : o.layout.page_tokens;
          (raw ? raw_pairs : encoded_pairs) += seen;
        }
        for (int head = 0; head < o.query_heads; ++head) {
          const auto found = rows.find({row_token, head});
          ASSERT_NE(found, rows.end());
          ASSERT_EQ(found->second.slots, wanted);
          ASSERT_EQ(found->second.forms, forms);
          ASSERT_EQ(found->second.last_visible, int(position % o.layout.page_tokens) + 1);
          rows.erase(found);
        }
      }
    }
    ASSERT_TRUE(rows.empty());
    ASSERT_EQ(planned->encoded_pairs, encoded_pairs);
    ASSERT_EQ(planned->raw_pairs, raw_pairs);
  }
}

TEST(DevicePlan, BlocksHaveAsMuchWork) {
  DevicePlanner::Options o;
  o.layout.kv_heads = 8;
  o.layout.head_dim = 128;
  o.query_heads = 32;
  o.lag_pages = 2;
  o.blocks = 132;
  o.warps = 16;
  o.encoded_cost = 2 * 64 * 128 * 2 / 5;  // of a raw page's
  DeviceTables tables;
  for (int s = 0; s < 32; ++s) {
    const uint64_t context = s == 0 ? 131072 : 4096;
    std::vector<DevicePage> pages(context / 64);
    for (size_t j = 0; j < pages.size(); ++j) {
      (j + 3 >= pages.size() ? pages[j].raw : pages[j].encoded) = uint32_t(j);
    }
    tables.Add(pages, 0, context - 1, 1);
  }
  std::vector<AttendItem> items(10000);
  const auto planned = DevicePlanner(o).Plan(tables.sequences(), absl::MakeSpan(items));
  ASSERT_TRUE(planned.ok()) << planned.status();
  std::vector<uint64_t> costs;
  for (uint32_t b = 0; b < 132; ++b) {
    costs.push_back(0);
    for (uint32_t at = b;; at = items[at].next) {
      costs.back() += items[at].pages * (items[at].form == PageForm::kRaw ? 5 : 1);
      if (items[at].next == 0) break;
    }
  }
  // Even shares, and what a block may have beyond one where it then works on whole tiles alone.
  const uint64_t even = std::accumulate(costs.begin(), costs.end(), uint64_t{0}) / 132;
  EXPECT_LE(*std::max_element(costs.begin(), costs.end()), even + even / 10 + 5);
}

TEST(DevicePlan, BlocksHaveAsMuchWorkWhereHeadsCostDifferently) {
  for (const int sequences : {1, 3, 16, 64}) {
    DevicePlanner::Options o;
    o.layout.kv_heads = 8;
    o.layout.head_dim = 128;
    o.layout.page_tokens = 64;
    o.query_heads = 32;
    o.lag_pages = 2;
    o.blocks = 132;
    o.warps = 11;
    o.encoded_cost = 1;
    o.encoded_units = 2;
    for (const uint32_t ranks : {224, 176, 144, 128, 112, 112, 80, 48}) o.head_costs.push_back(ranks * 64 * 2);
    DeviceTables tables;
    const uint64_t context = 32768;
    for (int s = 0; s < sequences; ++s) {
      std::vector<DevicePage> pages(context / 64);
      for (size_t j = 0; j < pages.size(); ++j) {
        (j + 3 >= pages.size() ? pages[j].raw : pages[j].encoded) = uint32_t(j);
      }
      tables.Add(pages, 0, context - 1, 1);
    }
    std::vector<AttendItem> items(10000);
    const auto planned = DevicePlanner(o).Plan(tables.sequences(), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok()) << planned.status();
    std::vector<uint64_t> costs;
    for (uint32_t b = 0; b < 132; ++b) {
      costs.push_back(0);
      for (uint32_t at = b;; at = items[at].next) {
        const uint64_t raw = 2 * o.layout.raw_head_bytes();
        costs.back() += items[at].pages * (items[at].form == PageForm::kRaw ? raw : o.head_costs[items[at].kv_head]);
        if (items[at].next == 0) break;
      }
    }
    const uint64_t even = std::accumulate(costs.begin(), costs.end(), uint64_t{0}) / 132;
    EXPECT_LE(*std::max_element(costs.begin(), costs.end()), even + even / 10 + 128 * 1024) << sequences;
  }
}

TEST(DevicePlan, BlocksWorkOnWholeTilesOrOnPartsOfOneWhereThatCostsLittle) {
  for (const int sequences : {1, 4, 16, 48}) {
    DevicePlanner::Options o;
    o.layout.kv_heads = 8;
    o.layout.head_dim = 128;
    o.query_heads = 32;
    o.lag_pages = 2;
    o.blocks = 132;
    o.warps = 16;
    o.encoded_cost = 2 * 64 * 128 * 2 / 5;
    DeviceTables tables;
    for (int s = 0; s < sequences; ++s) {
      std::vector<DevicePage> pages(512);
      for (size_t j = 0; j < pages.size(); ++j) (j < 509 ? pages[j].encoded : pages[j].raw) = uint32_t(j);
      tables.Add(pages, 0, 512 * 64 - 1, 1);
    }
    std::vector<AttendItem> items(10000);
    const auto planned = DevicePlanner(o).Plan(tables.sequences(), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok()) << planned.status();
    int busy = 0;
    for (uint32_t b = 0; b < 132; ++b) {
      bool cut = false;
      std::set<std::pair<uint32_t, int>> tiles;
      for (uint32_t at = b;; at = items[at].next) {
        if (items[at].pages > 0) tiles.insert({items[at].first_token, items[at].kv_head});
        cut = cut || items[at].parts > 1;
        if (items[at].next == 0) break;
      }
      EXPECT_TRUE(!cut || tiles.size() == 1) << sequences << " sequences, block " << b;
      if (!tiles.empty()) ++busy;
    }
    EXPECT_GE(busy, 128) << sequences << " sequences";
  }
}

TEST(DevicePlan, SmallBatchesOfRawPagesUseManyBlocks) {
  DevicePlanner::Options o;
  o.layout.kv_heads = 8;
  o.layout.head_dim = 128;
  o.query_heads = 32;
  o.identity = true;
  o.blocks = 132;
  o.warps = 13;
  o.encoded_cost = 2 * 64 * 128 * 2;
  DeviceTables tables;
  std::vector<DevicePage> pages(64);
  for (DevicePage& page : pages) page.raw = 1;
  tables.Add(pages, 0, 4095, 1);
  std::vector<AttendItem> items(1000);
  ASSERT_TRUE(DevicePlanner(o).Plan(tables.sequences(), absl::MakeSpan(items)).ok());
  EXPECT_GE(std::count_if(items.begin(), items.begin() + 132, [](const AttendItem& item) { return item.pages > 0; }),
            128);
}

TEST(DevicePlan, SaysThatItsBufferIsTooSmall) {
  DevicePlanner::Options o;
  o.layout.kv_heads = 2;
  o.layout.head_dim = 64;
  o.query_heads = 2;
  o.blocks = 3;
  o.warps = 8;
  o.encoded_cost = 1000;
  std::vector<DevicePage> pages(40);
  for (DevicePage& page : pages) page.raw = 1;
  DeviceTables tables;
  tables.Add(pages, 0, 40 * 64 - 1, 1);
  std::vector<AttendItem> items(64);
  DevicePlanner planner(o);
  EXPECT_TRUE(planner.Plan(tables.sequences(), absl::MakeSpan(items)).ok());
  for (const size_t few : {size_t{2}, size_t{3}}) {
    const absl::Status status = planner.Plan(tables.sequences(), absl::MakeSpan(items).subspan(0, few)).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status));
    EXPECT_EQ(DetailOf(status).field, "plan items");
  }
}

TEST(PageRuns, AreTheSetsThatTheyStandFor) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    PageRuns runs;
    std::vector<bool> set(64);
    for (int i = 0; i < 40; ++i) {
      const uint32_t first = random() % 60, end = first + random() % 5;
      const bool add = random() % 2 == 0;
      add ? runs.Add(first, end) : runs.Remove(first, end);
      for (uint32_t j = first; j < end; ++j) set[j] = add;
      uint32_t before = UINT32_MAX;
      std::vector<bool> got(64);
      for (const PageRun& run : runs.runs()) {
        ASSERT_LT(run.first, run.end);
        ASSERT_TRUE(before == UINT32_MAX || run.first > before);
        before = run.end;
        for (uint32_t j = run.first; j < run.end; ++j) got[j] = true;
      }
      ASSERT_EQ(got, set);
      const uint32_t from = random() % 64, to = from + random() % (64 - from);
      uint32_t found = from;
      while (found < to && !set[found]) ++found;
      ASSERT_EQ(runs.FirstIn(from, to), found);
    }
  }
}

}  // namespace
}  // namespace kvmanager
