#include "examples/engine/windows.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/numbers.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

/// Cross-entropy of `target` in bits. logits: [vocab].
double Bits(absl::Span<const float> logits, uint8_t target) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(double(logit) - top);
  return (std::log(sum) + top - logits[target]) / std::numbers::ln2;
}

}  // namespace

uint64_t SinkTokens(absl::string_view codec) {
  constexpr absl::string_view kKey = ";sinks=";
  const size_t at = codec.rfind(kKey);
  uint64_t tokens = 0;
  return at != absl::string_view::npos && absl::SimpleAtoi(codec.substr(at + kKey.size()), &tokens) ? tokens : 0;
}

PairCounts ExpectedPairs(uint64_t tokens, int page_tokens, int lag_pages, bool encodes, uint64_t sink_tokens) {
  PairCounts pairs;
  for (uint64_t first = 0; first < tokens; first += page_tokens) {
    const uint64_t queries = std::min<uint64_t>(page_tokens, tokens - first);
    const uint64_t raw_tokens =
        encodes ? std::min<uint64_t>(uint64_t(lag_pages) * page_tokens + sink_tokens, first) : first;
    pairs.encoded += queries * (first - raw_tokens);
    pairs.raw += queries * raw_tokens + queries * (queries + 1) / 2;
  }
  return pairs;
}

absl::Status CheckEvaluate(const Model& model, absl::Span<const uint8_t> text, const EvaluateOptions& o) {
  if (model.config().vocab_size != 256)
    return InvalidField("vocab_size", model.config().vocab_size, "256 (a token is a byte)");
  if (o.window < 2 || o.window > EvaluateOptions::kWindowTokensMax) {
    return InvalidField("window", o.window, absl::StrCat("2..", EvaluateOptions::kWindowTokensMax));
  }
  if (o.windows < 1 || o.windows > EvaluateOptions::kWindowsMax) {
    return InvalidField("windows", o.windows, absl::StrCat("1..", EvaluateOptions::kWindowsMax));
  }
  if (o.stride < 1 || o.stride > INT64_C(1) << 40) return InvalidField("stride", o.stride, "1..2^40");
  const uint64_t needed = uint64_t(o.windows - 1) * o.stride + o.window + 1;
  if (text.size() < needed) {
    return InvalidField("text bytes", text.size(),
                        absl::StrCat("at least ", needed, " (", o.windows, " windows of ", o.window, " at a stride of ",
                                     o.stride, ", and the last target)"));
  }
  return absl::OkStatus();
}

int EvaluateRowsMax(const EvaluateOptions& options, int page_tokens) {
  return std::clamp(options.windows, 1, EvaluateOptions::kBatchWindows) * page_tokens;
}

absl::Status VisitWindows(const Model& model, WindowStore* store, absl::Span<const uint8_t> text,
                          const EvaluateOptions& options, int page_tokens, const LogitsVisitor* visit,
                          absl::FunctionRef<void(int64_t, int64_t)> progress) {
  KV_RETURN_IF_ERROR(CheckEvaluate(model, text, options));
  const int vocab = model.config().vocab_size;
  const int64_t pages = (options.window + page_tokens - 1) / page_tokens;
  Runner runner(&model, store->backend(), options.threads);
  std::vector<float> logits;
  std::vector<KvEntry> entries;
  std::vector<uint32_t> tokens;
  std::vector<uint64_t> sequences;
  for (int first = 0; first < options.windows; first += EvaluateOptions::kBatchWindows) {
    const int batch = std::min(EvaluateOptions::kBatchWindows, options.windows - first);
    KV_RETURN_IF_ERROR(store->Begin(batch, &sequences));
    for (int64_t p = 0; p < pages; ++p) {
      const int64_t position = p * page_tokens;
      const int count = int(std::min<int64_t>(page_tokens, options.window - position));
      entries.clear();
      tokens.clear();
      for (int w = 0; w < batch; ++w) {
        entries.push_back({sequences[w], uint64_t(position), count});
        const uint8_t* at = text.data() + (first + w) * options.stride + position;
        tokens.insert(tokens.end(), at, at + count);
      }
      KV_RETURN_IF_ERROR(
          runner.Step(entries, tokens, visit == nullptr ? Runner::Logits::kNone : Runner::Logits::kAll, &logits));
      for (int w = 0; visit != nullptr && w < batch; ++w) {
        for (int i = 0; i < count; ++i) {
          (*visit)(first + w, position + i, absl::MakeConstSpan(&logits[size_t(w * count + i) * vocab], vocab));
        }
      }
      progress(first * pages + (p + 1) * batch, options.windows * pages);
    }
    KV_RETURN_IF_ERROR(store->End());
  }
  return absl::OkStatus();
}

absl::StatusOr<WindowLoss> ReadWindows(const Model& model, WindowStore* store, absl::Span<const uint8_t> text,
                                       const EvaluateOptions& options, int page_tokens,
                                       absl::FunctionRef<void(int64_t, int64_t)> progress) {
  double bits = 0, bits_second_half = 0;
  const auto add = [&](int window, int64_t position, absl::Span<const float> logits) {
    const double b = Bits(logits, text[window * options.stride + position + 1]);
    bits += b;
    if (position >= options.window / 2) bits_second_half += b;
  };
  const LogitsVisitor visit = add;
  KV_RETURN_IF_ERROR(VisitWindows(model, store, text, options, page_tokens, &visit, progress));
  return WindowLoss{bits / (double(options.windows) * options.window),
                    bits_second_half / (double(options.windows) * (options.window - options.window / 2))};
}

}  // namespace kvmanager::engine
