// Invariants of a plan:
// 1. Each tile (query rows of one page and KV head) reads each page up to its own exactly once, in one form.
// 2. A tile's parts, one per block that works on it, are numbered in order of position; a block's items of a tile
//    follow one another.
// 3. Each item is in one block's list, which begins with the item of the block's number; `pages` is 0 in the list of a
//    block without work.
#include "attention/device_plan.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::PageForm;

// As a warp takes them of a raw page.
constexpr uint32_t kRawUnitTokens = 16;

// What a block may get beyond an even share, so that it need not work on two tiles: what the second costs it, or a part
// of its share, since blocks that wait for memory lose nothing by being fewer.
constexpr uint64_t kSecondTileCost = 128 << 10;
constexpr uint64_t kShareOverExcess = 16;
constexpr int kShareSearchSteps = 6;
// What one more part of a tile costs whoever merges them.
constexpr uint64_t kPartCost = 4000;

// Cut into n parts, a tile takes the time of its cost / n and of merging n: the n where these are equal.
uint64_t PartsMax(uint64_t tile_cost) {
  return std::max<uint64_t>(1, uint64_t(std::sqrt(double(tile_cost) / double(kPartCost))));
}

absl::Status TooManyItems(size_t wanted, size_t capacity) {
  return FieldError(absl::StatusCode::kResourceExhausted, "plan items", absl::StrCat(wanted),
                    absl::StrCat("at most ", capacity));
}

}  // namespace

DevicePlanner::DevicePlanner(const Options& options)
    : options_(options),
      group_heads_(uint32_t(options.query_heads / options.layout.kv_heads)),
      raw_cost_(uint32_t(2 * options.layout.raw_head_bytes())) {
  KV_CHECK(options.query_heads > 0 && options.query_heads % options.layout.kv_heads == 0);
  KV_CHECK(options.blocks > 0 && options.warps > 0 && options.encoded_cost > 0 && options.encoded_units > 0);
  KV_CHECK(options.head_costs.empty() || options.head_costs.size() == options.layout.kv_heads);
}

uint32_t DevicePlanner::CostOfEncoded(uint32_t head) const {
  return options_.head_costs.empty() ? options_.encoded_cost : options_.head_costs[head];
}

// ReadingRule, of runs instead of pages.
void DevicePlanner::SplitByForm(const DeviceSequence& sequence, uint32_t own, uint32_t lag_pages, bool identity,
                                std::vector<FormRun>* forms) {
  forms->clear();
  const auto add = [&](uint32_t first, uint32_t end, PageForm form) {
    if (first >= end) return;
    if (!forms->empty() && forms->back().form == form) {
      forms->back().pages.end = end;
    } else {
      forms->push_back({{first, end}, form});
    }
  };
  if (identity) return add(0, own + 1, PageForm::kRaw);
  const uint32_t near = ReadingRule::FirstRawPage(own, sequence.aged, lag_pages);
  // `exceptions` interrupt pages [first, end) of the other form.
  const auto split = [&](uint32_t first, uint32_t end, PageForm form, absl::Span<const PageRun> exceptions) {
    for (const PageRun& run : exceptions) {
      if (run.first >= end) break;
      if (run.end <= first) continue;
      add(first, run.first, form);
      add(std::max(first, run.first), std::min(end, run.end),
          form == PageForm::kRaw ? PageForm::kEncoded : PageForm::kRaw);
      first = run.end;
    }
    add(first, end, form);
  };
  split(0, near, PageForm::kEncoded, sequence.not_encoded);
  split(near, own + 1, PageForm::kRaw, sequence.not_raw);
}

