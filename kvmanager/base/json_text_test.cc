#include "kvmanager/base/json_text.h"

#include <nlohmann/json.hpp>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

using nlohmann::json;

TEST(JsonTextTest, ShowsScalarsAsTheyAreWritten) {
  EXPECT_EQ(JsonText(-5), "-5");
  EXPECT_EQ(JsonText(nullptr), "null");
  EXPECT_EQ(JsonText("a\n\xff\x7f\xc3\xa9"), "\"a\\n\\ufffd\\u007f\\u00e9\"");
}

TEST(JsonTextTest, CutsWhatIsLong) {
  const std::string text = JsonText(std::string(1 << 20, 'x'));
  EXPECT_EQ(text.size(), kJsonTextBytesMax + 3);
  EXPECT_EQ(text.substr(kJsonTextBytesMax), "...");
}

TEST(JsonTextTest, ShowsNothingOfWhatNests) {
  constexpr size_t kDepth = 1 << 20;
  EXPECT_EQ(JsonText(json::parse(std::string(kDepth, '[') + std::string(kDepth, ']'))), "array");
  EXPECT_EQ(JsonText({{"a", 1}}), "object");
}

}  // namespace
}  // namespace kvmanager
