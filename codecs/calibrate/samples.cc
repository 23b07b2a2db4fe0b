#include "codecs/calibrate/samples.h"

#include <algorithm>
#include <cmath>

#include "kvmanager/base/finite.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/parallel.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr int kBlockTokens = 512;  // of a capture that are converted at a time

absl::Status CheckFinite(absl::string_view what, int layer, absl::Span<const float> values, int heads, int d,
                         uint64_t first_row) {
  const size_t at = FindNonFinite(DType::kFloat32, values.data(), values.size());
  if (at == values.size()) return absl::OkStatus();
  return InvalidField(absl::StrCat(what, " of layer ", layer, ", token ", first_row + at / d / heads, ", head ",
                                   at / d % heads, ", channel ", at % d),
                      values[at], "finite");
}

/// x [rows][d] minus the mean over each page of each run.
void SubtractPageMeans(int rows, int run, int d, double* x) {
  std::vector<double> mean(d);
  for (int first = 0; first < rows;) {
    const int end = std::min({rows, first + Collector::kPageTokens, (first / run + 1) * run});
    std::fill(mean.begin(), mean.end(), 0.0);
    for (int r = first; r < end; ++r) {
      for (int c = 0; c < d; ++c) mean[c] += x[size_t(r) * d + c];
    }
    for (int r = first; r < end; ++r) {
      for (int c = 0; c < d; ++c) x[size_t(r) * d + c] -= mean[c] / (end - first);
    }
    first = end;
  }
}

/// One row of so many is kept.
uint64_t KeepEvery(const CalibrationModel& model, uint64_t tokens, const SampleLimits& limits) {
  const uint64_t row_bytes = uint64_t(model.layers) * model.kv_heads * 2 * model.head_dim * sizeof(uint16_t);
  const uint64_t rows_max = std::clamp<uint64_t>(limits.bytes_max / row_bytes, 1, limits.rows_max);
  return std::max<uint64_t>((tokens + rows_max - 1) / rows_max, 1);
}

}  // namespace

uint64_t RowsKept(const CalibrationModel& model, uint64_t tokens, const SampleLimits& limits) {
  const uint64_t every = KeepEvery(model, tokens, limits);
  return (tokens + every - 1) / every;
}

Collector::Collector(const CalibrationModel& model, uint64_t tokens, const SampleLimits& limits, WorkerPool* pool)
    : tokens_(tokens), seen_(model.layers), pool_(pool), scratch_(model.kv_heads) {
  OneBlasThread();
  samples_.model = model;
  const size_t d = model.head_dim, heads = size_t(model.layers) * model.kv_heads;
  every_ = KeepEvery(model, tokens, limits);
  samples_.rows = int(RowsKept(model, tokens, limits));
  samples_.heads.resize(heads);
  for (HeadSamples& head : samples_.heads) {
    for (Moment* moment : {&head.q, &head.k, &head.v, &head.w_o}) moment->sum.resize(d * d);
    for (int side = 0; side < 2; ++side) {
      head.within[side].sum.resize(d * d);
      head.rows[side].reserve(samples_.rows * d);
    }
  }
}

absl::Status Collector::Add(int layer, int rows, int run, absl::Span<const float> q, absl::Span<const float> k,
                            absl::Span<const float> v) {
  const CalibrationModel& model = samples_.model;
  const int d = model.head_dim, kv_heads = model.kv_heads, group = model.query_heads / kv_heads;
  const uint64_t first = seen_[layer];
  KV_CHECK(first + rows <= tokens_ && q.size() == size_t(rows) * model.query_heads * d);
  KV_CHECK(k.size() == size_t(rows) * kv_heads * d && v.size() == k.size());
  KV_RETURN_IF_ERROR(CheckFinite("Q", layer, q, model.query_heads, d, first));
  KV_RETURN_IF_ERROR(CheckFinite("K", layer, k, kv_heads, d, first));
  KV_RETURN_IF_ERROR(CheckFinite("V", layer, v, kv_heads, d, first));
  std::vector<absl::Status> errors(kv_heads);
  ParallelFor(pool_, kv_heads, [&](size_t h) {
    HeadSamples& head = samples_.heads[size_t(layer) * kv_heads + h];
    std::vector<double>& x = scratch_[h];
    x.resize(size_t(rows) * group * d);
    for (int r = 0; r < rows; ++r) {
      const float* from = &q[(size_t(r) * model.query_heads + h * group) * d];
      std::copy_n(from, size_t(group) * d, &x[size_t(r) * group * d]);
    }
    AddSecondMoment(x, d, &head.q.sum);
    head.q.count += double(rows) * group;
    for (int side = 0; side < 2; ++side) {
      const float* values = side == 0 ? k.data() : v.data();
      x.resize(size_t(rows) * d);
      for (int r = 0; r < rows; ++r) {
        const float* from = values + (size_t(r) * kv_heads + h) * d;
        std::copy_n(from, d, &x[size_t(r) * d]);
        if ((first + r) % every_ != 0) continue;
        for (int c = 0; c < d; ++c) {
          const uint16_t bits = FloatToHalf(from[c]);
          if ((bits & 0x7c00) == 0x7c00) {
            errors[h] = InvalidField(absl::StrCat(side == 0 ? "K" : "V", " of layer ", layer, ", token ", first + r),
                                     from[c], "in the range of float16");
          }
          head.rows[side].push_back(bits);
        }
      }
      Moment& moment = side == 0 ? head.k : head.v;
      AddSecondMoment(x, d, &moment.sum);
      moment.count += rows;
      SubtractPageMeans(rows, run, d, x.data());
      AddSecondMoment(x, d, &head.within[side].sum);
      head.within[side].count += rows;
    }
  });
  seen_[layer] += rows;
  for (const absl::Status& error : errors) KV_RETURN_IF_ERROR(error);
  return absl::OkStatus();
}

