// The objects behind api/kvmanager.capnp's capabilities, one connection's at a time. The loop's thread alone.
#pragma once

#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/session.h"

namespace kvmanager {

class ProjectionSet;

/// The bootstrap capability of the connection that `session` belongs to.
api::Daemon::Client MakeDaemonService(std::shared_ptr<Session> session);

/// The GPU of this ordinal. Errors: FAILED_PRECONDITION over TCP and where the daemon has no GPU pool, saying what to
/// do; NOT_FOUND for another ordinal.
absl::StatusOr<const DeviceContext*> FindDevice(const Session& session, int ordinal);
/// A stream for this connection, which has none on that GPU. Errors: FAILED_PRECONDITION, RESOURCE_EXHAUSTED.
absl::StatusOr<std::shared_ptr<DeviceStream>> OpenDeviceStream(Session& session, const DeviceContext& device);
void WriteDeviceInfo(const DaemonContext& daemon, const DeviceContext& device, api::DeviceInfo::Builder out);
/// The lease of a stream: dropping the capability closes it.
api::DeviceStream::Client MakeDeviceStreamService(std::shared_ptr<Session> session,
                                                  std::shared_ptr<DeviceStream> stream);
/// The lease of an arena, which the session knows by `*id` from now on.
api::Arena::Client MakeDeviceArenaService(std::shared_ptr<Session> session, std::shared_ptr<DeviceArena> arena,
                                          uint32_t* id);

/// Listings and switches for operators.
api::Admin::Client MakeAdminService(std::shared_ptr<Session> session);

/// A cache that was opened for this session.
/// device_codec: of a cache on a GPU.
api::Cache::Client MakeCacheService(std::shared_ptr<Session> session, CacheId cache,
                                    std::shared_ptr<const DeviceCodec> device_codec);

/// A lease of a cache's projections.
api::Projections::Client MakeProjectionsService(std::shared_ptr<Session> session, std::shared_ptr<ProjectionSet> set,
                                                const CacheConfig& config);

/// The lease of `sequence`, which the session holds from now on: dropping the capability drops it.
api::Sequence::Client MakeSequenceService(std::shared_ptr<Session> session, SequenceId sequence, CacheId cache);

}  // namespace kvmanager
