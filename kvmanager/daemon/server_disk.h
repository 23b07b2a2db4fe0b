// What the daemon says about its disk.
#pragma once

#include <optional>
#include <string>

#include "kvmanager/disk/block_disk.h"
#include "kvmanager/rpc/daemon_facts.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// disk: nullptr: there is none. On the loop's thread.
inline std::optional<DiskFacts> DescribeDisk(const BlockDisk* disk, const std::string& path, PageStore& store) {
  if (disk == nullptr) return std::nullopt;
  const BlockDisk::Use use = disk->use();
  return DiskFacts{path,         use.capacity_bytes, use.used_bytes, use.blocks, store.report().Use().unwritten_blocks,
                   disk->state()};
}

}  // namespace kvmanager