absl::Status Collector::SetOutputProjection(int layer, absl::Span<const float> w_o) {
  const CalibrationModel& model = samples_.model;
  const size_t d = model.head_dim, inputs = d * model.query_heads, hidden = w_o.size() / inputs;
  const size_t group = model.query_heads / model.kv_heads;
  KV_CHECK(w_o.size() == hidden * inputs);
  const size_t at = FindNonFinite(DType::kFloat32, w_o.data(), w_o.size());
  if (at != w_o.size()) {
    return InvalidField(absl::StrCat("W_O of layer ", layer, ", element ", at), w_o[at], "finite");
  }
  ParallelFor(pool_, model.kv_heads, [&](size_t h) {
    HeadSamples& head = samples_.heads[size_t(layer) * model.kv_heads + h];
    std::vector<double>& x = scratch_[h];
    x.resize(hidden * d);
    for (size_t g = 0; g < group; ++g) {
      for (size_t row = 0; row < hidden; ++row) {
        std::copy_n(&w_o[row * inputs + (h * group + g) * d], d, &x[row * d]);
      }
      AddSecondMoment(x, int(d), &head.w_o.sum);
      head.w_o.count += double(hidden);
    }
  });
  return absl::OkStatus();
}

Samples Collector::Finish() {
  for (uint64_t seen : seen_) KV_CHECK(seen == tokens_);
  samples_.tokens = tokens_;
  return std::move(samples_);
}

absl::StatusOr<Samples> ReadSamples(const Capture& capture, const SampleLimits& limits, WorkerPool* pool,
                                    absl::FunctionRef<void(int64_t, int64_t)> progress) {
  const CalibrationModel& model = capture.model();
  const size_t d = model.head_dim;
  Collector collector(model, capture.counted_tokens(), limits, pool);
  std::vector<float> rows[3];  // [tokens][heads][d]
  // A block begins with a page; where sinks are left out, it ends with its context.
  const uint64_t window = capture.sinks() == 0 ? capture.tokens() : capture.window();
  for (int layer = 0; layer < model.layers; ++layer) {
    for (uint64_t first = capture.sinks(); first < capture.tokens();) {
      const uint64_t window_end = std::min(capture.tokens(), (first / window + 1) * window);
      const int count = int(std::min<uint64_t>(kBlockTokens, window_end - first));
      for (const Capture::Part part : {Capture::Part::kQ, Capture::Part::kK, Capture::Part::kV}) {
        const size_t heads = part == Capture::Part::kQ ? model.query_heads : model.kv_heads;
        std::vector<float>& out = rows[static_cast<int>(part)];
        out.resize(count * heads * d);
        for (size_t h = 0; h < heads; ++h) {
          capture.CopyRows(layer, part, int(h), first, count, out.data() + h * d, heads * d);
        }
      }
      KV_RETURN_IF_ERROR(collector.Add(layer, count, count, rows[0], rows[1], rows[2]));
      first += count;
      if (first == window_end) first += capture.sinks();
    }
    if (capture.has_output_projection()) {
      KV_RETURN_IF_ERROR(collector.SetOutputProjection(layer, capture.OutputProjection(layer)));
    }
    progress(layer + 1, model.layers);
  }
  return collector.Finish();
}

}  // namespace kvmanager::calibrate
