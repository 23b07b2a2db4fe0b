#include "kvmanager/disk/disk_loader.h"

#include <algorithm>
#include <tuple>
#include <utility>

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
  IndexRecord record;
  absl::Status status = parts_.db->Scan([&](absl::string_view key, absl::string_view value) {
    const auto full = [&] { return batch.records.size() + batch.damaged.size() >= kRecordsOfBatch; };
    bool sound = ParseIndexRecord(key, value, &record);
    if (sound) {
      const SegmentPlace& place = record.place;
      last->segment_of_most = std::max(last->segment_of_most, place.segment);
      const auto file = files_.find(place.segment);
      sound = file != files_.end() && place.offset + place.bytes <= file->second;
      if (sound) {
        records_.push_back({place.segment, record.index, static_cast<uint32_t>(records_.size()), place.offset,
                            place.offset + place.bytes});
        batch.records.push_back(std::move(record));
      }
    }
    if (!sound) batch.damaged.emplace_back(key);
    return !full() || Post(std::exchange(batch, {}));
  });
  if (!batch.records.empty() || !batch.damaged.empty()) Post(std::move(batch));
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
void DiskLoader::GiveBackGaps() {
  size_t at = 0;
  for (auto file = files_.begin(); file != files_.end() && !stopping(); ++file) {
    const uint32_t segment = file->first;
    at = std::lower_bound(records_.begin(), records_.end(), segment,
                          [](const Where& each, uint32_t of) { return each.segment < of; }) -
         records_.begin();
    uint64_t end = 0;
    const auto punch = [&](uint64_t to) {
      if (to > end) (void)parts_.files->Punch({segment, end, to - end});
    };
    if (at == records_.size() || records_[at].segment != segment) {
      (void)parts_.files->Unlink(segment);
      continue;
    }
    for (; at < records_.size() && records_[at].segment == segment && !stopping(); ++at) {
      punch(records_[at].begin);
      end = std::max(end, records_[at].end);
    }
    if (!stopping()) punch(file->second);
  }
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
  if (all) GiveBackGaps();              // else there may be records that were not read
  std::vector<Where>().swap(records_);  // clear() would keep its memory
}

}  // namespace kvmanager
