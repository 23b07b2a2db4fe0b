#include "client/in_process.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "attention/device_step.h"
#include "client/query_rows.h"
#include "codecs/device/device_encoder.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/pinned_region.h"

namespace kvmanager::client {
namespace {

using Word = SharedSemaphores::Word;

constexpr uint32_t kEncodeItemWords = 6;
constexpr uint32_t kRunHeadWords = 4;
constexpr uint64_t kNeverWritten = UINT64_MAX;  // a non-finite word: what a step reserved will not be written

uint64_t TablePages(const DeviceDescription& pool, const CacheDescription& cache) {
  constexpr uint64_t kPagesMin = 4096;
  const uint64_t page_bytes = std::max<uint64_t>(1, std::min(cache.raw_page_bytes, cache.payload_page_bytes));
  return kPagesMin + 2 * pool.slabs * pool.slab_bytes / page_bytes / uint64_t(cache.options.layers);
}

class InProcessImpl final : public InProcess {
 public:
  InProcessImpl(DeviceClient* device, Cache* cache, std::shared_ptr<const Codec> codec, const Options& options)
      : device_(*device),
        cache_(*cache),
        codec_(std::move(codec)),
        options_(options),
        rows_(cache->description().options.layers) {}
  ~InProcessImpl() override {
    // The daemon must not wait for a step that will not end.
    if (state_ != State::kIdle) (void)End();
  }

  absl::Status Init();
  absl::Status Ask(absl::Span<const StepEntry> entries, bool append, bool attend) override;
  absl::Status Start() override;
  absl::Status Append(int layer, const void* k, const void* v) override {
    if (state_ != State::kBegun) return NotBegun();
    return step_->Append(layer, k, v);
  }
  absl::Status Attend(int layer, const void* q, void* out, float* lse) override {
    if (state_ != State::kBegun) return NotBegun();
    KV_RETURN_IF_ERROR(step_->Attend(layer, q, out, lse));
    return rows_memory_ != nullptr && rows_.IsDue(layer) ? CopyQueryRow(q) : absl::OkStatus();
  }
  absl::Status End() override;
  uint64_t launches() const override { return step_->launches(); }
  const DeviceRegion& pool() const override { return *region_; }
  absl::Status After(const Sequence& sequence) override {
    return sequence.copied() == 0 ? absl::OkStatus() : device_.EnqueueWaitDone(options_.stream, sequence.copied());
  }
  void Forget(uint64_t sequence) override {
    const auto place = places_.find(sequence);
    if (place == places_.end()) return;
    step_->RemoveSequence(place->second);
    places_.erase(place);
  }

 private:
  // kIdle -> kAsked: Ask; -> kBegun: Start, answered and planned; -> kIdle: End, and errors of Start.
  enum class State { kIdle, kAsked, kBegun };

  static absl::Status NotBegun() { return absl::FailedPreconditionError("no step has begun"); }
  absl::Status ApplyChanges(absl::Span<const StepEntry> entries, absl::Span<const uint32_t> changes);
  absl::Status EnsureMapped(uint32_t slot);
  absl::StatusOr<ExtendOutcome> Answer() {
    absl::StatusOr<ExtendOutcome> answer = answer_->Wait();
    answer_.reset();
    return answer;
  }
  absl::Status PrepareStep();
  // What the daemon reserved of the step's appends will not be written: a sequence with such pages is never published.
  void WillNotBeWritten();
  absl::Status Release(absl::Status status);
  absl::Status EncodeFilled();
  size_t RowBytes() const;
  absl::Status CopyQueryRow(const void* q);
  void TakeQueryRows();

