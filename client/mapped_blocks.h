// What Cache::MapBlocksAsync makes of a reply: places in slabs become addresses of this process. And the slabs of
// Cache::BindSlabs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/connection.h"
#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager::client {

/// What a reply is compared with.
struct AskedBlocks {
  size_t names = 0;
  uint64_t layers = 0;
  uint64_t raw_page_bytes = 0;
  TensorView range;  // none: no range
};

/// Sends `request`, maps slabs that the reply names and that are not mapped, some at once, and gives the addresses.
/// Errors: as Cache::MapBlocksAsync's. REQUIRES: connection->Usable().ok().
Pending<absl::StatusOr<MappedBlocks>> MapBlocks(
    const std::shared_ptr<Connection>& connection,
    capnp::Request<api::Cache::ReadBlocksParams, api::Cache::ReadBlocksResults> request, const AskedBlocks& asked);

/// Cache::BindSlabs's, step by step. REQUIRES: connection.Usable().ok().
absl::StatusOr<uint64_t> BindSlabs(Connection& connection, api::Cache::Client& cache, uint64_t bytes);

}  // namespace kvmanager::client
