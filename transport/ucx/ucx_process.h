// The process in which UCX runs for a daemon (UcxMemory). UCX 1.13 believes its peers and ends the process where they
// fail at a bad moment, so it is kept out of the daemon's.
#pragma once

#include <string>

namespace kvmanager {

/// With this as its only argument kvmanagerd runs as that process.
inline constexpr char kUcxProcessFlag[] = "--ucx-process";

/// Whether UCX's headers were there when this was built; "built with UCX 1.13", or why without.
bool IsUcxBuilt();
std::string UcxBuild();

/// Serves the daemon whose descriptors process_wire.h names until it ends; the exit status. Called in a process of its
/// own, before it has other threads.
int RunUcxProcess();

}  // namespace kvmanager
