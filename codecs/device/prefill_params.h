// What the kernels of attention by many query tokens read of a plan (attention/prefill_plan.h): plain structs, the same
// for host and device; and such a kernel, as a codec gives it.
//
// A *tile* is up to kPrefillRows rows (query token, head of a KV head's group) of one KV head. Its context is *runs* of
// pages of one form, in the order of the context; tokens of a tile that are on different pages may read one page in
// different forms, so a run says which of them read it. A tile's pages are cut into *parts*, each an item in the list
// of one block of threads. Parts of a tile are merged, in their order, by whichever comes last.
#pragma once

#include <cstdint>

#include "codecs/device/attend_params.h"

struct CUstream_st;  // a stream of CUDA's runtime

namespace kvmanager::device {

inline constexpr int kPrefillRows = 128;
inline constexpr int kPrefillPageTokens = 64;
/// Heads of a group that there are kernels for.
inline constexpr int kPrefillGroupMax = 16;

/// Query tokens of a tile: all heads of a group, as many tokens as there are rows for.
constexpr int PrefillTileTokens(int group_heads) { return kPrefillRows / group_heads; }

struct PrefillRun {
  uint32_t first_page = 0;  // in the layer's table of slots
  uint32_t pages : 31;
  uint32_t encoded : 1;
  uint32_t position = 0;     // in the context, of the first page's first token
  uint16_t token_begin = 0;  // the tile's tokens that read these pages: a raw page as far as the token's own position,
  uint16_t token_end = 0;    // an encoded one whole

  PrefillRun() : pages(0), encoded(0) {}
};
static_assert(sizeof(PrefillRun) == 16, "read as a vector of 16 bytes");

/// Where kernels map (PrefillKernels), all runs of an item have one form, and forms have tiles of their own.
struct PrefillItem {
  uint32_t first_run = 0;
  uint32_t skip = 0;            // pages of the runs from there on that come before this part
  uint32_t pages = 0;           // 0: a block without work
  uint32_t next = 0;            // the block's next item; 0: none. Block b begins with item b
  uint32_t first_token = 0;     // of the tile, in q and out
  uint32_t first_position = 0;  // in the context, of that token
  uint32_t first_part = 0;      // of the tile: places in `partial` follow one another
  uint8_t tokens = 0;           // 1..kPrefillRows
  uint8_t kv_head = 0;
  uint8_t part = 0;  // of this item, from first_part
  uint8_t parts = 0;
};
static_assert(sizeof(PrefillItem) == 32, "read as two vectors of 16 bytes");

/// One launch: a layer's attention of the entries that have many tokens.
struct PrefillParams {
  const uint8_t* pool = nullptr;    // the slots' address range
  const uint32_t* slots = nullptr;  // this layer's table, in kSlotUnitBytes
  const PrefillItem* items = nullptr;
  const PrefillRun* runs = nullptr;
  const void* q = nullptr;         // [tokens][query_heads][head_dim] of the cache's dtype
  void* out = nullptr;             // the same
  float* lse = nullptr;            // [tokens][query_heads], natural logarithm, or nullptr
  float* partial = nullptr;        // [parts][kPrefillRows * head_dim], in the order of fragments
  float* partial_state = nullptr;  // [parts][kPrefillRows][2]: maximum (of scores * log2 e) and sum
  uint32_t* arrived = nullptr;     // [parts][2]; zero before and after a launch
  const void* format = nullptr;    // of the codec's kernel, on the device
  int query_heads = 0;
  int kv_heads = 0;
  float scale_log2 = 0;   // of scores, times log2(e); above 0
  bool bfloat16 = false;  // q, out and raw pages; else float16
  // Of kernels that map, as in AttendParams; of q, all tokens of the launch's batch.
  uint32_t tokens = 0;
  float* mapped = nullptr;
  const uint16_t* heads = nullptr;  // that items mean by each number
};

/// For pages of kPrefillPageTokens tokens and at most kPrefillGroupMax heads to a group.
struct PrefillKernels {
  /// Starts `blocks` blocks, one for each multiprocessor; allocates nothing and does not wait. Returns a cudaError_t.
  int (*launch)(const PrefillParams& params, int blocks, CUstream_st* stream) = nullptr;
  /// Once per device, before the first launch. Returns a cudaError_t.
  int (*prepare)() = nullptr;
  /// Encoded pages stand in a space of their own: tiles of the two forms are apart, `mapped` is used, and `out` and
  /// `lse` of rows that no item has stay as they are.
  bool maps = false;
};

/// What plans take a raw page to cost.
inline constexpr uint32_t kPrefillRawPageCost = 64;

/// A layer's kernels and what they know of its pages.
struct Prefill {
  const PrefillKernels* kernels = nullptr;  // nullptr: there are none
  const void* format = nullptr;             // PrefillParams::format
  /// [kv_heads] of an encoded page, by place (HeadCosts), on the host, the same for layers that share plans; nullptr:
  /// all cost what raw ones do.
  const uint32_t* costs = nullptr;
};

}  // namespace kvmanager::device
