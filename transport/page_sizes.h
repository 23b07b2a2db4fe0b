// The sizes of a hand-off's pages, by number. Pages of a codec are all of one size and lists of them have hundreds of
// thousands, so what is kept, checked and sent is runs of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "absl/types/span.h"

namespace kvmanager {

class PageSizes {
 public:
  struct Run {
    uint32_t end;    // one behind its last page; it begins where the run before ends
    uint32_t bytes;  // of each of its pages
    bool operator==(const Run& other) const { return end == other.end && bytes == other.bytes; }
  };
  /// Goes through the sizes in order.
  class Iterator {
   public:
    Iterator(const PageSizes* sizes, size_t run, uint32_t page) : sizes_(sizes), run_(run), page_(page) {}
    uint32_t operator*() const { return sizes_->runs_[run_].bytes; }
    Iterator& operator++() {
      if (++page_ == sizes_->runs_[run_].end) ++run_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return page_ != other.page_; }

   private:
    const PageSizes* sizes_;
    size_t run_;
    uint32_t page_;
  };

  PageSizes() = default;
  PageSizes(std::initializer_list<uint32_t> bytes) {
    for (const uint32_t each : bytes) push_back(each);
  }
  void push_back(uint32_t bytes) { Append(1, bytes); }
  /// pages: in all below 2^32.
  void Append(uint32_t pages, uint32_t bytes) {
    if (pages == 0) return;
    const auto end = static_cast<uint32_t>(size() + pages);
    if (!runs_.empty() && runs_.back().bytes == bytes) {
      runs_.back().end = end;
    } else {
      runs_.push_back({end, bytes});
    }
  }
  void Append(const PageSizes& other) {
    uint32_t begin = 0;
    for (const Run& run : other.runs_) {
      Append(run.end - begin, run.bytes);
      begin = run.end;
    }
  }
  size_t size() const { return runs_.empty() ? 0 : runs_.back().end; }
  bool empty() const { return runs_.empty(); }
  /// page: below size().
  uint32_t operator[](uint32_t page) const {
    if (runs_.size() == 1) return runs_[0].bytes;
    return std::upper_bound(runs_.begin(), runs_.end(), page, [](uint32_t at, const Run& run) { return at < run.end; })
        ->bytes;
  }
  /// Of all pages.
  uint64_t total() const {
    uint64_t sum = 0, begin = 0;
    for (const Run& run : runs_) {
      sum += (run.end - begin) * run.bytes;
      begin = run.end;
    }
    return sum;
  }
  absl::Span<const Run> runs() const { return runs_; }
  Iterator begin() const { return {this, 0, 0}; }
  Iterator end() const { return {this, runs_.size(), static_cast<uint32_t>(size())}; }
  bool operator==(const PageSizes& other) const { return runs_ == other.runs_; }

 private:
  std::vector<Run> runs_;
};

}  // namespace kvmanager
