#include "attention/step_tables.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "attention/upload_ring.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint32_t kNoSlot = DevicePage::kNoSlot;

TEST(TableRegions, NeverOverlapAndComeBackWhole) {
  std::mt19937 random(1);
  constexpr uint32_t kEntries = 500;
  TableRegions regions(kEntries);
  std::map<uint32_t, uint32_t> held;
  std::vector<bool> taken(kEntries);
  const auto mark = [&](uint32_t first, uint32_t count, bool value) {
    for (uint32_t i = first; i < first + count; ++i) {
      ASSERT_LT(i, kEntries);
      ASSERT_NE(taken[i], value);
      taken[i] = value;
    }
  };
  for (int i = 0; i < 5000; ++i) {
    const uint32_t count = 1 + random() % 40;
    if (random() % 3 != 0) {
      const auto first = regions.Allocate(count);
      // Refused only where no run is as long.
      uint32_t longest = 0, run = 0;
      for (uint32_t j = 0; j < kEntries; ++j) longest = std::max(longest, run = taken[j] ? 0 : run + 1);
      ASSERT_EQ(first.has_value(), longest >= count);
      if (!first) continue;
      mark(*first, count, true);
      held[*first] = count;
    } else if (!held.empty()) {
      const auto it = std::next(held.begin(), random() % held.size());
      if (random() % 2 == 0) {
        const uint32_t end = it->first + it->second;
        bool room = end + count <= kEntries;
        for (uint32_t j = end; room && j < end + count; ++j) room = !taken[j];
        ASSERT_EQ(regions.Extend(it->first, it->second, count), room);
        if (room) mark(end, count, true), it->second += count;
      } else {
        regions.Free(it->first, it->second);
        mark(it->first, it->second, false);
        held.erase(it);
      }
    }
    ASSERT_EQ(regions.free_entries(), uint32_t(std::count(taken.begin(), taken.end(), false)));
  }
  for (const auto& [first, count] : held) regions.Free(first, count);
  EXPECT_EQ(regions.Allocate(kEntries), 0u);
}

TEST(UploadRing, GivesOutWhatTheDeviceHasRead) {
  std::mt19937 random(2);
  constexpr size_t kBytes = 4096;
  alignas(64) static uint8_t memory[kBytes];
  uint64_t done = 0;
  UploadRing ring(memory, kBytes, &done);
  struct Piece {
    uint64_t number;
    size_t first, end;
  };
  std::deque<Piece> under_way;
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    const size_t bytes = 1 + random() % (random() % 4 == 0 ? ring.largest() : 200);
    uint8_t* const piece = ring.Take(bytes);
    if (piece == nullptr) {
      ++refused;
      ASSERT_FALSE(under_way.empty());
      done = under_way[random() % under_way.size()].number;
      while (!under_way.empty() && under_way.front().number <= done) under_way.pop_front();
      continue;
    }
    const size_t first = size_t(piece - memory), end = first + bytes;
    ASSERT_EQ(first % UploadRing::kAlign, 0u);
    ASSERT_LE(end, kBytes);
    for (const Piece& other : under_way) ASSERT_TRUE(end <= other.first || other.end <= first);
    if (random() % 8 != 0) under_way.push_back({ring.Submit(), first, end});
  }
  EXPECT_GT(refused, 100);
}

// ---- tables ----

struct Model {
  uint32_t place;
  std::vector<std::vector<DevicePage>> layers;
};

class Tables : public ::testing::Test {
 protected:
  static constexpr int kLayers = 3, kSequences = 5;

