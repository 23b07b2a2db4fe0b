#include "tests/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codecs/builtin.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/// Nearly normal: the sum of four uniforms, scaled to unit variance.
float Normal(uint64_t key) {
  const uint64_t h = Mix(key);
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += float(h >> 16 * i & 0xffff) / 65535.f;
  return (sum - 2.f) * 1.7320508f;
}

uint64_t Key(uint64_t seed, uint64_t layer, uint64_t side, uint64_t position, uint64_t head, uint64_t channel) {
  return Mix(seed * 1000003 + layer * 7 + side) ^ (position << 24 | head << 12 | channel);
}

}  // namespace

std::vector<uint8_t> Source::Rows(int layer, int side, uint64_t first, int tokens) const {
  std::vector<uint8_t> rows(size_t(tokens) * shape.kv_heads * shape.head_dim * 2);
  const float largest = shape.dtype == DType::kFloat16 ? 65504.f : 1e4f;
  size_t i = 0;
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < shape.kv_heads; ++h) {
      for (int c = 0; c < shape.head_dim; ++c) {
        float x = Normal(Key(seed, layer, side, first + t, h, c));
        switch (kind) {
          case Kind::kNormal:
            break;
          case Kind::kOutliers:
            if (side == 0 && c % 16 == 3) x = (c % 32 == 3 ? 12.f : -12.f) + x;
            break;
          case Kind::kConstant:
            x = Normal(Key(seed, layer, side, 0, h, c));
            break;
          case Kind::kTiny:
            x *= 1e-6f;
            break;
          case Kind::kHuge:
            if (side == 1 && (first + t + c) % 97 == 0) x = x > 0 ? largest : -largest;
            break;
          case Kind::kRepeated:
            x = Normal(Key(seed, layer, side, 0, h, c));
            if (side == 1) x = Normal(Key(seed, layer, side, first + t, h, c));
            break;
        }
        StoreElement(rows.data(), shape.dtype, i++, x);
      }
    }
  }
  return rows;
}

std::vector<float> Source::Q(int layer, uint64_t first, int tokens) const {
  std::vector<float> q(size_t(tokens) * shape.query_heads * shape.head_dim);
  size_t i = 0;
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < shape.query_heads; ++h) {
      for (int c = 0; c < shape.head_dim; ++c) q[i++] = Normal(Key(seed, layer, 2, first + t, h, c));
    }
  }
  return q;
}

std::vector<uint32_t> Source::TokenIds(uint64_t first, uint64_t tokens) const {
  std::vector<uint32_t> ids(tokens);
  for (uint64_t i = 0; i < tokens; ++i) ids[i] = uint32_t(Mix(seed ^ (first + i) << 20));
  return ids;
}

client::CacheOptions SmallCache(const std::string& codec, int lag_pages, int page_tokens, int head_dim) {
  client::CacheOptions options;
  options.model = "test-model";
  options.revision = "1";
  options.tenant = "test";
  options.rope = "default:theta=10000";
  options.layers = 2;
  options.kv_heads = 2;
  options.query_heads = 4;
  options.head_dim = head_dim;
  options.page_tokens = page_tokens;
  options.codec = codec;
  options.lag_pages = lag_pages;
  return options;
}

const CodecRegistry& AllCodecs() {
  static const CodecRegistry* const registry = [] {
    auto* made = new CodecRegistry;
    RegisterBuiltinCodecs(*made);
    return made;
  }();
  return *registry;
}

ModelSequence::ModelSequence(const client::CacheOptions& shape, const CodecRegistry& registry)
    : shape_(shape), layers_(shape.layers) {
  layout_.dtype = shape.dtype;
  layout_.kv_heads = static_cast<uint16_t>(shape.kv_heads);
  layout_.head_dim = static_cast<uint16_t>(shape.head_dim);
  layout_.page_tokens = static_cast<uint16_t>(shape.page_tokens);
  CodecContext context;
  context.layout = layout_;
  context.layers = shape.layers;
  context.query_heads = shape.query_heads;
  absl::StatusOr<std::unique_ptr<Codec>> codec = registry.CreateForCache(shape.codec, context);
  KV_CHECK(codec.ok());
  codec_ = std::move(*codec);
}

