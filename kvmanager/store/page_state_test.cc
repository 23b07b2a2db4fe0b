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
    ApplyTransition(page, event, after, {100, 30}, store_metrics_.PagesOf("fake"));
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
  page.pins = 1;
  EXPECT_DEATH(Apply(page, PageEvent::kFree, {}), "no lease pins it");
}

}  // namespace
}  // namespace kvmanager
