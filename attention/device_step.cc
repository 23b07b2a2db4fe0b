// Invariants: 1. A layer's items on the device, and the rows to append, are those of holds_[layer] and of rows_done_
// when all uploads so far have run. 2. A class's layers read what its reading says, as of reading_generation_.
#include "attention/device_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/device_step_kernels.h"
#include "attention/device_step_sizes.h"
#include "attention/prefill_plan.h"
#include "attention/step_selection.h"
#include "attention/upload_piece.h"
#include "attention/upload_ring.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager {
namespace {

using device::AttendItem;
using device::AttendKernels;
using device::PrefillItem;
using device::PrefillRun;

constexpr uint64_t kPositionMax = UINT32_MAX;
constexpr int kNoClass = -1;

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

class CudaDeviceStep final : public DeviceStep {
 public:
  CudaDeviceStep(const Options& options, const StepSizes& sizes, StepTables tables)
      : o_(options),
        sizes_(sizes),
        items_max_(sizes.items_max),
        tables_(std::move(tables)),
        group_heads_(options.query_heads / options.layout.kv_heads),
        scale_log2_(float(M_LOG2E) * ScaleOf(options)),
        kernels_(options.layers),
        head_costs_(options.layers),
        prefill_(options.layers),
        holds_(options.layers, 0),
        class_of_(options.layers, kNoClass) {}
  ~CudaDeviceStep() override {
    if (pinned_ != nullptr) cudaStreamSynchronize(o_.stream);
  }

  absl::Status Init();

  absl::StatusOr<uint32_t> AddSequence(uint64_t pages_hint) override;
  void RemoveSequence(uint32_t place) override { tables_.RemoveSequence(place); }
  absl::Status SetPages(uint32_t place, int layer, uint32_t first_page, absl::Span<const DevicePage> pages) override;
  void Truncate(uint32_t place, uint32_t pages) override { tables_.Truncate(place, pages); }
  absl::Status Prepare(int first_layer, int layers, absl::Span<const Entry> entries, bool append, bool attend) override;
  absl::Status Append(int layer, const void* k, const void* v) override;
  absl::Status Attend(int layer, const void* q, void* out, float* lse) override;
  absl::Status CopyOpen(absl::Span<const OpenCopy> copies) override;
  Counts counts() const override { return counts_; }
  uint64_t launches() const override { return sparse_ ? selection_->launches() : 0; }
  uint64_t uploads() const override { return uploads_; }

 private:
  /// Layers that share a plan.
  struct Class {
    const AttendKernels* kernels;
    const uint32_t* costs;                  // device::HeadCosts
    const device::PrefillKernels* prefill;  // nullptr: long entries have no plan of their own
    const uint32_t* prefill_costs;
    StepReading reading;
    uint64_t version;  // of the plan; never 0
    DevicePlanSize size;
    PrefillPlanSize prefill_size;
  };
  /// A kernel's planner; layers may differ in theirs.
  struct Planner {
    const AttendKernels* kernels;
    const uint32_t* costs;
    DevicePlanner planner;
    int blocks;
  };
  /// The same for many query tokens.
  struct LongPlanner {
    bool apart;
    const uint32_t* costs;
    PrefillPlanner planner;
  };

  int blocks_of(const AttendKernels& kernels) const { return o_.multiprocessors * kernels.grid.blocks_per_sm; }
  /// nullptr: it has none, or there is no long entry.
  const device::PrefillKernels* LongKernels(int layer) const {
    return long_entries_ > 0 ? prefill_[layer].kernels : nullptr;
  }
  bool Prepared(int layer) const { return layer >= prepared_first_ && layer < prepared_end_; }
  absl::Status CheckEntries(absl::Span<const Entry> entries);
  absl::Status FindClasses(int first_layer, int end_layer);
  absl::Status PlanClass(Class* of);
  absl::Status UploadStep(int first_layer, int end_layer);
  absl::Status Send(size_t changes, bool rows, Class* items_of);
  absl::Status PrepareSelection(int first_layer, int end_layer);
  absl::Status AttendLong(int layer, const void* q, void* out, float* lse);

