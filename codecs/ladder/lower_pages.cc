#include "codecs/ladder/lower_pages.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// Values that one step of LoweringError widens.
constexpr size_t kStepValues = 256;

size_t Values(const PageLayout& layout) { return layout.raw_bytes() / DTypeBytes(layout.dtype); }

}  // namespace

size_t LowerWorkspaceBytes(const Codec& ladder) {
  // A raw page beside a codec's own scratch, or two raw pages.
  const size_t raw = AlignUp(ladder.layout().raw_bytes());
  size_t beside = raw;
  for (int rung = 1; rung < ladder.rungs(); ++rung) {
    beside = std::max(beside, AlignUp(ladder.rung(rung).encode_workspace_bytes()));
  }
  return raw + beside;
}

void LowerPages(const Codec& ladder, int from_rung, absl::Span<LowerItem> items, absl::Span<uint8_t> workspace) {
  KV_CHECK(from_rung >= 0 && from_rung + 1 < ladder.rungs());
  KV_CHECK(workspace.size() >= LowerWorkspaceBytes(ladder));
  const Codec &from = ladder.rung(from_rung), &to = ladder.rung(from_rung + 1);
  const PageLayout& layout = ladder.layout();
  uint8_t* const raw = workspace.data();
  const absl::Span<uint8_t> scratch = workspace.subspan(AlignUp(layout.raw_bytes()), to.encode_workspace_bytes());
  // One at a time: the raw page stays in a near cache.
  for (LowerItem& item : items) {
    const DecodeItem decode{item.encoded, raw, item.layer};
    from.Decode(absl::MakeConstSpan(&decode, 1));
    // Values next to the type's largest may decode beyond it.
    item.declined = FindNonFinite(layout.dtype, raw, Values(layout)) != Values(layout);
    if (item.declined) continue;
    EncodeItem encode{raw, item.lowered, item.layer, item.first_token};
    to.Encode(absl::MakeSpan(&encode, 1), scratch);
    item.declined = encode.declined;
  }
}

double LoweringError(const Codec& ladder, int from_rung, const LowerItem& item, absl::Span<uint8_t> workspace) {
  KV_CHECK(from_rung >= 0 && from_rung + 1 < ladder.rungs() && !item.declined);
  KV_CHECK(workspace.size() >= LowerWorkspaceBytes(ladder));
  const PageLayout& layout = ladder.layout();
  uint8_t* const before = workspace.data();
  uint8_t* const after = before + AlignUp(layout.raw_bytes());
  const DecodeItem upper{item.encoded, before, item.layer}, lower{item.lowered, after, item.layer};
  ladder.rung(from_rung).Decode(absl::MakeConstSpan(&upper, 1));
  ladder.rung(from_rung + 1).Decode(absl::MakeConstSpan(&lower, 1));
  const size_t side_values = Values(layout) / 2, value_bytes = DTypeBytes(layout.dtype);
  double relative = 0;
  for (size_t side = 0; side < 2; ++side) {
    double error = 0, norm = 0;
    for (size_t begin = 0; begin < side_values; begin += kStepValues) {
      float x[kStepValues], y[kStepValues];
      const size_t count = std::min(kStepValues, side_values - begin);
      const size_t at = (side * side_values + begin) * value_bytes;
      ConvertToFloat(before + at, layout.dtype, count, x);
      ConvertToFloat(after + at, layout.dtype, count, y);
      for (size_t i = 0; i < count; ++i) {
        const double difference = double(y[i]) - x[i];
        error += difference * difference;
        norm += double(x[i]) * x[i];
      }
    }
    relative += error / norm;
  }
  relative = std::sqrt(relative / 2);
  return std::isfinite(relative) ? relative : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace kvmanager
