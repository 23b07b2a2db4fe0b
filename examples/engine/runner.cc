#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>

#include "examples/engine/model.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

/// Fewer rows than this are not worth another thread's wake-up.
constexpr int kRowsPerThreadMin = 16;

/// y [rows][outputs] = x [rows][inputs] * w^T, w [outputs][inputs].
void Multiply(const float* x, absl::Span<const float> w, float* y, int rows, int inputs, int outputs) {
  if (rows == 1) {
    cblas_sgemv(CblasRowMajor, CblasNoTrans, outputs, inputs, 1, w.data(), inputs, x, 1, 0, y, 1);
  } else {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, outputs, inputs, 1, x, inputs, w.data(), inputs, 0, y,
                outputs);
  }
}

void RmsNorm(const float* x, const std::vector<float>& weight, float eps, float* y, int rows) {
  const int n = int(weight.size());
  for (int r = 0; r < rows; ++r, x += n, y += n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double(x[i]) * x[i];
    const float factor = float(1 / std::sqrt(sum / n + eps));
    for (int i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
  }
}

/// Rotates each of `heads` vectors [head_dim] by the row's angles: channel c pairs with c + head_dim / 2.
void Rope(float* x, int heads, int half_dim, const float* cos, const float* sin) {
  for (int h = 0; h < heads; ++h, x += 2 * half_dim) {
    for (int c = 0; c < half_dim; ++c) {
      const float a = x[c], b = x[c + half_dim];
      x[c] = a * cos[c] - b * sin[c];
      x[c + half_dim] = b * cos[c] + a * sin[c];
    }
  }
}

void Add(float* x, const float* y, size_t n) {
  for (size_t i = 0; i < n; ++i) x[i] += y[i];
}

std::vector<float> InverseFrequencies(const ModelConfig& c) {
  std::vector<float> inverse;
  for (int i = 0; i < c.head_dim / 2; ++i) inverse.push_back(float(std::pow(c.rope_theta, -2.0 * i / c.head_dim)));
  return inverse;
}

void FillAngles(absl::Span<const float> inverse_frequencies, uint64_t position, float* cos, float* sin) {
  for (size_t f = 0; f < inverse_frequencies.size(); ++f) {
    const float angle = float(position) * inverse_frequencies[f];
    cos[f] = std::cos(angle);
    sin[f] = std::sin(angle);
  }
}

}  // namespace

void ProjectKeysValues(const Model& model, int layer, absl::Span<const uint16_t> x, uint64_t position, uint16_t* k,
                       uint16_t* v) {
  const ModelConfig& c = model.config();
  const LayerWeights& w = model.layers()[layer];
  const int tokens = int(x.size()) / c.hidden_size, half_dim = c.head_dim / 2, width = c.kv_heads * c.head_dim;
  const std::vector<float> inverse_frequencies = InverseFrequencies(c);
  std::vector<float> in(x.size()), keys(size_t(tokens) * width), values(keys.size()), cos(half_dim), sin(half_dim);
  for (size_t i = 0; i < in.size(); ++i) in[i] = HalfToFloat(x[i]);
  Multiply(in.data(), w.k, keys.data(), tokens, c.hidden_size, width);
  Multiply(in.data(), w.v, values.data(), tokens, c.hidden_size, width);
  for (int t = 0; t < tokens; ++t) {
    FillAngles(inverse_frequencies, position + t, cos.data(), sin.data());
    Rope(&keys[size_t(t) * width], c.kv_heads, half_dim, cos.data(), sin.data());
  }
  for (size_t i = 0; i < keys.size(); ++i) k[i] = FloatToHalf(keys[i]);
  for (size_t i = 0; i < values.size(); ++i) v[i] = FloatToHalf(values[i]);
}

Runner::Runner(const Model* model, KvBackend* backend, int threads)
    : model_(model),
      backend_(backend),
      buffers_(backend->buffers()),
      inverse_frequencies_(InverseFrequencies(model->config())) {
  const ModelConfig& c = model->config();
  const size_t rows = backend->rows_max();
  for (auto* buffer : {&hidden_, &normed_, &branch_}) buffer->resize(rows * c.hidden_size);
  for (auto* buffer : {&k_, &v_}) buffer->resize(rows * c.kv_heads * c.head_dim);
  for (auto* buffer : {&gate_, &up_}) buffer->resize(rows * c.intermediate_size);
  for (auto* buffer : {&cos_, &sin_}) buffer->resize(rows * c.head_dim / 2);
  openblas_set_num_threads(1);
  if (threads > 1) workers_ = std::make_unique<WorkerPool>(threads - 1);
}

Runner::~Runner() = default;

void Runner::Parallel(int rows, absl::FunctionRef<void(int, int)> work) {
  const int parts = workers_ == nullptr ? 1 : std::clamp(rows / kRowsPerThreadMin, 1, workers_->threads() + 1);
  Mutex mutex;
  std::condition_variable done;
  int left = parts - 1;
  for (int part = 1; part < parts; ++part) {
    workers_->Post(WorkerPool::Priority::kAttend, [&, part] {
      work(rows * part / parts, rows * (part + 1) / parts);
      MutexLock lock(mutex);
      if (--left == 0) done.notify_one();
    });
  }
  work(0, rows / parts);
  MutexLock lock(mutex);
  while (left > 0) lock.Wait(done);
}

