// What one daemon says about itself. Set while it starts, unchanged afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvmanager {

/// A bound of the daemon, as api::LimitInfo has it.
struct Limit {
  std::string name, scope, unit;
  uint64_t limit = 0;
  std::optional<uint64_t> used;  // nothing: it is not counted
  std::string flag, bounds;
};

/// What DIR of --disk-path has, as api::DiskStatus says it.
struct DiskFacts {
  std::string path;
  uint64_t capacity_bytes = 0, used_bytes = 0, blocks = 0, unwritten_blocks = 0;
  std::string state;
};

/// Who keeps the memory of --state-dir, as api::KeptMemory says it.
struct KeptMemoryFacts {
  std::string state_dir, state;
  uint32_t pid = 0;  // 0: nobody does
};

struct DaemonFacts {
  std::string version;
  uint64_t boot_epoch = 0;
  int64_t start_ns = 0;                                          // of the daemon's clock
  std::string listen, peer_listen, metrics_listen, http_listen;  // as bound
  std::string admin_listen;                                      // the same; empty: nobody has Admin
  std::string gpus;                                              // what GPUs this process sees, or why none
  std::function<std::string()> ucx;                              // whether pages go through UCX, or why not
  std::function<std::optional<DiskFacts>()> disk;                // nothing: there is none; the loop's thread
  std::function<std::optional<KeptMemoryFacts>()> kept_memory;   // nothing: without --state-dir; the loop's thread
  std::function<std::vector<Limit>()> limits;                    // every one, with its use now; the loop's thread
  bool busy_polls = false;
};

}  // namespace kvmanager
