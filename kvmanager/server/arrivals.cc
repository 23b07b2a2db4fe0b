#include "kvmanager/server/arrivals.h"

#include <memory>
#include <utility>

namespace kvmanager {
namespace {

constexpr int64_t kRetryUs = 200, kRetryForMs = 1000;

struct Arriving {
  DaemonContext& daemon;
  const int device;
  const int64_t until_ns;
  absl::AnyInvocable<absl::StatusOr<std::unique_ptr<ArrivalLease>>()> start;
  std::unique_ptr<ArrivalLease> lease;

  bool MayFitSoon(const absl::Status& status) const {
    return absl::IsResourceExhausted(status) && daemon.store->AwaitsRelease(device) && daemon.clock->NowNs() < until_ns;
  }
};

kj::Promise<absl::StatusOr<CreateResult>> Go(const std::shared_ptr<Arriving>& arriving);

kj::Promise<absl::StatusOr<CreateResult>> GoLater(const std::shared_ptr<Arriving>& arriving) {
  return arriving->daemon.loop->timer().afterDelay(kRetryUs * kj::MICROSECONDS).then([arriving] {
    return Go(arriving);
  });
}

kj::Promise<absl::StatusOr<CreateResult>> Go(const std::shared_ptr<Arriving>& arriving) {
  absl::StatusOr<std::unique_ptr<ArrivalLease>> lease = arriving->start();
  if (!lease.ok()) {
    if (arriving->MayFitSoon(lease.status())) return GoLater(arriving);
    return absl::StatusOr<CreateResult>(lease.status());
  }
  if ((*lease)->ready()) return (*lease)->Commit();
  arriving->lease = *std::move(lease);
  auto waiting = kj::newPromiseAndFulfiller<void>();
  arriving->lease->OnReady([fulfiller = kj::mv(waiting.fulfiller)]() mutable { fulfiller->fulfill(); });
  return waiting.promise.then([arriving]() -> kj::Promise<absl::StatusOr<CreateResult>> {
    absl::StatusOr<CreateResult> made = arriving->lease->Commit();
    arriving->lease = nullptr;
    if (!made.ok() && arriving->MayFitSoon(made.status())) return GoLater(arriving);
    return made;
  });
}

}  // namespace

kj::Promise<absl::StatusOr<CreateResult>> Arrive(
    DaemonContext& daemon, int device, absl::AnyInvocable<absl::StatusOr<std::unique_ptr<ArrivalLease>>()> start) {
  const int64_t until_ns = daemon.clock->NowNs() + kRetryForMs * 1000000;
  return Go(std::shared_ptr<Arriving>(new Arriving{daemon, device, until_ns, std::move(start), nullptr}));
}

}  // namespace kvmanager
