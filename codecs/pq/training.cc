#include "codecs/pq/training.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "codecs/calibrate/kmeans.h"
#include "codecs/raw/raw_attention.h"

namespace kvmanager::pq {
namespace {

void AtomicMin(std::atomic<int64_t>& a, int64_t x) {
  for (int64_t now = a.load(); x < now && !a.compare_exchange_weak(now, x);) {
  }
}
void AtomicMax(std::atomic<int64_t>& a, int64_t x) {
  for (int64_t now = a.load(); x > now && !a.compare_exchange_weak(now, x);) {
  }
}

}  // namespace

void LoadSubVectors(const Shape& shape, absl::Span<const uint8_t* const> pages, int head, int sub, uint64_t first,
                    uint64_t count, float* out) {
  const PageLayout& layout = shape.layout;
  const int width = shape.width();
  for (uint64_t t = first; t < first + count; ++t, out += width) {
    const uint8_t* key = pages[t / layout.page_tokens] + layout.raw_offset(0, head, int(t % layout.page_tokens));
    ConvertToFloat(key + size_t(sub) * width * DTypeBytes(layout.dtype), layout.dtype, width, out);
  }
}

Training::Training(std::shared_ptr<const Shape> shape, int layer, uint64_t tokens, uint32_t iterations)
    : shape_(std::move(shape)),
      layer_(layer),
      tokens_(tokens),
      iterations_(iterations),
      codebook_(shape_->layout.kv_heads, shape_->parameters.m, shape_->parameters.centroids(), shape_->width()),
      codes_(shape_->code_rows()) {
  if (!shape_->on_device) codes_.Extend(tokens);
}

uint64_t Training::image_bytes() const {
  const uint64_t centroids = shape_->code_rows() * codebook_.count;
  return centroids * (codebook_.width + 1) * sizeof(float);
}

void Training::WriteImage(uint8_t* to) {
  const size_t centroid_bytes = codebook_.centroids.size() * sizeof(float);
  std::memcpy(to, codebook_.centroids.data(), centroid_bytes);
  std::memcpy(to + centroid_bytes, codebook_.half_norms.data(), codebook_.half_norms.size() * sizeof(float));
  std::vector<float>().swap(codebook_.centroids);
  std::vector<float>().swap(codebook_.half_norms);
}

void Training::RunTask(int task, absl::Span<const uint8_t* const> pages) {
  const SteadyClock clock;
  AtomicMin(first_ns_, clock.NowNs());
  const int head = task / codebook_.m, sub = task % codebook_.m, width = codebook_.width, count = codebook_.count;
  std::vector<float> rows(tokens_ * width), columns(tokens_ * width);
  LoadSubVectors(*shape_, pages, head, sub, 0, tokens_, rows.data());
  for (uint64_t t = 0; t < tokens_; ++t) {
    for (int j = 0; j < width; ++j) columns[j * tokens_ + t] = rows[t * width + j];
  }
  calibrate::KmeansOptions options;
  options.centroids = count;
  options.iterations = int(iterations_);
  options.seed = (uint64_t(layer_) << 32) + uint64_t(task);
  const calibrate::KmeansResult trained = calibrate::Kmeans(columns, width, int(tokens_), options);
  float* centroids = codebook_.centroids_of(head, sub);
  float* half_norms = codebook_.half_norms_of(head, sub);
  for (int c = 0; c < count; ++c) {
    float sum = 0;
    for (int j = 0; j < width; ++j) {
      const float x = trained.centroids[size_t(c) * width + j];
      centroids[size_t(j) * count + c] = x;
      sum += x * x;
    }
    half_norms[c] = sum / 2;
  }
  uint64_t first = 0;
  for (const auto& chunk : codes_.chunks()) {
    const uint64_t n = std::min(CodeChunk::kTokens, tokens_ - first);
    shape_->kernels->nearest(&rows[first * width], n, width, centroids, half_norms, count, chunk->row(task));
    first += n;
  }
  iterations_run_.fetch_add(uint64_t(trained.iterations));
  AtomicMax(last_ns_, clock.NowNs());
}

void Training::Finish() {
  done_ = true;
  shape_->model->AddClustering(tokens_, double(iterations_run_.load()) / tasks(),
                               double(last_ns_.load() - first_ns_.load()) * 1e-9);
}

}  // namespace kvmanager::pq
