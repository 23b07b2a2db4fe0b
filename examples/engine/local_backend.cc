#include "examples/engine/local_backend.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>

#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/parallel.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

constexpr size_t kAlign = 64;

uint8_t* Allocate(size_t bytes) {
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
  KV_CHECK(memory != nullptr);
  return memory;
}

double SecondsSince(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace

CodecContext LocalContext(const Model& model, int page_tokens) {
  const ModelConfig& c = model.config();
  CodecContext context;
  context.layout = {DType::kFloat16, uint16_t(c.kv_heads), uint16_t(c.head_dim), uint16_t(page_tokens)};
  context.layers = c.layers;
  context.query_heads = c.query_heads;
  context.model = c.name;
  context.revision = model.digest();
  return context;
}

absl::Status CheckLocalCodec(const Model& model, const Codec& codec) {
  const PageLayout& layout = codec.layout();
  if (layout != LocalContext(model, layout.page_tokens).layout) {
    return InvalidField("the codec's pages", absl::StrCat(int{layout.kv_heads}, " KV heads of ", int{layout.head_dim}),
                        absl::StrCat("fp16, ", model.config().kv_heads, " of ", model.config().head_dim));
  }
  if (codec.NewIndex({}) != nullptr) {
    return InvalidField("codec", codec.info().spec,
                        "one whose queries read every token: what this one costs is measured through a daemon, with "
                        "`evaluate --codec`");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LocalBackend>> LocalBackend::Create(const Model* model, const Codec* codec,
                                                                   const LocalBackendOptions& options) {
  KV_RETURN_IF_ERROR(CheckLocalCodec(*model, *codec));
  if (options.lag_pages < 0) return InvalidField("lag_pages", options.lag_pages, "at least 0");
  if (options.rows_max < 1) return InvalidField("rows_max", options.rows_max, "at least 1");
  if (options.threads < 1 || options.threads > WorkerPool::kThreadsMax) {
    return InvalidField("threads", options.threads, absl::StrCat("1..", WorkerPool::kThreadsMax));
  }
  return std::unique_ptr<LocalBackend>(new LocalBackend(model, codec, options));
}

LocalBackend::LocalBackend(const Model* model, const Codec* codec, const LocalBackendOptions& options)
    : model_(model), codec_(codec), options_(options), layout_(codec->layout()) {
  raw_attention_ = MakeRawAttention(layout_);
  const ModelConfig& c = model->config();
  const size_t rows = options.rows_max;
  q_.resize(rows * c.query_heads * c.head_dim);
  out_.resize(q_.size());
  k_.resize(rows * c.kv_heads * c.head_dim);
  v_.resize(k_.size());
  buffers_ = {q_.data(), k_.data(), v_.data(), out_.data()};
  for (int i = 0; i < options.threads; ++i) {
    workspaces_.emplace_back(Allocate(std::max<size_t>(codec->encode_workspace_bytes(), 1)));
  }
  if (options.threads > 1) workers_ = std::make_unique<WorkerPool>(options.threads - 1);
}

uint64_t LocalBackend::CreateSequence() {
  const uint64_t id = next_sequence_++;
  sequences_[id].layers.resize(model_->config().layers);
  return id;
}

absl::Status LocalBackend::Check(int layer, absl::Span<const KvEntry> entries, int* rows) const {
  if (layer < 0 || layer >= model_->config().layers) {
    return InvalidField("layer", layer, absl::StrCat("0..", model_->config().layers - 1));
  }
  int64_t count = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const KvEntry& entry = entries[i];
    const auto found = sequences_.find(entry.sequence);
    if (found == sequences_.end()) return InvalidField("sequence", entry.sequence, "one of CreateSequence's");
    for (size_t other = 0; other < i; ++other) {
      if (entries[other].sequence == entry.sequence) return InvalidField("sequence", entry.sequence, "named once");
    }
    const uint64_t tokens = found->second.layers[layer].tokens;
    if (entry.position != tokens) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "position", absl::StrCat(entry.position),
                        absl::StrCat(tokens, ", the token count of layer ", layer));
    }
    if (entry.tokens < 1) return InvalidField("tokens of an entry", entry.tokens, "at least 1");
    count += entry.tokens;
  }
  if (count > options_.rows_max) {
    return InvalidField("rows of a step", count, absl::StrCat("at most ", options_.rows_max));
  }
  const size_t elements = size_t(count) * layout_.kv_heads * layout_.head_dim;
  if (FindNonFinite(DType::kFloat16, k_.data(), elements) != elements) {
    return InvalidField(absl::StrCat("K of layer ", layer), "not finite", "finite in fp16");
  }
  if (FindNonFinite(DType::kFloat16, v_.data(), elements) != elements) {
    return InvalidField(absl::StrCat("V of layer ", layer), "not finite", "finite in fp16");
  }
  *rows = int(count);
  return absl::OkStatus();
}

