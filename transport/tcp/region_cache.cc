#include "transport/tcp/region_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "kvmanager/base/status.h"
#include "transport/tcp/local.h"

namespace kvmanager::tcp {

RegionCache::RegionCache(boost::asio::io_context& io, WorkerPool& workers) : io_(io), workers_(workers), timer_(io) {
  Sweep();
}

absl::StatusOr<std::shared_ptr<const Region>> RegionCache::Map(int fd, uint64_t bytes, int socket) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) {
    ::close(fd);
    return absl::UnavailableError("fstat of a region's descriptor");
  }
  // A memfd's inode is not given to another while it is mapped here.
  const Inode inode(facts.st_dev, facts.st_ino);
  const auto found = entries_.find(inode);
  if (found != entries_.end() && found->second.region->bytes() == bytes) {
    ::close(fd);
    found->second.used = true;
    return found->second.region;
  }
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> mapped, Region::Map(fd, bytes, /*writable=*/false));
  // Unmapping a large pool takes long: whoever lets go last, a worker does it.
  std::shared_ptr<const Region> region(mapped.release(), [workers = &workers_](const Region* last) {
    workers->Post(WorkerPool::Priority::kEncode, [last] { delete last; });
  });
  const pid_t daemon = PeerPid(socket);
  Watch(daemon, socket);
  entries_[inode] = {region, daemon};
  return region;
}

void RegionCache::Watch(pid_t daemon, int socket) {
  if (daemons_.count(daemon) > 0) return;
  const int process = OpenPeerProcess(socket);
  if (process < 0) return;
  const auto watched = daemons_.try_emplace(daemon, io_, process);
  watched.first->second.async_wait(boost::asio::posix::descriptor_base::wait_read,
                                   [this, daemon](const boost::system::error_code& error) {
                                     if (error) return;
                                     daemons_.erase(daemon);
                                     for (auto entry = entries_.begin(); entry != entries_.end();) {
                                       entry = entry->second.daemon == daemon ? entries_.erase(entry) : ++entry;
                                     }
                                   });
}

void RegionCache::Sweep() {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool kept = entry->second.used || entry->second.region.use_count() > 1;
    entry->second.used = false;
    entry = kept ? std::next(entry) : entries_.erase(entry);
  }
  for (auto watched = daemons_.begin(); watched != daemons_.end();) {
    const bool kept = std::any_of(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry.second.daemon == watched->first; });
    watched = kept ? std::next(watched) : daemons_.erase(watched);
  }
  timer_.expires_after(std::chrono::milliseconds(kIdleMs));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) Sweep();
  });
}

void RegionCache::Close() {
  timer_.cancel();
  daemons_.clear();
  entries_.clear();
}

}  // namespace kvmanager::tcp
