// Attention in this process on the pages of a cache on the daemon's GPU: the daemon keeps the books, this process's own
// kernels append, attend and encode, on slabs that both map. One call to the daemon per step, none per layer.
//
//   auto codec = registry.Create(cache->description().options.codec, context);
//   auto run = InProcess::Create(device.get(), cache.get(), codec, {.stream = stream});
//   run->Begin(entries, /*append=*/true, /*attend=*/true);          // asks the daemon, uploads the plan
//   for each layer: run->Append(layer, k, v); run->Attend(layer, q, out, nullptr);   // launches, nothing else
//   run->End();                                                     // encodes what was filled, lets the plan go
//
// Append and Attend of a step's shape may be captured in a CUDA graph once, and replayed between later Begin and End of
// that shape; where queries choose what they read ("pq"), while launches() is what it was then, too. Results equal
// those of Cache::Step on the same cache.
//
// Sequences are made, forked, cropped and published by their handles, between End and Begin. What publish names must be
// appended and encoded: the daemon waits for this stream's words, so a publish may take as long as the stream is
// behind.
//
// A daemon that samples how good encoded pages are (--quality-sample) gets a row of queries now and then: Attend of one
// layer in turn copies it behind its kernels to pinned memory, once in 256 query tokens and in four steps at most, and
// a later Begin sends it. Neither the host nor the stream waits, and a step that a graph replays copies none, nor does
// one that is captured.
//
// One InProcess per DeviceClient: slabs are given to a connection once, and its words are one table. An engine with
// more caches connects once for each.
//
// The engine's stream is the caller's; all calls are made by one thread, whose device is the stream's. Nothing waits
// for the GPU but Create and the destructor.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/device.h"
#include "codecs/codec.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_region.h"

struct CUstream_st;

namespace kvmanager::client {

class InProcess {
 public:
  struct Options {
    CUstream_st* stream = nullptr;  // the engine's
    /// Pages that a step fills are encoded here, on a stream of the lowest priority, so that attention's priority over
    /// it holds; else by the daemon, whose kernels share the GPU with this process's by turns.
    bool encode_here = true;
    int sequences_max = 256;
    int tokens_max = 8192;   // of all entries of a step
    uint64_t pages_max = 0;  // in each layer, of all sequences; 0: what the daemon's pool can hold
  };

  /// codec: of cache->description().options.codec and its geometry. device, cache and stream outlive it. Errors:
  /// FAILED_PRECONDITION for a cache that is not on this device, or whose pages have no kernels; UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<InProcess>> Create(DeviceClient* device, Cache* cache,
                                                           std::shared_ptr<const Codec> codec, const Options& options);
  /// Waits for the engine's stream and for encoding.
  virtual ~InProcess() = default;

  /// Begins a step of all layers: tokens of `entries` are appended, attended from, or both; without `append` they are
  /// there already. Pages that a step fills are encoded behind it, so one that does both may append lag_pages whole
  /// pages to a sequence and what its open page has room for: INVALID_ARGUMENT says how many tokens that is. Waits for
  /// one answer of the daemon. Errors are the daemon's, and RESOURCE_EXHAUSTED when the host is too far ahead of the
  /// stream.
  absl::Status Begin(absl::Span<const StepEntry> entries, bool append, bool attend) {
    KV_RETURN_IF_ERROR(Ask(entries, append, attend));
    return Start();
  }
  /// Begin in two: Ask sends the question and waits for nothing, so that the caller may work until its first layer
  /// needs the plan; Start waits for the answer and uploads. Behind an error of either no step has begun.
  virtual absl::Status Ask(absl::Span<const StepEntry> entries, bool append, bool attend) = 0;
  virtual absl::Status Start() = 0;
  /// k, v: [tokens][kv_heads][head_dim] of the cache's dtype on the device, 16-byte aligned.
  virtual absl::Status Append(int layer, const void* k, const void* v) = 0;
  /// q, out: [tokens][query_heads][head_dim], the same; lse: [tokens][query_heads], natural logarithm, or nullptr.
  /// After the layer's Append, if the step appends.
  virtual absl::Status Attend(int layer, const void* q, void* out, float* lse) = 0;
  /// The step's kernels are in the stream. Of a step that was asked for and not started it waits for the answer: what
  /// it reserves will never be written, so its sequences cannot be published.
  virtual absl::Status End() = 0;

  /// Of the step that has begun: equal where Attend launches the same for a shape.
  virtual uint64_t launches() const = 0;

  /// The daemon's pool as this process maps it: the slabs in which it was told of pages.
  virtual const DeviceRegion& pool() const = 0;

  /// What comes later on the engine's stream waits for the daemon's copies of open pages for this sequence.
  virtual absl::Status After(const Sequence& sequence) = 0;
  /// A sequence's handle is about to be destroyed.
  virtual void Forget(uint64_t sequence) = 0;
};

}  // namespace kvmanager::client