  const Options o_;
  const StepSizes sizes_;
  const size_t items_max_;  // of a layer
  StepTables tables_;
  const int group_heads_;
  const float scale_log2_;
  std::vector<const AttendKernels*> kernels_;  // [layers]
  std::vector<device::HeadCosts> head_costs_;  // [layers]
  std::vector<device::Prefill> prefill_;       // [layers]
  std::vector<Planner> planners_;
  std::vector<LongPlanner> long_planners_;

  PinnedArray<uint8_t> pinned_;  // for uploads; nullptr: the caller gave some
  DeviceArray<uint8_t> device_;
  // Of device_:
  uint32_t* d_tables_ = nullptr;       // [layers][layer_entries]
  AttendItem* d_items_ = nullptr;      // [layers][items_max_]
  step::AppendRow* d_rows_ = nullptr;  // [tokens_max]
  uint64_t* d_first_ = nullptr;        // [sequences_max]
  float* d_partial_ = nullptr;
  float* d_partial_max_ = nullptr;
  uint32_t* d_arrived_ = nullptr;
  uint32_t* d_upload_arrived_ = nullptr;
  PrefillItem* d_prefill_items_ = nullptr;  // [layers][prefill_items_max]
  PrefillRun* d_prefill_runs_ = nullptr;    // [layers][prefill_runs_max]
  float* d_prefill_partial_ = nullptr;
  float* d_prefill_state_ = nullptr;
  uint32_t* d_prefill_arrived_ = nullptr;
  float* d_mapped_ = nullptr;
  // Of the memory for uploads:
  uint64_t* done_ = nullptr;
  std::optional<UploadRing> ring_;
  std::optional<StepSelection> selection_;  // where queries choose what they read

  // The step, as last prepared: entries_ and what follows from them.
  std::vector<Entry> entries_;
  bool valid_ = false;
  bool append_ = false, attend_ = false;
  uint64_t moves_ = 0, reading_generation_ = 0;
  bool rows_done_ = false;
  uint32_t tokens_ = 0;
  size_t exact_entries_ = 0;                  // with queries that read everything
  size_t long_entries_ = 0;                   // PrefillPlanner::kTokensMin such queries and more
  int rows_max_ = 0, rows_max_of_short_ = 0;  // of a tile: of any entry, of those that are not long
  std::vector<Class> classes_;
  std::vector<uint64_t> holds_;  // [layers] version of the plan in its items; 0: none
  std::vector<int> class_of_;    // [layers]; kNoClass: some page is not there
  uint64_t versions_ = 0;
  bool sparse_ = false,
       selection_planned_ = false;  // some queries select what they read; selection_ has the plan of entries_
  int prepared_first_ = 0, prepared_end_ = 0;
  Counts counts_;

