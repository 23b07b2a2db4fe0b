// The pages of one LOCAL frame, copied by workers out of a sender's memory. Made and abandoned on the transport's
// thread; workers hold it while they copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::tcp {

class CopyJob {
 public:
  struct Page {
    uint32_t page = 0;
    const uint8_t* from = nullptr;
    absl::Span<uint8_t> to;
    uint64_t checksum = 0;         // that it must have
    uint64_t copied_checksum = 0;  // that it has, once copied
  };

  explicit CopyJob(std::vector<Page> pages) : pages_(std::move(pages)) {}

  /// Copies with all of `workers`. copied: called once, on one of them, when every page is copied; not if the job was
  /// abandoned.
  static void Start(const std::shared_ptr<CopyJob>& job, WorkerPool& workers, absl::AnyInvocable<void()> copied);
  /// Returns once nobody writes any more.
  void Abandon();
  bool done() const;
  const std::vector<Page>& pages() const { return pages_; }

 private:
  void Work();

  std::vector<Page> pages_;  // each touched by the worker that took it, until all are done
  absl::AnyInvocable<void()> copied_;
  mutable Mutex mutex_;
  std::condition_variable idle_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t working_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t finished_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvmanager::tcp
