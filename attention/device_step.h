// One cache's steps on one stream of a GPU: the tables of its sequences' pages, appends of K and V, attention.
//
// The caller keeps the pages: it says which slots of the pool they lie in, appends into open raw pages and reads what
// it sealed and encoded; this class touches bytes by kernels on the stream alone, and keeps tables and plans on the
// device so that a call names nothing but the layer. A step is prepared for some layers, by one small upload, and then
// run layer by layer:
//
//   Prepare(0, layers, entries, true, true); for each layer: Append(layer, k, v); Attend(layer, q, out, lse);
//
// What Append and Attend launch depends on the step's shape (how many tokens each entry has) and on their pointers, but
// on nothing else: a CUDA graph captured once for a shape follows every later Prepare of that shape. Where queries
// choose what they read, it follows while launches() stays, too, which changes with how many of them choose, and when
// the longest context has grown by a quarter. Prepare itself is never captured.
//
// One thread, whose device is the stream's. Nothing waits for the device, but the destructor where Options::upload was
// nullptr. Stream, slots, pool and codec outlive what is on the stream.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_plan.h"
#include "attention/step_tables.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// Where a NaN or an infinity was appended.
struct NonFinitePlace {
  uint64_t position = 0;
  int layer = 0;
  int side = 0;  // 0: K, 1: V
  int kv_head = 0;
  int channel = 0;
  friend bool operator==(const NonFinitePlace&, const NonFinitePlace&) = default;
};
/// What a word of DeviceStep::Options::non_finite says; nullopt for 0.
std::optional<NonFinitePlace> ParseNonFiniteWord(uint64_t word);

class DeviceStep {
 public:
  static constexpr int kLayersMax = 1024;

  struct Options {
    CUstream_st* stream = nullptr;
    const uint8_t* pool = nullptr;  // the slots' first byte: slots are in units of device::kSlotUnitBytes from there
    PageLayout layout;
    int layers = 0;
    int query_heads = 0;
    int lag_pages = 0;
    bool identity = false;  // the encoded form is the raw form: raw slots alone are read
    float scale = 0;        // of scores; 0: 1/sqrt(head_dim)
    const DeviceCodec* codec = nullptr;
    int multiprocessors = 0;
    uint64_t pages_max = 0;  // of all sequences together, in a layer
    int sequences_max = 0;
    int tokens_max = 0;  // of all entries of a step
    /// Pinned, or nullptr: not looked for. Word [place] becomes the first NaN or infinity (in the order of position,
    /// layer, side, head, channel) that was appended to the sequence there, 0 meaning none; it is 0 from the first step
    /// behind AddSequence on, and holds what a step found when work behind that step has begun.
    uint64_t* non_finite = nullptr;
    uint32_t non_finite_words = 0;  // at least sequences_max
    /// Pinned and 64-byte aligned, UploadBytes() of it, the step's own until the stream has passed all that it put
    /// there. nullptr: allocated by the step, whose destructor then waits: to free pinned memory waits for every stream
    /// of the device, and holds up other threads' launches meanwhile, which a process whose streams wait for others'
    /// words cannot afford.
    uint8_t* upload = nullptr;
    size_t upload_bytes = 0;
  };
  /// Errors: as Create's.
  KV_NEEDS_CUDA(static absl::StatusOr<size_t> UploadBytes(const Options& options));
  /// Errors: INVALID_ARGUMENT; FAILED_PRECONDITION for a layer whose pages have no kernel; CUDA's; UNAVAILABLE where
  /// this was built without CUDA.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<DeviceStep>> Create(const Options& options));
  virtual ~DeviceStep() = default;

  // Tables. Calls take effect in the order of the stream, before the kernels of the next Prepare and behind those of
  // the one before. Errors are those of StepTables.
  virtual absl::StatusOr<uint32_t> AddSequence(uint64_t pages_hint) = 0;
  virtual void RemoveSequence(uint32_t place) = 0;
  virtual absl::Status SetPages(uint32_t place, int layer, uint32_t first_page, absl::Span<const DevicePage> pages) = 0;
  virtual void Truncate(uint32_t place, uint32_t pages) = 0;

  using Entry = DeviceStepEntry;
  /// Of an entry's queries the last `sparse_queries` choose what they read (DeviceCodec::selection), by the index that
  /// SetPages named: codes of what the index has yet to cover are made here, and of the entry's own tokens behind its
  /// Append. Entries of PrefillPlanner::kTokensMin tokens and more are attended to on tensor cores where the codec has
  /// kernels for that (DeviceCodec::prefill), encoded pages as what they decode to. Plans a step for layers
  /// [first_layer, first_layer + layers): the appends and queries of `entries`, one behind the other in k, v, q and
  /// out. It takes the place of the one before; layers that it does not name can be neither appended nor attended to. A
  /// query reads a page raw iff that has no encoded slot, or has a raw one and is the query's own or within `lag_pages`
  /// of it and not aged. With `append`, queries see the appended tokens. A step equal to the last but for the layers,
  /// or to an earlier part of it, uploads nothing but changed tables. Errors: INVALID_ARGUMENT; FAILED_PRECONDITION
  /// naming a page that is not there; RESOURCE_EXHAUSTED where the host is so far ahead of the stream that there is no
  /// room to pass the step (try again later), or where it needs more items than there are. Behind an error no step is
  /// prepared.
  virtual absl::Status Prepare(int first_layer, int layers, absl::Span<const Entry> entries, bool append,
                               bool attend) = 0;
  /// k, v: [tokens][kv_heads][head_dim] of the cache's dtype on the device, 16-byte aligned.
  virtual absl::Status Append(int layer, const void* k, const void* v) = 0;
  /// q, out: [tokens][query_heads][head_dim], the same. lse: [tokens][query_heads], natural logarithm, or nullptr.
  virtual absl::Status Attend(int layer, const void* q, void* out, float* lse) = 0;

  /// The first `tokens` tokens of a raw page.
  struct OpenCopy {
    uint32_t from, to;  // slots, of different pages
    int tokens;         // 0..page_tokens
  };
  /// For forks and crops. Pages that are read are not written by the same call.
  virtual absl::Status CopyOpen(absl::Span<const OpenCopy> copies) = 0;

  /// (query token, context token) pairs that the prepared step reads in either form, over its layers.
  struct Counts {
    uint64_t encoded_pairs = 0;
    uint64_t raw_pairs = 0;
  };
  virtual Counts counts() const = 0;
  /// Of the prepared step: equal where Attend launches the same for a shape.
  virtual uint64_t launches() const = 0;
  /// Uploads so far: kernels that Prepare has launched.
  virtual uint64_t uploads() const = 0;
};

}  // namespace kvmanager