  std::vector<uint32_t> resets_;  // places whose words become "none"
  uint64_t uploads_ = 0;
  // Scratch of Prepare.
  StepReading reading_;
  std::vector<DeviceSequence> sequences_, long_sequences_;
  std::vector<AttendItem> items_;  // of the class planned last, and its version
  std::vector<PrefillItem> prefill_items_;
  std::vector<PrefillRun> prefill_runs_;
  uint64_t items_version_ = 0;
  step::Upload upload_;
};

absl::Status CudaDeviceStep::Init() {
  for (int layer = 0; layer < o_.layers; ++layer) {
    const AttendKernels* const kernels = o_.codec->attention(layer);
    kernels_[layer] = kernels;
    head_costs_[layer] = o_.codec->head_costs(layer);
    const uint32_t* const costs = head_costs_[layer].costs;
    prefill_[layer] = PrefillOf(o_, layer);
    if (const device::PrefillKernels* const prefill = prefill_[layer].kernels; prefill != nullptr) {
      const auto had = [&](const device::Prefill& p) { return p.kernels == prefill; };
      if (std::none_of(prefill_.begin(), prefill_.begin() + layer, had)) {
        KV_RETURN_IF_ERROR(CudaStatus(prefill->prepare(), "preparing the kernel of attention by many query tokens"));
      }
      const uint32_t* const long_costs = prefill_[layer].costs;
      const auto plans = [&](const LongPlanner& p) { return p.apart == prefill->maps && p.costs == long_costs; };
      if (std::none_of(long_planners_.begin(), long_planners_.end(), plans)) {
        PrefillPlanner::Options plan = PrefillOptions(o_, layer);
        if (long_costs != nullptr) plan.head_costs.assign(long_costs, long_costs + o_.layout.kv_heads);
        long_planners_.push_back({plan.apart, long_costs, PrefillPlanner(plan)});
      }
    }
    const auto same = [&](const Planner& p) { return p.kernels == kernels && p.costs == costs; };
    if (std::any_of(planners_.begin(), planners_.end(), same)) continue;
    KV_RETURN_IF_ERROR(CudaStatus(kernels->prepare(), "preparing the attention kernel"));
    DevicePlanner::Options plan;
    plan.layout = o_.layout;
    plan.query_heads = o_.query_heads;
    plan.lag_pages = o_.lag_pages;
    plan.identity = o_.identity;
    plan.blocks = blocks_of(*kernels);
    plan.warps = kernels->grid.warps;
    plan.encoded_cost = kernels->encoded_cost;
    plan.encoded_units = kernels->encoded_units;
    if (costs != nullptr) plan.head_costs.assign(costs, costs + o_.layout.kv_heads);
    planners_.push_back({kernels, costs, DevicePlanner(plan), plan.blocks});
  }
  items_.resize(items_max_);
  prefill_items_.resize(sizes_.prefill_items_max);
  prefill_runs_.resize(sizes_.prefill_runs_max);

  size_t bytes = 0;
  const auto place = [&](size_t size) {
    const size_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  const size_t tile_rows = 2 * sizes_.blocks_max * device::kTileRows;  // of parts
  const size_t tables = place(size_t{tables_.layer_entries()} * o_.layers * sizeof(uint32_t));
  const size_t items = place(items_max_ * o_.layers * sizeof(AttendItem));
  const size_t append_rows = place(size_t(o_.tokens_max) * sizeof(step::AppendRow));
  const size_t first = place(size_t(o_.sequences_max) * sizeof(uint64_t));
  const bool maps = std::any_of(kernels_.begin(), kernels_.end(), [](const AttendKernels* k) { return k->maps; });
  const size_t partial = place((maps ? 2 : 1) * tile_rows * o_.layout.head_dim * sizeof(float));
  const size_t partial_max = place(tile_rows * 2 * sizeof(float));
  const size_t arrived = place(tile_rows * sizeof(uint32_t));
  const size_t upload_arrived = place(sizeof(uint32_t));
  const bool long_maps =
      std::any_of(long_planners_.begin(), long_planners_.end(), [](const LongPlanner& p) { return p.apart; });
  const size_t mapped_rows = maps || long_maps ? size_t{device::kMappedRows} * o_.tokens_max * o_.query_heads : 0;
  const size_t mapped = place(mapped_rows * o_.layout.head_dim * sizeof(float));
  const size_t part_rows =
      long_planners_.empty() ? 0 : PrefillPlanner::PartsMax(o_.multiprocessors) * device::kPrefillRows;
  const size_t prefill_items = place(sizes_.prefill_items_max * o_.layers * sizeof(PrefillItem));
  const size_t prefill_runs = place(sizes_.prefill_runs_max * o_.layers * sizeof(PrefillRun));
  const size_t prefill_partial = place(part_rows * o_.layout.head_dim * sizeof(float));
  const size_t prefill_state = place(part_rows * 2 * sizeof(float));
  const size_t prefill_arrived = place(part_rows / device::kPrefillRows * 2 * sizeof(uint32_t));
  KV_ASSIGN_OR_RETURN(device_, AllocateOnDevice<uint8_t>(bytes, o_.stream));
  uint8_t* const base = device_.get();
  d_tables_ = reinterpret_cast<uint32_t*>(base + tables);
  d_items_ = reinterpret_cast<AttendItem*>(base + items);
  d_rows_ = reinterpret_cast<step::AppendRow*>(base + append_rows);
  d_first_ = reinterpret_cast<uint64_t*>(base + first);
  d_partial_ = reinterpret_cast<float*>(base + partial);
  d_partial_max_ = reinterpret_cast<float*>(base + partial_max);
  d_arrived_ = reinterpret_cast<uint32_t*>(base + arrived);
  d_upload_arrived_ = reinterpret_cast<uint32_t*>(base + upload_arrived);
  d_prefill_items_ = reinterpret_cast<PrefillItem*>(base + prefill_items);
  d_prefill_runs_ = reinterpret_cast<PrefillRun*>(base + prefill_runs);
  d_prefill_partial_ = reinterpret_cast<float*>(base + prefill_partial);
  d_prefill_state_ = reinterpret_cast<float*>(base + prefill_state);
  d_prefill_arrived_ = reinterpret_cast<uint32_t*>(base + prefill_arrived);
  if (mapped_rows != 0) d_mapped_ = reinterpret_cast<float*>(base + mapped);

  uint8_t* upload = o_.upload;
  if (upload == nullptr) {
    KV_ASSIGN_OR_RETURN(pinned_, AllocatePinned<uint8_t>(sizes_.upload_bytes()));
    upload = pinned_.get();
  }
  done_ = reinterpret_cast<uint64_t*>(upload);
  *done_ = 0;
  ring_.emplace(upload + UploadRing::kAlign, sizes_.ring_bytes, done_);
  if (o_.codec->selection() != nullptr) {
    selection_.emplace(o_, sizes_.selection);
    KV_RETURN_IF_ERROR(selection_->Init());
  }
  if (o_.non_finite != nullptr) std::fill_n(o_.non_finite, o_.sequences_max, 0);
  KV_RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(base, 0, bytes, o_.stream), "cudaMemsetAsync"));
  return CudaStatus(cudaMemsetAsync(d_first_, 0xff, size_t(o_.sequences_max) * sizeof(uint64_t), o_.stream),
                    "cudaMemsetAsync");
}

