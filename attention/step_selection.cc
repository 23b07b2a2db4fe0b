// Invariants: 1. Rounds' queries, those in the place of none included, follow one another in selects_. 2. What Launch
// enqueues depends on the rounds alone, so a captured graph follows while launches() stays. 3. Tokens before
// codes_of_ have their codes in the sequence's chunks, when the stream has come here.
#include "attention/step_selection.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/device_step_sizes.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::EncodeCodes;
using device::Select;

constexpr size_t kScratchBytesMin = size_t{64} << 20;
constexpr size_t kRowsMin = size_t{4} << 20;
constexpr size_t kCodesAtOnceMin = 4096;
/// Keys that one launch codes: 1.4 ms at 300 GB/s (docs/benchmarks/2026-11-22-gpu-pq.md), for other kernels' turn.
constexpr uint64_t kKeyBytesAtOnce = uint64_t{400} << 20;
constexpr size_t kRoundsPlanned = 16;  // that there are certainly items for
constexpr uint64_t kMixer = 0x9e3779b97f4a7c15;

int GroupOf(const DeviceStep::Options& o) { return o.query_heads / o.layout.kv_heads; }

int GridOf(const DeviceStep::Options& o, const device::AttendKernels& kernels) {
  return o.multiprocessors * kernels.grid.blocks_per_sm;
}

/// Three significant bits, so that what depends on it changes seldom.
uint32_t RoundedUp(uint32_t x) {
  const int shift = std::max(0, int(std::bit_width(x)) - 3);
  return uint32_t(((uint64_t{x} + (1u << shift) - 1) >> shift) << shift);
}

}  // namespace

absl::StatusOr<SelectionSizes> StepSelection::SizesOf(const DeviceStep::Options& o) {
  const DeviceSelection& selection = *o.codec->selection();
  const int kv_heads = o.layout.kv_heads;
  if (!selection.Serves(o.query_heads)) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no GPU kernel for sparse selection with ", GroupOf(o), " query heads to a KV head"));
  }
  SelectionSizes sizes;
  sizes.tokens_max = size_t(std::min(o.tokens_max, kTokensMax));
  sizes.selects_max = 2 * sizes.tokens_max + kRoundsPlanned;
  const size_t tiles = size_t((GroupOf(o) + device::kTileRows - 1) / device::kTileRows) * kv_heads;
  sizes.items_max = kRoundsPlanned * 3 * GridOf(o, selection.rows()) + 2 * sizes.tokens_max * tiles;
  sizes.codes_max = std::max(kCodesAtOnceMin, 2 * sizes.tokens_max);
  // A round holds a query of the longest context, at least.
  const uint64_t page_tokens = o.layout.page_tokens, longest = std::max<uint64_t>(1, o.pages_max * page_tokens);
  const uint64_t last = std::min<uint64_t>(longest, UINT32_MAX) - 1;
  Select query;
  selection.SetReads(last, &query);
  const uint64_t runs = uint64_t{device::SelectRuns(query.middle)} * kv_heads;
  const uint64_t rows = (query.rows() + page_tokens) * kv_heads;
  const uint64_t runs_max = std::max<uint64_t>(runs, kScratchBytesMin / selection.ScratchBytes(o.query_heads, 1));
  if (runs_max > UINT32_MAX || rows > UINT32_MAX) return InvalidField("pages_max", o.pages_max, "fewer");
  sizes.runs_max = uint32_t(runs_max);
  sizes.rows_max = uint32_t(std::max<uint64_t>(rows, kRowsMin));
  return sizes;
}

StepSelection::StepSelection(const DeviceStep::Options& options, const SelectionSizes& sizes)
    : o_(options),
      selection_(*options.codec->selection()),
      sizes_(sizes),
      planner_(options.layout, options.query_heads, GridOf(options, selection_.rows()), selection_.rows().grid.warps),
      codes_of_(size_t(options.sequences_max) * options.layers, 0),
      items_(sizes.items_max) {}

