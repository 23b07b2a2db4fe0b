#include "examples/engine/evaluation.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "codecs/builtin.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using SteadyTime = std::chrono::steady_clock;

/// The cache's codec, to be asked what it reads and keeps; nullptr for one that is not to be made here (a plug-in's, or
/// with an artifact that `artifacts` has not): that one encodes.
std::unique_ptr<Codec> CodecOf(const client::CacheOptions& cache, CalibrationSource* artifacts) {
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  registry.SetCalibrations(artifacts);
  CodecContext context;
  context.layout = {cache.dtype, uint16_t(cache.kv_heads), uint16_t(cache.head_dim), uint16_t(cache.page_tokens)};
  context.layers = cache.layers;
  auto codec = registry.Create(cache.codec, context);
  return codec.ok() ? *std::move(codec) : nullptr;
}

bool Encodes(const Codec* codec) { return codec == nullptr || !codec->info().identity; }

/// The part of a window that counts as its prompt, for codecs whose queries choose what they read behind it.
uint64_t PromptTokens(const EvaluateOptions& options) { return uint64_t(options.window) / 2; }

/// The pairs that a window reads in one layer. codec: CodecOf(cache).
PairCounts ExpectedOf(const client::CacheOptions& cache, const Codec* codec, const EvaluateOptions& options) {
  IndexFacts facts;
  facts.prompt_tokens = PromptTokens(options);
  facts.iterations = 1;  // nothing is trained here
  const std::unique_ptr<SequenceIndex> index = codec == nullptr ? nullptr : codec->NewIndex(facts);
  if (index == nullptr) {
    return ExpectedPairs(options.window, cache.page_tokens, cache.lag_pages, Encodes(codec), SinkTokens(cache.codec));
  }
  const uint64_t window = options.window;
  IndexJobs jobs;
  index->OnTokens(window);
  index->Need(0, 0, window - 1, &jobs, nullptr);
  const std::unique_ptr<TokenSelector> selector = index->Select(0, 0, window - 1);
  PairCounts pairs;
  for (uint64_t position = 0; position < window; ++position) {
    const bool all = selector == nullptr || position < selector->first_position();
    pairs.raw += all ? position + 1 : selector->tokens_read(position);
  }
  return pairs;
}

/// Bytes of a sequence of `tokens` tokens in all layers, once it has settled: every full page in the codec's form, but
/// for sinks; sinks, the newest lag pages and the last page raw (of an identity codec, the open page alone).
uint64_t ExpectedBytes(const client::CacheDescription& cache, const Codec* codec, uint64_t tokens) {
  const client::CacheOptions& o = cache.options;
  const uint64_t page = o.page_tokens, full = tokens / page, pages = (tokens + page - 1) / page;
  uint64_t sinks = 0, raw = pages - full;
  if (Encodes(codec)) {
    sinks = std::min(full, SinkTokens(o.codec) / page);
    raw = std::min(pages, sinks + o.lag_pages + 1);
  }
  uint64_t bytes = 0;
  for (int layer = 0; layer < o.layers; ++layer) {
    const uint64_t encoded = codec == nullptr ? cache.encoded_page_bytes : codec->info().page_bytes(layer);
    bytes += (full - sinks) * encoded + raw * cache.raw_page_bytes;
  }
  return bytes;
}

/// Bytes of the sequences' pages, once the encoding that goes on behind the last steps has settled, or after a bounded
/// time.
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

/// Windows in the daemon; the first batch's resident bytes are taken at its end.
class DaemonWindows final : public WindowStore {
 public:
  DaemonWindows(KvEngine* engine, const EvaluateOptions& options, CalibrationSource* artifacts)
      : engine_(engine),
        cache_(engine->cache().description()),
        codec_(CodecOf(cache_.options, artifacts)),
        window_(options.window),
        prompt_tokens_(PromptTokens(options)) {}

  KvBackend* backend() override { return engine_; }
  absl::Status Begin(int count, std::vector<uint64_t>* ids) override {
    ids->clear();
    for (int w = 0; w < count; ++w) {
      KV_ASSIGN_OR_RETURN(client::CreatedSequence created, engine_->CreateSequence({}, prompt_tokens_));
      ids->push_back(created.sequence->id());
      sequences_.push_back(std::move(created.sequence));
    }
    return absl::OkStatus();
  }
  absl::Status End() override {
    if (resident_bytes_per_token_head_ < 0) {
      const auto begun = SteadyTime::now();
      const uint64_t expected = sequences_.size() * ExpectedBytes(cache_, codec_.get(), window_);
      KV_ASSIGN_OR_RETURN(const uint64_t resident_bytes, SettledResidentBytes(sequences_, expected));
      resident_bytes_per_token_head_ = double(resident_bytes) / (double(sequences_.size()) * window_ *
                                                                 cache_.options.layers * cache_.options.kv_heads);
      settle_time_ = SteadyTime::now() - begun;
    }
    sequences_.clear();
    return absl::OkStatus();
  }

  const client::CacheDescription& cache() const { return cache_; }
  const Codec* codec() const { return codec_.get(); }
  double resident_bytes_per_token_head() const { return resident_bytes_per_token_head_; }
  /// Spent waiting for that number.
  SteadyTime::duration settle_time() const { return settle_time_; }

 private:
  KvEngine* const engine_;
  const client::CacheDescription cache_;
  const std::unique_ptr<const Codec> codec_;
  const int window_;
  const uint64_t prompt_tokens_;
  std::vector<std::unique_ptr<client::Sequence>> sequences_;
  double resident_bytes_per_token_head_ = -1;
  SteadyTime::duration settle_time_{};
};

}  // namespace

absl::StatusOr<Evaluation> Evaluate(const Model& model, KvEngine* engine, absl::Span<const uint8_t> text,
                                    const EvaluateOptions& options, CalibrationSource* artifacts,
                                    absl::FunctionRef<void(int64_t, int64_t)> progress) {
  const int layers = model.config().layers;
  const KvCounts before = engine->counts();
  DaemonWindows windows(engine, options, artifacts);
  const client::CacheOptions& cache = windows.cache().options;
  const auto begun = SteadyTime::now();
  KV_ASSIGN_OR_RETURN(const WindowLoss loss, ReadWindows(model, &windows, text, options, cache.page_tokens, progress));
  const SteadyTime::duration elapsed = SteadyTime::now() - begun - windows.settle_time();
  Evaluation result;
  result.codec = cache.codec;
  result.bytes_per_token_head = windows.cache().payload_page_bytes / (double(cache.page_tokens) * cache.kv_heads);
  result.resident_bytes_per_token_head = windows.resident_bytes_per_token_head();
  result.bpb = loss.bpb;
  result.bpb_second_half = loss.bpb_second_half;
  result.pairs.encoded = engine->counts().encoded_pairs - before.encoded_pairs;
  result.pairs.raw = engine->counts().raw_pairs - before.raw_pairs;
  const PairCounts expected = ExpectedOf(cache, windows.codec(), options);
  result.expected_pairs.encoded = expected.encoded * layers * options.windows;
  result.expected_pairs.raw = expected.raw * layers * options.windows;
  result.seconds = std::chrono::duration<double>(elapsed).count();
  return result;
}

}  // namespace kvmanager::engine
