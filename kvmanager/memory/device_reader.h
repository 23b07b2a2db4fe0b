// Interface for reading GPU pages from the host. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"

namespace kvmanager {

class DeviceReader {
 public:
  /// Of each range in what is read, from its first byte.
  static constexpr uint32_t kAlign = 64;
  static constexpr uint64_t Aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  /// bytes: the ranges one behind the other, each from a multiple of kAlign on; nullptr: the GPU has failed. Any thread
  /// may read them; the last reference goes on the loop's thread, before the reader does.
  using Then = absl::AnyInvocable<void(std::shared_ptr<const uint8_t> bytes)>;

  virtual ~DeviceReader() = default;
  /// Copies `ranges`, which are kAlign-aligned and of multiples of 16 bytes, behind attention, and calls `then` once,
  /// not before this returned; the ranges stay until then. false, and it is not called: there is no room now.
  virtual bool Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) = 0;
  /// Whether there may ever be room for so much: the GPU has not failed, and it is no more than can be staged.
  virtual bool MayRead(uint64_t bytes) const = 0;
};

}  // namespace kvmanager
