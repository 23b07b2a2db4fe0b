// Runs Cache.readBlocks and Cache.writeBlocks: whole blocks between pages in host memory and an arena of the client, or
// read by the client itself where they lie (block_lease.h). Blocks that only the disk has come into memory first. What
// is written may also lie in an arena on a GPU, whose copy engines bring it to its slots.
//
// Workers copy, and check what they copied, a page at a time and in turns (worker_pool.h). A call object owns the lease
// on the pages and the arena until they are done, so that cancelling the call, or losing the client, is safe at any
// moment. Bytes of a client are checked in the daemon's copy, which the client cannot change. The loop's thread.
#pragma once

#include <kj/async.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/rpc/block_lease.h"
#include "kvmanager/rpc/disposals.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/taking_turns.h"

namespace kvmanager {

using ReadBlocksContext = capnp::CallContext<api::Cache::ReadBlocksParams, api::Cache::ReadBlocksResults>;
using BindSlabsContext = capnp::CallContext<api::Cache::BindSlabsParams, api::Cache::BindSlabsResults>;
using MapBlocksSlabContext = capnp::CallContext<api::Cache::MapSlabParams, api::Cache::MapSlabResults>;
using WriteBlocksContext = capnp::CallContext<api::Cache::WriteBlocksParams, api::Cache::WriteBlocksResults>;

class BlockCalls {
 public:
  /// Whose processes may map slabs, over Unix sockets. Pages that were mapped once may be kept by other means than a
  /// mapping: in a pipe, or pinned by a device. So another user's processes may where all users trust one another.
  enum class Maps : uint8_t { kNobody, kOwnUser, kEverybody };
  /// Options::map_blocks.
  static Maps MapsOf(const std::string& option) {
    return option == "all" ? Maps::kEverybody : option == "own" ? Maps::kOwnUser : Maps::kNobody;
  }

  /// How many workers copy, of as many CPUs as the daemon may use: who sends the calls, on the same host, and the event
  /// loop that answers them find some, too. With all of them stores were slower than with three quarters.
  static constexpr int WorkersOf(int cpus) { return cpus - cpus / 4; }

  /// An arena on a GPU, and what copies pages out of it; without `arena`: there is no such one.
  struct DeviceBytes {
    absl::Span<uint8_t> bytes;  // addresses of the device
    std::shared_ptr<const void> arena;
    PageMover* mover = nullptr;
  };
  using FindDeviceArena = std::function<DeviceBytes(const Session&, uint32_t arena)>;
  static FindDeviceArena ArenasOn(Gpus gpus);

  /// Everything outlives this and the calls that it runs. workers: its own, whose tasks never wait for others'.
  struct Parts {
    PageStore* store = nullptr;
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    const Clock* clock = nullptr;
    const DrainSwitch* drain = nullptr;
    BlockCallMetrics* metrics = nullptr;
    TakingTurns* turns = nullptr;
    Maps maps = Maps::kNobody;
    Disposals* disposals = nullptr;  // where leases end; nullptr: at once
    kj::Timer* timer = nullptr;      // of the loop, by which leases end by themselves; nullptr: they do not
    FindDeviceArena device_arena;    // empty: there are no GPUs
    int64_t lease_ms = limits::kBlockLeaseMs;
  };

  explicit BlockCalls(const Parts& parts) : parts_(parts) {}
  BlockCalls(const BlockCalls&) = delete;
  BlockCalls& operator=(const BlockCalls&) = delete;

  /// Whether a connection may map slabs of its tenants.
  bool MayMap(const Session& session) const;

  /// Errors: UNAVAILABLE (the daemon drains), FAILED_PRECONDITION (mapped: not here), PageMover::status's,
  /// CheckTensor's, CacheDirectory::ReadBlocks's and WriteBlocks's.
  absl::StatusOr<kj::Promise<void>> Read(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                         ReadBlocksContext& context) const;
  absl::StatusOr<kj::Promise<void>> Write(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                          WriteBlocksContext& context) const;
  /// Slabs for the cache's tenant ahead of need, and a descriptor of one. Errors: Read's of `mapped`,
  /// CacheDirectory::BeginBind's and ShowSlab's.
  absl::StatusOr<kj::Promise<void>> BindSlabs(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                              BindSlabsContext& context) const;
  absl::StatusOr<kj::Promise<void>> MapSlab(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                            MapBlocksSlabContext& context) const;

 private:
  /// Once what the disk has of the request's blocks is in memory.
  absl::StatusOr<kj::Promise<void>> ReadLoaded(const std::shared_ptr<Session>& session,
                                               std::shared_ptr<const void> lease_place, CacheId cache,
                                               WorkerPool::Owner owner, const std::vector<BlockName>& names,
                                               ReadBlocksContext& context) const;
  /// That the client may map slabs. Errors: FAILED_PRECONDITION.
  absl::Status CheckMaps(const Session& session) const;

  api::BlocksLease::Client MakeLease(const std::shared_ptr<Session>& session, std::shared_ptr<const void> place,
                                     WorkerPool::Owner owner, BlockLeaseService::Held held) const;

  class Copying;
  class Reading;
  class Writing;

  /// The range that a request names, which must be in an arena; with any size. `mover`: of one on a GPU.
  struct Source {
    StepTensor range;
    std::shared_ptr<const void> arena;
    PageMover* mover = nullptr;
  };
  absl::StatusOr<Source> FindSource(const Session& session, api::Tensor::Reader in) const;

  /// Resolves once the pages that are left of `writing` are in their slots; false: the GPU has failed.
  static kj::Promise<bool> MoveRest(PageMover* mover, std::shared_ptr<Writing> writing);
  /// Resolves once workers have copied every page of `copying`.
  kj::Promise<void> Run(std::shared_ptr<Copying> copying, WorkerPool::Owner owner) const;

  absl::Status CheckAccepting() const;

  const Parts parts_;
};

}  // namespace kvmanager
