// What recompute_bench measures on: who executes reloads, and memory of the right kind for them.
//
// Owned by the benchmark; one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvmanager/base/needs_cuda.h"
#include "transport/recompute/executor.h"

namespace kvmanager::recompute {

/// Memory for the rows of the grid, kept by the machine and reused. Activations and stored pages have random finite
/// contents of about unit size.
struct Arena {
  uint8_t* activations = nullptr;
  uint8_t* stored = nullptr;
  uint8_t* pages = nullptr;
};

class Machine {
 public:
  virtual ~Machine() = default;
  virtual std::string description() const = 0;
  /// No smaller than asked for; invalidates the arena given before if it has to grow.
  virtual absl::StatusOr<Arena> MakeArena(size_t activation_bytes, size_t stored_bytes, size_t page_bytes) = 0;
  /// link_gbps: of an emulated link.
  virtual absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeExecutor(const ProjectionModel& model,
                                                                       double link_gbps) = 0;
  /// Before each reload that is timed.
  virtual void Restart() {}
  /// Each way is measured for itself, many times in a row, and the median counts; else they take turns, and the
  /// smallest time counts.
  virtual bool sustained() const { return false; }
};

struct GpuMachineOptions {
  int ordinal = 0;
  int chunk_rows = 0;  // 0: the executor's default
  int buffers = 0;     // 0: likewise
};
/// Errors: UNAVAILABLE.
KV_NEEDS_CUDA(absl::StatusOr<std::unique_ptr<Machine>> MakeGpuMachine(const GpuMachineOptions& options));

/// Fills with finite float16 of about unit size times `scale`, no two stretches alike.
void FillWithHalves(uint8_t* bytes, size_t size, float scale);

}  // namespace kvmanager::recompute
