#include "attention/device_plan.h"

#include <map>
#include <random>
#include <tuple>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::PageForm;

struct Batch {
  std::vector<std::vector<DevicePage>> pages;
  std::vector<DeviceSequence> sequences;
};

/// Slots are numbered so that a slot says what it is: 4 * (1000 * sequence + page) + form.
Batch RandomBatch(std::mt19937& random, int page_tokens, bool identity) {
  Batch batch;
  const int count = 1 + random() % 5;
  for (int s = 0; s < count; ++s) {
    const uint64_t context = 1 + random() % (random() % 3 == 0 ? 50 : 4000);
    const int tokens = 1 + random() % std::min<uint64_t>(context, random() % 2 == 0 ? 1 : 16);
    const size_t pages = (context + page_tokens - 1) / page_tokens;
    std::vector<DevicePage> list(pages);
    for (size_t j = 0; j < pages; ++j) {
      const uint32_t name = 4 * (1000 * s + uint32_t(j));
      const bool near_end = (j + 2) * page_tokens > context - tokens;
      const bool encoded = !identity && !near_end && random() % 8 != 0;
      if (!encoded || random() % 4 == 0) list[j].raw = name;
      if (encoded) list[j].encoded = name + 1;
      list[j].lag_applies = random() % 3 != 0;
    }
    batch.pages.push_back(std::move(list));
    batch.sequences.push_back({{}, context - tokens, tokens});
  }
  for (int s = 0; s < count; ++s) batch.sequences[s].pages = batch.pages[s];
  return batch;
}

/// The items of all blocks in the order of the parts, each of which one block has.
std::vector<AttendItem> ItemsByPart(const std::vector<AttendItem>& items, int blocks, const DevicePlanSize& size) {
  std::vector<std::vector<AttendItem>> parts(size.parts);
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
      EXPECT_LE(item.first_part + item.parts, size.parts);
      const uint32_t part = item.first_part + item.part;
      if (open == UINT32_MAX) {
        EXPECT_TRUE(parts[part].empty());
        open = part;
      }
      EXPECT_EQ(part, open);
      parts[part].push_back(item);
      if (item.ends_tile) open = UINT32_MAX;
      if (item.next == 0) break;
      EXPECT_GE(item.next, uint32_t(blocks));
    }
    EXPECT_EQ(open, UINT32_MAX);
  }
  std::vector<AttendItem> flat;
  for (uint32_t i = 0; i < size.parts; ++i) {
    EXPECT_FALSE(parts[i].empty());
    for (const AttendItem& item : parts[i]) {
      const AttendItem& first = parts[item.first_part].front();
      EXPECT_EQ(item.parts, first.parts);
      EXPECT_EQ(item.first_part + item.part, i);
      EXPECT_EQ(item.kv_head, first.kv_head);
      EXPECT_EQ(item.first_token, first.first_token);
      EXPECT_EQ(item.first_row, first.first_row);
      EXPECT_EQ(item.rows, first.rows);
      flat.push_back(item);
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
    const Batch batch = RandomBatch(random, o.layout.page_tokens, o.identity);
    std::vector<AttendItem> items(100000);
    std::vector<uint32_t> slots(100000);
    DevicePlanner planner(o);
    const auto planned = planner.Plan(batch.sequences, {absl::MakeSpan(items), absl::MakeSpan(slots)});
    ASSERT_TRUE(planned.ok()) << planned.status();
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
      ASSERT_LE(item.first_page + item.pages, planned->slots);
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
    for (const DeviceSequence& s : batch.sequences) {
      for (int token = 0; token < s.tokens; ++token, ++row_token) {
        const uint64_t position = s.first_position + token;
        const uint32_t own = uint32_t(position / o.layout.page_tokens);
        std::vector<uint32_t> wanted;
        std::vector<PageForm> forms;
        for (uint32_t j = 0; j <= own; ++j) {
          const DevicePage& page = s.pages[j];
          const bool near = j == own || (page.lag_applies && own - j <= uint32_t(o.lag_pages));
          const bool raw = page.encoded == DevicePage::kNoSlot || (near && page.raw != DevicePage::kNoSlot);
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
  std::vector<std::vector<DevicePage>> pages;
  std::vector<DeviceSequence> sequences;
  for (int s = 0; s < 32; ++s) {
    const uint64_t context = s == 0 ? 131072 : 4096;
    pages.emplace_back(context / 64);
    for (size_t j = 0; j < pages.back().size(); ++j) {
      (j + 3 >= pages.back().size() ? pages.back()[j].raw : pages.back()[j].encoded) = uint32_t(j);
    }
    sequences.push_back({{}, context - 1, 1});
  }
  for (int s = 0; s < 32; ++s) sequences[s].pages = pages[s];
  std::vector<AttendItem> items(10000);
  std::vector<uint32_t> slots(10000);
  const auto planned = DevicePlanner(o).Plan(sequences, {absl::MakeSpan(items), absl::MakeSpan(slots)});
  ASSERT_TRUE(planned.ok()) << planned.status();
  std::vector<uint64_t> costs;
  for (uint32_t b = 0; b < 132; ++b) {
    costs.push_back(0);
    for (uint32_t at = b;; at = items[at].next) {
      costs.back() += items[at].pages * (items[at].form == PageForm::kRaw ? 5 : 1);
      if (items[at].next == 0) break;
    }
  }
  const auto [least, most] = std::minmax_element(costs.begin(), costs.end());
  EXPECT_LE(*most - *least, 2u * 5);
}

TEST(DevicePlan, SaysWhichBufferIsTooSmall) {
  DevicePlanner::Options o;
  o.layout.kv_heads = 2;
  o.layout.head_dim = 64;
  o.query_heads = 2;
  o.blocks = 4;
  o.warps = 8;
  o.encoded_cost = 1000;
  std::vector<DevicePage> pages(40);
  for (DevicePage& page : pages) page.raw = 1;
  const DeviceSequence sequence{pages, 40 * 64 - 1, 1};
  std::vector<AttendItem> items(64);
  std::vector<uint32_t> slots(64);
  DevicePlanner planner(o);
  const DevicePlanBuffers whole{absl::MakeSpan(items), absl::MakeSpan(slots)};
  EXPECT_TRUE(planner.Plan({&sequence, 1}, whole).ok());
  DevicePlanBuffers few = whole;
  few.items = few.items.subspan(0, 3);
  const absl::Status no_items = planner.Plan({&sequence, 1}, few).status();
  EXPECT_TRUE(absl::IsResourceExhausted(no_items));
  EXPECT_EQ(DetailOf(no_items).field, "plan items");
  few = whole;
  few.slots = few.slots.subspan(0, 39);
  const absl::Status no_slots = planner.Plan({&sequence, 1}, few).status();
  EXPECT_TRUE(absl::IsResourceExhausted(no_slots));
  EXPECT_EQ(DetailOf(no_slots).bound, "at most 39");
}

}  // namespace
}  // namespace kvmanager
