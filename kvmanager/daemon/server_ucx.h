// UCX of one daemon, as its options ask for it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/memory/page_pool.h"
#include "transport/ucx/ucx_memory.h"

namespace kvmanager {

/// Starts the process that lets peers with the same key read `pool`. nullptr: --peer-ucx-key was not given. Errors: of
/// the key's file; those of UcxMemory::Create.
absl::StatusOr<std::unique_ptr<UcxMemory>> OpenUcx(const Options& options, const PagePool& pool);

/// For people: what runs; nullptr: why nothing does.
std::string DescribeUcx(const UcxMemory* ucx);

}  // namespace kvmanager
