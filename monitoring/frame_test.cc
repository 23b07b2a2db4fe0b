#include "monitoring/frame.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "monitoring/metrics.h"

namespace kvmanager {
namespace {

TEST(Readings, ReadWhatTheDaemonWrites) {
  Metrics metrics;
  metrics.Gauge("page_bytes", "Bytes", {{"codec", "a\"b\\c\nd,e=\"}"}, {"tier", "host"}}).Set(7);
  metrics.Gauge("page_bytes", "Bytes", {{"codec", "hack"}, {"tier", "host"}}).Set(1.5e9);
  metrics.Histogram("encode_seconds", "Time", {1, 2, 4}).Observe(3);
  const Readings readings = Readings::Parse(metrics.Text());
  ASSERT_EQ(readings.Of("kvmanager_page_bytes").size(), 2u);
  EXPECT_EQ(readings.Sum("kvmanager_page_bytes"), 1.5e9 + 7);
  EXPECT_EQ(readings.Sum("kvmanager_page_bytes", {{"codec", "a\"b\\c\nd,e=\"}"}}), 7);
  EXPECT_EQ(readings.Sum("kvmanager_page_bytes", {{"tier", "gpu0"}}), 0);
  EXPECT_EQ(readings.Sum("kvmanager_encode_seconds_count"), 1);
  const auto buckets = readings.Buckets("kvmanager_encode_seconds");
  ASSERT_EQ(buckets.size(), 4u);
  EXPECT_EQ(buckets.at(2), 0);
  EXPECT_EQ(buckets.at(4), 1);
  EXPECT_TRUE(std::isinf(buckets.rbegin()->first));
}

TEST(Readings, SkipWhatIsNone) {
  const Readings readings = Readings::Parse(
      "# HELP a b\n\n{} 1\na\na{ 1\na{x=\"1 2\na{x=\"1\"\na{x=\"1\"} \na{x=\"1\"} no\n 5\na{x} 3\na{=\"y\"} 4\nb 2 "
      "12345\r\nc 6");
  EXPECT_EQ(readings.Sum("a"), 4);  // an empty label name is the reader's to allow
  EXPECT_EQ(readings.Sum("b"), 2);
  EXPECT_EQ(readings.Sum("c"), 6);
}

TEST(Quantile, LiesInsideItsBucket) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(std::isnan(QuantileOf({}, 0.5)));
  EXPECT_TRUE(std::isnan(QuantileOf({{1, 0}, {inf, 0}}, 0.5)));
  EXPECT_DOUBLE_EQ(QuantileOf({{1, 10}, {2, 10}, {inf, 10}}, 0.5), 0.5);
  EXPECT_DOUBLE_EQ(QuantileOf({{1, 0}, {2, 10}, {4, 20}, {inf, 20}}, 0.75), 3);
  EXPECT_DOUBLE_EQ(QuantileOf({{1, 0}, {2, 10}, {inf, 20}}, 0.99), 2);
}

TEST(Frame, RatesAreOfTheTimeBetween) {
  Metrics metrics;
  auto& hit = metrics.Counter("prefix_hit_blocks_total", "Hits");
  auto& asked = metrics.Counter("prefix_asked_blocks_total", "Asked");
  auto& sent = metrics.Counter("transport_bytes_total", "Bytes", {{"direction", "sent"}, {"by", "copy"}});
  auto& received = metrics.Counter("transport_bytes_total", "Bytes", {{"direction", "received"}, {"by", "socket"}});
  auto& loop = metrics.Histogram("attend_seconds", "Time", {1e-3, 2e-3, 4e-3}, {{"where", "loop"}});
  loop.Observe(3e-3);
  asked.Increment(5);
  const Readings before = Readings::Parse(metrics.Text());
  asked.Increment(20);
  hit.Increment(15);
  sent.Increment(4096);
  received.Increment(1024);
  for (int i = 0; i < 10; ++i) loop.Observe(0.5e-3);
  metrics.Gauge("pool_capacity_bytes", "Bytes").Set(100);
  metrics.Gauge("pool_used_bytes", "Bytes").Set(25);
  metrics.Gauge("device_pool_capacity_bytes", "Bytes", {{"device", "3"}}).Set(50);
  metrics.Gauge("device_pool_used_bytes", "Bytes", {{"device", "3"}}).Set(5);
  metrics.Gauge("tenant_bytes", "Bytes", {{"tenant", "a"}, {"tier", "host"}, {"form", "raw"}}).Set(1);
  metrics.Gauge("tenant_bytes", "Bytes", {{"tenant", "b"}, {"tier", "host"}, {"form", "raw"}}).Set(2);
  metrics.Gauge("tenant_sequences", "Sequences", {{"tenant", "b"}}).Set(9);
  const Frame frame = FrameOf(before, Readings::Parse(metrics.Text()), 2);
  EXPECT_EQ(frame.asked_blocks, 20);
  EXPECT_EQ(frame.hit_blocks, 15);
  EXPECT_EQ(frame.sent_bytes_per_s, 2048);
  EXPECT_EQ(frame.received_bytes_per_s, 512);
  EXPECT_EQ(frame.attend_loop.per_s, 5);
  EXPECT_DOUBLE_EQ(frame.attend_loop.p50_s, 0.5e-3);  // without the one that was there before
  EXPECT_TRUE(std::isnan(frame.attend_workers.p99_s));
  ASSERT_EQ(frame.tiers.size(), 2u);
  EXPECT_EQ(frame.tiers[0].used_bytes, 25);
  EXPECT_EQ(frame.tiers[1].name, "gpu3");
  EXPECT_EQ(frame.tiers[1].used_bytes, 5);
  ASSERT_EQ(frame.tenants.size(), 2u);
  EXPECT_EQ(frame.tenants[0].name, "b");
  EXPECT_EQ(frame.tenants[0].sequences, 9);
  EXPECT_TRUE(frame.quality.empty());
}

TEST(Frame, HitsAreByWhereTheBlocksWere) {
  Metrics metrics;
  const auto hits = [&](const char* tier) -> auto& {
    return metrics.Counter("prefix_hit_tier_blocks_total", "Hits", {{"tier", tier}});
  };
  hits("host").Increment(100);
  const Readings before = Readings::Parse(metrics.Text());
  hits("host").Increment(7);
  hits("device").Increment(2);
  hits("disk").Increment(5);
  const Frame frame = FrameOf(before, Readings::Parse(metrics.Text()), 2);
  EXPECT_EQ(frame.hit_tiers.host, 7);
  EXPECT_EQ(frame.hit_tiers.device, 2);
  EXPECT_EQ(frame.hit_tiers.disk, 5);
}

TEST(Frame, HasADiskWhereItHasRoom) {
  Metrics metrics;
  auto& capacity = metrics.Gauge("disk_capacity_bytes", "Bytes");
  auto& written = metrics.Counter("disk_written_bytes_total", "Bytes");
  auto& read = metrics.Counter("disk_read_bytes_total", "Bytes");
  auto& writes = metrics.Histogram("disk_write_seconds", "Time", {1e-3, 2e-3});
  written.Increment(77);
  writes.Observe(2e-3);
  const Readings before = Readings::Parse(metrics.Text());
  EXPECT_FALSE(FrameOf(before, before, 1).disk.has_value());
  capacity.Set(1000);
  metrics.Gauge("disk_used_bytes", "Bytes").Set(250);
  metrics.Gauge("disk_blocks", "Blocks").Set(9);
  metrics.Gauge("disk_unwritten_blocks", "Blocks").Set(3);
  written.Increment(4096);
  read.Increment(1024);
  for (int i = 0; i < 10; ++i) writes.Observe(0.5e-3);
  metrics.Counter("disk_errors_total", "Failures", {{"op", "write"}}).Increment(2);
  metrics.Counter("disk_errors_total", "Failures", {{"op", "loss"}}).Increment();
  metrics.Counter("disk_unwritten_evictions_total", "Blocks").Increment(4);
  metrics.Counter("disk_set_aside_total", "Folders").Increment();
  const Frame frame = FrameOf(before, Readings::Parse(metrics.Text()), 2);
  ASSERT_TRUE(frame.disk.has_value());
  EXPECT_EQ(frame.disk->used_bytes, 250);
  EXPECT_EQ(frame.disk->capacity_bytes, 1000);
  EXPECT_EQ(frame.disk->blocks, 9);
  EXPECT_EQ(frame.disk->unwritten_blocks, 3);
  EXPECT_EQ(frame.disk->written_bytes_per_s, 2048);
  EXPECT_EQ(frame.disk->read_bytes_per_s, 512);
  EXPECT_EQ(frame.disk->write.per_s, 5);
  EXPECT_DOUBLE_EQ(frame.disk->write.p50_s, 0.5e-3);  // without the one that was there before
  EXPECT_TRUE(std::isnan(frame.disk->read.p99_s));
  EXPECT_EQ(frame.disk->errors, 3);
  EXPECT_EQ(frame.disk->unwritten_evictions, 4);
  EXPECT_EQ(frame.disk->set_aside, 1);
}

TEST(Frame, HasKeptMemoryWhereBlocksAreRecordedOrFound) {
  const auto of = [](const char* text) {
    const Readings readings = Readings::Parse(text);
    return FrameOf(readings, readings, 1).kept;
  };
  EXPECT_FALSE(of("kvmanager_recorded_blocks 0\nkvmanager_unclaimed_blocks 0\nkvmanager_recovered_blocks_total 0\n")
                   .has_value());
  const auto kept = of(R"(
kvmanager_recorded_blocks 5
kvmanager_unclaimed_blocks 2
kvmanager_recovered_blocks_total 4
kvmanager_unclaimed_lost_blocks_total 1
kvmanager_unrecovered_blocks_total 6
kvmanager_unrecorded_blocks_total 7
)");
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(kept->recorded_blocks, 5);
  EXPECT_EQ(kept->unclaimed_blocks, 2);
  EXPECT_EQ(kept->recovered_blocks, 4);
  EXPECT_EQ(kept->unclaimed_lost_blocks, 1);
  EXPECT_EQ(kept->unrecovered_blocks, 6);
  EXPECT_EQ(kept->unrecorded_blocks, 7);
  for (const char* name :
       {"recorded_blocks", "recovered_blocks_total", "unrecovered_blocks_total", "unrecorded_blocks_total"}) {
    EXPECT_TRUE(of((std::string("kvmanager_") + name + " 1\n").c_str()).has_value()) << name;
  }
}

TEST(Frame, ARestartedCounterGrewFromZero) {
  const Frame frame =
      FrameOf(Readings::Parse("kvmanager_rpc_calls_total 100\n"), Readings::Parse("kvmanager_rpc_calls_total 30\n"), 1);
  EXPECT_EQ(frame.calls_per_s, 30);
}

TEST(Frame, QualityIsByCodec) {
  const Frame frame = FrameOf(Readings::Parse(""), Readings::Parse(R"(
kvmanager_codec_relative_error_bucket{cache="1",codec="hack",layer="0",le="0.1"} 8
kvmanager_codec_relative_error_bucket{cache="1",codec="hack",layer="0",le="+Inf"} 8
kvmanager_codec_relative_error_bucket{cache="1",codec="hack",layer="1",le="0.1"} 2
kvmanager_codec_relative_error_bucket{cache="1",codec="hack",layer="1",le="+Inf"} 2
kvmanager_codec_relative_error_count{cache="1",codec="hack",layer="0"} 8
kvmanager_codec_relative_error_count{cache="1",codec="hack",layer="1"} 2
kvmanager_codec_relative_error_count{cache="2",codec="zack",layer="1"} 0
)"),
                              1);
  ASSERT_EQ(frame.quality.size(), 1u);
  EXPECT_EQ(frame.quality[0].codec, "hack");
  EXPECT_EQ(frame.quality[0].pages, 10);
  EXPECT_DOUBLE_EQ(frame.quality[0].p50, 0.05);
}

}  // namespace
}  // namespace kvmanager
