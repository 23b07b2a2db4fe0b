#include "attention/selected_plan.h"

#include <map>
#include <set>
#include <utility>

#include "codecs/pq/pq_selects.h"
#include "gtest/gtest.h"

namespace kvmanager {
namespace {

std::vector<SelectedList> ListsOf(const std::vector<pq::DeviceSelect>& queries) {
  std::vector<SelectedList> lists;
  for (const pq::DeviceSelect& query : queries)
    lists.push_back({query.list, query.list_stride, query.rows(), query.token});
  return lists;
}

PageLayout MakeLayout() {
  PageLayout layout;
  layout.kv_heads = 3;
  layout.head_dim = 128;
  layout.page_tokens = 64;
  return layout;
}

pq::DeviceShape MakeShape(int group) {
  pq::DeviceShape shape;
  shape.kv_heads = 3;
  shape.query_heads = 3 * group;
  shape.head_dim = 128;
  shape.page_tokens = 64;
  shape.m = 4, shape.bits = 8;
  return shape;
}

TEST(SelectedPlan, EveryRowOfEveryListIsReadOnce) {
  for (const int group : {1, 4, 16}) {
    const pq::DeviceShape shape = MakeShape(group);
    std::vector<pq::DeviceSelect> queries(5);
    const uint64_t positions[] = {0, 63, 700, 5000, 100000};
    for (size_t i = 0; i < queries.size(); ++i) {
      queries[i].token = uint32_t(3 * i + 1);  // others' tokens lie between
      pq::SetReads(pq::Parameters(), positions[i], &queries[i]);
    }
    const auto sizes = pq::PlaceSelects(shape, absl::MakeSpan(queries));
    ASSERT_TRUE(sizes.ok());
    uint32_t rows = 0, runs = 0;
    for (const pq::DeviceSelect& q : queries) {
      EXPECT_EQ(q.list, rows);
      EXPECT_EQ(q.first_run, runs);
      EXPECT_GE(q.list_stride, q.rows());
      EXPECT_EQ(q.list_stride % 64, 0u);
      rows += 3 * q.list_stride;
      runs += 3 * pq::SelectRuns(q.middle);
      EXPECT_LE(q.middle, sizes->middle_max);
    }
    EXPECT_EQ(sizes->rows, rows);
    EXPECT_EQ(sizes->runs, runs);

    SelectedPlanner planner(MakeLayout(), shape.query_heads, 20, 13);
    std::vector<device::AttendItem> items(1000);
    const auto planned = planner.Plan(ListsOf(queries), absl::MakeSpan(items));
    ASSERT_TRUE(planned.ok());
    items.resize(planned->items);
    std::map<std::pair<uint32_t, int>, std::set<uint32_t>> read;  // of a query and row of the tile's group and head
    for (const device::AttendItem& item : items) {
      if (item.pages == 0) continue;
      ASSERT_EQ(item.first_token % 3, 1u);
      const pq::DeviceSelect& q = queries[item.first_token / 3];
      const uint32_t list = q.list + item.kv_head * q.list_stride;
      for (uint32_t i = 0; i < item.pages; ++i) {
        const uint32_t tokens = i + 1 == item.pages ? item.last_visible : 64;
        for (uint32_t t = 0; t < tokens; ++t) {
          const uint32_t place = item.first_page + 64 * i + t;
          ASSERT_GE(place, list);
          ASSERT_LT(place, list + q.rows());
          for (int row = 0; row < item.rows; ++row) {
            const int head = item.kv_head * group + item.first_row + row;
            ASSERT_TRUE((read[{item.first_token, head}].insert(place).second));
          }
        }
      }
    }
    for (uint32_t i = 0; i < queries.size(); ++i) {
      for (int head = 0; head < shape.query_heads; ++head) {
        EXPECT_EQ((read[{3 * i + 1, head}].size()), queries[i].rows()) << i << " " << head;
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager
