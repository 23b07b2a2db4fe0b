// Invariants: 1. A sequence's region has room for `capacity` pages in each form; its pages are fewer. 2. In slots_, an
// entry of a page's form is its slot where that form is there (not in not_raw, not_encoded); elsewhere it is stale, and
// nothing reads it. 3. What the device's tables differ in from slots_, at entries that are not stale, is in changes_.
#include "attention/step_tables.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint64_t kEntriesMax = UINT32_MAX;

uint32_t RoundedUp(uint64_t pages) {
  const uint64_t unit = StepTables::kRegionPages;
  return uint32_t((std::max<uint64_t>(pages, 1) + unit - 1) / unit * unit);
}

absl::Status NotThere(int layer, const DeviceStepEntry& entry, uint32_t page, absl::string_view form) {
  return absl::FailedPreconditionError(
      absl::StrCat("page ", page, " of the sequence at place ", entry.place, " is not there ", form, " in layer ",
                   layer, ", as a step of ", entry.tokens, " tokens from position ", entry.position, " on needs it"));
}

}  // namespace

absl::StatusOr<StepTables> StepTables::Make(const Options& options) {
  if (options.pages_max > kEntriesMax) return InvalidField("pages_max", options.pages_max, "below 2^32");
  // Regions grow by doubling and leave gaps behind.
  const uint64_t pages = 2 * options.pages_max + uint64_t(kRegionPages) * uint64_t(options.sequences_max);
  const uint64_t entries = options.identity && options.index_tokens == 0 ? pages : 2 * pages;
  if (entries * uint64_t(options.layers) > kEntriesMax) {
    return InvalidField(
        "pages_max", options.pages_max,
        absl::StrCat("so small that the tables of ", options.layers, " layers have below 2^32 entries"));
  }
  return StepTables(options, uint32_t(entries));
}

StepTables::StepTables(const Options& options, uint32_t layer_entries)
    : options_(options),
      layer_entries_(layer_entries),
      regions_(layer_entries),
      slots_(size_t{layer_entries} * options.layers, DevicePage::kNoSlot),
      sequences_(options.sequences_max) {
  for (uint32_t place = 0; place < sequences_.size(); ++place) free_places_.push_back(place);
}

absl::StatusOr<uint32_t> StepTables::AddSequence(uint64_t pages_hint) {
  if (free_places_.empty()) {
    return FieldError(absl::StatusCode::kResourceExhausted, "sequences", absl::StrCat(sequences_.size() + 1),
                      absl::StrCat("at most ", sequences_.size()));
  }
  if (pages_hint > layer_entries_) pages_hint = layer_entries_;
  uint32_t capacity = RoundedUp(pages_hint);
  std::optional<uint32_t> first = regions_.Allocate(EntriesFor(capacity));
  if (!first) first = regions_.Allocate(EntriesFor(capacity = kRegionPages));
  if (!first) {
    return FieldError(absl::StatusCode::kResourceExhausted, "table entries", absl::StrCat(EntriesFor(capacity)),
                      absl::StrCat("at most ", regions_.free_entries(), ", in one piece"));
  }
  const uint32_t place = free_places_.front();
  free_places_.pop_front();
  Sequence& sequence = sequences_[place];
  sequence = {true, *first, capacity, 0, std::vector<LayerPages>(options_.layers)};
  for (LayerPages& layer : sequence.layers) {
    layer.not_encoded.Add(0, PageRuns::kAll);
    layer.not_raw.Add(0, PageRuns::kAll);
  }
  ++generation_;
  ++moves_;
  return place;
}

void StepTables::RemoveSequence(uint32_t place) {
  KV_CHECK(Has(place));
  Sequence& sequence = sequences_[place];
  regions_.Free(sequence.first, EntriesFor(sequence.capacity));
  sequence = Sequence();
  free_places_.push_back(place);
  ++generation_;
  ++moves_;
}

// Room for `pages` pages: behind the region, or in another place.
absl::Status StepTables::Grow(Sequence* sequence, uint32_t pages) {
  const uint32_t before = sequence->capacity, old_first = sequence->first;
  const uint32_t least = RoundedUp(pages), wanted = std::max<uint32_t>(least, std::min(2 * before, layer_entries_));
  bool found = false;
  for (const uint32_t capacity : {wanted, least}) {
    if (regions_.Extend(sequence->first, EntriesFor(before), EntriesFor(capacity - before))) {
      sequence->capacity = capacity;
      found = true;
      break;
    }
    if (const std::optional<uint32_t> first = regions_.Allocate(EntriesFor(capacity))) {
      sequence->first = *first;
      sequence->capacity = capacity;
      found = true;
      break;
    }
  }
  if (!found) {
    return FieldError(absl::StatusCode::kResourceExhausted, "table entries", absl::StrCat(EntriesFor(least)),
                      absl::StrCat("at most ", regions_.free_entries(), ", in one piece"));
  }
  const bool moved = sequence->first != old_first;
  const uint32_t count = sequence->pages;
  for (int layer = 0; layer < options_.layers; ++layer) {
    uint32_t* const table = slots_.data() + size_t(layer) * layer_entries_;
    const uint32_t base = uint32_t(layer) * layer_entries_;
    if (halves() == 2) {  // first, since raw slots may take the place of encoded ones
      uint32_t* const from = table + old_first + before;
      std::copy_backward(from, from + count, table + sequence->first + sequence->capacity + count);
      AddChange(base + sequence->first + sequence->capacity, count);
    }
    if (moved) {
      std::copy_n(table + old_first, count, table + sequence->first);
      AddChange(base + sequence->first, count);
    }
  }
  if (moved) regions_.Free(old_first, EntriesFor(before));
  ++generation_;
  ++moves_;
  return absl::OkStatus();
}

