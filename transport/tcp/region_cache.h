// Other daemons' memory, mapped once and kept for the hand-offs to come: mapping two gigabytes anew costs as much as
// copying them. It is let go when its daemon ends, so that its successor can have the memory, and when no hand-off has
// used it for a while. Owned by Loop; the transport's thread alone, and workers, which unmap.
#pragma once

#include <sys/types.h>

#include <boost/asio.hpp>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/memory/region.h"

namespace kvmanager::tcp {

class RegionCache {
 public:
  using Executor = boost::asio::io_context::executor_type;
  static constexpr int64_t kIdleMs = 30000;  // between once and twice as long is kept what no hand-off uses

  /// workers: outlive all regions.
  RegionCache(boost::asio::io_context& io, WorkerPool& workers);
  /// Maps the memory behind `fd`, and takes `fd`. The memory belongs to the daemon that connected `socket`. Shared with
  /// the data connections that copy out of it. Errors: Region::Map's.
  absl::StatusOr<std::shared_ptr<const Region>> Map(int fd, uint64_t bytes, int socket);
  /// Lets go of everything, at once and from now on.
  void Close();

 private:
  using Inode = std::pair<dev_t, ino_t>;
  struct Entry {
    std::shared_ptr<const Region> region;
    pid_t daemon = 0;
    bool used = true;  // since the last Sweep
  };
  /// Forgets a daemon's regions when it ends. Without a descriptor of its process they go when they are idle.
  void Watch(pid_t daemon, int socket);
  void Sweep();

  boost::asio::io_context& io_;
  WorkerPool& workers_;
  boost::asio::basic_waitable_timer<std::chrono::steady_clock, boost::asio::wait_traits<std::chrono::steady_clock>,
                                    Executor>
      timer_;
  std::map<Inode, Entry> entries_;
  std::map<pid_t, boost::asio::posix::basic_stream_descriptor<Executor>> daemons_;
};

}  // namespace kvmanager::tcp
