// The client's leases: Cache, Sequence and Arena over a capability each. Made by Client and by one another; see
// client.h.
#pragma once

#include <memory>

#include "client/client.h"
#include "client/connection.h"
#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager::client {

std::unique_ptr<Cache> MakeCache(std::shared_ptr<Connection> connection, api::Cache::Client cap,
                                 CacheDescription description);

/// Maps the memfd of `cap`, which must be of `bytes`. FAILED_PRECONDITION if no descriptor came, INTERNAL if it is of
/// another size, RESOURCE_EXHAUSTED if it cannot be mapped.
absl::StatusOr<std::unique_ptr<Arena>> MakeArena(std::shared_ptr<Connection> connection, api::Arena::Client cap,
                                                 uint32_t id, uint64_t bytes);

}  // namespace kvmanager::client
