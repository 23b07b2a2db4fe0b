// Random hand-offs between two stores while the senders' sequences grow: layers in any order and chunks, encodings that
// end in any order or decline, pages that arrive in any order, receivers that attend, append and drop meanwhile, and
// either end giving up at any point. What a page must be is a function of the tokens up to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "kvmanager/store/store_testing.h"

namespace kvmanager {
namespace {

using testing::Deliver;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::RawPrefixEquals;
using testing::TestStore;
using testing::Text;

#ifdef KVMANAGER_SANITIZED
constexpr int kHandOffs = 100;
constexpr uint64_t kSeeds = 2;
#else
constexpr int kHandOffs = 200;
constexpr uint64_t kSeeds = 5;
#endif
constexpr int kBlocksMax = 8;

struct Counts {
  int committed = 0, broken = 0, withdrawn = 0, shared = 0, waited = 0, read_early = 0;
};

class StreamRandom {
 public:
  explicit StreamRandom(uint64_t seed) : random_(seed) {}

  void HandOff();
  void Finish() {
    here_.executor.FinishAll();
    there_.executor.FinishAll();
    for (TestStore* side : {&here_, &there_}) {
      for (const SequenceId id : side->store->report().SequenceIds()) side->store->Drop(id);
      side->store->caches().PurgeAll();
      side->store->report().CheckInvariants();
      ASSERT_EQ(side->pool->used_bytes(), 0u);
    }
  }
  Counts counts;

 private:
  struct Waiting {
    std::unique_ptr<AttendLease> lease;
    int layer = 0;
    uint64_t position = 0;
    uint32_t aged = 0;  // pages of the layer, as of then
    std::shared_ptr<bool> called = std::make_shared<bool>(false);
  };

  uint64_t Below(uint64_t n) { return random_() % n; }
  void FinishJobs(TestStore& side) {
    for (uint64_t n = Below(4); n > 0 && side.executor.jobs() > 0; --n) {
      side.executor.FinishOne(Below(side.executor.jobs()));
    }
  }
  void CheckAll() {
    here_.store->report().CheckInvariants();
    there_.store->report().CheckInvariants();
  }
  // What a query at `position` reads.
  void ExpectRead(const Waiting& waiting, const Text& text) {
    const PageLayout& layout = config_.layout;
    const auto pages = waiting.lease->pages(0);
    for (uint32_t i = 0; i < pages.size(); ++i) {
      const uint64_t begin = uint64_t{i} * layout.page_tokens;
      const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, waiting.position + 1 - begin));
      const bool reads_encoded =
          i < waiting.aged || waiting.position / layout.page_tokens > i + uint64_t(config_.lag_pages);
      const auto raw = MakeRawPage(layout, text, i, tokens, waiting.layer);
      std::vector<uint8_t> encoded;
      if (reads_encoded) encoded = MakeEncodedPage(*codec_, raw, i, waiting.layer);
      ASSERT_EQ(pages[i].encoded != nullptr, !encoded.empty()) << "page " << i;
      if (encoded.empty()) {
        ASSERT_TRUE(RawPrefixEquals(layout, pages[i].raw, raw, tokens)) << "page " << i;
      } else {
        ASSERT_EQ(std::memcmp(pages[i].encoded, encoded.data(), encoded.size()), 0) << "page " << i;
      }
    }
  }

  std::mt19937_64 random_;
  TestStore here_{32 << 20}, there_{32 << 20};
  CacheConfig config_;
  std::shared_ptr<const Codec> codec_;
};

