// How queries choose what they read on a GPU, as a codec does it: what they read, and the launches.
//
// DeviceCodec::selection() gives it. Immutable; any thread whose device is the codec's. Launches allocate nothing, do
// not wait, may be captured in a graph, and return a cudaError_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/device/attend_launch.h"
#include "codecs/device/selection_params.h"

namespace kvmanager {

class DeviceSelection {
 public:
  virtual ~DeviceSelection() = default;

  /// Attention over rows that stand anywhere: AttendParams::slots is a list of rows of K, an item's first_page a place
  /// there, its pages runs of page_tokens rows. A row's V is where it is in a raw page with that K.
  virtual const device::AttendKernels& rows() const = 0;
  /// Whether there are kernels for so many query heads.
  virtual bool Serves(int query_heads) const = 0;
  /// Tokens that a query at `position` reads, as counts of `select`.
  virtual void SetReads(uint64_t position, device::Select* select) const = 0;
  /// Gives each query its place in lists and scratch memory. Errors: RESOURCE_EXHAUSTED where they leave 32 bits.
  virtual absl::StatusOr<device::SelectSizes> Place(absl::Span<device::Select> queries) const = 0;
  virtual size_t ScratchBytes(int query_heads, uint32_t runs) const = 0;
  /// Of threads for each query and KV head, as suits so many queries.
  virtual int Blocks(int query_heads, uint32_t count, uint32_t middle_max, int multiprocessors) const = 0;

  /// Once per device, before the first launch.
  virtual int Prepare() const = 0;
  /// blocks: Blocks'. middle_max: of the queries, or more.
  virtual int LaunchSelect(const device::SelectionParams& params, int blocks, uint32_t middle_max,
                           CUstream_st* stream) const = 0;
  /// Codes of keys in raw pages. pool, slots: as AttendParams. items: [count] on the device; of 0 tokens: none.
  virtual int LaunchEncode(const uint8_t* pool, const uint32_t* slots, const device::IndexTable& index,
                           const device::EncodeCodes* items, uint32_t count, CUstream_st* stream) const = 0;
  /// Makes the rest of `count` indexes' fixed parts, once IndexJob::WriteImage's bytes are there. indexes: [count], in
  /// memory that the device reads.
  virtual int LaunchPrepareIndexes(uint8_t* const* indexes, uint32_t count, CUstream_st* stream) const = 0;
};

}  // namespace kvmanager
