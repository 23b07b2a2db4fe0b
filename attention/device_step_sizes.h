// What the options of a device step come to: how large its plans may be, what it passes to the device, and which
// kernels it may use. Values and free functions; any thread.
#pragma once

#include <cstddef>

#include "absl/status/statusor.h"
#include "attention/device_step.h"
#include "attention/prefill_plan.h"
#include "attention/step_selection.h"
#include "attention/upload_ring.h"
#include "codecs/device/attend_params.h"
#include "codecs/device/prefill_params.h"

namespace kvmanager {

/// What a step's options come to.
struct StepSizes {
  size_t blocks_max = 0;                               // of any layer's kernel
  size_t items_max = 0;                                // of a layer
  size_t prefill_items_max = 0, prefill_runs_max = 0;  // of a layer; 0: no layer has kernels for many query tokens
  SelectionSizes selection;                            // zero where queries read everything
  size_t ring_bytes = 0;
  /// Of a layer, in the ring.
  size_t plan_bytes() const {
    return items_max * sizeof(device::AttendItem) + prefill_items_max * sizeof(device::PrefillItem) +
           prefill_runs_max * sizeof(device::PrefillRun);
  }
  size_t upload_bytes() const { return UploadRing::kAlign + ring_bytes; }  // the word "done" stands before the ring
};

/// Errors: those of DeviceStep::Create that options alone make.
absl::StatusOr<StepSizes> StepSizesOf(const DeviceStep::Options& o);

/// Of scores.
float ScaleOf(const DeviceStep::Options& o);
/// A layer's kernels for many query tokens, if these options allow them.
device::Prefill PrefillOf(const DeviceStep::Options& o, int layer);
/// REQUIRES: the layer has such kernels. head_costs are yet to be set.
PrefillPlanner::Options PrefillOptions(const DeviceStep::Options& o, int layer);

}  // namespace kvmanager
