// The process that keeps a daemon's memory while no daemon runs: it holds the descriptors of the memory, and gives them
// to the next daemon. It never maps it.
//
// It serves processes of its own user at FOLDER/keeper.
#pragma once

namespace kvmanager {

/// kvmanagerd runs as that process with these arguments: this, the folder and, if a daemon starts it, after how many
/// seconds without a daemon it ends.
inline constexpr char kKeeperFlag[] = "--keeper";

/// The exit status: 0: it was told to end, its time was over, or another keeper is there; 1: an error, which was
/// printed; 2: wrong arguments. Called in a process of its own, before it has other threads.
int RunKeeper(int argc, char** argv);

}  // namespace kvmanager
