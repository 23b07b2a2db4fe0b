// A client under tools/chaos --disk: checks that a daemon has what was durable before it was killed, and publishes
// more.
//
//   disk_stress LISTEN METRICS EXPECTED SEED WHEN
//
// LISTEN, METRICS: addresses of the daemon. EXPECTED: a file with a line for each text that is durable, "TEXT CODEC
// BLOCKS", for each that was being purged then, "TEXT CODEC -1", and for each that was purged, "TEXT CODEC 0"; the last
// line of a text counts. WHEN: "whole" where every
// durable block must be found, "some" where reads fail now and then. On standard output:
//
//   verified {...}   counts, once; then it publishes until it is killed or its daemon is
//   LOST ...         a durable block is not found
//   WRONG ...        a block has other bytes than were published
//   BACK ...         a block that was purged is found
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"
#include "tests/model.h"
#include "tests/prefix_reads.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;

constexpr const char* kCodecs[] = {"raw", "hack:k_bits=3,v_bits=2", "hack:k_bits=2,v_bits=2"};
constexpr int kPageTokens = 64;
constexpr size_t kTextsMax = 300;   // durable at once; then all are purged
constexpr size_t kCompared = 12;    // texts of which each byte is
constexpr int64_t kFoundMs = 5000;  // in which a daemon knows what its disk has

struct Text {
  int codec = 0;
  int blocks = 0;
};

double Metric(const std::string& address, const std::string& name) {
  const auto page = HttpGet(address, "/metrics");
  return page.ok() ? ParseMetrics(*page).Sum(name) : -1;
}

class Stress {
 public:
  Stress(std::string metrics, std::string expected, bool whole, uint32_t seed)
      : metrics_(std::move(metrics)), expected_(std::move(expected)), whole_(whole), random_(seed) {}

