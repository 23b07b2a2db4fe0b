// Receiving a sequence: slots for pages that arrive in any order, and the sequence that they become.
// On the store's thread.
#pragma once

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/imported_sequence.h"

namespace kvmanager {

class SequenceImports final : public Imports {
 public:
  explicit SequenceImports(ImportParts parts) : parts_(std::move(parts)) {}

  absl::StatusOr<std::unique_ptr<Importing>> Begin(std::shared_ptr<const HandOffHeader> header,
                                                   std::shared_ptr<const Codec> codec,
                                                   OwnedRecomputeChoice recompute) override;
  void OnRoom(absl::AnyInvocable<void()> fn) override { on_room_ = std::move(fn); }
  /// Host memory was given back, or can be evicted.
  void RoomCame();

 private:
  const ImportParts parts_;
  absl::AnyInvocable<void()> on_room_;
};

}  // namespace kvmanager
