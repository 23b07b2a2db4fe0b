// Whether a disk takes records: not for a while after an error, and not before the next start once its index could not
// be read or its folder has gone. What closes it is counted, and has a line in the log.
//
// On the loop's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/disk/disk_folder.h"
#include "kvmanager/disk/disk_metrics.h"
#include "kvmanager/disk/disk_state.h"

namespace kvmanager {

class WriteGate {
 public:
  /// Everything outlives it.
  WriteGate(const DiskFolder* folder, const Clock* clock, DiskMetrics* metrics)
      : folder_(*folder), clock_(*clock), metrics_(*metrics) {}

  /// It is open, or will be in so many ns. 0: now.
  bool OpensWithin(int64_t ns) const { return shut_ == nullptr && back_off_.is_over(clock_.NowNs() + ns); }
  /// For people: "ready", or why it is not open.
  const char* state() const;

  /// Something failed: nothing is written for a while. op: DiskMetrics::errors'.
  void NoteError(const char* op, const absl::Status& status);
  void NoteSuccess() { back_off_.NoteSuccess(); }
  /// Once after each while: what failed is to be tried again.
  bool TakeTryAgain() { return back_off_.TakeTryAgain(); }
  /// Not all of the index could be read: it stays shut. DATA_LOSS: the index is damaged, which the next start is told.
  void NoteIndexError(const absl::Status& status, uint64_t blocks_read);
  /// The folder is not there any more, or is another one: it stays shut. Once.
  void NoteFolderGone(const absl::Status& why);

 private:
  const DiskFolder& folder_;
  const Clock& clock_;
  DiskMetrics& metrics_;
  WriteBackOff back_off_;
  const char* shut_ = nullptr;  // until the next start: why
};

}  // namespace kvmanager
