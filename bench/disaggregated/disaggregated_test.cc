// The benchmark's parts with the model of this repository: what is sent and what the decode host answers, over a link
// between two network namespaces. Never how long it takes. Where no namespace can be made, that part is skipped.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "bench/disaggregated/emulated_link.h"
#include "bench/disaggregated/report.h"
#include "bench/disaggregated/request.h"
#include "bench/disaggregated/stacked_bars.h"
#include "examples/engine/daemon_process.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::bench {
namespace {

constexpr uint64_t kPoolBytes = 128 << 20;
constexpr double kLinkBits = 1e9;
constexpr int kPage = 64;

struct Case {
  const char* codec;
  int lag;
  int tokens;
};

class DisaggregatedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto link = EmulatedLink::Create();
    if (!link.ok()) {
      std::printf("SKIPPED, no emulated link here: %s\n", link.status().ToString().c_str());
      GTEST_SKIP() << link.status();
    }
    link_ = *std::move(link);
    ASSERT_OK(link_->SetRate(kLinkBits));
    ASSERT_OK_AND_ASSIGN(model_, engine::Model::Load(testing::DataPath("examples/model")));
    const std::string program = testing::DataPath("kvmanager/daemon/kvmanagerd");
    const std::vector<std::string> by_link = {"--peer-local-copy", "off", "--hand-off-peers", "any"};
    std::vector<std::string> listening = by_link;
    listening.insert(listening.end(), {"--peer-listen", EmulatedLink::far_address() + ":0", "--insecure",
                                       "--peer-tenants", "any"});  // a network of its own
    ASSERT_OK_AND_ASSIGN(prefill_, engine::DaemonProcess::Start(program, kPoolBytes, by_link));
    ASSERT_OK_AND_ASSIGN(decode_, engine::DaemonProcess::Start(program, kPoolBytes, listening, link_->far_network()));
    ASSERT_OK_AND_ASSIGN(const auto client, client::Client::Connect(decode_->address(), {}));
    daemons_ = {prefill_->address(), decode_->address(), client->peer_address()};
  }

  // Bytes of pages that a hand-off of `tokens` moves to a receiver that goes on.
  uint64_t ExpectedBytes(const client::CacheDescription& cache, const Case& c) const {
    const uint64_t full = c.tokens / kPage, open = c.tokens % kPage != 0;
    const uint64_t encoded = full > uint64_t(c.lag) ? full - c.lag : 0;  // what the next token reads so
    const bool raw = cache.options.codec == "raw";
    const uint64_t sinks = std::min(encoded, cache.sink_tokens / kPage);
    const uint64_t per_layer =
        raw ? (full + open) * cache.raw_page_bytes
            : (encoded - sinks) * cache.encoded_page_bytes + (full - encoded + sinks + open) * cache.raw_page_bytes;
    return per_layer * cache.options.layers;
  }

  std::unique_ptr<EmulatedLink> link_;
  std::unique_ptr<engine::Model> model_;
  std::unique_ptr<engine::DaemonProcess> prefill_, decode_;
  Daemons daemons_;
};

