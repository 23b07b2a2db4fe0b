#include "kvmanager/rpc/device_calls.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/rpc/device_call.h"
#include "kvmanager/rpc/device_step_call.h"

namespace kvmanager {
namespace {

using device_calls::Call;
using device_calls::Entries;
using device_calls::kReplyWords;
using device_calls::Run;
using device_calls::WhenReady;

struct ExtendCall final : Call {
  using Call::Call;
  std::shared_ptr<ProcessSteps> process;
  std::vector<uint32_t> words;
  bool attend = false;
  bool encode_here = false;
  ProcessSteps::Plan plan;
  std::vector<DeviceEncodeJob> jobs;       // reserved, and not part of a plan yet
  std::vector<DeviceIndexJob> index_jobs;  // on keys that this plan's kernels append
  bool reserved = false;                   // and not planned

  uint64_t reserved_flags = 0;  // pages, in the process's ring of flags

  ~ExtendCall() {
    if (reserved) (void)Fail(absl::CancelledError("the call was given up"));
    process->ReleaseFlags(reserved_flags);
  }

  // Others reserve while this call waits for pages: what it is to encode is taken at once.
  absl::Status Reserve() {
    KV_RETURN_IF_ERROR(Extend(0, config.layers));
    jobs = process->TakeJobs();
    SortIndexJobs();
    reserved = append;
    if (reserved) process->ReserveTokens(entries);
    return absl::OkStatus();
  }
  // What this call's queries wait for must not wait for its plan.
  void SortIndexJobs() {
    std::vector<DeviceIndexJob> now;
    for (DeviceIndexJob& job : process->TakeIndexJobs()) {
      const bool later = append && std::any_of(entries.begin(), entries.end(), [&](const AttendEntry& entry) {
                           return entry.sequence == job.sequence && entry.position < job.job->tokens();
                         });
      (later ? index_jobs : now).push_back(std::move(job));
    }
    PostIndexJobs(std::move(now));
  }

