// The directory of a disk: whose it is, what is in it, and how it is set aside when it cannot be trusted.
//
//   lock          held while a daemon has it open
//   index/        RocksDB
//   segments/     the records
//   marks         which records are its own, and which were purged (record_marks.h)
//   sealed        while no daemon has it open: how the last one left the index (index_seal.h)
//   damaged       how the index was found damaged, until it was made anew from the records
//   set-aside-T/  index/, segments/ and marks of a time T, which nobody uses again; kSetAsideMax are kept
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
#include "kvmanager/disk/record_marks.h"

namespace kvmanager {

class DiskFolder {
 public:
  static constexpr size_t kSetAsideMax = 2;

  /// LockedFolder's, which errors name --disk-path.
  static absl::StatusOr<DiskFolder> Open(const std::string& path);

  const std::string& path() const { return folder_.path(); }
  std::string index() const { return folder_.path() + "/index"; }
  std::string segments() const { return folder_.path() + "/segments"; }
  std::string marks() const { return folder_.path() + "/marks"; }
  std::string sealed() const { return folder_.path() + "/sealed"; }
  /// FAILED_PRECONDITION: a folder is where a file would be written.
  absl::Status CheckFiles() const;
  /// Makes the folders that are not there.
  absl::Status Make() const;
  /// DATA_LOSS: the last daemon found the index damaged; its words.
  absl::Status damage() const;
  bool has_segments() const;
  /// RocksDB would not begin a new one.
  bool has_index() const;
  /// RocksDB has one from the first opening on, and would take it for one that is not needed any more.
  bool has_index_log() const;
  absl::Status MarkDamaged(absl::string_view why) const;
  /// Takes that back: the index is whole.
  absl::Status ClearDamaged() const;
  absl::Status RemoveSealed() const;
  /// Nobody has the index open any more. Where it is damaged, nothing is done.
  void Seal(DiskFiles* files) const;
  /// Behind MarkDamaged. No link is followed.
  absl::Status RemoveIndex() const;
  /// Renames index, segments and marks, and says in the log why and what to do: by why's code, whether they are
  /// damaged, or (UNIMPLEMENTED) of another version. Older folders that were set aside are removed first, but for the
  /// newest.
  absl::Status SetAside(const absl::Status& why) const;

 private:
  explicit DiskFolder(LockedFolder folder) : folder_(std::move(folder)) {}
  void RemoveOldAsides() const;
  absl::Status Remove(const char* name) const;

  LockedFolder folder_;
};

/// Whether a folder of a disk is still the one that was opened: somebody may remove it, or put another in its place.
class FolderWatch {
 public:
  /// The folder as it is: index and segments are there.
  explicit FolderWatch(const DiskFolder& folder);
  /// Any thread; asks the file system. NOT_FOUND: naming what is gone, or another.
  absl::Status Check() const;
  /// Something of it is where it was: a start may find its records. As Check.
  bool IsThere() const;

 private:
  struct Part {
    std::string path;
    dev_t device = 0;
    ino_t inode = 0;
  };
  std::vector<Part> parts_;
};

/// What a disk has beside its records, opened.
struct OpenedIndex {
  std::unique_ptr<IndexDb> db;
  RecordMarks marks;
  uint32_t segment_of_most = 0;  // the highest number that a file or a mark has
  std::string damage;            // why db has nothing, and records are to be found without it; empty: it has them
};

/// The index that is there, or a new one. One that is damaged or missing gives way to an empty one, and `damage` says
/// so; where records cannot be found without it, or it is of another version, everything is set aside. Errors:
/// IndexDb::Open's, which name --disk-path and the folder.
absl::StatusOr<OpenedIndex> OpenIndex(const DiskFolder& folder, rocksdb::FileSystem* index_files, DiskMetrics* metrics);

}  // namespace kvmanager
