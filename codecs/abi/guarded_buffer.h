// Memory that tells when a codec leaves it: a buffer between two pages that nobody may touch.
//
// For a process that is made for one check and ends with it: InstallFaultHandler takes over SIGSEGV and SIGBUS, and a
// touch outside a buffer, or a write to one that is read-only, becomes a report with the buffer's name. The handler is
// for one check at a time; any thread may make and destroy buffers of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace kvmanager {

class GuardedBuffer {
 public:
  /// Where the buffer lies between the guards: hard against the one behind it, or the one before it.
  enum class Place { kAgainstEnd, kAgainstStart };
  static constexpr int kLiveMax = 4096;

  /// `name` is said in reports: a literal. Zeroed. `bytes` is rounded up to alignment; the rest is watched by Damage().
  GuardedBuffer(const char* name, size_t bytes, Place place = Place::kAgainstEnd, size_t alignment = 64);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& from) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  absl::Span<uint8_t> span() const { return {data_, bytes_}; }
  void Fill(uint8_t value);
  void SetReadOnly(bool read_only);
  /// Empty, or which bytes around the buffer, short of the guards, have changed.
  std::string Damage() const;

 private:
  const char* name_;
  uint8_t* map_ = nullptr;
  size_t map_bytes_ = 0;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  int slot_ = -1;
};

/// From now on a fault writes "F" and a sentence to `fd` and ends the process.
void InstallFaultHandler(int fd);

}  // namespace kvmanager
