#include "kvmanager/gpu/process_steps.h"

#include <spdlog/spdlog.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/gpu/device_work.h"

namespace kvmanager {
namespace {

using Word = SharedSemaphores::Word;

constexpr uint32_t kNoSlot = UINT32_MAX;
constexpr uint64_t kWordsPerChangeMax = 6;  // of a page in one layer: a run of its own

}  // namespace

absl::StatusOr<std::shared_ptr<ProcessSteps>> ProcessSteps::Create(const Parts& parts, Gpu* gpu,
                                                                   std::shared_ptr<SharedSemaphores> words,
                                                                   uint32_t pid) {
  std::shared_ptr<ProcessSteps> made(new ProcessSteps(parts, gpu, std::move(words)));
  const int pidfd = pid == 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this client's process cannot be watched (", pid == 0 ? "its PID is of another namespace" : strerror(errno),
        "), so its kernels may not touch the daemon's memory: attend in the daemon instead (step)"));
  }
  made->pidfd_ = kj::AutoCloseFd(pidfd);
  KV_ASSIGN_OR_RETURN(made->holder_, gpu->epochs()->AddHolder(made->words_->released()));
  made->holds_ = true;
  return made;
}

ProcessSteps::~ProcessSteps() {
  ProcessGone();
  gpu_.streams()->Retire(std::move(words_));
}

std::vector<DeviceEncodeJob> ProcessSteps::TakeJobs() { return gpu_.encode_queue()->Take(); }
std::vector<DeviceIndexJob> ProcessSteps::TakeIndexJobs() { return gpu_.encode_queue()->TakeIndexJobs(); }

void ProcessSteps::Break(absl::Span<const AttendEntry> entries, std::vector<DeviceEncodeJob> jobs,
                         const absl::Status& status) {
  for (DeviceEncodeJob& job : jobs) {
    for (EncodeItem& item : job.items) item.declined = true;
    job.done(job.items);
  }
  for (const AttendEntry& entry : entries) {
    broken_[entry.sequence] = absl::FailedPreconditionError(absl::StrCat(
        "sequence ", entry.sequence, " can only be dropped: an earlier step could not be planned: ", status.message()));
  }
}

void ProcessSteps::Close() {
  if (closed_) return;
  closed_ = true;
  EndBatches();
  gpu_.epochs()->Refresh(holder_);
  parts_.departed->Keep(shared_from_this());
}

void DepartedProcesses::Keep(std::shared_ptr<ProcessSteps> process) {
  const uint64_t number = next_++;
  Kept kept;
  kept.observer = kj::heap<kj::UnixEventPort::FdObserver>(loop_->port(), process->pidfd_.get(),
                                                          kj::UnixEventPort::FdObserver::OBSERVE_READ);
  kept.gone = kept.observer->whenBecomesReadable()
                  .then([this, number, process = process.get()] {
                    process->ProcessGone();
                    // A promise must not destroy itself.
                    loop_->queue().Post([this, number] { kept_.erase(number); });
                  })
                  .eagerlyEvaluate(nullptr);
  kept.process = std::move(process);
  kept_.emplace(number, std::move(kept));
}

void ProcessSteps::ProcessGone() {
  if (!holds_) return;
  holds_ = false;
  gpu_.epochs()->RemoveHolder(holder_);
  for (const uint32_t slab : std::exchange(slabs_, {})) gpu_.pool()->ImporterGone(slab);
  // What it was to encode and did not stays raw, or is nobody's by now.
  while (!batches_.empty()) {
    Batch batch = std::move(batches_.front());
    batches_.pop_front();
    for (EncodeItem& item : batch.job.items) item.declined = true;
    batch.job.done(batch.job.items);
  }
}

absl::StatusOr<int> ProcessSteps::MapSlab(CacheId cache, uint32_t slab) {
  if (!parts_.store->tables().OwnsSlab(cache, gpu_.ordinal(), slab)) {
    return FieldError(absl::StatusCode::kNotFound, "slab", absl::StrCat(slab),
                      "a slab in which this cache's tenant has pages");
  }
  if (slabs_.contains(slab)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "slab", absl::StrCat(slab),
                      "asked for once: this process maps it");
  }
  KV_RETURN_IF_ERROR(gpu_.device()->Use());
  KV_ASSIGN_OR_RETURN(const int fd, gpu_.pool()->Export(slab));
  slabs_.insert(slab);
  return fd;
}

absl::Status ProcessSteps::CheckSequence(SequenceId sequence) const {
  if (const auto broken = broken_.find(sequence); broken != broken_.end()) return broken->second;
  const auto found = words_of_.find(sequence);
  // Until its first plan has run, the word is of whoever had it before.
  if (found == words_of_.end() || words_->Load(Word::kReleased) < found->second.since) return absl::OkStatus();
  return NonFiniteStatus(sequence, words_->non_finite()[found->second.word]);
}