// Query tokens whose own page is the same: which pages they read in which form is the same for all of them.
void DevicePlanner::AddGroup(const DeviceSequence& sequence, uint32_t first_row_token, int token, int tokens,
                             DevicePlanSize* size) {
  const uint32_t page_tokens = options_.layout.page_tokens;
  const uint64_t position = sequence.first_position + token;
  const uint32_t own = uint32_t(position / page_tokens), offset = uint32_t(position % page_tokens);
  SplitByForm(sequence, own, uint32_t(options_.lag_pages), options_.identity, &forms_);
  // An encoded page is read whole: it is nobody's own, or its last token asks.
  KV_CHECK(forms_.back().form == PageForm::kRaw || (tokens == 1 && offset + 1 == page_tokens));
  for (const FormRun& run : forms_) {
    const bool has_own = run.pages.end == own + 1;
    uint64_t pairs = uint64_t(tokens) * page_tokens * (run.pages.end - run.pages.first - (has_own ? 1 : 0));
    if (has_own) pairs += uint64_t(tokens) * (offset + 1) + uint64_t(tokens) * (tokens - 1) / 2;
    (run.form == PageForm::kRaw ? size->raw_pairs : size->encoded_pairs) += pairs;
  }
  const uint32_t rows = uint32_t(tokens) * group_heads_;
  for (uint32_t row = 0; row < rows; row += device::kTileRows) {
    const uint32_t tile_rows = std::min<uint32_t>(rows - row, device::kTileRows);
    size->rows_max = std::max(size->rows_max, int(tile_rows));
    for (uint32_t head = 0; head < options_.layout.kv_heads; ++head, ++tiles_) {
      for (const FormRun& run : forms_) {
        const bool raw = run.form == PageForm::kRaw;
        AttendItem item;
        item.first_page = (raw ? sequence.raw_table : sequence.encoded_table) + run.pages.first;
        item.pages = run.pages.end - run.pages.first;
        item.form = run.form;
        item.first_token = first_row_token + token;
        item.last_visible = uint16_t(run.pages.end == own + 1 ? offset + 1 : page_tokens);
        item.kv_head = uint16_t(head);
        item.first_row = uint16_t(row);
        item.rows = uint8_t(tile_rows);
        runs_.push_back({item, tiles_, raw ? raw_cost_ : CostOfEncoded(head)});
      }
    }
  }
}

// As many as have a unit (attend_device.cuh) for each of their warps.
uint32_t DevicePlanner::BlocksFor() const {
  uint64_t units = 0;
  for (const Run& run : runs_) {
    const uint32_t of_page = run.item.form == PageForm::kRaw ? options_.layout.page_tokens / kRawUnitTokens
                                                             : uint32_t(options_.encoded_units);
    units += uint64_t{run.item.pages} * of_page;
  }
  const uint64_t warps = uint64_t(options_.warps);
  return uint32_t(std::clamp<uint64_t>((units + warps - 1) / warps, 1, uint64_t(options_.blocks)));
}

// The shares' ends, as costs of all that comes before: at most `blocks`, none with a part of a tile beside something
// else, each of at most `limit` but for those of a tile that has PartsMax. false: so many blocks do not do it.
bool DevicePlanner::ShareByTiles(uint64_t limit, uint64_t blocks) {
  share_ends_.clear();
  uint64_t begin = 0, at = 0;  // of the share, of the tile
  for (const uint64_t cost : tile_costs_) {
    if (at > begin && at + cost - begin > limit) share_ends_.push_back(begin = at);
    if (cost > limit) {
      const uint64_t parts = std::min((cost + limit - 1) / limit, PartsMax(cost));
      for (uint64_t i = 1; i <= parts; ++i) share_ends_.push_back(at + cost * i / parts);
      begin = at + cost;
    }
    at += cost;
    if (share_ends_.size() > blocks) return false;
  }
  if (at > begin) share_ends_.push_back(at);
  return share_ends_.size() <= blocks;
}

void DevicePlanner::Share(uint64_t blocks) {
  tile_costs_.assign(tiles_, 0);
  uint64_t total = 0;
  for (const Run& run : runs_) {
    const uint64_t cost = uint64_t{run.item.pages} * run.page_cost;
    tile_costs_[run.tile] += cost;
    total += cost;
  }
  const uint64_t even = (total + blocks - 1) / blocks;
  uint64_t enough = even + std::max(even / kShareOverExcess, kSecondTileCost), little = even - 1;
  if (ShareByTiles(enough, blocks)) {
    for (int i = 0; i < kShareSearchSteps && little + 1 < enough; ++i) {
      const uint64_t middle = little + (enough - little) / 2;
      (ShareByTiles(middle, blocks) ? enough : little) = middle;
    }
    KV_CHECK(ShareByTiles(enough, blocks));
    return;
  }
  share_ends_.clear();
  for (uint64_t block = 1; block <= blocks; ++block) share_ends_.push_back(total * block / blocks);
}