absl::StatusOr<uint32_t> CudaDeviceStep::AddSequence(uint64_t pages_hint) {
  KV_ASSIGN_OR_RETURN(const uint32_t place, tables_.AddSequence(pages_hint));
  if (selection_) selection_->NoCodes(place);
  if (o_.non_finite != nullptr && std::find(resets_.begin(), resets_.end(), place) == resets_.end()) {
    resets_.push_back(place);
  }
  return place;
}

absl::Status CudaDeviceStep::SetPages(uint32_t place, int layer, uint32_t first_page,
                                      absl::Span<const DevicePage> pages) {
  KV_RETURN_IF_ERROR(tables_.SetPages(place, layer, first_page, pages));
  if (!selection_) return absl::OkStatus();
  // A codebook or a chunk of codes that is named is new.
  const auto index = std::find_if(pages.begin(), pages.end(),
                                  [](const DevicePage& page) { return page.encoded != DevicePage::kNoSlot; });
  if (index == pages.end()) return absl::OkStatus();
  const uint64_t at = first_page + uint64_t(index - pages.begin());
  selection_->NoCodes(place, layer, at == 0 ? 0 : (at - 1) * device::kCodeChunkTokens);
  return absl::OkStatus();
}

// What the step's shape says, besides.
absl::Status CudaDeviceStep::CheckEntries(absl::Span<const Entry> entries) {
  uint64_t tokens = 0;
  size_t long_entries = 0, exact_entries = 0;
  bool sparse = false;
  int most = 0, most_of_short = 0;
  for (const Entry& entry : entries) {
    if (!tables_.Has(entry.place)) return InvalidField("entry's place", entry.place, "one that AddSequence gave");
    if (entry.tokens < 1 || entry.tokens > o_.tokens_max) {
      return InvalidField("entry's tokens", entry.tokens, absl::StrCat("1..", o_.tokens_max));
    }
    if (entry.position > kPositionMax - uint64_t(entry.tokens)) {
      return InvalidField("entry's position", entry.position, "so that its last is below 2^32");
    }
    tokens += uint64_t(entry.tokens);
    if (entry.sparse_queries < 0 || entry.sparse_queries > (selection_ ? entry.tokens : 0)) {
      return InvalidField("queries of an entry that choose", entry.sparse_queries,
                          absl::StrCat("0..", selection_ ? entry.tokens : 0));
    }
    sparse |= entry.sparse_queries > 0;
    const int exact = entry.tokens - entry.sparse_queries;
    exact_entries += exact > 0;
    most = std::max(most, exact);
    if (exact >= PrefillPlanner::kTokensMin) {
      ++long_entries;
    } else {
      most_of_short = std::max(most_of_short, exact);
    }
  }
  if (tokens < 1 || tokens > uint64_t(o_.tokens_max)) {
    return InvalidField("tokens of a step", tokens, absl::StrCat("1..", o_.tokens_max));
  }
  tokens_ = uint32_t(tokens);
  long_entries_ = long_entries;
  exact_entries_ = exact_entries;
  sparse_ = sparse;
  selection_planned_ = false;
  const auto rows_of = [&](int of_entry) {
    return std::min(std::min(of_entry, DevicePlanner::kQueryTokensMax) * group_heads_, device::kTileRows);
  };
  rows_max_ = rows_of(most), rows_max_of_short_ = rows_of(most_of_short);
  return absl::OkStatus();
}

