// Copies pages between GPUs of one host, from another process's pool straight into this one's: DeviceCopier by CUDA.
//
// A sender's slab is imported once for each GPU that copies out of it (which then reads it over NVLink or PCIe), and
// kept until nobody has used it between two Sweeps. Pages of a job go in a launch that gathers them, on one of two
// streams that take turns, so that the link never waits for a launch; another stream hashes what has arrived
// (page_hash.h) while the next jobs are copied. All are of the lowest priority.
//
// A thread of its own makes every call of CUDA, and polls while something is on its way, since completions come within
// tens of microseconds. Owned by main(); outlives the transport; the destructor waits for what is on its way.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"
#include "transport/device_copier.h"

namespace kvmanager {

class PeerCopier : public DeviceCopier {
 public:
  static constexpr size_t kJobsAtOnce = 8;                // on a GPU; more wait
  static constexpr size_t kJobPagesMax = 2048;            // of one Copy
  static constexpr std::chrono::milliseconds kExpect{2};  // to be woken takes a tenth of that
  static constexpr int kCopyBlocksDefault = 264;          // of a launch: reads of NVLink need many on their way

  /// `devices` outlive it. Errors: UNAVAILABLE, RESOURCE_EXHAUSTED. Errors of its Copy: FAILED_PRECONDITION of the
  /// field `gpu`, also for pages that are shorter than page_hash.h has them.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<PeerCopier>> Create(absl::Span<const Device* const> devices,
                                                                          int copy_blocks = kCopyBlocksDefault));

  /// Whether GPU `to` of `devices`, by its ordinal, can read memory of `from`: it is the same one, or one that this
  /// process sees and that CUDA lets it access. Any thread.
  virtual bool Reaches(const GpuName& from, int to) const = 0;
};

}  // namespace kvmanager
