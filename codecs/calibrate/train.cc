#include "codecs/calibrate/train.h"

#include <cblas.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>

#include "codecs/calibrate/kmeans.h"
#include "codecs/calibrate/rank_table.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/parallel.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

/// Codebooks are trained on at most this many rows when they stand for the whole model.
constexpr int kModelRowsMax = 65536;

class Trainer {
 public:
  Trainer(const Samples& samples, const TrainOptions& options, WorkerPool* pool, TrainProgress progress, TensorSet* set,
          std::vector<TrainStage>* stages)
      : samples_(samples),
        model_(samples.model),
        layers_(model_.layers),
        heads_(model_.kv_heads),
        d_(model_.head_dim),
        options_(options),
        pool_(pool),
        progress_(progress),
        set_(*set),
        stages_(*stages) {}

  absl::Status Run(const CalibrationPlan& plan) {
    if (plan.zack) {
      for (ZackMode mode : kZackModes) KV_RETURN_IF_ERROR(Zack(mode, plan.zack_hack));
      if (plan.zack_hack && IsPowerOfTwo(d_)) HadamardEnergy();
    }
    for (Side side : kSides) {
      for (const PqShape& shape : plan.million[int(side)]) HeadCodebooks("million", side, shape, nullptr);
      for (const PqShape& shape : plan.million_model[int(side)]) ModelCodebook(side, shape);
      for (const PqShape& shape : plan.zack_million[int(side)]) {
        for (ZackMode mode : kZackModes) {
          HeadCodebooks(absl::StrCat("zack_million.", Name(mode)), side, shape, &right_[int(mode)][int(side)]);
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  /// Runs work(item) for every item, showing progress.
  void Stage(absl::string_view what, size_t items, absl::FunctionRef<void(size_t)> work) {
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int64_t> done{0};
    progress_(what, 0, int64_t(items));
    ParallelFor(pool_, items, [&](size_t item) {
      work(item);
      const int64_t now = ++done;
      if (std::this_thread::get_id() == caller) progress_(what, now, int64_t(items));
    });
    progress_(what, int64_t(items), int64_t(items));
  }

  void EndStage(std::string what, std::chrono::steady_clock::time_point begun, uint64_t bytes, double error) {
    stages_.push_back({std::move(what), bytes,
                       std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(), error});
  }

  /// What V's channels would be worth, on average, if V were rotated by the Hadamard matrix: zack_hack.v_hadamard, for
  /// who measures which of the two bases loses less (measured.h).
  void HadamardEnergy() {
    const Matrix basis = HadamardMatrix(d_);
    const int slices = model_.query_heads / model_.kv_heads;
    std::vector<float> energy;
    for (const HeadSamples& head : samples_.heads) {
      const std::vector<double> spread = ColumnEnergy(head.within[1], basis, d_);
      double sum = 0;
      const bool known = head.w_o.count != 0;  // else all outputs count alike
      const std::vector<double> weight = known ? ColumnEnergy(head.w_o, basis, d_) : std::vector<double>(d_, 1.0);
      for (int c = 0; c < d_; ++c) sum += spread[c] * weight[c] * slices;
      energy.push_back(float(sum / d_));
    }
    set_.AddFloats(kHadamardEnergy, {uint64_t(layers_), uint64_t(heads_)}, energy);
  }

  absl::Status Zack(ZackMode mode, bool stack) {
    const auto begun = std::chrono::steady_clock::now();
    const size_t places = size_t(layers_) * heads_, matrix = size_t(d_) * d_, d = d_;
    std::vector<float> left[2], right[2], weights[2], table(places * 2 * d), energy(places * 2 * d);
    std::vector<int32_t> order(places * 2 * d);
    for (int side = 0; side < 2; ++side) {
      left[side].resize(places * matrix);
      right[side].resize(places * matrix);
      weights[side].resize(places * d);
    }
    std::vector<absl::Status> errors(places * 2);
    Stage(absl::StrCat("zack ", Name(mode)), places * 2, [&](size_t item) {
      const size_t at = item / 2, side = item % 2;
      const HeadSamples& head = samples_.heads[at];
      Moment outputs = head.w_o;
      if (outputs.count == 0) {
        for (size_t c = 0; c < d; ++c) outputs.sum[c * d + c] = 1;
        outputs.count = 1;
      }
      const Moment &one = side == 0 ? head.q : outputs, &other = side == 0 ? head.k : head.v;
      const absl::StatusOr<Factors> factors = MakeFactors(mode, one, other, d_);
      if (!factors.ok()) {
        errors[item] = factors.status();
        return;
      }
      std::copy(factors->left.begin(), factors->left.end(), left[side].begin() + at * matrix);
      std::copy(factors->right.begin(), factors->right.end(), right[side].begin() + at * matrix);
      std::copy(factors->weights.begin(), factors->weights.end(), weights[side].begin() + at * d);
      std::copy(factors->weights.begin(), factors->weights.end(), table.begin() + item * d);
      // Variance of the coded side inside its pages, whose means are kept, times the other side's second moment; W_O's
      // slices of the group add up.
      std::vector<double> spread = ColumnEnergy(head.within[side], factors->right, d_);
      const std::vector<double> weight = ColumnEnergy(one, factors->left, d_);
      const int slices = side == 0 ? 1 : model_.query_heads / model_.kv_heads;
      for (size_t c = 0; c < d; ++c) spread[c] *= weight[c] * slices;
      int32_t* const first = &order[item * d];
      std::iota(first, first + d, 0);
      std::stable_sort(first, first + d, [&](int32_t a, int32_t b) { return spread[a] > spread[b]; });
      for (size_t c = 0; c < d; ++c) energy[item * d + c] = float(spread[first[c]]);
    });
    for (const absl::Status& error : errors) KV_RETURN_IF_ERROR(error);
    const uint64_t l = layers_, h = heads_;
    uint64_t bytes = 0;
    for (int side = 0; side < 2; ++side) {
      const std::string pair = side == 0 ? "qk." : "vw.";
      set_.AddFloats(ZackName("zack", mode, pair + "left"), {l, h, d, d}, left[side]);
      set_.AddFloats(ZackName("zack", mode, pair + "right"), {l, h, d, d}, right[side]);
      set_.AddFloats(ZackName("zack", mode, pair + "weights"), {l, h, d}, weights[side]);
      bytes += (2 * places * matrix + places * d) * sizeof(float);
      right_[int(mode)][side] = std::move(right[side]);
    }
    const RankTable ranks = MakeRankTable(table, d_, mode == ZackMode::kBalanced);
    set_.AddFloats(ZackName("zack", mode, "rates"), {ranks.rates.size()}, ranks.rates);
    set_.AddIntegers(ZackName("zack", mode, "ranks"), {ranks.rates.size(), l, h, 2}, ranks.ranks);
    bytes += (ranks.rates.size() + ranks.ranks.size()) * sizeof(float);
    if (stack) {
      set_.AddIntegers(ZackName("zack_hack", mode, "order"), {l, h, 2, d}, order);
      set_.AddFloats(ZackName("zack_hack", mode, "energy"), {l, h, 2, d}, energy);
      bytes += 2 * order.size() * sizeof(float);
      KV_RETURN_IF_ERROR(SetSensitivity(model_, mode, std::vector<float>(places * 2, 1.0f), &set_));
    }
    EndStage(absl::StrCat("zack ", Name(mode)), begun, bytes, 0);
    return absl::OkStatus();
  }

  /// Rows [rows][d] of fp16 as fp32, times `basis` [d][d] if there is one.
  std::vector<float> Load(absl::Span<const uint16_t> rows, const float* basis) const {
    std::vector<float> x(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) x[i] = HalfToFloat(rows[i]);
    if (basis == nullptr) return x;
    std::vector<float> rotated(x.size());
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, int(x.size() / d_), d_, d_, 1, x.data(), d_, basis, d_, 0,
                rotated.data(), d_);
    return rotated;
  }

  struct Error {
    double squared = 0, variance = 0;
  };

  /// Sub-vector `part` of x [rows][d]: centroids to `out` [2^bits][width].
  Error Codebook(absl::Span<const float> x, const PqShape& shape, int part, uint64_t place, float* out) const {
    const int width = d_ / shape.m, rows = int(x.size() / d_);
    std::vector<float> columns(size_t(width) * rows);
    Error error;
    for (int c = 0; c < width; ++c) {
      double sum = 0, squares = 0;
      for (int r = 0; r < rows; ++r) {
        const float value = x[size_t(r) * d_ + part * width + c];
        columns[size_t(c) * rows + r] = value;
        sum += value;
        squares += double(value) * value;
      }
      error.variance += squares / rows - sum / rows * (sum / rows);
    }
    KmeansOptions kmeans;
    kmeans.centroids = 1 << shape.bits;
    kmeans.iterations = options_.iterations;
    kmeans.seed = options_.seed + place * shape.m + part;
    const KmeansResult result = Kmeans(columns, width, rows, kmeans);
    std::copy(result.centroids.begin(), result.centroids.end(), out);
    error.squared = result.mean_squared_error;
    return error;
  }

  /// right: nullptr, or [layers][kv_heads][d][d], by which rows are multiplied first.
  void HeadCodebooks(const std::string& prefix, Side side, const PqShape& shape, const std::vector<float>* right) {
    const auto begun = std::chrono::steady_clock::now();
    const std::string name = CodebookName(prefix, side, shape);
    const size_t places = size_t(layers_) * heads_, part_elements = (size_t(d_) / shape.m) << shape.bits;
    std::vector<float> out(places * shape.m * part_elements);
    Mutex mutex;
    Error total;
    Stage(name, places, [&](size_t at) {
      const std::vector<float> x =
          Load(samples_.heads[at].rows[int(side)], right == nullptr ? nullptr : right->data() + at * d_ * d_);
      Error sum;
      for (int part = 0; part < shape.m; ++part) {
        const Error error = Codebook(x, shape, part, at, &out[(at * shape.m + part) * part_elements]);
        sum.squared += error.squared;
        sum.variance += error.variance;
      }
      MutexLock lock(mutex);
      total.squared += sum.squared;
      total.variance += sum.variance;
    });
    Store(name, side, shape, layers_, heads_, out, begun, total);
  }

  void ModelCodebook(Side side, const PqShape& shape) {
    const auto begun = std::chrono::steady_clock::now();
    const std::string name = CodebookName("million_model", side, shape);
    const size_t places = samples_.heads.size();
    // Rows of every head, evenly.
    const size_t per_head = std::clamp<size_t>(kModelRowsMax / places, 1, samples_.rows);
    std::vector<uint16_t> rows;
    for (size_t at = 0; at < places; ++at) {
      for (size_t i = 0; i < per_head; ++i) {
        const uint16_t* from = &samples_.heads[at].rows[int(side)][i * samples_.rows / per_head * d_];
        rows.insert(rows.end(), from, from + d_);
      }
    }
    const std::vector<float> x = Load(rows, nullptr);
    const size_t part_elements = (size_t(d_) / shape.m) << shape.bits;
    std::vector<float> out(shape.m * part_elements);
    std::vector<Error> errors(shape.m);
    Stage(name, shape.m,
          [&](size_t part) { errors[part] = Codebook(x, shape, int(part), 0, &out[part * part_elements]); });
    Error total;
    for (const Error& error : errors) {
      total.squared += error.squared;
      total.variance += error.variance;
    }
    Store(name, side, shape, 1, 1, out, begun, total);
  }

  void Store(const std::string& name, Side side, const PqShape& shape, uint64_t layers, uint64_t heads,
             const std::vector<float>& values, std::chrono::steady_clock::time_point begun, const Error& error) {
    set_.AddHalves(name, {layers, heads, uint64_t(shape.m), uint64_t{1} << shape.bits, uint64_t(d_ / shape.m)}, values);
    EndStage(name, begun, values.size() * sizeof(uint16_t), error.variance > 0 ? error.squared / error.variance : 0);
  }

  const Samples& samples_;
  const CalibrationModel& model_;
  const int layers_, heads_, d_;
  const TrainOptions options_;
  WorkerPool* const pool_;
  const TrainProgress progress_;
  TensorSet& set_;
  std::vector<TrainStage>& stages_;
  std::vector<float> right_[2][2];  // [mode][side]
};

}  // namespace

absl::Status CheckEnough(const CalibrationPlan& plan, uint64_t tokens, const SampleLimits& limits,
                         const CalibrationModel& model) {
  int bits = 0;
  for (Side side : kSides) {
    for (const auto* shapes :
         {&plan.million[int(side)], &plan.million_model[int(side)], &plan.zack_million[int(side)]}) {
      for (const PqShape& shape : *shapes) bits = std::max(bits, shape.bits);
    }
  }
  const uint64_t needed = bits == 0 ? uint64_t(model.head_dim) : uint64_t{TrainOptions::kRowsPerCentroidMin} << bits;
  const std::string why =
      bits == 0 ? "head_dim" : absl::StrCat(TrainOptions::kRowsPerCentroidMin, " for each of 2^", bits, " centroids");
  if (tokens < needed) {
    return InvalidField("tokens to calibrate on", tokens, absl::StrCat("at least ", needed, " (", why, ")"));
  }
  const uint64_t rows = RowsKept(model, tokens, limits);
  if (rows >= needed || bits == 0) return absl::OkStatus();
  return InvalidField("rows kept per head", rows,
                      absl::StrCat("at least ", needed, " (", why, "): the limit on samples is ", limits.bytes_max,
                                   " bytes for the whole model"));
}

absl::Status Train(const Samples& samples, const CalibrationPlan& plan, const TrainOptions& options, WorkerPool* pool,
                   TrainProgress progress, TensorSet* set, std::vector<TrainStage>* stages) {
  OneBlasThread();
  return Trainer(samples, options, pool, progress, set, stages).Run(plan);
}

absl::Status SetSensitivity(const CalibrationModel& model, ZackMode mode, absl::Span<const float> values,
                            TensorSet* set) {
  const uint64_t layers = model.layers, heads = model.kv_heads;
  if (values.size() != layers * heads * 2) {
    return InvalidField("sensitivities", values.size(), absl::StrCat(layers * heads * 2, " [layers][kv_heads][2]"));
  }
  for (float value : values) {
    if (!(value >= 0) || !std::isfinite(value)) return InvalidField("a sensitivity", value, "finite, not negative");
  }
  set->AddFloats(ZackName("zack_hack", mode, "sensitivity"), {layers, heads, 2}, values);
  return absl::OkStatus();
}

}  // namespace kvmanager::calibrate
