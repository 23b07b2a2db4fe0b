// docs/metrics.md and the daemon's metrics page say the same, both ways, once every path has been walked.
#include <cmath>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/half.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

struct Row {
  std::string type;
  std::set<std::string> labels;
  std::string meaning;
};

/// Lines "| `name` | type | `label`, ... | unit | meaning |" of the catalogue.
std::map<std::string, Row> ReadCatalogue() {
  std::map<std::string, Row> rows;
  std::ifstream in(DataPath("docs/metrics.md"));
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("| `", 0) != 0) continue;
    const std::vector<std::string> cells = absl::StrSplit(line, '|');
    if (cells.size() < 6) continue;
    auto plain = [](std::string text) {
      text.erase(std::remove(text.begin(), text.end(), '`'), text.end());
      return std::string(absl::StripAsciiWhitespace(text));
    };
    Row row;
    row.type = plain(cells[2]);
    for (const absl::string_view label : absl::StrSplit(plain(cells[3]), ',')) {
      const std::string name(absl::StripAsciiWhitespace(label));
      if (!name.empty() && name != "-") row.labels.insert(name);
    }
    row.meaning = plain(cells[5]);
    EXPECT_TRUE(rows.emplace(plain(cells[1]), row).second) << "twice in the catalogue: " << cells[1];
  }
  return rows;
}

std::set<std::string> LabelsOf(const std::string& sample) {
  static const std::regex kLabel(R"re((\w+)="(?:[^"\\]|\\.)*")re");
  std::set<std::string> labels;
  for (std::sregex_iterator it(sample.begin(), sample.end(), kLabel), end; it != end; ++it) {
    if ((*it)[1] != "le" && (*it)[1] != "quantile") labels.insert((*it)[1]);
  }
  return labels;
}

/// Appends, attends, shares, forks, crops, hands over, evicts, errs: whatever makes a series.
void WalkEveryPath(DaemonProcess& daemon, DaemonProcess& peer) {
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon.listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto peer_client, Client::Connect(peer.listen(), {}));
  for (const char* const codec : {"raw", "hack:k_bits=3,v_bits=2", "pq:bits=4,iterations=1"}) {
    const CacheOptions options = SmallCache(codec, 1);
    const Source source{1, Kind::kNormal, options};
    ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(auto arena, client->CreateArena(1 << 20));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Feed(*cache, made.sequence->id(), source, 0, 400, 30));
    ASSERT_OK(made.sequence->Publish(Names(*cache, source, 5)));
    ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 6)));
    EXPECT_EQ(hit.match.hit_blocks, 5);
    ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
    ASSERT_OK(fork->Crop(399));
    EXPECT_FALSE(made.sequence->Crop(10000).ok());
    ASSERT_OK_AND_ASSIGN(const client::HandOffOutcome sent, made.sequence->HandOff(peer.peer(), ""));
    ASSERT_OK_AND_ASSIGN(auto there, peer_client->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(client::ClaimedSequence claimed, there->Claim(sent.ticket));
    ASSERT_OK(Feed(*there, claimed.sequence->id(), source, 400, 3, 1));
    ASSERT_OK(claimed.sequence->HandOff(daemon.peer(), ""));
    EXPECT_FALSE(made.sequence->HandOff("127.0.0.1:1", "").ok());
  }
  ASSERT_OK_AND_ASSIGN(auto kept, client->OpenCache(SmallCache("raw", 1)));
  EXPECT_OK(kept->Retain(Names(*kept, {1, Kind::kNormal, SmallCache("raw", 1)}, 5), {.priority = 80}));
  EXPECT_OK(client->OpenCache(SmallCache("ladder=hack:k_bits=4,v_bits=4>hack:k_bits=3,v_bits=2", 1)));
  EXPECT_OK(client->Caches());
  EXPECT_OK(client->Sequences());
  EXPECT_OK(client->Peers());
  EXPECT_OK(client->Drain(true));
  EXPECT_OK(client->Drain(false));
  EXPECT_OK(client->Purge(Client::kAllCaches));
}