  void Make(bool identity, int lag_pages, uint64_t pages_max = 400) {
    options_.layers = kLayers;
    options_.identity = identity;
    options_.lag_pages = lag_pages;
    options_.page_tokens = 16;
    options_.pages_max = pages_max;
    options_.sequences_max = kSequences;
    auto made = StepTables::Make(options_);
    ASSERT_TRUE(made.ok()) << made.status();
    tables_ = std::make_unique<StepTables>(*std::move(made));
    device_.assign(size_t{tables_->layer_entries()} * kLayers, 0xdeadbeef);
  }
  void Apply(size_t at_once) {
    std::vector<SlotChange> changes(at_once);
    while (tables_->changes() > 0) {
      const size_t before = tables_->changes(), taken = tables_->TakeChanges(absl::MakeSpan(changes));
      ASSERT_EQ(taken, std::min(before, at_once));
      ASSERT_EQ(tables_->changes(), before - taken);
      for (size_t i = 0; i < taken; ++i) {
        ASSERT_LT(changes[i].at, device_.size());
        device_[changes[i].at] = changes[i].slot;
      }
    }
  }
  /// What a query on page `own` reads of page `page`: its slot and whether that is raw; kNoSlot: nothing can be read.
  std::pair<uint32_t, bool> Wanted(const DevicePage& page, uint32_t index, uint32_t own, uint32_t aged) const {
    if (options_.identity) return {page.raw, true};
    const bool near = index == own || (index >= aged && own - index <= uint32_t(options_.lag_pages));
    const bool raw = page.encoded == kNoSlot || (near && page.raw != kNoSlot);
    return {raw ? page.raw : page.encoded, raw};
  }
  /// Reads and plans, and compares with the model, page by page.
  void CheckStep(const std::vector<Model>& models, const std::vector<DeviceStepEntry>& entries, bool append) {
    for (int layer = 0; layer < kLayers; ++layer) {
      bool possible = true;
      for (const DeviceStepEntry& e : entries) {
        const Model& model =
            *std::find_if(models.begin(), models.end(), [&](const Model& m) { return m.place == e.place; });
        for (int token = 0; token < e.tokens; ++token) {
          const uint32_t own = uint32_t((e.position + token) / 16);
          const std::vector<DevicePage>& pages = model.layers[layer];
          possible = possible && own < pages.size();
          for (uint32_t j = 0; possible && j <= own; ++j) {
            const auto [slot, raw] = Wanted(pages[j], j, own, e.aged);
            possible = slot != kNoSlot;
            const bool is_last = (e.position + token) % 16 == 15;
            if (j == own && !raw && (!is_last || token != 0)) possible = false;
            if (j == own && append && pages[j].raw == kNoSlot) possible = false;
          }
        }
      }
      StepReading reading;
      const absl::Status read = tables_->Read(layer, entries, append, true, &reading);
      ASSERT_EQ(read.ok(), possible) << read;
      if (!possible) {
        EXPECT_TRUE(absl::IsFailedPrecondition(read)) << read;
        ++refused_;
        continue;
      }
      ++compared_;
      DevicePlanner::Options o;
      o.layout.kv_heads = 1, o.layout.head_dim = 64, o.layout.page_tokens = 16;
      o.query_heads = 1;
      o.lag_pages = options_.lag_pages;
      o.identity = options_.identity;
      o.blocks = 3, o.warps = 1, o.encoded_cost = 1000;
      std::vector<DeviceSequence> sequences;
      tables_->MakeSequences(entries, reading, &sequences);
      std::vector<device::AttendItem> items(1000);
      const auto planned = DevicePlanner(o).Plan(sequences, absl::MakeSpan(items));
      ASSERT_TRUE(planned.ok()) << planned.status();
      // By row: slots read, in any order, with their form.
      std::map<uint32_t, std::vector<std::pair<uint32_t, bool>>> got, wanted;
      for (uint32_t i = 0; i < planned->items; ++i) {
        for (uint32_t r = 0; items[i].pages > 0 && r < items[i].rows; ++r) {
          for (uint32_t p = 0; p < items[i].pages; ++p) {
            got[items[i].first_token + items[i].first_row + r].push_back(
                {device_[size_t(layer) * tables_->layer_entries() + items[i].first_page + p],
                 items[i].form == device::PageForm::kRaw});
          }
        }
      }
      uint32_t row = 0;
      for (const DeviceStepEntry& e : entries) {
        const Model& model =
            *std::find_if(models.begin(), models.end(), [&](const Model& m) { return m.place == e.place; });
        for (int token = 0; token < e.tokens; ++token, ++row) {
          const uint32_t own = uint32_t((e.position + token) / 16);
          for (uint32_t j = 0; j <= own; ++j) wanted[row].push_back(Wanted(model.layers[layer][j], j, own, e.aged));
        }
      }
      for (auto& [r, list] : got) std::sort(list.begin(), list.end());
      for (auto& [r, list] : wanted) std::sort(list.begin(), list.end());
      ASSERT_EQ(got, wanted);
    }
  }

  StepTables::Options options_;
  std::unique_ptr<StepTables> tables_;
  std::vector<uint32_t> device_;
  int compared_ = 0, refused_ = 0;
};

