// The process that a codec plug-in runs in: loads the object, and serves the calls of the daemon that started it
// (plugin_process.h).
//
// A thread for each lane takes a call, hands the plug-in places in the lane's memory, and answers. The main thread
// loads the object and then waits for the daemon's end. The daemon is believed; the plug-in may do to this process what
// it likes, within what confinement.h leaves it.
#pragma once

namespace kvmanager {

/// With this as its only argument kvmanagerd runs as that process.
inline constexpr char kPluginHostFlag[] = "--codec-plugin-host";

/// Serves the daemon whose descriptors plugin_wire.h names until it ends; the exit status. Called in a process of its
/// own, before it has other threads.
int RunPluginHost();

}  // namespace kvmanager
