#include "kvmanager/daemon/limit_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace kvmanager {
namespace {

const Limit* Find(const std::vector<Limit>& limits, const std::string& name) {
  for (const Limit& limit : limits) {
    if (limit.name == name) return &limit;
  }
  return nullptr;
}

TEST(LimitTable, NamesAreOfOneLimitEach) {
  const std::vector<Limit> limits = ListLimits({}, nullptr);
  std::set<std::string> names;
  for (const Limit& limit : limits) {
    EXPECT_TRUE(names.insert(limit.name).second) << limit.name;
    EXPECT_FALSE(limit.scope.empty() || limit.unit.empty() || limit.bounds.empty()) << limit.name;
    EXPECT_TRUE(limit.limit > 0 || !limit.flag.empty()) << limit.name << " allows nothing, and no flag says so";
    EXPECT_EQ(limit.used, std::nullopt) << limit.name;
  }
}

TEST(LimitTable, OptionsDecide) {
  Options options;
  options.host_pool_bytes = 200 << 20;
  options.tenant_most_percent = 25;
  options.memory_beyond_pool_bytes = 256 << 20;
  const std::vector<Limit> limits = ListLimits(options, nullptr);
  EXPECT_EQ(Find(limits, "host_pool_bytes")->limit, 200u << 20);
  EXPECT_EQ(Find(limits, "tenant_pool_bytes")->limit, 50u << 20);
  EXPECT_EQ(Find(limits, "request_bytes")->limit, 128u << 20);
  EXPECT_EQ(Find(limits, "request_bytes")->flag, "--memory-beyond-pool-bytes");
}

TEST(LimitTable, UseIsOfItsRow) {
  LimitUse use;
  use.arena_bytes = 4096;
  use.connection_arenas = 3;
  const std::vector<Limit> limits = ListLimits({}, &use);
  EXPECT_EQ(Find(limits, "arena_bytes")->used, 4096u);
  EXPECT_EQ(Find(limits, "connection_arenas")->used, 3u);
  EXPECT_EQ(Find(limits, "connection_arena_bytes")->used, 0u);
  EXPECT_EQ(Find(limits, "hello_ms")->used, std::nullopt) << "nobody uses a time";
}

TEST(LimitTable, TextsAreThoseOfFlags) {
  const auto text = [](const char* unit, uint64_t limit, const char* flag = "") {
    return LimitText(
        {.name = "x", .scope = "daemon", .unit = unit, .limit = limit, .used = {}, .flag = flag, .bounds = ""});
  };
  EXPECT_EQ(text("bytes", 64 << 10), "64KiB");
  EXPECT_EQ(text("bytes", uint64_t{8} << 30), "8GiB");
  EXPECT_EQ(text("bytes", (32 << 20) - (64 << 10)), "32704KiB");
  EXPECT_EQ(text("bytes", 300), "300");
  EXPECT_EQ(text("ms", 10000), "10000 ms");
  EXPECT_EQ(text("s", 15), "15 s");
  EXPECT_EQ(text("connections", 4096), "4096");
  EXPECT_EQ(text("bytes", 0, "--host-pool-bytes"), "as set");
}

TEST(LimitTable, HelpHasALineOfEach) {
  const std::vector<Limit> limits = ListLimits({}, nullptr);
  const std::string help = LimitsHelp(limits);
  EXPECT_EQ(static_cast<size_t>(std::count(help.begin(), help.end(), '\n')), limits.size() + 1);
  EXPECT_NE(help.find("  hello_ms "), std::string::npos);
}

}  // namespace
}  // namespace kvmanager
