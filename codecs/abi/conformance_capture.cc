#include "codecs/abi/conformance_capture.h"

#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::conformance {
namespace {

using calibrate::Capture;

absl::Status NotFinite(const char* part, int layer, int head, uint64_t token, int channel, float value) {
  return InvalidField(absl::StrCat("capture layers.", layer, ".", part, "[", head, "][", token, "][", channel, "]"),
                      value, "finite in the page's type");
}

}  // namespace

absl::Status CheckCapture(const Capture& capture, const PageLayout& layout) {
  const CalibrationModel& model = capture.model();
  if (layout.kv_heads != model.kv_heads || layout.head_dim != model.head_dim) {
    return InvalidField("layout beside a capture",
                        absl::StrCat(layout.kv_heads, " KV heads of ", layout.head_dim, " dimensions"),
                        absl::StrCat(model.kv_heads, " of ", model.head_dim, ", as the capture's"));
  }
  if (capture.tokens() < layout.page_tokens) {
    return InvalidField("capture's tokens", capture.tokens(),
                        absl::StrCat("at least ", layout.page_tokens, ", those of a page"));
  }
  return absl::OkStatus();
}

absl::Status DrawPage(const Capture& capture, const PageLayout& layout, int layer, uint32_t seed, uint8_t* raw) {
  const size_t d = layout.head_dim;
  const uint64_t first = std::mt19937_64(seed)() % (capture.tokens() / layout.page_tokens) * layout.page_tokens;
  std::vector<float> rows(layout.page_tokens * d);
  for (const Capture::Part part : {Capture::Part::kK, Capture::Part::kV}) {
    const int side = part == Capture::Part::kK ? 0 : 1;
    for (int head = 0; head < layout.kv_heads; ++head) {
      capture.CopyRows(layer, part, head, first, layout.page_tokens, rows.data(), d);
      uint8_t* const to = raw + layout.raw_offset(side, head, 0);
      for (size_t i = 0; i < rows.size(); ++i) {
        StoreElement(to, layout.dtype, i, rows[i]);
        if (!std::isfinite(LoadElement(to, layout.dtype, i))) {
          return NotFinite(side == 0 ? "k" : "v", layer, head, first + i / d, int(i % d), rows[i]);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> DrawQueries(const Capture& capture, int layer, int kv_head, int rows,
                                               uint32_t seed) {
  const CalibrationModel& model = capture.model();
  const int group = model.query_heads / model.kv_heads;
  const size_t d = model.head_dim;
  std::mt19937_64 random(seed);
  std::vector<float> q(rows * d);
  for (int row = 0; row < rows; ++row) {
    const int head = kv_head * group + int(random() % group);
    const uint64_t token = random() % capture.tokens();
    capture.CopyRows(layer, Capture::Part::kQ, head, token, 1, &q[row * d], d);
    for (size_t c = 0; c < d; ++c) {
      if (!std::isfinite(q[row * d + c])) return NotFinite("q", layer, head, token, int(c), q[row * d + c]);
    }
  }
  return q;
}

}  // namespace kvmanager::conformance