// Which layers read alike; those asked for must be able to.
absl::Status CudaDeviceStep::FindClasses(int first_layer, int end_layer) {
  std::fill(class_of_.begin(), class_of_.end(), kNoClass);
  if (classes_.size() > size_t(2 * o_.layers)) classes_.clear();  // most are of tables that have changed since
  absl::Status status;
  for (int layer = 0; layer < o_.layers; ++layer) {
    const absl::Status read = tables_.Read(layer, entries_, append_, attend_, &reading_);
    if (!read.ok()) {
      if (layer >= first_layer && layer < end_layer) status.Update(read);
      continue;
    }
    int index = 0;
    for (; index < int(classes_.size()); ++index) {
      const Class& other = classes_[index];
      if (other.kernels == kernels_[layer] && other.costs == head_costs_[layer].costs &&
          other.prefill == LongKernels(layer) && other.prefill_costs == prefill_[layer].costs &&
          other.reading == reading_) {
        break;
      }
    }
    if (index == int(classes_.size())) {
      Class made = {kernels_[layer], head_costs_[layer].costs, LongKernels(layer), prefill_[layer].costs, reading_};
      made.version = ++versions_;
      classes_.push_back(std::move(made));
    }
    class_of_[layer] = index;
  }
  reading_generation_ = tables_.generation();
  return status;
}

absl::Status CudaDeviceStep::PlanClass(Class* of) {
  if (items_version_ == of->version) return absl::OkStatus();
  tables_.MakeSequences(entries_, of->reading, &sequences_,
                        of->prefill != nullptr ? PrefillPlanner::kTokensMin : INT_MAX, &long_sequences_);
  const auto planner = std::find_if(planners_.begin(), planners_.end(),
                                    [&](const Planner& p) { return p.kernels == of->kernels && p.costs == of->costs; });
  items_version_ = 0;
  of->size = {}, of->prefill_size = {};
  if (!sequences_.empty()) {
    KV_ASSIGN_OR_RETURN(of->size, planner->planner.Plan(sequences_, absl::MakeSpan(items_)));
  }
  KV_CHECK(of->size.rows_max <= (of->prefill != nullptr ? rows_max_of_short_ : rows_max_));
  if (!long_sequences_.empty()) {
    const auto long_planner = std::find_if(long_planners_.begin(), long_planners_.end(), [&](const LongPlanner& p) {
      return p.apart == of->prefill->maps && p.costs == of->prefill_costs;
    });
    KV_ASSIGN_OR_RETURN(of->prefill_size, long_planner->planner.Plan(long_sequences_, absl::MakeSpan(prefill_items_),
                                                                     absl::MakeSpan(prefill_runs_)));
  }
  items_version_ = of->version;
  return absl::OkStatus();
}

