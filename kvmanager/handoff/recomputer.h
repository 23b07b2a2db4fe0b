// Recomputes K and V of pages that were received as activations (KVPR): the projections that clients registered, what
// links and projections do at present, how many pages of a hand-off to take as activations, and the thread that makes
// K and V of them.
//
// Owned by the daemon's wiring; outlives the transport, the loop's objects and IncomingHandOffs, not the workers. Calls
// belong to the loop's thread but where they say otherwise. One thread of its own does what takes long: it runs the
// reloads, and copies and checks weights where no pages wait. Payers take turns, with pages and with registrations; a
// payer's are in the order of asking. Waiting registrations are charged with their copies, so --recompute-bytes bounds
// their lines, too; waiting pages have their slots in the pool already.
//
// Of --recompute-bytes, and of --recompute-device-bytes of each GPU, one payer has at most three quarters
// (ByteBudget::OfPayerMax). Memory for proofs on a GPU serves all sets there and stays: it is charged to whose proofs
// made it grow.
//
// Where a set's projections are multiplied is chosen when it is opened: on the GPU of its cache if there is one that
// may be used for it, for a cache in host memory on the one with the fewest projections, without any on the CPU. X and
// what becomes of it lie in the host's pool in either case; what is received for a cache on a GPU is fetched from
// there. Weights of another type than X move their set to the CPU.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/owner_lines.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/handoff/projection_set.h"
#include "kvmanager/handoff/recompute_metrics.h"
#include "kvmanager/store/page_store.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/profile.h"

namespace kvmanager {

/// Who waits for pages. Shared by them and by the thread, whichever lives longer.
class RecomputeOwner {
 public:
  virtual ~RecomputeOwner() = default;
  /// On the loop's thread, once for pages that were computed together: their checksums. Errors: of all of them;
  /// CANCELLED.
  virtual void OnRecomputed(absl::StatusOr<std::vector<ArrivedPage>> pages) = 0;
  std::atomic<bool> cancelled{false};  // nothing more is wanted
};

class Recomputer {
 public:
  static constexpr int kChunkRows = 256;      // of a product on the CPU
  static constexpr size_t kPagesAtOnce = 64;  // of one layer and owner
  static constexpr size_t kLinksMax = 64;     // hosts whose rates are remembered; the one not heard of for longest goes

  struct Rate {
    double per_second = 0;
    int samples = 0;
    bool stale = false;
  };
  struct SetInfo {
    CacheDigest digest;
    int hidden = 0, width = 0, layers = 0, layers_ready = 0, chunk_tokens = 0;
    int device = CacheConfig::kHost;  // where they are multiplied: the CPU, or this GPU
    Rate flops;
    std::string failed;
  };
  struct GpuInfo {
    int ordinal = 0;
    uint64_t bytes = 0, bytes_max = 0;
    uint64_t most_of_payer = 0;  // of `bytes`, of the payer who has most
  };
  struct Gpus {
    std::vector<RecomputeDevice*> devices;
    uint64_t bytes_max_each = 0;  // of weights and buffers there
  };

  /// Everything outlives this. bytes_max: of the host's memory: weights and buffers of the CPU, waiting copies, and
  /// pinned memory for GPUs.
  Recomputer(WorkerPool* workers, MessageQueue* queue, const Clock* clock, RecomputeMetrics* metrics,
             uint64_t bytes_max, const Gpus& gpus);
  ~Recomputer() { Stop(); }
  Recomputer(const Recomputer&) = delete;
  Recomputer& operator=(const Recomputer&) = delete;

  /// The set of this cache, made if nobody has it open. payer: PayerName of the cache's tenant. device:
  /// CacheConfig::device. Errors: INVALID_ARGUMENT (facts); FAILED_PRECONDITION (not those of the open set);
  /// RESOURCE_EXHAUSTED, of this tenant or of all; UNAVAILABLE (a GPU that is at work for clients, and a shape that it
  /// has not met).
  absl::StatusOr<std::shared_ptr<ProjectionSet>> Open(const CacheDigest& digest, absl::string_view payer,
                                                      const recompute::ProjectionModel& model, int device);
  /// nullptr: nobody has it open.
  std::shared_ptr<ProjectionSet> Find(const CacheDigest& digest) const;
  /// `done` on the loop's thread, once. Errors: those of ProjectionSet::Register; RESOURCE_EXHAUSTED.
  void Register(std::shared_ptr<ProjectionSet> set, LayerRegistration registration,
                absl::AnyInvocable<void(absl::Status)> done);

  /// How many of a layer's pages to take as activations, as RecomputeChoice: by the plan for what is measured of the
  /// link from `host` and of the set's projections. 0 without a set, weights or measurements, and while a GPU cannot
  /// reach the host's pool. kv_page_bytes: of a page as it travels.
  uint32_t Choose(const ProjectionSet* set, const std::string& host, int layer, uint64_t kv_page_bytes, int query_heads,
                  uint32_t pages, uint32_t with_activations);
  /// Queues pages. REQUIRES: Choose gave them to recompute with this set.
  void Recompute(std::shared_ptr<ProjectionSet> set, std::shared_ptr<RecomputeOwner> owner,
                 std::vector<RecomputePage> pages);
  /// Nothing more is recomputed with `set`, until a layer is registered anew.
  void NoteFailure(ProjectionSet& set, const absl::Status& why);

  /// `bytes` of pages came from `host` in `elapsed_ns`, while there were more to come. Any thread.
  void RecordLink(const std::string& host, int64_t bytes, int64_t elapsed_ns);

  uint64_t bytes() const { return host_.used(); }
  uint64_t most_bytes_of_payer() const { return host_.most_of_payer(); }
  uint64_t bytes_max() const { return host_.max(); }
  std::vector<SetInfo> Sets() const;
  std::vector<GpuInfo> GpuInfos() const;
  std::vector<std::pair<std::string, Rate>> Links() const;  // any thread

  /// Ends the thread; what waits is dropped, owners unanswered. Any thread, before the workers end.
  void Stop();

 private:
  struct PageJob {
    std::shared_ptr<ProjectionSet> set;
    std::shared_ptr<RecomputeOwner> owner;
    RecomputePage page;
  };
  // By payer.
  using Registrations = OwnerLines<std::string, absl::AnyInvocable<void()>>;
  using Pages = OwnerLines<std::string, PageJob>;
  struct Link {
    recompute::Profile profile;
    int64_t used_ns = 0;
    explicit Link(const Clock* clock) : profile(clock) {}
  };

  RecomputeGpu* GpuFor(int device) const;  // nullptr: the CPU
  absl::Status PlaceOnCpu(ProjectionSet& set);
  absl::Status PlaceOnGpu(ProjectionSet& set, RecomputeGpu* gpu);
  std::shared_ptr<Link> LinkOf(const std::string& host, bool make);

  // The thread.
  void Work();
  void RunPages(std::vector<PageJob> jobs);

  WorkerPool* const workers_;
  MessageQueue* const queue_;
  const Clock* const clock_;
  RecomputeMetrics* const metrics_;
  ByteBudget host_;
  std::vector<std::unique_ptr<RecomputeGpu>> gpus_;
  absl::flat_hash_map<CacheDigest, std::weak_ptr<ProjectionSet>> sets_;

  mutable Mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, std::shared_ptr<Link>> links_ ABSL_GUARDED_BY(mutex_);
  Registrations registrations_ ABSL_GUARDED_BY(mutex_);
  Pages pages_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace kvmanager
