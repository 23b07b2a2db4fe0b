// The bytes of an encoded HACK page, version 2: one layout for CPU and GPU. docs/codecs.md draws it; this file defines
// it.
//
// A page is head-major: one record per KV head, each [K side][V side]. A side is [codes][metadata arrays], every
// array at a 16-byte-aligned offset from the start of the page. page_tokens is a multiple of 64: a *strip* is 64
// tokens.
//
// Codes of a side: strips in order; in a strip segments of 16 channels, in stored order; in a segment planes, low bits
// first.
//   width 0: no plane.  1: one 1-bit plane.  2: one 2-bit plane.  3: a 2-bit plane (bits 0, 1), then a 1-bit plane (bit
//   2). 4: two 2-bit planes (bits 0, 1; bits 2, 3).  8: one 8-bit plane.
// A plane of b bits of one segment and strip is 128 * b bytes of 32-bit little-endian words of 4 bytes; every byte
// holds the same four-byte lane of several tiles, so that `word & mask` leaves 4 u8 lanes that an int8 dot product
// contracts:
//
//   K (lane = channel, tile = 16 tokens; contracted over channels; a vector register's 16 words are 16 tokens):
//     c = 4 * j + lane is the channel inside the segment (j 0..3), token = 16 * i + r (tile i 0..3, r 0..15).
//   V (lane = token; contracted over tokens; a vector register's 16 words are the segment's 16 channels):
//     token = 16 * i + 4 * j + lane (i 0..3, j 0..3), channel r (0..15) inside the segment.
//
//   2-bit plane: word [j][r], 64 words; byte `lane`; tile i in bits 2i, 2i+1.
//   1-bit plane: word [h][r], h 0..1, 32 words; byte `lane`; j = 2h + p (p 0..1), tile i in bit (i & 1) + 4 (i >> 1) +
//   2p.
//     (So that 3 bits join with one shift and one OR: the 1-bit plane lands on bits 2 and 6 beside the 2-bit plane's 0,
//     1, 4, 5.)
//   8-bit plane: word [j][i][r], 256 words; byte `lane`. K stores the code; V stores code - 128 (s8), since P is the
//   unsigned
//     operand of the product.
//
// Metadata of a side, by what its partitions run along:
//   along tokens (V always, K with k_axis=channel): `partitions` = page_tokens / partition, one (step, minimum) per
//   partition
//     and channel: arrays [partition][channel], channels in stored order.
//   along channels (K with k_axis=token): partitions = head_dim / partition, one (step, minimum) per partition and
//   token:
//     arrays [partition][token].
// With 8-bit metadata: top, [partitions of tops][2] fp16 (largest step, largest |minimum|; for k_axis=token one pair
// for the
//   page and head), then step u8 (step = top_step * u8 / 255, u8 >= 1 unless the width is 0), then minimum s8
//   (minimum = top_min * s8 / 127). With 16-bit metadata: step fp16, then minimum fp16.
// K with k_axis=token and sums: then sum of codes, u16 [partition][token].
// V with v_norm=1: then norms, u8 [token], as fractions of a top that all tokens of the page and head share. The top is
//   fp16: with 8-bit metadata the last element of the tops, behind the pairs; with 16-bit metadata an array `tops` of
//   its own before the steps. A token's norm is its largest |value|, rounded up:
//   top = the page's largest norm, rounded up to fp16; u8 = ceil(norm * 255 / top), 1..255; norm = top * u8 / 255.
//   An all-zero V has top and u8 0.
// Value of code c: c * step + minimum, times the token's norm where norms are stored. A channel of width 0 is its
// minimum alone. With rotation=hadamard these are values of K and V times the normalised Walsh-Hadamard matrix of
// head_dim.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/registry.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::hack {

inline constexpr uint32_t kFormatVersion = 2;
inline constexpr int kStripTokens = 64;
inline constexpr int kSegmentChannels = 16;
inline constexpr int kSegmentsMax = PageLayout::kHeadDimMax / kSegmentChannels;

enum class Axis : uint8_t { kChannel, kToken };
enum class Range : uint8_t { kMinMax, kLeastSquares };
enum class Rounding : uint8_t { kNearest, kStochastic };
enum class Rotation : uint8_t { kNone, kHadamard };
enum class QueryCode : uint8_t {
  kSymmetric,
  kAsymmetric
};  // s8 without, u8 with a zero offset (then K's sums are needed)

