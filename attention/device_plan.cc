// Invariants of a plan:
// 1. Each tile (query rows of one page and KV head) reads each page up to its own exactly once, in one form.
// 2. A tile's parts, one per block that works on it, are numbered in order of position; a block's items of a tile
// follow
//    one another.
// 3. Each item is in one block's list, which begins with the item of the block's number; `pages` is 0 in the list of a
//    block without work.
#include "attention/device_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "attention/reading_form.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::PageForm;

absl::Status TooSmall(const char* buffer, size_t wanted, size_t capacity) {
  return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("plan ", buffer), absl::StrCat(wanted),
                    absl::StrCat("at most ", capacity));
}

}  // namespace

DevicePlanner::DevicePlanner(const Options& options)
    : options_(options),
      group_heads_(uint32_t(options.query_heads / options.layout.kv_heads)),
      raw_cost_(uint32_t(2 * options.layout.raw_head_bytes())) {
  KV_CHECK(options.query_heads > 0 && options.query_heads % options.layout.kv_heads == 0);
  KV_CHECK(options.blocks > 0 && options.warps > 0 && options.encoded_cost > 0);
}

// Query tokens whose own page is the same: which pages they read in which form is the same for all of them.
void DevicePlanner::AddGroup(const DeviceSequence& sequence, uint32_t first_row_token, int token, int tokens,
                             DevicePlanSize* size) {
  const uint32_t page_tokens = options_.layout.page_tokens;
  const uint64_t position = sequence.first_position + token;
  const uint32_t own = uint32_t(position / page_tokens), offset = uint32_t(position % page_tokens);
  // The table has a slot per page and group: the form that this group reads.
  const uint32_t table = uint32_t(slots_.size());
  group_runs_.clear();
  for (uint32_t j = 0; j <= own; ++j) {
    const DevicePage& page = sequence.pages[j];
    const bool has_raw = page.raw != DevicePage::kNoSlot, has_encoded = page.encoded != DevicePage::kNoSlot;
    KV_CHECK(has_raw || has_encoded);
    const bool reads_raw = ReadsRaw(has_raw, has_encoded, page.lag_applies, own - j, uint32_t(options_.lag_pages));
    slots_.push_back(reads_raw ? page.raw : page.encoded);
    const PageForm form = reads_raw || options_.identity ? PageForm::kRaw : PageForm::kEncoded;
    if (group_runs_.empty() || group_runs_.back().form != form) {
      group_runs_.emplace_back();
      group_runs_.back().form = form;
      group_runs_.back().first_page = table + j;
    }
    ++group_runs_.back().pages;
    const uint64_t pairs = j == own ? uint64_t(tokens) * (offset + 1) + uint64_t(tokens) * (tokens - 1) / 2
                                    : uint64_t(tokens) * page_tokens;
    (form == PageForm::kRaw ? size->raw_pairs : size->encoded_pairs) += pairs;
  }
  // An encoded page is read whole: it is nobody's own, or its last token asks.
  KV_CHECK(group_runs_.back().form == PageForm::kRaw || (tokens == 1 && offset + 1 == page_tokens));
  for (AttendItem& run : group_runs_) {
    run.first_token = first_row_token + token;
    run.last_visible = uint16_t(&run == &group_runs_.back() ? offset + 1 : page_tokens);
  }
  const uint32_t rows = uint32_t(tokens) * group_heads_;
  for (uint32_t row = 0; row < rows; row += device::kTileRows) {
    const uint32_t tile_rows = std::min<uint32_t>(rows - row, device::kTileRows);
    size->rows_max = std::max(size->rows_max, int(tile_rows));
    for (uint32_t head = 0; head < options_.layout.kv_heads; ++head, ++tiles_) {
      for (AttendItem run : group_runs_) {
        run.kv_head = uint16_t(head);
        run.first_row = uint16_t(row);
        run.rows = uint8_t(tile_rows);
        runs_.push_back({run, tiles_, run.form == PageForm::kRaw ? raw_cost_ : options_.encoded_cost});
      }
    }
  }
}

