#include "examples/engine/tuning.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

/// Bytes per token and head at which the calibrated transform coder is tried.
constexpr int kZackHackBytes[] = {20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 72, 88};
constexpr const char* kHackBits[] = {"k_bits=2,v_bits=1", "k_bits=3,v_bits=1", "k_bits=2,v_bits=2",
                                     "k_bits=3,v_bits=2", "k_bits=4,v_bits=2", "k_bits=4,v_bits=3"};
constexpr const char* kZackRates[] = {"0.15", "0.25", "0.35"};
/// How much finer, in bytes per token and head, an outer layer is made.
constexpr int kFinerBytes[] = {16, 32};
/// Points of the frontier whose ends are refined.
constexpr int kRefinedMax = 2;

std::string FamilyOf(const std::string& codec) {
  const std::string family = codec.substr(0, codec.find_first_of(":;"));
  return codec.find(';') == std::string::npos ? family : family + ", by layer";
}

}  // namespace

absl::StatusOr<double> ParseLoss(absl::string_view text) {
  absl::string_view number = text;
  const bool percent = absl::ConsumeSuffix(&number, "%");
  double value;
  if (!absl::SimpleAtod(number, &value) || !std::isfinite(value) || value < 0 || value / (percent ? 100 : 1) > 1) {
    return InvalidField("--max-loss", text, "a share of 0..1, or 0%..100%, such as 0.5%");
  }
  return percent ? value / 100 : value;
}

std::vector<std::string> TuneGrid(const TuneOptions& options) {
  std::vector<std::string> grid;
  for (const char* bits : kHackBits) grid.push_back(absl::StrCat("hack:", bits));
  if (!options.calibration.empty()) {
    const std::string calibration = absl::StrCat(",calibration=", options.calibration);
    if (options.has_zack_hack) {
      for (const int bytes : kZackHackBytes) {
        for (const char* allocation : {"head", "model"}) {
          grid.push_back(absl::StrCat("zack+hack:bytes=", bytes, ",allocation=", allocation, calibration));
        }
      }
    }
    for (const std::string& shape : options.million) grid.push_back(absl::StrCat("million:", shape, calibration));
    if (options.has_zack) {
      for (const char* rate : kZackRates) grid.push_back(absl::StrCat("zack:rate=", rate, calibration));
    }
  }
  grid.insert(grid.end(), options.more_codecs.begin(), options.more_codecs.end());
  return grid;
}

std::vector<std::string> FinerEnds(const RatePoint& point, const TuneOptions& options,
                                   const std::function<absl::Status(const std::string&)>& check) {
  constexpr absl::string_view kPrefix = "zack+hack:bytes=";
  std::vector<std::string> policies;
  absl::string_view rest = point.codec;
  if (options.layers < 4 || point.codec.find(';') != std::string::npos || !absl::ConsumePrefix(&rest, kPrefix)) {
    return policies;
  }
  const size_t comma = rest.find(',');
  int bytes;
  if (comma == absl::string_view::npos || !absl::SimpleAtoi(rest.substr(0, comma), &bytes)) return policies;
  const std::string tail(rest.substr(comma));
  const int last = options.layers - 1;
  const std::pair<std::string, int> ends[] = {
      {"0..0", 1}, {absl::StrCat(last, "..", last), 1}, {absl::StrCat("0..0,", last, "..", last), 2}};
  for (const int finer : kFinerBytes) {
    for (const auto& [range, layers] : ends) {
      // As many bytes over all layers as the point has.
      const int others = int(std::lround(double(bytes) - double(finer) * layers / (options.layers - layers)));
      if (others < 1) continue;
      std::string policy = absl::StrCat(kPrefix, others, tail, ";", range, "=", kPrefix, bytes + finer, tail);
      if (check == nullptr || check(policy).ok()) policies.push_back(std::move(policy));
    }
  }
  return policies;
}

bool OnFrontier(absl::Span<const RatePoint> points, size_t index) {
  const RatePoint& p = points[index];
  for (size_t i = 0; i < points.size(); ++i) {
    const RatePoint& other = points[i];
    const bool no_worse = other.bytes_per_token_head <= p.bytes_per_token_head && other.loss <= p.loss;
    const bool better = other.bytes_per_token_head < p.bytes_per_token_head || other.loss < p.loss;
    if (no_worse && better) return false;
  }
  return true;
}

