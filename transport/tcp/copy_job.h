// The pages of one LOCAL frame, copied by workers out of a sender's memory or of what was read from it, or by a GPU
// out of another's. Made and abandoned on the transport's thread; workers, or the copier's thread, hold it while they
// copy, and who reads remote memory until it was read.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"
#include "transport/device_copier.h"
#include "transport/remote_memory.h"

namespace kvmanager::tcp {

class CopyJob {
 public:
  struct Page {
    uint32_t page = 0;
    const uint8_t* from = nullptr;  // of a GPU's page nullptr
    absl::Span<uint8_t> to;
    uint64_t checksum = 0;         // that it must have
    uint64_t copied_checksum = 0;  // that it has, once copied
  };

  explicit CopyJob(std::vector<Page> pages) : pages_(std::move(pages)) {}

  /// Copies with all of `workers`. copied: called once, on one of them, when every page is copied; not if the job was
  /// abandoned.
  static void Start(const std::shared_ptr<CopyJob>& job, WorkerPool& workers, absl::AnyInvocable<void()> copied);
  /// Copies with a GPU: `copies` are the job's pages, in order. copied: as Start's, also when TakeStatus() is an error.
  static void StartOnDevice(const std::shared_ptr<CopyJob>& job, DeviceCopier& copier, int device,
                            std::vector<std::shared_ptr<DeviceCopier::Source>> sources,
                            std::vector<DeviceCopier::Page> copies, absl::AnyInvocable<void()> copied);
  struct Place {
    std::shared_ptr<RemoteMemory::Source> source;
    uint64_t offset = 0;
  };
  /// Reads the job's pages, in order, from `places`, and copies each with `workers` as it comes. copied: as
  /// StartOnDevice's.
  static void StartRemotely(const std::shared_ptr<CopyJob>& job, RemoteMemory& memory,
                            const std::shared_ptr<WorkerPool>& workers, std::vector<Place> places,
                            absl::AnyInvocable<void()> copied);
  /// Returns once nobody writes any more: after a page of each worker, or all that a GPU has to do before.
  void Abandon();
  /// Abandons it without waiting. ended: called in the place of `copied`, once nobody writes any more. False, and it is
  /// not: nobody does.
  bool AbandonLater(absl::AnyInvocable<void()> ended);
  bool done() const;
  /// Once done: why a GPU did not copy, or remote memory could not be read.
  absl::Status TakeStatus() { return std::exchange(status_, absl::OkStatus()); }
  const std::vector<Page>& pages() const { return pages_; }

 private:
  void Work();
  void OnRead(size_t at, absl::StatusOr<std::unique_ptr<RemoteMemory::Piece>> piece);
  void OnDeviceDone(absl::Status status, absl::Span<const DeviceCopier::Page> copies);

  std::vector<Page> pages_;  // each touched by the worker that took it, until all are done
  absl::Status status_;      // until done the copier's, or under the mutex
  absl::AnyInvocable<void()> copied_;
  mutable Mutex mutex_;
  std::condition_variable idle_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t working_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t finished_ ABSL_GUARDED_BY(mutex_) = 0;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvmanager::tcp