TEST(MetricsTest, TheCatalogueIsTheMetricsPage) {
  const std::map<std::string, Row> catalogue = ReadCatalogue();
  ASSERT_FALSE(catalogue.empty());
  DaemonOptions options;
  options.more_flags = {"--quality-sample", "1", "--codec-plugin", DataPath("codecs/abi/bad/good.so"),
                        "--codec-plugin-process"};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto peer, DaemonProcess::Start({}));
  WalkEveryPath(*daemon, *peer);
  // Sampled pages are compared behind all else, and tenants are looked at once a second, what they have of pools last.
  MetricsPage page;
  EXPECT_TRUE(Eventually([&] {
    page = *Scrape(*daemon);
    return page.Sum("kvmanager_codec_relative_error_count") > 0 &&
           page.families.count("kvmanager_tenant_pool_bytes") > 0 &&
           page.families.count("kvmanager_retained_bytes") > 0;
  }));
  std::string missing;
  for (const auto& [name, row] : catalogue) {
    SCOPED_TRACE(name);
    const auto found = page.families.find(name);
    if (found == page.families.end()) {
      ADD_FAILURE() << "in docs/metrics.md, but not on the page";
      continue;
    }
    EXPECT_EQ(found->second.type, row.type);
    EXPECT_FALSE(found->second.help.empty());
    EXPECT_FALSE(row.meaning.empty());
    EXPECT_FALSE(found->second.samples.empty()) << "no path of this test makes a series of it";
    for (const auto& [sample, value] : found->second.samples) EXPECT_EQ(LabelsOf(sample), row.labels) << sample;
  }
  for (const auto& [name, family] : page.families) {
    if (catalogue.count(name) > 0) continue;
    missing += "| `" + name + "` | " + family.type + " | | | " + family.help + " |\n";
  }
  EXPECT_EQ(missing, "") << "on the page, but not in docs/metrics.md";
}

TEST(MetricsTest, CountersCountWhatHappened) {
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start({}));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 1);
  const Source source{1, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(const MetricsPage before, Scrape(*daemon));
  client::StepResult counts;
  ASSERT_OK(Feed(*cache, made.sequence->id(), source, 0, 400, 50, &counts));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 6)));
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 6)));
  EXPECT_FALSE(made.sequence->Crop(10000).ok());
  const client::StepEntry entries[2] = {{made.sequence->id(), 250, 150}, {hit.sequence->id(), 0, 100}};
  std::vector<uint8_t> k(250 * 2 * 64 * 2), v = k;
  client::ReadBatch read;
  read.layer = 1;
  read.entries = entries;
  read.k = client::TensorView::Inline(k.data(), k.size());
  read.v = client::TensorView::Inline(v.data(), v.size());
  ASSERT_OK(cache->Read(read));
  MetricsPage after;
  // The last page's encoding may still be under way.
  EXPECT_TRUE(Eventually([&] {
    after = *Scrape(*daemon);
    return after.Sum("kvmanager_encoded_pages_total") == 10;
  })) << after.Sum("kvmanager_encoded_pages_total");
  auto grown = [&](const char* name, const std::vector<std::string>& labels = {}) {
    return after.Sum(name, labels) - before.Sum(name, labels);
  };
  EXPECT_EQ(grown("kvmanager_appended_tokens_total"), 800);
  EXPECT_EQ(grown("kvmanager_attend_pairs_total", {"form=\"encoded\""}), double(counts.encoded_pairs));
  EXPECT_EQ(grown("kvmanager_attend_pairs_total", {"form=\"raw\""}), double(counts.raw_pairs));
  // Appends ended at 400 in chunks of 50: the last began at 350, in page 5, so pages 0 to 3 have aged. Page 0 is a
  // sink.
  EXPECT_EQ(grown("kvmanager_read_tokens_total", {"form=\"encoded\""}), 6 + 36);
  EXPECT_EQ(grown("kvmanager_read_tokens_total", {"form=\"raw\""}), 144 + 64);
  EXPECT_EQ(grown("kvmanager_sink_pages_total"), 2);
  EXPECT_EQ(grown("kvmanager_declined_pages_total"), 0);
  EXPECT_EQ(grown("kvmanager_read_seconds_count"), 1);
  EXPECT_EQ(grown("kvmanager_encode_seconds_count"), 10);
  EXPECT_EQ(grown("kvmanager_prefix_hit_blocks_total"), 6);
  EXPECT_EQ(after.Sum("kvmanager_published_blocks"), 6);
  EXPECT_EQ(after.Sum("kvmanager_held_sequences"), 2);
  EXPECT_EQ(grown("kvmanager_rpc_errors_total", {"method=\"crop\"", "code=\"INVALID_ARGUMENT\""}), 1);
  EXPECT_EQ(grown("kvmanager_rpc_calls_total", {"method=\"step\""}), 16);
  // Pages by state, tier and codec: 6 blocks, the first raw and the others encoded, and the open page.
  EXPECT_EQ(after.Sum("kvmanager_pages", {"codec=\"hack\"", "tier=\"host\""}), 14);
  made.sequence.reset();
  hit.sequence.reset();
  ASSERT_OK(client->Purge(Client::kAllCaches));
  ASSERT_OK_AND_ASSIGN(const MetricsPage end, Scrape(*daemon));
  EXPECT_EQ(end.Sum("kvmanager_pages"), 0);
  EXPECT_EQ(end.Sum("kvmanager_page_bytes"), 0);
}

