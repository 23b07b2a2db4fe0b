#include "codecs/zack_hack/rotated_codec.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "codecs/raw/raw_attention.h"
#include "codecs/zack/rotation.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

constexpr uint16_t kHalfExponent = 0x7c00;
constexpr float kHalfMax = 65504;
constexpr float kBFloat16Max = 0x1.fep127f;

bool AllFinite(const uint16_t* half, size_t count) {
  uint16_t any = 0;
  for (size_t i = 0; i < count; ++i) any |= uint16_t(-int((half[i] & kHalfExponent) == kHalfExponent));
  return any == 0;
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};

/// [d][d] with columns taken in `order`, or as they are; transposed if `transpose`.
std::vector<float> Columns(const float* from, int d, const int32_t* order, bool transpose) {
  std::vector<float> to(size_t(d) * d);
  for (int c = 0; c < d; ++c) {
    const int column = order == nullptr ? c : order[c];
    for (int r = 0; r < d; ++r) to[transpose ? size_t(c) * d + r : size_t(r) * d + c] = from[size_t(r) * d + column];
  }
  return to;
}

}  // namespace

HeadRotation MakeHeadRotation(const Factors& factors, int layer, int head, const int32_t* order) {
  HeadRotation out;
  for (int side = 0; side < 2; ++side) {
    const int32_t* columns = order == nullptr ? nullptr : order + side * factors.d;
    out.encode[side] = Columns(factors.right_of(side, layer, head), factors.d, columns, false);
    out.decode[side] = Columns(factors.left_of(side, layer, head), factors.d, columns, true);
  }
  out.query = Columns(factors.left_of(0, layer, head), factors.d, order, false);
  return out;
}

/// The inner codecs' attention, between two products of head_dim x head_dim.
class RotatedCodec::Attention final : public PageAttention {
 public:
  explicit Attention(const RotatedCodec* codec) : codec_(*codec), isa_(codec->options_.isa) {}

  size_t workspace_bytes(int rows) const override {
    size_t most = 0;
    for (const auto& inner : codec_.inner_) most = std::max(most, inner->attention().workspace_bytes(rows));
    return most;
  }
  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    codec_.inner_[task.layer]->attention().Attend(task, state, workspace);
  }
  int visit_pages_min(int layer) const override { return codec_.inner_[layer]->attention().visit_pages_min(layer); }

  size_t head_bytes(int layer, int kv_head) const override {
    return codec_.inner_[layer]->attention().head_bytes(layer, kv_head);
  }
  bool maps(int layer) const override { return true; }
  absl::string_view space(int layer) const override { return codec_.options_.space; }
  bool folds_output(int layer) const override { return codec_.options_.fold; }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    Product(rows, q, codec_.rotation(layer, kv_head).query, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Product(rows, acc, codec_.rotation(layer, kv_head).decode[1], out);
  }
  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Product(rows, acc, codec_.rotation(layer, kv_head).encode[1], out);
  }

 private:
  void Product(int rows, const float* x, const std::vector<float>& factor, float* out) const {
    const int d = codec_.options_.layout.head_dim;
    RotateRows(x, d, rows, d, factor.data(), d, out, d, isa_);
  }

  const RotatedCodec& codec_;
  const Isa isa_;
};

RotatedCodec::RotatedCodec(RotatedCodecOptions options, std::vector<HeadRotation> heads,
                           std::vector<std::shared_ptr<const Codec>> inner)
    : options_(std::move(options)), heads_(std::move(heads)), inner_(std::move(inner)) {
  const PageLayout& layout = options_.layout;
  KV_CHECK(!inner_.empty() && heads_.size() == inner_.size() * layout.kv_heads);
  PageLayout half = layout;
  half.dtype = DType::kFloat16;
  info_.name = options_.name;
  info_.spec = WithCalibration(options_.spec, options_.calibration);
  if (options_.calibration != nullptr) info_.calibration_digest = options_.calibration->digest();
  info_.version = options_.version;
  uint64_t payload = 0;
  for (size_t layer = 0; layer < inner_.size(); ++layer) {
    const Codec& codec = *inner_[layer];
    KV_CHECK(codec.layout() == half && !codec.attention().maps(int(layer)));
    inner_workspace_bytes_ = std::max(inner_workspace_bytes_, (codec.encode_workspace_bytes() + 63) / 64 * 64);
    info_.layer_bytes.push_back(uint32_t(codec.info().page_bytes(int(layer))));
    info_.encoded_bytes = std::max(info_.encoded_bytes, codec.info().page_bytes(int(layer)));
    payload += codec.info().payload_bytes;
  }
  info_.payload_bytes = (payload + inner_.size() - 1) / inner_.size();
  const std::vector<uint32_t>& bytes = info_.layer_bytes;
  if (std::all_of(bytes.begin(), bytes.end(), [&](uint32_t b) { return b == bytes[0]; })) info_.layer_bytes.clear();
  attention_ = std::make_unique<Attention>(this);
}

