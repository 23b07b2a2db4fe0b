// What a device step passes to the device in one piece of its UploadRing: cut and filled by the step's thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvmanager {

inline constexpr size_t kUploadAlign = 16;

inline absl::Status HostTooFarAhead() {
  return absl::ResourceExhaustedError(
      "the host is so far ahead of the stream that there is no room to pass another step: try again later");
}

/// Cuts a piece of the ring.
class PieceWriter {
 public:
  explicit PieceWriter(uint8_t* at) : at_(at) {}
  template <typename T>
  T* Room(size_t count) {
    T* const room = reinterpret_cast<T*>(at_);
    at_ += Bytes<T>(count);
    return room;
  }
  template <typename T>
  const T* Copy(absl::Span<const T> from) {
    T* const to = Room<T>(from.size());
    std::copy(from.begin(), from.end(), to);
    return to;
  }
  template <typename T>
  static size_t Bytes(size_t count) {
    return (count * sizeof(T) + kUploadAlign - 1) / kUploadAlign * kUploadAlign;
  }

 private:
  uint8_t* at_;
};

}  // namespace kvmanager