  DeviceClient& device_;
  Cache& cache_;
  const std::shared_ptr<const Codec> codec_;
  const Options options_;
  std::unique_ptr<DeviceCodec> device_codec_;
  std::unique_ptr<DeviceRegion> region_;  // slabs of the daemon's pool, as they are needed
  QueryRows rows_;
  std::unique_ptr<PinnedRegion> rows_memory_;  // [QueryRows::kPlaces] rows; nullptr: none is copied
  std::unique_ptr<DeviceStep> step_;
  std::unique_ptr<DeviceEncoder> encoder_;
  absl::flat_hash_map<uint64_t, uint32_t> places_;  // by sequence
  std::vector<uint32_t> words_;                     // scratch
  std::vector<DeviceStep::Entry> entries_;
  std::vector<DeviceEncodeItem> items_;
  std::vector<QueryRow> queries_;
  uint64_t chosen_entries_ = 0;  // so far: the next row is of entry chosen_entries_ % entries
  State state_ = State::kIdle;
  // Of the step under way.
  std::vector<StepEntry> asked_entries_;
  bool append_ = false, attend_ = false;
  absl::optional<Pending<absl::StatusOr<ExtendOutcome>>> answer_;  // kAsked
  ExtendOutcome extended_;
};

absl::Status InProcessImpl::Init() {
  const CacheOptions& cache = cache_.description().options;
  const DeviceDescription& pool = device_.description();
  if (cache.device != pool.ordinal) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(cache.device),
                      absl::StrCat(pool.ordinal, ", the GPU that was opened"));
  }
  const Device& device = device_.device();
  KV_RETURN_IF_ERROR(device.Use());
  device_codec_ = codec_->NewDeviceCodec();
  if (device_codec_ == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec", codec_->info().spec,
                      "one with kernels for a GPU");
  }
  KV_ASSIGN_OR_RETURN(region_, DeviceRegion::Reserve(&device, pool.slab_bytes, uint32_t(pool.slabs)));
  DeviceStep::Options step;
  step.stream = options_.stream;
  step.pool = region_->data();
  step.layout = codec_->layout();
  step.layers = cache.layers;
  step.query_heads = cache.query_heads;
  step.lag_pages = cache.lag_pages;
  step.identity = codec_->info().identity;
  step.codec = device_codec_.get();
  step.multiprocessors = device.info().multiprocessors;
  step.pages_max = options_.pages_max != 0 ? options_.pages_max : TablePages(pool, cache_.description());
  step.sequences_max = options_.sequences_max;
  step.tokens_max = options_.tokens_max;
  step.non_finite = device_.words().non_finite();
  step.non_finite_words = SharedSemaphores::kNonFiniteWords;
  KV_ASSIGN_OR_RETURN(step_, DeviceStep::Create(step));
  KV_ASSIGN_OR_RETURN(encoder_, DeviceEncoder::Create(device.encode_stream(), 2 * SharedSemaphores::kDeclinedWords));
  if (pool.samples_queries && !step.identity) {
    KV_ASSIGN_OR_RETURN(rows_memory_, PinnedRegion::Make(&device, QueryRows::kPlaces * RowBytes()));
  }
  return absl::OkStatus();
}

size_t InProcessImpl::RowBytes() const {
  return size_t(cache_.description().options.query_heads) * codec_->layout().head_dim *
         DTypeBytes(codec_->layout().dtype);
}

// Of the last token of one entry, of another each time. A captured copy would be made by every replay.
absl::Status InProcessImpl::CopyQueryRow(const void* q) {
  if (device_.device().IsCapturing(options_.stream)) return absl::OkStatus();
  const size_t entry = chosen_entries_++ % entries_.size();
  uint64_t rows = 0;
  for (size_t i = 0; i <= entry; ++i) rows += uint64_t(entries_[i].tokens);
  const size_t row_bytes = RowBytes();
  const PageCopy copy{static_cast<uint8_t*>(const_cast<void*>(q)) + (rows - 1) * row_bytes,
                      rows_memory_->data() + size_t(rows_.Take()) * row_bytes, uint32_t(row_bytes)};
  return EnqueuePageCopies(PageDirection::kDemote, {&copy, 1}, options_.stream, PageCopyMethod::kKernel);
}

void InProcessImpl::TakeQueryRows() {
  queries_.clear();
  const size_t row_bytes = RowBytes();
  for (const QueryRows::Row& row : rows_.Arrived(device_.words().Load(Word::kReleased))) {
    queries_.push_back({row.layer, {rows_memory_->data() + size_t(row.place) * row_bytes, row_bytes}});
  }
}

absl::Status InProcessImpl::EnsureMapped(uint32_t slot) {
  const uint32_t slab = uint32_t(slot * DeviceRegion::kSlotUnitBytes / region_->slab_bytes());
  if (slab >= region_->slabs()) {
    return absl::InternalError(absl::StrCat("the daemon named slot ", slot, ", which is beyond its pool"));
  }
  if (region_->IsMapped(slab)) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(const int fd, device_.MapSlab(cache_.description().id, slab));
  return region_->Import(slab, fd, /*writable=*/true);
}

absl::Status InProcessImpl::ApplyChanges(absl::Span<const StepEntry> entries, absl::Span<const uint32_t> changes) {
  absl::Status malformed = absl::InternalError("the daemon's changes of tables are malformed");
  const uint32_t layers = uint32_t(cache_.description().options.layers);
  for (size_t at = 0; at < changes.size();) {
    if (changes.size() - at < kRunHeadWords) return malformed;
    const uint32_t entry = changes[at], page = changes[at + 1], first = changes[at + 2], n = changes[at + 3];
    at += kRunHeadWords;
    if (entry >= entries.size() || first > layers || n > layers - first || changes.size() - at < 2 * size_t{n}) {
      return malformed;
    }
    const uint32_t place = places_.at(entries[entry].sequence);
    for (uint32_t i = 0; i < n; ++i, at += 2) {
      const DevicePage slots{changes[at], changes[at + 1]};
      for (const uint32_t slot : {slots.raw, slots.encoded}) {
        if (slot != DevicePage::kNoSlot) KV_RETURN_IF_ERROR(EnsureMapped(slot));
      }
      KV_RETURN_IF_ERROR(step_->SetPages(place, int(first + i), page, {&slots, 1}));
    }
  }
  return absl::OkStatus();
}

