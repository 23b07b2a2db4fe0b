#include "kvmanager/disk/block_disk.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/bad_block_log.h"
#include "kvmanager/disk/block_disk_parts.h"
#include "kvmanager/disk/disk_committer.h"
#include "kvmanager/disk/disk_folder.h"
#include "kvmanager/disk/disk_index.h"
#include "kvmanager/disk/disk_loader.h"
#include "kvmanager/disk/disk_metrics.h"
#include "kvmanager/disk/disk_mover.h"
#include "kvmanager/disk/disk_state.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/load_log.h"
#include "kvmanager/disk/record_marks.h"
#include "kvmanager/disk/segment_files.h"
#include "kvmanager/disk/segment_space.h"
#include "kvmanager/disk/write_gate.h"

namespace kvmanager {
namespace {

constexpr uint64_t kWritingBytesMax = uint64_t{256} << 20;  // on their way; a larger record goes alone
constexpr size_t kWritesMax = 4096;                         // on their way: tables of more take long to grow
constexpr int kEvictionsAtOnce = 64;                        // in one turn
constexpr size_t kWritesEndedAtOnce = 64;

class BlockDiskImpl final : public BlockDisk {
 public:
  BlockDiskImpl(const Options& options, const BlockDiskParts& parts, DiskFolder folder, OpenedIndex opened,
                MessageQueue* queue, DiskMetrics* metrics)
      : shares_(options.bytes),
        folder_(std::move(folder)),
        queue_(queue),
        metrics_(metrics),
        clock_(parts.clock != nullptr ? parts.clock : &steady_clock_),
        own_files_(parts.files == nullptr ? MakeDiskFiles() : nullptr),
        disk_files_(parts.files != nullptr ? parts.files : own_files_.get()),
        files_(folder_.segments(), disk_files_),
        db_(std::move(opened.db)),
        record_seal_(opened.marks.seal()),
        is_made_anew_(!opened.damage.empty()),
        index_(options.eviction, clock_),
        space_(shares_.records) {
    index_.SetLoading(true);
    space_.BeginAbove(opened.segment_of_most);
    committer_ = std::make_unique<DiskCommitter>(
        DiskCommitter::Parts{&files_, db_.get(),
                             [this](DiskCommitter::Results results) {
                               Post([this, results = std::move(results)]() mutable { OnResults(std::move(results)); });
                             },
                             [watch = FolderWatch(folder_)] { return watch.Check(); }, opened.marks,
                             [this, watch = FolderWatch(folder_)](const RecordMarks& marks) {
                               return watch.IsThere() ? marks.Write(folder_.marks(), disk_files_) : absl::OkStatus();
                             }});
    mover_ = std::make_unique<DiskMover>(DiskMover::Parts{
        OrThreadIo(parts.make_io ? parts.make_io() : MakeUringIo()), &files_, shares_.reserve,
        [this](std::shared_ptr<WriteJob> job) { committer_->Put(std::move(job)); },
        [this](std::shared_ptr<ReadJob> job) { Post([this, job = std::move(job)] { OnRead(job); }); }});
    loader_ = std::make_unique<DiskLoader>(DiskLoader::Parts{
        db_.get(), &files_,
        [this](DiskLoader::Batch batch) { Post([this, batch = std::move(batch)] { OnBatch(batch); }); },
        [this] { Post([this] { committer_->DropMarks(); }); }, std::move(opened.marks), is_made_anew_});
    metrics_->capacity_bytes.Set(static_cast<double>(space_.capacity()));
    ShowUse();
  }
  ~BlockDiskImpl() override {
    loader_.reset();
    mover_.reset();  // its writes reach the committer
    committer_.reset();
    db_.reset();
    if (!files_.has_left()) folder_.Seal(disk_files_);
    *alive_ = false;
    metrics_->ShowNone();
  }

  bool loaded() const override { return loaded_; }
  const DiskBlock* Find(const CacheDigest& cache, const BlockKey& key) const override {
    const DiskEntry* const entry = index_.Find(cache, key);
    if (entry == nullptr || failed_reads_.Has({cache, key}, clock_->NowNs())) return nullptr;
    return index_.Describe(*entry);
  }

  void NoteUse(const CacheDigest& cache, absl::Span<const BlockName> names) override { index_.NoteUse(cache, names); }
  uint64_t Retain(const CacheDigest& cache, const BlockKey& key, const Retention& retention) override {
    return index_.Retain(cache, key, retention);
  }

