// Invariants of a plan: 1. Each token of a tile reads each page up to its own exactly once, in one form. 2. A tile's
// parts are its pages, cut in order; each is one item, in one block's list, which begins with the item of the block's
// number.
#include "attention/prefill_plan.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::PageForm;
using device::PrefillItem;
using device::PrefillRun;

// What a raw page costs, and as many of these, what beginning and ending a tile costs a block, and what a part of a
// tile costs beyond that (its state to memory and back).
constexpr uint64_t kRawPageCost = device::kPrefillRawPageCost, kItemPages = 3, kPartPages = 4;
constexpr uint32_t kPartPagesMin = 4;
constexpr uint32_t kCuts[] = {1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64};
// More cuts are worth it where they save this part of the time.
constexpr uint64_t kWorthwhile = 50;

absl::Status TooMany(const char* what, size_t capacity) {
  return FieldError(absl::StatusCode::kResourceExhausted, what, absl::StrCat("more than ", capacity),
                    absl::StrCat("at most ", capacity));
}

}  // namespace

PrefillPlanner::PrefillPlanner(const Options& options)
    : options_(options), tile_tokens_(device::PrefillTileTokens(options.query_heads / options.layout.kv_heads)) {
  KV_CHECK(options.query_heads > 0 && options.query_heads % options.layout.kv_heads == 0);
  KV_CHECK(options.query_heads / options.layout.kv_heads <= device::kPrefillGroupMax);
  KV_CHECK(options.layout.page_tokens == device::kPrefillPageTokens && options.blocks > 0);
  KV_CHECK(options.head_costs.empty() || options.head_costs.size() == options.layout.kv_heads);
}

size_t PrefillPlanner::TileGroupsMax(const Options& options, size_t tokens) {
  const size_t of_tile = size_t(device::PrefillTileTokens(options.query_heads / options.layout.kv_heads));
  return (tokens / of_tile + tokens / kTokensMin + 1) * (options.apart ? 2 : 1);
}

size_t PrefillPlanner::ItemsMax(const Options& options, size_t tokens) {
  const size_t tiles = TileGroupsMax(options, tokens) * options.layout.kv_heads;
  return options.blocks + tiles + PartsMax(options.blocks);
}

// A run of pages, joined to the one before where it goes on.
bool PrefillPlanner::AddRun(absl::Span<PrefillRun> runs, TileGroup* group, uint32_t first_page, uint32_t end_page,
                            const DeviceSequence& sequence, bool encoded, uint16_t begin, uint16_t end) {
  const uint32_t pages = end_page - first_page, position = first_page * device::kPrefillPageTokens;
  group->pages += pages;
  const uint32_t at = (encoded ? sequence.encoded_table : sequence.raw_table) + first_page;
  // Of two forms that take turns, each goes on behind the other.
  for (uint32_t back = 1; back <= 2 && run_count_ >= group->first_run + back; ++back) {
    PrefillRun& before = runs[run_count_ - back];
    if (before.encoded == uint32_t(encoded) && before.token_begin == begin && before.token_end == end &&
        before.first_page + before.pages == at) {
      before.pages += pages;
      return true;
    }
  }
  if (run_count_ == runs.size()) return false;
  PrefillRun& run = runs[run_count_++];
  run = PrefillRun();
  run.first_page = at, run.pages = pages, run.encoded = encoded;
  run.position = position, run.token_begin = begin, run.token_end = end;
  return true;
}

uint64_t PrefillPlanner::PageCost(const TileGroup& group, int head) const {
  if (!group.encoded || options_.head_costs.empty()) return kRawPageCost;
  return options_.head_costs[size_t(head)];
}