void Runner::BeforeAttention(const LayerWeights& w, int begin, int end) {
  const ModelConfig& c = model_->config();
  const int rows = end - begin, half_dim = c.head_dim / 2;
  const size_t q_row = size_t(c.query_heads) * c.head_dim, kv_row = size_t(c.kv_heads) * c.head_dim;
  float* normed = &normed_[size_t(begin) * c.hidden_size];
  float* q = buffers_.q + begin * q_row;
  float* k = &k_[begin * kv_row];
  float* v = &v_[begin * kv_row];
  RmsNorm(&hidden_[size_t(begin) * c.hidden_size], w.input_norm, c.rms_norm_eps, normed, rows);
  if (buffers_.x != nullptr) {
    uint16_t* const x = buffers_.x + size_t(begin) * c.hidden_size;
    for (size_t i = 0; i < size_t(rows) * c.hidden_size; ++i) {
      x[i] = FloatToHalf(normed[i]);
      normed[i] = HalfToFloat(x[i]);
    }
  }
  Multiply(normed, w.q, q, rows, c.hidden_size, int(q_row));
  Multiply(normed, w.k, k, rows, c.hidden_size, int(kv_row));
  Multiply(normed, w.v, v, rows, c.hidden_size, int(kv_row));
  for (int r = 0; r < rows; ++r) {
    const size_t angle = size_t(begin + r) * half_dim;
    Rope(q + r * q_row, c.query_heads, half_dim, &cos_[angle], &sin_[angle]);
    Rope(k + r * kv_row, c.kv_heads, half_dim, &cos_[angle], &sin_[angle]);
  }
  for (size_t i = 0; i < rows * kv_row; ++i) buffers_.k[begin * kv_row + i] = FloatToHalf(k[i]);
  for (size_t i = 0; i < rows * kv_row; ++i) buffers_.v[begin * kv_row + i] = FloatToHalf(v[i]);
}

void Runner::AfterAttention(int layer, int begin, int end) {
  const ModelConfig& c = model_->config();
  const LayerWeights& w = model_->layers()[layer];
  const absl::Span<const float> folded = backend_->OutputWeights(layer);
  const int rows = end - begin, q_row = c.query_heads * c.head_dim;
  const size_t at = size_t(begin) * c.hidden_size, inner_at = size_t(begin) * c.intermediate_size;
  Multiply(buffers_.out + size_t(begin) * q_row, folded.empty() ? absl::MakeConstSpan(w.o) : folded, &branch_[at], rows,
           q_row, c.hidden_size);
  Add(&hidden_[at], &branch_[at], size_t(rows) * c.hidden_size);
  RmsNorm(&hidden_[at], w.post_norm, c.rms_norm_eps, &normed_[at], rows);
  Multiply(&normed_[at], w.gate, &gate_[inner_at], rows, c.hidden_size, c.intermediate_size);
  Multiply(&normed_[at], w.up, &up_[inner_at], rows, c.hidden_size, c.intermediate_size);
  for (size_t i = inner_at; i < inner_at + size_t(rows) * c.intermediate_size; ++i)
    gate_[i] *= up_[i] / (1 + std::exp(-gate_[i]));
  Multiply(&gate_[inner_at], w.down, &branch_[at], rows, c.intermediate_size, c.hidden_size);
  Add(&hidden_[at], &branch_[at], size_t(rows) * c.hidden_size);
}

absl::Status Runner::Step(absl::Span<const KvEntry> entries, absl::Span<const uint32_t> tokens, Logits which,
                          std::vector<float>* logits) {
  const ModelConfig& c = model_->config();
  const int half_dim = c.head_dim / 2;
  int64_t rows = 0;
  for (const KvEntry& entry : entries) {
    if (entry.tokens < 1) return InvalidField("tokens of an entry", entry.tokens, "at least 1");
    rows += entry.tokens;
  }
  if (rows < 1 || rows > backend_->rows_max())
    return InvalidField("rows of a step", rows, absl::StrCat("1..", backend_->rows_max()));
  if (rows != int64_t(tokens.size()))
    return InvalidField("token ids of a step", tokens.size(), absl::StrCat(rows, " (its rows)"));
  for (uint32_t token : tokens) {
    if (token >= uint32_t(c.vocab_size))
      return InvalidField("token id", token, absl::StrCat("below vocab_size ", c.vocab_size));
  }

  int row = 0;
  for (const KvEntry& entry : entries) {
    for (int i = 0; i < entry.tokens; ++i, ++row) {
      FillAngles(inverse_frequencies_, entry.position + i, &cos_[size_t(row) * half_dim],
                 &sin_[size_t(row) * half_dim]);
      std::copy_n(&model_->embeddings()[size_t(tokens[row]) * c.hidden_size], c.hidden_size,
                  &hidden_[size_t(row) * c.hidden_size]);
    }
  }
  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& w = model_->layers()[layer];
    Parallel(row, [&](int begin, int end) { BeforeAttention(w, begin, end); });
    KV_RETURN_IF_ERROR(backend_->AppendAndAttend(layer, entries));
    Parallel(row, [&](int begin, int end) { AfterAttention(layer, begin, end); });
  }
  if (which == Logits::kNone) return absl::OkStatus();

  int wanted = row;
  if (which == Logits::kLast) {
    wanted = 0;
    int last = -1;
    for (const KvEntry& entry : entries) {
      last += entry.tokens;
      std::copy_n(&hidden_[size_t(last) * c.hidden_size], c.hidden_size, &hidden_[size_t(wanted++) * c.hidden_size]);
    }
  }
  logits->resize(size_t(wanted) * c.vocab_size);
  Parallel(wanted, [&](int begin, int end) {
    const size_t at = size_t(begin) * c.hidden_size;
    RmsNorm(&hidden_[at], model_->final_norm(), c.rms_norm_eps, &normed_[at], end - begin);
    Multiply(&normed_[at], model_->head(), logits->data() + size_t(begin) * c.vocab_size, end - begin, c.hidden_size,
             c.vocab_size);
  });
  return absl::OkStatus();
}

}  // namespace kvmanager::engine