uint64_t ModelSequence::tokens(int layer) const {
  return layers_[layer].k.size() / (size_t(shape_.kv_heads) * shape_.head_dim);
}

void ModelSequence::Append(int layer, const std::vector<uint8_t>& k, const std::vector<uint8_t>& v) {
  Layer& l = layers_[layer];
  const uint64_t first_page = tokens(layer) / shape_.page_tokens;
  const uint64_t lag = shape_.lag_pages;
  if (first_page > lag) l.aged_pages = std::max(l.aged_pages, first_page - lag);
  for (size_t i = 0; i < k.size() / 2; ++i) {
    l.k.push_back(LoadElement(k.data(), shape_.dtype, i));
    l.v.push_back(LoadElement(v.data(), shape_.dtype, i));
  }
  DecodeFullPages(layer);
}

void ModelSequence::DecodeFullPages(int layer) {
  Layer& l = layers_[layer];
  const size_t page_elements = size_t(shape_.page_tokens) * shape_.kv_heads * shape_.head_dim;
  const size_t row = size_t(shape_.kv_heads) * shape_.head_dim;
  const CodecInfo& info = codec_->info();
  std::vector<uint8_t> store(2 * layout_.raw_bytes() + info.encoded_bytes + codec_->encode_workspace_bytes() + 512);
  auto align = [](uint8_t* p) { return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); };
  uint8_t* const raw = align(store.data());
  uint8_t* const encoded = align(raw + layout_.raw_bytes());
  uint8_t* const workspace = align(encoded + info.encoded_bytes);
  while (l.decoded_k.size() + page_elements <= l.k.size()) {
    const size_t base = l.decoded_k.size();
    const uint64_t first_token = base / row;
    for (int side = 0; side < 2; ++side) {
      const std::vector<float>& from = side == 0 ? l.k : l.v;
      for (int h = 0; h < shape_.kv_heads; ++h) {
        for (int t = 0; t < shape_.page_tokens; ++t) {
          for (int c = 0; c < shape_.head_dim; ++c) {
            StoreElement(raw + layout_.raw_offset(side, h, t), shape_.dtype, c,
                         from[base + t * row + size_t(h) * shape_.head_dim + c]);
          }
        }
      }
    }
    l.declined.push_back(false);
    if (!info.identity) {
      EncodeItem item{raw, encoded, uint32_t(layer), first_token};
      codec_->Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace, codec_->encode_workspace_bytes()));
      const DecodeItem decode{encoded, raw, uint32_t(layer)};
      if (!item.declined) codec_->Decode(absl::MakeSpan(&decode, 1));
      l.declined.back() = item.declined;
    }
    for (int side = 0; side < 2; ++side) {
      std::vector<float>& to = side == 0 ? l.decoded_k : l.decoded_v;
      to.resize(base + page_elements);
      for (int h = 0; h < shape_.kv_heads; ++h) {
        for (int t = 0; t < shape_.page_tokens; ++t) {
          for (int c = 0; c < shape_.head_dim; ++c) {
            to[base + t * row + size_t(h) * shape_.head_dim + c] =
                LoadElement(raw + layout_.raw_offset(side, h, t), shape_.dtype, c);
          }
        }
      }
    }
  }
}

uint64_t ModelSequence::AgedByNewest(int layer) const {
  const uint64_t end = tokens(layer), lag = shape_.lag_pages;
  const uint64_t newest_page = end == 0 ? 0 : (end - 1) / shape_.page_tokens;
  return std::max(layers_[layer].aged_pages, newest_page > lag ? newest_page - lag : 0);
}

