#include "codecs/calibrate/synthetic.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "codecs/calibrate/plan.h"
#include "codecs/calibrate/random.h"
#include "codecs/calibrate/rank_table.h"
#include "codecs/calibrate/tensor_set.h"

namespace kvmanager {
namespace {

using namespace calibrate;

/// d x d, columns orthonormal: Gram-Schmidt over random rows, twice for the rounding.
std::vector<float> RandomRotation(int d, Random& random) {
  std::vector<double> rows(size_t(d) * d);
  for (int r = 0; r < d; ++r) {
    double* row = &rows[size_t(r) * d];
    for (int c = 0; c < d; ++c) row[c] = random.Normal();
    for (int pass = 0; pass < 2; ++pass) {
      for (int before = 0; before < r; ++before) {
        const double* other = &rows[size_t(before) * d];
        const double dot = std::inner_product(row, row + d, other, 0.0);
        for (int c = 0; c < d; ++c) row[c] -= dot * other[c];
      }
      const double norm = std::sqrt(std::inner_product(row, row + d, row, 0.0));
      for (int c = 0; c < d; ++c) row[c] /= norm;
    }
  }
  return std::vector<float>(rows.begin(), rows.end());
}

void AddZack(const CalibrationModel& model, Random& random, TensorSet& set) {
  const uint64_t layers = model.layers, heads = model.kv_heads, d = model.head_dim;
  const size_t matrix = size_t(d) * d, places = layers * heads;
  for (ZackMode mode : kZackModes) {
    const bool balanced = mode == ZackMode::kBalanced;
    std::vector<float> table_weights(places * 2 * d), energy(places * 2 * d);
    std::vector<int32_t> order(places * 2 * d);
    for (int side = 0; side < 2; ++side) {
      std::vector<float> left, right, weights;
      for (size_t at = 0; at < places; ++at) {
        const std::vector<float> rotation = RandomRotation(int(d), random);
        // Heads differ in how fast their weights fall.
        const double reach = double(d) * (0.08 + 0.3 * random.Uniform());
        std::vector<float> own(d), scale(d), importance(d);
        for (size_t c = 0; c < d; ++c) own[c] = float(10 * std::exp(-double(c) / reach) + 1e-3);
        for (size_t c = 0; c < d; ++c) scale[c] = balanced ? float(std::exp(0.5 * random.Normal())) : 1.0f;
        for (size_t c = 0; c < d; ++c) importance[c] = own[c] * own[c] * float(std::exp(0.3 * random.Normal()));
        for (size_t i = 0; i < matrix; ++i) {
          left.push_back(rotation[i] * scale[i % d]);
          right.push_back(rotation[i] / scale[i % d]);
        }
        weights.insert(weights.end(), own.begin(), own.end());
        std::copy(own.begin(), own.end(), &table_weights[(at * 2 + side) * d]);
        int32_t* const first = &order[(at * 2 + side) * d];
        std::iota(first, first + d, 0);
        std::stable_sort(first, first + d, [&](int32_t a, int32_t b) { return importance[a] > importance[b]; });
        for (size_t c = 0; c < d; ++c) energy[(at * 2 + side) * d + c] = importance[first[c]];
      }
      const std::string pair = side == 0 ? "qk." : "vw.";
      set.AddFloats(ZackName("zack", mode, pair + "left"), {layers, heads, d, d}, left);
      set.AddFloats(ZackName("zack", mode, pair + "right"), {layers, heads, d, d}, right);
      set.AddFloats(ZackName("zack", mode, pair + "weights"), {layers, heads, d}, weights);
    }
    const RankTable table = MakeRankTable(table_weights, int(d), balanced);
    set.AddFloats(ZackName("zack", mode, "rates"), {table.rates.size()}, table.rates);
    set.AddIntegers(ZackName("zack", mode, "ranks"), {table.rates.size(), layers, heads, 2}, table.ranks);
    set.AddIntegers(ZackName("zack_hack", mode, "order"), {layers, heads, 2, d}, order);
    set.AddFloats(ZackName("zack_hack", mode, "energy"), {layers, heads, 2, d}, energy);
    set.AddFloats(ZackName("zack_hack", mode, "sensitivity"), {layers, heads, 2}, std::vector<float>(places * 2, 1.0f));
  }
}

void AddCodebooks(const CalibrationModel& model, const std::string& prefix, const std::set<PqShape> (&shapes)[2],
                  bool whole_model, Random& random, TensorSet& set) {
  for (Side side : kSides) {
    for (const PqShape& shape : shapes[int(side)]) {
      const uint64_t layers = whole_model ? 1 : model.layers, heads = whole_model ? 1 : model.kv_heads;
      std::vector<float> values((layers * heads * model.head_dim) << shape.bits);
      for (float& value : values) value = random.Normal();
      set.AddHalves(CodebookName(prefix, side, shape),
                    {layers, heads, uint64_t(shape.m), uint64_t{1} << shape.bits, uint64_t(model.head_dim / shape.m)},
                    values);
    }
  }
}

}  // namespace

std::shared_ptr<const Calibration> SyntheticCalibration(const CalibrationModel& model, uint32_t seed,
                                                        std::vector<std::string> codec_specs) {
  codec_specs.push_back("zack+hack");
  absl::StatusOr<CalibrationPlan> plan = CalibrationPlan::Make(codec_specs, model.head_dim);
  KV_CHECK(plan.ok());
  Random random(seed);
  TensorSet set;
  AddZack(model, random, set);
  AddCodebooks(model, "million", plan->million, false, random, set);
  AddCodebooks(model, "million_model", plan->million_model, true, random, set);
  for (ZackMode mode : kZackModes) {
    AddCodebooks(model, absl::StrCat("zack_million.", Name(mode)), plan->zack_million, false, random, set);
  }
  // Sensitivities of 1 are as good as any here.
  const TensorMetadata metadata = {{"zack.mode", "balanced"},
                                   {"zack_hack.mode", "balanced"},
                                   {"zack_hack.allocation", "head"},
                                   {"zack_hack.sensitivity", "measured"}};
  absl::StatusOr<std::shared_ptr<const Calibration>> calibration =
      Calibration::Parse(SerializeCalibration(model, set.tensors(), metadata), "synthetic");
  KV_CHECK(calibration.ok());
  return *std::move(calibration);
}

}  // namespace kvmanager
