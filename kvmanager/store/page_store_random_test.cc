// Thousands of random operations by several clients on two stores, against a model that knows only rule 2 of
// page_store.h: a page's bytes are a function of the tokens up to it, and its form of the sequence's own operations.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "kvmanager/store/store_testing.h"
#include "xxhash.h"

namespace kvmanager {
namespace {

using testing::KeysValues;
using testing::MakeActivations;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeKeysValues;
using testing::MakeRawPage;
using testing::RawPrefixEquals;
using testing::SentPage;
using testing::TestStore;
using testing::Text;

#ifdef KVMANAGER_SANITIZED
constexpr int kSteps = 3000;
constexpr uint64_t kSeeds = 3;
#else
constexpr int kSteps = 6000;
constexpr uint64_t kSeeds = 6;
#endif
constexpr int kClients = 4;
constexpr int kBlocksMax = 10;  // of a sequence

struct ModelSequence {
  int client = 0;
  size_t cache = 0;  // in Side::caches
  Text text;
  std::vector<uint64_t> tokens;  // [layers]
  std::vector<uint32_t> aged;    // [layers]
  uint64_t TokensInEveryLayer() const { return *std::min_element(tokens.begin(), tokens.end()); }
  uint64_t TokensInSomeLayer() const { return *std::max_element(tokens.begin(), tokens.end()); }
};

struct ModelCache {
  CacheConfig config;
  CacheId id = 0;
  std::shared_ptr<const Codec> codec;
  std::set<Digest> published;
};

// What one page of a lease must be, as of its making.
struct ExpectedPage {
  std::vector<uint8_t> raw;  // empty: must not be offered
  int raw_tokens = 0;
  std::vector<uint8_t> encoded;  // empty: must not be offered
  bool lag_applies = false;
};

struct HeldLease {
  int client = 0;
  PageLayout layout;
  std::unique_ptr<AttendLease> lease;
  std::vector<std::vector<ExpectedPage>> expected;  // [entry][page]
  bool refused = false;                             // a query would read a part of a page that is kept encoded alone
  std::shared_ptr<bool> called = std::make_shared<bool>(false);
};

struct HeldExport {
  int client = 0;
  std::unique_ptr<ExportLease> lease;
  ModelSequence sequence;
};

struct Side {
  explicit Side(uint64_t pool_bytes) : store(pool_bytes) {}
  TestStore store;
  std::vector<ModelCache> caches;
  std::map<SequenceId, ModelSequence> sequences;
  std::vector<HeldLease> leases;
  std::vector<HeldExport> exports;
  bool lost_names = false;  // by a purge
};

class RandomTest {
 public:
  explicit RandomTest(uint64_t seed) : random_(seed) {
    sides_.push_back(std::make_unique<Side>(seed % 3 == 0 ? 32 << 20 : 8 << 20));
    sides_.push_back(std::make_unique<Side>(8 << 20));
    for (auto& side : sides_) OpenCaches(*side);
  }

  void Step() {
    Side& side = *sides_[Below(4) == 0];
    switch (Below(20)) {
      case 0:
      case 1:
        Create(side);
        break;
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        AppendSome(side);
        break;
      case 8:
      case 9:
      case 10:
        AttendSome(side);
        break;
      case 11:
        ForkOne(side);
        break;
      case 12:
        CropOne(side);
        break;
      case 13:
      case 14:
        PublishOne(side);
        break;
      case 15:
        Below(3) == 0 ? DropOne(side) : DropLease(side);
        break;
      case 16:
        StartExport(side);
        break;
      case 17:
        FinishExport(side);
        break;
      case 18:
        Below(12) == 0 ? KillClient(side) : FinishJobs(side);
        break;
      case 19:
        Below(30) == 0 ? Purge(side) : FinishJobs(side);
        break;
    }
    CheckLeases(side);
    side.store.store->report().CheckInvariants();
  }

  void Finish() {
    for (auto& side : sides_) {
      side->store.executor.FinishAll();
      CheckLeases(*side);
      for (HeldLease& held : side->leases) ASSERT_TRUE(held.lease->ready() && *held.called);
      side->leases.clear();
      side->exports.clear();
      while (!side->sequences.empty()) {
        side->store.store->Drop(side->sequences.begin()->first);
        side->sequences.erase(side->sequences.begin());
      }
      side->store.store->report().CheckInvariants();
      side->store.store->caches().PurgeAll();
      side->store.store->report().CheckInvariants();
      ASSERT_EQ(side->store.pool->used_bytes(), 0u);
      ASSERT_TRUE(side->store.store->caches().List().empty());
    }
  }