/// sqrt(sum |o' - o|^2 / sum |o|^2) of attention over each full page of 64 tokens of `layer` alone, with the queries of
/// positions `first` .. `first + 3`: by what was appended, and by what comes back decoded. Summed over pages.
double SumOfErrors(const Source& source, int layer, int pages, const ModelSequence& decoded, uint64_t first) {
  const CacheOptions& o = source.shape;
  const std::vector<float> q = source.Q(layer, first, 4);
  double sum = 0;
  for (int page = 0; page < pages; ++page) {
    const ModelSequence::Rows read = decoded.Read(layer, page * 64, 64);
    const std::vector<uint8_t> k[2] = {source.K(layer, page * 64, 64), read.k},
                               v[2] = {source.V(layer, page * 64, 64), read.v};
    double error = 0, norm = 0;
    for (int row = 0; row < 4 * o.query_heads; ++row) {
      const int head = row % o.query_heads / (o.query_heads / o.kv_heads);
      std::vector<double> out[2];
      for (int form = 0; form < 2; ++form) {
        out[form].assign(o.head_dim, 0);
        double weights = 0;
        for (int t = 0; t < 64; ++t) {
          const size_t at = (size_t(t) * o.kv_heads + head) * o.head_dim;
          double score = 0;
          for (int c = 0; c < o.head_dim; ++c) {
            score += double(q[row * o.head_dim + c]) * LoadElement(k[form].data(), o.dtype, at + c);
          }
          const double weight = std::exp(score / std::sqrt(double(o.head_dim)));
          weights += weight;
          for (int c = 0; c < o.head_dim; ++c) out[form][c] += weight * LoadElement(v[form].data(), o.dtype, at + c);
        }
        for (double& x : out[form]) x /= weights;
      }
      for (int c = 0; c < o.head_dim; ++c) {
        error += (out[1][c] - out[0][c]) * (out[1][c] - out[0][c]);
        norm += out[0][c] * out[0][c];
      }
    }
    sum += std::sqrt(error / norm);
  }
  return sum;
}

