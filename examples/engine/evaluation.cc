#include "examples/engine/evaluation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <thread>

#include "absl/strings/match.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using SteadyTime = std::chrono::steady_clock;

bool Encodes(const client::CacheOptions& cache) {
  return cache.codec != "raw" && !absl::StartsWith(cache.codec, "raw:");
}

/// Cross-entropy of `target` in bits. logits: [vocab].
double Bits(absl::Span<const float> logits, uint8_t target) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(double(logit) - top);
  return (std::log(sum) + top - logits[target]) / std::numbers::ln2;
}

/// Bytes of the sequences' pages, once the encoding that goes on behind the last steps has settled, or after a bounded
/// time: raw forms inside the lag, encoded forms of every full page.
absl::StatusOr<uint64_t> SettledResidentBytes(absl::Span<const std::unique_ptr<client::Sequence>> sequences,
                                              uint64_t bytes_expected) {
  constexpr auto kSettleMax = std::chrono::seconds(2);
  const auto end = SteadyTime::now() + kSettleMax;
  for (;;) {
    uint64_t bytes = 0;
    for (const auto& sequence : sequences) {
      KV_ASSIGN_OR_RETURN(const client::SequenceDescription now, sequence->Info());
      bytes += now.bytes;
    }
    if (bytes == bytes_expected || SteadyTime::now() > end) return bytes;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

PairCounts ExpectedPairs(uint64_t tokens, int page_tokens, int lag_pages, bool encodes) {
  PairCounts pairs;
  for (uint64_t first = 0; first < tokens; first += page_tokens) {
    const uint64_t queries = std::min<uint64_t>(page_tokens, tokens - first);
    const uint64_t lag_tokens = encodes ? std::min<uint64_t>(uint64_t(lag_pages) * page_tokens, first) : first;
    pairs.encoded += queries * (first - lag_tokens);
    pairs.raw += queries * lag_tokens + queries * (queries + 1) / 2;
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

absl::StatusOr<Evaluation> Evaluate(const Model& model, KvEngine* engine, absl::Span<const uint8_t> text,
                                    const EvaluateOptions& options,
                                    absl::FunctionRef<void(int64_t, int64_t)> progress) {
  KV_RETURN_IF_ERROR(CheckEvaluate(model, text, options));
  const auto begun = SteadyTime::now();
  const client::CacheDescription cache = engine->cache().description();
  const int page = cache.options.page_tokens, vocab = model.config().vocab_size, layers = model.config().layers;
  const int64_t pages = (options.window + page - 1) / page;
  const double token_heads = double(page) * cache.options.kv_heads;
  const KvCounts before = engine->counts();
  Runner runner(&model, engine, options.threads);

  Evaluation result;
  result.codec = cache.options.codec;
  result.bytes_per_token_head = cache.payload_page_bytes / token_heads;
  double bits = 0, bits_second_half = 0;
  std::vector<float> logits;
  std::vector<KvEntry> entries;
  std::vector<uint32_t> tokens;
  for (int first = 0; first < options.windows; first += EvaluateOptions::kBatchWindows) {
    const int batch = std::min(EvaluateOptions::kBatchWindows, options.windows - first);
    std::vector<std::unique_ptr<client::Sequence>> sequences;
    for (int w = 0; w < batch; ++w) {
      KV_ASSIGN_OR_RETURN(client::CreatedSequence created, engine->CreateSequence({}));
      sequences.push_back(std::move(created.sequence));
    }
    for (int64_t p = 0; p < pages; ++p) {
      const int64_t position = p * page;
      const int count = int(std::min<int64_t>(page, options.window - position));
      entries.clear();
      tokens.clear();
      for (int w = 0; w < batch; ++w) {
        entries.push_back({sequences[w]->id(), uint64_t(position), count});
        const uint8_t* at = text.data() + (first + w) * options.stride + position;
        tokens.insert(tokens.end(), at, at + count);
      }
      KV_RETURN_IF_ERROR(runner.Step(entries, tokens, Runner::Logits::kAll, &logits));
      for (int w = 0; w < batch; ++w) {
        for (int i = 0; i < count; ++i) {
          const uint8_t target = text[(first + w) * options.stride + position + i + 1];
          const double b = Bits(absl::MakeConstSpan(&logits[size_t(w * count + i) * vocab], vocab), target);
          bits += b;
          if (position + i >= options.window / 2) bits_second_half += b;
        }
      }
      progress(first * pages + (p + 1) * batch, options.windows * pages);
    }
    if (first == 0) {
      // Every full page in the codec's form; the newest lag pages and the last page raw as well (of raw, the open
      // page).
      const uint64_t full = options.window / page, raw = Encodes(cache.options)
                                                             ? std::min<uint64_t>(pages, cache.options.lag_pages + 1)
                                                             : pages - full;
      KV_ASSIGN_OR_RETURN(
          const uint64_t resident_bytes,
          SettledResidentBytes(sequences,
                               batch * layers * (full * cache.encoded_page_bytes + raw * cache.raw_page_bytes)));
      result.resident_bytes_per_token_head =
          double(resident_bytes) / (double(batch) * options.window * layers * cache.options.kv_heads);
    }
  }
  result.bpb = bits / (double(options.windows) * options.window);
  result.bpb_second_half = bits_second_half / (double(options.windows) * (options.window - options.window / 2));
  result.pairs.encoded = engine->counts().encoded_pairs - before.encoded_pairs;
  result.pairs.raw = engine->counts().raw_pairs - before.raw_pairs;
  const PairCounts expected = ExpectedPairs(options.window, page, cache.options.lag_pages, Encodes(cache.options));
  result.expected_pairs.encoded = expected.encoded * layers * options.windows;
  result.expected_pairs.raw = expected.raw * layers * options.windows;
  result.seconds = std::chrono::duration<double>(SteadyTime::now() - begun).count();
  return result;
}

}  // namespace kvmanager::engine
