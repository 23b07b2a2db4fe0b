// What attention kernels read of a plan: plain structs, the same for host and device.
//
// A *tile* is at most kTileRows rows (query token, head of a KV head's group) of one group of query tokens and one KV
// head. Its context is cut into *items*: runs of pages of one form. A block of threads works through a list of items; a
// tile that several blocks have a part of is merged on the device by whichever finishes its last one, in the order of
// the parts, so results do not depend on which one that is.
#pragma once

#include <cstdint>

namespace kvmanager::device {

/// Columns of a matrix instruction.
inline constexpr int kTileRows = 8;
/// Slots are named by their distance from the pool's first byte in these units: 32 bits reach 256 GiB.
inline constexpr uint64_t kSlotUnitBytes = 64;

enum class PageForm : uint8_t { kRaw = 0, kEncoded = 1 };

struct AttendItem {
  uint32_t first_page = 0;   // in the layer's table of slots
  uint32_t pages = 0;        // 0: a block without work
  uint32_t first_token = 0;  // of the tile's group, in q and out
  uint32_t next = 0;         // the block's next item; 0: none. Block b begins with item b
  uint16_t kv_head = 0;      // by AttendParams::heads
  uint8_t rows = 0;          // 1..kTileRows
  PageForm form = PageForm::kRaw;
  uint16_t first_row = 0;      // of the tile among the group's tokens * G rows: row R is token R / G, head R % G
  uint16_t last_visible : 15;  // tokens of the last page that the group's first token sees; its i-th token sees i more
  uint16_t ends_tile : 1;      // the block's next item is of another tile
  uint32_t first_part = 0;     // of the tile: places in `partial` follow one another in the order of the context
  uint16_t part = 0;           // of this block, from first_part
  uint16_t parts = 0;          // blocks that work on this tile

  AttendItem() : last_visible(0), ends_tile(0) {}
};
static_assert(sizeof(AttendItem) == 32, "read as two vectors of 16 bytes");

/// One launch: a layer's attention of a batch.
struct AttendParams {
  const uint8_t* pool = nullptr;    // the slots' address range
  const uint32_t* slots = nullptr;  // this layer's table, in kSlotUnitBytes
  const AttendItem* items = nullptr;
  const void* q = nullptr;       // [tokens][query_heads][head_dim] of the cache's dtype
  void* out = nullptr;           // the same
  float* lse = nullptr;          // [tokens][query_heads], natural logarithm, or nullptr
  float* partial = nullptr;      // [parts][kTileRows][head_dim], not normalised; twice as much where kernels map
  float* partial_max = nullptr;  // [parts][kTileRows][2]: maximum (of scores * log2 e) and sum
  uint32_t* arrived = nullptr;   // [parts][kTileRows]; zero before and after a launch
  int query_heads = 0;
  int kv_heads = 0;
  int page_tokens = 0;
  float scale_log2 = 0;   // of scores, times log2(e)
  bool bfloat16 = false;  // q, out and raw pages; else float16
  // Of hack (hack_format.h): K and V of encoded pages are rotated; V has a norm for each token. Kernels set them.
  bool rotates = false;
  bool v_norms = false;
  // Of codecs that keep what they need on the device (DeviceCodec::attention_data), or a space of their own.
  const void* codec = nullptr;
  uint32_t tokens = 0;  // of q
  // On the device, [kv_heads]: the head that items mean by each number (HeadCosts). nullptr: the head of that number.
  const uint16_t* heads = nullptr;
  float* mapped = nullptr;  // where AttendKernels::maps: kMappedRows * [tokens][query_heads][head_dim]
};

/// What AttendParams::codec begins with where kernels map. Factors are [kv_heads][head_dim][head_dim], row-major.
struct alignas(16) MappedSpace {
  const float* query = nullptr;  // q' = q query
  const float* output =
      nullptr;         // of encoded pages' outputs out of the space or, where it folds, of raw pages' into it
  uint32_t folds = 0;  // outputs stay in the space
};

/// Rows of AttendParams::mapped for each of q: itself in the codec's space, outputs of encoded pages there, of raw
/// ones.
inline constexpr int kMappedRows = 3;

}  // namespace kvmanager::device
