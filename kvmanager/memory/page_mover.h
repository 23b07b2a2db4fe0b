// Moving pages between a GPU's memory and the host's: what is moved, and who does it for the store.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace kvmanager {

enum class PageDirection : uint8_t {
  kFetch,   // pinned host memory to the device
  kDemote,  // the device to pinned host memory
};

struct PageCopy {
  uint8_t* device = nullptr;  // 16-byte aligned, as `host`
  uint8_t* host = nullptr;    // pinned (Device::PinHost)
  uint32_t bytes = 0;         // a multiple of 16, at most kPageCopyBytesMax
};
inline constexpr uint32_t kPageCopyBytesMax = 1u << 30;

/// Moves pages of one GPU for the store, behind attention. On the store's thread.
class PageMover {
 public:
  virtual ~PageMover() = default;
  /// Whether pages can move now: the host's slots are pinned.
  virtual bool ready() const = 0;
  /// Why not: UNAVAILABLE, not yet; FAILED_PRECONDITION, and never. OK if it is ready.
  virtual absl::Status status() const = 0;
  /// Moves all of `copies`, in no particular order, behind what was moved before. Then calls `done(moved)` once, on the
  /// store's thread and not before this returned; until then nobody frees the slots. moved: every byte is there.
  virtual void Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) = 0;
};

}  // namespace kvmanager
