// The objects behind api/kvmanager.capnp's capabilities, one connection's at a time. The loop's thread alone.
#pragma once

#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/server/session.h"

namespace kvmanager {

/// The bootstrap capability of the connection that `session` belongs to.
api::Daemon::Client MakeDaemonService(std::shared_ptr<Session> session);

/// Listings and switches for operators.
api::Admin::Client MakeAdminService(std::shared_ptr<Session> session);

/// A cache that was opened for this session.
api::Cache::Client MakeCacheService(std::shared_ptr<Session> session, CacheId cache);

/// The lease of `sequence`, which the session holds from now on: dropping the capability drops it.
api::Sequence::Client MakeSequenceService(std::shared_ptr<Session> session, SequenceId sequence, CacheId cache);

}  // namespace kvmanager
