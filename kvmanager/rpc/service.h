// The objects behind api/kvmanager.capnp's capabilities, one connection's at a time. The loop's thread alone.
//
// This is the central header of the room rpc/: what clients ask for, checked and answered. The room knows the schema,
// hand-offs, GPUs and the store. It does not know how a daemon is started: flags, files and the order in which parts
// are made are daemon/'s.
//
//   connections   connections.h, listen_socket.h, session.h (what one connection holds), limits.h,
//                 principals.h (whose tenants are), message_room.h (memory of messages)
//   requests      serve.h (around every method), wire.h, step_check.h
//   work          memory_calls.h: host_calls.h (host memory), device_calls.h (GPUs); read.h; block_calls.h
//   capabilities  *_service.cc, made by the functions below
//
// Each capability is given what it uses as a struct of its own. The structs, and everything in them, outlive every
// capability.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "codecs/registry.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/gpu/device_arena.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/handoff/arrivals.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/outgoing_hand_offs.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/block_calls.h"
#include "kvmanager/rpc/daemon_facts.h"
#include "kvmanager/rpc/disposals.h"
#include "kvmanager/rpc/match_call.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/prefetch_call.h"
#include "kvmanager/rpc/principals.h"
#include "kvmanager/rpc/read.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/taking_turns.h"
#include "monitoring/metrics.h"

namespace kvmanager {

struct SequenceParts {
  PageStore* store = nullptr;
  EventLoop* loop = nullptr;
  WorkerPool* workers = nullptr;
  TakingTurns* long_calls = nullptr;
  Disposals* disposals = nullptr;
  IncomingHandOffs* incoming = nullptr;
  const OutgoingHandOffs* outgoing = nullptr;
  const Arrivals* arrivals = nullptr;
  const HeldSequences* held = nullptr;
  const std::vector<std::string>* peers_allowed = nullptr;  // CheckPeersAllowed's
};

struct CacheParts {
  PageStore* store = nullptr;
  const CodecRegistry* registry = nullptr;
  IncomingHandOffs* incoming = nullptr;
  const Arrivals* arrivals = nullptr;
  Recomputer* recomputer = nullptr;
  const MemoryCalls* host_calls = nullptr;
  const MemoryCalls* device_calls = nullptr;
  const Reads* reads = nullptr;
  const BlockCalls* block_calls = nullptr;
  MatchTimes matches;
  PrefetchParts prefetch;
  SequenceParts sequence;  // of its sequences
};

struct AdminParts {
  const DaemonFacts* facts = nullptr;
  const Clock* clock = nullptr;
  PageStore* store = nullptr;
  const PagePool* host_pool = nullptr;
  Gpus gpus;
  const HostPinner* pinner = nullptr;  // of the host pool's slabs; nullptr: no GPU
  WorkerPool* workers = nullptr;
  MessageQueue* queue = nullptr;
  TakingTurns* long_calls = nullptr;
  DrainSwitch* drain = nullptr;
  const HeldSequences* held = nullptr;
  IncomingHandOffs* incoming = nullptr;
  const OutgoingHandOffs* outgoing = nullptr;
  const Recomputer* recomputer = nullptr;
  const Metrics* all_metrics = nullptr;
  const ConnectionMetrics* connections = nullptr;
  const std::vector<std::string>* peers_allowed = nullptr;  // CheckPeersAllowed's
  PrefetchParts prefetch;
  /// Admin's: resolves before the daemon ends for it.
  std::function<kj::Promise<absl::Status>(const std::string& program, bool cold)> upgrade;
};

struct DaemonParts {
  const DaemonFacts* facts = nullptr;
  const CodecRegistry* registry = nullptr;
  const Principals* principals = nullptr;
  WorkerPool* workers = nullptr;
  WorkerPool* background = nullptr;  // of what takes long in one piece: codecs with artifacts, memory of arenas
  const CodecWorkers* codec_workers = nullptr;  // where codecs that wait are made; nullptr: there are none
  MessageQueue* queue = nullptr;
  Gpus gpus;
  bool samples_queries = false;  // whether engines that attend themselves should send queries
  CacheParts cache;              // of the caches that are opened
  AdminParts admin;
};

/// The bootstrap capability of the connection that `session` belongs to.
api::Daemon::Client MakeDaemonService(std::shared_ptr<Session> session, const DaemonParts& parts);

/// The lease of a stream on `gpu`: dropping the capability closes it.
api::DeviceStream::Client MakeDeviceStreamService(std::shared_ptr<Session> session, Gpu* gpu,
                                                  std::shared_ptr<DeviceStream> stream);

/// The lease of an arena, which the session knows by `*id` from now on.
api::Arena::Client MakeDeviceArenaService(std::shared_ptr<Session> session, std::shared_ptr<DeviceArena> arena,
                                          uint32_t* id);

/// Listings and switches for operators.
api::Admin::Client MakeAdminService(std::shared_ptr<Session> session, const AdminParts& parts);

/// A cache that was opened for this session. place: ReserveCache's. device_codec: of a cache on a GPU.
api::Cache::Client MakeCacheService(std::shared_ptr<Session> session, const CacheParts& parts,
                                    std::shared_ptr<const void> place, CacheId cache,
                                    std::shared_ptr<const DeviceCodec> device_codec);

/// What a cache's projections are of. Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<recompute::ProjectionModel> ReadProjectionModel(api::ProjectionFacts::Reader facts,
                                                               const CacheConfig& config);

/// A lease of a cache's projections.
api::Projections::Client MakeProjectionsService(std::shared_ptr<Session> session, Recomputer* recomputer,
                                                std::shared_ptr<ProjectionSet> set, const CacheConfig& config);

/// The lease of `sequence` of `cache`, which the session holds from now on: dropping the capability drops it.
api::Sequence::Client MakeSequenceService(std::shared_ptr<Session> session, const SequenceParts& parts,
                                          SequenceId sequence, std::shared_ptr<const BoundCache> cache);

}  // namespace kvmanager
