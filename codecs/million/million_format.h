// The bytes of an encoded MILLION page, version 1: one layout for CPU and GPU. docs/codecs.md draws it; this file
// defines it.
//
// Product quantisation (MILLION, section III): a side (K or V) of head_dim channels is cut into M subspaces of width
// head_dim / M; a token's sub-vector is the index, of B bits, of its nearest centroid. A page holds indices alone;
// centroids are the codec's (million_codebooks.h).
//
// A page is head-major: one record per KV head, at a multiple of 64 bytes: [K side][V side], each side at a multiple of
// 64 bytes, padded with zeros. page_tokens is a multiple of 64: a *strip* is 64 tokens, and a side is its strips in
// order, each 8 * M * B bytes.
//
// B bits are stored as planes of 8, 4, 2 and 1 bits (B = 11 is an 8-bit, a 2-bit and a 1-bit plane; 12 an 8-bit and a
// 4-bit one), the widest first and holding the lowest bits. A strip is its planes one after another; a plane is
// subspace-major: of subspace m, 8 * b bytes at m * 8 * b, in which token t of the strip lies
//   8-bit plane: in byte t;
//   4-bit plane: in byte t % 32, bits 4 (t / 32) and up;
//   2-bit plane: in byte t % 16, bits 2 (t / 16) and up;
//   1-bit plane: in byte t / 8, bit t % 8.
// So one load gives 64 tokens of one subspace: the indices of a permute (vpermi2b) on the CPU, neighbouring lanes'
// indices on the GPU. Planes of an even M are 16-byte aligned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/million/million_side.h"
#include "codecs/registry.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::million {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr int kBitsMin = 4;
inline constexpr int kBitsMax = 12;
inline constexpr int kSideK = 0;
inline constexpr int kSideV = 1;

struct SideParameters {
  int m = 64;    // subspaces; divides head_dim
  int bits = 8;  // of an index: kBitsMin..kBitsMax
  friend bool operator==(const SideParameters&, const SideParameters&) = default;
};

/// m where nothing is said: two channels a sub-space, so that 8 bits an index are 4 bits a channel at every head_dim.
constexpr int DefaultSubspaces(int head_dim) { return head_dim / 2; }

/// "million:k_m=64,k_bits=8,v_m=64,v_bits=8,scope=head"; "m" and "bits" set both sides.
struct MillionParameters {
  SideParameters side[2];    // kSideK, kSideV
  bool whole_model = false;  // scope=model: one codebook for every layer and head; scope=head: one for each
};

/// Where everything is in a page; the same for all pages of a cache.
struct MillionFormat {
  PageLayout layout;
  MillionParameters parameters;
  SideLayout side[2];
  uint32_t record_bytes = 0;   // of one head, a multiple of 64
  uint32_t page_bytes = 0;     // kv_heads * record_bytes
  uint32_t payload_bytes = 0;  // without padding, whole page
};

/// Checks the parameters against the layout. Errors: INVALID_ARGUMENT with field, value, bound.
absl::StatusOr<MillionParameters> ParseMillionParameters(const CodecParameters& parameters, const PageLayout& layout);
/// All parameters in the fixed order of MillionParameters' comment.
std::string MillionSpec(const MillionParameters& parameters);
/// Lays a page out; `parameters` are checked ones.
MillionFormat MakeMillionFormat(const PageLayout& layout, const MillionParameters& parameters);

/// The index of `token` (0..63) in a strip, and its opposite, which needs a strip of zeros.
int IndexAt(const SideLayout& side, const uint8_t* strip, int subspace, int token);
void PutIndex(const SideLayout& side, uint8_t* strip, int subspace, int token, int index);

/// All indices of a subspace, in order of tokens.
void UnpackIndices(const SideLayout& side, const uint8_t* strip, int subspace, uint16_t* indices);
/// Writes the subspace's part of every plane, whatever was there. indices: [64], below 2^bits.
void PackIndices(const SideLayout& side, const uint16_t* indices, int subspace, uint8_t* strip);

}  // namespace kvmanager::million
