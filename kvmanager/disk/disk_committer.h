// Makes what was written durable, and then known: one fdatasync and one batch of the index for all that waits, on a
// thread of its own, so that reads never wait for a sync.
//
// Invariants:
//  1. The index names a record only if its segment was synced behind its last byte.
//  2. Bytes are given back to the file system only once no record of the index names them.
//  3. Changes reach the index in the order in which they were added. A removal that failed is tried again before all
//     later changes.
//  4. Records and removals become durable before bytes are given back; these go some at a time, between batches.
//  5. A purge is among the marks, durably, before the index has it, and so before it is answered.
//  6. What was written to a segment whose sync failed is not trusted: none of its records that are not in the index yet
//     gets there.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/disk/disk_jobs.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/record_marks.h"

namespace kvmanager {

/// What the index is to say of a record.
IndexRecord IndexRecordOf(const WriteJob& job);

class DiskCommitter {
 public:
  static constexpr size_t kOpsMax = 4096;     // in one batch
  static constexpr size_t kGivenAtOnce = 64;  // places between two batches, beyond one for each change of the first

  /// What came of some ops.
  struct Results {
    std::vector<std::shared_ptr<WriteJob>> writes;  // status says
    uint64_t punched_bytes = 0;
    std::vector<SegmentPlace> unpunched;  // the file system cannot give them back
    absl::Status error;                   // of something else than these writes
    const char* failed_at = "";
    std::vector<absl::AnyInvocable<void()>> notified;  // Notify's, with what came of it
    absl::Status folder;                               // Look's, if it is not OK
  };
  struct Parts {
    SegmentFiles* files = nullptr;  // these outlive it
    IndexDb* db = nullptr;
    std::function<void(Results)> on_results;                     // on its thread
    std::function<absl::Status()> look;                          // likewise: whether the disk's folder is still there
    RecordMarks marks;                                           // as they are on the disk
    std::function<absl::Status(const RecordMarks&)> save_marks;  // likewise: makes them durable
  };
  explicit DiskCommitter(Parts parts);
  /// Ends what was added; tries everything once.
  ~DiskCommitter();
  DiskCommitter(const DiskCommitter&) = delete;
  DiskCommitter& operator=(const DiskCommitter&) = delete;

  // Any thread.
  void Put(std::shared_ptr<WriteJob> job);  // whose bytes were written
  void Delete(std::string key);
  /// Of a record that is on the disk, and that the index has lost.
  void PutAgain(const IndexRecord& record);
  /// All records of a cache, or all, that begin before `end`.
  void Purge(const CacheDigest& cache, const RecordPlace& end);
  void PurgeAll(const RecordPlace& end);
  /// The bytes of all records that the marks named at the start have gone for good.
  void DropMarks();
  void Punch(const SegmentPlace& place);
  void Unlink(uint32_t segment);
  /// Hands `done` to on_results once the changes of the index that were added before were tried.
  void Notify(absl::AnyInvocable<void(absl::Status)> done);
  /// Tries once more what has failed.
  void TryAgain();
  /// Looks whether the disk's folder is there: on_results is told if it is not.
  void Look(bool again);

 private:
  enum class Kind : uint8_t { kPut, kPutAgain, kDelete, kPurge, kPurgeAll, kDropMarks, kPunch, kUnlink, kNotify };
  struct Op {
    Kind kind = Kind::kPut;
    std::string key, value;                       // of kDelete, kPutAgain
    CacheDigest cache;                            // of kPurge
    RecordPlace end;                              // of kPurge, kPurgeAll
    std::shared_ptr<WriteJob> job;                // of kPut
    SegmentPlace place;                           // of kPunch, kUnlink
    absl::AnyInvocable<void(absl::Status)> done;  // of kNotify
  };

  static bool IsChange(Kind kind) { return kind < Kind::kDropMarks; }
  void Add(Op op);
  void Run();
  void Commit(std::vector<Op> ops);
  void Sync(const std::vector<Op>& ops, Results* results);
  void LookAtFolder();
  /// Purges of `ops` are among the marks.
  absl::Status MarkPurges(const std::vector<Op>& ops);
  absl::Status SaveMarks();
  /// The changes are in the index.
  absl::Status Change(const std::vector<Op>& ops);
  /// The first of `leaving_`, at most so many.
  void GiveBack(size_t places_max);

  const Parts parts_;
  Mutex mutex_;
  std::condition_variable added_;
  std::vector<Op> ops_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false, again_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's.
  std::vector<Op> failed_;                            // removals, and places to give back behind them
  std::deque<Op> leaving_;                            // of kPunch and kUnlink, that nothing names any more
  absl::flat_hash_map<uint32_t, uint64_t> unlinked_;  // segments that `leaving_` unlinks, and bytes that go with them
  absl::flat_hash_set<uint32_t> lost_segments_;       // whose sync failed
  RecordMarks marks_;
  bool marks_changed_ = false;  // and are not saved
  std::thread thread_;
};

}  // namespace kvmanager