absl::Status StepSelection::Init() {
  KV_RETURN_IF_ERROR(CudaStatus(selection_.Prepare(), "preparing the kernels of sparse selection"));
  size_t bytes = 0;
  const auto place = [&](size_t size) {
    const size_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  const size_t selects = place(sizes_.selects_max * sizeof(Select));
  const size_t items = place(sizes_.items_max * sizeof(AttendItem));
  const size_t own = place(sizes_.codes_max * sizeof(EncodeCodes));
  const size_t earlier = place(sizes_.codes_max * sizeof(EncodeCodes));
  const size_t rows = place(size_t{sizes_.rows_max} * sizeof(uint32_t));
  const size_t scratch = place(selection_.ScratchBytes(o_.query_heads, sizes_.runs_max));
  KV_ASSIGN_OR_RETURN(device_, AllocateOnDevice<uint8_t>(bytes, o_.stream));
  uint8_t* const base = device_.get();
  d_selects_ = reinterpret_cast<Select*>(base + selects);
  d_items_ = reinterpret_cast<AttendItem*>(base + items);
  d_own_codes_ = reinterpret_cast<EncodeCodes*>(base + own);
  d_earlier_codes_ = reinterpret_cast<EncodeCodes*>(base + earlier);
  d_rows_ = reinterpret_cast<uint32_t*>(base + rows);
  d_scratch_ = base + scratch;
  return absl::OkStatus();
}

void StepSelection::NoCodes(uint32_t place, int layer, uint64_t token) {
  uint64_t& codes = CodesOf(place, layer);
  codes = std::min(codes, token);
}

void StepSelection::NoCodes(uint32_t place) {
  for (int layer = 0; layer < o_.layers; ++layer) CodesOf(place, layer) = 0;
}

uint64_t StepSelection::CodesWanted(const DeviceStepEntry& entry) const {
  Select last;
  selection_.SetReads(entry.position + uint64_t(entry.tokens) - 1, &last);
  return last.chosen > 0 ? uint64_t{last.sinks} + last.middle : 0;
}

void StepSelection::CutCodes(uint32_t index, uint32_t table, uint64_t first, uint64_t end,
                             std::vector<EncodeCodes>* items) {
  while (first < end) {
    const uint64_t chunk_end = (first / device::kCodeChunkTokens + 1) * device::kCodeChunkTokens;
    const uint64_t tokens = std::min({end - first, chunk_end - first, uint64_t{device::kEncodeTokensMax}});
    items->push_back({index, table, uint32_t(first), uint32_t(tokens)});
    first += tokens;
  }
}

// As many items as the number of tokens asks for, whatever their position.
void StepSelection::AddOwnCodes(const DeviceStepEntry& entry, const StepTables& tables) {
  if (entry.tokens == 1) return;
  const size_t items = own_codes_.size() + size_t(entry.tokens) / device::kEncodeTokensMax + 3;
  const uint64_t end = std::min(CodesWanted(entry), entry.position + uint64_t(entry.tokens));
  CutCodes(tables.encoded_table(entry.place), tables.raw_table(entry.place), entry.position, end, &own_codes_);
  KV_CHECK(own_codes_.size() <= items);
  own_codes_.resize(items);
}

absl::Status StepSelection::AddRound(absl::Span<const Select> queries) {
  Round round;
  round.first = uint32_t(selects_.size());
  selects_.insert(selects_.end(), queries.begin(), queries.end());
  const absl::Span<Select> placed = absl::MakeSpan(selects_).subspan(round.first);
  KV_ASSIGN_OR_RETURN(const device::SelectSizes sizes, selection_.Place(placed));
  KV_CHECK(sizes.runs <= sizes_.runs_max && sizes.rows <= sizes_.rows_max);
  lists_.clear();
  for (const Select& query : placed) {
    lists_.push_back({query.list, query.list_stride, query.rows(), query.token});
    pairs_ += query.rows();
  }
  round.count = std::bit_ceil(uint32_t(queries.size()));
  selects_.resize(round.first + round.count);
  round.middle_max = RoundedUp(sizes.middle_max);
  round.blocks = selection_.Blocks(o_.query_heads, round.count, round.middle_max, o_.multiprocessors);
  round.first_item = uint32_t(item_count_);
  KV_ASSIGN_OR_RETURN(const DevicePlanSize size,
                      planner_.Plan(lists_, absl::MakeSpan(items_).subspan(std::min(item_count_, items_.size()))));
  item_count_ += size.items;
  for (const uint64_t x : {uint64_t{round.first}, uint64_t{round.count}, uint64_t{round.middle_max},
                           uint64_t(round.blocks), uint64_t{round.first_item}}) {
    launches_ = (launches_ ^ x) * kMixer;
  }
  rounds_.push_back(round);
  return absl::OkStatus();
}

absl::Status StepSelection::Plan(absl::Span<const DeviceStepEntry> entries, const StepTables& tables) {
  sent_ = false;
  selects_.clear();
  rounds_.clear();
  own_codes_.clear();
  queries_.clear();
  item_count_ = 0;
  pairs_ = 0;
  launches_ = 1;
  uint64_t tokens = 0, runs = 0, rows = 0;
  uint32_t row = 0;
  for (const DeviceStepEntry& entry : entries) tokens += uint64_t(entry.sparse_queries);
  if (tokens > sizes_.tokens_max) {
    return InvalidField("queries of a step that choose what they read", tokens,
                        absl::StrCat("at most ", sizes_.tokens_max));
  }
  for (const DeviceStepEntry& entry : entries) {
    const uint32_t first_row = row;
    row += uint32_t(entry.tokens);
    if (entry.sparse_queries == 0) continue;
    for (int token = entry.tokens - entry.sparse_queries; token < entry.tokens; ++token) {
      Select query;
      query.index = tables.encoded_table(entry.place);
      query.table = tables.raw_table(entry.place);
      query.token = first_row + uint32_t(token);
      selection_.SetReads(entry.position + uint64_t(token), &query);
      const uint64_t page_tokens = o_.layout.page_tokens;
      const uint64_t runs_of = uint64_t{device::SelectRuns(query.middle)} * o_.layout.kv_heads;
      const uint64_t rows_of = (query.rows() + page_tokens - 1) / page_tokens * page_tokens * o_.layout.kv_heads;
      if (runs_of > sizes_.runs_max || rows_of > sizes_.rows_max) {
        return FieldError(absl::StatusCode::kResourceExhausted, "position of a query that chooses",
                          absl::StrCat(entry.position), "inside what tables have room for");
      }
      if (runs + runs_of > sizes_.runs_max || rows + rows_of > sizes_.rows_max) {
        KV_RETURN_IF_ERROR(AddRound(queries_));
        queries_.clear();
        runs = rows = 0;
      }
      runs += runs_of, rows += rows_of;
      queries_.push_back(query);
    }
    AddOwnCodes(entry, tables);
  }
  if (!queries_.empty()) KV_RETURN_IF_ERROR(AddRound(queries_));
  if (selects_.size() > sizes_.selects_max || own_codes_.size() > sizes_.codes_max) {
    return FieldError(absl::StatusCode::kResourceExhausted, "queries of a step that choose what they read",
                      absl::StrCat(tokens), "fewer, of such long contexts");
  }
  launches_ = (launches_ ^ own_codes_.size()) * kMixer;
  return absl::OkStatus();
}

absl::Status StepSelection::Send(absl::Span<const Piece> pieces, UploadRing* ring, uint64_t* done, uint32_t* arrived) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += PieceWriter::Bytes<uint8_t>(piece.bytes);
  if (bytes == 0) return absl::OkStatus();
  uint8_t* const memory = ring->Take(bytes);
  if (memory == nullptr) return HostTooFarAhead();
  PieceWriter writer(memory);
  step::Upload upload;
  KV_CHECK(pieces.size() <= size_t(step::Upload::kPlanParts));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    KV_CHECK(piece.bytes % kUploadAlign == 0);
    const uint8_t* const from = writer.Copy(absl::MakeConstSpan(static_cast<const uint8_t*>(piece.from), piece.bytes));
    upload.plan[i] = {from, piece.to, uint32_t(piece.bytes / kUploadAlign), 0};
  }
  upload.layer_count = 1;
  upload.layers[0] = 0;
  upload.arrived = arrived;
  upload.done = done;
  upload.number = ring->Submit();
  return CudaStatus(step::LaunchUpload(upload, o_.stream), "uploading a sparse selection");
}

