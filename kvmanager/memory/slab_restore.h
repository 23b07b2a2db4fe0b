// Hands out slots again that an earlier allocator of the same memory had handed out, before anything else is.
//
// A view: made for this, and not kept. What it is told is hostile until checked: a slot that cannot be where it is said
// to be is refused, and the rest is restored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/slab_allocator.h"

namespace kvmanager {

class SlabRestore {
 public:
  struct Slot {
    TenantId tenant = 0;  // of this allocator, whose payer was named
    SlabAllocator::SlotPlace place;
  };

  /// Where a handed-out slot is, for a later allocator. Aborts on a stale id.
  static SlabAllocator::SlotPlace PlaceOf(const SlabAllocator& allocator, PageId id);

  /// REQUIRES: Options::written, and that nothing was handed out.
  explicit SlabRestore(SlabAllocator* of) : of_(*of) {}

  /// The slots, in the order of `slots`, which are in that of their numbers; not valid: refused. The other slots of
  /// their areas are free, and nobody sees what is in them.
  std::vector<PageId> Restore(absl::Span<const Slot> slots);

 private:
  using Spot = SlabAllocator::Spot;

  bool CanBe(const SlabAllocator::SlotPlace& place) const;
  /// The area that the slot is in, opened for its tenant if nobody had it; false: it is another's, or cannot be.
  bool FindArea(const Slot& slot, Spot* spot);
  /// The area's slots are all known.
  void Close(const Spot& spot);

  SlabAllocator& of_;
};

}  // namespace kvmanager