  void Look() override {
    const RetainingEviction::Use use = index_.EndRetentions();
    metrics_->ShowRetained(use.blocks, use.bytes);
    bad_blocks_.NoteLeftOut();
    committer_->Look(/*again=*/gate_.OpensWithin(0) && gate_.TakeTryAgain());
  }

  const char* state() const override {
    if (loaded_) return gate_.state();
    return is_made_anew_ ? "making its index anew from its records" : "reading its index";
  }
  bool TakesWritesWithin(int64_t ns) const override { return gate_.OpensWithin(ns); }

  bool CanWrite(uint64_t page_bytes) const override {
    if (!loaded_ || !TakesWrites()) return false;
    if (gate_.TakeTryAgain()) committer_->TryAgain();
    const uint64_t bytes = page_bytes + kRecordHeaderBytesMax + kDiskPagesMax * kRecordPageAlign + kRecordAlign;
    if (bytes > std::min(kDiskRecordBytesMax, space_.capacity())) return false;
    if (writing_bytes_ > 0 && writing_bytes_ + bytes > kWritingBytesMax) return false;
    if (writes_.size() >= kWritesMax || space_.leaving() > shares_.leaving_max) return false;
    return space_.used() + bytes <= space_.capacity() + index_.evictable_bytes();
  }

  void Write(DiskRecord record, absl::string_view payer, std::vector<const uint8_t*> sources,
             absl::AnyInvocable<void(bool)> done) override {
    const BlockId id{record.cache, record.name.key};
    auto job = MakeWriteJob(std::move(record), payer, std::move(sources), clock_->NowNs());
    // A new record takes the place of one that cannot be read.
    DiskEntry* const old = index_.Find(id.cache, id.key);
    if (old != nullptr && failed_reads_.Has(id, clock_->NowNs())) RemoveFromIndex(old, DiskLoss::kWrong);
    // A name that is there, or a record that CanWrite would not have: refused, whatever the caller thought.
    if (job == nullptr || !loaded_ || !TakesWrites() || index_.Find(id.cache, id.key) != nullptr ||
        writing_.contains(id) || !MakeRoom(job->layout.bytes)) {
      return Post([done = std::move(done)]() mutable { done(false); });
    }
    uint32_t emptied;
    job->place = space_.Take(job->layout.bytes, &job->is_first, &emptied);
    if (emptied != UINT32_MAX) committer_->Unlink(emptied);
    record_seal_.Sign({job->place.segment, job->place.offset}, &job->header);
    writing_bytes_ += job->place.bytes;
    writing_.emplace(id, job.get());
    writes_.emplace(job.get(), std::move(done));
    mover_->Write(std::move(job));
    ShowUse();
  }

  void Read(const CacheDigest& cache, const BlockKey& key, std::vector<Target> targets,
            absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done) override {
    const auto refuse = [&](absl::Status status) {
      Post([done = std::move(done), status = std::move(status)]() mutable { done(std::move(status)); });
    };
    DiskEntry* const entry = index_.Find(cache, key);
    if (entry == nullptr) return refuse(absl::NotFoundError("the block is not on the disk"));
    if (entry->readers == UINT16_MAX) return refuse(absl::UnavailableError("too many read the block"));
    auto job = MakeReadJob(entry, index_.Describe(*entry)->layers, cache, key, targets, clock_->NowNs());
    if (job == nullptr) {
      constexpr char kWhat[] = "the record has pages of other sizes";
      RemoveBad(entry, DiskLoss::kWrong, kWhat);
      return refuse(absl::DataLossError(kWhat));
    }
    index_.BeginRead(entry);
    reading_bytes_ += entry->bytes;
    reads_.emplace(job.get(), std::move(done));
    mover_->Read(std::move(job));
  }

  void Erase(const CacheDigest& cache, const BlockKey& key) override {
    const auto write = writing_.find({cache, key});
    if (write != writing_.end()) {
      write->second->cancelled = true;
      writing_.erase(write);
      committer_->Delete(IndexKey(cache, key));  // it may be in a batch that is being written
    }
    if (!loaded_) erased_early_.blocks.insert({cache, key});
    if (DiskEntry* const entry = index_.Find(cache, key)) {
      RemoveFromIndex(entry, DiskLoss::kWrong);
    } else if (!loaded_) {
      committer_->Delete(IndexKey(cache, key));
    }
    ShowUse();
  }

  void EraseBad(const CacheDigest& cache, const BlockKey& key, const DiskBadPage& page) override {
    if (DiskEntry* const entry = index_.Find(cache, key)) {
      RemoveBad(entry, DiskLoss::kChecksum, BadBlockLog::Describe(page));
    }
  }