absl::Status StepSelection::Upload(UploadRing* ring, uint64_t* done, uint32_t* arrived) {
  if (sent_) return absl::OkStatus();
  const Piece pieces[] = {{selects_.data(), d_selects_, selects_.size() * sizeof(Select)},
                          {items_.data(), d_items_, item_count_ * sizeof(AttendItem)},
                          {own_codes_.data(), d_own_codes_, own_codes_.size() * sizeof(EncodeCodes)}};
  KV_RETURN_IF_ERROR(Send(pieces, ring, done, arrived));
  sent_ = true;
  return absl::OkStatus();
}

absl::Status StepSelection::CodeEarlier(int first_layer, int end_layer, absl::Span<const DeviceStepEntry> entries,
                                        const StepTables& tables, const uint32_t* device_tables, UploadRing* ring,
                                        uint64_t* done, uint32_t* arrived) {
  bool uploaded = false;
  const size_t item_bytes = device::kEncodeTokensMax * size_t(o_.layout.kv_heads) * o_.layout.head_dim * 2;
  const size_t launch_max = std::max<size_t>(1, kKeyBytesAtOnce / item_bytes);
  for (int layer = first_layer; layer < end_layer; ++layer) {
    codes_.clear();
    for (const DeviceStepEntry& entry : entries) {
      const uint64_t has = CodesOf(entry.place, layer);
      if (entry.sparse_queries == 0 || CodesWanted(entry) <= has || entry.position <= has) continue;
      CutCodes(tables.encoded_table(entry.place), tables.raw_table(entry.place), has, entry.position, &codes_);
    }
    if (codes_.empty()) continue;
    const auto equal = [](const EncodeCodes& a, const EncodeCodes& b) {
      return a.index == b.index && a.table == b.table && a.first == b.first && a.tokens == b.tokens;
    };
    const bool same = uploaded && codes_.size() <= sizes_.codes_max &&
                      std::equal(codes_.begin(), codes_.end(), sent_codes_.begin(), sent_codes_.end(), equal);
    const uint32_t* const slots = device_tables + size_t(layer) * tables.layer_entries();
    for (size_t at = 0; at < codes_.size(); at += sizes_.codes_max) {
      const size_t count = std::min(sizes_.codes_max, codes_.size() - at);
      if (!same) {
        const Piece piece{codes_.data() + at, d_earlier_codes_, count * sizeof(EncodeCodes)};
        KV_RETURN_IF_ERROR(Send({&piece, 1}, ring, done, arrived));
      }
      for (size_t first = 0; first < count; first += launch_max) {
        KV_RETURN_IF_ERROR(
            CudaStatus(selection_.LaunchEncode(o_.pool, slots, {o_.pool, slots}, d_earlier_codes_ + first,
                                               uint32_t(std::min(launch_max, count - first)), o_.stream),
                       "coding keys"));
      }
    }
    sent_codes_.swap(codes_);
    uploaded = true;
    for (const DeviceStepEntry& entry : entries) {
      uint64_t& has = CodesOf(entry.place, layer);
      if (entry.sparse_queries > 0 && CodesWanted(entry) > has) has = std::max(has, entry.position);
    }
  }
  return absl::OkStatus();
}

