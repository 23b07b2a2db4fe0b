#include "codecs/million/million_device_format.h"

#include <cstring>
#include <set>

#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::million {
namespace {

TEST(MillionDeviceFormat, EveryCodeHasAPlaceInABankOfItsSubspace) {
  const MillionFormat format = MakeFormat(MakeLayout(2, 128, 64), {64, 8}, {64, 8});
  const Books books(format, 2, 1);
  const MillionDeviceFormat made = MakeMillionDeviceFormat(format, *books.tables);
  ASSERT_TRUE(MillionPairs(format));
  ASSERT_EQ(made.pairs.size(), 4u);
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      const MillionPairTables& pairs = made.pairs[2 * layer + head];
      for (int side = 0; side < 2; ++side) {
        const SideTable& table = books.tables->at(side, layer, head);
        for (int c = 0; c < 128; ++c) {
          EXPECT_EQ(pairs.step[side][c], table.step[c]);
          EXPECT_EQ(pairs.mid[side][c], table.mid[c]);
          const int subspace = c / 2, place = 128 * side + 4 * (subspace % 32) + 2 * (subspace / 32) + c % 2;
          for (int index = 0; index < 256; ++index) {
            ASSERT_EQ(int8_t(pairs.rows[index][place]), CodeOf(side, table.by_channel[c * table.entries + index]));
          }
        }
      }
    }
  }
}

TEST(MillionDeviceFormat, CodebooksAreTheTablesAndKeptOnce) {
  const MillionFormat format = MakeFormat(MakeLayout(3, 48, 128), {16, 9}, {12, 4});
  const Books books(format, 1, 2);
  MillionCodebooks shared = books.books;
  shared.side[kSideV].assign(3, shared.side[kSideV][0]);
  const MillionTables tables(format, shared, TableOrder::kByChannel, TableOrder::kByChannel);
  const MillionDeviceFormat made = MakeMillionDeviceFormat(format, tables);
  EXPECT_FALSE(MillionPairs(format));
  EXPECT_TRUE(made.pairs.empty());
  ASSERT_EQ(made.codebooks.size(), 6u);
  EXPECT_EQ(std::set<uint64_t>(made.codebooks.begin(), made.codebooks.end()).size(), 4u);
  for (int head = 0; head < 3; ++head) {
    for (int side = 0; side < 2; ++side) {
      const SideTable& table = tables.at(side, 0, head);
      const uint8_t* const at = made.bytes.data() + made.codebooks[2 * head + side];
      const size_t codes = 48 * made.shape.entries[side];
      EXPECT_EQ(made.shape.entries[side], uint32_t(table.entries));
      EXPECT_EQ(0, std::memcmp(at, table.by_channel, codes));
      EXPECT_EQ(0, std::memcmp(at + made.shape.steps_at[side], table.step, 48 * sizeof(float)));
      EXPECT_EQ(0, std::memcmp(at + made.shape.mids_at[side], table.mid, 48 * sizeof(float)));
    }
  }
}

TEST(MillionDeviceFormat, OtherFormatsHaveNoPairs) {
  EXPECT_FALSE(MillionPairs(MakeFormat(MakeLayout(1, 64, 64), {64, 8}, {64, 8})));
  EXPECT_FALSE(MillionPairs(MakeFormat(MakeLayout(1, 128, 128), {64, 8}, {64, 8})));
  EXPECT_FALSE(MillionPairs(MakeFormat(MakeLayout(1, 128, 64), {64, 7}, {64, 8})));
  EXPECT_FALSE(MillionPairs(MakeFormat(MakeLayout(1, 128, 64), {64, 8}, {32, 8})));
}

}  // namespace
}  // namespace kvmanager::million