void ModelSequence::Crop(uint64_t tokens) {
  const size_t elements = tokens * shape_.kv_heads * shape_.head_dim;
  const size_t full = tokens / shape_.page_tokens;
  const size_t full_elements = full * shape_.page_tokens * shape_.kv_heads * shape_.head_dim;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    Layer& l = layers_[layer];
    if (this->tokens(layer) > tokens) l.aged_pages = AgedByNewest(layer);
    l.k.resize(std::min(l.k.size(), elements));
    l.v.resize(std::min(l.v.size(), elements));
    l.decoded_k.resize(std::min(l.decoded_k.size(), full_elements));
    l.decoded_v.resize(std::min(l.decoded_v.size(), full_elements));
    l.declined.resize(std::min(l.declined.size(), full));
    l.aged_pages = std::min<uint64_t>(l.aged_pages, full);
  }
  shared_pages_ = std::min<uint64_t>(shared_pages_, full);
}

uint64_t ModelSequence::encoded_tokens() const {
  if (codec_->info().identity) return 0;
  uint64_t pages = shared_pages_;
  for (const Layer& l : layers_) pages = std::max(pages, l.aged_pages);
  return pages * shape_.page_tokens;
}

uint64_t ModelSequence::crop_limit_tokens() const {
  if (codec_->info().identity) return 0;
  uint64_t pages = shared_pages_;
  for (int layer = 0; layer < shape_.layers; ++layer) pages = std::max(pages, AgedByNewest(layer));
  return pages * shape_.page_tokens;
}

void ModelSequence::MarkShared(uint64_t tokens) {
  shared_pages_ = std::max<uint64_t>(shared_pages_, tokens / shape_.page_tokens);
}

ModelSequence::Output ModelSequence::Attend(int layer, uint64_t position, int tokens,
                                            const std::vector<float>& q) const {
  const Layer& l = layers_[layer];
  const int d = shape_.head_dim;
  const int group = shape_.query_heads / shape_.kv_heads;
  const size_t row = size_t(shape_.kv_heads) * d;
  const double scale = 1 / std::sqrt(double(d));
  Output output;
  output.out.assign(size_t(tokens) * shape_.query_heads * d, 0);
  output.lse.resize(size_t(tokens) * shape_.query_heads);
  std::vector<double> score;
  for (int i = 0; i < tokens; ++i) {
    const uint64_t seen = position + i + 1;
    const uint64_t own_page = (seen - 1) / shape_.page_tokens;
    // Pages below `encoded_pages` are read encoded: older than the lag, aged before, or found by a prefix hit.
    uint64_t encoded_pages = own_page > uint64_t(shape_.lag_pages) ? own_page - shape_.lag_pages : 0;
    encoded_pages = std::max({encoded_pages, shared_pages_, l.aged_pages});
    if (encoded_pages > own_page) {
      // A query in an encoded page sees all of it, or is none. One that stays raw may be seen in part.
      const bool sees_all = seen == (own_page + 1) * shape_.page_tokens;
      KV_CHECK(codec_->info().identity || sees_all || l.declined[own_page]);
      encoded_pages = sees_all ? own_page + 1 : own_page;
    }
    const uint64_t encoded_end = codec_->info().identity ? 0 : encoded_pages * shape_.page_tokens;
    uint64_t encoded_tokens = 0;
    for (uint64_t page = 0; page * shape_.page_tokens < encoded_end; ++page) {
      if (!l.declined[page]) encoded_tokens += shape_.page_tokens;
    }
    output.encoded_pairs += encoded_tokens;
    output.raw_pairs += seen - encoded_tokens;
    for (int h = 0; h < shape_.query_heads; ++h) {
      const size_t head = size_t(h / group) * d;
      const float* const query = &q[(size_t(i) * shape_.query_heads + h) * d];
      score.resize(seen);
      double largest = -INFINITY;
      for (uint64_t t = 0; t < seen; ++t) {
        const float* const k = (t < encoded_end ? l.decoded_k : l.k).data() + t * row + head;
        double s = 0;
        for (int c = 0; c < d; ++c) s += double(query[c]) * k[c];
        score[t] = s * scale;
        largest = std::max(largest, score[t]);
      }
      double sum = 0;
      double* const out = &output.out[(size_t(i) * shape_.query_heads + h) * d];
      for (uint64_t t = 0; t < seen; ++t) {
        const float* const v = (t < encoded_end ? l.decoded_v : l.v).data() + t * row + head;
        const double p = std::exp(score[t] - largest);
        sum += p;
        for (int c = 0; c < d; ++c) out[c] += p * v[c];
      }
      for (int c = 0; c < d; ++c) out[c] /= sum;
      output.lse[size_t(i) * shape_.query_heads + h] = largest + std::log(sum);
    }
  }
  return output;
}

