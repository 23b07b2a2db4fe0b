// What a daemon and a plug-in's process (plugin_process.h) say to one another: a call and its answer, a packet each
// over a Unix socket of type SEQPACKET, with what is large in memory that both map. Plain structs: both are of one
// program.
//
// The process believes the daemon. The daemon believes nothing: it copies what comes back out of the shared memory,
// from places that it chose itself, before it looks at it.
//
//   control socket   daemon: SetUp, the object's path   process: Ready, a text
//   lane's socket    daemon: (Call                      process: Answer, a text)*
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/abi/kvmanager_codec.h"

namespace kvmanager::plugin {

/// Descriptors of the process; lane i's socket is kLaneFd + i.
inline constexpr int kControlFd = 3, kMemoryFd = 4, kLaneFd = 5;
inline constexpr size_t kTextBytesMax = 512;   // of an error
inline constexpr size_t kPathBytesMax = 4096;  // of the object's path

struct SetUp {
  uint32_t lanes = 0;
  uint32_t thread_bytes = 0;
  uint64_t lane_bytes = 0;     // of memory, lane 0 first
  uint64_t address_bytes = 0;  // of address space; 0: no bound
};

/// A text behind it: why the object cannot be used, if `status` is not KVMC_OK; else its help.
struct Ready {
  kvmc_status status = KVMC_INTERNAL;
  uint32_t code = 0;  // absl::StatusCode of the error
  char name[KVMC_NAME_BYTES_MAX + 1] = {};
  uint8_t attend_batch = 0, map_queries = 0, expand_output = 0, project_output = 0, output_factor = 0;
};

constexpr size_t AlignUp(size_t n) {
  return (n + KVMC_ALIGNMENT_BYTES - 1) / KVMC_ALIGNMENT_BYTES * KVMC_ALIGNMENT_BYTES;
}

enum class CallType : uint32_t {
  kMake = 1,  // bytes: of the artifact, whose descriptor comes along; 0: none. MakeHead, texts. Answer: DescriptionHead
  kDrop,
  kEncode,  // count: EncodeSlots
  kDecode,  // count: DecodeSlots
  kAttend,  // rows, layer, kv_head, scale, count: pages, stride: between them
  kMapQueries,
  kExpandOutput,
  kProjectOutput,
  kOutputFactor,
  kValidate,  // bytes
};

struct Call {
  CallType type = CallType::kDrop;
  uint32_t number = 0;  // the answer repeats it
  uint64_t codec = 0;   // the daemon's number of it, never used twice
  uint32_t layer = 0, kv_head = 0, rows = 0, count = 0;
  uint64_t stride = 0, bytes = 0;
  float scale = 0;
  uint32_t zero = 0;
};

/// An error's text behind it.
struct Answer {
  uint32_t number = 0;
  kvmc_status status = KVMC_OK;
};

// At the beginning of a lane's memory; places count from there.

struct MakeHead {
  uint32_t dtype = 0, kv_heads = 0, head_dim = 0, page_tokens = 0, layers = 0, query_heads = 0;
  uint32_t parameters = 0;  // a key and a value each, behind this, each ended by 0
  uint32_t zero = 0;
};

/// Behind it bytes_of_layer, then layer_flags.
struct DescriptionHead {
  uint32_t version = 0, flags = 0;
  uint64_t payload_bytes = 0;
  char parameters[KVMC_PARAMETERS_BYTES_MAX] = {};
};

struct EncodeSlot {
  uint64_t first_token = 0;
  uint64_t raw_at = 0, encoded_at = 0;
  uint32_t layer = 0;
  uint32_t declined = 0;  // the process's
};

/// Pages of an encoding lie behind room for so many slots.
inline constexpr size_t kEncodeSlotsMax = 64;

struct DecodeSlot {
  uint64_t encoded_at = 0, raw_at = 0;
  uint32_t layer = 0, first_head = 0, head_count = 0, zero = 0;
};

inline constexpr size_t kEncodePagesAt = AlignUp(kEncodeSlotsMax * sizeof(EncodeSlot));

/// Where an attention's rows are. Pages lie behind room for the most rows, so that rows of other queries may follow on
/// the same pages.
struct AttendPlaces {
  explicit constexpr AttendPlaces(size_t head_dim)
      : acc_at(AlignUp(size_t{KVMC_ROWS_MAX} * head_dim * sizeof(float))),
        max_at(2 * acc_at),
        sum_at(max_at + size_t{KVMC_ROWS_MAX} * sizeof(float)),
        pages_at(AlignUp(sum_at + size_t{KVMC_ROWS_MAX} * sizeof(float))) {}
  size_t q_at = 0, acc_at, max_at, sum_at, pages_at;
};

/// Of maps: rows out of the first place into the second.
constexpr size_t MapToAt(size_t head_dim) { return AlignUp(size_t{KVMC_ROWS_MAX} * head_dim * sizeof(float)); }

}  // namespace kvmanager::plugin