// One launch: `changes` of the tables, words to reset and, where asked for, rows and a class's items.
absl::Status CudaDeviceStep::Send(size_t changes, bool rows, Class* items_of) {
  const size_t row_count = rows ? tokens_ : 0, item_count = items_of == nullptr ? 0 : items_of->size.items;
  const PrefillPlanSize prefill = items_of == nullptr ? PrefillPlanSize() : items_of->prefill_size;
  const size_t bytes = PieceWriter::Bytes<SlotChange>(changes) + PieceWriter::Bytes<uint32_t>(resets_.size()) +
                       PieceWriter::Bytes<step::AppendRow>(row_count) + PieceWriter::Bytes<AttendItem>(item_count) +
                       PieceWriter::Bytes<PrefillItem>(prefill.items) + PieceWriter::Bytes<PrefillRun>(prefill.runs);
  if (bytes == 0) return absl::OkStatus();
  uint8_t* const piece = ring_->Take(bytes);
  if (piece == nullptr) {
    return HostTooFarAhead();
  }
  PieceWriter writer(piece);
  step::Upload& u = upload_;
  SlotChange* const slots = writer.Room<SlotChange>(changes);
  u.changes = slots;
  u.change_count = uint32_t(tables_.TakeChanges(absl::MakeSpan(slots, changes)));
  u.tables = d_tables_;
  u.resets = writer.Copy<uint32_t>(resets_);
  u.reset_count = uint32_t(resets_.size());
  u.first = d_first_;
  u.non_finite = o_.non_finite;
  step::AppendRow* const to_append = writer.Room<step::AppendRow>(row_count);
  u.rows = to_append;
  u.rows_to = d_rows_;
  u.row_count = uint32_t(row_count);
  if (rows) {
    const uint32_t page_tokens = o_.layout.page_tokens;
    size_t row = 0;
    for (const Entry& entry : entries_) {
      for (int token = 0; token < entry.tokens; ++token) {
        const uint32_t position = uint32_t(entry.position) + uint32_t(token);
        to_append[row++] = {tables_.raw_table(entry.place) + position / page_tokens, position % page_tokens,
                            entry.place, position};
      }
    }
  }
  const auto plan_part = [&](const auto& from, size_t count, auto* to) {
    using T = std::decay_t<decltype(*to)>;
    constexpr uint32_t kVectors = sizeof(T) / kUploadAlign;
    return step::Upload::PlanPart{writer.Copy<T>(absl::MakeConstSpan(from.data(), count)), to,
                                  uint32_t(count) * kVectors, uint32_t(from.size()) * kVectors};
  };
  u.plan[0] = plan_part(items_, item_count, d_items_);
  u.plan[1] = plan_part(prefill_items_, prefill.items, d_prefill_items_);
  u.plan[2] = plan_part(prefill_runs_, prefill.runs, d_prefill_runs_);
  u.layer_count = 0;
  if (items_of != nullptr) {
    for (int layer = 0; layer < o_.layers; ++layer) {
      if (class_of_[layer] == items_of - classes_.data() && holds_[layer] != items_of->version) {
        u.layers[u.layer_count++] = uint16_t(layer);
      }
    }
  }
  u.arrived = d_upload_arrived_;
  u.done = done_;
  u.number = ring_->Submit();
  KV_RETURN_IF_ERROR(CudaStatus(step::LaunchUpload(u, o_.stream), "uploading a step"));
  ++uploads_;
  resets_.clear();
  if (rows) rows_done_ = true;
  for (uint32_t i = 0; i < u.layer_count; ++i) holds_[u.layers[i]] = items_of->version;
  return absl::OkStatus();
}

absl::Status CudaDeviceStep::UploadStep(int first_layer, int end_layer) {
  // As many changes at once as leave room for the rest in the same piece.
  constexpr size_t kReserveBytes = 256;  // paddings
  const size_t rest_bytes = sizes_.plan_bytes() + size_t(o_.tokens_max) * sizeof(step::AppendRow) +
                            resets_.size() * sizeof(uint32_t) + kReserveBytes;
  const size_t changes_max = (ring_->largest() - rest_bytes) / sizeof(SlotChange);
  while (tables_.changes() > changes_max) KV_RETURN_IF_ERROR(Send(changes_max, false, nullptr));
  const bool rows = append_ && !rows_done_;
  bool sent = false;
  if (attend_) {
    for (int layer = first_layer; layer < end_layer; ++layer) {
      Class* const of = &classes_[class_of_[layer]];
      if (holds_[layer] == of->version) continue;
      KV_RETURN_IF_ERROR(PlanClass(of));
      KV_RETURN_IF_ERROR(Send(tables_.changes(), rows && !sent, of));
      sent = true;
    }
  }
  if (!sent) KV_RETURN_IF_ERROR(Send(tables_.changes(), rows, nullptr));
  return absl::OkStatus();
}

absl::Status CudaDeviceStep::PrepareSelection(int first_layer, int end_layer) {
  if (!selection_planned_) {
    KV_RETURN_IF_ERROR(selection_->Plan(entries_, tables_));
    selection_planned_ = true;
  }
  KV_RETURN_IF_ERROR(selection_->Upload(&*ring_, done_, d_upload_arrived_));
  return selection_->CodeEarlier(first_layer, end_layer, entries_, tables_, d_tables_, &*ring_, done_,
                                 d_upload_arrived_);
}