absl::Status LocalBackend::AppendAndAttend(int layer, absl::Span<const KvEntry> entries) {
  int rows = 0;
  KV_RETURN_IF_ERROR(Check(layer, entries, &rows));
  if (observer_) observer_(layer, entries, buffers_);
  Append(layer, entries);
  Encode(layer);
  Attend(layer, entries);
  if (codec_->attention().folds_output(layer)) Unfold(layer, rows);
  return absl::OkStatus();
}

// With a page's encoded form there, its raw form goes when it has aged.
void LocalBackend::Append(int layer, absl::Span<const KvEntry> entries) {
  const uint64_t page_tokens = layout_.page_tokens;
  const size_t row_bytes = layout_.head_dim * DTypeBytes(layout_.dtype);
  full_.clear();
  size_t row = 0;
  for (const KvEntry& entry : entries) {
    LayerPages& to = sequences_.at(entry.sequence).layers[layer];
    for (const uint32_t aged = rule().AgedPages(entry.position); to.aged < aged; ++to.aged) {
      Page& page = to.pages[to.aged];
      if (page.encoded != nullptr) page.raw.reset();
    }
    to.pages.resize((entry.position + entry.tokens + page_tokens - 1) / page_tokens);
    for (int t = 0; t < entry.tokens; ++t, ++row) {
      const uint64_t position = entry.position + t;
      Page& page = to.pages[position / page_tokens];
      if (page.raw == nullptr) page.raw.reset(Allocate(layout_.raw_bytes()));
      for (int head = 0; head < layout_.kv_heads; ++head) {
        const size_t from = (row * layout_.kv_heads + head) * layout_.head_dim;
        std::memcpy(page.raw.get() + layout_.raw_offset(0, head, int(position % page_tokens)), &k_[from], row_bytes);
        std::memcpy(page.raw.get() + layout_.raw_offset(1, head, int(position % page_tokens)), &v_[from], row_bytes);
      }
      if ((position + 1) % page_tokens == 0) full_.emplace_back(&page, position + 1 - page_tokens);
    }
    to.tokens += entry.tokens;
  }
}

void LocalBackend::Encode(int layer) {
  if (full_.empty() || codec_->info().identity) return;
  const auto begun = std::chrono::steady_clock::now();
  const size_t page_bytes = codec_->info().page_bytes(layer);
  items_.clear();
  for (const auto& [page, first_token] : full_) {
    page->encoded.reset(Allocate(page_bytes));
    items_.push_back({page->raw.get(), page->encoded.get(), uint32_t(layer), first_token, false});
  }
  const size_t parts = std::min<size_t>(workspaces_.size(), items_.size());
  ParallelFor(workers_.get(), parts, [&](size_t part) {
    const size_t begin = items_.size() * part / parts, end = items_.size() * (part + 1) / parts;
    codec_->Encode(absl::MakeSpan(items_).subspan(begin, end - begin),
                   absl::MakeSpan(workspaces_[part].get(), codec_->encode_workspace_bytes()));
  });
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].declined) full_[i].first->encoded.reset();
    ++(items_[i].declined ? counts_.declined_pages : counts_.encoded_pages);
  }
  counts_.encode_seconds += SecondsSince(begun);
}

