#include "codecs/raw/raw_attention.h"

#include <cstring>

#include "codecs/raw/raw_attention_kernel.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class RawAttention final : public PageAttention {
 public:
  RawAttention(const PageLayout& layout, Isa isa) : layout_(layout), kernels_(RawKernelsOf(isa)) {}

  size_t workspace_bytes(int rows) const override { return 0; }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    RawAttentionArguments a{};
    a.q = task.q;
    a.rows = task.rows;
    a.row_floats = layout_.head_dim;
    a.k_dim = layout_.head_dim;
    a.v_dim = layout_.head_dim;
    a.page_tokens = layout_.page_tokens;
    a.bfloat16 = layout_.dtype == DType::kBFloat16;
    a.scale = task.scale;
    a.pages = task.pages.data();
    a.page_count = task.pages.size();
    a.k_offset = layout_.raw_offset(0, task.kv_head, 0);
    a.v_offset = layout_.raw_offset(1, task.kv_head, 0);
    if (!task.next_pages.empty()) {
      a.next_k = task.next_pages.front() + layout_.raw_offset(0, task.next_kv_head, 0);
      a.next_v = task.next_pages.front() + layout_.raw_offset(1, task.next_kv_head, 0);
      a.next_k_dim = layout_.head_dim;
      a.next_v_dim = layout_.head_dim;
    }
    a.lead_lines = RawLeadLines(layout_.page_tokens, layout_.head_dim, layout_.head_dim);
    a.announced = task.announced;
    a.visible = task.visible;
    a.max = state.max;
    a.sum = state.sum;
    a.acc = state.acc;
    kernels_.attend(a);
  }

 private:
  const PageLayout layout_;
  const RawKernels& kernels_;
};

}  // namespace

const RawKernels& RawKernelsOf(Isa isa) {
  KV_CHECK(isa <= BestIsa());
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kRawKernelsAvx512;
  if (isa == Isa::kAvx2) return kRawKernelsAvx2;
#endif
  return kRawKernelsPortable;
}

std::unique_ptr<PageAttention> MakeRawAttention(const PageLayout& layout, Isa isa) {
  KV_CHECK(layout.dtype != DType::kFloat32 && layout.head_dim % 16 == 0 && layout.head_dim <= PageLayout::kHeadDimMax &&
           layout.page_tokens <= PageLayout::kPageTokensMax);
  return std::make_unique<RawAttention>(layout, isa);
}

void ConvertToFloat(const void* from, DType dtype, size_t count, float* to, Isa isa) {
  const uint16_t* half = static_cast<const uint16_t*>(from);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case DType::kFloat16:
      RawKernelsOf(isa).half_to_float(half, count, to);
      return;
    case DType::kBFloat16:
      RawKernelsOf(isa).bfloat16_to_float(half, count, to);
      return;
  }
}

void ConvertFromFloat(const float* from, DType dtype, size_t count, void* to, Isa isa) {
  uint16_t* half = static_cast<uint16_t*>(to);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case DType::kFloat16:
      RawKernelsOf(isa).float_to_half(from, count, half);
      return;
    case DType::kBFloat16:
      RawKernelsOf(isa).float_to_bfloat16(from, count, half);
      return;
  }
}

}  // namespace kvmanager
