// A codec for tests whose two forms are told apart by what attention gives, and what attention must give.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "codecs/registry.h"
#include "kvmanager/base/half.h"

namespace kvmanager::testing {

/// Pages have the raw layout in both forms; the encoded one has V with the other sign. Attention is exact. A page whose
/// first byte is kUndecodable decodes to NaN.
class FlippingCodec final : public Codec, private PageAttention {
 public:
  static constexpr uint8_t kUndecodable = 0x5a;

  /// flips: else both forms are one.
  FlippingCodec(const PageLayout& layout, bool flips) : layout_(layout) {
    info_.name = info_.spec = flips ? "flipping" : "raw";
    info_.version = 1;
    info_.identity = !flips;
    info_.encoded_bytes = info_.payload_bytes = layout.raw_bytes();
  }
  static void Register(CodecRegistry* registry) {
    registry->Register(
        "flipping", "the other sign of V",
        [](const CodecContext& context, const CodecParameters&) -> absl::StatusOr<std::unique_ptr<Codec>> {
          return std::make_unique<FlippingCodec>(context.layout, true);
        });
  }

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    for (EncodeItem& item : items) Flip(item.raw, item.encoded);
  }
  void Decode(absl::Span<const DecodeItem> items) const override {
    for (const DecodeItem& item : items) {
      std::memcpy(item.raw, item.encoded, layout_.raw_bytes());
      if (item.encoded[0] != kUndecodable) continue;
      for (size_t i = 0; i < layout_.raw_bytes() / 2; ++i) {
        StoreElement(item.raw, layout_.dtype, i, std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return *this; }

 private:
  void Flip(const uint8_t* from, uint8_t* to) const {
    const size_t side = layout_.raw_bytes() / 2;
    std::memcpy(to, from, 2 * side);
    for (size_t i = side + 1; i < 2 * side; i += 2) to[i] ^= 0x80;
  }
  size_t workspace_bytes(int) const override { return 0; }
  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t>) const override {
    const int dim = layout_.head_dim, page_tokens = layout_.page_tokens;
    const auto value = [&](int side, int token, int i) {
      const uint8_t* row =
          task.pages[token / page_tokens] + layout_.raw_offset(side, task.kv_head, token % page_tokens);
      return LoadElement(row, layout_.dtype, i);
    };
    for (int r = 0; r < task.rows; ++r) {
      const int tokens = task.visible == nullptr ? static_cast<int>(task.pages.size()) * page_tokens : task.visible[r];
      for (int t = 0; t < tokens; ++t) {
        float score = 0;
        for (int i = 0; i < dim; ++i) score += task.q[r * dim + i] * value(0, t, i);
        score *= task.scale;
        const float max = std::max(state.max[r], score);
        const float old = std::exp(state.max[r] - max), now = std::exp(score - max);
        state.max[r] = max;
        state.sum[r] = state.sum[r] * old + now;
        for (int i = 0; i < dim; ++i) {
          float& acc = state.acc[r * dim + i];
          acc = acc * old + now * value(1, t, i);
        }
      }
    }
  }

  const PageLayout layout_;
  CodecInfo info_;
};

struct AttentionResult {
  std::vector<float> out, lse;  // [tokens][query_heads][head_dim], [tokens][query_heads]
};

/// Attention of `tokens` queries from `position` on over k and v, [position + tokens][kv_heads][head_dim].
/// encoded(page, own): whether a query on page `own` reads that page encoded.
template <typename Encoded>
AttentionResult ReferenceAttention(const PageLayout& layout, int heads, const std::vector<uint8_t>& k,
                                   const std::vector<uint8_t>& v, uint64_t position, int tokens,
                                   const std::vector<float>& q, Encoded encoded) {
  const int dim = layout.head_dim;
  AttentionResult result;
  for (int row = 0; row < tokens; ++row) {
    const int sees = static_cast<int>(position) + row + 1;
    for (int head = 0; head < heads; ++head) {
      const int kv_head = head / (heads / layout.kv_heads);
      const auto at = [&](int token, int i) { return (size_t(token) * layout.kv_heads + kv_head) * dim + i; };
      std::vector<double> out(dim, 0);
      double sum = 0;
      for (int t = 0; t < sees; ++t) {
        double score = 0;
        for (int i = 0; i < dim; ++i) {
          score += double(q[(size_t(row) * heads + head) * dim + i]) * LoadElement(k.data(), layout.dtype, at(t, i));
        }
        const double weight = std::exp(score / std::sqrt(double(dim)));
        sum += weight;
        const double sign = encoded(t / layout.page_tokens, (sees - 1) / layout.page_tokens) ? -1 : 1;
        for (int i = 0; i < dim; ++i) out[i] += sign * weight * LoadElement(v.data(), layout.dtype, at(t, i));
      }
      for (const double value : out) result.out.push_back(static_cast<float>(value / sum));
      result.lse.push_back(static_cast<float>(std::log(sum)));
    }
  }
  return result;
}

}  // namespace kvmanager::testing