TEST_F(DisaggregatedTest, TheDecodeHostGoesOnAsOneDaemonWouldAndTheBytesAreThosePromised) {
  std::ifstream file(testing::DataPath("examples/model/held_out.txt"));
  std::stringstream text;
  text << file.rdbuf();
  for (const Case& c : {Case{"raw", 0, 5 * kPage}, Case{"hack", 0, 5 * kPage}, Case{"hack", 2, 5 * kPage},
                        Case{"hack", 0, 4 * kPage + 44}, Case{"hack:k_bits=2,v_bits=2", 2, 3 * kPage + 1},
                        Case{"pq:m=4,bits=4,ratio=0.5", 2, 5 * kPage}}) {
    SCOPED_TRACE(::testing::Message() << c.codec << ", lag " << c.lag << ", " << c.tokens << " tokens");
    RequestShape shape;
    for (const unsigned char byte : text.str().substr(0, c.tokens)) shape.prompt.push_back(byte);
    ASSERT_EQ(shape.prompt.size(), size_t(c.tokens));
    shape.decode_tokens = 8;
    engine::KvEngineOptions options;
    options.codec = c.codec;
    options.lag_pages = c.lag;
    ASSERT_OK_AND_ASSIGN(const auto pair, CodecPair::Open(model_.get(), daemons_, options, shape));
    EXPECT_CODE(pair->Alone(), kFailedPrecondition);
    ASSERT_OK_AND_ASSIGN(const RequestTimes here, pair->Here());
    ASSERT_EQ(here.tokens.size(), 8u);
    ASSERT_OK_AND_ASSIGN(const LinkCounters before, link_->Counters());
    ASSERT_OK_AND_ASSIGN(const RequestTimes streamed, pair->Streamed());
    ASSERT_OK_AND_ASSIGN(const LinkCounters after, link_->Counters());
    ASSERT_OK_AND_ASSIGN(const AloneTimes alone, pair->Alone());
    EXPECT_EQ(streamed.tokens, here.tokens);
    EXPECT_EQ(alone.tokens, here.tokens);
    EXPECT_EQ(streamed.bytes, alone.bytes);
    if (absl::string_view(c.codec).substr(0, 2) != "pq") {
      EXPECT_EQ(alone.bytes, ExpectedBytes(pair->cache(), c));
    }
    // They went by the link, and nothing else did.
    EXPECT_GE(after.sent_bytes - before.sent_bytes, streamed.bytes);
    EXPECT_LE(double(after.sent_bytes - before.sent_bytes), 1.2 * double(streamed.bytes) + 1e5);
  }
}

TEST(Report, MediansAndRatiosToRaw) {
  Report report;
  report.workers = 2;
  report.links.push_back({"a link", 1e9, {}});
  Row raw{"raw", "raw", 0, 1000, 0, 0, {}}, hack{"hack", "hack:k_bits=3", 0, 180, 0, 0, {}};
  for (const double t : {9.0, 1.0, 2.0}) {
    raw.samples.push_back({.prefill = t, .exposed = t, .job = 2 * t, .alone = 4 * t});
    hack.samples.push_back({.prefill = t, .encode = t, .exposed = t / 10, .job = t, .alone = t});
  }
  report.links[0].rows = {raw, hack};
  AddRatios(&report);
  const Row& row = report.links[0].rows[1];
  EXPECT_DOUBLE_EQ(row.Median(&Sample::prefill), 2);
  EXPECT_DOUBLE_EQ(row.Hidden(), 0.9);
  EXPECT_DOUBLE_EQ(report.links[0].rows[0].Hidden(), 0.75);
  EXPECT_DOUBLE_EQ(row.LinkUse(1e6), 180 * 8 / 2.0 / 1e6);
  EXPECT_DOUBLE_EQ(row.raw_bytes_ratio, 0.18);
  EXPECT_DOUBLE_EQ(row.raw_job_ratio, 0.5);
  EXPECT_NE(MarkdownTables(report).find("| hack | 0 | 0.000 | 0.1800 | 2.0000 | 2.0000 | 2.0000 | 0.2000 |"),
            std::string::npos)
      << MarkdownTables(report);
  EXPECT_EQ(ToJson(report)["links"][0]["rows"][1]["samples"].size(), 3u);
}

TEST(StackedBars, DrawsEveryPartToScale) {
  const std::vector<std::string> parts = {"one", "two & more"};
  const std::vector<BarGroup> groups = {{"G<1>", {{"first", {1, 3}, "note"}, {"second", {2, 0}, ""}}}};
  const std::string svg = StackedBarsSvg("A title", "seconds", parts, groups);
  for (const char* word :
       {"G&lt;1&gt;", "two &amp; more", "<title>two &amp; more: 3 seconds</title>", "note", "</svg>"}) {
    EXPECT_NE(svg.find(word), std::string::npos) << word << "\n" << svg;
  }
  // 580 pixels for the longest bar of 4.
  EXPECT_NE(svg.find("width=\"145.00\""), std::string::npos) << svg;
  EXPECT_NE(svg.find("width=\"435.00\""), std::string::npos) << svg;
  EXPECT_NE(svg.find("width=\"290.00\""), std::string::npos) << svg;
}

}  // namespace
}  // namespace kvmanager::bench
