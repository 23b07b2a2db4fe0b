// A kind of memory that a store is given.
#pragma once

#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/page_executor.h"

namespace kvmanager {

/// A GPU whose memory holds pages. Its bytes are touched by kernels alone, in the order in which somebody submits them
/// (gpu/): the store keeps books. executor: as the host's, with addresses on the device. epochs: of plans whose
/// kernels may read a slot after the store gave it up. mover: nullptr: what is evicted there is lost, and nothing is
/// fetched.
struct StoreDevice {
  int ordinal = 0;
  SlotPool* pool = nullptr;
  ReleaseEpochs* epochs = nullptr;
  EncodeExecutor* executor = nullptr;
  PageMover* mover = nullptr;
};

}  // namespace kvmanager