  uint64_t EraseCache(const CacheDigest& cache) override {
    CancelWrites([&](const BlockId& id) { return id.cache == cache; });
    committer_->Purge(cache, space_.end());
    if (!loaded_) erased_early_.caches.insert(cache);
    const uint64_t before = index_.blocks();
    index_.ForEach(cache, [&](DiskEntry* entry) { Remove(entry, DiskLoss::kErased); });
    ShowUse();
    return before - index_.blocks();
  }

  uint64_t EraseAll() override {
    CancelWrites([](const BlockId&) { return true; });
    committer_->PurgeAll(space_.end());
    if (!loaded_) erased_early_.all = true;
    const uint64_t before = index_.blocks();
    index_.ForEach([&](DiskEntry* entry) { Remove(entry, DiskLoss::kErased); });
    ShowUse();
    return before - index_.blocks();
  }

  void WhenErased(absl::AnyInvocable<void(absl::Status)> done) override { committer_->Notify(std::move(done)); }
  void OnGone(std::function<void(const CacheDigest&, const BlockKey&, DiskLoss)> fn) override {
    on_gone_ = std::move(fn);
  }

  Use use() const override {
    return {space_.capacity(), space_.used(), index_.blocks(), writing_bytes_, reading_bytes_};
  }

  void CheckInvariants() const override {
    index_.CheckInvariants();
    uint64_t writing = 0, reading = 0;
    for (const auto& [job, done] : writes_) writing += job->place.bytes;
    absl::flat_hash_map<const DiskEntry*, uint64_t> readers;
    for (const auto& [job, done] : reads_) {
      reading += job->place.bytes;
      ++readers[job->entry];
    }
    uint64_t gone = 0;  // which their readers keep
    for (const auto& [entry, count] : readers) {
      KV_CHECK(entry->readers == count);
      if (entry->gone) gone += entry->bytes;
    }
    for (const DiskEntry* const entry : disposed_early_) gone += entry->bytes;
    KV_CHECK(writing == writing_bytes_ && reading == reading_bytes_);
    for (const auto& [id, job] : writing_) {
      KV_CHECK(index_.Find(id.cache, id.key) == nullptr && writes_.contains(job));
    }
    space_.Check(index_.bytes() + writing + gone);
  }

 private:
  // For the loop, if this is still there then.
  void Post(absl::AnyInvocable<void()> message) {
    queue_->Post([alive = alive_, message = std::move(message)]() mutable {
      if (*alive) message();
    });
  }

  void ShowUse() {
    metrics_->used_bytes.Set(static_cast<double>(space_.used()));
    metrics_->blocks.Set(static_cast<double>(index_.blocks()));
  }

  // Evicts until so many bytes fit. False: not now.
  bool MakeRoom(uint64_t bytes) {
    if (bytes > space_.capacity()) return false;
    for (int i = 0; space_.used() + bytes > space_.capacity(); ++i) {
      DiskEntry* const victim = i < kEvictionsAtOnce ? index_.Victim() : nullptr;
      if (victim == nullptr) return false;
      metrics_->evicted_blocks.Increment();
      committer_->Delete(IndexKey(index_.CacheOf(*victim), victim->key()));
      Remove(victim, DiskLoss::kEvicted);
    }
    return true;
  }

  void RemoveFromIndex(DiskEntry* entry, DiskLoss loss) {
    committer_->Delete(IndexKey(index_.CacheOf(*entry), entry->key()));
    Remove(entry, loss);
    ShowUse();
  }

  void RemoveBad(DiskEntry* entry, DiskLoss loss, absl::string_view what) {
    metrics_->errors("loss").Increment();
    bad_blocks_.Note(entry->key(), entry->place(), what, /*goes=*/true);
    RemoveFromIndex(entry, loss);
  }

  // Its name has left the database, or is about to.
  void Remove(DiskEntry* entry, DiskLoss loss) {
    const CacheDigest cache = index_.CacheOf(*entry);
    const BlockKey key = entry->key();
    failed_reads_.Forget({cache, key});
    index_.Remove(entry, /*evicted=*/loss == DiskLoss::kEvicted);
    if (entry->readers == 0) Dispose(entry);
    if (on_gone_) on_gone_(cache, key, loss);
  }

  void Dispose(DiskEntry* entry) {
    // Before, a segment seems empty of which more records are to come.
    if (!loaded_) return disposed_early_.push_back(entry);
    GiveUp(entry->place());
    index_.Free(entry);
  }

  void GiveUp(const SegmentPlace& place) {
    const bool is_empty = space_.Give(place);
    committer_->Punch(place);
    if (is_empty) committer_->Unlink(place.segment);
  }

