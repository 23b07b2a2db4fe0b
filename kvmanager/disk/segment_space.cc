#include "kvmanager/disk/segment_space.h"

#include <algorithm>

#include "kvmanager/base/status.h"
#include "kvmanager/disk/record.h"

namespace kvmanager {
namespace {

// Of a segment that is left once it is empty: to remove it is cheaper than many holes.
constexpr uint64_t kLeftBytesMin = uint64_t{1} << 20;
constexpr uint64_t kSegmentsMin = 16;  // of the capacity, so that some become empty where holes cannot be punched

}  // namespace

SegmentSpace::SegmentSpace(uint64_t capacity)
    : capacity_(capacity),
      segment_bytes_(std::min(kSegmentBytesMax, capacity / kSegmentsMin / kRecordAlign * kRecordAlign)) {}

void SegmentSpace::Note(const SegmentPlace& place) {
  ++segments_[place.segment].records;
  used_ += place.bytes;
  BeginAbove(place.segment);
}

void SegmentSpace::Close(uint32_t* emptied) {
  *emptied = kNone;
  if (current_ == kNone) return;
  const auto found = segments_.find(current_);
  if (found->second.records == 0) {
    used_ -= found->second.dead_bytes;
    dead_ -= found->second.dead_bytes;
    segments_.erase(found);
    *emptied = current_;
  }
  current_ = kNone;
}

bool SegmentSpace::LeaveSegment(uint32_t* emptied) {
  Close(emptied);
  return *emptied != kNone;
}

SegmentPlace SegmentSpace::Take(uint64_t bytes, bool* is_first, uint32_t* emptied) {
  *emptied = kNone;
  if (current_ != kNone && end_ + bytes > segment_bytes_) Close(emptied);
  *is_first = current_ == kNone;
  if (*is_first) {
    current_ = next_++;
    KV_CHECK(next_ < kNone && segments_.try_emplace(current_).second);
    end_ = 0;
  }
  const SegmentPlace place{current_, end_, bytes};
  end_ += bytes;
  used_ += bytes;
  ++segments_[current_].records;
  return place;
}

bool SegmentSpace::Give(const SegmentPlace& place) {
  const auto found = segments_.find(place.segment);
  KV_CHECK(found != segments_.end() && found->second.records > 0);
  used_ -= place.bytes;
  leaving_ += place.bytes;
  if (--found->second.records > 0) return false;
  if (place.segment == current_) {
    if (end_ < kLeftBytesMin) return false;
    current_ = kNone;
  }
  used_ -= found->second.dead_bytes;
  dead_ -= found->second.dead_bytes;
  segments_.erase(found);
  return true;
}

void SegmentSpace::Stays(const SegmentPlace& place) {
  punches_ = false;
  leaving_ -= place.bytes;
  const auto found = segments_.find(place.segment);
  if (found == segments_.end()) return;  // it went meanwhile
  found->second.dead_bytes += place.bytes;
  dead_ += place.bytes;
  used_ += place.bytes;
}

void SegmentSpace::Check(uint64_t records) const {
  KV_CHECK(used_ == records + dead_);
  uint64_t dead = 0;
  for (const auto& [number, segment] : segments_) {
    KV_CHECK(segment.records > 0 || number == current_);
    dead += segment.dead_bytes;
  }
  KV_CHECK(dead == dead_);
}

}  // namespace kvmanager
