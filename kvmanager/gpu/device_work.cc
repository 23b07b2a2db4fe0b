#include "kvmanager/gpu/device_work.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {
namespace {

uint32_t UnitOf(const DevicePool& pool, PageId slot) {
  return slot.valid() ? pool.SlotUnit(slot) : DevicePage::kNoSlot;
}

// Of all sequences together, in a layer: what the pool can hold of the smaller form, with some room for growth.
uint64_t TablePages(const DevicePool& pool, const CacheConfig& config, const CodecInfo& info) {
  constexpr uint64_t kPagesMin = 4096;
  uint64_t smallest = config.layout.raw_bytes();
  for (int layer = 0; layer < config.layers; ++layer) smallest = std::min<uint64_t>(smallest, info.page_bytes(layer));
  return kPagesMin + 2 * pool.capacity_bytes() / smallest / static_cast<uint64_t>(config.layers);
}

}  // namespace

absl::Status NonFiniteStatus(SequenceId sequence, uint64_t word) {
  const std::optional<NonFinitePlace> found = ParseNonFiniteWord(word);
  if (!found.has_value()) return absl::OkStatus();
  return InvalidField(
      absl::StrCat("sequence ", sequence, ": ", found->side == 0 ? "k" : "v", "[position ", found->position, "][layer ",
                   found->layer, "][head ", found->kv_head, "][channel ", found->channel, "]"),
      "NaN or Inf", "finite; the sequence can only be dropped");
}

absl::StatusOr<std::shared_ptr<DeviceWork>> DeviceWork::Create(const Parts& parts, Gpu* gpu,
                                                               std::shared_ptr<DeviceStream> stream) {
  std::shared_ptr<DeviceWork> work(new DeviceWork(parts, gpu, std::move(stream)));
  KV_ASSIGN_OR_RETURN(work->holder_, gpu->epochs()->AddHolder(work->stream_->plans()));
  work->holds_ = true;
  return work;
}

// Its stream has drained; freeing what steps own would wait for others.
DeviceWork::~DeviceWork() {
  if (holds_) gpu_.epochs()->RemoveHolder(holder_);
  for (auto& [cache, run] : runs_) gpu_.streams()->Retire(std::shared_ptr<const Run>(std::move(run)));
}

void DeviceWork::Forget(SequenceId sequence) {
  broken_.erase(sequence);
  written_.erase(sequence);
  for (const auto& [cache, run] : runs_) {
    const auto place = run->places.find(sequence);
    if (place == run->places.end()) continue;
    run->step->RemoveSequence(place->second.place);
    run->places.erase(place);
  }
}

absl::Status DeviceWork::CheckSequence(SequenceId sequence, CacheId cache) const {
  if (const auto broken = broken_.find(sequence); broken != broken_.end()) return broken->second;
  const auto run = runs_.find(cache);
  if (run == runs_.end()) return absl::OkStatus();
  const auto place = run->second->places.find(sequence);
  // Until its first submission has run, the word is of whoever had the place before.
  if (place == run->second->places.end() || stream_->passed() < place->second.since) return absl::OkStatus();
  return NonFiniteStatus(sequence, stream_->non_finite()[run->second->first_word + place->second.place]);
}

absl::Status DeviceWork::CheckTokens(uint64_t tokens) {
  if (tokens <= static_cast<uint64_t>(kStepTokensMax)) return absl::OkStatus();
  return InvalidField("tokens of all entries", tokens, absl::StrCat("at most ", kStepTokensMax, " on a GPU"));
}

// A step is up to two submissions.
bool DeviceWork::HasRoom() const {
  return stream_->submitted() - stream_->passed() + 2 <= DeviceStream::kSubmissionsMax;
}

// Kernels of these may still be in the stream.
void DeviceWork::DropRunsOfClosedCaches() {
  for (auto it = runs_.begin(); it != runs_.end();) {
    const auto run = it++;
    if (parts_.store->caches().codec(run->first) != nullptr) continue;
    stream_->Keep(std::shared_ptr<Run>(run->second.release(), [streams = gpu_.streams()](const Run* gone) {
      streams->Retire(std::shared_ptr<const Run>(gone));
    }));
    runs_.erase(run);
  }
}

