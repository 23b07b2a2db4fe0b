// The command line of a daemon on this host, read before an upgrade so that the daemon can be started again.
//
// It is read from /proc and changes nothing. Any thread.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvmanager::client::cli {

struct DaemonCommand {
  pid_t pid = 0;                   // 0: unknown, as of a daemon in another PID namespace
  std::vector<std::string> words;  // the program and its flags; empty: unknown
  std::string directory;           // where it was started; empty: this user may not see it
  std::string unit;                // its systemd service; empty: it has none, or it is unknown
};

/// The daemon that listens on `address`, unix:PATH; without a PID if it is another kind of address, or nobody does.
DaemonCommand CommandOf(const std::string& address);

/// What a folder as /proc/PID says.
DaemonCommand ReadCommand(const std::string& folder);
/// Whether the process of such a folder is there, and more than a zombie.
bool Runs(const std::string& folder);

/// How to start the earlier version after the new one has not served: sentences that begin with a capital, and the
/// command on a line of its own. runs: whether the process is still there. program: --program of the upgrade, or empty.
/// cold: memory was not to be kept.
std::string HowToStartAgain(const DaemonCommand& before, bool runs, const std::string& program, bool cold);

}  // namespace kvmanager::client::cli
