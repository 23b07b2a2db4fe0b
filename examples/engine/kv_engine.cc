#include "examples/engine/kv_engine.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/fold.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

constexpr size_t kArenaAlignment = 64;  // of a tensor in an arena
constexpr uint64_t kArenaGranularity = 4096, kArenaBytesMax = uint64_t{1} << 30;

constexpr int kProofTokens = 16;
constexpr uint64_t kProofPosition = 1000;

size_t Aligned(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

absl::StatusOr<std::unique_ptr<KvEngine>> KvEngine::Open(client::Client* client, const Model& model,
                                                         const KvEngineOptions& options) {
  const ModelConfig& c = model.config();
  std::unique_ptr<KvEngine> engine(new KvEngine);
  engine->options_ = options;
  engine->layers_ = c.layers;
  engine->steps_.resize(c.layers);
  engine->q_row_bytes_ = size_t(c.query_heads) * c.head_dim * sizeof(float);
  engine->kv_row_bytes_ = size_t(c.kv_heads) * c.head_dim * sizeof(uint16_t);
  engine->x_row_bytes_ = options.activations ? size_t(c.hidden_size) * sizeof(uint16_t) : 0;
  const uint64_t row_bytes = 2 * (engine->q_row_bytes_ + engine->kv_row_bytes_) + engine->x_row_bytes_;
  const uint64_t rows_bound = (kArenaBytesMax - 5 * kArenaAlignment) / row_bytes;
  if (options.rows_max < 1 || uint64_t(options.rows_max) > rows_bound) {
    return InvalidField("rows of a step", options.rows_max, absl::StrCat("1..", rows_bound));
  }

  client::CacheOptions cache;
  cache.model = c.name;
  cache.revision = model.digest();
  cache.rope = absl::StrFormat("half-rotation,theta=%.17g,dim=%d", c.rope_theta, c.head_dim);
  cache.layers = c.layers;
  cache.kv_heads = c.kv_heads;
  cache.query_heads = c.query_heads;
  cache.head_dim = c.head_dim;
  cache.page_tokens = options.page_tokens;
  cache.dtype = DType::kFloat16;
  cache.codec = options.codec;
  cache.lag_pages = options.lag_pages;
  cache.calibration_digest = options.calibration_digest;
  if (options.activations) cache.hidden_size = c.hidden_size;
  KV_ASSIGN_OR_RETURN(engine->cache_, client->OpenCache(cache));
  KV_RETURN_IF_ERROR(engine->FoldOutputs(model));
  if (options.activations) KV_RETURN_IF_ERROR(engine->RegisterProjections(client, model));

  const size_t q_bytes = Aligned(options.rows_max * engine->q_row_bytes_, kArenaAlignment);
  const size_t kv_bytes = Aligned(options.rows_max * engine->kv_row_bytes_, kArenaAlignment);
  const size_t x_bytes = Aligned(options.rows_max * engine->x_row_bytes_, kArenaAlignment);
  const size_t bytes = Aligned(2 * (q_bytes + kv_bytes) + x_bytes, kArenaGranularity);
  auto arena = client->CreateArena(bytes);
  if (arena.ok()) {
    engine->arena_ = *std::move(arena);
    engine->base_ = engine->arena_->data().data();
  } else if (absl::IsFailedPrecondition(arena.status())) {
    if (options.rows_max * row_bytes > kInlineBytesMax) {
      return InvalidField(
          "rows of a step", options.rows_max,
          absl::StrCat("at most ", kInlineBytesMax / row_bytes, " where tensors go through the socket"));
    }
    engine->inline_buffer_.resize(bytes / sizeof(float));
    engine->base_ = reinterpret_cast<uint8_t*>(engine->inline_buffer_.data());
  } else {
    return arena.status();
  }
  engine->buffers_.q = reinterpret_cast<float*>(engine->base_);
  engine->buffers_.out = reinterpret_cast<const float*>(engine->base_ + q_bytes);
  engine->buffers_.k = reinterpret_cast<uint16_t*>(engine->base_ + 2 * q_bytes);
  engine->buffers_.v = reinterpret_cast<uint16_t*>(engine->base_ + 2 * q_bytes + kv_bytes);
  if (options.activations) {
    engine->buffers_.x = reinterpret_cast<uint16_t*>(engine->base_ + 2 * (q_bytes + kv_bytes));
  }
  return engine;
}

absl::Status KvEngine::FoldOutputs(const Model& model) {
  const ModelConfig& c = model.config();
  const client::OutputShape shape = {c.hidden_size, c.query_heads, c.kv_heads, c.head_dim};
  folded_.resize(c.layers);
  for (int layer = 0; layer < c.layers; ++layer) {
    const absl::StatusOr<std::vector<float>> factors = cache_->OutputFactors(layer);
    if (absl::IsUnimplemented(factors.status())) break;  // a daemon that does not know the call has no such codec
    KV_RETURN_IF_ERROR(factors.status());
    if (factors->empty()) continue;
    KV_ASSIGN_OR_RETURN(folded_[layer], client::FoldOutputWeights(model.layers()[layer].o, shape, *factors));
  }
  return absl::OkStatus();
}

absl::Status KvEngine::RegisterProjections(client::Client* client, const Model& model) {
  const ModelConfig& c = model.config();
  client::ProjectionFacts facts;
  facts.rotary_dims = c.head_dim;
  facts.theta = c.rope_theta;
  KV_ASSIGN_OR_RETURN(projections_, cache_->OpenProjections(facts));
  const size_t width = size_t(c.kv_heads) * c.head_dim, weight_bytes = width * c.hidden_size * sizeof(float);
  const size_t x_bytes = size_t(kProofTokens) * c.hidden_size * sizeof(uint16_t);
  const size_t kv_bytes = kProofTokens * width * sizeof(uint16_t);
  std::vector<size_t> offsets = {0};
  for (const size_t bytes : {weight_bytes, weight_bytes, x_bytes, kv_bytes, kv_bytes}) {
    offsets.push_back(Aligned(offsets.back() + bytes, kArenaAlignment));
  }
  auto arena = client->CreateArena(Aligned(offsets.back(), kArenaGranularity));
  if (!arena.ok() && !absl::IsFailedPrecondition(arena.status())) return arena.status();
  std::vector<float> inline_bytes(arena.ok() ? 0 : offsets.back() / sizeof(float));
  uint8_t* const base = arena.ok() ? (*arena)->data().data() : reinterpret_cast<uint8_t*>(inline_bytes.data());
  const auto view = [&](int part, size_t bytes) {
    return arena.ok() ? (*arena)->View(offsets[part], bytes) : client::TensorView::Inline(base + offsets[part], bytes);
  };
  // Any activations will do: these are of the size that a norm leaves.
  auto* const x = reinterpret_cast<uint16_t*>(base + offsets[2]);
  for (size_t i = 0; i < x_bytes / sizeof(uint16_t); ++i) x[i] = FloatToHalf(float((i * 40503 >> 4) % 256) / 128 - 1);
  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& w = model.layers()[layer];
    std::copy(w.k.begin(), w.k.end(), reinterpret_cast<float*>(base));
    std::copy(w.v.begin(), w.v.end(), reinterpret_cast<float*>(base + offsets[1]));
    ProjectKeysValues(model, layer, absl::MakeConstSpan(x, x_bytes / sizeof(uint16_t)), kProofPosition,
                      reinterpret_cast<uint16_t*>(base + offsets[3]), reinterpret_cast<uint16_t*>(base + offsets[4]));
    client::LayerProjections projections;
    projections.layer = layer;
    projections.dtype = DType::kFloat32;
    projections.k = view(0, weight_bytes);
    projections.v = view(1, weight_bytes);
    projections.proof = {kProofPosition, kProofTokens, view(2, x_bytes), view(3, kv_bytes), view(4, kv_bytes)};
    KV_RETURN_IF_ERROR(projections_->SetLayer(projections));
  }
  return absl::OkStatus();
}

