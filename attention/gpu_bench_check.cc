#include "attention/gpu_bench_check.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack_device_format.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

constexpr int kPairsMax = 64;  // sequences and KV heads of a shape that are compared
constexpr int kQueriesMax = 256;
constexpr double kLseBound = 1e-3;

struct ScoreClass {
  double deviation;    // of the scores
  double exact_bound;  // of encoded pages against exact attention on what they decode to
};
constexpr ScoreClass kScores[] = {{0.1, 4e-3}, {1, 3e-2}, {4, 1e-1}};

/// Against the same arithmetic. The result's own rounding is 2^-12 of it on average in fp16, 2^-9 in bf16.
double SameBound(bool bfloat16) { return bfloat16 ? 4e-3 : 1e-3; }

/// The worst of a class of shapes under one bound.
struct Worst {
  double bound = 0;
  double relative = 0;  // L2 of a shape's rows together
  double of_query = 0;  // of the heads of one query and KV head
  std::string where;    // of `relative`
  int shapes = 0;
};

struct Distance {
  double error = 0, norm = 0;
  void Add(double got, double wanted) { error += (got - wanted) * (got - wanted), norm += wanted * wanted; }
  void Add(const Distance& d) { error += d.error, norm += d.norm; }
  double relative() const {
    const double x = std::sqrt(error / norm);
    return std::isfinite(x) ? x : std::numeric_limits<double>::infinity();
  }
};

/// The rows that are compared: always those of the first and last sequence and of the longest.
std::vector<OracleQuery> Sample(const BenchBatch& batch) {
  const BenchShape& shape = batch.shape();
  const std::vector<int> contexts = shape.contexts();
  const int sequences = int(contexts.size());
  const int longest = int(std::max_element(contexts.begin(), contexts.end()) - contexts.begin());
  std::vector<std::pair<int, int>> pairs = {{0, 0}, {sequences - 1, shape.kv_heads - 1}, {longest, shape.kv_heads / 2}};
  const int wanted = std::min({kPairsMax, kQueriesMax / shape.tokens, sequences * shape.kv_heads});
  std::mt19937 random(6);
  while (int(pairs.size()) < wanted) pairs.push_back({int(random() % sequences), int(random() % shape.kv_heads)});
  if (sequences * shape.kv_heads <= wanted) {
    pairs.clear();
    for (int i = 0; i < sequences * shape.kv_heads; ++i) pairs.push_back({i / shape.kv_heads, i % shape.kv_heads});
  }
  std::vector<OracleQuery> queries;
  for (const auto& [sequence, head] : pairs) {
    for (int token = 0; token < shape.tokens; ++token) {
      OracleQuery q;
      q.position = batch.first_position(sequence) + token;
      q.first_page = batch.first_page(sequence);
      q.token = uint32_t(sequence * shape.tokens + token);
      q.kv_head = uint32_t(head);
      queries.push_back(q);
    }
  }
  return queries;
}

class Checker {
 public:
  Checker(absl::Span<uint8_t> pool, int multiprocessors, Spoil spoil)
      : pool_(pool), multiprocessors_(multiprocessors), spoil_(spoil) {}

  void Check(const std::string& kind, const BenchCodec& codec, const BenchShape& shape) {
    const auto batch = BenchBatch::Make(codec, shape, BenchBatch::Contents::kEncoded, pool_, multiprocessors_);
    if (batch == nullptr) return;
    const std::vector<OracleQuery> queries = Sample(*batch);
    const std::vector<OraclePage> page_list(batch->pages().begin(), batch->pages().end());
    const DeviceArray<OraclePage> pages = Upload(page_list);
    const DeviceArray<OracleQuery> device_queries = Upload(queries);
    DeviceArray<hack::HackDeviceHead> heads;
    if (batch->format() != nullptr) heads = Upload(hack::MakeHackDeviceFormat(*batch->format()).heads);
    OracleInput in;
    in.pool = pool_.data();
    in.pages = pages.get();
    in.queries = device_queries.get();
    in.query_count = uint32_t(queries.size());
    for (const OracleQuery& q : queries) in.position_max = std::max(in.position_max, q.position);
    in.q = batch->params().q;
    in.query_heads = shape.query_heads;
    in.kv_heads = shape.kv_heads;
    in.head_dim = shape.head_dim;
    in.lag_pages = BenchBatch::kLagPages + (spoil_ == Spoil::kLag ? 1 : 0);
    in.bfloat16 = shape.bfloat16;
    in.heads = heads.get();
    in.pairs = batch->pairs();
    in.zack = batch->zack();
    in.spoil_codes = spoil_ == Spoil::kCodes;
    const int group = shape.query_heads / shape.kv_heads;
    const size_t fields = queries.size() * group * OracleFields(shape.head_dim);
    const DeviceArray<double> scratch = Allocate<double>(OracleScratch(in)), result = Allocate<double>(fields);
    const auto oracle = [&] {
      CHECK_CUDA(RunOracle(in, scratch.get(), result.get(), nullptr));
      return Download(result.get(), fields);
    };
    // Scores are as large as queries make them: what queries of deviation 1 give is measured once for a codec.
    double& unit = score_of_unit_[absl::StrCat(codec.name, " ", shape.head_dim, shape.bfloat16)];
    if (unit == 0) unit = ScoreDeviation(oracle(), shape);
    for (const ScoreClass& scores : kScores) {
      batch->FillQueries(float(scores.deviation / unit));
      // Twice: the second finds what the first left behind.
      for (int i = 0; i < 2; ++i) CHECK_CUDA(batch->Launch(0, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
      Compare(kind, codec, *batch, queries, scores, oracle());
    }
  }

  /// The number of broken bounds.
  int Report() const {
    int broken = 0;
    std::printf("scores' standard deviations, wanted and least and most measured:");
    for (const auto& [wanted, measured] : measured_) {
      std::printf("  %g: %.3f %.3f", wanted, measured.first, measured.second);
    }
    std::printf("\n%-52s %6s %9s %9s %9s  %s\n", "class", "shapes", "worst", "bound", "of query", "worst at");
    for (const auto& [name, worst] : worst_) {
      const bool holds = worst.relative <= worst.bound;
      broken += holds ? 0 : 1;
      std::printf("%-52s %6d %9.2e %9.0e %9.2e  %s%s\n", name.c_str(), worst.shapes, worst.relative, worst.bound,
                  worst.of_query, worst.where.c_str(), holds ? "" : "  BROKEN");
    }
    return broken;
  }

 private:
  static double ScoreDeviation(const std::vector<double>& result, const BenchShape& shape) {
    const size_t fields = OracleFields(shape.head_dim);
    const size_t rows = result.size() / fields;
    double variance = 0;
    for (size_t row = 0; row < rows; ++row) {
      const double* const of = result.data() + row * fields + OracleScoresAt(shape.head_dim);
      const double mean = of[1] / of[0];
      variance += of[2] / of[0] - mean * mean;
    }
    return std::sqrt(variance / double(rows));
  }

  void Note(const std::string& name, double bound, const Distance& all, double of_query, const std::string& where) {
    Worst& worst = worst_[name];
    worst.bound = bound;
    ++worst.shapes;
    worst.of_query = std::max(worst.of_query, of_query);
    if (all.relative() >= worst.relative) worst.relative = all.relative(), worst.where = where;
  }

  void Compare(const std::string& kind, const BenchCodec& codec, const BenchBatch& batch,
               const std::vector<OracleQuery>& queries, const ScoreClass& scores, const std::vector<double>& wanted) {
    const BenchShape& shape = batch.shape();
    const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
    const size_t rows = shape.contexts().size() * shape.tokens * shape.query_heads;
    const DType dtype = shape.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    const std::vector<uint16_t> out = Download(static_cast<const uint16_t*>(batch.params().out), rows * d);
    const std::vector<float> lse = Download(batch.params().lse, rows);
    Distance all[2];
    double of_query[2] = {0, 0}, lse_error = 0;
    for (size_t i = 0; i < queries.size(); ++i) {
      Distance mine[2];
      for (int r = 0; r < group; ++r) {
        const double* const row = wanted.data() + (i * group + r) * OracleFields(d);
        const size_t at = size_t(queries[i].token) * shape.query_heads + queries[i].kv_head * group + r;
        for (int c = 0; c < d; ++c) {
          const double got = LoadElement(out.data(), dtype, at * d + c);
          mine[0].Add(got, row[OracleSameAt(d) + c]);
          mine[1].Add(got, row[OracleExactAt(d) + c]);
        }
        const double lse_wanted = row[OracleSameAt(d) + d];
        const double off = std::abs(lse[at] - lse_wanted) / (1 + std::abs(lse_wanted));
        lse_error = std::isfinite(off) ? std::max(lse_error, off) : std::numeric_limits<double>::infinity();
      }
      for (int a = 0; a < 2; ++a) {
        all[a].Add(mine[a]);
        of_query[a] = std::max(of_query[a], mine[a].relative());
      }
    }
    const std::string where = absl::StrCat(shape.batch, " x ", shape.context, ", ", shape.query_heads, "/",
                                           shape.kv_heads, ", queries ", shape.tokens);
    const std::string name = absl::StrCat(kind, "; ", codec.name, "; scores ", scores.deviation, "; ");
    Note(name + (batch.encodes() ? "same" : "exact"), SameBound(shape.bfloat16), all[0], of_query[0], where);
    if (batch.encodes()) Note(name + "exact", scores.exact_bound, all[1], of_query[1], where);
    Note(kind + "; logarithms of sums", kLseBound, {lse_error * lse_error, 1}, lse_error, where);
    const double deviation = ScoreDeviation(wanted, shape);
    auto& measured = measured_.try_emplace(scores.deviation, deviation, deviation).first->second;
    measured = {std::min(measured.first, deviation), std::max(measured.second, deviation)};
  }

  const absl::Span<uint8_t> pool_;
  const int multiprocessors_;
  const Spoil spoil_;
  std::map<std::string, double> score_of_unit_;
  std::map<std::string, Worst> worst_;
  std::map<double, std::pair<double, double>> measured_;
};

}  // namespace

int CheckAttention(absl::Span<const BenchShape> grid, absl::Span<const BenchCodec> codecs, absl::Span<uint8_t> pool,
                   int multiprocessors, Spoil spoil) {
  constexpr BenchCodec kOther[] = {{"hack:k_bits=2,v_bits=1", 2, 1}, {"hack:k_bits=4,v_bits=4", 4, 4}};
  Checker checker(pool, multiprocessors, spoil);
  for (const BenchCodec& codec : codecs) {
    for (const BenchShape& shape : grid) checker.Check("grid", codec, shape);
  }
  std::vector<BenchCodec> all(codecs.begin(), codecs.end());
  all.insert(all.end(), std::begin(kOther), std::end(kOther));
  for (const BenchCodec& codec : all) {
    for (const auto& [batch, context] : {std::pair{1, 32768}, {8, 4096}, {32, 16384}}) {
      const BenchShape plain = {batch, context, 32, 8};
      BenchShape bfloat16 = plain, narrow = plain;
      bfloat16.bfloat16 = true;
      narrow.head_dim = 64;
      if (codec.k_bits != 0 || codec.million || codec.zack) checker.Check("some", codec, plain);
      checker.Check("bfloat16", codec, bfloat16);
      checker.Check("head_dim 64", codec, narrow);
    }
    for (const int tokens : {2, 3, 5, 8, 13, 16}) {
      for (const auto& [query_heads, kv_heads] : {std::pair{32, 8}, {64, 8}, {32, 32}}) {
        BenchShape several = {8, tokens % 2 == 0 ? 4096 : 16384, query_heads, kv_heads};
        several.tokens = tokens;
        checker.Check("queries 2..16", codec, several);
      }
    }
  }
  return checker.Report();
}

}  // namespace kvmanager
