// How a step's entries are cut into parts; what steps give, and where they run, is host_calls_test's.
#include "kvmanager/rpc/step_call.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace kvmanager {
namespace {

// Every query is in one part, in order; a part is small, or one page's queries of one entry.
TEST(NextPartTest, CutsEntriesAtPages) {
  std::mt19937_64 random(5);
  constexpr uint32_t kPageTokens = 16;
  for (int round = 0; round < 200; ++round) {
    std::vector<AttendEntry> entries(1 + random() % 600);
    for (AttendEntry& entry : entries) {
      entry.sequence = random();
      entry.position = random() % (random() % 8 == 0 ? 1 << 19 : 1 << 10);
      entry.tokens = 1 + static_cast<int>(random() % (random() % 16 == 0 ? 4096 : 4));
    }
    const auto whole = [&](size_t entry) { return entries[entry].sequence % 7 == 0; };
    StepCursor cursor;
    size_t at = 0;
    int token = 0;
    while (cursor.entry < entries.size()) {
      const auto part = NextPart(entries, kPageTokens, whole, &cursor);
      ASSERT_FALSE(part.empty());
      ASSERT_LE(part.size(), kPlanEntriesMax);
      uint64_t pages = 0;
      for (const AttendEntry& of : part) {
        ASSERT_LT(pages, kPlanPagesMax);
        ASSERT_EQ(of.sequence, entries[at].sequence);
        ASSERT_EQ(of.position, entries[at].position + token);
        ASSERT_GE(of.tokens, 1);
        for (uint64_t page = of.position / kPageTokens; page * kPageTokens < of.position + of.tokens; ++page) {
          ASSERT_TRUE(whole(at) || pages < kPlanPagesMax);
          pages += page + 1;
        }
        token += of.tokens;
        ASSERT_TRUE(!whole(at) || token == entries[at].tokens);
        if (token < entries[at].tokens) {
          ASSERT_EQ((of.position + of.tokens) % kPageTokens, 0u);
          ASSERT_EQ(&of, &part.back());
          continue;
        }
        ++at;
        token = 0;
      }
      ASSERT_EQ(cursor.entry, at);
      ASSERT_EQ(cursor.token, token);
    }
    ASSERT_EQ(at, entries.size());
  }
}

}  // namespace
}  // namespace kvmanager
