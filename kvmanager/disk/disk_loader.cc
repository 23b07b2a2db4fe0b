#include "kvmanager/disk/disk_loader.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "kvmanager/disk/record_walk.h"

namespace kvmanager {

DiskLoader::DiskLoader(Parts parts) : parts_(std::move(parts)), thread_([this] { Run(); }) {}

DiskLoader::~DiskLoader() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  taken_.notify_one();
  thread_.join();
}

void DiskLoader::Taken() {
  {
    MutexLock lock(mutex_);
    --waiting_;
  }
  taken_.notify_one();
}

bool DiskLoader::stopping() {
  MutexLock lock(mutex_);
  return stop_;
}

bool DiskLoader::Post(Batch batch) {
  {
    MutexLock lock(mutex_);
    while (waiting_ == kBatchesMax && !stop_) lock.Wait(taken_);
    if (stop_) return false;
    ++waiting_;
  }
  parts_.on_batch(std::move(batch));
  return true;
}

absl::Status DiskLoader::Scan(Batch* last) {
  auto files = parts_.files->List();
  if (!files.ok()) return files.status();
  for (const SegmentFiles::Found& file : *files) {
    files_[file.segment] = file.bytes;
    last->segment_of_most = std::max(last->segment_of_most, file.segment);
  }
  Batch batch;
  const auto goes_on = [&] {
    const bool is_full = batch.records.size() + batch.damaged.size() + batch.purged.size() >= kRecordsOfBatch;
    return !is_full || Post(std::exchange(batch, {}));
  };
  const auto add = [&](IndexRecord record) {
    const SegmentPlace& place = record.place;
    records_.push_back({place.segment, record.index, static_cast<uint32_t>(records_.size()), place.offset,
                        place.offset + place.bytes});
    batch.records.push_back(std::move(record));
    return goes_on();
  };
  IndexRecord record;
  const auto add_of_index = [&](absl::string_view key, absl::string_view value) {
    bool sound = ParseIndexRecord(key, value, &record);
    if (sound) {
      const SegmentPlace& place = record.place;
      last->segment_of_most = std::max(last->segment_of_most, place.segment);
      const auto file = files_.find(place.segment);
      sound = file != files_.end() && place.offset + place.bytes <= file->second;
    }
    if (sound && !parts_.marks.IsPurged(record.cache, {record.place.segment, record.place.offset})) {
      return add(std::move(record));
    }
    (sound ? batch.purged : batch.damaged).emplace_back(key);
    return goes_on();
  };
  absl::Status status = parts_.walks ? Walk(*std::move(files), last, add) : parts_.db->Scan(add_of_index);
  if (!batch.records.empty() || !batch.damaged.empty() || !batch.purged.empty()) Post(std::move(batch));
  return status;
}

absl::Status DiskLoader::Walk(std::vector<SegmentFiles::Found> files, Batch* last,
                              absl::FunctionRef<bool(IndexRecord)> add) {
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.segment < b.segment; });
  RecordWalk walk(parts_.files, &parts_.marks);
  absl::Status status;
  for (auto file = files.begin(); file != files.end() && !stopping(); ++file) status.Update(walk.Walk(*file, add));
  last->bad_reads = walk.bad_reads();
  return status;
}

void DiskLoader::FindOverlaps(Batch* batch) const {
  const Where* longest = nullptr;  // the record so far that ends last
  for (const Where& each : records_) {
    if (longest != nullptr && longest->segment == each.segment && each.begin < longest->end) {
      if (batch->overlapping.empty() || batch->overlapping.back() != longest->number) {
        batch->overlapping.push_back(longest->number);
      }
      batch->overlapping.push_back(each.number);
    }
    if (longest == nullptr || longest->segment != each.segment || each.end > longest->end) longest = &each;
  }
}

bool DiskLoader::PostOrder() {
  std::vector<Where> order = records_;
  std::sort(order.begin(), order.end(), [](const Where& a, const Where& b) {
    return std::make_tuple(~a.index, a.segment, a.begin) < std::make_tuple(~b.index, b.segment, b.begin);
  });
  Batch batch;
  for (const Where& each : order) {
    batch.order.push_back(each.number);
    if (batch.order.size() == kRecordsOfBatch && !Post(std::exchange(batch, {}))) return false;
  }
  return batch.order.empty() || Post(std::move(batch));
}

// records_ are by place.
bool DiskLoader::GiveBackGaps() {
  const bool for_good = !parts_.marks.empty();  // else a power cut may undo it, which costs a little time
  bool all = true;
  size_t at = 0;
  for (auto file = files_.begin(); file != files_.end(); ++file) {
    if (stopping()) return false;
    const uint32_t segment = file->first;
    at = std::lower_bound(records_.begin(), records_.end(), segment,
                          [](const Where& each, uint32_t of) { return each.segment < of; }) -
         records_.begin();
    uint64_t end = 0;
    bool punched = false;
    const auto punch = [&](uint64_t to) {
      if (to <= end) return;
      punched = true;
      if (parts_.files->Punch({segment, end, to - end}) != 0) all = false;
    };
    if (at == records_.size() || records_[at].segment != segment) {
      if (parts_.files->Unlink(segment) != 0) all = false;
      continue;
    }
    for (; at < records_.size() && records_[at].segment == segment; ++at) {
      if (stopping()) return false;
      punch(records_[at].begin);
      end = std::max(end, records_[at].end);
    }
    punch(file->second);
    if (for_good && punched && parts_.files->Sync(segment) != 0) all = false;
  }
  return all && for_good && parts_.files->SyncFolder() == 0;
}

void DiskLoader::Run() {
  Batch last;
  last.is_last = true;
  last.status = Scan(&last);
  if (stopping()) return;
  std::sort(records_.begin(), records_.end(), [](const Where& a, const Where& b) {
    return std::tie(a.segment, a.begin, a.end) < std::tie(b.segment, b.begin, b.end);
  });
  FindOverlaps(&last);
  const bool all = last.status.ok();
  if (!PostOrder() || !Post(std::move(last))) return;
  // Else there may be records that were not read.
  if (all && GiveBackGaps()) parts_.on_clean();
  std::vector<Where>().swap(records_);  // clear() would keep its memory
}

}  // namespace kvmanager
