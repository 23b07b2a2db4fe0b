// The process that keeps a daemon's memory while no daemon runs: it holds the descriptors of the memory, and gives them
// to the next daemon. It never maps it.
//
// It serves processes of its own user at FOLDER/keeper. One that a daemon starts ends with the daemon's service, if
// that is one: so a keeper that is a service itself takes its place, with all that it keeps.
#pragma once

#include <functional>

namespace kvmanager {

/// kvmanagerd runs as that process with these arguments: this, the folder and, if a daemon starts it, after how many
/// seconds without a daemon it ends.
inline constexpr char kKeeperFlag[] = "--keeper";

/// ready: called once daemons can reach it. The exit status: 0: it was told to end, its time was over, or, if a daemon
/// started it, another keeper is there; 1: an error, which was printed, as that another service's keeper is there; 2:
/// wrong arguments. Called in a process of its own, before it has other threads.
int RunKeeper(int argc, char** argv, const std::function<void()>& ready = {});

}  // namespace kvmanager