absl::Status PrefillPlanner::AddTileGroup(const DeviceSequence& sequence, uint32_t first_token, int token, int tokens,
                                          Forms which, absl::Span<PrefillRun> runs, PrefillPlanSize* size) {
  constexpr uint32_t kPageTokens = device::kPrefillPageTokens;
  const uint64_t position = sequence.first_position + token;
  TileGroup group = {run_count_, first_token, uint32_t(position), 0, tokens, which == Forms::kEncoded};
  const auto has = [&](bool encoded) { return which == Forms::kAll || (which == Forms::kEncoded) == encoded; };
  const uint32_t lag = uint32_t(options_.lag_pages);
  size_t owns = 0;
  for (int i = 0; i < tokens; ++owns) {
    if (owns == own_pages_.size()) own_pages_.emplace_back();
    OwnPage& of = own_pages_[owns];
    of.own = uint32_t((position + i) / kPageTokens);
    of.begin = uint16_t(i);
    const uint32_t offset = uint32_t((position + i) % kPageTokens);
    const int on_page = std::min(tokens - i, int(kPageTokens - offset));
    of.end = uint16_t(i += on_page);
    of.next = 0;
    DevicePlanner::SplitByForm(sequence, of.own, lag, options_.identity, &of.forms);
    // An encoded page is read whole: it is nobody's own, or its last token asks.
    KV_CHECK(of.forms.back().form == PageForm::kRaw || (on_page == 1 && offset + 1 == kPageTokens));
    for (const DevicePlanner::FormRun& run : of.forms) {
      if (!has(run.form == PageForm::kEncoded)) continue;
      const bool has_own = run.pages.end == of.own + 1;
      uint64_t pairs = uint64_t(on_page) * kPageTokens * (run.pages.end - run.pages.first - (has_own ? 1 : 0));
      if (has_own) pairs += uint64_t(on_page) * (offset + 1) + uint64_t(on_page) * (on_page - 1) / 2;
      (run.form == PageForm::kRaw ? size->raw_pairs : size->encoded_pairs) += pairs;
    }
  }
  const absl::Span<OwnPage> own_pages = absl::MakeSpan(own_pages_.data(), owns);
  const uint32_t first_own = own_pages.front().own, last_own = own_pages.back().own;
  const auto full = [&]() { return TooMany("runs of pages of a plan", runs.size()); };
  // What lies behind the first token's lag does so for all.
  const uint32_t common = owns == 1           ? first_own + 1
                          : options_.identity ? first_own
                                              : ReadingRule::FirstRawPage(first_own, sequence.aged, lag);
  for (const DevicePlanner::FormRun& run : own_pages.front().forms) {
    if (run.pages.first >= common) break;
    if (!has(run.form == PageForm::kEncoded)) continue;
    if (!AddRun(runs, &group, run.pages.first, std::min(run.pages.end, common), sequence,
                run.form == PageForm::kEncoded, 0, uint16_t(tokens))) {
      return full();
    }
  }
  for (uint32_t page = common; page <= last_own; ++page) {
    uint16_t begin[2] = {UINT16_MAX, UINT16_MAX}, end[2] = {0, 0};  // by encoded
    for (OwnPage& of : own_pages) {
      if (of.own < page) continue;
      while (of.forms[of.next].pages.end <= page) ++of.next;
      const bool encoded = of.forms[of.next].form == PageForm::kEncoded;
      KV_CHECK(end[encoded] == 0 || end[encoded] == of.begin);
      begin[encoded] = std::min(begin[encoded], of.begin);
      end[encoded] = of.end;
    }
    for (const bool encoded : {true, false}) {
      if (end[encoded] == 0 || !has(encoded)) continue;
      if (!AddRun(runs, &group, page, page + 1, sequence, encoded, begin[encoded], end[encoded])) return full();
    }
  }
  if (group.pages == 0) return absl::OkStatus();
  pages_max_ = std::max(pages_max_, group.pages);
  groups_.push_back(group);
  return absl::OkStatus();
}

uint32_t PrefillPlanner::PartsOf(uint32_t pages, uint32_t cuts) const {
  const uint64_t parts = (uint64_t{pages} * cuts + pages_max_ - 1) / pages_max_;
  return uint32_t(std::clamp<uint64_t>(parts, 1, std::max(1u, pages / kPartPagesMin)));
}

bool PrefillPlanner::CutTiles(uint32_t cuts) {
  parts_.clear();
  part_places_ = 0;
  const int heads = options_.layout.kv_heads;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    const uint32_t pages = groups_[g].pages, parts = PartsOf(pages, cuts);
    if (parts > std::numeric_limits<uint8_t>::max()) return false;
    for (int head = 0; head < heads; ++head) {
      for (uint32_t part = 0; part < parts; ++part) {
        // Cut between pairs of pages.
        const auto cut = [&](uint32_t k) { return k == parts ? pages : uint32_t(uint64_t{pages} * k / parts / 2 * 2); };
        const uint32_t skip = cut(part), of_part = cut(part + 1) - skip;
        parts_.push_back(
            {g, uint16_t(head), uint8_t(part), uint8_t(parts), skip, of_part, part_places_,
             of_part * PageCost(groups_[g], head) + kRawPageCost * (kItemPages + (parts > 1 ? kPartPages : 0))});
      }
      if (parts > 1) part_places_ += parts;
    }
  }
  if (part_places_ > PartsMax(options_.blocks)) return false;
  std::stable_sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.cost > b.cost; });
  return true;
}