absl::StatusOr<TuneResult> Tune(const TuneOptions& options, const TuneHooks& hooks) {
  std::vector<std::string> wanted = TuneGrid(options);
  if (wanted.size() > TuneOptions::kCandidatesMax) {
    return InvalidField("candidates", wanted.size(), absl::StrCat("at most ", TuneOptions::kCandidatesMax));
  }
  absl::Status refusal;
  if (hooks.check != nullptr) {
    for (const std::string& codec : options.more_codecs) KV_RETURN_IF_ERROR(hooks.check(codec));
    const auto refused = [&](const std::string& codec) {
      const absl::Status why = hooks.check(codec);
      if (why.ok()) return false;
      hooks.dropped(codec, why);
      refusal = why;
      return true;
    };
    wanted.erase(std::remove_if(wanted.begin(), wanted.end(), refused), wanted.end());
    if (wanted.empty()) return refusal;
  }
  TuneResult result;
  hooks.progress(0, int(wanted.size()) + 1, "raw");
  KV_ASSIGN_OR_RETURN(result.raw, hooks.measure("raw"));
  result.raw.codec = result.raw.family = "raw";
  std::set<std::string> seen;
  const auto run = [&](size_t from) {
    for (size_t i = from; i < wanted.size(); ++i) {
      if (!seen.insert(wanted[i]).second) continue;
      hooks.progress(int(i) + 1, int(wanted.size()) + 1, wanted[i]);
      absl::StatusOr<RatePoint> point = hooks.measure(wanted[i]);
      if (!point.ok()) {
        hooks.dropped(wanted[i], point.status());
        refusal = point.status();
        continue;
      }
      point->codec = wanted[i];
      point->family = FamilyOf(wanted[i]);
      point->loss = std::exp2(point->bpb - result.raw.bpb) - 1;
      result.points.push_back(*std::move(point));
    }
  };
  run(0);
  if (result.points.empty() && !refusal.ok()) return refusal;

  // The frontier's points just below and just above the bound are where other layers' shares could decide.
  std::vector<size_t> frontier;
  for (size_t i = 0; i < result.points.size(); ++i) {
    if (OnFrontier(result.points, i)) frontier.push_back(i);
  }
  std::sort(frontier.begin(), frontier.end(), [&](size_t a, size_t b) {
    return std::abs(result.points[a].loss - options.max_loss) < std::abs(result.points[b].loss - options.max_loss);
  });
  const size_t first_policy = wanted.size();
  int refined = 0;
  for (const size_t i : frontier) {
    const std::vector<std::string> policies = FinerEnds(result.points[i], options, hooks.check);
    if (policies.empty()) continue;
    wanted.insert(wanted.end(), policies.begin(), policies.end());
    if (++refined == kRefinedMax) break;
  }
  run(first_policy);

  std::sort(result.points.begin(), result.points.end(), [](const RatePoint& a, const RatePoint& b) {
    return std::tie(a.bytes_per_token_head, a.loss, a.codec) < std::tie(b.bytes_per_token_head, b.loss, b.codec);
  });
  for (size_t i = 0; i < result.points.size() && result.best < 0; ++i) {
    if (result.points[i].loss <= options.max_loss) result.best = int(i);
  }
  return result;
}

std::string TuneTable(const TuneResult& result, double max_loss) {
  std::string text = absl::StrFormat("%8s %7s %9s %9s    %s\n", "B/token", "ratio", "bits/byte", "loss", "codec");
  const auto line = [&](const RatePoint& p, const char* mark) {
    absl::StrAppendFormat(&text, "%8.1f %6.1fx %9.4f %+8.2f%%  %s %s\n", p.bytes_per_token_head,
                          result.raw.bytes_per_token_head / p.bytes_per_token_head, p.bpb, 100 * p.loss, mark, p.codec);
  };
  line(result.raw, " ");
  for (size_t i = 0; i < result.points.size(); ++i) {
    line(result.points[i], int(i) == result.best ? ">" : OnFrontier(result.points, i) ? "*" : " ");
  }
  absl::StrAppend(&text,
                  "B/token: bytes per token and KV head, K and V together. *: nothing measured is as small and as "
                  "good.\n");
  if (result.best < 0) {
    absl::StrAppendFormat(&text, "No policy loses at most %.2f%%: use raw, or allow more.\n", 100 * max_loss);
  } else {
    const RatePoint& best = result.points[result.best];
    absl::StrAppendFormat(&text,
                          "Best policy that loses at most %.2f%%: %.1f bytes, %+.2f%%. Open the cache with\n  "
                          "--codec '%s'\n",
                          100 * max_loss, best.bytes_per_token_head, 100 * best.loss, best.codec);
  }
  return text;
}

}  // namespace kvmanager::engine