  uint64_t exhausted = 0, hits = 0, imports = 0, refused = 0, shared = 0, activations = 0, recomputed = 0;

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }

  // Opens what a purge may have closed; names known so far stay, as an upper bound of what can be hit.
  void OpenCaches(Side& side) {
    CacheConfig configs[] = {MakeConfig("fake", 1, "a"),         MakeConfig("fake", 0, "b", 3),
                             MakeConfig("declining", 2, "a"),    MakeConfig("raw", 1, "b"),
                             MakeConfig("declining", 0, "c", 1), MakeConfig("uneven", 1, "a", 4)};
    // Half of them keep activations, in slots as large as raw pages: the pools have few slabs, each of one size.
    for (const size_t i : {1, 3, 4}) configs[i].hidden = 256;
    side.caches.resize(std::size(configs));
    for (size_t i = 0; i < std::size(configs); ++i) {
      ModelCache& cache = side.caches[i];
      cache.config = configs[i];
      cache.id = side.store.Open(configs[i]);
      cache.codec = side.store.store->caches().codec(cache.id);
    }
  }

  std::map<SequenceId, ModelSequence>::iterator Pick(Side& side) {
    return side.sequences.empty() ? side.sequences.end()
                                  : std::next(side.sequences.begin(), Below(side.sequences.size()));
  }

  // Few different texts, so that sequences meet.
  uint32_t NextId(const Text& text) { return text.ids.size() % 48 == 3 ? static_cast<uint32_t>(Below(2)) : 7; }

  void Create(Side& side) {
    if (side.sequences.size() >= 24) return;
    const size_t which = Below(side.caches.size());
    ModelCache& cache = side.caches[which];
    const int page_tokens = cache.config.layout.page_tokens;
    Text text;
    for (uint64_t n = Below(kBlocksMax * page_tokens); n > 0; --n) text.Add(NextId(text));
    const auto names = side.store.Names(cache.id, text);
    size_t known = 0;
    while (known < names.size() && cache.published.count(names[known].key)) ++known;
    const auto match = side.store.store->caches().Match(cache.id, names);
    ASSERT_TRUE(match.ok());
    const auto made = side.store.store->Create(cache.id, names);
    ASSERT_TRUE(made.ok()) << made.status();
    const int hit = made->match.hit_blocks;
    ASSERT_EQ(hit, match->hit_blocks);
    ASSERT_EQ(made->match.reason, hit == static_cast<int>(names.size()) ? MissReason::kNone : MissReason::kNotFound);
    ASSERT_LE(hit, static_cast<int>(known));
    if (side.store.store_metrics.evicted_blocks.Value() == 0 && !side.lost_names) {
      ASSERT_EQ(hit, static_cast<int>(known));
    }
    hits += hit;
    ModelSequence model;
    model.client = static_cast<int>(Below(kClients));
    model.cache = which;
    text.Truncate(hit * page_tokens);
    model.text = text;
    model.tokens.assign(cache.config.layers, hit * page_tokens);
    model.aged.assign(cache.config.layers, hit);
    side.sequences.emplace(made->sequence, model);
  }

