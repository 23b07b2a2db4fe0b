// What the daemon asks of its host when it starts. Any thread.
#pragma once

#include <sched.h>
#include <sys/random.h>

#include <algorithm>
#include <cstdint>

#include "kvmanager/base/status.h"
#include "kvmanager/daemon/options.h"

namespace kvmanager {

/// CPUs that this process may use, 1..Options::kThreadsMax.
inline int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::clamp<int>(CPU_COUNT(&set), 1, Options::kThreadsMax);
}

/// Random, and not 0.
inline uint64_t RandomEpoch() {
  uint64_t epoch = 0;
  while (epoch == 0) KV_CHECK(getrandom(&epoch, sizeof epoch, 0) == sizeof epoch);
  return epoch;
}

}  // namespace kvmanager