absl::StatusOr<DeviceWork::Run*> DeviceWork::RunOf(const StepCache& cache) {
  if (const auto found = runs_.find(cache.id); found != runs_.end()) return found->second.get();
  DropRunsOfClosedCaches();
  std::unique_ptr<Run>& run = runs_[cache.id];
  const auto none = [&](absl::Status status) {
    runs_.erase(cache.id);
    return status;
  };
  if (runs_.size() > kRunsMax) {
    return none(FieldError(absl::StatusCode::kResourceExhausted, "caches of this connection on one GPU",
                           absl::StrCat(runs_.size()), absl::StrCat("at most ", kRunsMax)));
  }
  auto made = std::make_unique<Run>();
  std::vector<bool> taken(kRunsMax);
  for (const auto& [id, other] : runs_) {
    if (other != nullptr) taken[other->first_word / kSequencesMax] = true;
  }
  made->first_word =
      kSequencesMax * static_cast<uint32_t>(std::find(taken.begin(), taken.end(), false) - taken.begin());
  made->codec = cache.device_codec;
  const CacheConfig& config = *cache.config;
  DeviceStep::Options options;
  options.stream = stream_->stream();
  options.pool = gpu_.pool()->data();
  options.layout = config.layout;
  options.layers = config.layers;
  options.query_heads = config.query_heads;
  options.lag_pages = config.lag_pages;
  options.identity = cache.codec->info().identity;
  options.codec = made->codec.get();
  options.multiprocessors = gpu_.device()->info().multiprocessors;
  options.pages_max = TablePages(*gpu_.pool(), config, cache.codec->info());
  options.sequences_max = kSequencesMax;
  options.tokens_max = kStepTokensMax;
  options.non_finite = stream_->non_finite() + made->first_word;
  options.non_finite_words = kSequencesMax;
  absl::Status status = gpu_.device()->Use();
  const absl::StatusOr<size_t> upload_bytes = DeviceStep::UploadBytes(options);
  status.Update(upload_bytes.status());
  if (!status.ok()) return none(status);
  auto upload = PinnedRegion::Make(gpu_.device(), *upload_bytes);
  if (!upload.ok()) return none(upload.status());
  made->upload = *std::move(upload);
  options.upload = made->upload->data();
  options.upload_bytes = *upload_bytes;
  auto step = DeviceStep::Create(options);
  if (!step.ok()) return none(step.status());
  made->step = *std::move(step);
  run = std::move(made);
  return run.get();
}

absl::StatusOr<uint32_t> DeviceWork::PlaceOf(Run& run, SequenceId sequence) {
  if (const auto found = run.places.find(sequence); found != run.places.end()) return found->second.place;
  KV_ASSIGN_OR_RETURN(const uint32_t place, run.step->AddSequence(0));
  run.places.emplace(sequence, Run::Place{place, stream_->submitted() + 1});
  return place;
}

// What the store has changed in one layer of a sequence since it was last asked.
absl::Status DeviceWork::Describe(Run& run, SequenceId sequence, int layer, uint32_t place) {
  changes_.clear();
  KV_RETURN_IF_ERROR(parts_.store->tables().TakeChanges(sequence, layer, &changes_));
  const DevicePool& pool = *gpu_.pool();
  for (const PagePlace& change : changes_) {
    const DevicePage page{UnitOf(pool, change.raw), UnitOf(pool, change.encoded)};
    KV_RETURN_IF_ERROR(run.step->SetPages(place, layer, change.page, {&page, 1}));
  }
  return absl::OkStatus();
}

// A submission in the stream, as a plan: `work` enqueues it.
template <typename Work>
absl::StatusOr<uint64_t> DeviceWork::Submission(uint64_t ready, Work work) {
  KV_RETURN_IF_ERROR(gpu_.device()->Use());
  KV_RETURN_IF_ERROR(stream_->Begin(ready));
  const absl::StatusOr<uint64_t> epoch = gpu_.epochs()->OpenPlan(holder_);
  absl::Status status = epoch.status();
  if (status.ok()) {
    status = work();
    status.Update(gpu_.device()->EnqueueWrite(stream_->stream(), stream_->plans(), *epoch));
  }
  absl::StatusOr<uint64_t> done = stream_->End();
  if (!status.ok()) return status;
  return done;
}

