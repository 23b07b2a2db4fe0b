// What kernels that choose what queries read take of a plan (attention/step_selection.h): plain structs, the same for
// host and device.
#pragma once

#include <cstdint>

#include "codecs/device/attend_params.h"

namespace kvmanager::device {

inline constexpr uint32_t kCodeChunkTokens = 1024;
inline constexpr uint32_t kEncodeTokensMax = 256;  // of an item
inline constexpr uint32_t kSelectRunTokens = 512;  // of scratch memory

/// Where indexes are: a sequence's codebook of a layer, and behind it in the table its chunks of codes, by token /
/// kCodeChunkTokens. Whatever bytes the chunks hold, nothing beyond the kernels' own memory is touched.
struct IndexTable {
  const uint8_t* pool = nullptr;
  const uint32_t* slots = nullptr;  // in kSlotUnitBytes from the pool's first byte
};

/// Tokens of one sequence and layer, at most kEncodeTokensMax, all of one chunk of codes.
struct EncodeCodes {
  uint32_t index = 0;  // as Select's
  uint32_t table = 0;  // of the sequence's first page, in `slots`
  uint32_t first = 0;  // token
  uint32_t tokens = 0;
};

/// A query token. Tokens 0 .. sinks - 1 and the last `local` are read in any case; of the `middle` between them,
/// `chosen`.
struct alignas(16) Select {
  /// Copies of blocks of pq::kDeviceBlockTokens tokens, or nullptr: [kv_heads][cached_stride] units of a copy's first
  /// page, or pq::kNoUnit. A copy is as many raw pages as hold a block.
  const uint32_t* cached = nullptr;
  uint32_t cached_stride = 0;
  uint32_t index = 0;  // of the sequence's codebook, in IndexTable::slots
  uint32_t table = 0;  // of the sequence's first page, in `slots`
  uint32_t token = 0;  // in q
  uint32_t sinks = 0, middle = 0, chosen = 0, local = 0;
  uint32_t list = 0;         // in `rows`, of KV head 0; a multiple of 16
  uint32_t list_stride = 0;  // of a KV head; rows() rounded up to a multiple of page_tokens
  uint32_t first_run = 0;    // of KV head 0, in the scratch memory; the batch's queries one after another

  uint32_t rows() const { return sinks + chosen + local; }
};

/// What a batch's lists and scratch memory come to.
struct SelectSizes {
  uint32_t rows = 0;        // entries of lists
  uint32_t runs = 0;        // of scratch memory
  uint32_t middle_max = 0;  // of a query
};

/// Runs of scratch memory that a query takes of each KV head.
constexpr uint32_t SelectRuns(uint32_t middle) { return (middle + kSelectRunTokens - 1) / kSelectRunTokens; }

/// One launch of a sparse selection.
struct SelectionParams {
  const uint32_t* slots = nullptr;  // the layer's table
  IndexTable index;
  const Select* queries = nullptr;
  uint32_t count = 0;
  const void* q = nullptr;  // [tokens][query_heads][head_dim] of the cache's dtype
  int query_heads = 0;
  float scale = 1;
  uint8_t* scratch = nullptr;  // DeviceSelection::ScratchBytes, 16-byte aligned
  uint32_t runs = 0;           // of the scratch memory
  uint32_t* rows = nullptr;    // out: units of rows of K: sinks, chosen, local, each ascending; then any valid row
};

}  // namespace kvmanager::device
