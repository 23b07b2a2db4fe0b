#include "codecs/decoded_attention.h"

#include <algorithm>
#include <limits>

#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

PageLayout OneHead(PageLayout layout) {
  layout.kv_heads = 1;
  return layout;
}

/// Workspace: [one head's raw page][the decoder's scratch][raw attention's scratch].
class DecodedAttention final : public PageAttention {
 public:
  DecodedAttention(const PageLayout& layout, const HeadDecoder* decoder)
      : head_(OneHead(layout)), decoder_(decoder), raw_(MakeRawAttention(head_)) {}

  size_t workspace_bytes(int rows) const override {
    return AlignUp(head_.raw_bytes()) + AlignUp(decoder_->decode_workspace_bytes()) + raw_->workspace_bytes(rows);
  }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    KV_CHECK(task.visible == nullptr);
    KV_CHECK(workspace.size() >= workspace_bytes(task.rows));
    uint8_t* const raw = workspace.data();
    const absl::Span<uint8_t> scratch =
        workspace.subspan(AlignUp(head_.raw_bytes()), decoder_->decode_workspace_bytes());
    const absl::Span<uint8_t> attention_scratch =
        workspace.subspan(AlignUp(head_.raw_bytes()) + AlignUp(scratch.size()));
    const uint8_t* const page = raw;
    PageAttentionTask one = task;
    one.kv_head = 0;
    one.pages = absl::MakeConstSpan(&page, 1);
    one.next_pages = {};
    one.next_kv_head = 0;
    for (const uint8_t* const encoded : task.pages) {
      if (!decoder_->DecodeHead(task.layer, task.kv_head, encoded, raw, scratch)) {
        SpoilSoftmax(task.rows, head_.head_dim, state);
        return;
      }
      raw_->Attend(one, state, attention_scratch);
    }
    decoder_->OnDecoded(task.pages.size());
  }

 private:
  const PageLayout head_;
  const HeadDecoder* const decoder_;
  const std::unique_ptr<PageAttention> raw_;
};

}  // namespace

std::unique_ptr<PageAttention> MakeDecodedAttention(const PageLayout& layout, const HeadDecoder* decoder) {
  return std::make_unique<DecodedAttention>(layout, decoder);
}

void SpoilSoftmax(int rows, int head_dim, const SoftmaxRows& state) {
  // A merge leaves out rows whose maximum is -infinity; NaN times any weight is NaN.
  std::fill_n(state.max, rows, 0.0f);
  std::fill_n(state.sum, rows, 1.0f);
  std::fill_n(state.acc, size_t(rows) * head_dim, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace kvmanager
