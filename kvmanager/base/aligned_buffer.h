// Uninitialised bytes on a 64-byte boundary. A value that moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class AlignedBuffer {
 public:
  static constexpr size_t kAlign = 64;

  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
    KV_CHECK(data_ != nullptr);
  }
  /// Errors: RESOURCE_EXHAUSTED naming what it was for.
  static absl::StatusOr<AlignedBuffer> Make(absl::string_view what, size_t bytes) {
    AlignedBuffer buffer;
    if (bytes == 0) return buffer;
    buffer.data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
    if (buffer.data_ == nullptr) {
      return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("memory for ", what),
                        absl::StrCat(bytes, " bytes"), "what the host has left; send less at once, or try again");
    }
    buffer.size_ = bytes;
    return buffer;
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  absl::Span<uint8_t> span() const { return {data_, size_}; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvmanager
