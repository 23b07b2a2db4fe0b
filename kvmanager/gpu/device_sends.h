// Prepares pages of one GPU for a hand-off: exports slabs that other daemons map, copies open pages and hashes pages.
// The loop's thread.
//
// A slab is exported while a hand-off names it, under a name that no other memory of any daemon ever has, so that
// receivers may keep what they mapped. What they keep beyond that is their own room: a slab that nothing uses is made
// anew (DevicePool).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
#include "kvmanager/memory/open_page_copy.h"
#include "kvmanager/memory/page_hash.h"
#include "kvmanager/memory/pinned_region.h"
#include "kvmanager/memory/shared_semaphores.h"
#include "transport/transport.h"

namespace kvmanager {

class DeviceSends {
 public:
  static constexpr size_t kPagesAtOnce = 8192;  // that are hashed; more wait

  /// Everything given outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceSends>> Create(const Device* device, DevicePool* pool, PollList* polls);
  /// Nothing is on its way (Drain).
  ~DeviceSends();

  /// The slab of a page of the pool, exported as long as somebody has it. Errors: UNAVAILABLE.
  absl::StatusOr<std::shared_ptr<const DeviceSlab>> SlabOf(const uint8_t* page);

  struct Work {
    std::vector<OpenPageCopy> open;  // copied first
    OpenPageShape shape;             // of those
    std::vector<PageBytes> pages;    // hashed then
  };
  /// done: called once, not before this returned, with a checksum for each of work.pages, or UNAVAILABLE. Until then
  /// nobody frees what the work names.
  void Prepare(Work work, absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done);
  /// Waits, blocking, until the GPU touches no page for this any more; nobody is told. false: it still does after
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  struct Job {
    Work work;
    absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done;
    std::vector<uint64_t> checksums;
    size_t enqueued = 0;  // pages
  };

  DeviceSends(const Device* device, DevicePool* pool, PollList* polls) : device_(device), pool_(pool), polls_(polls) {}
  absl::Status EnqueueNext();
  bool Quiet() const;
  bool Poll();  // true: nothing is on its way

  const Device* const device_;
  DevicePool* const pool_;
  PollList* const polls_;
  CUstream_st* stream_ = nullptr;
  std::unique_ptr<SharedSemaphores> words_;  // this process's alone: `done`
  std::unique_ptr<PinnedRegion> sums_;       // [kPagesAtOnce], of the first job's pages
  std::vector<std::weak_ptr<const DeviceSlab>> slabs_;
  uint64_t process_ = 0;  // random: of all names
  std::deque<Job> jobs_;  // the first is on the stream
  uint64_t last_ = 0;     // what the stream stores behind it
  absl::Status failed_;   // nothing is enqueued any more
  bool polling_ = false;
};

}  // namespace kvmanager