  kj::Promise<absl::Status> Proceed(const std::shared_ptr<ExtendCall>& self) {
    if (attend) {
      auto read = parts().store->Attend(cache.id, {0, config.layers}, entries);
      if (!read.ok()) return Fail(read.status());
      lease = *std::move(read);
      SortIndexJobs();
      // Once it is ready it is read again: which pages were declined is known only then.
      if (!lease->ready()) return WhenReady(*lease).then([self] { return self->Proceed(self); });
    }
    process->ReleaseFlags(std::exchange(reserved_flags, 0));
    auto made = process->MakePlan(cache, entries, words, encode_here, &jobs);
    if (!made.ok()) return Fail(made.status());
    plan = *std::move(made);
    if (std::exchange(reserved, false)) {
      process->ReleaseTokens(entries);
      TellFollowers(0, config.layers);
    }
    PostIndexJobs(std::exchange(index_jobs, {}));
    return absl::OkStatus();
  }
  absl::Status Fail(const absl::Status& status) {
    if (std::exchange(reserved, false)) {
      process->ReleaseTokens(entries);
      process->Break(entries, std::exchange(jobs, {}), status);
    }
    PostIndexJobs(std::exchange(index_jobs, {}));  // pages are pinned until they end
    return status;
  }
  void WriteReply(ExtendContext& context) {
    const size_t bytes = (plan.changes.size() + plan.encode_items.size() + 3 * entries.size()) * sizeof(uint32_t);
    auto reply = context.getResults(capnp::MessageSize{kReplyWords + bytes / sizeof(capnp::word) + 3, 0}).initReply();
    reply.setEpoch(plan.epoch);
    auto aged = reply.initAged(static_cast<uint32_t>(entries.size()));
    for (uint32_t i = 0; i < entries.size(); ++i) aged.set(i, lease == nullptr ? 0 : lease->aged(i));
    if (cache.codec->device_index().chunk_bytes > 0) {
      auto sparse_from = reply.initChoosesFrom(static_cast<uint32_t>(entries.size()));
      for (uint32_t i = 0; i < entries.size(); ++i) {
        sparse_from.set(i, lease == nullptr ? SequenceIndex::kNever : lease->sparse_from(i));
      }
    }
    const auto data = [](const std::vector<uint32_t>& from) {
      return capnp::Data::Reader(reinterpret_cast<const kj::byte*>(from.data()), from.size() * sizeof(uint32_t));
    };
    reply.setChanges(data(plan.changes));
    reply.setEncodeItems(data(plan.encode_items));
    reply.setEncodeBatch(plan.encode_batch);
    reply.setEncodeAt(plan.encode_at);
  }
};

}  // namespace

absl::StatusOr<kj::Promise<void>> DeviceCalls::Step(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                    const CheckedStep& step, StepContext& context) const {
  auto call = std::make_shared<DeviceStepCall>(*this, session, cache, step.entries);
  KV_ASSIGN_OR_RETURN(call->work, session->gpus().WorkOf(cache.config->device));
  for (const AttendEntry& entry : step.entries) {
    KV_RETURN_IF_ERROR(call->work->CheckSequence(entry.sequence, cache.id));
  }
  KV_RETURN_IF_ERROR(DeviceWork::CheckTokens(step.tokens));
  call->append = step.append();
  call->layer = step.layer;
  call->tokens = step.tokens;
  call->tensors.ready = context.getParams().getRequest().getReady();
  if (step.append()) {
    call->tensors.k = step.k.bytes.data();
    call->tensors.v = step.v.bytes.data();
  }
  if (step.attend()) {
    call->tensors.q = step.q.bytes.data();
    call->tensors.out = step.out.bytes.data();
    if (step.lse.given()) call->tensors.lse = reinterpret_cast<float*>(step.lse.bytes.data());
  }
  call->rest = call->entries;
  if (!call->work->turns().none()) call->turn = call->work->turns().Take();
  return Run(std::move(call), Method::kStep, context);
}

absl::StatusOr<kj::Promise<void>> DeviceCalls::Extend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                      ExtendContext& context) const {
  const auto request = context.getParams().getRequest();
  const CacheConfig& config = *cache.config;
  Entries entries;
  const auto owned = [&](SequenceId id) { return session->Holds(id, cache.id); };
  KV_RETURN_IF_ERROR(CheckStepEntries(request.getEntries(), owned, &entries).status());
  auto call = std::make_shared<ExtendCall>(*this, session, cache, entries);
  KV_ASSIGN_OR_RETURN(call->process, session->gpus().ProcessStepsOf(config.device));
  const auto words = request.getWords();
  if (words.size() != entries.size()) {
    return InvalidField("words", absl::StrCat(words.size(), " long"), absl::StrCat(entries.size(), ", one per entry"));
  }
  uint64_t sealed = 0, changes = 0;
  const uint64_t page_tokens = config.layout.page_tokens;
  const ReadingRule rule{config.layout.page_tokens, config.lag_pages};
  for (uint32_t i = 0; i < entries.size(); ++i) {
    if (words[i] >= SharedSemaphores::kNonFiniteWords) {
      return InvalidField(absl::StrCat("words[", i, "]"), words[i],
                          absl::StrCat("below ", SharedSemaphores::kNonFiniteWords));
    }
    KV_RETURN_IF_ERROR(call->process->CheckSequence(entries[i].sequence));
    const uint64_t end = entries[i].position + static_cast<uint64_t>(entries[i].tokens);
    // Its own queries must not wait for what this step fills, since it is encoded behind them.
    const uint64_t together = rule.EndOfAppendAndAttend(entries[i].position);
    if (request.getAppend() && request.getAttend() && !cache.codec->info().identity && end > together) {
      return InvalidField(absl::StrCat("entries[", i, "].tokens"), entries[i].tokens,
                          absl::StrCat("at most ", together - entries[i].position,
                                       " in a step that appends and attends: append more in a step of their own"));
    }
    // Nor for an index that is made of them.
    if (request.getAppend() && request.getAttend()) {
      const uint64_t from =
          parts_.store->tables().SparseFrom(entries[i].sequence, entries[i].position, entries[i].tokens);
      if (from > entries[i].position && end > from) {
        return InvalidField(absl::StrCat("entries[", i, "].tokens"), entries[i].tokens,
                            absl::StrCat("at most ", from - entries[i].position,
                                         ", to the end of the prompt, in a step that appends and attends"));
      }
    }
    sealed += end / page_tokens - entries[i].position / page_tokens;
    changes += parts_.store->tables().ChangedPages(entries[i].sequence, TableKeeper::kProcess);
    // A page that its last token alone may still ask is told again (PageStore::Attend).
    if (!request.getAppend() && (entries[i].position + 1) % page_tokens == 0) changes += config.layers;
    call->words.push_back(words[i]);
  }
  const uint64_t pages = request.getAppend() ? sealed * config.layers : 0;
  KV_RETURN_IF_ERROR(call->process->CheckRoom(pages, changes));
  KV_ASSIGN_OR_RETURN(const CheckedQueryRows queries, CheckQueryRows(config, request.getQueries()));
  if (QualityMonitor* const quality = parts_.quality; quality != nullptr && !cache.codec->info().identity) {
    for (const CheckedQueryRow& row : queries) {
      quality->NoteRow(cache.id, config.layers, row.layer, config.layout.dtype, /*scale=*/0, row.q);
    }
  }
  call->reserved_flags = pages;
  call->process->ReserveFlags(pages);
  call->encode_here = request.getEncodeHere();
  call->append = request.getAppend();
  call->attend = request.getAttend();
  return Run(std::move(call), Method::kExtend, context);
}

absl::Span<uint8_t> DeviceCalls::ArenaBytes(const Session& session, const StepCache& cache, uint32_t id) const {
  const std::shared_ptr<const DeviceArena> arena = session.gpus().ArenaOf(id);
  return arena != nullptr && arena->ordinal() == cache.config->device ? arena->data() : absl::Span<uint8_t>();
}

