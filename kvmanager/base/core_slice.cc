#include "kvmanager/base/core_slice.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvmanager {
namespace {

// As the kernel has it; its header cannot be included beside <sched.h>.
struct SchedAttr {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;
  uint64_t deadline_ns;
  uint64_t period_ns;
};

}  // namespace

void AskForSlice(std::chrono::microseconds slice) {
  SchedAttr attr = {};
  if (::syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0) return;
  if (attr.policy != SCHED_OTHER) return;
  attr.size = sizeof(attr);
  attr.runtime_ns = static_cast<uint64_t>(std::chrono::nanoseconds(slice).count());
  (void)::syscall(SYS_sched_setattr, 0, &attr, 0);
}

}  // namespace kvmanager
