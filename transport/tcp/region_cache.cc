#include "transport/tcp/region_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

absl::StatusOr<std::shared_ptr<Region>> RegionCache::Map(int fd, uint64_t bytes) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) {
    ::close(fd);
    return absl::UnavailableError("fstat of a region's descriptor");
  }
  // A memfd's inode is not given to another while it is mapped here.
  const std::pair<dev_t, ino_t> key(facts.st_dev, facts.st_ino);
  const auto found = entries_.find(key);
  if (found != entries_.end() && found->second.region->bytes() == bytes) {
    ::close(fd);
    found->second.used = true;
    return found->second.region;
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Region> region, Region::Map(fd, bytes, /*writable=*/false));
  entries_[key] = {region};
  return region;
}

void RegionCache::Sweep() {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool kept = entry->second.used || entry->second.region.use_count() > 1;
    entry->second.used = false;
    entry = kept ? std::next(entry) : entries_.erase(entry);
  }
}

}  // namespace kvmanager::tcp