  // Those on their way that `which` names. They may be in a batch that is being written: what is added to the committer
  // behind this removes their names.
  template <typename Which>
  void CancelWrites(const Which& which) {
    for (auto it = writing_.begin(); it != writing_.end();) {
      const auto each = it++;
      if (!which(each->first)) continue;
      each->second->cancelled = true;
      writing_.erase(each);
    }
  }

  void OnResults(DiskCommitter::Results results) {
    // Of what became durable together the ends of chains go first.
    std::stable_sort(results.writes.begin(), results.writes.end(),
                     [](const auto& a, const auto& b) { return a->record.index > b->record.index; });
    const bool goes_on = !ended_.empty();
    ended_.insert(ended_.end(), results.writes.begin(), results.writes.end());
    space_.Gone(results.punched_bytes);
    if (!results.unpunched.empty() && space_.punches()) {
      spdlog::warn("the disk's file system gives no bytes back inside a file: they count until a segment is empty");
    }
    for (const SegmentPlace& place : results.unpunched) space_.Stays(place);
    if (!results.error.ok()) gate_.NoteError(results.failed_at, results.error);
    if (!results.folder.ok() && !files_.has_left()) {
      files_.Leave();
      gate_.NoteFolderGone(results.folder);
    }
    if (!goes_on) EndSomeWrites();
    for (auto& notify : results.notified) notify();
  }

  // In pieces: small records are tens of thousands together.
  void EndSomeWrites() {
    struct Ended {
      absl::AnyInvocable<void(bool)> done;
      bool durable;
    };
    std::vector<Ended> ended;
    const int64_t now = clock_->NowNs();
    for (; ended.size() < kWritesEndedAtOnce && !ended_.empty(); ended_.pop_front()) {
      const WriteJob& job = *ended_.front();
      const auto write = writes_.find(&job);
      const bool cancelled = job.cancelled.load(), durable = job.status.ok() && !cancelled;
      ended.push_back({std::move(write->second), durable});
      writes_.erase(write);
      writing_bytes_ -= job.place.bytes;
      if (!cancelled) writing_.erase({job.record.cache, job.record.name.key});
      if (!job.status.ok()) {
        gate_.NoteError(job.failed_at, job.status);
        uint32_t emptied;
        if (space_.LeaveSegment(&emptied)) committer_->Unlink(emptied);
      }
      if (!durable) {
        GiveUp(job.place);
        continue;
      }
      index_.Learn(index_.Insert(IndexRecordOf(job)));
      gate_.NoteSuccess();
      metrics_->written_blocks.Increment();
      metrics_->written_bytes.Increment(static_cast<double>(job.place.bytes));
      metrics_->write_seconds.Observe(static_cast<double>(now - job.begun_ns) * 1e-9);
    }
    ShowUse();
    if (!ended_.empty()) Post([this] { EndSomeWrites(); });
    for (Ended& each : ended) each.done(each.durable);
  }

  void OnRead(const std::shared_ptr<ReadJob>& job) {
    const auto read = reads_.find(job.get());
    auto done = std::move(read->second);
    reads_.erase(read);
    reading_bytes_ -= job->place.bytes;
    DiskEntry* const entry = job->entry;
    const bool was_gone = entry->gone;
    if (!index_.EndRead(entry)) Dispose(entry);
    absl::Status status = job->status;
    if (!status.ok() && !was_gone) {
      if (!job->is_lost) {
        metrics_->errors("read").Increment();
        bad_blocks_.Note(job->key, job->place, status.message(), /*goes=*/false);
        failed_reads_.Note({job->cache, job->key}, clock_->NowNs());
      } else {
        RemoveBad(entry, DiskLoss::kWrong, status.message());
      }
    }
    if (was_gone) status = absl::NotFoundError("the block was erased while it was read");
    ShowUse();
    if (!status.ok()) return done(std::move(status));
    failed_reads_.Forget({job->cache, job->key});
    metrics_->read_blocks.Increment();
    metrics_->read_bytes.Increment(static_cast<double>(job->place.bytes));
    metrics_->read_seconds.Observe(static_cast<double>(clock_->NowNs() - job->begun_ns) * 1e-9);
    done(std::move(job->checksums));
  }

