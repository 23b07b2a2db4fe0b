// Moves records between memory and segment files, on a thread of its own, in pieces.
//
// Pages are copied through aligned staging, kStagingBytes in all: neither a GPU's host memory nor a slot is aligned as
// O_DIRECT wants it, and a page may go once its write has failed. Reads go before writes, and writes leave pieces for
// reads.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kvmanager/base/mutex.h"
#include "kvmanager/disk/disk_io.h"
#include "kvmanager/disk/disk_jobs.h"

namespace kvmanager {

class DiskMover {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  static constexpr uint64_t kStagingBytes = uint64_t{64} << 20;
  static constexpr int kPieces = kStagingBytes / kPieceBytes;
  static constexpr int kPiecesOfWritesMax = kPieces * 3 / 4;

  struct Parts {
    std::unique_ptr<DiskIo> io;
    SegmentFiles* files = nullptr;  // outlives it
    uint64_t reserve_bytes = 0;  // of a segment, ahead of what is written: with them writes do not wait for one another
    // Called on the mover's thread, once for each job.
    std::function<void(std::shared_ptr<WriteJob>)> on_written;
    std::function<void(std::shared_ptr<ReadJob>)> on_read;
  };
  explicit DiskMover(Parts parts);
  /// Ends what was begun first.
  ~DiskMover();
  DiskMover(const DiskMover&) = delete;
  DiskMover& operator=(const DiskMover&) = delete;

  // Any thread. Shared: the loop keeps it, too.
  void Write(std::shared_ptr<WriteJob> job);
  void Read(std::shared_ptr<ReadJob> job);

 private:
  // An op, its staging, and whose it is: one of these.
  struct Piece {
    DiskOp op;
    uint8_t* staging = nullptr;
    std::shared_ptr<WriteJob> write;
    std::shared_ptr<ReadJob> read;
    uint64_t begin = 0;  // in the record
    uint32_t bytes = 0;  // of it
    uint32_t moved = 0;  // of these
    MoveJob& job() { return write != nullptr ? static_cast<MoveJob&>(*write) : *read; }
  };

  void Run();
  bool TakeNew();      // false: nothing comes any more
  bool StartPieces();  // whether there were some
  template <typename Job>
  bool StartPiece(std::deque<std::shared_ptr<Job>>* jobs);
  bool OpenFile(WriteJob* job);
  void Reserve(const WriteJob& job);
  void GiveBackReserve();
  bool OpenFile(ReadJob* job);
  void Go(Piece* piece);
  void OnEnded(Piece* piece);
  void Finish(Piece* piece);
  void Release(Piece* piece);

  Parts parts_;
  Mutex mutex_;
  std::vector<std::shared_ptr<WriteJob>> new_writes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ReadJob>> new_reads_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's.
  std::deque<std::shared_ptr<WriteJob>> writes_;  // with bytes that are not started yet
  std::deque<std::shared_ptr<ReadJob>> reads_;
  uint8_t* staging_ = nullptr;
  std::vector<Piece> pieces_;
  std::vector<Piece*> free_;
  std::vector<DiskOp*> ended_;
  int writing_pieces_ = 0;
  uint32_t reserved_segment_ = 0;
  uint64_t reserved_bytes_ = 0, written_bytes_ = 0;  // of it
  std::thread thread_;
};

}  // namespace kvmanager