absl::StatusOr<uint64_t> DeviceCalls::Change(Session& session, const StepCache& cache, SequenceId sequence,
                                             uint64_t pages,
                                             absl::FunctionRef<absl::Status(std::vector<OpenCopy>*)> change) const {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceWork> work, session.gpus().WorkOf(cache.config->device));
  // What this process's own kernels append comes first.
  const std::shared_ptr<ProcessSteps> process = session.gpus().FindProcessSteps(cache.config->device);
  KV_RETURN_IF_ERROR(CheckUsable(session, cache, sequence));
  if (process != nullptr && process->planned_to(sequence) != UINT64_MAX) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "sequence", absl::StrCat(sequence),
                      "one whose extend calls were answered: wait for them first");
  }
  return work->Copy(cache, sequence, pages, process == nullptr ? 0 : process->epoch(), change);
}

absl::StatusOr<Forked> DeviceCalls::Fork(Session& session, const StepCache& cache, SequenceId sequence) const {
  SequenceId fork = 0;
  const auto copied = Change(session, cache, sequence, UINT64_MAX, [&](std::vector<OpenCopy>* copies) -> absl::Status {
    KV_ASSIGN_OR_RETURN(fork, parts_.store->Fork(sequence, copies));
    return absl::OkStatus();
  });
  if (!copied.ok()) {
    if (fork != 0) parts_.store->Drop(fork);  // its open pages were not copied
    return copied.status();
  }
  if (const auto work = session.gpus().WorkOf(cache.config->device); work.ok()) (*work)->NoteFork(fork);
  return Forked{fork, *copied};
}

absl::StatusOr<uint64_t> DeviceCalls::Crop(Session& session, const StepCache& cache, SequenceId sequence,
                                           uint64_t tokens) const {
  const uint64_t page_tokens = cache.config->layout.page_tokens;
  return Change(session, cache, sequence, tokens / page_tokens + (tokens % page_tokens != 0),
                [&](std::vector<OpenCopy>* copies) { return parts_.store->Crop(sequence, tokens, copies); });
}

absl::Status DeviceCalls::CheckUsable(Session& session, const StepCache& cache, SequenceId sequence) const {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceWork> work, session.gpus().WorkOf(cache.config->device));
  const std::shared_ptr<ProcessSteps> process = session.gpus().FindProcessSteps(cache.config->device);
  if (process != nullptr) KV_RETURN_IF_ERROR(process->CheckSequence(sequence));
  return work->CheckSequence(sequence, cache.id);
}

// Behind all that was submitted and planned so far. A stream whose connection has ended passes without having waited
// for the engine, and plans of a process that is gone are released: neither says anything of what was written.
void DeviceCalls::TellWhenWritten(Session& session, const StepCache& cache, SequenceId sequence, int first_layer,
                                  std::vector<uint64_t> tokens) const {
  const std::shared_ptr<DeviceStream> stream = session.gpus().StreamOf(cache.config->device);
  if (stream == nullptr || tokens.empty()) return;
  auto poll = [store = parts_.store, stream, submitted = stream->submitted(),
               process = session.gpus().FindProcessSteps(cache.config->device), epoch = std::optional<uint64_t>(),
               sequence, first_layer, tokens = std::move(tokens)]() mutable {
    if (stream->closed() || (process != nullptr && process->closed())) return true;
    if (stream->passed() < submitted) return false;
    if (process != nullptr) {
      if (!epoch.has_value()) {
        if (process->planned_to(sequence) < *std::max_element(tokens.begin(), tokens.end())) return false;
        epoch = process->epoch();
      }
      if (!process->HasReleased(*epoch)) return false;
    }
    store->exports().Written(sequence, first_layer, tokens);
    return true;
  };
  if (!poll()) parts_.polls->Add(std::move(poll));
}

kj::Promise<absl::Status> DeviceCalls::WhenAllWritten(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                      SequenceId sequence) const {
  auto waiting = kj::newPromiseAndFulfiller<void>();
  auto work = session->gpus().WorkOf(cache.config->device);
  if (!work.ok()) return work.status();
  std::shared_ptr<ProcessSteps> process = session->gpus().FindProcessSteps(cache.config->device);
  (*work)->WhenRun([process, sequence, fulfiller = kj::mv(waiting.fulfiller)]() mutable {
    if (process == nullptr) return fulfiller->fulfill();
    process->WhenRun(sequence, [fulfiller = kj::mv(fulfiller)]() mutable { fulfiller->fulfill(); });
  });
  return waiting.promise.then([work = *work, process, id = cache.id, sequence]() -> absl::Status {
    KV_RETURN_IF_ERROR(work->CheckSequence(sequence, id));
    return process == nullptr ? absl::OkStatus() : process->CheckSequence(sequence);
  });
}

bool DeviceCalls::HasWritten(Session& session, const StepCache& cache, SequenceId sequence) const {
  const auto work = session.gpus().WorkOf(cache.config->device);
  const std::shared_ptr<ProcessSteps> process = session.gpus().FindProcessSteps(cache.config->device);
  return work.ok() && (*work)->HasWritten(sequence) && (process == nullptr || process->HasWritten(sequence));
}

bool DeviceCalls::GoesByHost(const absl::Status& why) const {
  return absl::IsResourceExhausted(why) || WantsHostPages(why) || IsWrongMemory(why);
}

}  // namespace kvmanager