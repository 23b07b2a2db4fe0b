// Memory of large replies: what one reply has used is kept for the next. The kernel takes long to give a process 24 MiB
// that it has not had before, and to take them back.
//
//   ReplyBuffer    bytes of a reply
//   ReplyMemory    gives such, and keeps those that are done with
//
// The loop's thread, but for the bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class ReplyBuffer {
 public:
  ReplyBuffer() = default;
  /// The first `size` bytes of it, or all.
  explicit ReplyBuffer(AlignedBuffer memory, size_t size = SIZE_MAX)
      : memory_(std::move(memory)), size_(std::min(size, memory_.size())) {}
  ReplyBuffer(ReplyBuffer&& other) noexcept : memory_(std::move(other.memory_)), size_(std::exchange(other.size_, 0)) {}
  ReplyBuffer& operator=(ReplyBuffer&& other) noexcept {
    memory_ = std::move(other.memory_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  uint8_t* data() const { return memory_.data(); }
  size_t size() const { return size_; }
  absl::Span<uint8_t> span() const { return {data(), size_}; }
  size_t memory_bytes() const { return memory_.size(); }
  AlignedBuffer TakeMemory() {
    size_ = 0;
    return std::move(memory_);
  }

 private:
  AlignedBuffer memory_;
  size_t size_ = 0;
};

class ReplyMemory {
 public:
  static constexpr size_t kKeptBytesMin = 1 << 20;         // the allocator keeps smaller ones
  static constexpr uint64_t kFreedAtOnceBytes = 16 << 20;  // when nobody wants them: some 3 ms

  /// What a buffer of so many bytes takes: large ones have few sizes.
  static uint64_t BytesFor(uint64_t bytes) {
    if (bytes < kKeptBytesMin) return bytes;
    const uint64_t step = bytes < (4 << 20) ? 256 << 10 : 1 << 20;
    return (bytes + step - 1) / step * step;
  }
  /// kept_max: bytes that may be kept besides, if this takes new memory. Errors: AlignedBuffer::Make's.
  absl::StatusOr<ReplyBuffer> Make(absl::string_view what, size_t bytes, uint64_t kept_max) {
    const size_t memory_bytes = BytesFor(bytes);
    if (memory_bytes >= kKeptBytesMin) {
      wanted_ = true;
      const auto fits = std::find_if(kept_.begin(), kept_.end(),
                                     [memory_bytes](const AlignedBuffer& each) { return each.size() == memory_bytes; });
      if (fits != kept_.end()) {
        std::swap(*fits, kept_.back());
        AlignedBuffer memory = std::move(kept_.back());
        kept_.pop_back();
        kept_bytes_ -= memory_bytes;
        return ReplyBuffer(std::move(memory), bytes);
      }
      Free(kept_max);
    }
    KV_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(what, memory_bytes));
    return ReplyBuffer(std::move(memory), bytes);
  }
  /// Nobody uses the bytes any more.
  void Keep(ReplyBuffer buffer) {
    AlignedBuffer memory = buffer.TakeMemory();
    if (memory.size() < kKeptBytesMin) return;
    kept_bytes_ += memory.size();
    kept_.push_back(std::move(memory));
  }
  uint64_t kept_bytes() const { return kept_bytes_; }
  /// From time to time: gives back some of what nobody wanted since.
  void Look() {
    if (!std::exchange(wanted_, false)) Free(kept_bytes_ - std::min(kept_bytes_, kFreedAtOnceBytes));
  }

 private:
  // The oldest first.
  void Free(uint64_t kept_max) {
    size_t freed = 0;
    for (; kept_bytes_ > kept_max; ++freed) kept_bytes_ -= kept_[freed].size();
    kept_.erase(kept_.begin(), kept_.begin() + freed);
  }

  std::vector<AlignedBuffer> kept_;
  uint64_t kept_bytes_ = 0;
  bool wanted_ = false;  // one was made since Look
};

}  // namespace kvmanager
