#include "kvmanager/disk/power_cut_testing.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

using rocksdb::FileOptions;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

constexpr uint64_t kSectorBytes = 512;

std::string FolderOf(const std::string& path) { return std::filesystem::path(path).lexically_normal().parent_path(); }
std::string Plain(const std::string& path) {
  std::string plain = std::filesystem::path(path).lexically_normal();
  while (plain.size() > 1 && plain.back() == '/') plain.pop_back();
  return plain;
}
IOStatus NoPower() { return IOStatus::IOError("no power"); }

class CutIo final : public DiskIo {
 public:
  CutIo(PowerCut* power, std::unique_ptr<DiskIo> io) : power_(power), io_(std::move(io)) {}
  const char* name() const override { return io_->name(); }
  void Start(DiskOp* op) override {
    const int error = op->kind == DiskOp::Kind::kWrite ? power_->Error() : 0;
    if (error != 0 || !power_->on()) {
      op->result = error != 0 ? error : -EIO;
      failed_.push_back(op);
      return io_->Wake();
    }
    if (op->kind == DiskOp::Kind::kWrite) power_->NoteWrite(*op, /*ended=*/false);
    io_->Start(op);
  }
  void Wait(std::vector<DiskOp*>* ended) override {
    io_->Wait(ended);
    for (DiskOp* const op : *ended) {
      if (op->kind == DiskOp::Kind::kWrite) power_->NoteWrite(*op, /*ended=*/true);
    }
    ended->insert(ended->end(), failed_.begin(), failed_.end());
    failed_.clear();
  }
  void Wake() override { io_->Wake(); }

 private:
  PowerCut* const power_;
  const std::unique_ptr<DiskIo> io_;
  std::vector<DiskOp*> failed_;
};

class CutFiles final : public DiskFiles {
 public:
  explicit CutFiles(PowerCut* power) : power_(power), files_(MakeDiskFiles()) {}
  int Open(const std::string& path, bool create, bool* direct) override {
    if (!power_->on()) return -EIO;
    const int fd = files_->Open(path, create, direct);
    if (fd >= 0) power_->NoteOpen(fd, Plain(path), create);
    return fd;
  }
  void Close(int fd) override { files_->Close(fd); }
  int Sync(int fd) override {
    const int error = power_->Error();
    if (error != 0) return error;
    for (const auto& [offset, bytes] : power_->TakePunches(fd)) (void)files_->Punch(fd, offset, bytes);
    return power_->NoteSync(fd) ? 0 : -EIO;
  }
  int SyncFolder(const std::string& path) override {
    for (const std::string& each : power_->TakeUnlinks(Plain(path))) (void)files_->Unlink(each);
    return power_->NoteFolderSync(Plain(path)) ? 0 : -EIO;
  }
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override {
    return power_->on() ? files_->Reserve(fd, offset, bytes) : -EIO;
  }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override {
    if (!power_->on()) return -EIO;
    return power_->PutOffPunch(fd, offset, bytes) ? 0 : files_->Punch(fd, offset, bytes);
  }
  int Unlink(const std::string& path) override {
    if (!power_->on()) return -EIO;
    return power_->PutOffUnlink(Plain(path)) ? 0 : files_->Unlink(path);
  }
  int Replace(const std::string& path, absl::string_view bytes) override {
    const int error = power_->Error();
    if (!power_->on()) return -EIO;
    if (error != 0 && power_->HalfOfThem()) return error;
    const int result = files_->Replace(path, bytes);
    return error != 0 ? error : result;
  }

 private:
  PowerCut* const power_;
  const std::unique_ptr<DiskFiles> files_;
};

class CutWritable final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  CutWritable(PowerCut* power, std::string path, std::unique_ptr<rocksdb::FSWritableFile> file)
      : rocksdb::FSWritableFileOwnerWrapper(std::move(file)), power_(power), path_(std::move(path)) {}
  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* dbg) override {
    if (!power_->NoteAppend(path_, data.size())) return NoPower();
    return FSWritableFileOwnerWrapper::Append(data, options, dbg);
  }
  IOStatus Append(const Slice& data, const IOOptions& options, const rocksdb::DataVerificationInfo& info,
                  IODebugContext* dbg) override {
    if (!power_->NoteAppend(path_, data.size())) return NoPower();
    return FSWritableFileOwnerWrapper::Append(data, options, info, dbg);
  }
  IOStatus Truncate(uint64_t size, const IOOptions& options, IODebugContext* dbg) override {
    return power_->on() ? FSWritableFileOwnerWrapper::Truncate(size, options, dbg) : NoPower();
  }
  IOStatus Sync(const IOOptions& options, IODebugContext* dbg) override {
    const IOStatus flushed = FSWritableFileOwnerWrapper::Flush(options, dbg);
    if (!flushed.ok()) return flushed;
    return power_->NoteFileSync(path_) ? IOStatus::OK() : NoPower();
  }
  IOStatus Fsync(const IOOptions& options, IODebugContext* dbg) override { return Sync(options, dbg); }

 private:
  PowerCut* const power_;
  const std::string path_;
};