  void AppendSome(Side& side) {
    auto first = Pick(side);
    if (first == side.sequences.end()) return;
    const size_t which = first->second.cache;
    ModelCache& cache = side.caches[which];
    const PageLayout& layout = cache.config.layout;
    const int layer = static_cast<int>(Below(cache.config.layers));
    std::set<SequenceId> chosen;
    for (uint64_t tries = 1 + Below(4); tries > 0; --tries) {
      auto it = Pick(side);
      if (it->second.cache == which) chosen.insert(it->first);
    }
    std::vector<AppendEntry> entries;
    std::vector<KeysValues> data;
    data.reserve(chosen.size());
    std::vector<std::vector<uint8_t>> x(chosen.size());
    // Pages have activations in some layers, in others not.
    const bool with_x = cache.config.hidden > 0 && Below(10) > 0;
    for (SequenceId id : chosen) {
      ModelSequence& model = side.sequences.at(id);
      const uint64_t at = model.tokens[layer];
      const uint64_t tokens_max = uint64_t{kBlocksMax} * layout.page_tokens;
      // Layers drift apart at times, and catch up.
      uint64_t tokens = Below(3) == 0 ? 1 + Below(50) : model.TokensInSomeLayer() - at;
      tokens = std::min(tokens, tokens_max - at);
      if (tokens == 0) continue;
      while (model.text.ids.size() < at + tokens) model.text.Add(NextId(model.text));
      data.push_back(MakeKeysValues(layout, model.text, at, static_cast<int>(tokens), layer));
      entries.push_back({id, at, static_cast<int>(tokens), data.back().k.data(), data.back().v.data()});
      if (!with_x) continue;
      x[entries.size() - 1] = MakeActivations(cache.config.hidden, model.text, at, static_cast<int>(tokens), layer);
      entries.back().x = x[entries.size() - 1].data();
    }
    if (entries.empty()) return;
    const uint64_t what = Below(20);
    if (what < 3) {
      absl::StatusCode code = absl::StatusCode::kInvalidArgument;
      const size_t bad = Below(entries.size());
      if (what == 0) {
        std::vector<uint8_t>& kv = Below(2) ? data[bad].k : data[bad].v;
        std::vector<uint8_t>& side_data =
            with_x && Below(2) && entries[bad].position % layout.page_tokens == 0 ? x[bad] : kv;
        const uint16_t not_finite = Below(2) ? 0x7c00 : 0xfe01;
        std::memcpy(side_data.data() + 2 * Below(side_data.size() / 2), &not_finite, 2);
      } else if (what == 1) {
        ++entries[bad].position;
        code = absl::StatusCode::kFailedPrecondition;
      } else {
        entries.push_back(entries[bad]);
      }
      const absl::Status status = side.store.store->Append(cache.id, layer, entries);
      ++refused;
      ASSERT_TRUE(status.code() == code || status.code() == absl::StatusCode::kResourceExhausted) << status;
      return;
    }
    const absl::Status status = side.store.store->Append(cache.id, layer, entries);
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(status.ok()) << status;
    for (const AppendEntry& entry : entries) {
      ModelSequence& model = side.sequences.at(entry.sequence);
      const int64_t aged = static_cast<int64_t>(entry.position / layout.page_tokens) - cache.config.lag_pages;
      if (aged > model.aged[layer]) model.aged[layer] = static_cast<uint32_t>(aged);
      model.tokens[layer] += entry.tokens;
    }
  }