absl::StatusOr<DevicePlanSize> DevicePlanner::Plan(absl::Span<const DeviceSequence> sequences,
                                                   const DevicePlanBuffers& buffers) {
  const int page_tokens = options_.layout.page_tokens;
  DevicePlanSize size;
  runs_.clear();
  slots_.clear();
  tiles_ = 0;
  uint32_t row_token = 0;
  for (const DeviceSequence& sequence : sequences) {
    KV_CHECK(sequence.tokens >= 1 && sequence.tokens <= kQueryTokensMax);
    KV_CHECK((sequence.first_position + sequence.tokens - 1) / page_tokens < sequence.pages.size());
    for (int token = 0; token < sequence.tokens;) {
      const int left = page_tokens - int((sequence.first_position + token) % page_tokens);
      const int tokens = std::min(left, sequence.tokens - token);
      AddGroup(sequence, row_token, token, tokens, &size);
      token += tokens;
    }
    row_token += uint32_t(sequence.tokens);
  }
  if (slots_.size() > buffers.slots.size()) return TooSmall("slots", slots_.size(), buffers.slots.size());
  std::copy(slots_.begin(), slots_.end(), buffers.slots.begin());
  size.slots = uint32_t(slots_.size());

  uint64_t total = 0;
  for (const Run& run : runs_) total += uint64_t{run.item.pages} * run.page_cost;
  // Fewer blocks where each would have less than a page for each of its warps.
  const uint64_t least = uint64_t(options_.warps) * options_.encoded_cost;
  const uint64_t blocks = std::clamp<uint64_t>((total + least - 1) / least, 1, uint64_t(options_.blocks));
  const uint32_t block_count = uint32_t(options_.blocks);
  if (buffers.items.size() < block_count) return TooSmall("items", block_count, buffers.items.size());
  std::fill_n(buffers.items.begin(), block_count, AttendItem());
  uint32_t items = block_count;                              // those behind every block's first
  uint32_t parts = 0, tile = UINT32_MAX, last = UINT32_MAX;  // last: item of this block
  uint64_t before = 0, block = 0;                            // before: the cost of what is planned
  uint16_t part = 0;                                         // of the tile
  tile_items_.clear();
  const auto end_part = [&]() {
    if (last != UINT32_MAX) buffers.items[last].ends_tile = 1;
  };
  const auto end_tile = [&]() {
    end_part();
    if (tile_items_.empty()) return;
    for (const uint32_t i : tile_items_) buffers.items[i].parts = uint16_t(part + 1);
    parts += part + 1;
    part = 0;
    tile_items_.clear();
  };
  for (const Run& run : runs_) {
    if (run.tile != tile) end_tile();
    tile = run.tile;
    const uint32_t end = run.item.first_page + run.item.pages;
    for (uint32_t page = run.item.first_page; page < end;) {
      // This block takes pages until it has its share; a page goes where more than half of it would lie.
      const uint64_t share_end = total * (block + 1) / blocks;
      const uint64_t room = share_end > before ? share_end - before : 0;
      const uint64_t fitting = (room + run.page_cost / 2) / run.page_cost;
      if (fitting == 0 && block + 1 < blocks) {
        end_part();
        if (last != UINT32_MAX && !tile_items_.empty()) ++part;
        ++block;
        last = UINT32_MAX;
        continue;
      }
      const uint32_t at = last == UINT32_MAX ? uint32_t(block) : items++;
      if (at >= buffers.items.size()) return TooSmall("items", at + 1, buffers.items.size());
      if (last != UINT32_MAX) buffers.items[last].next = at;
      last = at;
      AttendItem& item = buffers.items[at];
      item = run.item;
      item.first_page = page;
      item.pages = block + 1 == blocks ? end - page : uint32_t(std::min<uint64_t>(fitting, end - page));
      item.first_part = parts;
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
