#include "kvmanager/handoff/arrivals.h"

namespace kvmanager {
namespace {

constexpr int64_t kRetryUs = 200, kRetryForMs = 1000;

struct Arriving {
  DaemonContext& daemon;
  const int64_t until_ns;
  std::unique_ptr<ArrivalLease> lease;
};

kj::Promise<absl::StatusOr<Arrived>> Go(std::shared_ptr<Arriving> arriving) {
  ArrivalLease& lease = *arriving->lease;
  DaemonContext& daemon = arriving->daemon;
  if (!lease.ready()) {
    auto waiting = kj::newPromiseAndFulfiller<void>();
    lease.OnReady([fulfiller = kj::mv(waiting.fulfiller)]() mutable { fulfiller->fulfill(); });
    return waiting.promise.then([arriving = std::move(arriving)]() mutable { return Go(std::move(arriving)); });
  }
  if (lease.awaits_room() && daemon.store->AwaitsRelease(lease.device()) &&
      daemon.clock->NowNs() < arriving->until_ns) {
    return daemon.loop->fine_timer().AfterUs(kRetryUs).then([arriving = std::move(arriving)]() mutable {
      arriving->lease->TryAgain();
      return Go(std::move(arriving));
    });
  }
  absl::StatusOr<CreateResult> made = lease.Commit();
  if (!made.ok()) return absl::StatusOr<Arrived>(made.status());
  return absl::StatusOr<Arrived>(Arrived(daemon.store, *made));
}

}  // namespace

kj::Promise<absl::StatusOr<Arrived>> Arrive(DaemonContext& daemon,
                                            absl::StatusOr<std::unique_ptr<ArrivalLease>> lease) {
  if (!lease.ok()) return absl::StatusOr<Arrived>(lease.status());
  const int64_t until_ns = daemon.clock->NowNs() + kRetryForMs * 1000000;
  return Go(std::shared_ptr<Arriving>(new Arriving{daemon, until_ns, *std::move(lease)}));
}

}  // namespace kvmanager