absl::Status StepSelection::Launch(const device::AttendParams& base) {
  const device::IndexTable index = {base.pool, base.slots};
  KV_RETURN_IF_ERROR(CudaStatus(
      selection_.LaunchEncode(base.pool, base.slots, index, d_own_codes_, uint32_t(own_codes_.size()), o_.stream),
      "coding keys"));
  device::SelectionParams select;
  select.query_heads = o_.query_heads;
  select.slots = base.slots;
  select.index = index;
  select.q = base.q;
  select.scale = ScaleOf(o_);
  select.scratch = d_scratch_;
  select.runs = sizes_.runs_max;
  select.rows = d_rows_;
  device::AttendParams rows = base;
  rows.slots = d_rows_;
  rows.codec = nullptr;
  rows.heads = nullptr;
  for (const Round& round : rounds_) {
    select.queries = d_selects_ + round.first;
    select.count = round.count;
    KV_RETURN_IF_ERROR(
        CudaStatus(selection_.LaunchSelect(select, round.blocks, round.middle_max, o_.stream), "sparse selection"));
    rows.items = d_items_ + round.first_item;
    KV_RETURN_IF_ERROR(CudaStatus(selection_.rows().launch(rows, std::min(GroupOf(o_), device::kTileRows),
                                                           GridOf(o_, selection_.rows()), o_.stream),
                                  "attention over chosen rows"));
  }
  return absl::OkStatus();
}

}  // namespace kvmanager