  void OnBatch(const DiskLoader::Batch& batch) {
    for (const IndexRecord& record : batch.records) {
      space_.Note(record.place);
      if (DiskEntry* const older = is_made_anew_ ? index_.Find(record.cache, record.key) : nullptr) {
        index_.Remove(older, /*evicted=*/false);  // of two records of one name the later one counts
        if (older->readers == 0) Dispose(older);
      }
      DiskEntry* const entry = index_.Insert(record);
      if (erased_early_.Has(record)) {
        index_.Remove(entry, /*evicted=*/false);  // nobody has found it
        Dispose(entry);
      } else if (is_made_anew_) {
        committer_->PutAgain(record);
      }
    }
    for (const std::string& key : batch.purged) committer_->Delete(key);
    for (const std::string& key : batch.damaged) {
      metrics_->errors("index").Increment();
      committer_->Delete(key);
    }
    load_log_.NoteDropped(batch.damaged.size() + batch.overlapping.size());
    for (const uint32_t number : batch.order) index_.Learn(index_.At(number));
    for (const uint32_t number : batch.overlapping) {
      metrics_->errors("index").Increment();
      if (!index_.At(number)->gone) RemoveFromIndex(index_.At(number), DiskLoss::kWrong);
    }
    if (batch.is_last) FinishLoading(batch);
    ShowUse();
    loader_->Taken();
  }

  void FinishLoading(const DiskLoader::Batch& batch) {
    index_.SetLoading(false);
    erased_early_ = {};
    loaded_ = true;
    for (DiskEntry* const entry : disposed_early_) Dispose(entry);
    disposed_early_.clear();
    space_.BeginAbove(batch.segment_of_most);
    if (!batch.status.ok()) gate_.NoteIndexError(batch.status, index_.blocks());
    if (is_made_anew_ && batch.status.ok()) {
      committer_->Notify([this, blocks = index_.blocks(), bad = batch.bad_reads](const absl::Status& status) {
        load_log_.MadeAnew(status.ok() ? folder_.ClearDamaged() : status, blocks, bad);
      });
    }
    load_log_.Loaded(index_.blocks(), space_.used(), space_.capacity());
    Shrink();
  }

  // It may have held more before.
  void Shrink() {
    if (MakeRoom(0) || index_.evictable_bytes() == 0) return;
    Post([this] { Shrink(); });
  }

  const DiskShares shares_;
  const DiskFolder folder_;
  MessageQueue* const queue_;
  DiskMetrics* const metrics_;
  SteadyClock steady_clock_;
  const Clock* const clock_;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // shared: with messages that outlive this
  const std::unique_ptr<DiskFiles> own_files_;
  DiskFiles* const disk_files_;
  SegmentFiles files_;
  std::unique_ptr<IndexDb> db_;
  const RecordSeal record_seal_;
  const bool is_made_anew_;  // the index
  DiskIndex index_;
  SegmentSpace space_;
  std::function<void(const CacheDigest&, const BlockKey&, DiskLoss)> on_gone_;

  absl::flat_hash_map<BlockId, WriteJob*> writing_;  // that are not cancelled
  absl::flat_hash_map<const WriteJob*, absl::AnyInvocable<void(bool)>> writes_;
  absl::flat_hash_map<const ReadJob*, absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)>> reads_;
  std::deque<std::shared_ptr<WriteJob>> ended_;  // that the committer has done with
  uint64_t writing_bytes_ = 0, reading_bytes_ = 0;

  LoadLog load_log_{folder_.path(), clock_};
  BadBlockLog bad_blocks_{&files_, clock_};
  mutable WriteGate gate_{&folder_, clock_, metrics_};
  FailedReads failed_reads_;
  bool loaded_ = false;
  ErasedEarly erased_early_;
  std::vector<DiskEntry*> disposed_early_;

  std::unique_ptr<DiskCommitter> committer_;
  std::unique_ptr<DiskMover> mover_;
  std::unique_ptr<DiskLoader> loader_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockDisk>> OpenBlockDisk(const BlockDisk::Options& options, const BlockDiskParts& parts,
                                                         MessageQueue* queue, DiskMetrics* metrics) {
  if (options.bytes < BlockDisk::kBytesMin) {
    return InvalidField("--disk-bytes", options.bytes, absl::StrCat("at least ", BlockDisk::kBytesMin));
  }
  KV_ASSIGN_OR_RETURN(DiskFolder folder, DiskFolder::Open(options.directory));
  KV_ASSIGN_OR_RETURN(OpenedIndex opened, OpenIndex(folder, parts.index_files, metrics));
  return std::make_unique<BlockDiskImpl>(options, parts, std::move(folder), std::move(opened), queue, metrics);
}

absl::StatusOr<std::unique_ptr<BlockDisk>> BlockDisk::Open(const Options& options, MessageQueue* queue,
                                                           DiskMetrics* metrics) {
  return OpenBlockDisk(options, {}, queue, metrics);
}

}  // namespace kvmanager
