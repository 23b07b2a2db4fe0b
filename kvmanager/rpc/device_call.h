// What calls of a cache on a GPU have in common: what they keep until their replies, and how they wait for room. Of
// device_calls.cc and device_step_call.cc alone.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/device_calls.h"
#include "kvmanager/rpc/serve.h"

namespace kvmanager::device_calls {

// While kernels still read what was given up, or the stream is far behind.
inline constexpr int64_t kRetryUs = 200, kRetryForMs = 1000;
inline constexpr size_t kReplyWords = 32;  // of a reply without its data

using Entries = absl::InlinedVector<AttendEntry, 4>;

inline absl::Status ExtendOnce(PageStore& store, CacheId cache, int first_layer, int layers, const Entries& entries) {
  absl::InlinedVector<AppendEntry, 4> appends;
  appends.reserve(entries.size());
  for (const AttendEntry& entry : entries) appends.push_back({entry.sequence, entry.position, entry.tokens});
  return store.Append(cache, {first_layer, layers}, appends);
}

// Resolves when the lease is ready.
inline kj::Promise<void> WhenReady(AttendLease& lease) {
  auto waiting = kj::newPromiseAndFulfiller<void>();
  lease.OnReady([fulfiller = kj::mv(waiting.fulfiller)]() mutable { fulfiller->fulfill(); });
  return kj::mv(waiting.promise);
}

// What a call keeps until its reply: shared by its promises.
struct Call {
  const DeviceCalls& calls;
  std::shared_ptr<Session> session;
  StepCache cache;
  CacheConfig config;
  Entries entries;
  bool append = false;
  std::unique_ptr<AttendLease> lease;

  Call(const DeviceCalls& the_calls, const std::shared_ptr<Session>& the_session, const StepCache& the_cache,
       const Entries& the_entries)
      : calls(the_calls), session(the_session), cache(the_cache), config(*the_cache.config), entries(the_entries) {
    cache.config = &config;
  }
  const DeviceCalls::Parts& parts() const { return calls.parts(); }
  // Reserves an append to `layers` layers from `first_layer` on.
  absl::Status Extend(int first_layer, int layers) {
    return append ? ExtendOnce(*parts().store, cache.id, first_layer, layers, entries) : absl::OkStatus();
  }
  bool MayFitSoon(const absl::Status& status) const {
    return absl::IsResourceExhausted(status) && parts().store->tables().AwaitsRelease(config.device);
  }
  bool IsBehind() const { return false; }
  // Of the lease's entries.
  std::vector<EntryReading> Readings(size_t count) const {
    std::vector<EntryReading> readings(count);
    for (size_t i = 0; i < count; ++i) readings[i] = {lease->aged(i), lease->sparse_from(i)};
    return readings;
  }
  // What was reserved is submitted, or planned: hand-offs of these sequences hear when it is written.
  void TellFollowers(int first_layer, int layers) {
    for (const AttendEntry& entry : entries) {
      if (!parts().store->exports().AwaitsWrites(entry.sequence)) continue;
      const uint64_t end = entry.position + static_cast<uint64_t>(entry.tokens);
      calls.TellWhenWritten(*session, cache, entry.sequence, first_layer, std::vector<uint64_t>(layers, end));
    }
  }
  /// Trainings begin when everything that was submitted and planned so far has run.
  void PostIndexJobs(std::vector<DeviceIndexJob> jobs) {
    if (jobs.empty()) return;
    const auto work = session->gpus().WorkOf(config.device);
    Gpu* const gpu = FindGpu(parts().gpus, config.device);
    KV_CHECK(gpu != nullptr);  // a cache is on a GPU of this daemon
    const std::shared_ptr<ProcessSteps> process = session->gpus().FindProcessSteps(config.device);
    const std::shared_ptr<DeviceStream> stream = work.ok() ? (*work)->stream() : nullptr;
    parts().polls->Add([stream, submitted = stream == nullptr ? 0 : stream->submitted(), process,
                        epoch = process == nullptr ? 0 : process->epoch(), indexes = gpu->indexes(),
                        codec = cache.device_codec, jobs = std::move(jobs)]() mutable {
      if (stream != nullptr && stream->passed() < submitted) return false;
      if (process != nullptr && !process->HasReleased(epoch)) return false;
      for (DeviceIndexJob& job : jobs) indexes->Post(codec, std::move(job));
      return true;
    });
  }
};

// Tries until there is room, and then goes on.
template <typename TheCall>
kj::Promise<absl::Status> TryLater(std::shared_ptr<TheCall> call, int64_t until_ns) {
  return call->parts().loop->fine_timer().AfterUs(kRetryUs).then(
      [call, until_ns]() mutable -> kj::Promise<absl::Status> {
        const absl::Status reserved = call->Reserve();
        if (reserved.ok()) return call->Proceed(call);
        const int64_t now_ns = call->parts().clock->NowNs();
        if (!call->MayFitSoon(reserved) || now_ns > until_ns) return reserved;
        return TryLater(call, call->IsBehind() ? now_ns + kRetryForMs * 1000000 : until_ns);
      });
}

// Reserves the append if there is one, goes on, and replies: at once where it can.
template <typename TheCall, typename Context>
absl::StatusOr<kj::Promise<void>> Run(std::shared_ptr<TheCall> call, Method method, Context& context) {
  const absl::Status reserved = call->Reserve();
  kj::Promise<absl::Status> over = absl::OkStatus();
  if (reserved.ok()) {
    over = call->Proceed(call);
  } else if (call->MayFitSoon(reserved)) {
    over = TryLater(call, call->parts().clock->NowNs() + kRetryForMs * 1000000);
  } else {
    return reserved;
  }
  context.releaseParams();
  return over.then([call, context, method](absl::Status status) mutable {
    if (status.ok()) return call->WriteReply(context);
    ServeError(*call->session, method, status, context);
  });
}

}  // namespace kvmanager::device_calls