absl::Status InProcessImpl::PrepareStep() {
  const absl::Span<const StepEntry> entries = asked_entries_;
  if (extended_.aged.size() != entries.size() ||
      (!extended_.sparse_from.empty() && extended_.sparse_from.size() != entries.size())) {
    return absl::InternalError("the daemon's answer is not of this step");
  }
  KV_RETURN_IF_ERROR(ApplyChanges(entries, extended_.changes));
  entries_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    const uint64_t from = extended_.sparse_from.empty() ? UINT64_MAX : extended_.sparse_from[i];
    entries_.push_back({places_.at(entries[i].sequence), entries[i].position, entries[i].tokens, extended_.aged[i],
                        SparseQueries(from, entries[i].position, entries[i].tokens)});
  }
  return step_->Prepare(0, cache_.description().options.layers, entries_, append_, attend_);
}

absl::Status InProcessImpl::Ask(absl::Span<const StepEntry> entries, bool append, bool attend) {
  if (state_ != State::kIdle) return absl::FailedPreconditionError("the step before has not ended");
  words_.clear();
  for (const StepEntry& entry : entries) {
    auto place = places_.find(entry.sequence);
    if (place == places_.end()) {
      KV_ASSIGN_OR_RETURN(const uint32_t added, step_->AddSequence(0));
      place = places_.emplace(entry.sequence, added).first;
    }
    words_.push_back(place->second);
  }
  ExtendBatch batch;
  batch.entries = entries;
  batch.append = append;
  batch.attend = attend;
  batch.encode_here = options_.encode_here;
  batch.words = words_;
  TakeQueryRows();
  batch.queries = queries_;
  answer_ = cache_.ExtendAsync(batch);
  asked_entries_.assign(entries.begin(), entries.end());
  append_ = append;
  attend_ = attend;
  state_ = State::kAsked;
  return absl::OkStatus();
}

absl::Status InProcessImpl::Start() {
  if (state_ == State::kBegun) return absl::FailedPreconditionError("the step has started");
  if (state_ == State::kIdle) return NotBegun();
  state_ = State::kIdle;
  KV_ASSIGN_OR_RETURN(extended_, Answer());
  absl::Status prepared = PrepareStep();
  if (prepared.ok()) {
    state_ = State::kBegun;
    uint64_t tokens = 0;
    for (const DeviceStep::Entry& entry : entries_) tokens += uint64_t(entry.tokens);
    rows_.BeginStep(tokens);
    return prepared;
  }
  WillNotBeWritten();
  (void)Release(EncodeFilled());
  return prepared;
}

void InProcessImpl::WillNotBeWritten() {
  if (!append_) return;
  for (const uint32_t word : words_) device_.words().non_finite()[word] = kNeverWritten;
}

absl::Status InProcessImpl::EncodeFilled() {
  const std::vector<uint32_t>& words = extended_.encode_items;
  if (extended_.encode_batch == 0) return absl::OkStatus();
  const size_t count = words.size() / kEncodeItemWords;
  if (words.size() % kEncodeItemWords != 0 || extended_.encode_at > SharedSemaphores::kDeclinedWords ||
      count > SharedSemaphores::kDeclinedWords - extended_.encode_at) {
    return absl::InternalError("the daemon's pages to encode are malformed");
  }
  items_.clear();
  for (size_t i = 0; i < count; ++i) {
    const uint32_t* const item = words.data() + i * kEncodeItemWords;
    for (const uint32_t slot : {item[1], item[2]}) KV_RETURN_IF_ERROR(EnsureMapped(slot));
    items_.push_back({region_->data() + item[1] * DeviceRegion::kSlotUnitBytes,
                      region_->data() + item[2] * DeviceRegion::kSlotUnitBytes, uint64_t{item[5]} << 32 | item[4],
                      item[0]});
  }
  const Device& device = device_.device();
  KV_RETURN_IF_ERROR(device.Follow(device.encode_stream(), options_.stream));
  KV_RETURN_IF_ERROR(encoder_->Encode(*device_codec_, items_, device_.words().declined() + extended_.encode_at));
  return device.EnqueueWrite(device.encode_stream(), device_.words().Address(Word::kEncoded), extended_.encode_batch);
}

absl::Status InProcessImpl::End() {
  const State before = std::exchange(state_, State::kIdle);
  if (before == State::kIdle) return NotBegun();
  if (before == State::kAsked) {
    KV_ASSIGN_OR_RETURN(extended_, Answer());
    WillNotBeWritten();
  }
  return Release(EncodeFilled());
}

absl::Status InProcessImpl::Release(absl::Status status) {
  rows_.EndStep(extended_.epoch);
  status.Update(device_.EnqueueReleased(options_.stream, extended_.epoch));
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<InProcess>> InProcess::Create(DeviceClient* device, Cache* cache,
                                                             std::shared_ptr<const Codec> codec,
                                                             const Options& options) {
  auto run = std::make_unique<InProcessImpl>(device, cache, std::move(codec), options);
  KV_RETURN_IF_ERROR(run->Init());
  return std::unique_ptr<InProcess>(std::move(run));
}

}  // namespace kvmanager::client
