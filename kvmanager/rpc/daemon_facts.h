// What one daemon says about itself. Set while it starts, unchanged afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace kvmanager {

struct DaemonFacts {
  std::string version;
  uint64_t boot_epoch = 0;
  int64_t start_ns = 0;                                          // of the daemon's clock
  std::string listen, peer_listen, metrics_listen, http_listen;  // as bound
  std::string admin_listen;                                      // the same; empty: nobody has Admin
  std::string gpus;                                              // what GPUs this process sees, or why none
  std::function<std::string()> ucx;                              // whether pages go through UCX, or why not
  bool busy_polls = false;
};

}  // namespace kvmanager
