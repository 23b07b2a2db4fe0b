// `kvctl recompute-plan --cache ID`: a plan by what the daemon measured.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "transport/recompute/plan_command.h"

namespace kvmanager::client::cli {

/// Fills what `plan` leaves open (0) with the geometry of cache `cache_id`, the rate of its projections, and that of
/// the link from `peer` (a host as `links` of Client::Recompute has it; empty: the only one). Returns a line that says
/// so. Errors: NOT_FOUND (cache, projections, peer); FAILED_PRECONDITION (not measured yet); the client's.
absl::StatusOr<std::string> FillFromDaemon(Client& client, uint32_t cache_id, const std::string& peer,
                                           recompute::PlanArguments* plan);

}  // namespace kvmanager::client::cli
