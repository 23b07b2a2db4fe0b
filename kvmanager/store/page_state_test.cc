// The table of page_state.h as a whole: each page can be made and given back, and nothing outside the table happens.
#include "kvmanager/store/page_state.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "kvmanager/store/store_metrics.h"

namespace kvmanager {
namespace {

const PageId kRaw{1, 1}, kEncoded{2, 1};

class PageStateTest : public ::testing::Test {
 protected:
  void Apply(Page& page, PageEvent event, const PageChange& after) {
    ApplyTransition(page, event, after, {100, 30}, {100, 30}, store_metrics_.PagesOf("fake"));
  }
  double Pages(PageState state) { return store_metrics_.PagesOf("fake").pages[static_cast<size_t>(state)]->Value(); }

  Metrics metrics_;
  StoreMetrics store_metrics_{&metrics_};
};

TEST_F(PageStateTest, EveryStateIsReachedAndLeadsBackToFree) {
  std::set<std::pair<PageEvent, PageState>> rows;
  for (const PageTransition& row : PageTransitions()) EXPECT_TRUE(rows.emplace(row.event, row.from).second);
  const auto closure = [](PageState start, bool forward) {
    std::set<PageState> reached = {start};
    for (size_t round = 0; round < kPageStates; ++round) {
      for (const PageTransition& row : PageTransitions()) {
        const auto [from, to] = forward ? std::pair(row.from, row.to) : std::pair(row.to, row.from);
        if (reached.count(from) != 0) reached.insert(to);
      }
    }
    return reached.size();
  };
  EXPECT_EQ(closure(PageState::kFree, true), kPageStates);
  EXPECT_EQ(closure(PageState::kFree, false), kPageStates);
}

TEST_F(PageStateTest, ALifeMovesTheGauges) {
  Page page;
  Apply(page, PageEvent::kOpen, {kRaw, {}});
  Apply(page, PageEvent::kSeal, {kRaw, kEncoded});
  Apply(page, PageEvent::kEncode, {kRaw, kEncoded});
  EXPECT_TRUE(page.busy && page.awaits_encoding());
  EXPECT_EQ(Pages(PageState::kEncoding), 1);
  Apply(page, PageEvent::kEncoded, {kRaw, kEncoded, false, 7});
  EXPECT_TRUE(!page.busy && page.is_full());
  Apply(page, PageEvent::kReleaseRaw, {{}, kEncoded, false, 7});
  const PageGauges& gauges = store_metrics_.PagesOf("fake");
  EXPECT_EQ(gauges.encoded_bytes[static_cast<size_t>(PageState::kResident)]->Value(), 30);
  EXPECT_EQ(gauges.raw_bytes[static_cast<size_t>(PageState::kResident)]->Value(), 0);
  Apply(page, PageEvent::kFree, {});
  for (size_t state = 1; state < kPageStates; ++state) EXPECT_EQ(Pages(static_cast<PageState>(state)), 0);
}

TEST_F(PageStateTest, LoweringChangesTheBytes) {
  const PageId lower{3, 1};
  Page page;
  Apply(page, PageEvent::kReserve, {{}, kEncoded});
  Apply(page, PageEvent::kReceivedEncoded, {{}, kEncoded, false, 7});
  page.pins = page.encoded_pins = 1;
  ApplyTransition(page, PageEvent::kLower, {{}, lower, false, 9, 1}, {100, 30}, {100, 20},
                  store_metrics_.PagesOf("fake"));
  EXPECT_TRUE(page.rung == 1 && page.encoded == lower && page.checksum == 9);
  const prometheus::Gauge& bytes =
      *store_metrics_.PagesOf("fake").encoded_bytes[static_cast<size_t>(PageState::kResident)];
  EXPECT_EQ(bytes.Value(), 20);
  // Other transitions leave the rung as it is, and the end of the page ends it.
  ApplyTransition(page, PageEvent::kQuarantine, {{}, lower, false, 9}, {100, 20}, {100, 20},
                  store_metrics_.PagesOf("fake"));
  EXPECT_EQ(page.rung, 1);
  page.pins = page.encoded_pins = 0;
  ApplyTransition(page, PageEvent::kFree, {}, {100, 20}, {100, 30}, store_metrics_.PagesOf("fake"));
  EXPECT_EQ(page.rung, 0);
  EXPECT_EQ(bytes.Value(), 0);
}

using PageStateDeathTest = PageStateTest;

TEST_F(PageStateDeathTest, NothingElseHappens) {
  for (size_t i = 0; i < kPageEvents; ++i) {
    const auto event = static_cast<PageEvent>(i);
    if (event == PageEvent::kOpen || event == PageEvent::kReserve) continue;
    Page page;
    EXPECT_DEATH(Apply(page, event, {kRaw, kEncoded}), std::string("from free by ") + PageEventName(event));
  }
  Page page;
  EXPECT_DEATH(Apply(page, PageEvent::kOpen, {{}, {}}), "a raw slot is reserved");
  Apply(page, PageEvent::kReserve, {{}, kEncoded});
  Apply(page, PageEvent::kReceivedEncoded, {{}, kEncoded});
  EXPECT_DEATH(Apply(page, PageEvent::kLower, {{}, kRaw, false, 7, 1}), "only what lowers it pins it");
  page.pins = page.encoded_pins = 1;
  EXPECT_DEATH(Apply(page, PageEvent::kLower, {{}, kRaw, false, 7, 0}), "encoded again");
  page.pins = 2;
  EXPECT_DEATH(Apply(page, PageEvent::kLower, {{}, kRaw, false, 7, 1}), "only what lowers it pins it");
  EXPECT_DEATH(Apply(page, PageEvent::kFree, {}), "no lease pins it");
}

}  // namespace
}  // namespace kvmanager
