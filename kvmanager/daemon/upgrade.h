// An upgrade: another program goes on in this process, with its flags, its listening sockets and, by the keeper, its
// host memory.
//
//   CheckSuccessor      before anything is given up: the new program is run with --check and this daemon's flags
//   RunSuccessor        once the server has ended: exec()
//
// Any thread, but for RunSuccessor, which ends the others.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/daemon/options.h"

namespace kvmanager {

/// kvmanagerd does no more with this in front of its flags than to look whether it takes them.
inline constexpr char kCheckFlag[] = "--check";

/// The exit status: 0: the flags are taken, and what an upgrade must know was printed; 2: an error, which was printed.
int RunCheck(int argc, char** argv);

/// The path that this program was started by, which leads to the next version once that is installed there. argv0: as
/// main() has it.
std::string ProgramPath(const std::string& argv0);

struct Successor {
  std::string program;                // an absolute path; empty: there is none
  std::vector<HandedSocket> sockets;  // owned by whoever has them
};

/// What CheckSuccessor found.
struct CheckedSuccessor {
  std::string program, version;
};

/// Runs `program`, an absolute path, or "" for options.command's, with --check and the flags of this one. It takes
/// milliseconds, at most kCheckMs. cold: memory need not outlive it. Errors: INVALID_ARGUMENT naming `program`: no
/// regular file, of another owner than root and this user, others may write it, it cannot be run, it refuses the flags;
/// FAILED_PRECONDITION: it would not go on in the memory of this one.
absl::StatusOr<CheckedSuccessor> CheckSuccessor(const Options& options, const std::string& program, bool cold);
inline constexpr int kCheckMs = 4000;

/// From a thread of its own RunSuccessor takes place after kEndMs, however far this process has come by then: what it
/// leaves is as after a kill, which its successor can bear.
void RunSuccessorAtTheLatest(const Successor& successor, const Options& options);
inline constexpr int kEndMs = 1000;

/// Returns, with an exit status, if neither the successor nor this program can be run. leaves: what this process has
/// mapped is unmapped by a process of its own, which ends with it: else exec() waits for that, a second for each 10 to
/// 20 GiB. The first thread that calls it does all of this; others wait until they end with the process.
int RunSuccessor(const Successor& successor, const Options& options, bool leaves);

}  // namespace kvmanager