class CutDirectory final : public rocksdb::FSDirectoryWrapper {
 public:
  CutDirectory(PowerCut* power, std::string path, std::unique_ptr<rocksdb::FSDirectory> directory)
      : rocksdb::FSDirectoryWrapper(std::move(directory)), power_(power), path_(std::move(path)) {}
  IOStatus Fsync(const IOOptions& options, IODebugContext* dbg) override {
    return power_->NoteFolderSync(path_) ? IOStatus::OK() : NoPower();
  }
  IOStatus FsyncWithDirOptions(const IOOptions& options, IODebugContext* dbg,
                               const rocksdb::DirFsyncOptions& of) override {
    return power_->NoteFolderSync(path_) ? IOStatus::OK() : NoPower();
  }

 private:
  PowerCut* const power_;
  const std::string path_;
};

class CutFileSystem final : public rocksdb::FileSystemWrapper {
 public:
  explicit CutFileSystem(PowerCut* power) : rocksdb::FileSystemWrapper(rocksdb::FileSystem::Default()), power_(power) {}
  const char* Name() const override { return "CutFileSystem"; }
  IOStatus NewWritableFile(const std::string& path, const FileOptions& options,
                           std::unique_ptr<rocksdb::FSWritableFile>* file, IODebugContext* dbg) override {
    if (!power_->on()) return NoPower();
    const IOStatus status = FileSystemWrapper::NewWritableFile(path, options, file, dbg);
    if (status.ok()) {
      power_->NoteCreate(Plain(path));
      *file = std::make_unique<CutWritable>(power_, Plain(path), std::move(*file));
    }
    return status;
  }
  IOStatus ReopenWritableFile(const std::string& path, const FileOptions& options,
                              std::unique_ptr<rocksdb::FSWritableFile>* file, IODebugContext* dbg) override {
    return IOStatus::NotSupported("ReopenWritableFile");
  }
  IOStatus ReuseWritableFile(const std::string& path, const std::string& old, const FileOptions& options,
                             std::unique_ptr<rocksdb::FSWritableFile>* file, IODebugContext* dbg) override {
    return IOStatus::NotSupported("ReuseWritableFile");
  }
  IOStatus NewDirectory(const std::string& path, const IOOptions& options,
                        std::unique_ptr<rocksdb::FSDirectory>* directory, IODebugContext* dbg) override {
    const IOStatus status = FileSystemWrapper::NewDirectory(path, options, directory, dbg);
    if (status.ok()) *directory = std::make_unique<CutDirectory>(power_, Plain(path), std::move(*directory));
    return status;
  }
  IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions& options,
                      IODebugContext* dbg) override {
    if (!power_->NoteRename(Plain(from), Plain(to))) return NoPower();
    return FileSystemWrapper::RenameFile(from, to, options, dbg);
  }
  IOStatus DeleteFile(const std::string& path, const IOOptions& options, IODebugContext* dbg) override {
    if (!power_->on()) return NoPower();
    power_->NoteDelete(Plain(path));
    return FileSystemWrapper::DeleteFile(path, options, dbg);
  }

 private:
  PowerCut* const power_;
};

}  // namespace

PowerCut::PowerCut(uint64_t seed, uint64_t error_every)
    : random_(seed),
      error_every_(error_every),
      files_(std::make_unique<CutFiles>(this)),
      file_system_(std::make_unique<CutFileSystem>(this)) {}
PowerCut::~PowerCut() = default;

std::unique_ptr<DiskIo> PowerCut::WrapIo(std::unique_ptr<DiskIo> io) {
  return std::make_unique<CutIo>(this, std::move(io));
}

