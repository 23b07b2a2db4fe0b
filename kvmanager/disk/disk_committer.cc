#include "kvmanager/disk/disk_committer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

IndexRecord IndexRecordOf(const WriteJob& job) {
  return IndexRecordOf(job.record, job.place, job.header_checksum, job.payer);
}

DiskCommitter::DiskCommitter(Parts parts)
    : parts_(std::move(parts)), marks_(parts_.marks), thread_([this] { Run(); }) {}

DiskCommitter::~DiskCommitter() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  added_.notify_one();
  thread_.join();
}

void DiskCommitter::Add(Op op) {
  {
    MutexLock lock(mutex_);
    ops_.push_back(std::move(op));
  }
  added_.notify_one();
}

void DiskCommitter::Put(std::shared_ptr<WriteJob> job) { Add({.kind = Kind::kPut, .job = std::move(job)}); }
void DiskCommitter::Delete(std::string key) { Add({.kind = Kind::kDelete, .key = std::move(key)}); }
void DiskCommitter::PutAgain(const IndexRecord& record) {
  Add({.kind = Kind::kPutAgain, .key = IndexKey(record.cache, record.key), .value = EncodeIndexValue(record)});
}
void DiskCommitter::Purge(const CacheDigest& cache, const RecordPlace& end) {
  Add({.kind = Kind::kPurge, .cache = cache, .end = end});
}
void DiskCommitter::PurgeAll(const RecordPlace& end) { Add({.kind = Kind::kPurgeAll, .end = end}); }
void DiskCommitter::DropMarks() { Add({.kind = Kind::kDropMarks}); }
void DiskCommitter::Punch(const SegmentPlace& place) { Add({.kind = Kind::kPunch, .place = place}); }
void DiskCommitter::Unlink(uint32_t segment) { Add({.kind = Kind::kUnlink, .place = {segment, 0, 0}}); }

void DiskCommitter::Notify(absl::AnyInvocable<void(absl::Status)> done) {
  Add({.kind = Kind::kNotify, .done = std::move(done)});
}

void DiskCommitter::TryAgain() {
  {
    MutexLock lock(mutex_);
    again_ = true;
  }
  added_.notify_one();
}

void DiskCommitter::Look(bool again) {
  {
    MutexLock lock(mutex_);
    look_ = true;
    again_ |= again;
  }
  added_.notify_one();
}

void DiskCommitter::LookAtFolder() {
  Results results;
  results.folder = parts_.look();
  if (!results.folder.ok()) parts_.on_results(std::move(results));
}

void DiskCommitter::Run() {
  for (;;) {
    std::vector<Op> ops;
    bool again, looks;
    {
      MutexLock lock(mutex_);
      while (ops_.empty() && !stop_ && !again_ && !look_ && leaving_.empty()) lock.Wait(added_);
      if (ops_.empty() && stop_) break;
      again = std::exchange(again_, false);
      looks = std::exchange(look_, false);
      if (ops_.size() <= kOpsMax) {
        ops.swap(ops_);
      } else {
        ops.assign(std::make_move_iterator(ops_.begin()), std::make_move_iterator(ops_.begin() + kOpsMax));
        ops_.erase(ops_.begin(), ops_.begin() + kOpsMax);
      }
    }
    if (looks) LookAtFolder();
    const size_t changes = std::count_if(ops.begin(), ops.end(), [](const Op& op) { return IsChange(op.kind); });
    if (!ops.empty() || (again && !failed_.empty())) Commit(std::move(ops));
    GiveBack(changes + kGivenAtOnce);
  }
  if (!failed_.empty()) Commit({});
  GiveBack(leaving_.size());
}

// Ends jobs that are not to be known, or cannot be.
void DiskCommitter::Sync(const std::vector<Op>& ops, Results* results) {
  absl::flat_hash_set<uint32_t> synced;
  for (const Op& op : ops) {
    if (op.kind != Kind::kPut) continue;
    WriteJob& job = *op.job;
    const uint32_t segment = job.place.segment;
    if (!job.status.ok() || job.cancelled.load()) continue;
    if (!lost_segments_.contains(segment) && synced.insert(segment).second) {
      const int error = Fails(Failpoint::kDiskSync) ? -EIO : parts_.files->Sync(segment);
      if (error != 0) {
        lost_segments_.insert(segment);
        job.status = error == -ENOENT
                         ? absl::UnavailableError(absl::StrCat(parts_.files->PathOf(segment),
                                                               " was removed by somebody else, with blocks in it"))
                         : FileError(absl::StrCat("syncing segment ", segment), error);
        job.failed_at = "sync";
        continue;
      }
    }
    if (lost_segments_.contains(segment)) {
      job.status = absl::UnavailableError(absl::StrCat("syncing segment ", segment, " failed before"));
      job.failed_at = "sync";
    }
  }
}

absl::Status DiskCommitter::SaveMarks() {
  if (!marks_changed_) return absl::OkStatus();
  KV_RETURN_IF_ERROR(parts_.save_marks(marks_));
  marks_changed_ = false;
  return absl::OkStatus();
}

