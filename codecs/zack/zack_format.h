// What a ZACK cache is made of: the parameters, the rank of every head, where a page keeps it, and the factors cut to
// those ranks.
//
// A page of a layer is head-major: per KV head K' [page_tokens][n_k], then V' [page_tokens][n_v], fp16, dense; since
// page_tokens and ranks are multiples of 16, everything starts at a multiple of 512 bytes and nothing is padding. Ranks
// are fixed when the cache is opened, so offsets are too. A ZackFormat is immutable once made; any thread may read it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "codecs/registry.h"
#include "codecs/zack/factors.h"

namespace kvmanager::zack {

constexpr uint32_t kFormatVersion = 1;
constexpr int kRankStep = 16;
constexpr double kRateDefault = 0.25, kRateMax = 0.95;

struct ZackParameters {
  std::string mode;
  double rate = kRateDefault;  // of dimensions, over all layers, heads and sides, to remove at least
  bool fold = false;           // outputs stay in V's space: the client folded the way back into W_O
};

/// One head of one layer. Matrices are row-major and dense.
struct ZackHead {
  int rank[2];                   // [side: K, V], multiples of kRankStep in kRankStep..d
  uint32_t offset[2];            // of K' and V' in a page, bytes; multiples of 64
  std::vector<float> encode[2];  // right_n [d][n]
  std::vector<float> decode[2];  // left_n^T [n][d]
  std::vector<float> query;      // K's left_n [d][n]
};

struct ZackFormat {
  PageLayout layout;
  ZackParameters parameters;
  std::string spec;                  // canonical, without the calibration
  std::vector<ZackHead> heads;       // [layers][kv_heads]
  std::vector<uint32_t> page_bytes;  // [layers]
  std::vector<int> lead_lines;       // [layers] how far attention prefetches: no further than its smallest head
  uint32_t page_bytes_max = 0;
  size_t payload_bytes = 0;  // mean over layers
  int rank_max = 0;
  double removed = 0;  // the true share of dimensions that is removed: at least parameters.rate

  const ZackHead& head(int layer, int kv_head) const { return heads[size_t(layer) * layout.kv_heads + kv_head]; }
  /// Bytes of K' and V' of one head in one page.
  uint32_t head_bytes(int layer, int kv_head) const {
    const ZackHead& h = head(layer, kv_head);
    return uint32_t(h.rank[0] + h.rank[1]) * layout.page_tokens * 2;
  }
};

/// Parameters mode, rate, fold. Errors: INVALID_ARGUMENT naming the field; FAILED_PRECONDITION without an artifact, or
/// with one that lacks ZACK's tensors.
absl::StatusOr<ZackFormat> MakeZackFormat(const CodecContext& context, const CodecParameters& parameters);

/// A format of given ranks [layers][kv_heads][2] (checked by KV_CHECK).
ZackFormat LayOut(const PageLayout& layout, const ZackParameters& parameters, const Factors& factors,
                  absl::Span<const int32_t> ranks);

}  // namespace kvmanager::zack
