// The words by which streams of two processes wait for one another: a memfd that the daemon makes, one per stream that
// it runs for a connection, and that both processes map and pin.
//
// A stream writes a word behind its work (Device::EnqueueWrite) and the other process's stream waits for it
// (Device::EnqueueWait), so that neither host waits for a GPU. CUDA's interprocess events would do the same, but one of
// a killed process may never signal; a word can be written by the survivor, too: Abandon() lets everything through that
// waits, or will wait, for it.
//
// Values of a word begin at zero and grow, up to kValueMax. The GPU compares cyclically: it passes when
// int64(word - value) >= 0, hence kAbandoned, which is as far ahead of every value as can be. A stream of the other
// process may still overwrite it with an older value, so who abandons goes on until what waited has passed.
//
// Everything that the other process can write is hostile: waits for its words end with its connection, and values read
// here are believed only as far as they can be right (ReleaseEpochs, for `released`).
//
// Owns the mapping, the descriptor and the pinning. Any thread may store and load; the object itself is its owner's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/release_epochs.h"

namespace kvmanager {

class SharedSemaphores {
 public:
  /// Places of the words in units of 64 bytes from the memfd's first.
  enum class Word : uint32_t {
    kReady = 0,     // the engine's stream writes, the daemon's waits: inputs are in the arena
    kDone = 1,      // the daemon's stream writes, the engine's waits: outputs are
    kReleased = 2,  // the engine's stream writes the newest epoch that it will not run again; a ReleaseCounter
    kEncoded = 3,   // the engine's encode stream writes: pages are encoded
  };
  static constexpr uint32_t kWords = 4;
  static constexpr uint32_t kNonFiniteWords =
      4096;  // u64, behind the first page: per sequence, what was first NaN or Inf
  static constexpr size_t kNonFiniteOffset = 4096;   // bytes
  static constexpr uint32_t kDeclinedWords = 16384;  // u32, behind those: a ring of what the engine's encoder declined
  static constexpr size_t kDeclinedOffset = kNonFiniteOffset + kNonFiniteWords * sizeof(uint64_t);
  static constexpr size_t kBytes = kDeclinedOffset + kDeclinedWords * sizeof(uint32_t);
  static constexpr uint64_t kAbandoned = INT64_MAX;  // passes every wait
  static constexpr uint64_t kValueMax = INT64_MAX - 1;

  /// Zeroed. Errors: RESOURCE_EXHAUSTED; UNAVAILABLE when the kernel refuses a call.
  static absl::StatusOr<std::unique_ptr<SharedSemaphores>> Create();
  /// The words that another process made; takes the descriptor. Errors: FAILED_PRECONDITION if it is no memfd of at
  /// least kBytes sealed against shrinking; UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<SharedSemaphores>> Import(int fd);
  /// Unpins, as Unpin() does.
  ~SharedSemaphores();
  SharedSemaphores(const SharedSemaphores&) = delete;
  SharedSemaphores& operator=(const SharedSemaphores&) = delete;

  /// For a receiver; stays this object's.
  int fd() const { return region_->fd(); }

  /// Lets kernels and streams of this process use the words, at their own addresses. `device` outlives the pinning; at
  /// most once.
  absl::Status Pin(const Device* device);
  /// No stream uses the words any more. CUDA waits for everything that runs on the device, and meanwhile holds up every
  /// other call: never while a stream may be waiting for somebody.
  void Unpin();
  bool pinned() const { return device_ != nullptr; }

  /// For Device::EnqueueWait and EnqueueWrite.
  const void* Address(Word word) const { return At(word); }
  uint64_t Load(Word word) const { return At(word)->load(std::memory_order_acquire); }
  void Store(Word word, uint64_t value) { At(word)->store(value, std::memory_order_release); }
  void Abandon(Word word) { Store(word, kAbandoned); }

  const ReleaseCounter* released() const { return reinterpret_cast<const ReleaseCounter*>(At(Word::kReleased)); }
  /// [kNonFiniteWords]
  uint64_t* non_finite() const { return reinterpret_cast<uint64_t*>(region_->data() + kNonFiniteOffset); }
  /// [kDeclinedWords]
  uint32_t* declined() const { return reinterpret_cast<uint32_t*>(region_->data() + kDeclinedOffset); }

 private:
  using Atomic = std::atomic<uint64_t>;
  static_assert(Atomic::is_always_lock_free && sizeof(Atomic) == sizeof(uint64_t));
  static constexpr size_t kStride = sizeof(ReleaseCounter);
  static_assert(kWords * kStride <= kNonFiniteOffset);

  explicit SharedSemaphores(std::unique_ptr<Region> region) : region_(std::move(region)) {}
  Atomic* At(Word word) const {
    return reinterpret_cast<Atomic*>(region_->data() + static_cast<uint32_t>(word) * kStride);
  }

  const std::unique_ptr<Region> region_;
  const Device* device_ = nullptr;  // that pinned
};

}  // namespace kvmanager