absl::Status DiskCommitter::MarkPurges(const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (op.kind != Kind::kPurge && op.kind != Kind::kPurgeAll) continue;
    if (op.kind == Kind::kPurge) marks_.NotePurge(op.cache, op.end);
    if (op.kind == Kind::kPurgeAll) marks_.NotePurgeOfAll(op.end);
    marks_changed_ = true;
  }
  return SaveMarks();
}

absl::Status DiskCommitter::Change(const std::vector<Op>& ops) {
  bool any = false;
  for (const Op& op : ops) {
    if (!IsChange(op.kind)) continue;
    switch (op.kind) {
      case Kind::kPut: {
        if (!op.job->status.ok() || op.job->cancelled.load()) continue;
        const DiskRecord& record = op.job->record;
        parts_.db->Put(IndexKey(record.cache, record.name.key), EncodeIndexValue(IndexRecordOf(*op.job)));
        break;
      }
      case Kind::kPutAgain:
        parts_.db->Put(op.key, op.value);
        break;
      case Kind::kDelete:
        parts_.db->Delete(op.key);
        break;
      case Kind::kPurge:
        parts_.db->DeletePrefix(IndexPrefix(op.cache));
        break;
      default:
        parts_.db->DeletePrefix(kIndexPrefixOfAll);
        break;
    }
    any = true;
  }
  return any ? parts_.db->Commit() : absl::OkStatus();
}

void DiskCommitter::Commit(std::vector<Op> ops) {
  Results results;
  Sync(ops, &results);
  std::vector<Op> all = std::exchange(failed_, {});
  all.insert(all.end(), std::make_move_iterator(ops.begin()), std::make_move_iterator(ops.end()));
  const bool puts = std::any_of(all.begin(), all.end(), [](const Op& op) {
    return op.kind == Kind::kPut && op.job->status.ok() && !op.job->cancelled.load();
  });
  absl::Status status = MarkPurges(all);
  if (status.ok()) status = Change(all);
  for (Op& op : all) {
    if (op.kind != Kind::kNotify) continue;
    results.notified.push_back([done = std::move(op.done), removed = status.ok()]() mutable {
      done(removed ? absl::OkStatus() : absl::UnavailableError("the disk's index refuses: it is tried again"));
    });
  }
  std::erase_if(all, [](const Op& op) { return op.kind == Kind::kNotify; });
  // A status of each one's own: they go to another thread, and ThreadSanitizer does not know of Abseil's counts.
  for (Op& op : all) {
    if (op.kind != Kind::kPut) continue;
    WriteJob& job = *op.job;
    if (!status.ok() && job.status.ok() && !job.cancelled.load()) {
      job.status = absl::UnavailableError(status.message());
      job.failed_at = "index";
    }
    results.writes.push_back(op.job);
  }
  if (status.ok()) {
    for (Op& op : all) {
      if (IsChange(op.kind)) continue;
      if (op.kind == Kind::kDropMarks) {
        marks_.Drop(parts_.marks);
        marks_changed_ = true;
        (void)SaveMarks();  // else with the next purge
        continue;
      }
      if (op.kind == Kind::kUnlink) unlinked_.try_emplace(op.place.segment);
      leaving_.push_back(std::move(op));
    }
  } else {
    // Puts may be durable nevertheless: they become removals.
    for (Op& op : all) {
      if (op.kind == Kind::kPut) {
        if (op.job->failed_at != std::string_view("index")) continue;
        const DiskRecord& record = op.job->record;
        op = {.kind = Kind::kDelete, .key = IndexKey(record.cache, record.name.key)};
      }
      failed_.push_back(std::move(op));
    }
    if (!puts) {
      results.error = absl::UnavailableError(status.message());
      results.failed_at = "index";
    }
  }
  parts_.on_results(std::move(results));
}

void DiskCommitter::GiveBack(size_t places_max) {
  if (leaving_.empty()) return;
  Results results;
  const auto note = [&](const char* what, uint32_t segment, int error) {
    results.error = FileError(absl::StrCat(what, segment), error);
    results.failed_at = "space";
  };
  for (size_t i = 0; i < places_max && !leaving_.empty(); ++i, leaving_.pop_front()) {
    const Kind kind = leaving_.front().kind;
    const SegmentPlace place = leaving_.front().place;
    const auto unlinked = unlinked_.find(place.segment);
    if (kind == Kind::kUnlink) {
      const int error = parts_.files->Unlink(place.segment);
      if (error != 0 && error != -ENOENT) note("removing segment ", place.segment, error);
      results.punched_bytes += unlinked->second;
      unlinked_.erase(unlinked);
      lost_segments_.erase(place.segment);
    } else if (unlinked != unlinked_.end()) {
      unlinked->second += place.bytes;  // no holes in a file that goes
    } else if (const int error = parts_.files->Punch(place); error == 0 || error == -ENOENT) {
      results.punched_bytes += place.bytes;
    } else {
      results.unpunched.push_back(place);
      if (error != -EOPNOTSUPP) note("giving back bytes of segment ", place.segment, error);
    }
  }
  parts_.on_results(std::move(results));
}

}  // namespace kvmanager
