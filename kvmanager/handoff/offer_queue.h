// Hand-offs that wait for room here, in the order of coming. None passes another of its payer, so that a large one is
// not passed for ever by small ones. Between payers the pool's shares decide. The loop's thread.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {

/// Offer: has `std::string payer` (payer_name.h).
template <typename Offer>
class OfferQueue {
 public:
  /// Whether one that comes now need not wait for others. Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckTurn(absl::string_view payer) const {
    const size_t own = CountOf(payer);
    return own == 0 ? absl::OkStatus() : Refused(kOfTenant, own, "none, for another to be received at once");
  }
  /// Whether one more may wait. Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckPlace(absl::string_view payer) const {
    const size_t own = CountOf(payer);
    if (own >= limits::kTenantOffersWaitingMax) {
      return Refused(kOfTenant, own, absl::StrCat("below ", limits::kTenantOffersWaitingMax));
    }
    if (size() >= limits::kOffersWaitingMax) {
      return Refused("", size(), absl::StrCat("below ", limits::kOffersWaitingMax));
    }
    return absl::OkStatus();
  }
  void Push(std::shared_ptr<Offer> offer) { waiting_.push_back(std::move(offer)); }
  /// The same offer, which waits no more; nullptr: it did not.
  std::shared_ptr<Offer> Take(const Offer* offer) {
    const auto found =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& each) { return each.get() == offer; });
    if (found == waiting_.end()) return nullptr;
    std::shared_ptr<Offer> taken = std::move(*found);
    waiting_.erase(found);
    return taken;
  }
  std::deque<std::shared_ptr<Offer>> TakeAll() { return std::exchange(waiting_, {}); }
  /// Whose turn it is: the first of a payer that is not among `full`, for whom there was no room. It goes on waiting;
  /// nullptr: nobody's.
  std::shared_ptr<Offer> Next(const std::vector<std::string>& full) const {
    for (const auto& each : waiting_) {
      if (std::find(full.begin(), full.end(), each->payer) == full.end()) return each;
    }
    return nullptr;
  }

  bool empty() const { return waiting_.empty(); }
  size_t size() const { return waiting_.size(); }
  const std::deque<std::shared_ptr<Offer>>& all() const { return waiting_; }

 private:
  size_t CountOf(absl::string_view payer) const {
    return static_cast<size_t>(
        std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& each) { return each->payer == payer; }));
  }
  static absl::Status Refused(absl::string_view whose, size_t has, absl::string_view bound) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("hand-offs that wait for room", whose),
                      absl::StrCat(has), bound);
  }

  std::deque<std::shared_ptr<Offer>> waiting_;
};

}  // namespace kvmanager
