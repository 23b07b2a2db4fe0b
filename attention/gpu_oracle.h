// Attention in double precision on a GPU, as plainly as it can be written: what attention_gpu_bench --check compares
// the kernels with, at contexts that a host could not compute.
//
// It reads pages by the rule itself (own page and lag raw, what lies behind encoded), not by a plan, and codes bit by
// bit as hack_format.h and million_format.h define them; it shares no code with the kernels. It gives two results: the
// arithmetic of hack_reference.h (q times step and P rounded to 8 bits, integer products) or million_reference.h
// (Rounding::kGpu), and exact attention on the pages' decoded values. Of ZACK's pages both are attention on K' left_k^T
// and V' left_v^T, which is attention on q left_k, K' and V' with outputs times left_v^T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/hack/hack_device_format.h"
#include "codecs/million/million_device_format.h"

struct CUstream_st;

namespace kvmanager {

inline constexpr int kOraclePageTokens = 64;
inline constexpr int kOracleRowsMax = 8;  // heads of a group

/// A page's forms, in units of device::kSlotUnitBytes.
struct OraclePage {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t raw = kNone;
  uint32_t encoded = kNone;
};

/// The rows of one query token and KV head.
struct OracleQuery {
  uint64_t position = 0;    // in the context: it sees 0 .. position
  uint32_t first_page = 0;  // of its sequence in the table
  uint32_t token = 0;       // in q
  uint32_t kv_head = 0;
};

struct OracleInput {
  const uint8_t* pool = nullptr;  // on the device, as all pointers here
  const OraclePage* pages = nullptr;
  const OracleQuery* queries = nullptr;
  uint32_t query_count = 0;
  uint64_t position_max = 0;
  const void* q = nullptr;  // [tokens][query_heads][head_dim]
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;  // at most 128
  int lag_pages = 0;
  bool bfloat16 = false;
  const million::MillionPairTables* pairs = nullptr;  // [kv_heads], where encoded pages are MILLION's; else
  /// A device::MappedSpace and ZackDeviceHeads [kv_heads], where they are ZACK's, outputs not folded; else
  const void* zack = nullptr;
  const hack::HackDeviceHead* heads = nullptr;  // [kv_heads]; 8-bit metadata, k_axis=channel, partitions of 64
  bool spoil_codes = false;                     // reads channel 0 of K wrongly: a comparison must then fail
};

/// What is known of a row: [query][row of the group][kOracleFields(head_dim)] doubles.
///   out [head_dim], then the logarithm of the sum of exponentials: same arithmetic
///   out [head_dim], then the logarithm of the sum of exponentials: exact
///   of the exact scores: count, sum, sum of squares
constexpr size_t OracleFields(int head_dim) { return 2 * (size_t(head_dim) + 1) + 3; }
constexpr size_t OracleSameAt(int) { return 0; }
constexpr size_t OracleExactAt(int head_dim) { return size_t(head_dim) + 1; }
constexpr size_t OracleScoresAt(int head_dim) { return 2 * (size_t(head_dim) + 1); }

/// Doubles of scratch memory that RunOracle wants.
size_t OracleScratch(const OracleInput& input);
/// Returns a cudaError_t; does not wait.
int RunOracle(const OracleInput& input, double* scratch, double* result, CUstream_st* stream);

}  // namespace kvmanager