// Now and then a row of queries goes to pinned memory behind its step, and to the quality monitor once the stream has
// passed that. Nothing waits for it.
absl::Status DeviceWork::CopyQueryRow(const StepCache& cache, Run& run, int layer,
                                      absl::Span<const AttendEntry> entries, const void* q) {
  QualityMonitor* const quality = parts_.quality;
  if (quality == nullptr || cache.codec->info().identity) return absl::OkStatus();
  const CacheConfig& config = *cache.config;
  const DType dtype = config.layout.dtype;
  const auto row = quality->ChooseRow(cache.id, config.layers, layer, entries, dtype, /*scale=*/0, /*tokens=*/1);
  if (!row.has_value()) return absl::OkStatus();
  const size_t row_bytes = size_t(config.query_heads) * config.layout.head_dim * DTypeBytes(dtype);
  if (run.rows == nullptr) {
    // Freed when no stream has work, whoever has it last.
    std::shared_ptr<QueryRows> made(new QueryRows, [streams = gpu_.streams()](QueryRows* gone) {
      streams->Retire(std::shared_ptr<const QueryRows>(gone));
    });
    KV_ASSIGN_OR_RETURN(made->memory, PinnedRegion::Make(gpu_.device(), kQueryRowsMax * row_bytes));
    run.rows = std::move(made);
  }
  const uint32_t place = static_cast<uint32_t>(std::countr_one(run.rows->taken));
  if (place >= kQueryRowsMax) return absl::OkStatus();
  uint8_t* const to = run.rows->memory->data() + place * row_bytes;
  const PageCopy copy{static_cast<uint8_t*>(const_cast<void*>(q)) + *row * row_bytes, to,
                      static_cast<uint32_t>(row_bytes)};
  KV_RETURN_IF_ERROR(EnqueuePageCopies(PageDirection::kDemote, {&copy, 1}, stream_->stream(), PageCopyMethod::kKernel));
  run.rows->taken |= 1u << place;
  parts_.polls->Add([stream = stream_, submission = stream_->submitted() + 1, rows = run.rows, place, to, row_bytes,
                     quality, id = cache.id, layers = config.layers, layer, dtype] {
    if (stream->passed() < submission) return false;
    quality->NoteRow(id, layers, layer, dtype, /*scale=*/0, {to, row_bytes});
    rows->taken &= ~(1u << place);
    return true;
  });
  return absl::OkStatus();
}

AttentionRates DeviceWork::RatesOf(const StepCache& cache, int layer) const {
  const CacheConfig& config = *cache.config;
  const DeviceCodec& codec = *cache.device_codec;
  AttentionShape shape;
  shape.kv_heads = config.layout.kv_heads;
  shape.query_heads = config.query_heads;
  shape.head_dim = config.layout.head_dim;
  shape.lag_pages = config.lag_pages;
  shape.multiprocessors = gpu_.device()->info().multiprocessors;
  shape.identity = cache.codec->info().identity;
  if (const device::AttendKernels* const kernels = codec.attention(layer); kernels != nullptr) {
    shape.encoded_cost = kernels->encoded_cost;
  }
  if (const uint32_t* const costs = codec.head_costs(layer).costs; costs != nullptr) {
    shape.encoded_cost = std::accumulate(costs, costs + shape.kv_heads, 0.0) / shape.kv_heads;
  }
  shape.has_long_kernels = config.layout.page_tokens == device::kPrefillPageTokens &&
                           shape.query_heads / shape.kv_heads <= device::kPrefillGroupMax &&
                           codec.prefill(layer).kernels != nullptr;
  return kvmanager::RatesOf(shape);
}

void DeviceWork::ListWork(absl::Span<const AttendEntry> entries, absl::Span<const EntryReading> readings) {
  work_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    const AttendEntry& entry = entries[i];
    work_.push_back(
        {entry.position, entry.tokens, SparseQueries(readings[i].sparse_from, entry.position, entry.tokens)});
  }
}

LaunchCut DeviceWork::CutOf(const StepCache& cache, int layer, absl::Span<const AttendEntry> entries,
                            absl::Span<const EntryReading> readings, ReadForm pages) {
  ListWork(entries, readings);
  return FirstLaunch(RatesOf(cache, layer), work_, pages);
}