  ExpectedPage Expect(const ModelCache& cache, const ModelSequence& model, int layer, uint32_t index, uint64_t last) {
    const PageLayout& layout = cache.config.layout;
    const uint64_t begin = uint64_t{index} * layout.page_tokens;
    ExpectedPage page;
    page.raw_tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, model.tokens[layer] - begin));
    page.raw = MakeRawPage(layout, model.text, index, page.raw_tokens, layer);
    page.lag_applies = index >= model.aged[layer];
    const bool some_query_reads_encoded =
        !page.lag_applies || last / layout.page_tokens > index + uint64_t(cache.config.lag_pages);
    if (some_query_reads_encoded) page.encoded = MakeEncodedPage(*cache.codec, page.raw, index, layer);
    if (!page.lag_applies && !page.encoded.empty()) page.raw.clear();
    return page;
  }

  void AttendSome(Side& side) {
    auto first = Pick(side);
    if (first == side.sequences.end() || side.leases.size() > 8) return;
    const size_t which = first->second.cache;
    const ModelCache& cache = side.caches[which];
    const int layer = static_cast<int>(Below(cache.config.layers));
    std::vector<AttendEntry> entries;
    HeldLease held;
    held.client = static_cast<int>(Below(kClients));
    held.layout = cache.config.layout;
    for (uint64_t tries = 1 + Below(3); tries > 0; --tries) {
      auto it = Pick(side);
      const ModelSequence& model = it->second;
      if (model.cache != which || model.tokens[layer] == 0) continue;
      const uint64_t position = Below(2) ? model.tokens[layer] - 1 : Below(model.tokens[layer]);
      const int tokens = static_cast<int>(1 + Below(model.tokens[layer] - position));
      entries.push_back({it->first, position, tokens});
      const uint64_t last = position + tokens - 1;
      held.expected.emplace_back();
      const uint64_t page_tokens = held.layout.page_tokens;
      for (uint32_t index = 0; index <= last / page_tokens; ++index) {
        const ExpectedPage page = Expect(cache, model, layer, index, last);
        const uint64_t end = (index + uint64_t{1}) * page_tokens;
        held.refused |= !cache.codec->info().identity && !page.lag_applies && page.raw.empty() && position + 1 < end;
        held.expected.back().push_back(page);
      }
    }
    auto lease = side.store.store->Attend(cache.id, layer, entries);
    if (held.refused && !lease.ok()) {
      ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition) << lease.status();
      return;
    }
    ASSERT_TRUE(lease.ok()) << lease.status();
    held.lease = *std::move(lease);
    held.lease->OnReady([called = held.called] { *called = true; });
    side.leases.push_back(std::move(held));
  }

  void CheckLeases(Side& side) {
    for (const HeldLease& held : side.leases) {
      ASSERT_EQ(held.lease->ready(), *held.called);
      if (!held.lease->ready()) continue;
      ASSERT_EQ(held.lease->status().ok(), !held.refused) << held.lease->status();
      for (size_t entry = 0; !held.refused && entry < held.expected.size(); ++entry) {
        const auto pages = held.lease->pages(entry);
        ASSERT_EQ(pages.size(), held.expected[entry].size());
        for (size_t i = 0; i < pages.size(); ++i) {
          const ExpectedPage& expected = held.expected[entry][i];
          ASSERT_EQ(pages[i].lag_applies, expected.lag_applies);
          ASSERT_EQ(pages[i].raw != nullptr, !expected.raw.empty());
          ASSERT_EQ(pages[i].encoded != nullptr, !expected.encoded.empty());
          if (pages[i].raw) {
            ASSERT_TRUE(RawPrefixEquals(held.layout, pages[i].raw, expected.raw, expected.raw_tokens));
          }
          if (pages[i].encoded) {
            ASSERT_EQ(std::memcmp(pages[i].encoded, expected.encoded.data(), expected.encoded.size()), 0);
          }
        }
      }
    }
  }

  void ForkOne(Side& side) {
    auto it = Pick(side);
    if (it == side.sequences.end() || side.sequences.size() >= 24) return;
    const ModelSequence model = it->second;
    const auto fork = side.store.store->Fork(it->first);
    if (model.TokensInEveryLayer() != model.TokensInSomeLayer()) {
      ASSERT_EQ(fork.status().code(), absl::StatusCode::kFailedPrecondition);
      return;
    }
    if (fork.status().code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(fork.ok()) << fork.status();
    ModelSequence copy = model;
    copy.client = static_cast<int>(Below(kClients));
    // What follows differs.
    copy.text.Truncate(model.tokens[0]);
    if (Below(2)) copy.text.Add(1000 + static_cast<uint32_t>(Below(1000)));
    side.sequences.emplace(*fork, copy);
  }

  void CropOne(Side& side) {
    auto it = Pick(side);
    if (it == side.sequences.end()) return;
    ModelSequence& model = it->second;
    const ModelCache& cache = side.caches[model.cache];
    const int page_tokens = cache.config.layout.page_tokens;
    const uint64_t every = model.TokensInEveryLayer();
    uint64_t tokens = Below(every + 2);
    if (Below(2)) tokens = std::max(tokens, every > 20 ? every - Below(20) : 0);
    const uint32_t index = static_cast<uint32_t>(tokens / page_tokens);
    // A crop ages by the newest token first.
    std::vector<uint32_t> aged_by_newest = model.aged;
    bool aged = false;
    for (size_t layer = 0; layer < model.aged.size(); ++layer) {
      if (model.tokens[layer] > tokens) {
        const int64_t n = static_cast<int64_t>((model.tokens[layer] - 1) / page_tokens) - cache.config.lag_pages;
        if (n > aged_by_newest[layer]) aged_by_newest[layer] = static_cast<uint32_t>(n);
      }
      aged |= index < aged_by_newest[layer];
    }
    const absl::Status status = side.store.store->Crop(it->first, tokens);
    if (tokens > every) {
      ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      return;
    }
    if (tokens % page_tokens != 0 && aged && !cache.codec->info().identity) {
      ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      ASSERT_NE(status.message().find(std::to_string(index * page_tokens)), absl::string_view::npos);
      return;
    }
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(status.ok()) << status;
    std::fill(model.tokens.begin(), model.tokens.end(), tokens);
    for (size_t layer = 0; layer < model.aged.size(); ++layer)
      model.aged[layer] = std::min(aged_by_newest[layer], index);
    model.text.Truncate(tokens);
    if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));  // another text from here on
  }

  void PublishOne(Side& side) {
    auto it = Pick(side);
    if (it == side.sequences.end()) return;
    const ModelSequence& model = it->second;
    ModelCache& cache = side.caches[model.cache];
    Text text = model.text;
    text.Truncate(model.TokensInEveryLayer());
    auto names = side.store.Names(cache.id, text);
    names.resize(Below(names.size() + 1));
    const auto published = side.store.store->Publish(it->first, names);
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_LE(published->published + published->shared + published->deferred, static_cast<int>(names.size()));
    shared += published->shared;
    for (const BlockName& name : names) cache.published.insert(name.key);
    const auto match = side.store.store->caches().Match(cache.id, names);
    ASSERT_TRUE(match.ok());
    ASSERT_EQ(match->hit_blocks, static_cast<int>(names.size()));
  }

  void DropOne(Side& side) {
    auto it = Pick(side);
    if (it == side.sequences.end()) return;
    side.store.store->Drop(it->first);
    side.sequences.erase(it);
  }

  void DropLease(Side& side) {
    if (side.leases.empty()) return;
    side.leases.erase(side.leases.begin() + Below(side.leases.size()));
  }

  void KillClient(Side& side) {
    const int client = static_cast<int>(Below(kClients));
    for (auto it = side.sequences.begin(); it != side.sequences.end();) {
      if (it->second.client == client) side.store.store->Drop(it->first);
      it = it->second.client == client ? side.sequences.erase(it) : std::next(it);
    }
    std::erase_if(side.leases, [&](const HeldLease& held) { return held.client == client; });
    std::erase_if(side.exports, [&](const HeldExport& held) { return held.client == client; });
  }

  void FinishJobs(Side& side) {
    for (uint64_t n = Below(6); n > 0 && side.store.executor.jobs() > 0; --n) {
      side.store.executor.FinishOne(Below(side.store.executor.jobs()));
    }
  }

  void Purge(Side& side) {
    const ModelCache& cache = side.caches[Below(side.caches.size())];
    ASSERT_TRUE(side.store.store->caches().Purge(cache.id).ok());
    side.lost_names = true;
    OpenCaches(side);
  }

  void StartExport(Side& side) {
    auto it = Pick(side);
    if (it == side.sequences.end() || side.exports.size() > 3) return;
    auto lease = side.store.store->exports().Whole(it->first);
    if (it->second.TokensInEveryLayer() != it->second.TokensInSomeLayer()) {
      ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition);
      return;
    }
    if (lease.status().code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(lease.ok()) << lease.status();
    HeldExport held;
    held.client = it->second.client;
    held.lease = *std::move(lease);
    held.sequence = it->second;
    held.sequence.text.Truncate(held.sequence.tokens[0]);
    side.exports.push_back(std::move(held));
  }

  void FinishExport(Side& side) {
    if (side.exports.empty()) return;
    const size_t which = Below(side.exports.size());
    HeldExport held = std::move(side.exports[which]);
    side.exports.erase(side.exports.begin() + which);
    if (held.lease->last() == nullptr) return;
    Side& peer = *sides_[&side == sides_[0].get() ? 1 : 0];
    if (peer.sequences.size() >= 24) return;
    const HandOffHeader& first = held.lease->first();
    const std::vector<SentPage> sent = testing::TakeAll(*held.lease);
    const ModelCache& cache = peer.caches[held.sequence.cache];
    const PageLayout& layout = cache.config.layout;
    ASSERT_EQ(first.tokens, held.sequence.tokens[0]);
    const size_t per_layer = first.blocks.size() + (first.tokens % layout.page_tokens != 0);
    ASSERT_EQ(sent.size(), per_layer * cache.config.layers + first.activations.size());
    activations += first.activations.size();
    ModelSequence model = held.sequence;
    model.client = static_cast<int>(Below(kClients));
    model.aged = first.aged;
    for (const SentPage& each : sent) {
      const HandOffPage& page = each.page;
      const int tokens = static_cast<int>(
          std::min<uint64_t>(layout.page_tokens, first.tokens - uint64_t{page.block} * layout.page_tokens));
      if (each.activations) {
        const auto expected =
            MakeActivations(cache.config.hidden, model.text, uint64_t{page.block} * layout.page_tokens, tokens,
                            static_cast<int>(page.layer));
        ASSERT_TRUE(absl::MakeConstSpan(expected) == each.bytes.bytes);
        ASSERT_EQ(each.bytes.checksum, testing::Checksum(expected));
        continue;
      }
      std::vector<uint8_t> expected = MakeRawPage(layout, model.text, page.block, tokens, static_cast<int>(page.layer));
      const bool aged = page.block < held.sequence.aged[page.layer] ||
                        (first.tokens - 1) / layout.page_tokens > uint64_t{page.block} + cache.config.lag_pages;
      ASSERT_EQ(aged, page.block < first.aged[page.layer]);
      if (aged) {
        auto encoded = MakeEncodedPage(*cache.codec, expected, page.block, static_cast<int>(page.layer));
        ASSERT_EQ(each.encoded, !encoded.empty());
        if (!encoded.empty()) expected = std::move(encoded);
      } else {
        ASSERT_FALSE(each.encoded);
      }
      const auto bytes = each.bytes.bytes;
      ASSERT_EQ(bytes.size(), page.bytes);
      ASSERT_EQ(bytes.size(), expected.size());
      ASSERT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
      ASSERT_EQ(each.bytes.checksum, XXH3_64bits(bytes.data(), bytes.size()));
    }
    auto import =
        peer.store.store->imports().Import(first, nullptr, [this](uint32_t, uint32_t, uint32_t with_activations) {
          const auto chosen = static_cast<uint32_t>(Below(with_activations + 1));
          recomputed += chosen;
          return chosen;
        });
    if (import.status().code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(import.ok()) << import.status();
    peer.store.store->report().CheckInvariants();
    const uint64_t fate = Below(6);
    if (fate == 0) return;  // the transfer broke off
    const auto id = testing::Receive(**import, *held.lease->last(), sent, &cache.config, &model.text);
    if (id.status().code() == absl::StatusCode::kResourceExhausted) {
      ++exhausted;
      return;
    }
    ASSERT_TRUE(id.ok()) << id.status();
    ASSERT_FALSE((*import)->Commit().ok());
    ++imports;
    for (size_t i = 0; i < first.blocks.size(); ++i) {
      const HandOffBlock& block = first.blocks[i].named ? first.blocks[i] : held.lease->last()->blocks[i];
      if (block.named) peer.caches[model.cache].published.insert(block.name.key);
    }
    peer.sequences.emplace(*id, model);
    peer.store.store->report().CheckInvariants();
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Side>> sides_;
};

TEST(PageStoreRandom, AgreesWithTheModel) {
  uint64_t hits = 0, imports = 0, shared = 0, exhausted = 0, activations = 0, recomputed = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    RandomTest test(seed);
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "step " << step);
      test.Step();
      if (::testing::Test::HasFatalFailure()) return;
    }
    test.Finish();
    if (::testing::Test::HasFatalFailure()) return;
    std::printf("seed %d: %d hits, %d shared, %d imports, %d exhausted, %d refused, %d activations, %d recomputed\n",
                int(seed), int(test.hits), int(test.shared), int(test.imports), int(test.exhausted), int(test.refused),
                int(test.activations), int(test.recomputed));
    hits += test.hits;
    imports += test.imports;
    shared += test.shared;
    exhausted += test.exhausted;
    activations += test.activations;
    recomputed += test.recomputed;
  }
  // The walk went where it should.
  EXPECT_GT(hits, 0u);
  EXPECT_GT(imports, 0u);
  EXPECT_GT(shared, 0u);
  EXPECT_GT(exhausted, 0u);
  EXPECT_GT(activations, recomputed);
  EXPECT_GT(recomputed, 0u);
}

}  // namespace
}  // namespace kvmanager
