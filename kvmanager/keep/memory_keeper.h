// A daemon's side of the keeper of its memory (keeper.h): what an earlier daemon had kept, and what is to be kept now.
//
// Calls wait for the keeper, some milliseconds; they are for a daemon's start.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/keep/keeper_wire.h"

namespace kvmanager {

class MemoryKeeper {
 public:
  /// The keeper of `folder`, which this daemon has locked. program: how one is started if none is there: kvmanagerd,
  /// and its arguments. Errors: INVALID_ARGUMENT (the folder's path is too long); UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<MemoryKeeper>> Open(const std::string& folder,
                                                            const std::vector<std::string>& program);
  /// The keeper knows by this that the daemon has gone.
  ~MemoryKeeper();
  MemoryKeeper(const MemoryKeeper&) = delete;
  MemoryKeeper& operator=(const MemoryKeeper&) = delete;

  /// A descriptor that was kept, which becomes the caller's; -1: there is none of this name.
  int Take(const std::string& name);
  /// How many were kept and not taken.
  size_t left() const { return found_.size(); }
  /// fd: stays the caller's. Errors: UNAVAILABLE.
  absl::Status Keep(absl::string_view name, int fd);
  /// What was kept is given up, and not found any more.
  absl::Status Forget();
  /// After so many seconds without a daemon it ends; a keeper that was started without such a time never does. Errors:
  /// UNAVAILABLE: it has gone, or is of an earlier version.
  absl::Status SetIdle(int64_t seconds);
  /// UNAVAILABLE: it has gone. DEADLINE_EXCEEDED: it does not answer within a second.
  absl::Status Ping();
  /// It has ended, or closed the connection. Does not wait.
  bool gone() const;
  /// Whether the next daemon would find it: its socket is where it was.
  bool is_found() const;
  /// Of its process, as the socket's credentials say.
  uint32_t pid() const;

 private:
  /// The one that listens at `path`, or a new one.
  static absl::StatusOr<std::unique_ptr<MemoryKeeper>> Reach(const std::string& path,
                                                             const std::vector<std::string>& program);
  MemoryKeeper(int socket, const std::string& path);
  absl::Status List();
  absl::Status Ask(KeeperPacketType type, absl::string_view name, int fd);
  void CloseFound();

  const int socket_;
  const std::string path_;
  dev_t device_ = 0;  // of its socket's file
  ino_t inode_ = 0;
  std::map<std::string, int> found_;
};

}  // namespace kvmanager
