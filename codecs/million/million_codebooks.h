// Codebooks as the codec computes with them: 8-bit codes on one grid per channel.
//
// An artifact's codebook is fp16. The codec rounds it once, when it is made, to what its kernels look up: with
// low and high the smallest and largest component of channel c over the codebook's centroids,
//   mid[c] = (low + high) / 2, step[c] = (high - low) / 254, code = round_even((component - mid[c]) / step[c]),
// in fp32 and -127..127 (0 where step is 0), and from then on a centroid's component *is* mid[c] + step[c] * code: the
// encoder seeks the nearest of these, Decode writes them, attention multiplies their codes. The rounding (at most 1/508
// of the channel's range) is far below the distance between centroids; outlier channels have steps of their own.
// (MILLION's look-up tables, section III-C, are per query head, in fp16: rows of a group cannot share them, and a table
// with one step for all subspaces drowns in RoPE's outlier channels. Codes of components are the same for every row.)
//
// MillionTables is immutable, owned by the codec that was made from it, and may be read from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/million/million_format.h"
#include "codecs/million/million_side.h"

namespace kvmanager::million {

/// Codebooks in memory: [layer * kv_heads + head] of each side, fp16 bits [M][2^bits][width], finite. Read only while a
/// codec is made. Equal pointers are one codebook, kept once.
struct MillionCodebooks {
  int layers = 0;
  std::vector<const uint16_t*> side[2];  // kSideK, kSideV
};

inline constexpr uint8_t kFlip[2] = {0x80, 0};  // by side
/// Code -127..127 of a table's byte.
inline int CodeOf(int side, uint8_t byte) { return int8_t(byte ^ kFlip[side]); }

/// by_channel is always there: permutes read it, and the encoder. by_index is what look-ups by address read.
enum class TableOrder : uint8_t { kByChannel, kBoth };

class MillionTables {
 public:
  /// `order` of each side.
  MillionTables(const MillionFormat& format, const MillionCodebooks& codebooks, TableOrder k_order, TableOrder v_order);
  ~MillionTables();

  const SideTable& at(int side, int layer, int head) const { return tables_[side][size_t(layer) * kv_heads_ + head]; }
  int layers() const { return layers_; }
  /// Bytes of all tables.
  size_t bytes() const { return bytes_; }

 private:
  SideTable Make(const MillionFormat& format, int side, const uint16_t* codebook, TableOrder order);

  const int layers_;
  const int kv_heads_;
  std::vector<SideTable> tables_[2];
  std::vector<void*> memory_;
  size_t bytes_ = 0;
};

}  // namespace kvmanager::million
