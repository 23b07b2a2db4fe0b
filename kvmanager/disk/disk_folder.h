// The directory of a disk: whose it is, what is in it, and how it is set aside when it cannot be trusted.
//
//   lock          held while a daemon has it open
//   index/        RocksDB
//   segments/     the records
//   damaged       the index was found damaged while it was read, and how: the next start sets it aside
//   set-aside-T/  index/ and segments/ of a time T, which nobody uses again; the newest kSetAsideMax are kept
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/locked_folder.h"
#include "kvmanager/disk/disk_metrics.h"
#include "kvmanager/disk/index_db.h"

namespace kvmanager {

class DiskFolder {
 public:
  static constexpr size_t kSetAsideMax = 2;

  /// LockedFolder's, which errors name --disk-path.
  static absl::StatusOr<DiskFolder> Open(const std::string& path);

  const std::string& path() const { return folder_.path(); }
  std::string index() const { return folder_.path() + "/index"; }
  std::string segments() const { return folder_.path() + "/segments"; }
  /// Makes the folders that are not there.
  absl::Status Make() const;
  /// DATA_LOSS: the last daemon found the index damaged; its words.
  absl::Status damage() const;
  bool has_segments() const;
  absl::Status MarkDamaged(absl::string_view why) const;
  /// Renames index and segments, and says in the log why and what to do: by why's code, whether they are damaged, or
  /// (UNIMPLEMENTED) of another version. Older folders that were set aside are removed first, but for the newest.
  absl::Status SetAside(const absl::Status& why) const;

 private:
  explicit DiskFolder(LockedFolder folder) : folder_(std::move(folder)) {}
  void RemoveOldAsides() const;

  LockedFolder folder_;
};

/// Whether a folder of a disk is still the one that was opened: somebody may remove it, or put another in its place.
class FolderWatch {
 public:
  /// The folder as it is: index and segments are there.
  explicit FolderWatch(const DiskFolder& folder);
  /// Any thread; asks the file system. NOT_FOUND: naming what is gone, or another.
  absl::Status Check() const;

 private:
  struct Part {
    std::string path;
    dev_t device = 0;
    ino_t inode = 0;
  };
  std::vector<Part> parts_;
};

/// The index that is there, or a new one; one that cannot be trusted is set aside. Errors: IndexDb::Open's, which name
/// --disk-path and the folder.
absl::StatusOr<std::unique_ptr<IndexDb>> OpenIndex(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                                   DiskMetrics* metrics);

}  // namespace kvmanager