void LocalBackend::Attend(int layer, absl::Span<const KvEntry> entries) {
  const auto begun = std::chrono::steady_clock::now();
  std::vector<std::vector<AttentionPage>> pages(entries.size());
  std::vector<AttentionSequence> sequences(entries.size());
  const ModelConfig& c = model_->config();
  size_t row = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const LayerPages& from = sequences_.at(entries[i].sequence).layers[layer];
    // The first query reads most pages raw, the last one most of them encoded.
    const uint32_t lag = static_cast<uint32_t>(options_.lag_pages);
    const uint32_t last_page = static_cast<uint32_t>(from.pages.size()) - 1;
    const uint32_t raw_from = ReadingRule::FirstRawPage(rule().PageOf(entries[i].position), from.aged, lag);
    const uint32_t encoded_to = ReadingRule::FirstRawPage(last_page, from.aged, lag);
    for (uint32_t index = 0; index <= last_page; ++index) {
      const Page& page = from.pages[index];
      AttentionPage out;
      out.lag_applies = index >= from.aged;
      if (index >= raw_from || page.encoded == nullptr) out.raw = page.raw.get();
      if (index < encoded_to) out.encoded = page.encoded.get();
      pages[i].push_back(out);
    }
    const size_t at = row * c.query_heads * c.head_dim;
    sequences[i] = {pages[i], entries[i].position, entries[i].tokens, &q_[at], &out_[at], nullptr};
    row += entries[i].tokens;
  }
  AttentionBatch batch;
  batch.codec = codec_;
  batch.raw_attention = raw_attention_.get();
  batch.layout = layout_;
  batch.layer = layer;
  batch.query_heads = c.query_heads;
  batch.lag_pages = options_.lag_pages;
  batch.sequences = sequences;
  const std::unique_ptr<AttentionPlan> plan = AttentionPlan::Make(batch, options_.threads);
  if (workers_ == nullptr) {
    plan->RunHere();
  } else {
    // One of the plan's threads would be this one, which waits: the pool's others take its part.
    Mutex mutex;
    std::condition_variable wake;
    bool done = false;
    plan->Run(*workers_, [&] {
      MutexLock lock(mutex);
      done = true;
      wake.notify_one();
    });
    MutexLock lock(mutex);
    while (!done) lock.Wait(wake);
  }
  counts_.pairs.encoded += plan->counts().encoded_pairs;
  counts_.pairs.raw += plan->counts().raw_pairs;
  counts_.attend_seconds += SecondsSince(begun);
}

void LocalBackend::Unfold(int layer, int rows) {
  const int d = layout_.head_dim, query_heads = model_->config().query_heads;
  const int group = query_heads / layout_.kv_heads;
  std::vector<float> factor(size_t(d) * d), expanded(d);
  for (int head = 0; head < query_heads; ++head) {
    if (head % group == 0) KV_CHECK(codec_->OutputFactor(layer, head / group, absl::MakeSpan(factor)));
    for (int row = 0; row < rows; ++row) {
      float* out = &out_[(size_t(row) * query_heads + head) * d];
      for (int i = 0; i < d; ++i) {
        float sum = 0;
        for (int j = 0; j < d; ++j) sum += factor[size_t(i) * d + j] * out[j];
        expanded[i] = sum;
      }
      std::copy(expanded.begin(), expanded.end(), out);
    }
  }
}

namespace {

class LocalWindows final : public WindowStore {
 public:
  explicit LocalWindows(LocalBackend* backend) : backend_(backend) {}
  KvBackend* backend() override { return backend_; }
  absl::Status Begin(int count, std::vector<uint64_t>* sequences) override {
    sequences->clear();
    for (int i = 0; i < count; ++i) sequences->push_back(backend_->CreateSequence());
    sequences_ = *sequences;
    return absl::OkStatus();
  }
  absl::Status End() override {
    for (uint64_t sequence : sequences_) backend_->DropSequence(sequence);
    return absl::OkStatus();
  }

 private:
  LocalBackend* const backend_;
  std::vector<uint64_t> sequences_;
};

}  // namespace

std::unique_ptr<WindowStore> MakeLocalWindows(LocalBackend* backend) { return std::make_unique<LocalWindows>(backend); }

absl::StatusOr<LocalEvaluation> EvaluateLocal(const Model& model, const Codec& codec, absl::Span<const uint8_t> text,
                                              const EvaluateOptions& options, int lag_pages,
                                              absl::FunctionRef<void(int64_t, int64_t)> progress) {
  const auto begun = std::chrono::steady_clock::now();
  KV_RETURN_IF_ERROR(CheckEvaluate(model, text, options));
  const PageLayout& layout = codec.layout();
  LocalBackendOptions backend_options;
  backend_options.lag_pages = lag_pages;
  backend_options.rows_max = EvaluateRowsMax(options, layout.page_tokens);
  backend_options.threads = options.threads;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<LocalBackend> backend,
                      LocalBackend::Create(&model, &codec, backend_options));
  LocalWindows windows(backend.get());
  LocalEvaluation result;
  KV_ASSIGN_OR_RETURN(result.loss, ReadWindows(model, &windows, text, options, layout.page_tokens, progress));
  result.codec = codec.info().spec;
  result.bytes_per_token_head = double(codec.info().payload_bytes) / (double(layout.page_tokens) * layout.kv_heads);
  result.counts = backend->counts();
  const PairCounts expected = ExpectedPairs(options.window, layout.page_tokens, lag_pages,
                                            /*encodes=*/!codec.info().identity, SinkTokens(codec.info().spec));
  result.expected_pairs.encoded = expected.encoded * model.config().layers * options.windows;
  result.expected_pairs.raw = expected.raw * model.config().layers * options.windows;
  result.seconds = SecondsSince(begun);
  return result;
}

}  // namespace kvmanager::engine
