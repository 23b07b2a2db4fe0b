// What a plug-in's process may still do to the system. Linux; no library.
//
// Called once by the process itself, in this order. Children, other processes, sockets of its own, and files other than
// those that the loader reads are out of reach afterwards. docs/security.md, "Plug-ins in a process of their own", says
// what that leaves.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace kvmanager {

/// Before anything of the daemon's user is read: no core files, no new privileges, SIGKILL when the thread that started
/// the process ends, standard streams to /dev/null, first in line when memory runs out. address_bytes: of address
/// space; 0, and in builds with sanitizers: no bound.
void LimitProcess(uint64_t address_bytes);

/// Of all threads, from here on: system calls that compute, take memory, end the process, talk over descriptors that
/// are there, and open files for reading. Others fail with EPERM. Errors: UNAVAILABLE (the kernel has no seccomp).
absl::Status ConfineToReading();
/// The same without opening files.
absl::Status ConfineToComputing();

}  // namespace kvmanager