template <typename Give>
uint64_t PrefillPlanner::Distribute(const Give& give) {
  const auto more = [](const Load& a, const Load& b) { return a.cost != b.cost ? a.cost > b.cost : a.block > b.block; };
  loads_.clear();
  for (int block = 0; block < options_.blocks; ++block) loads_.push_back({0, uint32_t(block)});
  std::make_heap(loads_.begin(), loads_.end(), more);
  uint64_t most = 0;
  for (const Part& part : parts_) {
    std::pop_heap(loads_.begin(), loads_.end(), more);
    Load& least = loads_.back();
    give(part, least.block);
    least.cost += part.cost;
    most = std::max(most, least.cost);
    std::push_heap(loads_.begin(), loads_.end(), more);
  }
  return most;
}

absl::StatusOr<PrefillPlanSize> PrefillPlanner::Plan(absl::Span<const DeviceSequence> sequences,
                                                     absl::Span<PrefillItem> items, absl::Span<PrefillRun> runs) {
  PrefillPlanSize size;
  groups_.clear();
  run_count_ = pages_max_ = 0;
  uint32_t row_token = 0;
  for (const DeviceSequence& sequence : sequences) {
    KV_CHECK(sequence.tokens >= 1);
    row_token += sequence.skipped_tokens;
    for (int token = 0; token < sequence.tokens; token += tile_tokens_) {
      const int tokens = std::min(tile_tokens_, sequence.tokens - token);
      for (const Forms forms : {Forms::kEncoded, Forms::kRaw}) {
        KV_RETURN_IF_ERROR(AddTileGroup(sequence, row_token + uint32_t(token), token, tokens,
                                        options_.apart ? forms : Forms::kAll, runs, &size));
        if (!options_.apart) break;
      }
    }
    row_token += uint32_t(sequence.tokens);
  }
  // The longest contexts come last in a sequence, and are to begin first.
  uint32_t best_cuts = 0;
  uint64_t best = 0;
  const uint32_t blocks = uint32_t(options_.blocks);
  for (const uint32_t cuts : kCuts) {
    if (cuts > 1 && groups_.size() * options_.layout.kv_heads >= 8 * size_t{blocks}) break;
    if (!CutTiles(cuts)) break;
    const uint64_t most = Distribute([](const Part&, uint32_t) {});
    if (best_cuts == 0 || most + most / kWorthwhile < best) best_cuts = cuts, best = most;
  }
  KV_CHECK(best_cuts != 0 && CutTiles(best_cuts));
  if (items.size() < blocks) return TooMany("items of a plan", items.size());
  std::fill_n(items.begin(), blocks, PrefillItem());
  last_.assign(blocks, UINT32_MAX);
  uint32_t item_count = blocks;
  bool fits = true;
  Distribute([&](const Part& part, uint32_t block) {
    uint32_t at = block;
    if (last_[block] != UINT32_MAX) {
      if (item_count == items.size()) fits = false;
      if (!fits) return;
      at = item_count++;
      items[last_[block]].next = at;
    }
    last_[block] = at;
    const TileGroup& group = groups_[part.group];
    PrefillItem& item = items[at];
    item = PrefillItem();
    item.first_run = group.first_run;
    item.skip = part.skip;
    item.pages = part.pages;
    item.first_token = group.first_token;
    item.first_position = group.first_position;
    item.first_part = part.first_part;
    item.tokens = uint8_t(group.tokens);
    item.kv_head = uint8_t(part.kv_head);
    item.part = part.part;
    item.parts = part.parts;
  });
  if (!fits) return TooMany("items of a plan", items.size());
  size.items = item_count;
  size.runs = run_count_;
  size.parts = part_places_;
  return size;
}

}  // namespace kvmanager
