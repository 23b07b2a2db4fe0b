#include "kvmanager/rpc/step_call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using Parts = HostCalls::Parts;
using Entries = absl::InlinedVector<AttendEntry, 4>;

constexpr size_t kReplyWords = 32;  // of a StepReply without its outputs

// Where a step's attention reads and writes.
struct Rows {
  const uint8_t* q = nullptr;
  uint8_t* out = nullptr;
  float* lse = nullptr;
};

// part: of the step's entries, from `from` on.
std::unique_ptr<AttentionPlan> MakePlan(const StepCache& cache, const CheckedStep& step, const AttendLease& lease,
                                        const Rows& rows, StepCursor from, const Entries& part, int threads) {
  const PageLayout& layout = cache.config->layout;
  const size_t row_bytes = size_t(cache.config->query_heads) * layout.head_dim * DTypeBytes(step.q_dtype);
  size_t row = 0;
  for (size_t i = 0; i < from.entry; ++i) row += step.entries[i].tokens;
  row += from.token;
  absl::InlinedVector<AttentionSequence, 4> sequences(part.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    AttentionSequence& sequence = sequences[i];
    const uint64_t last = part[i].position + part[i].tokens - 1;
    sequence.pages = lease.pages(from.entry + i).subspan(0, last / layout.page_tokens + 1);
    sequence.selector = lease.selector(from.entry + i);
    sequence.first_position = part[i].position;
    sequence.tokens = part[i].tokens;
    sequence.q = rows.q + row * row_bytes;
    sequence.out = rows.out + row * row_bytes;
    if (rows.lse != nullptr) sequence.lse = rows.lse + row * cache.config->query_heads;
    row += part[i].tokens;
  }
  AttentionBatch batch;
  batch.codec = cache.codec.get();
  batch.raw_attention = &cache.raw->attention();
  batch.layout = layout;
  batch.layer = step.layer;
  batch.query_heads = cache.config->query_heads;
  batch.lag_pages = cache.config->lag_pages;
  batch.scale = step.scale;
  batch.q_dtype = step.q_dtype;
  batch.owner = cache.owner;
  batch.sequences = sequences;
  return AttentionPlan::Make(batch, threads);
}

// Of an identity codec every form is the raw one.
void AddCounts(const AttentionPlan& plan, const StepCache& cache, AttentionCounts* counts) {
  const AttentionCounts of = plan.counts();
  const bool identity = cache.codec->info().identity;
  counts->raw_pairs += of.raw_pairs + (identity ? of.encoded_pairs : 0);
  counts->encoded_pairs += identity ? 0 : of.encoded_pairs;
}

void Count(const Parts& parts, const CheckedStep& step, const AttentionCounts& counts, int64_t start_ns,
           prometheus::Histogram& seconds) {
  seconds.Observe(double(parts.clock->NowNs() - start_ns) * 1e-9);
  parts.metrics->encoded_pairs.Increment(double(counts.encoded_pairs));
  parts.metrics->raw_pairs.Increment(double(counts.raw_pairs));
  parts.metrics->tokens.Increment(double(step.tokens));
}

capnp::MessageSize ReplySize(const CheckedStep& step) {
  uint64_t bytes = 0;
  if (!step.out.given()) bytes += step.out_bytes + sizeof(capnp::word);
  if (step.lse_inline) bytes += step.lse_bytes + sizeof(capnp::word);
  return {bytes / sizeof(capnp::word) + kReplyWords, 0};
}

}  // namespace

void AttendOnLoop(const Parts& parts, const StepCache& cache, const CheckedStep& step, const AttendLease& lease,
                  StepContext& context) {
  auto reply = context.getResults(ReplySize(step)).initReply();
  Rows rows;
  rows.q = step.q.bytes.data();
  rows.out = step.out.given() ? step.out.bytes.data() : reply.initOut(step.out_bytes).begin();
  if (step.lse_bytes != 0) {
    rows.lse =
        reinterpret_cast<float*>(step.lse.given() ? step.lse.bytes.data() : reply.initLse(step.lse_bytes).begin());
  }
  const int64_t start_ns = parts.clock->NowNs();
  const std::unique_ptr<AttentionPlan> plan = MakePlan(cache, step, lease, rows, {}, step.entries, 1);
  plan->RunHere();
  AttentionCounts counts;
  AddCounts(*plan, cache, &counts);
  reply.setEncodedPairs(counts.encoded_pairs);
  reply.setRawPairs(counts.raw_pairs);
  Count(parts, step, counts, start_ns, parts.metrics->loop_seconds);
}

Entries NextPart(absl::Span<const AttendEntry> entries, uint32_t page_tokens,
                 absl::FunctionRef<bool(size_t entry)> whole, StepCursor* cursor) {
  Entries part;
  uint64_t pages = 0;
  for (; cursor->entry < entries.size() && part.size() < kPlanEntriesMax && pages < kPlanPagesMax;) {
    const AttendEntry& entry = entries[cursor->entry];
    AttendEntry& of = part.emplace_back(entry);
    of.position += cursor->token;
    of.tokens = 0;
    // By the pages that its queries are in, each of which reads all before it.
    for (const int left = entry.tokens - cursor->token;
         of.tokens < left && (pages < kPlanPagesMax || whole(cursor->entry));) {
      const uint64_t at = of.position + of.tokens;
      pages += at / page_tokens + 1;
      of.tokens += static_cast<int>(std::min<uint64_t>(page_tokens - at % page_tokens, left - of.tokens));
    }
    cursor->token += of.tokens;
    if (cursor->token < entry.tokens) break;
    *cursor = {cursor->entry + 1, 0};
  }
  return part;
}