absl::Status CudaDeviceStep::Prepare(int first_layer, int layers, absl::Span<const Entry> entries, bool append,
                                     bool attend) {
  prepared_first_ = prepared_end_ = 0;
  if (first_layer < 0 || layers < 1 || layers > o_.layers - first_layer) {
    return InvalidField("layers of a step", absl::StrCat(first_layer, "..", first_layer + layers - 1),
                        absl::StrCat("in 0..", o_.layers - 1));
  }
  const int end_layer = first_layer + layers;
  const bool same = valid_ && append == append_ && attend == attend_ && entries == absl::MakeConstSpan(entries_) &&
                    tables_.moves() == moves_;
  if (!same) {
    valid_ = false;
    KV_RETURN_IF_ERROR(CheckEntries(entries));
    entries_.assign(entries.begin(), entries.end());
    append_ = append, attend_ = attend;
    moves_ = tables_.moves();
    rows_done_ = false;
    classes_.clear();
    reading_generation_ = tables_.generation() - 1;
    valid_ = true;
  }
  const auto unknown = [&]() {
    return std::find(class_of_.begin() + first_layer, class_of_.begin() + end_layer, kNoClass) !=
           class_of_.begin() + end_layer;
  };
  if (reading_generation_ != tables_.generation() || unknown()) KV_RETURN_IF_ERROR(FindClasses(first_layer, end_layer));
  KV_RETURN_IF_ERROR(UploadStep(first_layer, end_layer));
  const bool chooses = attend_ && sparse_;
  if (chooses) KV_RETURN_IF_ERROR(PrepareSelection(first_layer, end_layer));
  counts_ = {};
  if (attend_) {
    for (int layer = first_layer; layer < end_layer; ++layer) {
      const Class& of = classes_[class_of_[layer]];
      counts_.encoded_pairs += of.size.encoded_pairs + of.prefill_size.encoded_pairs;
      counts_.raw_pairs += of.size.raw_pairs + of.prefill_size.raw_pairs + (chooses ? selection_->pairs() : 0);
    }
  }
  prepared_first_ = first_layer;
  prepared_end_ = end_layer;
  return absl::OkStatus();
}

absl::Status CudaDeviceStep::Append(int layer, const void* k, const void* v) {
  if (!Prepared(layer) || !append_) {
    return absl::FailedPreconditionError(absl::StrCat("no append is prepared for layer ", layer));
  }
  if (!Aligned(k) || !Aligned(v)) return absl::InvalidArgumentError("k and v must be 16-byte aligned");
  const step::Append append = {const_cast<uint8_t*>(o_.pool),
                               d_tables_ + size_t(layer) * tables_.layer_entries(),
                               d_rows_,
                               k,
                               v,
                               d_first_,
                               o_.non_finite,
                               uint32_t(layer),
                               tokens_,
                               o_.layout};
  return CudaStatus(step::LaunchAppend(append, o_.stream), "appending");
}

absl::Status CudaDeviceStep::Attend(int layer, const void* q, void* out, float* lse) {
  if (!Prepared(layer) || !attend_) {
    return absl::FailedPreconditionError(absl::StrCat("no attention is prepared for layer ", layer));
  }
  if (!Aligned(q) || !Aligned(out)) return absl::InvalidArgumentError("q and out must be 16-byte aligned");
  const bool prefills = LongKernels(layer) != nullptr;
  device::AttendParams p;
  p.pool = o_.pool;
  p.slots = d_tables_ + size_t(layer) * tables_.layer_entries();
  p.items = d_items_ + size_t(layer) * items_max_;
  p.q = q;
  p.out = out;
  p.lse = lse;
  p.partial = d_partial_;
  p.partial_max = d_partial_max_;
  p.arrived = d_arrived_;
  p.query_heads = o_.query_heads;
  p.kv_heads = o_.layout.kv_heads;
  p.page_tokens = o_.layout.page_tokens;
  p.scale_log2 = scale_log2_;
  p.bfloat16 = o_.layout.dtype == DType::kBFloat16;
  p.codec = o_.codec->attention_data(layer);
  p.heads = head_costs_[layer].heads;
  p.tokens = tokens_;
  p.mapped = d_mapped_;
  const AttendKernels& kernels = *kernels_[layer];
  const int rows_max = prefills ? rows_max_of_short_ : rows_max_;
  // Kernels that map write all of `out`: long entries come behind them, and queries that choose have none.
  if (exact_entries_ > (prefills ? long_entries_ : 0)) {
    KV_RETURN_IF_ERROR(CudaStatus(kernels.launch(p, rows_max, blocks_of(kernels), o_.stream), "attention"));
  }
  if (prefills) KV_RETURN_IF_ERROR(AttendLong(layer, q, out, lse));
  return sparse_ ? selection_->Launch(p) : absl::OkStatus();
}

