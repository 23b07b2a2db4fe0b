#include "kvmanager/rpc/block_lease.h"

#include <utility>

#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/slab_service.h"

namespace kvmanager {
namespace {

constexpr uint32_t kIntact = UINT32_MAX;

}  // namespace

BlockLeaseService::BlockLeaseService(std::shared_ptr<Session> session, std::shared_ptr<const void> place,
                                     const Parts& parts, WorkerPool::Owner owner, Held held)
    : session_(std::move(session)),
      place_(std::move(place)),
      parts_(parts),
      owner_(owner),
      reads_(held.reads.release(), [pages = std::move(held.pages)](BlockReads* reads) { delete reads; }) {
  if (parts_.timer == nullptr) return;
  ending_ = parts_.timer->afterDelay(parts_.ms * kj::MILLISECONDS).then([this] { End(); }).eagerlyEvaluate(nullptr);
}

absl::Status BlockLeaseService::CheckHeld() const {
  if (over_) {
    return absl::UnavailableError(
        absl::StrCat("the lease ended after ", parts_.ms, " ms: its pages are not held any more"));
  }
  if (reads_ == nullptr) return absl::FailedPreconditionError("the lease was released before");
  return reads_->closed() ? absl::UnavailableError("the daemon ends: the pages are not held any more")
                          : absl::OkStatus();
}

void BlockLeaseService::End() {
  if (reads_ == nullptr) return;
  over_ = true;
  if (parts_.disposals == nullptr) return static_cast<void>(reads_ = nullptr);
  // Many may end at once: in turns.
  parts_.disposals->Make<std::shared_ptr<BlockReads>>(std::exchange(reads_, nullptr));
}

kj::Promise<void> BlockLeaseService::release(ReleaseContext context) {
  return Serve(*session_, Method::kReleaseBlocks, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
    KV_RETURN_IF_ERROR(CheckHeld());
    const uint32_t block = context.getParams().getCorruptBlock();
    if (block == kIntact) {
      reads_ = nullptr;
      return Done();
    }
    if (block >= reads_->blocks()) {
      return InvalidField("corruptBlock", block, absl::StrCat("below ", reads_->blocks(), ", or ", kIntact));
    }
    const std::shared_ptr<BlockReads> reads = std::exchange(reads_, nullptr);
    const size_t layers = reads->pages().size() / reads->blocks();
    struct Comparing {
      size_t page, end;
      bool intact = true;
    };
    auto comparing = std::make_shared<Comparing>();
    comparing->page = block * layers;
    comparing->end = comparing->page + layers;
    return OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kAttend, owner_,
                           [reads, comparing] {
                             if (comparing->page == comparing->end) return false;
                             comparing->intact = reads->Compare(comparing->page++);
                             return comparing->intact;
                           })
        .then([reads, comparing, block] { reads->NoteCompared(block, comparing->intact); })
        .attach(thisCap());
  });
}

kj::Promise<void> BlockLeaseService::mapSlab(MapSlabContext context) {
  return Serve(*session_, Method::kMapBlocks, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
    KV_RETURN_IF_ERROR(CheckHeld());
    KV_ASSIGN_OR_RETURN(auto place, ReserveSlab(session_));
    KV_ASSIGN_OR_RETURN(const ShownSlab shown, reads_->ShowSlab(context.getParams().getSlab()));
    auto results = context.getResults();
    results.setSlab(kj::heap<SlabService>(shown.fd, std::move(place)));
    results.setBytes(shown.bytes);
    return Done();
  });
}

}  // namespace kvmanager