absl::StatusOr<DevicePlanSize> DevicePlanner::Plan(absl::Span<const DeviceSequence> sequences,
                                                   absl::Span<AttendItem> buffer) {
  const int page_tokens = options_.layout.page_tokens;
  DevicePlanSize size;
  runs_.clear();
  tiles_ = 0;
  uint32_t row_token = 0;
  for (const DeviceSequence& sequence : sequences) {
    KV_CHECK(sequence.tokens >= 1 && sequence.tokens <= kQueryTokensMax);
    row_token += sequence.skipped_tokens;
    for (int token = 0; token < sequence.tokens;) {
      const int left = page_tokens - int((sequence.first_position + token) % page_tokens);
      const int tokens = std::min(left, sequence.tokens - token);
      AddGroup(sequence, row_token, token, tokens, &size);
      token += tokens;
    }
    row_token += uint32_t(sequence.tokens);
  }

  Share(BlocksFor());
  const uint64_t blocks = share_ends_.size();
  const uint32_t block_count = uint32_t(options_.blocks);
  if (buffer.size() < block_count) return TooManyItems(block_count, buffer.size());
  std::fill_n(buffer.begin(), block_count, AttendItem());
  // Which block has which share: few idle ones lie apart, so that no part of the GPU has more of them than others.
  const uint64_t idle = block_count - blocks;
  const auto number_of = [&](uint64_t share) {
    return uint32_t(idle == 0 || idle > blocks ? share : share + 1 + share * idle / blocks);
  };
  uint32_t items = block_count;                              // those behind every block's first
  uint32_t parts = 0, tile = UINT32_MAX, last = UINT32_MAX;  // last: item of this block
  uint64_t before = 0, block = 0;                            // before: the cost of what is planned
  uint16_t part = 0;                                         // of the tile
  tile_items_.clear();
  const auto end_part = [&]() {
    if (last != UINT32_MAX) buffer[last].ends_tile = 1;
  };
  const auto end_tile = [&]() {
    end_part();
    if (tile_items_.empty()) return;
    for (const uint32_t i : tile_items_) {
      buffer[i].first_part = parts;
      buffer[i].parts = uint16_t(part + 1);
    }
    if (part > 0) parts += part + 1;  // a tile of one block is written where it belongs
    part = 0;
    tile_items_.clear();
  };
  for (const Run& run : runs_) {
    if (run.tile != tile) end_tile();
    tile = run.tile;
    const uint32_t end = run.item.first_page + run.item.pages;
    for (uint32_t page = run.item.first_page; page < end;) {
      // This block takes pages until it has its share; a page goes where more than half of it would lie.
      const uint64_t room = share_ends_[block] > before ? share_ends_[block] - before : 0;
      const uint64_t fitting = (room + run.page_cost / 2) / run.page_cost;
      if (fitting == 0 && block + 1 < blocks) {
        end_part();
        if (last != UINT32_MAX && !tile_items_.empty()) ++part;
        ++block;
        last = UINT32_MAX;
        continue;
      }
      const uint32_t at = last == UINT32_MAX ? number_of(block) : items++;
      if (at >= buffer.size()) return TooManyItems(at + 1, buffer.size());
      if (last != UINT32_MAX) buffer[last].next = at;
      last = at;
      AttendItem& item = buffer[at];
      item = run.item;
      item.first_page = page;
      item.pages = block + 1 == blocks ? end - page : uint32_t(std::min<uint64_t>(fitting, end - page));
      item.part = part;
      tile_items_.push_back(at);
      page += item.pages;
      before += uint64_t{item.pages} * run.page_cost;
      if (page < end) item.last_visible = uint16_t(page_tokens);
    }
  }
  end_tile();
  size.items = items;
  size.parts = parts;
  return size;
}

}  // namespace kvmanager
