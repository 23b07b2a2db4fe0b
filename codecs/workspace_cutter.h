// Arrays in the workspace that a caller gives a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmanager {

/// Cuts aligned arrays off a workspace; with a null workspace it only counts.
class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(uint8_t* workspace) : base_(workspace) {}
  template <typename T>
  T* Cut(size_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace kvmanager