  absl::Status Open(const std::string& listen) {
    KV_ASSIGN_OR_RETURN(client_, Client::Connect(listen, {.name = "disk-stress"}));
    for (const char* const codec : kCodecs) {
      shapes_.push_back(SmallCache(codec, 0));
      KV_ASSIGN_OR_RETURN(caches_.emplace_back(), client_->OpenCache(shapes_.back()));
    }
    std::ifstream file(expected_);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      uint64_t text = 0;
      Text of;
      if (words >> text >> of.codec >> of.blocks) texts_[text] = of;
    }
    return absl::OkStatus();
  }

  absl::Status Verify() {
    size_t durable = 0, compared = 0, purged = 0;
    std::vector<uint64_t> there;
    for (const auto& [text, of] : texts_) {
      if (of.blocks < 0) continue;
      KV_ASSIGN_OR_RETURN(const int found, Found(text, of.codec, std::max(of.blocks, 1)));
      if (of.blocks == 0) {
        ++purged;
        if (found > 0) std::printf("BACK text %llu\n", (unsigned long long)text);
        continue;
      }
      ++durable;
      there.push_back(text);
      if (!whole_ || found == of.blocks) continue;
      int now = found;
      Eventually(
          [&] {
            const auto again = Found(text, of.codec, of.blocks);
            now = again.ok() ? *again : now;
            return now == of.blocks;
          },
          kFoundMs);
      if (now != of.blocks) {
        std::printf("LOST text %llu: %d of %d blocks\n", (unsigned long long)text, now, of.blocks);
      }
    }
    std::shuffle(there.begin(), there.end(), random_);
    for (const uint64_t text : there) {
      if (compared == kCompared) break;
      KV_RETURN_IF_ERROR(Compare(text, texts_[text]));
      ++compared;
    }
    std::printf("verified {\"durable\": %zu, \"purged\": %zu, \"compared\": %zu}\n", durable, purged, compared);
    std::fflush(stdout);
    return absl::OkStatus();
  }

  // Until the daemon has gone.
  absl::Status Publish() {
    next_ = texts_.empty() ? 1 : texts_.rbegin()->first + 1;
    unwritten_evictions_ = UnwrittenEvictions();
    std::map<uint64_t, Text> fresh;
    for (;;) {
      KV_RETURN_IF_ERROR(PublishNext(&fresh));
      if (random_() % 4 == 0) {
        const auto which = std::next(texts_.begin(), texts_.empty() ? 0 : random_() % texts_.size());
        if (which != texts_.end() && which->second.blocks > 0) KV_RETURN_IF_ERROR(Compare(which->first, which->second));
      }
      if (random_() % 6 == 0 && AllWritten()) {
        if (!EvictedUnwritten()) {
          Note(Lines(fresh), O_APPEND);
          texts_.merge(fresh);
        }
        fresh.clear();
      }
      if (texts_.size() >= kTextsMax) {
        KV_RETURN_IF_ERROR(PurgeAll());
        fresh.clear();
      }
    }
  }

 private:
  Source SourceOf(uint64_t text, int codec) const { return {text, Kind::kNormal, shapes_[codec]}; }
  absl::StatusOr<int> Found(uint64_t text, int codec, int blocks) {
    Cache& cache = *caches_[codec];
    const std::vector<BlockName> names = Names(cache, SourceOf(text, codec), blocks);
    const absl::Span<const BlockName> prefix = names;
    KV_ASSIGN_OR_RETURN(const auto match, cache.Match({&prefix, 1}));
    return match.at(0).hit_blocks;
  }
  absl::Status Compare(uint64_t text, const Text& of) {
    Cache& cache = *caches_[of.codec];
    const Source source = SourceOf(text, of.codec);
    KV_ASSIGN_OR_RETURN(const auto made, cache.CreateSequence(Names(cache, source, of.blocks)));
    const int hits = made.match.hit_blocks, tokens = hits * kPageTokens;
    if (whole_ && hits != of.blocks) {
      std::printf("LOST text %llu: a sequence found %d of %d blocks\n", (unsigned long long)text, hits, of.blocks);
    }
    if (hits == 0) return absl::OkStatus();
    KV_ASSIGN_OR_RETURN(const int layer, LayerThatDiffers(cache, made.sequence->id(), source, tokens));
    if (layer != kNoLayer) {
      std::printf("WRONG text %llu, codec %s, layer %d\n", (unsigned long long)text, kCodecs[of.codec], layer);
    }
    return absl::OkStatus();
  }
  absl::Status PublishNext(std::map<uint64_t, Text>* fresh) {
    const Text of{static_cast<int>(random_() % std::size(kCodecs)), 1 + static_cast<int>(random_() % 6)};
    Cache& cache = *caches_[of.codec];
    const Source source = SourceOf(next_, of.codec);
    KV_ASSIGN_OR_RETURN(auto made, cache.CreateSequence());
    KV_RETURN_IF_ERROR(Load(cache, made.sequence->id(), source, 0, of.blocks * kPageTokens, 1024));
    KV_RETURN_IF_ERROR(made.sequence->Publish(Names(cache, source, of.blocks)).status());
    (*fresh)[next_++] = of;
    return absl::OkStatus();
  }
  // Of this client's daemon: one that goes on in its place answers by the same address.
  // Unwritten blocks are counted before the publish is answered.
  bool AllWritten() const { return Metric(metrics_, "kvmanager_disk_unwritten_blocks") == 0 && client_->Ping().ok(); }
  // Whether blocks were evicted before they were written since the last call, or since this began: where the disk is
  // slower than this. Which blocks these were is not known, so none of those published meanwhile counts as durable.
  bool EvictedUnwritten() {
    const double before = std::exchange(unwritten_evictions_, UnwrittenEvictions());
    return unwritten_evictions_ != before;
  }
  double UnwrittenEvictions() const { return Metric(metrics_, "kvmanager_disk_unwritten_evictions_total"); }

  // Purged for good is what was before a block that is durable.
  absl::Status PurgeAll() {
    for (auto& [text, of] : texts_) of.blocks = -1;
    Note(Lines(texts_), O_TRUNC);
    KV_RETURN_IF_ERROR(client_->Purge(Client::kAllCaches).status());
    std::map<uint64_t, Text> fresh;
    KV_RETURN_IF_ERROR(PublishNext(&fresh));
    const bool written = Eventually([this] { return AllWritten() || !client_->Ping().ok(); });
    KV_RETURN_IF_ERROR(client_->Ping());
    if (!written) return absl::UnavailableError("the disk writes nothing");
    for (auto& [text, of] : texts_) of.blocks = 0;
    if (EvictedUnwritten()) fresh.clear();
    Note(absl::StrCat(Lines(texts_), Lines(fresh)), O_TRUNC);
    texts_ = std::move(fresh);
    return absl::OkStatus();
  }
  static std::string Lines(const std::map<uint64_t, Text>& texts) {
    std::string lines;
    for (const auto& [text, of] : texts) absl::StrAppend(&lines, text, " ", of.codec, " ", of.blocks, "\n");
    return lines;
  }
  // how: O_APPEND, or O_TRUNC, which takes the place of what is there at once.
  void Note(const std::string& lines, int how) {
    const std::string path = how == O_TRUNC ? expected_ + ".new" : expected_;
    const int file = open(path.c_str(), O_CREAT | how | O_WRONLY | O_CLOEXEC, 0600);
    if (write(file, lines.data(), lines.size()) != static_cast<ssize_t>(lines.size()) || fsync(file) != 0) abort();
    close(file);
    if (how == O_TRUNC && std::rename(path.c_str(), expected_.c_str()) != 0) abort();
  }

  const std::string metrics_, expected_;
  const bool whole_;
  std::mt19937 random_;
  std::vector<CacheOptions> shapes_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::unique_ptr<Client> client_;
  std::map<uint64_t, Text> texts_;
  uint64_t next_ = 1;
  double unwritten_evictions_ = 0;
};

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc != 6) {
    std::fprintf(stderr, "usage: disk_stress LISTEN METRICS EXPECTED SEED whole|some\n");
    return 2;
  }
  Stress stress(argv[2], argv[3], std::string(argv[5]) == "whole",
                static_cast<uint32_t>(std::strtoull(argv[4], nullptr, 10)));
  absl::Status status = stress.Open(argv[1]);
  if (status.ok()) status = stress.Verify();
  if (status.ok()) status = stress.Publish();
  std::fflush(stdout);
  if (absl::IsUnavailable(status)) return 0;  // the daemon was killed
  std::printf("UNEXPECTED %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::Main(argc, argv); }