/// Everything a user may set: "hack:k_axis=channel,k_bits=3,v_bits=2,meta=8,part=64,k_range=minmax,v_range=minmax,
/// rounding=nearest,q=symmetric,sums=0,rotation=hadamard,v_norm=1"; the other range is "least_squares". Defaults as
/// here, except v_range: least squares if v_bits is 1; and rotation: none where head_dim is no power of two.
struct HackParameters {
  Axis k_axis = Axis::kChannel;
  int k_bits = 3;      // 1, 2, 3, 4, 8
  int v_bits = 2;      // 1, 2, 3, 4, 8
  int meta_bits = 8;   // 8 or 16
  int partition = 64;  // 32, 64, 128: tokens (V; K with k_axis=channel), channels (K with k_axis=token)
  Range k_range = Range::kMinMax;
  Range v_range = Range::kMinMax;
  Rounding rounding = Rounding::kNearest;
  QueryCode query = QueryCode::kSymmetric;
  bool sums = false;                        // store K's code sums (k_axis=token); implied by q=asymmetric
  Rotation rotation = Rotation::kHadamard;  // of K and V: the Walsh-Hadamard transform of head_dim, a power of two
  bool v_norm = true;                       // divide each token's V by its norm, which the page stores
};

/// Offsets of one side inside a head's record, in bytes from the start of the head's record.
struct SideLayout {
  std::array<uint8_t, kSegmentsMax> segment_bits{};     // width of each segment, in stored order: 0..4 or 8
  std::array<uint32_t, kSegmentsMax> segment_offset{};  // of a segment's planes, from the start of its strip's codes
  std::array<bool, kSegmentsMax>
      segment_least_squares{};  // range of each segment's channels (of all, with k_axis=token)
  bool two_byte_q = false;      // attention codes q in two bytes where K's width is 8: see MakeHackFormat
  int segments = 0;             // head_dim / 16
  uint32_t strip_bytes = 0;     // codes of one strip
  int partitions = 0;           // see above
  int partition = 0;            // elements per partition
  int meta_entries = 0;         // steps (or minima) per partition: head_dim, or page_tokens with k_axis=token
  uint32_t codes = 0;           // offset of the codes
  uint32_t tops = 0;            // offset of the fp16 pairs (8-bit metadata), or of norm_top alone
  uint32_t steps = 0;
  uint32_t minima = 0;
  uint32_t sums = 0;      // 0: not stored
  uint32_t norms = 0;     // of V's tokens, u8 [page_tokens]; 0: not stored
  uint32_t norm_top = 0;  // what they are fractions of, fp16; 0: not stored
  uint32_t end = 0;
};

struct HeadLayout {
  uint32_t offset = 0;  // of the head's record in the page, a multiple of 64
  SideLayout side[2];   // 0 = K, 1 = V
};

/// Where everything is in a page; the same for all pages of a cache.
struct HackFormat {
  PageLayout layout;
  HackParameters parameters;
  std::vector<HeadLayout> heads;  // [kv_heads]
  uint32_t page_bytes = 0;        // a multiple of 64
  uint32_t payload_bytes = 0;     // without padding, whole page
};

/// Widths of every segment, where they differ: [kv_heads][side][segment], each 0..4 or 8.
using SegmentBits = std::vector<std::array<std::vector<uint8_t>, 2>>;

/// Checks the parameters against the layout and lays a page out. Errors: INVALID_ARGUMENT with field, value, bound.
absl::StatusOr<HackParameters> ParseHackParameters(const CodecParameters& parameters, const PageLayout& layout);
/// All parameters in the fixed order of HackParameters' comment: "hack:k_axis=channel,k_bits=3,...,v_norm=1".
std::string HackSpec(const HackParameters& parameters);
/// bits: nullptr for parameters.k_bits and v_bits throughout. With bits, segments of width 1 take the least-squares
/// range and all others min-max, whatever k_range and v_range say, and k_axis must be channel; and attention codes q in
/// two bytes for K's segments of 8 bits: the unit of one byte follows the widest step, which a narrow segment has, and
/// codes up to 255 would multiply its rounding. `parameters` are checked ones: a rotation needs a head_dim that is a
/// power of two.
HackFormat MakeHackFormat(const PageLayout& layout, const HackParameters& parameters,
                          const SegmentBits* bits = nullptr);

}  // namespace kvmanager::hack
