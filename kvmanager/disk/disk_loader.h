// Reads the index of a disk at its start, on a thread of its own, and hands it to the loop in pieces. Where there is no
// index, it finds the records by their headers (record_walk.h): in the order in which they were written, and of two of
// one name the later one counts.
//
// A few batches wait for the loop, so that neither waits for the other; a turn of the loop may take them all, and they
// are small enough for that. First come the records, in the order of their names; then the order in which the eviction
// policy is to hear of them; last what is left over. After that the thread gives back the bytes between records: of
// writes that a crash cut off, of holes it left, and of purged records: then no mark of a purge is needed any more.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/record_marks.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {

class DiskLoader {
 public:
  static constexpr size_t kRecordsOfBatch = 250;
  static constexpr int kBatchesMax = 4;  // that wait for the loop

  struct Batch {
    std::vector<IndexRecord> records;   // inserted in this order, number 0 first
    std::vector<std::string> damaged;   // keys whose values cannot be used, or name bytes that are not there
    std::vector<std::string> purged;    // keys of records that a purge covers: a crash came before the index had it
    std::vector<uint32_t> overlapping;  // numbers of records that share bytes: none is trusted
    /// Numbers of all records, the first to go first: of a chain the end, of equals the ones that were written first.
    std::vector<uint32_t> order;
    bool is_last = false;
    absl::Status status;           // of the last: whether all was read
    uint32_t segment_of_most = 0;  // of the last: the highest number that a file or a record has
    int bad_reads = 0;             // of the last: pieces that could not be read, where there is no index
  };
  struct Parts {
    IndexDb* db = nullptr;  // these outlive it
    SegmentFiles* files = nullptr;
    std::function<void(Batch)> on_batch;  // on its thread
    std::function<void()> on_clean;       // likewise, last: what the marks name has gone for good
    RecordMarks marks;                    // of the start
    bool walks = false;                   // there is no index
  };
  explicit DiskLoader(Parts parts);
  /// Ends early.
  ~DiskLoader();
  DiskLoader(const DiskLoader&) = delete;
  DiskLoader& operator=(const DiskLoader&) = delete;

  /// The loop has taken a batch.
  void Taken();

 private:
  struct Where {
    uint32_t segment = 0, index = 0, number = 0;
    uint64_t begin = 0, end = 0;
  };

  void Run();
  bool Post(Batch batch);  // waits while many wait; false: stop
  absl::Status Scan(Batch* last);
  /// add: false: stop.
  absl::Status Walk(std::vector<SegmentFiles::Found> files, Batch* last, absl::FunctionRef<bool(IndexRecord)> add);
  void FindOverlaps(Batch* batch) const;  // of records_ by place
  bool PostOrder();
  bool GiveBackGaps();  // for good; false: perhaps not all
  bool stopping();

  const Parts parts_;
  Mutex mutex_;
  std::condition_variable taken_;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;  // batches
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's.
  std::vector<Where> records_;
  absl::flat_hash_map<uint32_t, uint64_t> files_;  // bytes of segments
  std::thread thread_;
};

}  // namespace kvmanager