TEST(MetricsTest, SampledPagesSayWhatEncodingCosts) {
  for (const int every : {0, 1, 3}) {
    SCOPED_TRACE(every);
    DaemonOptions daemon_options;
    daemon_options.more_flags = {"--quality-sample", std::to_string(every), "--threads", "2"};
    ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(daemon_options));
    ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
    for (const char* const codec : {"hack:k_bits=8,v_bits=8", "hack:k_bits=3,v_bits=2"}) {
      const CacheOptions options = SmallCache(codec, 1);
      const Source source{3, Kind::kNormal, options};
      ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
      ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
      // Four steps with a query each, and from then on none: those four are what every page is compared with.
      ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 44, 44));
      for (uint64_t at = 40; at < 44; ++at) ASSERT_OK(Ask(*cache, made.sequence->id(), source, at));
      // The first page is a sink, and none of those that are sampled.
      const int pages = 12, tokens = (pages + 1) * 64;
      const std::string label = "cache=\"" + cache->description().digest.ToHex(6) + "\"",
                        layers[2] = {"layer=\"0\"", "layer=\"1\""};
      const auto grown = [&](const char* part, const std::string& layer) {
        return Scrape(*daemon)->Sum(std::string("kvmanager_codec_relative_error_") + part, {label, layer});
      };
      const auto encoded = [&] { return Scrape(*daemon)->Sum("kvmanager_encoded_pages_total"); };
      // In two halves: a page is not sampled while 16 others are being compared.
      const auto load = [&](uint64_t from, uint64_t to) {
        ASSERT_OK(Load(*cache, made.sequence->id(), source, from, to - from, 100));
        const uint64_t full = to / 64 - 1;
        const double sampled = every == 0 ? 0 : double(2 * full / every);
        EXPECT_TRUE(Eventually([&] {
          return grown("count", layers[0]) + grown("count", layers[1]) == sampled && encoded() >= double(2 * full);
        })) << grown("count", layers[0]);
      };
      load(44, 7 * 64);
      load(7 * 64, tokens);
      if (every == 0) EXPECT_EQ(Scrape(*daemon)->families.count("kvmanager_codec_relative_error"), 0u);
      if (every != 1) continue;
      ModelSequence decoded(options);
      LoadModel(decoded, source, 0, tokens, tokens);
      decoded.MarkShared(tokens);
      for (int layer = 0; layer < 2; ++layer) {
        const double expected = SumOfErrors(source, layer, pages + 1, decoded, 40);
        // Attention of hack rounds queries and weights to 8 bits, too: an error of about 0.007 of its own.
        EXPECT_GT(grown("sum", layers[layer]), 0.95 * expected) << codec;
        EXPECT_LT(grown("sum", layers[layer]), 1.05 * pages * std::hypot(expected / pages, 0.01)) << codec;
      }
    }
  }
}

// Encoding that ends when the daemon does asks for a comparison of its pages, for which there are no workers then.
TEST(MetricsTest, ADaemonEndsWhilePagesAreSampled) {
  DaemonOptions daemon_options;
  daemon_options.more_flags = {"--quality-sample", "1", "--threads", "1"};
  setenv(kFailpointsVariable, "encode.slow=1/1", 1);
  auto started = DaemonProcess::Start(daemon_options);
  unsetenv(kFailpointsVariable);
  ASSERT_OK_AND_ASSIGN(auto daemon, std::move(started));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const CacheOptions options = SmallCache("hack", 1);
  const Source source{3, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  // Queries to compare with, and then ten pages of a layer, which stay when the client's connection ends.
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 44, 44));
  for (uint64_t at = 40; at < 44; ++at) ASSERT_OK(Ask(*cache, made.sequence->id(), source, at));
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 44, 10 * 64 - 44, 100));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 10)));
  daemon->process().Signal(SIGINT);
  daemon->process().Signal(SIGTERM);
  ASSERT_OK_AND_ASSIGN(const int status, daemon->process().Wait(20000));
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kvmanager::testing
