// Other daemons' memory, mapped once and kept a little longer than the lane that passed it: mapping two gigabytes anew
// for every hand-off costs as much as copying them. Owned by Loop; the transport's thread alone.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kvmanager/memory/region.h"

namespace kvmanager::tcp {

class RegionCache {
 public:
  /// The memory behind `fd`, which is taken. Errors: Region::Map's.
  absl::StatusOr<std::shared_ptr<Region>> Map(int fd, uint64_t bytes);
  /// Lets go of what nobody has used since the last call: between once and twice the time between calls is how long a
  /// region outlives its use, and the memory of a daemon that has ended.
  void Sweep();

 private:
  struct Entry {
    std::shared_ptr<Region> region;
    bool used = true;  // since the last Sweep
  };
  std::map<std::pair<dev_t, ino_t>, Entry> entries_;
};

}  // namespace kvmanager::tcp
