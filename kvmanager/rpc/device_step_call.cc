#include "kvmanager/rpc/device_step_call.h"

#include <utility>
#include <vector>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// While a step's earlier launches are in the stream: as long as an engine's own work before them may take.
constexpr int64_t kNextLaunchForMs = 10000;

}  // namespace

absl::Status DeviceStepCall::Reserve() {
  if (!MayGo() || !work->HasRoom()) {
    return absl::ResourceExhaustedError("the stream of this connection is too far behind");
  }
  return Extend(layer, 1);
}

kj::Promise<absl::Status> DeviceStepCall::Proceed(const std::shared_ptr<DeviceStepCall>& self) {
  const absl::StatusOr<Next> next = SubmitSome();
  // What waits for pages has its turn again when they are there; but nothing is appended between a step's launches.
  const bool goes_on = next.ok() && (*next == Next::kLaunch || (*next == Next::kLease && cut_));
  if (!goes_on) turn.End();
  KV_RETURN_IF_ERROR(next.status());
  if (*next == Next::kNothing) return absl::OkStatus();
  // Once it is ready it is read again: which pages were declined is known only then.
  if (*next == Next::kLease) return device_calls::WhenReady(*lease).then([self] { return self->Proceed(self); });
  cut_ = true;
  if (!turn.taken()) turn = work->turns().TakeFirst();
  next_until_ns_ = parts().clock->NowNs() + kNextLaunchForMs * 1000000;
  return Later(self);
}

kj::Promise<absl::Status> DeviceStepCall::Later(const std::shared_ptr<DeviceStepCall>& self) {
  return parts().loop->fine_timer().AfterUs(device_calls::kRetryUs).then([self]() -> kj::Promise<absl::Status> {
    if (self->MayGo() && self->work->HasRoomForLaunch()) return self->Proceed(self);
    if (self->parts().clock->NowNs() <= self->next_until_ns_) return self->Later(self);
    self->turn.End();
    return absl::ResourceExhaustedError("the stream of this connection is too far behind for the rest of the step");
  });
}

absl::StatusOr<DeviceStepCall::Next> DeviceStepCall::SubmitSome() {
  if (tensors.q == nullptr) {
    KV_RETURN_IF_ERROR(Append());
    return Next::kNothing;
  }
  auto read = parts().store->Attend(cache.id, layer, rest);
  if (!read.ok()) {
    (void)Append();  // what was reserved is appended all the same
    return read.status();
  }
  lease = *std::move(read);
  if (!lease->ready()) {
    if (tensors.k == nullptr) PostIndexJobs(work->gpu().encode_queue()->TakeIndexJobs());
    KV_RETURN_IF_ERROR(Append());
    return Next::kLease;
  }
  const std::vector<EntryReading> readings = Readings(rest.size());
  const LaunchCut cut = work->CutOf(cache, layer, rest, readings, pages_);
  if (cut.entries < rest.size() || cut.tokens_of_last < rest.back().tokens) KV_RETURN_IF_ERROR(Append());
  Entries now(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(cut.entries));
  now.back().tokens = cut.tokens_of_last;
  KV_ASSIGN_OR_RETURN(const bool attended, Submit(now, absl::MakeConstSpan(readings).first(cut.entries), tensors));
  if (!attended) {
    pages_ = ReadForm::kRaw;
    return Next::kLaunch;
  }
  return Drop(now) ? Next::kLaunch : Next::kNothing;
}

absl::Status DeviceStepCall::Append() {
  if (tensors.k == nullptr) return absl::OkStatus();
  return Submit(entries, {}, {.k = tensors.k, .v = tensors.v, .ready = tensors.ready}).status();
}

absl::StatusOr<bool> DeviceStepCall::Submit(const Entries& of, absl::Span<const EntryReading> readings,
                                            const DeviceTensors& what) {
  const bool appends = what.k != nullptr;
  const auto submitted = work->Submit(cache, layer, of, readings, what, pages_, &counts_);
  tensors.k = tensors.v = nullptr;
  PostIndexJobs(work->gpu().encode_queue()->TakeIndexJobs());
  KV_RETURN_IF_ERROR(submitted.status());
  done_ = submitted->done;
  if (appends) TellFollowers(layer, 1);
  return submitted->attended;
}

bool DeviceStepCall::Drop(const Entries& attended) {
  size_t rows = 0;
  for (const AttendEntry& entry : attended) rows += static_cast<size_t>(entry.tokens);
  AttendEntry& last = rest[attended.size() - 1];
  last.position += static_cast<uint64_t>(attended.back().tokens);
  last.tokens -= attended.back().tokens;
  const size_t ended = attended.size() - (last.tokens > 0 ? 1 : 0);
  rest.erase(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(ended));
  const size_t heads = static_cast<size_t>(config.query_heads);
  const size_t bytes = rows * heads * config.layout.head_dim * DTypeBytes(config.layout.dtype);
  tensors.q = static_cast<const uint8_t*>(tensors.q) + bytes;
  tensors.out = static_cast<uint8_t*>(tensors.out) + bytes;
  if (tensors.lse != nullptr) tensors.lse += rows * heads;
  return !rest.empty();
}

void DeviceStepCall::WriteReply(StepContext& context) {
  auto reply = context.getResults(capnp::MessageSize{device_calls::kReplyWords, 0}).initReply();
  reply.setDone(done_);
  reply.setEncodedPairs(counts_.encoded_pairs);
  reply.setRawPairs(counts_.raw_pairs);
  AttendMetrics& metrics = *parts().metrics;
  metrics.encoded_pairs.Increment(static_cast<double>(counts_.encoded_pairs));
  metrics.raw_pairs.Increment(static_cast<double>(counts_.raw_pairs));
  if (tensors.q != nullptr) metrics.tokens.Increment(static_cast<double>(tokens));
}

}  // namespace kvmanager
