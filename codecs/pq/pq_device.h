// What PQ's kernels on a GPU read and write: plain structs, the same for host and device, and the launches.
//
// Nothing here owns memory. A launch allocates nothing, does not wait for its stream, and may be captured in a graph;
// what it is given lies in device memory (pages and their slots also in memory that the device reads) and stays until
// the stream has passed it. Free functions without state: any thread whose device it is may call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/device/selection_params.h"

struct CUstream_st;

namespace kvmanager::pq {

/// What launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kPqCudaUnavailable = -1;

using DeviceIndexTable = device::IndexTable;
using DeviceEncodeCodes = device::EncodeCodes;
using DeviceSelect = device::Select;
using device::SelectRuns;

inline constexpr int kDeviceRowsMax = 16;  // heads of a group
inline constexpr int kCodesOfWord = 4;
inline constexpr uint32_t kCodeChunkTokens = device::kCodeChunkTokens;
inline constexpr uint32_t kEncodeTokensMax = device::kEncodeTokensMax;
inline constexpr uint32_t kDeviceBlockTokens = 128;
/// Rows of K and pages are named by their distance from the pool's first byte in these units (device::kSlotUnitBytes).
inline constexpr uint64_t kRowUnitBytes = 64;
inline constexpr uint32_t kNoUnit = UINT32_MAX;

struct DeviceShape {
  int kv_heads = 0;
  int query_heads = 0;
  int head_dim = 0;
  int page_tokens = 0;
  int m = 0;
  int bits = 0;
  bool bfloat16 = false;

  constexpr int count() const { return 1 << bits; }
  constexpr int width() const { return head_dim / m; }
  constexpr int group() const { return query_heads / kv_heads; }
  constexpr int words() const { return (m + kCodesOfWord - 1) / kCodesOfWord; }  // of a token's codes
  /// Tokens' codes: [kv_heads][words][kCodeChunkTokens] of 32 bits; byte s of word w is sub-vector 4 w + s.
  constexpr size_t chunk_bytes() const { return size_t(kv_heads) * words() * kCodeChunkTokens * 4; }

  // A sequence's codebook of a layer, 16-byte aligned: fp32 centroids [kv_heads][m][width][count] and half of their
  // squared norms [kv_heads][m][count], as Codebook has them; then what LaunchPqPrepareBook makes of them.
  constexpr size_t half_norms_at() const { return size_t(kv_heads) * head_dim * count() * sizeof(float); }
  constexpr size_t bounds_at() const { return half_norms_at() + size_t(kv_heads) * m * count() * sizeof(float); }
  constexpr size_t fragments_at() const {
    return (bounds_at() + size_t(kv_heads) * m * 2 * sizeof(float) + 15) / 16 * 16;
  }
  constexpr size_t book_bytes() const { return fragments_at() + size_t(kv_heads) * head_dim * count() * 2; }
};

/// bounds and fragments of `count` codebooks, after their first bounds_at() bytes came. books: [count] on the device.
int LaunchPqPrepareBooks(const DeviceShape& shape, uint8_t* const* books, uint32_t count, CUstream_st* stream);

// ---- codes ----

/// Codes of keys in raw pages: those of Kernels::nearest, bit for bit. pool, slots: as AttendParams. items: [count].
int LaunchPqEncode(const DeviceShape& shape, const uint8_t* pool, const uint32_t* slots, const DeviceIndexTable& table,
                   const DeviceEncodeCodes* items, uint32_t count, CUstream_st* stream);

// ---- sparse selection ----

struct SelectParams {
  DeviceShape shape;
  const uint32_t* slots = nullptr;  // the layer's table
  DeviceIndexTable index;
  const DeviceSelect* queries = nullptr;
  uint32_t count = 0;
  const void* q = nullptr;  // [tokens][query_heads][head_dim] of the cache's dtype
  float scale = 1;
  uint8_t* scratch = nullptr;  // SelectScratchBytes, 16-byte aligned
  uint32_t runs = 0;           // of the scratch memory: of all queries and KV heads
  uint32_t* rows = nullptr;    // out: units of rows of K: sinks, chosen, local, each ascending; then any valid row
  /// Begins before the kernel before it has ended (and waits for that before it reads q or writes anything), to fetch
  /// codebooks: that kernel must not have written them, `queries` or what those point to.
  bool early = false;
  uint32_t* chosen = nullptr;  // out, or nullptr: the chosen ones' tokens, where they are in `rows` less the sinks
};

/// Of `runs` in all.
size_t SelectScratchBytes(const DeviceShape& shape, uint32_t runs);
/// Whether there are kernels: at most kDeviceRowsMax heads of a group, tables that fit, head_dim 16 to 256.
bool CanSelectOnDevice(const DeviceShape& shape);
/// Once per device, before the first launch.
int PrepareSelect();
/// Chooses as SelectByCodes does, bit for bit. blocks: of threads per query and KV head, 1, 2, 4 or 8. middle_max: of
/// the queries.
int LaunchPqSelect(const SelectParams& params, int blocks, uint32_t middle_max, CUstream_st* stream);
/// The number of blocks that suits so many queries.
int SelectBlocks(const DeviceShape& shape, uint32_t count, uint32_t middle_max, int multiprocessors);

// ---- copies of blocks ----

/// The copies of one sequence, layer and KV head; all arrays on the device and zero before the first step, but
/// `cached`, all kNoUnit.
struct DeviceCacheSlot {
  uint32_t block = 0, uses = 0, last = 0, admitted = 0;  // as BlockCache's
};
struct DeviceCacheCounts {
  unsigned long long hits = 0, misses = 0;  // in tokens
  unsigned long long evictions = 0;         // in blocks
};
struct DeviceCache {
  uint32_t* cached = nullptr;        // DeviceSelect's, of this KV head
  DeviceCacheSlot* slots = nullptr;  // [slot_count]
  DeviceCacheCounts* counts = nullptr;
  uint32_t* copies = nullptr;  // [1 + 2 * admitted_max]: how many; then block and slot of each
  uint32_t first_unit = 0;     // of slot 0; slots follow one another, each the raw pages that hold a block
  uint32_t call = 0;           // counts the steps: kept by the kernel
};
struct CacheParams {
  DeviceShape shape;
  const uint8_t* pool = nullptr;  // of pages and copies; what is at or beyond `second_unit` lies at `second`
  uint8_t* second = nullptr;
  uint32_t second_unit = 0;
  const uint32_t* slots = nullptr;
  const DeviceSelect* queries = nullptr;
  uint32_t count = 0;
  const uint32_t* chosen = nullptr;
  DeviceCache* caches = nullptr;  // [count][kv_heads]
  uint32_t slot_count = 0;        // of each
  uint32_t admitted_max = 0;      // blocks that one step may admit, at most slot_count
  uint32_t blocks_max = 0;        // of the longest context, at most kCacheBlocksOfContext
  bool lru = false;
};
inline constexpr uint32_t kCacheBlocksOfContext = 49152;

/// After a step's attention: counts what it selected, admits blocks as BlockCache::Update does, and copies them.
int LaunchPqCacheUpdate(const CacheParams& params, CUstream_st* stream);

// ---- attention over the rows ----

/// AttendParams::codec of rows in two places, on the device; nullptr: all are in the pool.
struct alignas(16) SecondPlace {
  const uint8_t* at = nullptr;
  uint32_t first_unit = 0;  // rows from here on lie at `at` + (unit - first_unit) * kRowUnitBytes
};

}  // namespace kvmanager::pq
