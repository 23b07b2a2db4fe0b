// Moves pages between one GPU and the host's pool, for the store and for what engines encoded in device arenas: on a
// stream of its own, behind attention. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/stream_progress.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/page_mover.h"

namespace kvmanager {

class DeviceMover final : public PageMover {
 public:
  /// Everything given outlives it. It goes when nothing is on its way (Drain).
  static absl::StatusOr<std::unique_ptr<DeviceMover>> Create(const Device* device, PollList* polls,
                                                             PageCopyMethod method = PageCopyMethod::kBest);
  /// Of the host's pool; nothing moves before it is done.
  void SetPinner(const HostPinner* pinner) { pinner_ = pinner; }

  bool ready() const override;
  absl::Status status() const override;
  void Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) override;
  /// As StreamProgress's.
  bool Drain(int64_t deadline_ms) { return progress_.Drain(deadline_ms); }

 private:
  DeviceMover(const Device* device, std::unique_ptr<NumberedStream> stream, PollList* polls, PageCopyMethod method);

  const Device* const device_;
  const PageCopyMethod method_;
  const HostPinner* pinner_ = nullptr;
  StreamProgress progress_;
};

}  // namespace kvmanager
