#include "kvmanager/handoff/list_export.h"

#include <utility>

#include "kvmanager/base/worker_pool.h"

namespace kvmanager {
namespace {

using Listed = absl::StatusOr<std::unique_ptr<ExportLease>>;

// Shared by the promise and by the message that goes on with it.
struct ExportListing {
  HandOffTurns* turns;
  std::string payer;
  std::unique_ptr<ExportBeginning> beginning;  // nullptr: nobody waits any more
  kj::Own<kj::PromiseFulfiller<Listed>> fulfiller;

  // False: it is listed.
  bool DoSome() {
    bool more = true;
    for (const Turn turn(HandOffTurns::kPiece); more && !turn.over();) {
      more = beginning->DoPiece() != LongCall::Next::kDone;
    }
    return more;
  }
  Listed Commit() { return std::exchange(beginning, nullptr)->Commit(); }
  static void Post(std::shared_ptr<ExportListing> self) {
    ExportListing& listing = *self;
    listing.turns->Post(listing.payer, [self = std::move(self)]() mutable {
      if (self->beginning == nullptr) return;
      if (self->DoSome()) return Post(std::move(self));
      self->fulfiller->fulfill(self->Commit());
    });
  }
};

}  // namespace

kj::Promise<Listed> ListExport(HandOffTurns* turns, const std::string& payer,
                               absl::StatusOr<std::unique_ptr<ExportBeginning>> beginning) {
  if (!beginning.ok()) return Listed(beginning.status());
  auto listing = std::make_shared<ExportListing>(ExportListing{turns, payer, *std::move(beginning), {}});
  if (!listing->DoSome()) return listing->Commit();
  auto pair = kj::newPromiseAndFulfiller<Listed>();
  listing->fulfiller = kj::mv(pair.fulfiller);
  ExportListing::Post(listing);
  return pair.promise.attach(kj::defer([listing] { listing->beginning = nullptr; }));
}

}  // namespace kvmanager
