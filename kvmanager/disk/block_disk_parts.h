// What a BlockDisk is made of beneath, for tests that put faults there.
#pragma once

#include <functional>
#include <memory>

#include "kvmanager/base/clock.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/disk_io.h"

namespace rocksdb {
class FileSystem;
}

namespace kvmanager {

/// What is left out is the machine's; what is given outlives the disk.
struct BlockDiskParts {
  std::function<std::unique_ptr<DiskIo>()> make_io;
  DiskFiles* files = nullptr;
  rocksdb::FileSystem* index_files = nullptr;
  const Clock* clock = nullptr;
};

absl::StatusOr<std::unique_ptr<BlockDisk>> OpenBlockDisk(const BlockDisk::Options& options, const BlockDiskParts& parts,
                                                         MessageQueue* queue, DiskMetrics* metrics);

}  // namespace kvmanager