absl::Status ProcessSteps::CheckRoom(uint64_t pages, uint64_t changes) const {
  if (!gpu_.epochs()->HasRoom(holder_)) {
    return FieldError(absl::StatusCode::kResourceExhausted, "plans that this process has not released",
                      absl::StrCat(ReleaseEpochs::kOpenPlansMax), absl::StrCat("below ", ReleaseEpochs::kOpenPlansMax));
  }
  if (pages > kPlanPagesMax) {
    return InvalidField("tokens of all entries", absl::StrCat("so many that they fill ", pages, " pages"),
                        absl::StrCat("at most ", kPlanPagesMax, " of all layers in one call"));
  }
  // Flags of a batch lie in one piece, so up to as many again are left out at the ring's end.
  if (flags_.used() + 2 * (reserved_flags_ + pages) > SharedSemaphores::kDeclinedWords) {
    return FieldError(
        absl::StatusCode::kResourceExhausted, "pages that this process has yet to encode",
        absl::StrCat(flags_.used() + reserved_flags_, " and ", pages, " more"),
        absl::StrCat("at most ", SharedSemaphores::kDeclinedWords - pages, ": let its streams come nearer"));
  }
  // Each page that is sealed may be opened by the same call, and changes for both.
  const uint64_t words = (changes + 2 * pages) * kWordsPerChangeMax;
  if (words > kChangesWordsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "entries", absl::StrCat(changes, " pages to tell"),
                      absl::StrCat("at most ", kChangesWordsMax / kWordsPerChangeMax,
                                   " of all layers in one reply: name fewer sequences at once"));
  }
  return absl::OkStatus();
}

// Runs of layers of one page, as ExtendReply's changes.
absl::Status ProcessSteps::DescribeChanges(const StepCache& cache, uint32_t entry, SequenceId sequence,
                                           std::vector<uint32_t>* changes) {
  struct Change {
    uint32_t page, layer, raw, encoded;
  };
  std::vector<Change> all;
  std::vector<PagePlace> places;
  const auto unit = [&](PageId slot) { return slot.valid() ? gpu_.pool()->SlotUnit(slot) : kNoSlot; };
  for (int layer = 0; layer < cache.config->layers; ++layer) {
    places.clear();
    KV_RETURN_IF_ERROR(parts_.store->tables().TakeChanges(sequence, layer, &places, TableKeeper::kProcess));
    for (const PagePlace& place : places) {
      all.push_back({place.page, static_cast<uint32_t>(layer), unit(place.raw), unit(place.encoded)});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Change& a, const Change& b) { return a.page < b.page; });
  for (size_t i = 0; i < all.size();) {
    size_t n = 1;
    while (i + n < all.size() && all[i + n].page == all[i].page && all[i + n].layer == all[i].layer + n) ++n;
    changes->insert(changes->end(), {entry, all[i].page, all[i].layer, static_cast<uint32_t>(n)});
    for (const size_t end = i + n; i < end; ++i) changes->insert(changes->end(), {all[i].raw, all[i].encoded});
  }
  return absl::OkStatus();
}

// An error leaves the jobs to the caller.
absl::Status ProcessSteps::StartJobs(const StepCache& cache, bool encode_here, std::vector<DeviceEncodeJob>* taken,
                                     Plan* plan) {
  if (taken->empty()) return absl::OkStatus();
  std::optional<uint32_t> at;
  if (encode_here) {
    KV_CHECK(taken->size() == 1);
    const uint32_t count = static_cast<uint32_t>(taken->front().items.size());
    at = flags_.Take(count);
    if (!at.has_value()) {
      return FieldError(absl::StatusCode::kResourceExhausted, "pages that this process has yet to encode",
                        absl::StrCat(flags_.used(), " and ", count, " more in one piece"),
                        absl::StrCat("at most ", SharedSemaphores::kDeclinedWords));
    }
  }
  std::vector<DeviceEncodeJob> jobs = std::exchange(*taken, {});
  if (!encode_here) {
    // The encode stream must not wait for a client: pages are posted once its word says that they are written.
    parts_.polls->Add([self = shared_from_this(), epoch = epoch_, codec = cache.device_codec,
                       raw_bytes = cache.config->layout.raw_bytes(), jobs = std::move(jobs)]() mutable {
      if (self->holds_ && !self->HasRun(epoch, 0)) return false;
      for (DeviceEncodeJob& job : jobs) self->gpu_.encodes()->Post(codec, raw_bytes, std::move(job));
      return true;
    });
    return absl::OkStatus();
  }
  for (EncodeItem& item : jobs[0].items) {
    item.is_sink = cache.device_codec->keeps_raw(int(item.layer), item.first_token);
    const auto unit = [&](const uint8_t* at) {
      return static_cast<uint32_t>(static_cast<uint64_t>(at - gpu_.pool()->data()) / DevicePool::kSlotUnitBytes);
    };
    plan->encode_items.insert(plan->encode_items.end(),
                              {item.layer, unit(item.raw), unit(item.encoded), 0,
                               static_cast<uint32_t>(item.first_token), static_cast<uint32_t>(item.first_token >> 32)});
  }
  Batch batch;
  batch.job = std::move(jobs[0]);
  batch.number = plan->encode_batch = ++last_batch_;
  batch.at = plan->encode_at = *at;
  batches_.push_back(std::move(batch));
  if (std::exchange(polling_, true)) return absl::OkStatus();
  parts_.polls->Add([self = shared_from_this()] {
    const bool none = self->EndBatches();
    self->polling_ = !none;
    return none;
  });
  return absl::OkStatus();
}