TEST_F(Tables, ReadWhatTheRulesSayWhateverHappenedBefore) {
  for (const bool identity : {false, true}) {
    for (int lag = 0; lag < 3; ++lag) {
      Make(identity, lag);
      std::mt19937 random(10 * lag + identity);
      uint32_t slot = 1;
      std::vector<Model> models;
      for (int i = 0; i < 3000; ++i) {
        const int what = random() % 16;
        if (what == 0 && models.size() < kSequences) {
          const auto place = tables_->AddSequence(random() % 40);
          ASSERT_TRUE(place.ok()) << place.status();
          models.push_back({*place, std::vector<std::vector<DevicePage>>(kLayers)});
          continue;
        }
        if (models.empty()) continue;
        const size_t which = random() % models.size();
        Model& model = models[which];
        const size_t count = model.layers[0].size();
        if (what == 1 && random() % 4 == 0) {
          tables_->RemoveSequence(model.place);
          models.erase(models.begin() + which);
        } else if (what == 2 && random() % 4 == 0) {
          const uint32_t left = uint32_t(random() % (count + 1));
          tables_->Truncate(model.place, left);
          for (auto& pages : model.layers) pages.resize(left);
        } else if (what < 8 && count < 70) {
          // New pages in every layer; sometimes one layer's are declined, or not there yet.
          const uint32_t more = 1 + random() % 3;
          for (int layer = 0; layer < kLayers; ++layer) {
            std::vector<DevicePage> pages(more);
            for (DevicePage& page : pages) {
              const bool encoded = random() % 8 != 0;
              if (!encoded || random() % 3 != 0) page.raw = slot++;
              if (encoded) page.encoded = slot++;
              if (random() % 400 == 0) page = {};
            }
            ASSERT_TRUE(tables_->SetPages(model.place, layer, uint32_t(count), pages).ok());
            model.layers[layer].insert(model.layers[layer].end(), pages.begin(), pages.end());
          }
        } else if (what < 11 && count > 0) {
          const uint32_t page = random() % count;
          const int layer = random() % kLayers;
          DevicePage& old = model.layers[layer][page];
          const int form = random() % 3;
          if (form == 0) old.raw = random() % 2 == 0 ? slot++ : old.encoded == kNoSlot ? old.raw : kNoSlot;
          if (form == 1) old.encoded = random() % 2 == 0 ? slot++ : old.raw == kNoSlot ? old.encoded : kNoSlot;
          ASSERT_TRUE(tables_->SetPages(model.place, layer, page, {&old, 1}).ok());
        } else {
          std::vector<DeviceStepEntry> entries;
          for (const Model& m : models) {
            if (m.layers[0].empty() || random() % 2 == 0) continue;
            const uint64_t tokens = m.layers[0].size() * 16;
            DeviceStepEntry e;
            e.place = m.place;
            e.tokens = 1 + int(random() % std::min<uint64_t>(tokens, random() % 2 == 0 ? 1 : 40));
            e.position = random() % 2 == 0 ? tokens - e.tokens : random() % (tokens - e.tokens + 1);
            if (random() % 8 == 0) e.position = e.position / 16 * 16 + 15, e.tokens = 1;
            e.aged = random() % 2 == 0 ? 0 : random() % (m.layers[0].size() + 1);
            entries.push_back(e);
          }
          if (entries.empty()) continue;
          Apply(1 + random() % 50);
          CheckStep(models, entries, random() % 2 == 0);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(compared_, 500);
  EXPECT_GT(refused_, 100);
}

TEST_F(Tables, ASequenceGrowsUntilThereIsNoRoom) {
  Make(false, 1, 100);
  const uint32_t place = *tables_->AddSequence(1);
  std::vector<uint32_t> slots;
  for (uint32_t page = 0;; ++page) {
    const DevicePage one{2 * page, 2 * page + 1};
    const absl::Status status = tables_->SetPages(place, 1, page, {&one, 1});
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      EXPECT_EQ(DetailOf(status).field, "table entries");
      break;
    }
    slots.push_back(page);
  }
  EXPECT_GE(slots.size(), 100u);
  Apply(1000);
  for (uint32_t page = 0; page < slots.size(); ++page) {
    const uint32_t* const table = device_.data() + tables_->layer_entries();
    EXPECT_EQ(table[tables_->raw_table(place) + page], 2 * page);
    EXPECT_EQ(table[tables_->encoded_table(place) + page], 2 * page + 1);
  }
}

TEST_F(Tables, RefuseWhatIsNotThere) {
  Make(false, 1);
  const DevicePage page{1, kNoSlot};
  EXPECT_TRUE(absl::IsInvalidArgument(tables_->SetPages(0, 0, 0, {&page, 1})));
  for (int i = 0; i < kSequences; ++i) ASSERT_TRUE(tables_->AddSequence(0).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(tables_->AddSequence(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(tables_->SetPages(0, kLayers, 0, {&page, 1})));
  EXPECT_TRUE(absl::IsResourceExhausted(tables_->SetPages(0, 0, UINT32_MAX - 1, {&page, 1})));
  options_.pages_max = uint64_t{1} << 31;
  EXPECT_TRUE(absl::IsInvalidArgument(StepTables::Make(options_).status()));
}

TEST_F(Tables, WhatIsAlikeIsReadAlike) {
  Make(false, 1);
  const uint32_t place = *tables_->AddSequence(8);
  for (int layer = 0; layer < kLayers; ++layer) {
    std::vector<DevicePage> pages(8, {uint32_t(100 * layer), uint32_t(100 * layer + 1)});
    for (int j = 6; j < 8; ++j) pages[j].encoded = kNoSlot;
    if (layer == 2) pages[3].encoded = kNoSlot;  // declined
    ASSERT_TRUE(tables_->SetPages(place, layer, 0, pages).ok());
  }
  const DeviceStepEntry entry{place, 7 * 16 + 3, 1, 0};
  StepReading a, b, c;
  ASSERT_TRUE(tables_->Read(0, {&entry, 1}, true, true, &a).ok());
  ASSERT_TRUE(tables_->Read(1, {&entry, 1}, true, true, &b).ok());
  ASSERT_TRUE(tables_->Read(2, {&entry, 1}, true, true, &c).ok());
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  // Before the lag has reached it, a page that is yet to be encoded makes no difference.
  const DevicePage late{1, 2};
  ASSERT_TRUE(tables_->SetPages(place, 1, 6, {&late, 1}).ok());
  ASSERT_TRUE(tables_->Read(1, {&entry, 1}, true, true, &b).ok());
  EXPECT_EQ(a, b);
}

TEST(StepTables, AnIndexHasTheSecondHalfOfARegion) {
  StepTables::Options o;
  o.layers = 2, o.identity = true, o.page_tokens = 64, o.pages_max = 400, o.sequences_max = 2, o.index_tokens = 1024;
  auto tables = StepTables::Make(o);
  ASSERT_TRUE(tables.ok()) << tables.status();
  std::vector<uint32_t> device(size_t{tables->layer_entries()} * 2, 0xdeadbeef);
  const auto apply = [&] {
    std::vector<SlotChange> changes(tables->changes());
    tables->TakeChanges(absl::MakeSpan(changes));
    for (const SlotChange& change : changes) device[change.at] = change.slot;
  };
  const uint32_t place = *tables->AddSequence(0);
  const std::vector<DevicePage> pages(16, DevicePage{7, DevicePage::kNoSlot});
  StepReading reading;
  const DeviceStepEntry chooses{place, 100, 1, 0, 1}, reads_all{place, 100, 1, 0, 0};
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(tables->SetPages(place, layer, 0, pages).ok());
    EXPECT_TRUE(tables->Read(layer, {&reads_all, 1}, false, true, &reading).ok());
    EXPECT_FALSE(tables->Read(layer, {&chooses, 1}, false, true, &reading).ok());
    for (uint32_t i = 0; i < 2; ++i) {
      const DevicePage index{7, 100 + 10 * uint32_t(layer) + i};
      ASSERT_TRUE(tables->SetPages(place, layer, i, {&index, 1}).ok());
    }
    // A page that changes leaves the index beside it.
    const DevicePage changed{8, DevicePage::kNoSlot};
    ASSERT_TRUE(tables->SetPages(place, layer, 1, {&changed, 1}).ok());
    EXPECT_TRUE(tables->Read(layer, {&chooses, 1}, false, true, &reading).ok());
  }
  // The region grows and moves; a longer context wants more codes.
  ASSERT_TRUE(tables->AddSequence(0).ok());
  ASSERT_TRUE(tables->SetPages(place, 0, 16, std::vector<DevicePage>(40, DevicePage{9, DevicePage::kNoSlot})).ok());
  apply();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const uint32_t at = layer * tables->layer_entries();
    for (uint32_t i = 0; i < 2; ++i) EXPECT_EQ(device[at + tables->encoded_table(place) + i], 100 + 10 * layer + i);
    EXPECT_EQ(device[at + tables->raw_table(place)], 7u);
    EXPECT_EQ(device[at + tables->raw_table(place) + 1], 8u);
  }
  const DeviceStepEntry longer{place, 1024, 1, 0, 1};
  EXPECT_FALSE(tables->Read(0, {&longer, 1}, false, true, &reading).ok());
}

TEST(StepTables, QueriesThatChooseAreInNoPlanOfPages) {
  StepTables::Options o;
  o.layers = 1, o.identity = true, o.page_tokens = 64, o.pages_max = 100, o.sequences_max = 1, o.index_tokens = 1024;
  auto tables = StepTables::Make(o);
  ASSERT_TRUE(tables.ok()) << tables.status();
  const uint32_t place = *tables->AddSequence(8);
  ASSERT_TRUE(tables->SetPages(place, 0, 0, std::vector<DevicePage>(8, DevicePage{0, 0})).ok());
  // Tokens, and how many of them choose.
  std::vector<DeviceStepEntry> entries;
  for (const auto& [tokens, sparse] : {std::pair{5, 5}, {7, 0}, {80, 10}, {3, 1}, {90, 80}, {1, 1}, {70, 0}}) {
    entries.push_back({place, 20, tokens, 0, sparse});
  }
  StepReading reading;
  ASSERT_TRUE(tables->Read(0, entries, false, true, &reading).ok());
  std::vector<DeviceSequence> cut, whole;
  tables->MakeSequences(entries, reading, &cut, 64, &whole);
  std::map<uint32_t, uint64_t> got, wanted;
  for (const auto* sequences : {&cut, &whole}) {
    uint32_t row = 0;
    for (const DeviceSequence& sequence : *sequences) {
      row += sequence.skipped_tokens;
      for (int i = 0; i < sequence.tokens; ++i) {
        ASSERT_TRUE(got.emplace(row++, sequence.first_position + uint64_t(i)).second);
      }
    }
  }
  uint32_t row = 0;
  for (const DeviceStepEntry& entry : entries) {
    for (int i = 0; i < entry.tokens - entry.sparse_queries; ++i)
      wanted[row + uint32_t(i)] = entry.position + uint64_t(i);
    row += uint32_t(entry.tokens);
  }
  EXPECT_EQ(got, wanted);
  EXPECT_EQ(whole.size(), 2u);  // of 70 tokens each
}

TEST(StepTables, LongEntriesAreSequencesOfAnotherPlan) {
  StepTables::Options o;
  o.layers = 1, o.identity = true, o.page_tokens = 64, o.pages_max = 100, o.sequences_max = 4;
  auto tables = StepTables::Make(o);
  ASSERT_TRUE(tables.ok()) << tables.status();
  std::vector<DeviceStepEntry> entries;
  for (const int tokens : {3, 64, 65, 1, 20, 200}) {
    if (entries.size() < 4) {
      const auto place = tables->AddSequence(8);
      ASSERT_TRUE(place.ok()) << place.status();
      const std::vector<DevicePage> pages(8, DevicePage{0, 0});
      ASSERT_TRUE(tables->SetPages(*place, 0, 0, pages).ok());
      entries.push_back({*place, 10, tokens, 0});
    } else {
      entries.push_back({entries[1].place, 100, tokens, 0});
    }
  }
  StepReading reading;
  ASSERT_TRUE(tables->Read(0, entries, false, true, &reading).ok());
  std::vector<DeviceSequence> cut, whole;
  tables->MakeSequences(entries, reading, &cut, 64, &whole);
  // Which plan has each token of the step, and from which position.
  const auto rows = [](const std::vector<DeviceSequence>& sequences) {
    std::map<uint32_t, uint64_t> positions;
    uint32_t row = 0;
    for (const DeviceSequence& sequence : sequences) {
      row += sequence.skipped_tokens;
      for (int i = 0; i < sequence.tokens; ++i) positions[row++] = sequence.first_position + i;
    }
    return positions;
  };
  std::map<uint32_t, uint64_t> wanted_cut, wanted_whole;
  uint32_t row = 0;
  for (const DeviceStepEntry& entry : entries) {
    for (int i = 0; i < entry.tokens; ++i) {
      (entry.tokens < 64 ? wanted_cut : wanted_whole)[row++] = entry.position + i;
    }
  }
  EXPECT_EQ(rows(cut), wanted_cut);
  EXPECT_EQ(rows(whole), wanted_whole);
  EXPECT_EQ(whole.size(), 3u);
  for (const DeviceSequence& sequence : cut) EXPECT_LE(sequence.tokens, DevicePlanner::kQueryTokensMax);
}

}  // namespace
}  // namespace kvmanager
