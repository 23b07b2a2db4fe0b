// A folder that one daemon alone uses, for as long as it holds this.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

class LockedFolder {
 public:
  /// Makes it (mode 0700) if it is not there, its parent must be, and locks its file `lock`. Waits up to a minute for a
  /// process that has it and is ending. field: the option that errors name. Errors: INVALID_ARGUMENT (no directory);
  /// FAILED_PRECONDITION (foreign owner or mode, another process has it open); UNAVAILABLE.
  static absl::StatusOr<LockedFolder> Open(absl::string_view field, const std::string& path);
  /// What Open would say of the place, as far as that can be told while nothing is made and another may have it.
  static absl::Status CheckPlace(absl::string_view field, const std::string& path);
  LockedFolder(LockedFolder&& other) noexcept : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}
  LockedFolder& operator=(LockedFolder&&) = delete;
  ~LockedFolder();

  const std::string& path() const { return path_; }

 private:
  LockedFolder(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  std::string path_;
  int lock_;
};

}  // namespace kvmanager