client::TensorView KvEngine::View(const void* data, size_t bytes) const {
  if (arena_ == nullptr) return client::TensorView::Inline(data, bytes);
  return arena_->View(static_cast<const uint8_t*>(data) - base_, bytes);
}

absl::Status KvEngine::AppendAndAttend(int layer, absl::Span<const KvEntry> entries) {
  entries_.clear();
  size_t rows = 0;
  for (const KvEntry& entry : entries) {
    entries_.push_back({entry.sequence, entry.position, entry.tokens});
    rows += entry.tokens;
  }
  client::StepBatch batch;
  batch.layer = layer;
  batch.entries = entries_;
  batch.k = View(buffers_.k, rows * kv_row_bytes_);
  batch.v = View(buffers_.v, rows * kv_row_bytes_);
  if (buffers_.x != nullptr) batch.x = View(buffers_.x, rows * x_row_bytes_);
  batch.q = View(buffers_.q, rows * q_row_bytes_);
  batch.out = View(buffers_.out, rows * q_row_bytes_);
  batch.q_dtype = DType::kFloat32;
  LayerSteps& steps = steps_[layer];
  const int64_t begun_ns = absl::ToUnixNanos(absl::Now());
  KV_ASSIGN_OR_RETURN(const client::StepResult result, cache_->Step(batch));
  steps.last_ended_ns = absl::ToUnixNanos(absl::Now());
  if (steps.first_begun_ns == 0) steps = {begun_ns, steps.last_ended_ns, steps.last_ended_ns};
  counts_.encoded_pairs += result.encoded_pairs;
  counts_.raw_pairs += result.raw_pairs;
  if (layer == layers_ - 1) {
    counts_.computed += rows;
    for (const KvEntry& entry : entries) {
      if (entry.position < options_.prompt_tokens) {
        counts_.prompt_computed += std::min<uint64_t>(entry.tokens, options_.prompt_tokens - entry.position);
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<client::CreatedSequence> KvEngine::CreateSequence(absl::Span<const uint32_t> tokens,
                                                                 uint64_t prompt_tokens) {
  std::vector<BlockName> names;
  if (!tokens.empty())
    NameBlocks(cache_->description().digest, tokens.first(tokens.size() - 1), options_.page_tokens, &names);
  const absl::Span<const BlockName> prefix = names;
  KV_ASSIGN_OR_RETURN(auto created,
                      cache_->CreateSequences(absl::MakeConstSpan(&prefix, 1), absl::MakeConstSpan(&prompt_tokens, 1)));
  if (created.size() != 1)
    return absl::InternalError(absl::StrCat("one sequence was asked for, ", created.size(), " came"));
  KV_RETURN_IF_ERROR(created[0].status());
  counts_.hit += uint64_t(created[0]->match.hit_blocks) * options_.page_tokens;
  return std::move(created[0]);
}

absl::StatusOr<client::PublishOutcome> KvEngine::Publish(client::Sequence& sequence,
                                                         absl::Span<const uint32_t> tokens) {
  std::vector<BlockName> names;
  NameBlocks(cache_->description().digest, tokens, options_.page_tokens, &names);
  if (names.empty()) return client::PublishOutcome{};
  return sequence.Publish(names);
}

}  // namespace kvmanager::engine