absl::Status DeviceWork::Enqueue(const StepCache& cache, Run& run, int layer, absl::Span<const AttendEntry> entries,
                                 absl::Span<const EntryReading> readings, const DeviceTensors& tensors, ReadForm pages,
                                 bool* attended) {
  entries_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    KV_ASSIGN_OR_RETURN(const uint32_t place, PlaceOf(run, entries[i].sequence));
    KV_RETURN_IF_ERROR(Describe(run, entries[i].sequence, layer, place));
    const EntryReading reading = readings.empty() ? EntryReading() : readings[i];
    entries_.push_back({place, entries[i].position, entries[i].tokens, reading.aged,
                        SparseQueries(reading.sparse_from, entries[i].position, entries[i].tokens)});
    if (tensors.k != nullptr) written_[entries[i].sequence] = stream_->submitted() + 1;
  }
  const bool append = tensors.k != nullptr, attend = tensors.q != nullptr;
  KV_RETURN_IF_ERROR(run.step->Prepare(layer, 1, entries_, append, attend));
  if (append) KV_RETURN_IF_ERROR(run.step->Append(layer, tensors.k, tensors.v));
  if (!attend) return absl::OkStatus();
  if (pages == ReadForm::kEncoded) {
    ListWork(entries, readings);
    const DeviceStep::Counts read = run.step->counts();
    if (TakesTooLong(RatesOf(cache, layer), work_, read.encoded_pairs, read.raw_pairs)) return absl::OkStatus();
  }
  KV_RETURN_IF_ERROR(run.step->Attend(layer, tensors.q, tensors.out, tensors.lse));
  *attended = true;
  // A step whose output is there is none that failed.
  if (absl::Status copied = CopyQueryRow(cache, run, layer, entries, tensors.q); !copied.ok()) {
    spdlog::warn("queries of a step on GPU {} could not be copied: {}", gpu_.ordinal(), std::string(copied.message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceWork::Submitted> DeviceWork::Submit(const StepCache& cache, int layer,
                                                         absl::Span<const AttendEntry> entries,
                                                         absl::Span<const EntryReading> readings,
                                                         const DeviceTensors& tensors, ReadForm pages,
                                                         AttentionCounts* counts) {
  bool attended = false;
  const auto submitted = Submission(tensors.ready, [&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(Run* const run, RunOf(cache));
    KV_RETURN_IF_ERROR(Enqueue(cache, *run, layer, entries, readings, tensors, pages, &attended));
    if (attended) {
      const DeviceStep::Counts read = run->step->counts();
      counts->encoded_pairs += read.encoded_pairs;
      counts->raw_pairs += read.raw_pairs;
    }
    return absl::OkStatus();
  });
  if (tensors.k != nullptr) PostEncodes(cache);
  if (!submitted.ok() && tensors.k != nullptr) {
    spdlog::warn("a step on GPU {} was reserved but could not run: {}", gpu_.ordinal(),
                 std::string(submitted.status().message()));
    for (const AttendEntry& entry : entries) {
      broken_[entry.sequence] = absl::FailedPreconditionError(
          absl::StrCat("sequence ", entry.sequence,
                       " can only be dropped: an earlier append failed on the GPU: ", submitted.status().message()));
    }
  }
  KV_RETURN_IF_ERROR(submitted.status());
  return Submitted{*submitted, attended};
}

absl::StatusOr<uint64_t> DeviceWork::Copy(const StepCache& cache, SequenceId sequence, uint64_t pages,
                                          uint64_t released,
                                          absl::FunctionRef<absl::Status(std::vector<OpenCopy>*)> change) {
  return Submission(0, [&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(Run* const run, RunOf(cache));
    std::vector<OpenCopy> copies;
    KV_RETURN_IF_ERROR(change(&copies));
    if (!copies.empty()) written_[sequence] = stream_->submitted() + 1;
    if (released != 0) KV_RETURN_IF_ERROR(stream_->WaitReleased(released));
    const DevicePool& pool = *gpu_.pool();
    if (const auto place = run->places.find(sequence); pages != kAllPages && place != run->places.end()) {
      run->step->Truncate(place->second.place, static_cast<uint32_t>(pages));
    }
    std::vector<DeviceStep::OpenCopy> slots;
    slots.reserve(copies.size());
    for (const OpenCopy& copy : copies) {
      slots.push_back({pool.SlotUnit(copy.from), pool.SlotUnit(copy.to), copy.tokens});
    }
    return slots.empty() ? absl::OkStatus() : run->step->CopyOpen(slots);
  });
}

// The encode stream must not wait for a client, so pages are posted when their appends are known to have run.
void DeviceWork::PostEncodes(const StepCache& cache) {
  std::vector<DeviceEncodeJob> jobs = gpu_.encode_queue()->Take();
  if (jobs.empty()) return;
  parts_.polls->Add([stream = stream_, encodes = gpu_.encodes(), submitted = stream_->submitted(),
                     codec = cache.device_codec, raw_bytes = cache.config->layout.raw_bytes(),
                     jobs = std::move(jobs)]() mutable {
    if (stream->passed() < submitted) return false;
    for (DeviceEncodeJob& job : jobs) encodes->Post(codec, raw_bytes, std::move(job));
    return true;
  });
}

void DeviceWork::WhenRun(absl::AnyInvocable<void()> fn) {
  const uint64_t submitted = stream_->submitted();
  if (stream_->passed() >= submitted) return fn();
  parts_.polls->Add([stream = stream_, submitted, fn = std::move(fn)]() mutable {
    if (stream->closed()) return true;
    if (stream->passed() < submitted) return false;
    fn();
    return true;
  });
}

}  // namespace kvmanager