absl::StatusOr<ProcessSteps::Plan> ProcessSteps::MakePlan(const StepCache& cache, absl::Span<const AttendEntry> entries,
                                                          absl::Span<const uint32_t> words, bool encode_here,
                                                          std::vector<DeviceEncodeJob>* jobs) {
  if (closed_) return absl::UnavailableError("the connection has ended");
  Plan plan;
  KV_ASSIGN_OR_RETURN(plan.epoch, gpu_.epochs()->OpenPlan(holder_));
  epoch_ = plan.epoch;
  for (uint32_t i = 0; i < entries.size(); ++i) {
    KV_RETURN_IF_ERROR(DescribeChanges(cache, i, entries[i].sequence, &plan.changes));
    NonFiniteWord& word = words_of_.try_emplace(entries[i].sequence, NonFiniteWord{words[i], plan.epoch}).first->second;
    if (word.word != words[i]) word = {words[i], plan.epoch};
    word.last = plan.epoch;
  }
  // Last: a batch that is registered is one that the client is told of.
  KV_RETURN_IF_ERROR(StartJobs(cache, encode_here, jobs, &plan));
  return plan;
}

bool ProcessSteps::EndBatches() {
  const uint64_t encoded = words_->Load(Word::kEncoded);
  while (!batches_.empty() && batches_.front().number <= encoded) {
    Batch batch = std::move(batches_.front());
    batches_.pop_front();
    flags_.Release();
    for (size_t i = 0; i < batch.job.items.size(); ++i) {
      EncodeItem& item = batch.job.items[i];
      item.declined = words_->declined()[batch.at + i] != 0 || item.is_sink;  // whatever the client says
    }
    batch.job.done(batch.job.items);
  }
  return batches_.empty();
}

bool ProcessSteps::HasRun(uint64_t epoch, uint64_t batch) const {
  const uint64_t released = words_->Load(Word::kReleased);
  return (epoch == 0 || released >= epoch) && (batches_.empty() || batches_.front().number > batch);
}

void ProcessSteps::ReserveTokens(absl::Span<const AttendEntry> entries) {
  for (const AttendEntry& entry : entries) reserved_[entry.sequence].push_back(entry.position);
}

void ProcessSteps::ReleaseTokens(absl::Span<const AttendEntry> entries) {
  for (const AttendEntry& entry : entries) {
    std::vector<uint64_t>& positions = reserved_.at(entry.sequence);
    positions.erase(std::find(positions.begin(), positions.end(), entry.position));
    if (positions.empty()) reserved_.erase(entry.sequence);
  }
}

uint64_t ProcessSteps::planned_to(SequenceId sequence) const {
  const auto found = reserved_.find(sequence);
  return found == reserved_.end() ? UINT64_MAX : *std::min_element(found->second.begin(), found->second.end());
}

bool ProcessSteps::HasWritten(SequenceId sequence) const {
  if (reserved_.contains(sequence)) return false;
  const auto found = words_of_.find(sequence);
  return found == words_of_.end() || words_->Load(Word::kReleased) >= found->second.last;
}

void ProcessSteps::WhenRun(SequenceId sequence, absl::AnyInvocable<void()> fn) {
  using Planned = std::pair<uint64_t, uint64_t>;  // the newest plan and batch
  auto poll = [self = shared_from_this(), sequence, planned = std::optional<Planned>(), fn = std::move(fn)]() mutable {
    if (self->closed_) return true;
    if (!planned.has_value()) {
      if (self->reserved_.contains(sequence)) return false;
      planned = {self->epoch_, self->last_batch_};
    }
    if (!self->HasRun(planned->first, planned->second)) return false;
    fn();
    return true;
  };
  if (!poll()) parts_.polls->Add(std::move(poll));
}

}  // namespace kvmanager
