#include "transport/recompute/projection.h"

#include <algorithm>

#include "kvmanager/base/finite.h"
#include "kvmanager/base/parallel.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/convert.h"

namespace kvmanager::recompute {
namespace {

constexpr int kProductWidth = 512;  // columns of one product: enough for OpenBLAS, few enough to share out

std::vector<float> Widened(absl::Span<const uint8_t> bytes, DType dtype) {
  std::vector<float> wide(bytes.size() / DTypeBytes(dtype));
  Widen(bytes.data(), dtype, wide.size(), wide.data());
  return wide;
}

}  // namespace

Projection::Projection(const ProjectionModel& model, int chunk_rows, WorkerPool* pool, const Blas* blas)
    : model_(model),
      blas_(*blas),
      heads_per_product_(std::max(1, kProductWidth / model.layout.head_dim)),
      pool_(pool),
      rope_(model.rope),
      layers_(model.layers),
      x_(size_t(chunk_rows) * model.hidden),
      out_{std::vector<float>(size_t(chunk_rows) * model.width()),
           std::vector<float>(size_t(chunk_rows) * model.width())},
      cos_(size_t(chunk_rows) * rope_.pairs()),
      sin_(cos_.size()) {
  row_begin_.reserve(chunk_rows);
}

absl::Status Projection::RegisterWeights(int layer, const LayerWeights& w) {
  KV_RETURN_IF_ERROR(CheckWeights(model_, layer, w));
  layers_[layer] = {{Widened(w.k, w.dtype), Widened(w.k_bias, w.dtype)},
                    {Widened(w.v, w.dtype), Widened(w.v_bias, w.dtype)}};
  return absl::OkStatus();
}

void Projection::ProjectHeads(const Layer& layer, int side, int head_begin, int head_end,
                              absl::Span<const PageRows> pages, int rows, std::atomic<int64_t>* not_finite) {
  const PageLayout& layout = model_.layout;
  const int d = layout.head_dim, width = model_.width(), hidden = model_.hidden;
  const int column = head_begin * d, columns = (head_end - head_begin) * d;
  const Side& weights = side == 0 ? layer.k : layer.v;
  float* const out = out_[side].data();
  blas_.Multiply(rows, columns, hidden, x_.data(), weights.weights.data() + size_t(column) * hidden, out + column,
                 width);
  for (size_t p = 0; p < pages.size(); ++p) {
    for (int t = 0; t < pages[p].tokens; ++t) {
      const size_t row = size_t(row_begin_[p]) + t;
      for (int head = head_begin; head < head_end; ++head) {
        float* const x = out + row * width + size_t(head) * d;
        if (!weights.bias.empty()) {
          const float* const bias = weights.bias.data() + size_t(head) * d;
          for (int c = 0; c < d; ++c) x[c] += bias[c];
        }
        if (side == 0) rope_.Rotate(x, cos_.data() + row * rope_.pairs(), sin_.data() + row * rope_.pairs());
        uint8_t* const to = pages[p].page + layout.raw_offset(side, head, t);
        Narrow(x, d, layout.dtype, to);
        if (FindNonFinite(layout.dtype, to, d) != size_t(d)) {
          not_finite->store((int64_t(p) * PageLayout::kPageTokensMax + t) * PageLayout::kKvHeadsMax * 2 + head * 2 +
                            side);
        }
      }
    }
  }
}

absl::Status Projection::Run(const uint8_t* x, int layer, absl::Span<const PageRows> pages,
                             const std::atomic<bool>* cancelled, const std::atomic<bool>& aborted) {
  const auto stopped = [&] { return aborted.load() || (cancelled != nullptr && cancelled->load()); };
  int rows = 0;
  row_begin_.clear();
  for (const PageRows& page : pages) {
    row_begin_.push_back(rows);
    rows += page.tokens;
  }
  const size_t hidden = model_.hidden, row_bytes = hidden * DTypeBytes(model_.layout.dtype);
  ParallelFor(pool_, pages.size(), [&](size_t p) {
    const size_t begin = row_begin_[p];
    Widen(x + begin * row_bytes, model_.layout.dtype, pages[p].tokens * hidden, &x_[begin * hidden]);
    for (int t = 0; t < pages[p].tokens; ++t) {
      rope_.Fill(pages[p].position + t, cos_.data() + (begin + t) * rope_.pairs(),
                 sin_.data() + (begin + t) * rope_.pairs());
    }
  });
  const int heads = model_.layout.kv_heads, products = (heads + heads_per_product_ - 1) / heads_per_product_;
  std::atomic<int64_t> not_finite{-1};
  ParallelFor(pool_, 2 * size_t(products), [&](size_t item) {
    if (stopped()) return;
    const int begin = int(item / 2) * heads_per_product_;
    ProjectHeads(layers_[layer], int(item % 2), begin, std::min(heads, begin + heads_per_product_), pages, rows,
                 &not_finite);
  });
  if (stopped()) return absl::CancelledError("the reload was cancelled");
  if (const int64_t at = not_finite.load(); at >= 0) {
    const int64_t row = at / (2 * PageLayout::kKvHeadsMax), rest = at % (2 * PageLayout::kKvHeadsMax);
    const PageRows& page = pages[row / PageLayout::kPageTokensMax];
    return NotFinite(layer, int(rest % 2), int(rest / 2), page.position + row % PageLayout::kPageTokensMax);
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::recompute