ModelSequence::Rows ModelSequence::Read(int layer, uint64_t position, int tokens) const {
  const Layer& l = layers_[layer];
  const size_t row = size_t(shape_.kv_heads) * shape_.head_dim;
  const uint64_t encoded_pages = codec_->info().identity ? 0 : std::max(l.aged_pages, shared_pages_);
  Rows rows;
  rows.k.resize(tokens * row * DTypeBytes(shape_.dtype));
  rows.v.resize(rows.k.size());
  for (int i = 0; i < tokens; ++i) {
    const uint64_t page = (position + i) / shape_.page_tokens;
    const bool encoded = page < encoded_pages && !l.declined[page];
    rows.encoded_tokens += encoded;
    for (size_t c = 0; c < row; ++c) {
      const size_t at = (position + i) * row + c;
      StoreElement(rows.k.data(), shape_.dtype, i * row + c, encoded ? l.decoded_k[at] : l.k[at]);
      StoreElement(rows.v.data(), shape_.dtype, i * row + c, encoded ? l.decoded_v[at] : l.v[at]);
    }
  }
  return rows;
}

double RelativeError(absl::Span<const float> a, absl::Span<const double> b) {
  KV_CHECK(a.size() == b.size());
  double error = 0, norm = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

double LargestDifference(absl::Span<const float> a, absl::Span<const float> b) {
  KV_CHECK(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(double(a[i]) - b[i]);
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

namespace {

void Add(client::StepResult* to, const client::StepResult& from) {
  if (to == nullptr) return;
  to->encoded_pairs += from.encoded_pairs;
  to->raw_pairs += from.raw_pairs;
}

}  // namespace

absl::StatusOr<std::vector<float>> Feed(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t first,
                                        int tokens, int chunk, client::StepResult* counts) {
  const client::CacheOptions& shape = source.shape;
  const size_t row = size_t(shape.query_heads) * shape.head_dim;
  std::vector<float> all(size_t(shape.layers) * tokens * row);
  for (int done = 0; done < tokens; done += chunk) {
    const int n = std::min(chunk, tokens - done);
    const uint64_t at = first + done;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const std::vector<uint8_t> k = source.K(layer, at, n), v = source.V(layer, at, n);
      const std::vector<float> q = source.Q(layer, at, n);
      float* const out = all.data() + (size_t(layer) * tokens + done) * row;
      const client::StepEntry entry{sequence, at, n};
      client::StepBatch batch;
      batch.layer = layer;
      batch.entries = absl::MakeConstSpan(&entry, 1);
      batch.k = client::TensorView::Inline(k.data(), k.size());
      batch.v = client::TensorView::Inline(v.data(), v.size());
      batch.q = client::TensorView::Inline(q.data(), q.size() * 4);
      batch.out = client::TensorView::Inline(out, n * row * 4);
      KV_ASSIGN_OR_RETURN(const client::StepResult result, cache.Step(batch));
      Add(counts, result);
    }
  }
  return all;
}

std::vector<double> FeedModel(ModelSequence& model, const Source& source, uint64_t first, int tokens, int chunk,
                              client::StepResult* counts) {
  const client::CacheOptions& shape = source.shape;
  const size_t row = size_t(shape.query_heads) * shape.head_dim;
  std::vector<double> all(size_t(shape.layers) * tokens * row);
  for (int done = 0; done < tokens; done += chunk) {
    const int n = std::min(chunk, tokens - done);
    for (int layer = 0; layer < shape.layers; ++layer) {
      const uint64_t at = first + done;
      model.Append(layer, source.K(layer, at, n), source.V(layer, at, n));
      const ModelSequence::Output output = model.Attend(layer, at, n, source.Q(layer, at, n));
      std::copy(output.out.begin(), output.out.end(), all.begin() + (size_t(layer) * tokens + done) * row);
      Add(counts, {output.encoded_pairs, output.raw_pairs});
    }
  }
  return all;
}

absl::Status Load(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t first, int tokens,
                  int chunk) {
  for (int done = 0; done < tokens; done += chunk) {
    const int n = std::min(chunk, tokens - done);
    for (int layer = 0; layer < source.shape.layers; ++layer) {
      const std::vector<uint8_t> k = source.K(layer, first + done, n), v = source.V(layer, first + done, n);
      const client::StepEntry entry{sequence, first + done, n};
      client::StepBatch batch;
      batch.layer = layer;
      batch.entries = absl::MakeConstSpan(&entry, 1);
      batch.k = client::TensorView::Inline(k.data(), k.size());
      batch.v = client::TensorView::Inline(v.data(), v.size());
      KV_RETURN_IF_ERROR(cache.Step(batch).status());
    }
  }
  return absl::OkStatus();
}

void LoadModel(ModelSequence& model, const Source& source, uint64_t first, int tokens, int chunk) {
  for (int done = 0; done < tokens; done += chunk) {
    const int n = std::min(chunk, tokens - done);
    for (int layer = 0; layer < source.shape.layers; ++layer) {
      model.Append(layer, source.K(layer, first + done, n), source.V(layer, first + done, n));
    }
  }
}

absl::StatusOr<std::vector<float>> Ask(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t position,
                                       int tokens) {
  const client::CacheOptions& shape = source.shape;
  const size_t row = size_t(shape.query_heads) * shape.head_dim;
  std::vector<float> all(size_t(shape.layers) * tokens * row);
  for (int layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> q = source.Q(layer, position, tokens);
    const client::StepEntry entry{sequence, position, tokens};
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = absl::MakeConstSpan(&entry, 1);
    batch.q = client::TensorView::Inline(q.data(), q.size() * 4);
    batch.out = client::TensorView::Inline(all.data() + size_t(layer) * tokens * row, tokens * row * 4);
    KV_RETURN_IF_ERROR(cache.Step(batch).status());
  }
  return all;
}

std::vector<double> AskModel(const ModelSequence& model, const Source& source, uint64_t position, int tokens) {
  std::vector<double> all;
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    const ModelSequence::Output output = model.Attend(layer, position, tokens, source.Q(layer, position, tokens));
    all.insert(all.end(), output.out.begin(), output.out.end());
  }
  return all;
}

absl::Status LoadLayer(client::Cache& cache, uint64_t sequence, const Source& source, int layer, uint64_t first,
                       int tokens) {
  const std::vector<uint8_t> k = source.K(layer, first, tokens), v = source.V(layer, first, tokens);
  const client::StepEntry entry{sequence, first, tokens};
  client::StepBatch batch;
  batch.layer = layer;
  batch.entries = {&entry, 1};
  batch.k = client::TensorView::Inline(k.data(), k.size());
  batch.v = client::TensorView::Inline(v.data(), v.size());
  return cache.Step(batch).status();
}

absl::StatusOr<std::vector<float>> AskLayer(client::Cache& cache, uint64_t sequence, const Source& source, int layer,
                                            uint64_t position) {
  const std::vector<float> q = source.Q(layer, position, 1);
  std::vector<float> out(q.size());
  const client::StepEntry entry{sequence, position, 1};
  client::StepBatch batch;
  batch.layer = layer;
  batch.entries = {&entry, 1};
  batch.q = client::TensorView::Inline(q.data(), q.size() * sizeof(float));
  batch.out = client::TensorView::Inline(out.data(), out.size() * sizeof(float));
  KV_RETURN_IF_ERROR(cache.Step(batch).status());
  return out;
}

std::vector<BlockName> Names(const client::Cache& cache, const Source& source, int blocks) {
  const int page_tokens = source.shape.page_tokens;
  std::vector<BlockName> names;
  NameBlocks(cache.description().digest, source.TokenIds(0, uint64_t(blocks) * page_tokens), page_tokens, &names);
  return names;
}

}  // namespace kvmanager::testing
