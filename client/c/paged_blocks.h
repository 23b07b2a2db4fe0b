// Whole blocks between the daemon's memory and an engine's paged caches, by the engine's GPU: all that is enqueued for
// many blocks, in one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "absl/status/statusor.h"
#include "client/c/kvmanager.h"
#include "client/c/page_codec.h"

namespace kvmanager::client::c {

/// kvm_set_paged was called, and the codec's GPU is this thread's.
absl::Status CheckPaged(const PageCodecObject& object);

/// Whether the page of `layer` of a sequence's block is never encoded.
inline bool KeepsRaw(const PageCodecObject& object, uint32_t block, uint32_t layer) {
  const CodecInfo& info = object.codec->info();
  return !info.identity && info.keeps_raw(static_cast<int>(layer), uint64_t{block} * object.paged.tokens);
}

/// Of the groups' ids [groups][all] those of `count` blocks from `at` on, as [groups][count] in `taken`.
inline const int64_t* TakeIds(const int64_t* ids, uint32_t groups, uint32_t all, uint32_t at, uint32_t count,
                              std::vector<int64_t>* taken) {
  taken->resize(size_t{groups} * count);
  for (size_t group = 0; group < groups; ++group) {
    std::copy_n(ids + group * all + at, count, taken->data() + group * count);
  }
  return taken->data();
}

/// Of one call's blocks; fields as kvm_bring_room's.
struct PagedLoad {
  void *raw[2], *stored[2];
  uint32_t blocks;     // of a staging
  uint32_t extents;    // of so many blocks, that calls for the same load began before; 0: of another load
  const int64_t* ids;  // [groups][mapped blocks]
  uint32_t groups;
  void *list, *list_device;
  uint64_t* sums;
  CUstream_st *fetch, *load;
};
/// Brings all mapped blocks into the engine's caches, and their checksums to `sums`. Only begun: done when `load` has
/// passed; after an error something may have been begun on either stream. Returns the bytes that are copied.
absl::StatusOr<uint64_t> EnqueueLoad(const PageCodecObject& object, const MappedBlocks& mapped, const PagedLoad& load);

/// kvm_save_blocks.
absl::StatusOr<uint64_t> EnqueueSave(const PageCodecObject& object, const kvm_save& save);

/// A word in pinned memory that a stream counts up, so that a thread sees how far it has come.
class StreamCount {
 public:
  explicit StreamCount(const uint64_t* word) : word_(word), passed_(Read()), begun_(passed_) {}
  /// What was given to the stream so far is the next to pass.
  absl::Status Add(const Device& device, CUstream_st* stream) { return device.EnqueueWrite(stream, word_, ++begun_); }
  /// Whether the oldest of them that was not said has passed. Errors: UNAVAILABLE when the GPU has failed.
  absl::StatusOr<bool> Pass(const Device& device, CUstream_st* stream);

 private:
  static constexpr uint32_t kAskEvery = 1024;  // times that nothing passed, the GPU is asked whether it has failed
  uint64_t Read() const { return __atomic_load_n(word_, __ATOMIC_ACQUIRE); }

  const uint64_t* const word_;
  uint64_t passed_, begun_;
  uint32_t asked_ = 0;
};

/// A moment, while nothing passes. The thread's timers are precise from then on.
void RestOnStream();
/// Until streams are idle, or their GPU has failed.
void DrainStreams(const Device& device, std::initializer_list<CUstream_st*> streams);

}  // namespace kvmanager::client::c