// Of the entries that have many tokens.
absl::Status CudaDeviceStep::AttendLong(int layer, const void* q, void* out, float* lse) {
  device::PrefillParams p;
  p.pool = o_.pool;
  p.slots = d_tables_ + size_t(layer) * tables_.layer_entries();
  p.items = d_prefill_items_ + size_t(layer) * sizes_.prefill_items_max;
  p.runs = d_prefill_runs_ + size_t(layer) * sizes_.prefill_runs_max;
  p.q = q;
  p.out = out;
  p.lse = lse;
  p.partial = d_prefill_partial_;
  p.partial_state = d_prefill_state_;
  p.arrived = d_prefill_arrived_;
  p.format = prefill_[layer].format;
  p.query_heads = o_.query_heads;
  p.kv_heads = o_.layout.kv_heads;
  p.scale_log2 = scale_log2_;
  p.bfloat16 = o_.layout.dtype == DType::kBFloat16;
  p.tokens = tokens_;
  p.mapped = d_mapped_;
  p.heads = head_costs_[layer].heads;
  return CudaStatus(prefill_[layer].kernels->launch(p, o_.multiprocessors, o_.stream),
                    "attention by many query tokens");
}

absl::Status CudaDeviceStep::CopyOpen(absl::Span<const OpenCopy> copies) {
  step::Copies launch;
  launch.pool = const_cast<uint8_t*>(o_.pool);
  launch.layout = o_.layout;
  for (size_t first = 0; first < copies.size(); first += step::Copies::kMax) {
    launch.count = uint32_t(std::min<size_t>(step::Copies::kMax, copies.size() - first));
    for (uint32_t i = 0; i < launch.count; ++i) {
      const OpenCopy& copy = copies[first + i];
      if (copy.tokens < 0 || copy.tokens > o_.layout.page_tokens) {
        return InvalidField("tokens of a copied page", copy.tokens, absl::StrCat("0..", o_.layout.page_tokens));
      }
      launch.items[i] = {copy.from, copy.to, uint32_t(copy.tokens)};
    }
    KV_RETURN_IF_ERROR(CudaStatus(step::LaunchCopies(launch, o_.stream), "copying open pages"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<size_t> DeviceStep::UploadBytes(const Options& options) {
  KV_ASSIGN_OR_RETURN(const StepSizes sizes, StepSizesOf(options));
  return sizes.upload_bytes();
}

absl::StatusOr<std::unique_ptr<DeviceStep>> DeviceStep::Create(const Options& options) {
  KV_ASSIGN_OR_RETURN(const StepSizes sizes, StepSizesOf(options));
  if (options.upload != nullptr && (options.upload_bytes < sizes.upload_bytes() ||
                                    reinterpret_cast<uintptr_t>(options.upload) % UploadRing::kAlign != 0)) {
    return InvalidField("upload_bytes", options.upload_bytes,
                        absl::StrCat("at least ", sizes.upload_bytes(), ", 64-byte aligned"));
  }
  StepTables::Options tables;
  tables.layers = options.layers;
  tables.identity = options.identity;
  tables.lag_pages = options.lag_pages;
  tables.page_tokens = options.layout.page_tokens;
  tables.pages_max = options.pages_max;
  tables.sequences_max = options.sequences_max;
  tables.index_tokens = options.codec->selection() == nullptr ? 0 : device::kCodeChunkTokens;
  KV_ASSIGN_OR_RETURN(StepTables made, StepTables::Make(tables));
  auto step = std::make_unique<CudaDeviceStep>(options, sizes, std::move(made));
  KV_RETURN_IF_ERROR(step->Init());
  return std::unique_ptr<DeviceStep>(std::move(step));
}

}  // namespace kvmanager