void PowerCut::Cut() {
  MutexLock lock(mutex_);
  on_ = false;
}
void PowerCut::FailIndex(bool on) {
  MutexLock lock(mutex_);
  index_fails_ = on;
}
bool PowerCut::on() {
  MutexLock lock(mutex_);
  return on_;
}
int PowerCut::Error() {
  MutexLock lock(mutex_);
  if (error_every_ == 0 || random_() % error_every_ != 0) return 0;
  return random_() % 2 == 0 ? -ENOSPC : -EIO;
}
void PowerCut::NoteOpen(int fd, const std::string& path, bool created) {
  MutexLock lock(mutex_);
  paths_[fd] = path;
  if (created) created_.insert(path);
}
void PowerCut::NoteWrite(const DiskOp& op, bool ended) {
  MutexLock lock(mutex_);
  std::vector<Unsynced>& writes = writes_[paths_[op.fd]];
  if (!ended) return writes.push_back({op.offset, op.bytes, false});
  for (Unsynced& write : writes) {
    if (write.offset == op.offset && write.bytes == op.bytes) write.ended = true;
  }
}
bool PowerCut::NoteSync(int fd) {
  MutexLock lock(mutex_);
  if (!on_) return false;
  std::vector<Unsynced>& writes = writes_[paths_[fd]];
  writes.erase(std::remove_if(writes.begin(), writes.end(), [](const Unsynced& write) { return write.ended; }),
               writes.end());
  return true;
}
bool PowerCut::NoteFolderSync(const std::string& folder) {
  MutexLock lock(mutex_);
  if (!on_) return false;
  for (auto it = created_.begin(); it != created_.end();) {
    it = FolderOf(*it) == folder ? created_.erase(it) : std::next(it);
  }
  renamed_.erase(std::remove_if(renamed_.begin(), renamed_.end(),
                                [&](const Renamed& each) { return FolderOf(each.to) == folder; }),
                 renamed_.end());
  return true;
}
bool PowerCut::HalfOfThem() {
  MutexLock lock(mutex_);
  return random_() % 2 == 0;
}
bool PowerCut::PutOffPunch(int fd, uint64_t offset, uint64_t bytes) {
  MutexLock lock(mutex_);
  if (random_() % 2 == 0) return false;
  punches_[paths_[fd]].emplace_back(offset, bytes);
  return true;
}
bool PowerCut::PutOffUnlink(const std::string& path) {
  MutexLock lock(mutex_);
  if (random_() % 2 == 0) return false;
  unlinks_.insert(path);
  return true;
}
std::vector<std::pair<uint64_t, uint64_t>> PowerCut::TakePunches(int fd) {
  MutexLock lock(mutex_);
  if (!on_) return {};
  return std::exchange(punches_[paths_[fd]], {});
}
std::vector<std::string> PowerCut::TakeUnlinks(const std::string& folder) {
  MutexLock lock(mutex_);
  std::vector<std::string> taken;
  if (!on_) return taken;
  for (const std::string& path : unlinks_) {
    if (FolderOf(path) == folder) taken.push_back(path);
  }
  for (const std::string& path : taken) unlinks_.erase(path);
  return taken;
}
bool PowerCut::NoteAppend(const std::string& path, uint64_t bytes) {
  MutexLock lock(mutex_);
  if (on_) lengths_[path].bytes += bytes;
  return on_;
}
bool PowerCut::NoteFileSync(const std::string& path) {
  MutexLock lock(mutex_);
  if (index_fails_) return false;
  if (on_) lengths_[path].synced = lengths_[path].bytes;
  return on_;
}
void PowerCut::NoteCreate(const std::string& path) {
  MutexLock lock(mutex_);
  created_.insert(path);
  lengths_[path] = {};
}
bool PowerCut::NoteRename(const std::string& from, const std::string& to) {
  MutexLock lock(mutex_);
  if (!on_) return false;
  Renamed renamed{from, to, "", std::filesystem::exists(to)};
  if (renamed.had_old) {
    std::ifstream in(to, std::ios::binary);
    renamed.old_bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  renamed_.push_back(std::move(renamed));
  lengths_[to] = lengths_[from];
  lengths_.erase(from);
  created_.erase(from);
  return true;
}
void PowerCut::NoteDelete(const std::string& path) {
  MutexLock lock(mutex_);
  lengths_.erase(path);
  created_.erase(path);
}

// Of each sector what was written, what was there, or something else.
void PowerCut::Tear(const std::string& path, uint64_t offset, uint64_t bytes) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  const uint64_t how = random_() % 4;  // all is kept, all is lost, or each sector for itself
  for (uint64_t at = offset; at < offset + bytes; at += kSectorBytes) {
    const uint64_t what = how == 0 ? 0 : (how == 1 ? 1 : random_() % 3);
    if (what == 0) continue;
    std::string sector(std::min(kSectorBytes, offset + bytes - at), '\0');
    if (what == 2) {
      for (char& byte : sector) byte = static_cast<char>(random_());
    }
    KV_CHECK(pwrite(fd, sector.data(), sector.size(), static_cast<off_t>(at)) == static_cast<ssize_t>(sector.size()));
  }
  KV_CHECK(fdatasync(fd) == 0);
  close(fd);
}

void PowerCut::Lose() {
  MutexLock lock(mutex_);
  KV_CHECK(!on_);
  for (const auto& [path, writes] : writes_) {
    for (const Unsynced& write : writes) Tear(path, write.offset, write.bytes);
  }
  for (const auto& [path, length] : lengths_) {
    if (length.bytes == length.synced || !std::filesystem::exists(path)) continue;
    const uint64_t is = std::filesystem::file_size(path);
    if (is <= length.synced) continue;
    const uint64_t keeps = length.synced + random_() % (is - length.synced + 1);
    KV_CHECK(truncate(path.c_str(), static_cast<off_t>(keeps)) == 0);
    Tear(path, length.synced, keeps - length.synced);
  }
  for (auto each = renamed_.rbegin(); each != renamed_.rend(); ++each) {
    if (random_() % 2 == 0) continue;
    std::error_code ignored;
    std::filesystem::rename(each->to, each->from, ignored);
    if (each->had_old) std::ofstream(each->to, std::ios::binary) << each->old_bytes;
  }
  for (const std::string& path : created_) {
    if (random_() % 2 == 0) unlink(path.c_str());
  }
  punches_.clear();
  unlinks_.clear();
  writes_.clear();
  lengths_.clear();
  renamed_.clear();
  created_.clear();
  paths_.clear();
  on_ = true;
}

}  // namespace kvmanager::testing
