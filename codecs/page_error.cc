#include "codecs/page_error.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename T>
using Aligned = std::unique_ptr<T, Free>;

template <typename T>
Aligned<T> Allocate(size_t count) {
  T* const memory = static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64 + 64));
  KV_CHECK(memory != nullptr);
  return Aligned<T>(memory);
}

// Attention of at most `rows_max` rows over one page, with memory of its own.
class OnePage {
 public:
  OnePage(const PageErrorTask& task, int rows_max)
      : task_(task),
        head_dim_(task.codec->layout().head_dim),
        raw_(MakeRawAttention(task.codec->layout())),
        workspace_bytes_(std::max(raw_->workspace_bytes(rows_max), task.codec->attention().workspace_bytes(rows_max))),
        workspace_(Allocate<uint8_t>(workspace_bytes_)),
        max_(rows_max),
        sum_(rows_max),
        acc_(Allocate<float>(size_t(rows_max) * head_dim_)),
        mapped_(Allocate<float>(size_t(rows_max) * head_dim_)),
        factor_(size_t(head_dim_) * head_dim_) {}

  /// out [rows][head_dim], in the model's space.
  void Attend(bool encoded, int kv_head, int rows, const float* q, float* out) {
    const PageAttention& attention = encoded ? task_.codec->attention() : *raw_;
    const bool maps = encoded && attention.maps(task_.layer);
    if (maps) attention.MapQueries(task_.layer, kv_head, rows, q, mapped_.get());
    const uint8_t* const page = encoded ? task_.encoded : task_.raw;
    PageAttentionTask task;
    task.q = maps ? mapped_.get() : q;
    task.rows = rows;
    task.scale = task_.scale > 0 ? task_.scale : 1 / std::sqrt(float(head_dim_));
    task.layer = task_.layer;
    task.kv_head = kv_head;
    task.pages = absl::MakeConstSpan(&page, 1);
    std::fill_n(max_.begin(), rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum_.begin(), rows, 0.0f);
    std::fill_n(acc_.get(), size_t(rows) * head_dim_, 0.0f);
    attention.Attend(task, {max_.data(), sum_.data(), acc_.get()}, {workspace_.get(), workspace_bytes_});
    for (int row = 0; row < rows; ++row) {
      float* const acc = acc_.get() + size_t(row) * head_dim_;
      for (int c = 0; c < head_dim_; ++c) acc[c] /= sum_[row];
    }
    if (!maps) {
      std::copy_n(acc_.get(), size_t(rows) * head_dim_, out);
    } else if (!attention.folds_output(task_.layer)) {
      attention.ExpandOutput(task_.layer, kv_head, rows, acc_.get(), out);
    } else {
      if (!task_.codec->OutputFactor(task_.layer, kv_head, absl::MakeSpan(factor_))) {  // a plug-in's has failed
        std::fill(factor_.begin(), factor_.end(), std::numeric_limits<float>::quiet_NaN());
      }
      for (int row = 0; row < rows; ++row) {
        const float* const acc = acc_.get() + size_t(row) * head_dim_;
        for (int r = 0; r < head_dim_; ++r) {
          float value = 0;
          for (int c = 0; c < head_dim_; ++c) value += factor_[size_t(r) * head_dim_ + c] * acc[c];
          out[size_t(row) * head_dim_ + r] = value;
        }
      }
    }
  }

 private:
  const PageErrorTask& task_;
  const int head_dim_;
  const std::unique_ptr<PageAttention> raw_;
  const size_t workspace_bytes_;
  const Aligned<uint8_t> workspace_;
  std::vector<float> max_, sum_;
  const Aligned<float> acc_, mapped_;
  std::vector<float> factor_;
};

}  // namespace

double RelativePageError(const PageErrorTask& task) {
  const PageLayout& layout = task.codec->layout();
  const int d = layout.head_dim, group = task.query_heads / layout.kv_heads;
  KV_CHECK(!task.codec->info().identity && group >= 1 && task.query_heads % layout.kv_heads == 0);
  KV_CHECK(task.q_tokens >= 1);
  const size_t row_size = size_t(task.query_heads) * d, values = task.q_tokens * row_size;
  // What attention makes of infinity depends on the instructions that it uses.
  if (FindNonFinite(task.q_dtype, static_cast<const uint8_t*>(task.q), values) != values) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto queries = Allocate<float>(task.q_tokens * row_size);
  ConvertToFloat(task.q, task.q_dtype, task.q_tokens * row_size, queries.get());
  const int rows = task.q_tokens * group, rows_max = std::min(rows, PageAttentionTask::kRowsMax);
  OnePage page(task, rows_max);
  const auto q = Allocate<float>(size_t(rows_max) * d), raw = Allocate<float>(size_t(rows_max) * d),
             encoded = Allocate<float>(size_t(rows_max) * d);
  double error = 0, norm = 0;
  for (int kv_head = 0; kv_head < layout.kv_heads; ++kv_head) {
    for (int first = 0; first < rows; first += rows_max) {
      const int count = std::min(rows_max, rows - first);
      for (int i = 0; i < count; ++i) {
        const int token = (first + i) / group, head = kv_head * group + (first + i) % group;
        std::copy_n(queries.get() + token * row_size + size_t(head) * d, d, q.get() + size_t(i) * d);
      }
      page.Attend(false, kv_head, count, q.get(), raw.get());
      page.Attend(true, kv_head, count, q.get(), encoded.get());
      for (size_t i = 0; i < size_t(count) * d; ++i) {
        const double difference = double(encoded.get()[i]) - raw.get()[i];
        error += difference * difference;
        norm += double(raw.get()[i]) * raw.get()[i];
      }
    }
  }
  const double relative = std::sqrt(error / norm);
  return std::isfinite(relative) ? relative : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace kvmanager