void StreamRandom::HandOff() {
  const char* const codecs[] = {"fake", "declining", "raw", "uneven", "sinks"};
  const int layers = 1 + static_cast<int>(Below(3));
  config_ = MakeConfig(codecs[Below(5)], static_cast<int>(Below(3)), "a", layers);
  const CacheId cache = here_.Open(config_), peer_cache = there_.Open(config_);
  codec_ = here_.store->caches().codec(cache);
  const int page_tokens = config_.layout.page_tokens;
  const uint64_t tokens = Below(kBlocksMax * page_tokens + 1);
  Text text;
  // Few different beginnings, so that names meet.
  while (text.ids.size() < tokens + 1) {
    text.Add(static_cast<uint32_t>(text.ids.size() % 48 == 3   ? Below(2)
                                   : text.ids.size() % 16 == 1 ? Below(30) / 28
                                                               : 7));
  }
  Text prompt = text;
  prompt.Truncate(tokens);
  const auto names = here_.Names(cache, prompt);
  const auto made = here_.store->Create(cache, names);
  ASSERT_TRUE(made.ok());
  const SequenceId a = made->sequence;
  const uint64_t hit = uint64_t(made->match.hit_blocks) * page_tokens;
  std::vector<uint64_t> appended(layers, hit);
  const auto append = [&](uint64_t chunk) {
    const int layer = static_cast<int>(Below(layers));
    const int n = static_cast<int>(std::min(chunk, tokens - appended[layer]));
    if (n == 0) return;
    ASSERT_TRUE(here_.Append(cache, a, text, appended[layer], n, layer).ok());
    appended[layer] += n;
  };
  for (uint64_t n = Below(3 * layers); n > 0; --n) append(1 + Below(60));
  FinishJobs(here_);

  auto begun = here_.store->exports().Growing(a, tokens, {.will_append = Below(2) == 0});
  ASSERT_TRUE(begun.ok()) << begun.status();
  std::unique_ptr<ExportLease> out = *std::move(begun);
  auto received = there_.store->imports().Import(out->header());
  ASSERT_TRUE(received.ok()) << received.status();
  std::unique_ptr<ImportLease> in = *std::move(received);
  std::vector<uint32_t> aged = out->header().aged;

  std::vector<ExportedPage> in_flight;
  std::optional<SequenceId> b;
  std::vector<Waiting> waiting;
  std::vector<uint64_t> peer_tokens(layers, tokens);
  bool finished = false, extended = false, dropped = false, published = false, published_before = false;
  const uint64_t gives_up_at = Below(3) == 0 ? Below(120) : UINT64_MAX;
  uint64_t steps = 0;
  for (; !in->complete(); ++steps) {
    if (steps == gives_up_at) break;
    switch (Below(8)) {
      case 0:
      case 1:
        append(Below(3) == 0 ? 1 + Below(40) : tokens);
        break;
      case 2:
        FinishJobs(Below(3) == 0 ? there_ : here_);
        break;
      case 3: {
        const bool whole = *std::min_element(appended.begin(), appended.end()) == tokens;
        if (!finished && (whole || Below(4) == 0)) {
          ASSERT_EQ(out->Finish().ok(), whole);
          finished = whole;
          published_before = published;
        }
        if (!published && whole && Below(2)) {
          ASSERT_TRUE(here_.store->Publish(a, names).ok());
          published = true;
        }
        break;
      }
      case 4:
      case 5:
        if (!in_flight.empty()) {
          const size_t which = Below(in_flight.size());
          ASSERT_TRUE(Deliver(*in, in_flight[which]).ok());
          in_flight.erase(in_flight.begin() + which);
        }
        break;
      case 6:
        if (!b.has_value() && in->can_show()) {
          const auto shown = in->Show();
          ASSERT_TRUE(shown.ok()) << shown.status();
          b = *shown;
        } else if (b.has_value() && !dropped && Below(40) == 0) {
          there_.store->Drop(*b);
          dropped = true;
        } else if (b.has_value() && !dropped && tokens > 0 && waiting.size() < 6) {
          Waiting read;
          read.layer = static_cast<int>(Below(layers));
          read.position = peer_tokens[read.layer] - 1;
          read.aged = aged[read.layer];
          const AttendEntry entry{*b, read.position, 1};
          auto lease = there_.store->Attend(peer_cache, read.layer, {&entry, 1});
          ASSERT_TRUE(lease.ok()) << lease.status();
          read.lease = *std::move(lease);
          read.lease->OnReady([called = read.called] { *called = true; });
          if (read.lease->ready()) ++counts.read_early;
          counts.waited += !read.lease->ready();
          waiting.push_back(std::move(read));
          ASSERT_EQ(there_.store->Fork(*b).status().code(), absl::StatusCode::kFailedPrecondition);
          if (peer_tokens[0] == tokens && Below(2)) {
            // A decoded token; reads before it must not see it.
            ASSERT_TRUE(there_.Append(peer_cache, *b, text, tokens, 1, 0).ok());
            peer_tokens[0] += 1;
            const int64_t page = static_cast<int64_t>(tokens / page_tokens) - config_.lag_pages;
            aged[0] = static_cast<uint32_t>(std::max<int64_t>(aged[0], page));
          }
        }
        break;
      case 7:
        for (const ExportedPage& page : out->TakeReady()) in_flight.push_back(page);
        if (out->trailer() != nullptr && !extended) {
          ASSERT_TRUE(in->Extend(*out->trailer()).ok());
          extended = true;
          counts.withdrawn += static_cast<int>(out->trailer()->withdrawn.size());
          for (const ExportedPage& page : out->trailer_pages()) in_flight.push_back(page);
        }
        break;
    }
    CheckAll();
  }
  for (size_t i = 0; i < out->header().pages.size(); ++i) counts.shared += in->target(i).empty();
  if (in->complete() && !b.has_value()) {
    const auto shown = in->Show();
    ASSERT_TRUE(shown.ok()) << shown.status();
    b = *shown;
  }
  const bool whole = in->complete();
  if (whole) {
    ASSERT_TRUE(in->Commit().ok());
    ++counts.committed;
  } else {
    ++counts.broken;
    if (Below(2)) in->Break(absl::CancelledError("a test"));
  }
  in = nullptr;
  CheckAll();
  out = nullptr;
  CheckAll();
  there_.executor.FinishAll();
  for (const Waiting& read : waiting) {
    ASSERT_TRUE(read.lease->ready() && *read.called);
    ASSERT_TRUE(!whole || read.lease->status().ok());
    if (read.lease->status().ok()) {
      ExpectRead(read, text);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  waiting.clear();
  CheckAll();
  if (b.has_value() && !dropped && whole) {
    if (published_before) {
      ASSERT_EQ(there_.store->caches().Match(peer_cache, names)->hit_blocks, static_cast<int>(names.size()));
    }
    if (Below(2)) {
      ASSERT_TRUE(there_.store->Publish(*b, names).ok());
      ASSERT_EQ(there_.store->caches().Match(peer_cache, names)->hit_blocks, static_cast<int>(names.size()));
    }
  }
  if (b.has_value() && !dropped) there_.store->Drop(*b);
  here_.executor.FinishAll();
  if (*std::min_element(appended.begin(), appended.end()) == tokens && Below(2)) {
    ASSERT_TRUE(here_.store->Publish(a, names).ok());
  }
  here_.store->Drop(a);
  if (Below(8) == 0) there_.store->caches().PurgeAll();
  CheckAll();
}

TEST(PageStoreStreamRandom, AgreesWithTheTokens) {
  Counts all;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    StreamRandom test(seed);
    for (int i = 0; i < kHandOffs; ++i) {
      SCOPED_TRACE(::testing::Message() << "hand-off " << i);
      test.HandOff();
      if (::testing::Test::HasFatalFailure()) return;
    }
    test.Finish();
    if (::testing::Test::HasFatalFailure()) return;
    const Counts& c = test.counts;
    std::printf("seed %d: %d committed, %d broken, %d withdrawn, %d shared, %d reads waited, %d did not\n", int(seed),
                c.committed, c.broken, c.withdrawn, c.shared, c.waited, c.read_early);
    all.committed += c.committed;
    all.broken += c.broken;
    all.withdrawn += c.withdrawn;
    all.shared += c.shared;
    all.waited += c.waited;
    all.read_early += c.read_early;
  }
  // The walk went where it should.
  EXPECT_GT(all.committed, 0);
  EXPECT_GT(all.broken, 0);
  EXPECT_GT(all.withdrawn, 0);
  EXPECT_GT(all.shared, 0);
  EXPECT_GT(all.waited, 0);
  EXPECT_GT(all.read_early, 0);
}

}  // namespace
}  // namespace kvmanager