void StepTables::AddChange(uint32_t at, uint32_t count) {
  if (count == 0) return;
  if (!changes_.empty() && changes_.back().at + changes_.back().count == at) {
    changes_.back().count += count;
  } else {
    changes_.push_back({at, count});
  }
  change_count_ += count;
}

template <typename SlotOf>
void StepTables::Write(int layer, uint32_t at, size_t count, SlotOf slot_of) {
  const uint32_t base = uint32_t(layer) * layer_entries_ + at;
  size_t first = count, end = 0;  // of what changes
  for (size_t i = 0; i < count; ++i) {
    const uint32_t slot = slot_of(i);
    if (slot == DevicePage::kNoSlot || slots_[base + i] == slot) continue;
    slots_[base + i] = slot;
    first = std::min(first, i);
    end = i + 1;
  }
  if (first < end) AddChange(base + uint32_t(first), uint32_t(end - first));
}

absl::Status StepTables::SetPages(uint32_t place, int layer, uint32_t first_page, absl::Span<const DevicePage> pages) {
  if (!Has(place)) return InvalidField("sequence's place", place, "one that AddSequence gave");
  if (layer < 0 || layer >= options_.layers) {
    return InvalidField("layer", layer, absl::StrCat("0..", options_.layers - 1));
  }
  if (pages.empty()) return absl::OkStatus();
  if (pages.size() > layer_entries_ || first_page > layer_entries_ - pages.size()) {
    return FieldError(absl::StatusCode::kResourceExhausted, "pages", absl::StrCat(first_page + pages.size()),
                      absl::StrCat("at most ", layer_entries_));
  }
  Sequence& sequence = sequences_[place];
  const uint32_t end = first_page + uint32_t(pages.size());
  if (end > sequence.capacity) KV_RETURN_IF_ERROR(Grow(&sequence, end));
  sequence.pages = std::max(sequence.pages, end);
  LayerPages& of_layer = sequence.layers[layer];
  Write(layer, raw_table(place) + first_page, pages.size(), [&](size_t i) { return pages[i].raw; });
  if (halves() == 2) {
    Write(layer, encoded_table(place) + first_page, pages.size(), [&](size_t i) { return pages[i].encoded; });
  }
  // Runs of pages that are alike.
  for (size_t i = 0; i < pages.size();) {
    const bool raw = pages[i].raw != DevicePage::kNoSlot, encoded = pages[i].encoded != DevicePage::kNoSlot;
    size_t to = i + 1;
    while (to < pages.size() && (pages[to].raw != DevicePage::kNoSlot) == raw &&
           (pages[to].encoded != DevicePage::kNoSlot) == encoded) {
      ++to;
    }
    const uint32_t a = first_page + uint32_t(i), b = first_page + uint32_t(to);
    raw ? of_layer.not_raw.Remove(a, b) : of_layer.not_raw.Add(a, b);
    if (encoded) {
      of_layer.not_encoded.Remove(a, b);
    } else if (options_.index_tokens == 0) {
      of_layer.not_encoded.Add(a, b);
    }
    i = to;
  }
  ++generation_;
  return absl::OkStatus();
}

void StepTables::Truncate(uint32_t place, uint32_t pages) {
  KV_CHECK(Has(place));
  Sequence& sequence = sequences_[place];
  sequence.pages = std::min(sequence.pages, pages);
  for (LayerPages& layer : sequence.layers) {
    if (options_.index_tokens == 0) layer.not_encoded.Add(pages, PageRuns::kAll);
    layer.not_raw.Add(pages, PageRuns::kAll);
  }
  ++generation_;
}

absl::Status StepTables::Read(int layer, absl::Span<const DeviceStepEntry> entries, bool append, bool attend,
                              StepReading* reading) const {
  reading->counts.clear();
  reading->runs.clear();
  for (const DeviceStepEntry& entry : entries) {
    KV_RETURN_IF_ERROR(ReadEntry(layer, entry, append, attend, reading));
  }
  return absl::OkStatus();
}

