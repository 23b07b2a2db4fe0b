// A disk whose power can be cut: what was written and not synced is then lost, torn or kept, as it falls.
//
// PowerCut is given to a BlockDisk by its files(), make_io() and file_system(). After Cut() every call fails; once the
// disk is closed, Lose() does to the files what a power cut would have done. Behind it they can be opened again.
#pragma once

#include <rocksdb/file_system.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/mutex.h"
#include "kvmanager/disk/disk_io.h"

namespace kvmanager::testing {

class PowerCut {
 public:
  /// error_every: of so many calls that write or sync a segment one fails, with ENOSPC or EIO; 0: none does.
  explicit PowerCut(uint64_t seed, uint64_t error_every = 0);
  ~PowerCut();

  std::unique_ptr<DiskIo> WrapIo(std::unique_ptr<DiskIo> io);
  DiskFiles* files() { return files_.get(); }
  rocksdb::FileSystem* file_system() { return file_system_.get(); }

  void Cut();
  /// While it is on, syncs of the index's files fail.
  void FailIndex(bool on);
  /// The disk is closed.
  void Lose();

  // For what is behind files() and file_system(); each is atomic with respect to Cut.

  /// False: there is no power.
  bool on();
  /// 0, or the error that this call is to have.
  int Error();
  void NoteOpen(int fd, const std::string& path, bool created);
  /// A write began, or ended; of a segment's descriptor.
  void NoteWrite(const DiskOp& op, bool ended);
  /// All ended writes of it are durable. False: there is no power.
  bool NoteSync(int fd);
  bool NoteFolderSync(const std::string& folder);
  /// Whether a punch, or the removal of a file, waits for the next sync: a power cut before that undoes it.
  bool PutOffPunch(int fd, uint64_t offset, uint64_t bytes);
  bool PutOffUnlink(const std::string& path);
  std::vector<std::pair<uint64_t, uint64_t>> TakePunches(int fd);
  std::vector<std::string> TakeUnlinks(const std::string& folder);
  /// Whether a call that fails did what it was to do.
  bool HalfOfThem();

  /// Of the index's files: what is appended, synced, created and renamed.
  bool NoteAppend(const std::string& path, uint64_t bytes);
  bool NoteFileSync(const std::string& path);
  void NoteCreate(const std::string& path);
  bool NoteRename(const std::string& from, const std::string& to);
  void NoteDelete(const std::string& path);

 private:
  struct Unsynced {
    uint64_t offset = 0, bytes = 0;
    bool ended = false;
  };
  struct Renamed {
    std::string from, to, old_bytes;
    bool had_old = false;
  };
  void Tear(const std::string& path, uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  const uint64_t error_every_;
  bool on_ ABSL_GUARDED_BY(mutex_) = true, index_fails_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<int, std::string> paths_ ABSL_GUARDED_BY(mutex_);  // of segments' descriptors
  std::map<std::string, std::vector<Unsynced>> writes_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::pair<uint64_t, uint64_t>>> punches_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> unlinks_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> created_ ABSL_GUARDED_BY(mutex_);  // and their folder was not synced since
  struct Length {
    uint64_t bytes = 0, synced = 0;
  };
  std::map<std::string, Length> lengths_ ABSL_GUARDED_BY(mutex_);  // of the index's files
  std::vector<Renamed> renamed_ ABSL_GUARDED_BY(mutex_);           // likewise
  std::unique_ptr<DiskFiles> files_;
  std::unique_ptr<rocksdb::FileSystem> file_system_;
};

}  // namespace kvmanager::testing