RotatedCodec::~RotatedCodec() = default;

bool RotatedCodec::Rotate(const uint8_t* raw, int layer, uint8_t* rotated, float* rows) const {
  const PageLayout& layout = options_.layout;
  const size_t count = size_t{layout.page_tokens} * layout.head_dim;
  for (int h = 0; h < layout.kv_heads; ++h) {
    const HeadRotation& head = rotation(layer, h);
    for (int side = 0; side < 2; ++side) {
      const size_t at = layout.raw_offset(side, h, 0);
      uint16_t* out = reinterpret_cast<uint16_t*>(rotated + at);
      RotateRaw(raw + at, layout.dtype, layout.page_tokens, layout.head_dim, head.encode[side].data(), layout.head_dim,
                rows, options_.isa);
      ConvertFromFloat(rows, DType::kFloat16, count, out, options_.isa);
      if (!AllFinite(out, count)) return false;
    }
  }
  return true;
}

void RotatedCodec::Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const {
  KV_CHECK(workspace.size() >= encode_workspace_bytes());
  uint8_t* rotated = workspace.data() + inner_workspace_bytes_;
  float* rows = reinterpret_cast<float*>(rotated + page_bytes());
  for (EncodeItem& item : items) {
    if (!Rotate(item.raw, int(item.layer), rotated, rows)) {
      std::memset(item.encoded, 0, info_.page_bytes(int(item.layer)));
      item.declined = true;
      continue;
    }
    EncodeItem inner = item;
    inner.raw = rotated;
    inner_[item.layer]->Encode(absl::MakeSpan(&inner, 1), workspace.subspan(0, inner_workspace_bytes_));
    item.declined = inner.declined;
  }
}

void RotatedCodec::Decode(absl::Span<const DecodeItem> items) const {
  const PageLayout& layout = options_.layout;
  const int d = layout.head_dim;
  const float most = layout.dtype == DType::kFloat16 ? kHalfMax : kBFloat16Max;
  const size_t count = size_t{layout.page_tokens} * d;
  const std::unique_ptr<uint8_t, Free> memory(
      static_cast<uint8_t*>(std::aligned_alloc(64, (page_bytes() + rows_bytes() + 63) / 64 * 64)));
  KV_CHECK(memory != nullptr);
  float* rows = reinterpret_cast<float*>(memory.get() + page_bytes());
  for (const DecodeItem& item : items) {
    DecodeItem inner = item;
    inner.raw = memory.get();
    inner_[item.layer]->Decode(absl::MakeConstSpan(&inner, 1));
    for (int h = 0; h < layout.kv_heads; ++h) {
      for (int side = 0; side < 2; ++side) {
        const size_t at = layout.raw_offset(side, h, 0);
        RotateRaw(memory.get() + at, DType::kFloat16, layout.page_tokens, d,
                  rotation(int(item.layer), h).decode[side].data(), d, rows, options_.isa);
        for (size_t i = 0; i < count; ++i) rows[i] = std::clamp(rows[i], -most, most);
        ConvertFromFloat(rows, layout.dtype, count, item.raw + at, options_.isa);
      }
    }
  }
}

absl::Status RotatedCodec::Validate(int layer, absl::Span<const uint8_t> encoded) const {
  return inner_[layer]->Validate(layer, encoded);
}

bool RotatedCodec::OutputFactor(int layer, int kv_head, absl::Span<float> factor) const {
  if (!options_.fold) return false;
  const int d = options_.layout.head_dim;
  KV_CHECK(factor.size() == size_t(d) * d);
  const std::vector<float>& decode = rotation(layer, kv_head).decode[1];
  for (int c = 0; c < d; ++c) {
    for (int r = 0; r < d; ++r) factor[size_t(r) * d + c] = decode[size_t(c) * d + r];
  }
  return true;
}

}  // namespace kvmanager::zack
