// The host's part of sparse selection on a GPU: what each query of a batch reads, and where its lists and scratch
// memory are.
//
// How many rows a query reads of each KV head follows from its position; which ones they are, the device finds out.
// Functions of their arguments; any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_parameters.h"

namespace kvmanager::pq {

/// Tokens that a query at `position` reads, as counts of `select`.
void SetReads(const Parameters& parameters, uint64_t position, DeviceSelect* select);

using device::SelectSizes;

/// Gives each query its place in the lists and in the scratch memory, one after another. Errors: RESOURCE_EXHAUSTED
/// where they leave 32 bits.
absl::StatusOr<SelectSizes> PlaceSelects(const DeviceShape& shape, absl::Span<DeviceSelect> queries);

}  // namespace kvmanager::pq
