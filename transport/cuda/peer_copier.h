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

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/pinned_region.h"
#include "transport/device_copier.h"

namespace kvmanager {

class PeerCopier final : public DeviceCopier {
 public:
  static constexpr size_t kJobsAtOnce = 8;                // on a GPU; more wait
  static constexpr size_t kJobPagesMax = 2048;            // of one Copy
  static constexpr std::chrono::milliseconds kExpect{2};  // to be woken takes a tenth of that
  static constexpr int kCopyBlocksDefault = 264;          // of a launch: reads of NVLink need many on their way

  /// `devices` outlive it. Errors: UNAVAILABLE, RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<PeerCopier>> Create(absl::Span<const Device* const> devices,
                                                            int copy_blocks = kCopyBlocksDefault);
  ~PeerCopier() override;

  /// Whether GPU `to` of `devices`, by its ordinal, can read memory of `from`: it is the same one, or one that this
  /// process sees and that CUDA lets it access. Any thread.
  bool Reaches(const GpuName& from, int to) const;

  std::shared_ptr<Source> Open(const DeviceSlab& slab) override;
  void Expect() override;
  /// Errors: FAILED_PRECONDITION of the field `gpu`, also for pages that are shorter than page_hash.h has them.
  void Copy(int device, std::vector<std::shared_ptr<Source>> sources, std::vector<Page> pages, Copied copied) override;
  void Sweep() override;

 private:
  class Slab;
  struct Import {
    std::shared_ptr<DeviceRegion> region;
    bool used = true;  // since the last Sweep
  };
  struct Job {
    std::vector<std::shared_ptr<Source>> sources;
    std::vector<Page> pages;
    Copied copied;
    absl::Status status;
    uint64_t number = 0;    // that its stream writes behind it
    bool enqueued = false;  // at least in part
  };
  // One GPU. `waiting` is guarded by mutex_; the rest is the thread's.
  struct Gpu {
    const Device* device = nullptr;
    std::vector<GpuName> reaches;
    std::array<CUstream_st*, 2> copy_streams = {};
    CUstream_st* hash_stream = nullptr;
    std::unique_ptr<PinnedRegion> pinned;  // kJobsAtOnce words, 64 bytes apart, then as many lists of checksums
    std::map<std::array<uint8_t, 16>, Import> imports;
    std::deque<Job> running;  // in the order in which they were started
    uint64_t started = 0;
    bool failed = false;
    std::deque<Job> waiting;
  };

  explicit PeerCopier(int copy_blocks) : copy_blocks_(copy_blocks) {}
  void Run();
  void StartJobs(Gpu& gpu);
  void EndJobs(Gpu& gpu);
  absl::Status Enqueue(Gpu& gpu, Job& job);
  absl::StatusOr<std::shared_ptr<DeviceRegion>> ImportFor(Gpu& gpu, Slab& slab);
  void LetGoOfUnused(Gpu& gpu);
  static std::array<CUstream_st*, 3> Streams(const Gpu& gpu) {
    return {gpu.copy_streams[0], gpu.copy_streams[1], gpu.hash_stream};
  }
  static bool Quiet(const Gpu& gpu);
  Gpu* Find(int device) const;

  const int copy_blocks_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  Mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool sweep_due_ ABSL_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point awake_until_ ABSL_GUARDED_BY(mutex_);
  uint64_t polls_ = 0;  // the thread's
  std::thread thread_;
};

}  // namespace kvmanager
