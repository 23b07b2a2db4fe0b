#include "kvmanager/handoff/arrivals.h"

namespace kvmanager {
namespace {

constexpr int64_t kRetryUs = 200, kRetryForMs = 1000;

}  // namespace

// The lease is shared by the promises that carry it on, one after the other.
kj::Promise<absl::StatusOr<Arrived>> Arrivals::GoOn(std::shared_ptr<ArrivalLease> lease, int64_t until_ns) const {
  if (!lease->ready()) {
    auto waiting = kj::newPromiseAndFulfiller<void>();
    lease->OnReady([fulfiller = kj::mv(waiting.fulfiller)]() mutable { fulfiller->fulfill(); });
    return waiting.promise.then(
        [this, lease = std::move(lease), until_ns]() mutable { return GoOn(std::move(lease), until_ns); });
  }
  if (lease->awaits_room() && store_->tables().AwaitsRelease(lease->device()) && clock_->NowNs() < until_ns) {
    return loop_->fine_timer().AfterUs(kRetryUs).then([this, lease = std::move(lease), until_ns]() mutable {
      lease->TryAgain();
      return GoOn(std::move(lease), until_ns);
    });
  }
  absl::StatusOr<CreateResult> made = lease->Commit();
  if (!made.ok()) return absl::StatusOr<Arrived>(made.status());
  return absl::StatusOr<Arrived>(Arrived(store_, *made));
}

kj::Promise<absl::StatusOr<Arrived>> Arrivals::Await(absl::StatusOr<std::unique_ptr<ArrivalLease>> lease) const {
  if (!lease.ok()) return absl::StatusOr<Arrived>(lease.status());
  return GoOn(*std::move(lease), clock_->NowNs() + kRetryForMs * 1000000);
}

}  // namespace kvmanager