StepCall::StepCall(const Parts& parts, const StepCache& cache, const CheckedStep& step,
                   std::unique_ptr<AttendLease> lease)
    : parts_(parts),
      cache_(cache),
      waits_(WaitingWorkers(*cache.codec) != nullptr),
      workers_(WorkersOf(*cache.codec, parts.workers)),
      config_(*cache.config),
      step_(step),
      lease_(std::move(lease)) {
  cache_.config = &config_;
  // The request goes with the call's context.
  step_.k = step_.v = step_.x = StepTensor();
}

StepCall::~StepCall() {
  charge_.Keep(std::move(out_));
  charge_.Keep(std::move(lse_));
}

uint64_t StepCall::bytes_to_reserve() const {
  return (step_.out.given() ? 0 : SessionMessages::BytesToReserve(step_.out_bytes)) +
         (step_.lse_inline ? SessionMessages::BytesToReserve(step_.lse_bytes) : 0) +
         (copies_q() ? step_.q.bytes.size() : 0);
}

kj::Promise<void> StepCall::Begin(MessageShare::Charge charge) {
  charge_ = std::move(charge);
  status_ = Allocate();
  if (!status_.ok()) return kj::READY_NOW;
  auto waiting = kj::newPromiseAndFulfiller<void>();
  fulfiller_ = kj::mv(waiting.fulfiller);
  lease_->OnReady([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->Run();
  });
  return kj::mv(waiting.promise);
}

void StepCall::GiveUp() {
  given_up_ = true;
  if (plan_ != nullptr) plan_->Cancel();
}

void StepCall::WriteReply(Session& session, StepContext& context) {
  auto reply = context.getResults(capnp::MessageSize{kReplyWords, 0}).initReply();
  const auto orphanage = capnp::Orphanage::getForMessageContaining(reply);
  if (!step_.out.given()) reply.adoptOut(SessionMessages::DataOf(orphanage, out_));
  if (step_.lse_inline) reply.adoptLse(SessionMessages::DataOf(orphanage, lse_));
  reply.setEncodedPairs(counts_.encoded_pairs);
  reply.setRawPairs(counts_.raw_pairs);
  q_copy_ = AlignedBuffer();
  MessageShare::Lent parts;
  parts.push_back(std::move(out_));
  parts.push_back(std::move(lse_));
  session.messages().SendReply(std::move(charge_), std::move(parts));
}

absl::Status StepCall::Allocate() {
  if (Fails(Failpoint::kStepAllocate)) return absl::ResourceExhaustedError("failpoint step.allocate");
  if (copies_q()) {
    KV_ASSIGN_OR_RETURN(q_copy_, AlignedBuffer::Make("q", step_.q.bytes.size()));
    std::memcpy(q_copy_.data(), step_.q.bytes.data(), q_copy_.size());
    step_.q.bytes = q_copy_.span();
  }
  if (!step_.out.given()) {
    KV_ASSIGN_OR_RETURN(out_, charge_.Make("out", step_.out_bytes));
  }
  if (step_.lse_inline) {
    KV_ASSIGN_OR_RETURN(lse_, charge_.Make("lse", step_.lse_bytes));
  }
  return absl::OkStatus();
}

void StepCall::Run() {
  status_ = lease_->status();
  if (!status_.ok()) {
    fulfiller_->fulfill();
    return;
  }
  start_ns_ = parts_.clock->NowNs();
  unanswered_ = UnansweredBy(*cache_.codec);
  RunNextPart();
}

void StepCall::RunNextPart() {
  if (given_up_) return;
  Rows rows;
  rows.q = step_.q.bytes.data();
  rows.out = step_.out.given() ? step_.out.bytes.data() : out_.data();
  if (step_.lse_bytes != 0) {
    rows.lse = reinterpret_cast<float*>(step_.lse.given() ? step_.lse.bytes.data() : lse_.data());
  }
  const StepCursor from = cursor_;
  // A selector serves all queries of its entry.
  const auto whole = [this](size_t entry) { return lease_->selector(entry) != nullptr; };
  const Entries part = NextPart(step_.entries, config_.layout.page_tokens, whole, &cursor_);
  plan_ = MakePlan(cache_, step_, *lease_, rows, from, part, here() ? 1 : workers_->threads());
  if (here()) {
    plan_->RunHere();
    FinishPart();
    return;
  }
  plan_->Run(*workers_, [queue = parts_.queue, self = shared_from_this()]() mutable {
    queue->Post([self = std::move(self)] { self->FinishPart(); });
  });
}

void StepCall::FinishPart() {
  if (given_up_) return;
  if (UnansweredBy(*cache_.codec) != unanswered_) {
    status_ = absl::UnavailableError(absl::StrCat("the process of codec ", cache_.codec->info().name,
                                                  ", a plug-in, did not answer, and is started again: what was to be "
                                                  "appended is; attend again"));
    fulfiller_->fulfill();
    return;
  }
  AddCounts(*plan_, cache_, &counts_);
  if (cursor_.entry < step_.entries.size()) return RunNextPart();
  Count(parts_, step_, counts_, start_ns_, here() ? parts_.metrics->loop_seconds : parts_.metrics->worker_seconds);
  fulfiller_->fulfill();
}

}  // namespace kvmanager
