#include "client/cli/format.h"

#include <gtest/gtest.h>

#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

TEST(Format, Bytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.0 MiB");  // not "1024.0 KiB"
  EXPECT_EQ(FormatBytes(uint64_t{12} << 30), "12.0 GiB");
  EXPECT_EQ(FormatBytes(UINT64_MAX), "16.0 EiB");
}

TEST(Format, Seconds) {
  EXPECT_EQ(FormatSeconds(0), "0.0 s");
  EXPECT_EQ(FormatSeconds(59.96), "1 m 00 s");
  EXPECT_EQ(FormatSeconds(245), "4 m 05 s");
  EXPECT_EQ(FormatSeconds(3 * 3600 + 7 * 60), "3 h 07 m");
  EXPECT_EQ(FormatSeconds(2 * 86400 + 4 * 3600), "2 d 04 h");
  EXPECT_EQ(FormatSeconds(-1), "-");
  EXPECT_EQ(FormatSeconds(0.0 / 0.0), "-");
}

TEST(Format, TableAlignsNumbersToTheRight) {
  EXPECT_EQ(FormatTable({"NAME", "COUNT"}, {{"a", "5"}, {"longer", "12345"}}),
            "NAME    COUNT\n"
            "a           5\n"
            "longer  12345\n");
  EXPECT_EQ(FormatTable({"PEER", "B"}, {{"1.2.3.4:5", "1.0 KiB"}, {"a", "2 B"}}),
            "PEER             B\n"
            "1.2.3.4:5  1.0 KiB\n"
            "a              2 B\n");
  EXPECT_EQ(FormatTable({"A"}, {}), "A\n");
  EXPECT_EQ(FormatTable({"A"}, {{"x\n\x1b[2J"}}), "A\nx??[2J\n");  // what a client calls itself moves no cursor
}

TEST(Format, Status) {
  DaemonDescription d{.version = "0.1.0", .boot_epoch = UINT64_MAX, .uptime_seconds = 61, .draining = true};
  d.pools.push_back(
      {.tier = "host", .capacity_bytes = uint64_t{4} << 30, .used_bytes = uint64_t{1} << 30, .free_slabs = 3});
  d.leases = 5;
  d.waiting_hand_offs = 7;
  d.gpus = "no GPU driver";
  d.ucx = "UCX 1.13, process 7";
  d.pools.push_back({.tier = "device:1", .capacity_bytes = uint64_t{8} << 30});
  d.pinned_bytes = uint64_t{1} << 30;
  d.pin_total_bytes = uint64_t{4} << 30;
  d.pin_error = "locked memory";
  const std::string text = FormatStatus(d);
  for (const char* expected : {"0.1.0", "draining", "1 m 01 s", "ffffffffffffffff", "4.0 GiB", "25.0%", "no GPU driver",
                               "device:1", "1.0 GiB of 4.0 GiB; the rest stays so: locked memory"}) {
    EXPECT_NE(text.find(expected), std::string::npos) << expected << "\n" << text;
  }
  const auto json = ToJson(d);
  EXPECT_EQ(json["boot_epoch"], "ffffffffffffffff");
  EXPECT_EQ(json["pools"][0]["capacity_bytes"], uint64_t{4} << 30);
  EXPECT_EQ(json["leases"], 5);
  EXPECT_EQ(json["pin_total_bytes"], uint64_t{4} << 30);
  EXPECT_EQ(json["gpus"], "no GPU driver");
  EXPECT_EQ(json["ucx"], "UCX 1.13, process 7");
  EXPECT_NE(text.find("UCX:               UCX 1.13, process 7"), std::string::npos) << text;
  EXPECT_EQ(json["waiting_hand_offs"], 7);
  EXPECT_NE(text.find("waiting hand-offs: 7"), std::string::npos) << text;
  EXPECT_EQ(nlohmann::json::parse(json.dump()), json);
  EXPECT_TRUE(json["disk"].is_null());
  EXPECT_NE(text.find("disk:              -"), std::string::npos) << text;
}

TEST(Format, StatusOfADisk) {
  DaemonDescription d;
  d.disk = client::DiskDescription{"/disk", uint64_t{1} << 40, uint64_t{1} << 30, 500, 3, "ready"};
  EXPECT_NE(FormatStatus(d).find("disk:              /disk: 1.0 GiB of 1.0 TiB, 500 blocks, 3 to be written; ready"),
            std::string::npos)
      << FormatStatus(d);
  const auto json = ToJson(d)["disk"];
  EXPECT_EQ(json["path"], "/disk");
  EXPECT_EQ(json["capacity_bytes"], uint64_t{1} << 40);
  EXPECT_EQ(json["used_bytes"], uint64_t{1} << 30);
  EXPECT_EQ(json["blocks"], 500);
  EXPECT_EQ(json["unwritten_blocks"], 3);
  EXPECT_EQ(json["state"], "ready");
}

