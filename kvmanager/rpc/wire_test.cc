#include "kvmanager/rpc/wire.h"

#include <capnp/message.h>

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint32_t kNames = 1500;

class BlockNamesReaderTest : public ::testing::Test {
 public:
  ~BlockNamesReaderTest() noexcept override {}

 protected:
  BlockNamesReaderTest() : names_(message_.initRoot<api::SequenceRequest>().initPrefix(kNames)) {
    for (uint32_t i = 0; i < kNames; ++i) {
      Fill(names_[i].initKey(32), i);
      Fill(names_[i].initTokens(32), i + 1);
    }
  }
  static void Fill(capnp::Data::Builder bytes, uint32_t number) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(number >> 8 * (i % 4));
  }

  capnp::MallocMessageBuilder message_;
  capnp::List<api::BlockName>::Builder names_;
};

TEST_F(BlockNamesReaderTest, ReadsInPieces) {
  BlockNamesReader reader("prefix", names_.asReader(), kNames);
  int pieces = 1;
  while (reader.ReadNext()) ++pieces;
  EXPECT_EQ(pieces, 3);
  ASSERT_TRUE(reader.status().ok()) << reader.status();
  const std::vector<BlockName> names = reader.Take();
  ASSERT_EQ(names.size(), kNames);
  for (uint32_t i = 0; i < kNames; ++i) {
    uint8_t want[32];
    Fill(capnp::Data::Builder(want, 32), i);
    ASSERT_EQ(std::memcmp(names[i].key.bytes.data(), want, 32), 0) << i;
    Fill(capnp::Data::Builder(want, 32), i + 1);
    ASSERT_EQ(std::memcmp(names[i].tokens.bytes.data(), want, 32), 0) << i;
  }
  const auto at_once = ReadBlockNames("prefix", names_.asReader(), kNames);
  ASSERT_TRUE(at_once.ok()) << at_once.status();
  ASSERT_EQ(at_once->size(), kNames);
  EXPECT_EQ(std::memcmp(at_once->data(), names.data(), kNames * sizeof(BlockName)), 0);
}

TEST_F(BlockNamesReaderTest, AnEmptyListIsRead) {
  capnp::MallocMessageBuilder message;
  BlockNamesReader reader("prefix", message.initRoot<api::SequenceRequest>().initPrefix(0).asReader(), kNames);
  EXPECT_FALSE(reader.ReadNext());
  EXPECT_TRUE(reader.status().ok()) << reader.status();
  EXPECT_TRUE(reader.Take().empty());
}

TEST_F(BlockNamesReaderTest, NamesWhatIsWrong) {
  names_[1400].initTokens(31);
  BlockNamesReader reader("requests[7].prefix", names_.asReader(), kNames);
  while (reader.ReadNext()) {
  }
  EXPECT_EQ(DetailOf(reader.status()).field, "requests[7].prefix[1400].tokens");
  EXPECT_FALSE(reader.ReadNext()) << "it goes no further";
  const absl::Status too_many = ReadBlockNames("names", names_.asReader(), kNames - 1).status();
  EXPECT_EQ(DetailOf(too_many).field, "names");
  EXPECT_EQ(DetailOf(too_many).value, "1500 blocks long");
}

}  // namespace
}  // namespace kvmanager
