// Arrays that go to the device in one piece, put together on the host. A value; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvmanager::device {

class DeviceImage {
 public:
  /// Room for `bytes`, 256-byte aligned, zero: an offset.
  size_t Place(size_t bytes) {
    const size_t at = bytes_.size();
    bytes_.resize(at + (bytes + 255) / 256 * 256);
    return at;
  }
  /// Until the next Place.
  template <typename T>
  T* At(size_t offset) {
    return reinterpret_cast<T*>(bytes_.data() + offset);
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace kvmanager::device
