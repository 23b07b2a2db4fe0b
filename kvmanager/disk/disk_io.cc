#include "kvmanager/disk/disk_io.h"

#include <fcntl.h>
#include <liburing.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <thread>

#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kThreads = 8;  // of ThreadIo: reads in flight

class UringIo final : public DiskIo {
 public:
  UringIo(const io_uring& ring, int wake) : ring_(ring), wake_(wake) { ListenForWake(); }
  ~UringIo() override {
    io_uring_queue_exit(&ring_);
    close(wake_);
  }

  const char* name() const override { return "io_uring"; }
  void Start(DiskOp* op) override {
    io_uring_sqe* const sqe = Next();
    if (op->kind == DiskOp::Kind::kRead) {
      io_uring_prep_read(sqe, op->fd, op->data, op->bytes, op->offset);
    } else {
      io_uring_prep_write(sqe, op->fd, op->data, op->bytes, op->offset);
    }
    io_uring_sqe_set_data(sqe, op);
  }
  void Wait(std::vector<DiskOp*>* ended) override {
    for (;;) {
      const int submitted = io_uring_submit_and_wait(&ring_, 1);
      KV_CHECK(submitted >= 0 || submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY);
      if (Reap(ended)) return;
    }
  }
  void Wake() override {
    const uint64_t one = 1;
    KV_CHECK(write(wake_, &one, sizeof one) == sizeof one || errno == EAGAIN);
  }

 private:
  io_uring_sqe* Next() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      (void)io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }
  void ListenForWake() {
    io_uring_sqe* const sqe = Next();
    io_uring_prep_read(sqe, wake_, &wakes_, sizeof wakes_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }
  // Whether something ended.
  bool Reap(std::vector<DiskOp*>* ended) {
    bool any = false, woken = false;
    unsigned head, count = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++count;
      any = true;
      auto* const op = static_cast<DiskOp*>(io_uring_cqe_get_data(cqe));
      if (op == nullptr) {
        woken = true;
        continue;
      }
      op->result = cqe->res;
      ended->push_back(op);
    }
    io_uring_cq_advance(&ring_, count);
    if (woken) ListenForWake();
    return any;
  }

  io_uring ring_;
  const int wake_;  // an eventfd, which the ring reads
  uint64_t wakes_ = 0;
};

class ThreadIo final : public DiskIo {
 public:
  ThreadIo() {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~ThreadIo() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
    }
    begin_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }
  void Start(DiskOp* op) override {
    {
      MutexLock lock(mutex_);
      waiting_.push_back(op);
    }
    begin_.notify_one();
  }
  void Wait(std::vector<DiskOp*>* ended) override {
    MutexLock lock(mutex_);
    while (ended_.empty() && !woken_) lock.Wait(end_);
    woken_ = false;
    ended->insert(ended->end(), ended_.begin(), ended_.end());
    ended_.clear();
  }
  void Wake() override {
    {
      MutexLock lock(mutex_);
      woken_ = true;
    }
    end_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      DiskOp* op;
      {
        MutexLock lock(mutex_);
        while (waiting_.empty() && !stop_) lock.Wait(begin_);
        if (waiting_.empty()) return;
        op = waiting_.front();
        waiting_.pop_front();
      }
      const auto offset = static_cast<off_t>(op->offset);
      const ssize_t n = op->kind == DiskOp::Kind::kRead ? pread(op->fd, op->data, op->bytes, offset)
                                                        : pwrite(op->fd, op->data, op->bytes, offset);
      op->result = n >= 0 ? n : -errno;
      {
        MutexLock lock(mutex_);
        ended_.push_back(op);
      }
      end_.notify_one();
    }
  }

  Mutex mutex_;
  std::condition_variable begin_, end_;
  std::deque<DiskOp*> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<DiskOp*> ended_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false, stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

int ResultOf(int returned) { return returned == 0 ? 0 : -errno; }

class PosixFiles final : public DiskFiles {
 public:
  int Open(const std::string& path, bool create, bool* direct) override {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_EXCL : 0);
    *direct = true;
    int fd = open(path.c_str(), flags | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL) {
      *direct = false;
      // O_CREAT may have made it before O_DIRECT was refused.
      fd = open(path.c_str(), flags & ~O_EXCL, 0600);
    }
    return fd >= 0 ? fd : -errno;
  }
  void Close(int fd) override { close(fd); }
  int Sync(int fd) override {
    struct stat of;
    if (fdatasync(fd) != 0 || fstat(fd, &of) != 0) return -errno;
    return of.st_nlink > 0 ? 0 : -ENOENT;
  }
  int SyncFolder(const std::string& path) override {
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const int result = ResultOf(fsync(fd));
    close(fd);
    return result;
  }
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override {
    return ResultOf(fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)));
  }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override {
    return ResultOf(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                              static_cast<off_t>(bytes)));
  }
  int Unlink(const std::string& path) override { return ResultOf(unlink(path.c_str())); }
  int Replace(const std::string& path, absl::string_view bytes) override {
    const std::string fresh = path + ".new";
    const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -errno;
    int result = 0;
    while (result == 0 && !bytes.empty()) {
      const ssize_t written = write(fd, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR) result = -errno;
      if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
    }
    if (result == 0) result = ResultOf(fsync(fd));
    close(fd);
    if (result == 0) result = ResultOf(rename(fresh.c_str(), path.c_str()));
    return result == 0 ? SyncFolder(path.substr(0, path.rfind('/'))) : result;
  }
};

}  // namespace

std::unique_ptr<DiskIo> MakeUringIo() {
  io_uring ring;
  if (io_uring_queue_init(DiskIo::kOpsMax * 2, &ring, 0) != 0) return nullptr;
  io_uring_probe* const probe = io_uring_get_probe_ring(&ring);
  const bool can = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                   io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  const int wake = can ? eventfd(0, EFD_CLOEXEC) : -1;
  if (wake < 0) {
    io_uring_queue_exit(&ring);
    return nullptr;
  }
  return std::make_unique<UringIo>(ring, wake);
}

std::unique_ptr<DiskIo> MakeThreadIo() { return std::make_unique<ThreadIo>(); }

std::unique_ptr<DiskIo> OrThreadIo(std::unique_ptr<DiskIo> io) {
  if (io != nullptr) return io;
  spdlog::info("io_uring is refused here: the disk is read and written by threads");
  return MakeThreadIo();
}

std::unique_ptr<DiskFiles> MakeDiskFiles() { return std::make_unique<PosixFiles>(); }

}  // namespace kvmanager
