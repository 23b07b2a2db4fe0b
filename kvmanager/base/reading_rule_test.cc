#include "kvmanager/base/reading_rule.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace kvmanager {
namespace {

// A sequence by the words of the rule alone, token by token: which pages have aged, and what a query reads raw.
struct Model {
  ReadingRule rule;
  std::vector<bool> aged;  // [pages]
  uint64_t tokens = 0;

  void Touch(uint64_t position) {
    for (uint64_t page = 0; page < aged.size(); ++page) {
      const uint64_t own = position / rule.page_tokens;
      if (own > page && own - page > static_cast<uint64_t>(rule.lag_pages)) aged[page] = true;
    }
  }
  void Append(uint64_t count) {
    aged.resize((tokens + count + rule.page_tokens - 1) / rule.page_tokens, false);
    Touch(tokens);
    tokens += count;
  }
  void Crop(uint64_t to) {
    if (to >= tokens) return;
    Touch(tokens - 1);
    tokens = to;
    aged.resize((tokens + rule.page_tokens - 1) / rule.page_tokens);
  }
  bool ReadsRaw(uint64_t position, uint32_t page) const {
    const uint64_t own = position / rule.page_tokens;
    return own == page || (!aged[page] && own - page <= static_cast<uint64_t>(rule.lag_pages));
  }
};

TEST(ReadingRule, AgreesWithItsWordsOnRandomSequences) {
  std::mt19937 random(11);
  const auto below = [&](uint64_t n) { return random() % n; };
  uint64_t raw = 0, encoded = 0, aged_within_lag = 0;
  for (int round = 0; round < 300; ++round) {
    Model model;
    model.rule = {static_cast<int>(1 + below(9)), static_cast<int>(below(4))};
    uint32_t aged = 0;  // as the store keeps it
    for (int step = 0; step < 30; ++step) {
      if (model.tokens > 0 && below(4) == 0) {
        const uint64_t to = below(model.tokens + 1);
        if (to < model.tokens) aged = std::max(aged, model.rule.AgedPages(model.tokens - 1));
        model.Crop(to);
        aged = std::min(aged, static_cast<uint32_t>(to / model.rule.page_tokens));
        // A crop into an aged page is refused by the store: what is left of one is nobody's.
        for (size_t page = aged; page < model.aged.size(); ++page) model.aged[page] = false;
      } else {
        aged = std::max(aged, model.rule.AgedPages(model.tokens));
        model.Append(1 + below(25));
      }
      for (size_t page = 0; page < model.aged.size(); ++page) ASSERT_EQ(model.aged[page], page < aged);
      if (model.tokens == 0) continue;
      for (int query = 0; query < 5; ++query) {
        const uint64_t position = below(model.tokens);
        const uint32_t own = model.rule.PageOf(position);
        const auto lag = static_cast<uint32_t>(model.rule.lag_pages);
        const uint32_t first_raw = ReadingRule::FirstRawPage(own, aged, lag);
        for (uint32_t page = 0; page <= own; ++page) {
          const bool expected = model.ReadsRaw(position, page);
          ASSERT_EQ(page >= first_raw, expected) << "page " << page << " of " << own;
          ASSERT_EQ(ReadingRule::ReadsRaw(true, true, page >= aged, own - page, lag), expected);
          ASSERT_TRUE(ReadingRule::ReadsRaw(true, false, page >= aged, own - page, lag));
          ASSERT_FALSE(ReadingRule::ReadsRaw(false, true, page >= aged, own - page, lag));
          ASSERT_EQ(page < model.rule.AgedPages(position), page < own && own - page > lag);
          (expected ? raw : encoded) += 1;
          aged_within_lag += !expected && own - page <= lag;
        }
      }
    }
  }
  EXPECT_GT(raw, 1000u);
  EXPECT_GT(encoded, 1000u);
  EXPECT_GT(aged_within_lag, 100u);
}

TEST(ReadingRule, SinksArePagesThatBeginBeforeTheirEnd) {
  for (int page_tokens = 1; page_tokens < 6; ++page_tokens) {
    const ReadingRule rule{page_tokens, 0};
    for (uint64_t sink_tokens = 0; sink_tokens < 20; ++sink_tokens) {
      for (uint64_t page = 0; page < 25; ++page) {
        EXPECT_EQ(page < rule.SinkPages(sink_tokens), page * page_tokens < sink_tokens);
      }
    }
    EXPECT_EQ(rule.SinkPages(UINT64_MAX), UINT64_MAX / page_tokens + (UINT64_MAX % page_tokens != 0));
  }
}

// Queries of a batch that appends its own tokens: none reads a page encoded that the batch fills, and one token more
// would.
TEST(ReadingRule, ABatchThatAppendsEndsBeforeItReadsItsOwnPagesEncoded) {
  for (int page_tokens = 1; page_tokens < 6; ++page_tokens) {
    for (int lag = 0; lag < 4; ++lag) {
      const ReadingRule rule{page_tokens, lag};
      for (uint64_t position = 0; position < 40; ++position) {
        const uint64_t end = rule.EndOfAppendAndAttend(position);
        const uint32_t first_page = rule.PageOf(position);
        EXPECT_LE(rule.AgedPages(end - 1), first_page);
        EXPECT_GT(rule.AgedPages(end), first_page);
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager
