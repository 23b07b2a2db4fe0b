// Attention on encoded pages, white noise or a capture's, against plain attention in doubles on what decode_batch gives
// for them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/abi/conformance_capture.h"
#include "codecs/abi/conformance_checks.h"
#include "kvmanager/base/status.h"

namespace kvmanager::conformance {
namespace {

constexpr char kNoAttend[] = "no attend_batch: the core decodes each page for it";
// Relative error of outputs, all rows together, whose scores have these standard deviations. A single call may miss it
// by kOneCallFactor.
constexpr double kOneCallFactor = 2;
constexpr struct { double score_deviation, error_max; } kTolerances[] = {{0.1, 4e-3}, {1, 3e-2}, {4, 1e-1}};
constexpr double kAdversarialErrorMax = 1e-1;
constexpr double kLogSumErrorFactor = 10;  // of single rows, where an error of the query is all tokens' error

/// What decode_batch's rounding to the layout's type may do to an average of V, tokens of a norm: codes of few levels
/// are rounded alike, so it does not average out. Each value is off by a share of itself, and where fp16 is subnormal
/// by up to half of its step.
double Rounding(const PageLayout& layout, double v_norm) {
  if (layout.dtype == DType::kBFloat16) return 0x1p-9 * v_norm;
  return std::max(0x1p-12 * v_norm, std::min(0x1p-25 * std::sqrt(double(layout.head_dim)), v_norm));
}

/// Encoded pages and what they stand for.
struct Pages {
  std::vector<GuardedBuffer> encoded;
  std::vector<std::vector<double>> decoded;  // [side][head][token][channel]

  std::vector<const uint8_t*> pointers() const {
    std::vector<const uint8_t*> list;
    for (const GuardedBuffer& page : encoded) list.push_back(page.data());
    return list;
  }
};

/// Encodes and decodes page(0), page(1), .. Nothing if the codec declines one.
absl::StatusOr<Pages> MakePages(const Subject& subject, int layer, int count,
                                absl::FunctionRef<absl::StatusOr<GuardedBuffer>(int i)> page) {
  const PageLayout& layout = subject.layout();
  Pages pages;
  for (int i = 0; i < count; ++i) {
    GuardedBuffer encoded("encoded page", subject.bytes(layer));
    bool declined = false;
    KV_ASSIGN_OR_RETURN(const GuardedBuffer given, page(i));
    KV_RETURN_IF_ERROR(subject.Encode(given, layer, uint64_t(i) * layout.page_tokens, encoded, &declined));
    if (declined) return Pages();
    encoded.SetReadOnly(true);
    const GuardedBuffer raw("decoded page", layout.raw_bytes());
    KV_RETURN_IF_ERROR(subject.Decode(encoded, layer, 0, layout.kv_heads, raw));
    pages.decoded.push_back(Values(layout, raw.data(), layout.raw_bytes() / DTypeBytes(layout.dtype)));
    pages.encoded.push_back(std::move(encoded));
  }
  return pages;
}

absl::StatusOr<Pages> MakePages(const Subject& subject, Kind kind, int layer, int count) {
  return MakePages(subject, layer, count,
                   [&](int i) -> absl::StatusOr<GuardedBuffer> { return subject.Page(kind, 100 + i); });
}

/// Pages that no codec may decline: of the capture, or white noise.
absl::StatusOr<Pages> UsualPages(const Case& c, const Subject& subject, int layer, int count) {
  const auto draw = [&](int i) -> absl::StatusOr<GuardedBuffer> {
    if (c.capture == nullptr) return subject.Page(Kind::kNormal, 100 + i);
    GuardedBuffer raw("raw page", c.layout.raw_bytes());
    KV_RETURN_IF_ERROR(DrawPage(*c.capture, c.layout, layer, layer * 1000 + i, raw.data()));
    raw.SetReadOnly(true);
    return raw;
  };
  KV_ASSIGN_OR_RETURN(Pages pages, MakePages(subject, layer, count, draw));
  if (!pages.encoded.empty()) return pages;
  return absl::InternalError(
      absl::StrCat("it declined a page of ", c.capture == nullptr ? "normal values" : "the capture"));
}

struct Exact {
  std::vector<double> out, log_sum;
  double v_norm = 0;  // of a token's V, root mean square
};

/// Products of one query, [head_dim], and the keys of all pages.
std::vector<double> Products(const PageLayout& layout, const Pages& pages, int head, const float* q) {
  const size_t d = layout.head_dim, tokens = layout.page_tokens;
  std::vector<double> products;
  for (const std::vector<double>& page : pages.decoded) {
    const double* k = &page[head * tokens * d];
    for (size_t t = 0; t < tokens; ++t, k += d) products.push_back(std::inner_product(q, q + d, k, 0.0));
  }
  return products;
}

Exact ExactAttention(const PageLayout& layout, const Pages& pages, int head, const AttendQueries& queries) {
  const int d = layout.head_dim, tokens = layout.page_tokens, rows = int(queries.q.size() / d);
  const size_t side = size_t{layout.kv_heads} * tokens * d, at = size_t(head) * tokens * d;
  Exact result;
  result.out.assign(size_t(rows) * d, 0);
  for (int r = 0; r < rows; ++r) {
    std::vector<double> scores = Products(layout, pages, head, &queries.q[size_t(r) * d]);
    for (double& score : scores) score *= queries.scale;
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    double* out = &result.out[size_t(r) * d];
    for (size_t i = 0; i < scores.size(); ++i) {
      const double p = std::exp(scores[i] - max);
      const double* v = &pages.decoded[i / tokens][side + at + (i % tokens) * d];
      sum += p;
      for (int c = 0; c < d; ++c) out[c] += p * v[c];
    }
    for (int c = 0; c < d; ++c) out[c] /= sum;
    result.log_sum.push_back(max + std::log(sum));
  }
  double squares = 0;
  for (const std::vector<double>& page : pages.decoded) {
    for (size_t i = 0; i < size_t(tokens) * d; ++i) squares += page[side + at + i] * page[side + at + i];
  }
  result.v_norm = std::sqrt(squares / (double(tokens) * pages.decoded.size()));
  return result;
}

/// White noise, whose scores with white keys have a standard deviation.
AttendQueries WhiteQueries(const PageLayout& layout, int rows, double deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  AttendQueries queries;
  queries.q.resize(size_t(rows) * layout.head_dim);
  for (float& x : queries.q) x = float(deviation) * normal(random);
  queries.scale = PlainScale(layout);
  return queries;
}

/// Queries for UsualPages. The capture's keep their sizes; their scale gives all rows' scores together the deviation,
/// each row's taken about its mean, which a softmax does not see.
absl::StatusOr<AttendQueries> UsualQueries(const Case& c, const Pages& pages, int layer, int head, int rows,
                                           double deviation, uint32_t seed) {
  if (c.capture == nullptr) return WhiteQueries(c.layout, rows, deviation, seed);
  AttendQueries queries;
  KV_ASSIGN_OR_RETURN(queries.q, DrawQueries(*c.capture, layer, head, rows, seed));
  double squares = 0;
  size_t count = 0;
  for (int r = 0; r < rows; ++r) {
    const std::vector<double> products = Products(c.layout, pages, head, &queries.q[size_t(r) * c.layout.head_dim]);
    const double mean = std::accumulate(products.begin(), products.end(), 0.0) / double(products.size());
    for (const double x : products) squares += (x - mean) * (x - mean);
    count += products.size();
  }
  const double found = std::sqrt(squares / double(count));
  queries.scale = found > 1e-20 ? float(deviation / found) : PlainScale(c.layout);
  return queries;
}

double Norm(const std::vector<double>& x) {
  double squares = 0;
  for (double v : x) squares += v * v;
  return std::sqrt(squares);
}

double Distance(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return Norm(a);
}

struct Errors {
  double error = 0, norm = 0;  // of the outputs
  double rounding = 0;         // of `error`, what decode_batch may be to blame for
  double out = 0;              // relative, without that
  double log_sum = 0;          // absolute, the largest
};

/// Errors of attention by `subject`. The output's norm counts as at least `floor` of V's.
absl::StatusOr<Errors> Compare(const Subject& subject, const Pages& pages, int layer, int head,
                               const AttendQueries& queries, double floor) {
  const int rows = int(queries.q.size() / subject.layout().head_dim);
  const Exact exact = ExactAttention(subject.layout(), pages, head, queries);
  KV_ASSIGN_OR_RETURN(const AttendResult state, subject.Attend(pages.pointers(), layer, head, queries));
  KV_ASSIGN_OR_RETURN(const std::vector<double> out, subject.Output(state, layer, head));
  Errors errors;
  const double rows_root = std::sqrt(double(rows)), v_norm = exact.v_norm * rows_root;
  errors.error = Distance(out, exact.out);
  errors.norm = std::max({Norm(exact.out), floor * v_norm, 1e-30});
  errors.rounding = Rounding(subject.layout(), exact.v_norm) * rows_root;
  errors.out = std::isnan(errors.error) ? errors.error : std::max(errors.error - errors.rounding, 0.0) / errors.norm;
  for (int r = 0; r < rows; ++r) {
    const double error = std::abs(state.max[r] + std::log(double(state.sum[r])) - exact.log_sum[r]);
    errors.log_sum = error > errors.log_sum || std::isnan(error) ? error : errors.log_sum;
  }
  if (std::isnan(errors.out) || std::isnan(errors.log_sum)) {
    return absl::InternalError(absl::StrCat("NaN, in layer ", layer, " head ", head, " with ", rows, " rows"));
  }
  return errors;
}

/// Where a trained codec is tried on what it was not trained to.
const char* NoiseNote(const Case& c) {
  if (c.calibration.empty() || c.capture != nullptr) return "";
  return " (on white noise, which does not suit every codec that was trained to a model's K and V: try it on such, "
         "with --capture FILE)";
}

absl::StatusOr<std::string> AttendIsExactOnWhatDecodeGives(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  if (!subject->attends()) return kNoAttend;
  std::string note = "relative errors beyond the rounding of decode:";
  for (const auto& [deviation, error_max] : kTolerances) {
    double squares = 0, norm_squares = 0;
    for (const int layer : subject->layers()) {
      KV_ASSIGN_OR_RETURN(const Pages pages, UsualPages(c, *subject, layer, 3));
      for (int head = 0; head < c.layout.kv_heads; head += std::max(1, c.layout.kv_heads - 1)) {
        for (const int rows : {1, 3, 4, 7, 8, 16, 64}) {
          KV_ASSIGN_OR_RETURN(const AttendQueries queries, UsualQueries(c, pages, layer, head, rows, deviation, rows));
          KV_ASSIGN_OR_RETURN(const Errors errors, Compare(*subject, pages, layer, head, queries, 0));
          if (errors.out > kOneCallFactor * error_max || errors.log_sum > kLogSumErrorFactor * error_max) {
            return absl::InternalError(absl::StrFormat(
                "scores of deviation %g, layer %d, head %d, %d rows: relative error %.3g, must be at most %g; error of "
                "log-sum-exp %.3g, must be at most %g%s",
                deviation, layer, head, rows, errors.out, kOneCallFactor * error_max, errors.log_sum,
                kLogSumErrorFactor * error_max, NoiseNote(c)));
          }
          squares += errors.out * errors.out * errors.norm * errors.norm;
          norm_squares += errors.norm * errors.norm;
        }
      }
    }
    const double error = std::sqrt(squares / norm_squares);
    if (error > error_max) {
      return absl::InternalError(absl::StrFormat("scores of deviation %g: relative error %.3g, must be at most %g%s",
                                                 deviation, error, error_max, NoiseNote(c)));
    }
    absl::StrAppend(&note, absl::StrFormat(" %.2g (scores of deviation %g)", error, deviation));
  }
  return note;
}

absl::StatusOr<std::string> AttendHoldsOnAdversarialData(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  if (!subject->attends()) return kNoAttend;
  const int d = c.layout.head_dim, layer = subject->layers().back(), rows = std::min(subject->group(), 16);
  std::string declined;
  for (const Kind kind : kKinds) {
    KV_ASSIGN_OR_RETURN(const Pages pages, MakePages(*subject, kind, layer, 2));
    if (pages.encoded.empty()) {
      absl::StrAppend(&declined, declined.empty() ? "declined: " : ", ", KindName(kind));
      continue;
    }
    for (const char* const query : {"zero", "normal", "one-hot"}) {
      AttendQueries queries = WhiteQueries(c.layout, rows, query == absl::string_view("zero") ? 0 : 1, 9);
      if (query == absl::string_view("one-hot")) {
        // Along one key, so far that the softmax sees little but that token; its score is at most 40, which an 8-bit
        // query's error does not make another token's.
        double squares = 1e-30;
        const double* k = pages.decoded[1].data() + size_t(c.layout.page_tokens / 2) * d;
        for (int i = 0; i < d; ++i) squares += k[i] * k[i];
        const double norm = 40 * std::min(1.0, std::sqrt(d / squares));
        for (size_t i = 0; i < queries.q.size(); ++i) queries.q[i] = float(k[i % d] / std::sqrt(squares) * norm);
      }
      const bool extreme = kind == Kind::kHuge || kind == Kind::kAlternating;
      // Where scores are in the thousands, an 8-bit query's error alone decides which token wins.
      if (extreme && query != absl::string_view("zero")) {
        KV_ASSIGN_OR_RETURN(const AttendResult state, subject->Attend(pages.pointers(), layer, 0, queries));
        for (const float sum : state.sum) {
          if (!std::isfinite(sum)) {
            return absl::InternalError(absl::StrCat(KindName(kind), ", ", query, " query: the sum is not finite"));
          }
        }
        continue;
      }
      KV_ASSIGN_OR_RETURN(const Errors errors, Compare(*subject, pages, layer, 0, queries, 0.2));
      if (errors.out > kAdversarialErrorMax) {
        return absl::InternalError(absl::StrFormat("%s, %s query: relative error %.3g, must be at most %g",
                                                   KindName(kind), query, errors.out, kAdversarialErrorMax));
      }
    }
  }
  return declined;
}

absl::StatusOr<std::string> AttendSplitsAnywhere(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  if (!subject->attends()) return kNoAttend;
  const int layer = subject->layers().back(), head = c.layout.kv_heads - 1, rows = std::min(subject->group(), 64);
  KV_ASSIGN_OR_RETURN(const Pages pages, UsualPages(c, *subject, layer, 5));
  KV_ASSIGN_OR_RETURN(const AttendQueries queries, UsualQueries(c, pages, layer, head, rows, 1, 5));
  const std::vector<const uint8_t*> all = pages.pointers();
  KV_ASSIGN_OR_RETURN(const AttendResult once, subject->Attend(all, layer, head, queries));
  KV_ASSIGN_OR_RETURN(const std::vector<double> expected, subject->Output(once, layer, head));
  double worst = 0;
  for (size_t cut = 1; cut < all.size(); ++cut) {
    KV_ASSIGN_OR_RETURN(const AttendResult first,
                        subject->Attend({all.begin(), all.begin() + cut}, layer, head, queries));
    KV_ASSIGN_OR_RETURN(const AttendResult both,
                        subject->Attend({all.begin() + cut, all.end()}, layer, head, queries, &first));
    KV_ASSIGN_OR_RETURN(const std::vector<double> out, subject->Output(both, layer, head));
    const double error = Distance(out, expected) / Norm(expected);
    worst = std::max(worst, error);
    if (!(error <= 1e-3)) {
      return absl::InternalError(absl::StrFormat(
          "5 pages in one call, and cut after %d: they differ by %.3g, must be at most 1e-3", int(cut), error));
    }
  }
  return absl::StrFormat("largest difference %.2g", worst);
}

absl::StatusOr<std::string> FoldedOutputsAreTheExpandedOnes(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const size_t d = c.layout.head_dim;
  bool any = false;
  for (const int layer : subject->layers()) {
    if (!subject->attends() || !subject->maps(layer)) continue;
    if ((subject->described().layer_flags[layer] & KVMC_FOLDS) == 0) continue;
    any = true;
    for (int head = 0; head < c.layout.kv_heads; ++head) {
      GuardedBuffer factor("output factor", d * d * sizeof(float));
      const kvmc_status s = subject->api().output_factor(subject->codec(), layer, head, factor.floats());
      if (s != KVMC_OK) return subject->ErrorOf(s, "output_factor");
      // A vector in the codec's space: what projecting a random one gives.
      KV_ASSIGN_OR_RETURN(const std::vector<float> inside,
                          subject->Map(subject->api().project_output, layer, head, WhiteQueries(c.layout, 1, 1, 3).q));
      KV_ASSIGN_OR_RETURN(const std::vector<float> expanded,
                          subject->Map(subject->api().expand_output, layer, head, inside));
      std::vector<double> by_factor(d, 0);
      for (size_t i = 0; i < d; ++i) {
        for (size_t j = 0; j < d; ++j) by_factor[i] += double(factor.floats()[i * d + j]) * inside[j];
      }
      const std::vector<double> by_map(expanded.begin(), expanded.end());
      if (const double error = Distance(by_map, by_factor) / (Norm(by_factor) + 1e-30); !(error <= 1e-4)) {
        return absl::InternalError(
            absl::StrFormat("layer %d head %d: output_factor and expand_output differ by %.3g, must be at most 1e-4",
                            layer, head, error));
      }
    }
  }
  return any ? "" : "no layer folds its outputs";
}

}  // namespace

std::vector<Check> AttendChecks() {
  return {{"attend: exact attention on what decode gives", AttendIsExactOnWhatDecodeGives},
          {"attend: adversarial keys and queries", AttendHoldsOnAdversarialData},
          {"attend: pages in several calls are pages in one", AttendSplitsAnywhere},
          {"attend: folded outputs are the expanded ones", FoldedOutputsAreTheExpandedOnes}};
}

}  // namespace kvmanager::conformance
