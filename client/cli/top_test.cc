#include "client/cli/top.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_split.h"

namespace kvmanager::client::cli {
namespace {

TopPicture Full() {
  TopPicture p;
  p.status.version = "0.1.0";
  p.status.uptime_seconds = 7300;
  p.frame.tiers = {{"host", 3e9, 4e9}, {"gpu0", 1e9, 8e9}};
  Frame::Disk disk;
  disk.used_bytes = 1e9;
  disk.capacity_bytes = 4e9;
  disk.blocks = 23456;
  disk.unwritten_blocks = 12;
  disk.written_bytes_per_s = 3e6;
  disk.read_bytes_per_s = 2e9;
  disk.errors = 1500;
  p.frame.disk = disk;
  p.frame.hit_tiers = {20, 4, 6};
  p.frame.asked_blocks = 40;
  p.frame.hit_blocks = 30;
  p.frame.attend_loop = {1234, 2.5e-5, 1.7e-3};
  p.frame.attend_workers = {0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
  p.frame.quality = {{"hack", 1200, 0.031, 0.08}};
  for (uint32_t i = 0; i < 20; ++i) {
    CacheDescription cache;
    cache.id = i;
    cache.options.model = "a-very-long-path/of-a-model/that-ends-in-" + std::to_string(i);
    cache.options.tenant = "tenant \x1b[31m\n" + std::string(100, 't');
    cache.options.codec = "hack:k_bits=3,v_bits=2;0..1=hack:k_bits=8,v_bits=8";
    cache.resident_raw_bytes = 1000 * i;
    cache.resident_encoded_bytes = 123456789;
    p.caches.push_back(cache);
    SequenceDescription sequence;
    sequence.client = std::string(64, 'c') + std::to_string(i);
    sequence.pid = 4000000 + i % 10;
    sequence.tokens = 131072;
    sequence.bytes = 1u << (10 + i);
    p.sequences.push_back(sequence);
    PeerDescription peer;
    peer.peer = "decode-host-" + std::to_string(i) + ".cluster.example.net:9470";
    peer.last_error = std::string(300, 'e');
    p.peers.push_back(peer);
    p.errors.push_back({"createSequences", "RESOURCE_EXHAUSTED", 100.0 - i});
  }
  return p;
}

TEST(Top, FitsEightyColumnsOfPrintableCharacters) {
  for (const TopPicture& picture : {Full(), TopPicture{}}) {
    for (const absl::string_view line : absl::StrSplit(FormatTop(picture, 80, 0), '\n')) {
      EXPECT_LE(line.size(), 80u) << line;
      EXPECT_TRUE(std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c < 0x7f; })) << line;
    }
  }
}

TEST(Top, NothingIsCutAtEightyColumns) { EXPECT_EQ(FormatTop(Full(), 80, 0), FormatTop(Full(), 500, 0)); }

TEST(Top, ShowsWhatThereIs) {
  const std::string text = FormatTop(Full(), 80, 0);
  for (const char* shown :
       {"up 2 h 01 m", "75.0% of 3.7 GiB", "12.5% of 7.5 GiB", "75.0% of 40 blocks", "1.2 k/s, p50 25 us, p99 1.7 ms",
        "25.0% of 3.7 GiB, 23.5 k blocks", "write 2.9 MiB/s, read 1.9 GiB/s; 12 unwritten, 1.5 k errors",
        "from host 20, GPU 4, disk 6", "workers 0/s, p50 -, p99 -", "hack: error median 3.10%, p99 8.00%", "ends-in-19",
        "100  createSequences"}) {
    EXPECT_NE(text.find(shown), std::string::npos) << shown << "\n" << text;
  }
  EXPECT_NE(FormatTop({}, 80, 0).find("no page was sampled"), std::string::npos);
}

TEST(Top, SaysNothingOfADiskThatIsNot) {
  TopPicture picture = Full();
  picture.frame.disk.reset();
  const std::string text = FormatTop(picture, 80, 0);
  for (const char* hidden : {"\ndisk ", "unwritten", "from host"}) {
    EXPECT_EQ(text.find(hidden), std::string::npos) << hidden << "\n" << text;
  }
}

TEST(Top, IsNoHigherThanTheScreen) {
  const std::string text = FormatTop(Full(), 80, 10);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 9);
  EXPECT_EQ(FormatTop(Full(), 80, 0).substr(0, text.size()), text);
}

}  // namespace
}  // namespace kvmanager::client::cli
