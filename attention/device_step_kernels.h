// The kernels of a device step beside attention itself; plain structs and functions, without CUDA's types.
#pragma once

#include <cstdint>

#include "attention/step_tables.h"
#include "codecs/device/attend_params.h"
#include "kvmanager/base/page_layout.h"

struct CUstream_st;

namespace kvmanager::step {

/// A token to append.
struct AppendRow {
  uint32_t page;      // the place of its raw page in the layer's table
  uint32_t offset;    // in the page
  uint32_t place;     // of its sequence
  uint32_t position;  // in the context
};

/// What the device keeps: the first non-finite value of each sequence, as in the host's word, and this where there is
/// none.
inline constexpr uint64_t kAllFinite = UINT64_MAX;

/// The host's words: kNonFinite | position | layer | side | head | channel, so that the smallest is the first.
inline constexpr uint64_t kNonFinite = uint64_t{1} << 63;
inline constexpr int kChannelBits = 8, kHeadBits = 8, kSideBits = 1, kLayerBits = 10, kPositionBits = 32;
static_assert(kChannelBits + kHeadBits + kSideBits + kLayerBits + kPositionBits < 63);

/// Everything in pinned memory is read by the kernel, and may be overwritten when `*done` is `number`.
struct Upload {
  static constexpr int kLayersMax = 1024;

  const SlotChange* changes = nullptr;  // pinned
  uint32_t* tables = nullptr;
  const uint32_t* resets = nullptr;  // pinned: places of sequences whose words become "none"
  uint64_t* first = nullptr;         // [sequences]
  uint64_t* non_finite = nullptr;    // [sequences], pinned, or nullptr
  const AppendRow* rows = nullptr;   // pinned
  AppendRow* rows_to = nullptr;
  /// A part of a plan, in vectors of 16 bytes.
  struct PlanPart {
    const void* from = nullptr;  // pinned
    void* to = nullptr;          // [layers][of_layer]
    uint32_t count = 0, of_layer = 0;
  };
  static constexpr int kPlanParts = 3;
  PlanPart plan[kPlanParts];
  uint32_t change_count = 0, reset_count = 0, row_count = 0;
  uint32_t layer_count = 0;     // whose plan this is
  uint32_t* arrived = nullptr;  // zero before and after
  uint64_t* done = nullptr;     // pinned
  uint64_t number = 0;
  uint16_t layers[kLayersMax];
};

struct Append {
  uint8_t* pool;
  const uint32_t* slots;  // of the layer
  const AppendRow* rows;
  const void* k;  // [tokens][kv_heads][head_dim]
  const void* v;
  uint64_t* first;
  uint64_t* non_finite;  // nullptr: not looked for
  uint32_t layer;
  uint32_t tokens;
  PageLayout layout;
};

/// Copies of one launch.
struct Copies {
  static constexpr int kMax = 256;
  struct Item {
    uint32_t from, to, tokens;
  };
  uint8_t* pool;
  PageLayout layout;
  uint32_t count;
  Item items[kMax];
};

// Each launches one kernel, and returns a cudaError_t.
int LaunchUpload(const Upload& upload, CUstream_st* stream);
int LaunchAppend(const Append& append, CUstream_st* stream);
int LaunchCopies(const Copies& copies, CUstream_st* stream);

}  // namespace kvmanager::step