absl::Status StepTables::ReadEntry(int layer, const DeviceStepEntry& entry, bool append, bool attend,
                                   StepReading* reading) const {
  const LayerPages& pages = sequences_[entry.place].layers[layer];
  const uint32_t page_tokens = options_.page_tokens;
  const uint32_t own = uint32_t(entry.position / page_tokens);
  const uint32_t last = uint32_t((entry.position + entry.tokens - 1) / page_tokens);
  StepReading::Counts counts;
  if (append || options_.identity) {
    const uint32_t from = attend && options_.identity ? 0 : own;
    const uint32_t missing = pages.not_raw.FirstIn(from, last + 1);
    if (missing <= last) return NotThere(layer, entry, missing, "raw");
  }
  if (attend && entry.sparse_queries > 0) {
    const uint32_t chunks = options_.index_tokens == 0
                                ? 0
                                : uint32_t((entry.position + uint64_t(entry.tokens) - 1) / options_.index_tokens) + 1;
    if (chunks == 0 || pages.not_encoded.FirstIn(0, 1 + chunks) <= chunks) {
      return absl::FailedPreconditionError(absl::StrCat("the index of the sequence at place ", entry.place,
                                                        " is not there in layer ", layer, ", as queries from position ",
                                                        entry.position, " on need it"));
    }
  }
  if (!attend || options_.identity) {
    reading->counts.push_back(counts);
    return absl::OkStatus();
  }
  const uint32_t lag = uint32_t(options_.lag_pages);
  const uint32_t near = ReadingRule::FirstRawPage(own, entry.aged, lag);
  const uint32_t last_near = ReadingRule::FirstRawPage(last, entry.aged, lag);
  uint32_t without = UINT32_MAX;  // a page that has no form
  pages.not_encoded.ForEachIn(0, last_near, [&](const PageRun& run) {
    const uint32_t missing = pages.not_raw.FirstIn(run.first, run.end);
    if (missing < run.end) without = std::min(without, missing);
    reading->runs.push_back(run);
    ++counts.not_encoded;
    return true;
  });
  pages.not_raw.ForEachIn(near, last + 1, [&](const PageRun& run) {
    const uint32_t missing = pages.not_encoded.FirstIn(run.first, run.end);
    if (missing < run.end) without = std::min(without, missing);
    reading->runs.push_back(run);
    ++counts.not_raw;
    return true;
  });
  if (without != UINT32_MAX) return NotThere(layer, entry, without, "in any form");
  // A query's own page may be encoded alone if the query is its last token.
  const bool at_end = entry.position % page_tokens == page_tokens - 1;
  const uint32_t open = pages.not_raw.FirstIn(at_end ? own + 1 : own, last + 1);
  if (open <= last) return NotThere(layer, entry, open, "raw");
  reading->counts.push_back(counts);
  return absl::OkStatus();
}

void StepTables::MakeSequences(absl::Span<const DeviceStepEntry> entries, const StepReading& reading,
                               std::vector<DeviceSequence>* sequences, int whole_from,
                               std::vector<DeviceSequence>* whole) const {
  sequences->clear();
  if (whole != nullptr) whole->clear();
  uint32_t skipped = 0, whole_skipped = 0;  // tokens since the last sequence of either plan
  const PageRun* run = reading.runs.data();
  for (size_t i = 0; i < entries.size(); ++i) {
    const DeviceStepEntry& entry = entries[i];
    const StepReading::Counts& counts = reading.counts[i];
    DeviceSequence sequence;
    sequence.raw_table = raw_table(entry.place);
    sequence.encoded_table = encoded_table(entry.place);
    sequence.aged = entry.aged;
    sequence.not_encoded = {run, counts.not_encoded};
    sequence.not_raw = {run + counts.not_encoded, counts.not_raw};
    run += counts.not_encoded + counts.not_raw;
    const int tokens = entry.tokens - entry.sparse_queries;
    if (tokens >= whole_from) {
      sequence.first_position = entry.position;
      sequence.tokens = tokens;
      sequence.skipped_tokens = whole_skipped;
      whole->push_back(sequence);
      whole_skipped = uint32_t(entry.sparse_queries);
      skipped += uint32_t(entry.tokens);
      continue;
    }
    whole_skipped += uint32_t(entry.tokens);
    sequence.skipped_tokens = skipped;
    if (tokens > 0) skipped = 0;
    for (int token = 0; token < tokens; token += DevicePlanner::kQueryTokensMax) {
      sequence.first_position = entry.position + uint64_t(token);
      sequence.tokens = std::min(DevicePlanner::kQueryTokensMax, tokens - token);
      sequences->push_back(sequence);
      sequence.skipped_tokens = 0;
    }
    skipped += uint32_t(entry.sparse_queries);
  }
}

size_t StepTables::TakeChanges(absl::Span<SlotChange> to) {
  size_t taken = 0;
  while (taken < to.size() && !changes_.empty()) {
    Change& change = changes_.back();
    const uint32_t count = uint32_t(std::min<size_t>(change.count, to.size() - taken));
    change.count -= count;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t at = change.at + change.count + i;
      to[taken++] = {at, slots_[at]};
    }
    if (change.count == 0) changes_.pop_back();
  }
  change_count_ -= taken;
  return taken;
}

}  // namespace kvmanager