TEST(Format, ListsAndEmptyLists) {
  CacheDescription cache{.id = 3, .raw_page_bytes = 1000, .encoded_page_bytes = 180, .sink_tokens = 1088};
  cache.options.model = "llama";
  cache.options.codec = "hack:k=3,v=2";
  EXPECT_NE(FormatCaches({cache}).find("0.180"), std::string::npos) << FormatCaches({cache});
  EXPECT_NE(FormatCaches({cache}).find(" 1088 "), std::string::npos) << FormatCaches({cache});
  EXPECT_EQ(ToJson(std::vector<CacheDescription>{cache})["caches"][0]["codec"], "hack:k=3,v=2");
  EXPECT_EQ(ToJson(std::vector<CacheDescription>{cache})["caches"][0]["sink_tokens"], 1088);
  EXPECT_NE(FormatCaches({}).find("no caches"), std::string::npos);
  EXPECT_EQ(ToJson(std::vector<CacheDescription>{})["caches"], nlohmann::json::array());
  const std::string held = FormatSequences({{.id = 9, .tokens = 6000, .client = "my engine", .pid = 4242}});
  for (const char* word : {"6000", "4242", "my engine"}) EXPECT_NE(held.find(word), std::string::npos) << held;
  EXPECT_NE(FormatSequences({}).find("no sequences"), std::string::npos);
  EXPECT_NE(FormatPeers({{.peer = "h:1", .bytes_per_second = 2e9}}).find("1.9 GiB/s"), std::string::npos);
  EXPECT_NE(FormatPeers({{.peer = "h:1", .bytes = 2048, .copied_bytes = 1024}}).find("2.0 KiB  1.0 KiB"),
            std::string::npos);
  EXPECT_NE(FormatPeers({}).find("no peers"), std::string::npos);
  PeerDescription asked{.peer = "h:1", .bytes_per_second = 1 << 30};
  asked.load = PeerLoad{.capacity_bytes = 4 << 20, .free_bytes = 3 << 20, .queued_bytes = 1 << 20, .waiting_offers = 5};
  const std::string load = FormatPeers({asked, {.peer = "h:2"}});
  for (const char* word : {"ASKED", "4.0 MiB", "3.0 MiB", "1.0 MiB", " 5 ", "not asked"}) {
    EXPECT_NE(load.find(word), std::string::npos) << word << "\n" << load;
  }
  const nlohmann::json both = ToJson(std::vector<PeerDescription>{asked, {.peer = "h:2"}})["peers"];
  EXPECT_EQ(both[0]["load"]["free_bytes"], 3 << 20);
  EXPECT_EQ(both[1]["load_error"], "not asked");
  EXPECT_FALSE(both[1].contains("load"));
}

TEST(Format, LimitsHaveTheirUnits) {
  const std::vector<LimitDescription> limits = {
      {.name = "arena_bytes",
       .scope = "daemon",
       .unit = "bytes",
       .limit = uint64_t{8} << 30,
       .used = 3 << 20,
       .flag = "--arena-bytes",
       .bounds = "arenas"},
      {.name = "hello_ms", .scope = "connection", .unit = "ms", .limit = 10000, .bounds = "until hello"},
      {.name = "caches", .scope = "daemon", .unit = "caches", .limit = 4096, .used = 0, .bounds = "open caches"}};
  const std::string text = FormatLimits(limits);
  for (const char* word : {"8.0 GiB", "3.0 MiB", "--arena-bytes", "10000 ms", "4096", "fixed", "until hello"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << "\n" << text;
  }
  const nlohmann::json json = ToJson(limits)["limits"];
  EXPECT_EQ(json[0]["limit"], uint64_t{8} << 30);
  EXPECT_EQ(json[0]["used"], 3 << 20);
  EXPECT_TRUE(json[1]["used"].is_null()) << "not counted";
  EXPECT_EQ(json[2]["used"], 0);
}

TEST(Format, AnyBytesOfAClientMakeValidJson) {
  PeerDescription peer{.peer = "bad \xff\xfe utf-8", .last_error = std::string("\0\x01", 2)};
  const std::string text = ToJson(std::vector<PeerDescription>{peer}).dump();
  EXPECT_TRUE(nlohmann::json::accept(text));
}

TEST(Format, ErrorsSayWhatToDoNext) {
  const auto gone = absl::UnavailableError("cannot connect");
  EXPECT_NE(Advice(gone, "unix:/x").find("kvmanagerd --listen unix:/x"), std::string::npos);
  EXPECT_NE(Advice(gone, "unix:/x").find("the flags that it had, --state-dir among them"), std::string::npos);
  EXPECT_EQ(Advice(WithDetail(gone, {.field = kUpgradeField}), "unix:/x"), "") << "it says itself how to start it";
  EXPECT_EQ(Advice(gone, "unix:/x", /*reached=*/true).find("kvmanagerd --listen"), std::string::npos);
  EXPECT_NE(Advice(gone, "unix:/x", /*reached=*/true).find("kvctl status"), std::string::npos);
  const auto missing = [](const char* field) { return FieldError(absl::StatusCode::kNotFound, field, "x", "y"); };
  EXPECT_NE(Advice(missing("--cache"), "unix:/x").find("kvctl caches"), std::string::npos);
  EXPECT_EQ(Advice(missing("--tokens"), "unix:/x"), "") << "a file";
  const auto json = ErrorToJson(InvalidField("cache_id", 9, "0..3"), "unix:/x")["error"];
  EXPECT_EQ(json["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(json["field"], "cache_id");
  EXPECT_EQ(json["bound"], "0..3");
  EXPECT_FALSE(json.contains("advice"));
}

}  // namespace
}  // namespace kvmanager::client::cli
