#include "codecs/zack/zack_attention.h"

#include <algorithm>

#include "codecs/raw/raw_attention.h"
#include "codecs/raw/raw_attention_kernel.h"
#include "codecs/zack/rotation.h"

namespace kvmanager::zack {
namespace {

/// Queries come as q left_n, scores are their products with K', and acc is the weighted sum of V'; the softmax scale
/// is the task's, that of head_dim dimensions (papers: ZACK, section 4).
class ZackAttention final : public PageAttention {
 public:
  ZackAttention(const ZackFormat* format, Isa isa) : format_(*format), isa_(isa), kernels_(RawKernelsOf(isa)) {}

  size_t workspace_bytes(int rows) const override { return 0; }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    const ZackHead& head = format_.head(task.layer, task.kv_head);
    RawAttentionArguments a{};
    a.q = task.q;
    a.rows = task.rows;
    a.row_floats = format_.layout.head_dim;
    a.k_dim = head.rank[0];
    a.v_dim = head.rank[1];
    a.page_tokens = format_.layout.page_tokens;
    a.bfloat16 = false;
    a.scale = task.scale;
    a.pages = task.pages.data();
    a.page_count = task.pages.size();
    a.k_offset = head.offset[0];
    a.v_offset = head.offset[1];
    if (!task.next_pages.empty()) {
      const ZackHead& next = format_.head(task.layer, task.next_kv_head);
      a.next_k = task.next_pages.front() + next.offset[0];
      a.next_v = task.next_pages.front() + next.offset[1];
      a.next_k_dim = next.rank[0];
      a.next_v_dim = next.rank[1];
    }
    a.lead_lines = format_.lead_lines[task.layer];
    a.announced = task.announced;
    a.visible = task.visible;
    a.max = state.max;
    a.sum = state.sum;
    a.acc = state.acc;
    kernels_.attend(a);
  }

  size_t head_bytes(int layer, int kv_head) const override { return format_.head_bytes(layer, kv_head); }
  bool maps(int layer) const override { return true; }
  bool folds_output(int layer) const override { return format_.parameters.fold; }

  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    const ZackHead& head = format_.head(layer, kv_head);
    Rotate(rows, q, format_.layout.head_dim, head.query.data(), head.rank[0], mapped);
  }

  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    const ZackHead& head = format_.head(layer, kv_head);
    Rotate(rows, acc, head.rank[1], head.decode[1].data(), format_.layout.head_dim, out);
  }

  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    const ZackHead& head = format_.head(layer, kv_head);
    Rotate(rows, acc, format_.layout.head_dim, head.encode[1].data(), head.rank[1], out);
  }

 private:
  /// Rows of `from` values become rows of `n`; zero up to head_dim.
  void Rotate(int rows, const float* x, int from, const float* factor, int n, float* out) const {
    const int d = format_.layout.head_dim;
    RotateRows(x, d, rows, from, factor, n, out, d, isa_);
    if (n == d) return;
    for (int r = 0; r < rows; ++r) std::fill(out + size_t(r) * d + n, out + size_t(r + 1) * d, 0.0f);
  }

  const ZackFormat& format_;
  const Isa isa_;
  const RawKernels& kernels_;
};

}  // namespace

std::unique_ptr<PageAttention> MakeZackAttention(const ZackFormat* format, Isa isa) {
  return std::make_unique<ZackAttention>(format, isa);
}

}  // namespace kvmanager::zack
