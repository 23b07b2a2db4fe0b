#include "codecs/calibrate/capture.h"

#include <algorithm>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr uint64_t kTokensMax = uint64_t{1} << 31;
constexpr uint64_t kPageTokens = 64;  // contexts begin with a page

std::string NameOf(int layer, const char* name) { return absl::StrCat("layers.", layer, ".", name); }

absl::StatusOr<DType> DTypeOf(const std::string& name, const Tensor& tensor) {
  if (tensor.dtype == "F16") return DType::kFloat16;
  if (tensor.dtype == "BF16") return DType::kBFloat16;
  if (tensor.dtype == "F32") return DType::kFloat32;
  return InvalidField(absl::StrCat("capture tensor ", name, " dtype"), absl::CHexEscape(tensor.dtype),
                      "F16, BF16 or F32");
}

std::string ShapeText(absl::Span<const uint64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

constexpr const char* kPartNames[] = {"q", "k", "v"};

}  // namespace

absl::StatusOr<const Tensor*> Capture::Find(int layer, const char* name) const {
  const auto found = file_->tensors().find(NameOf(layer, name));
  if (found == file_->tensors().end()) {
    return InvalidField(absl::StrCat("capture tensor ", NameOf(layer, name)), "absent", "present");
  }
  KV_RETURN_IF_ERROR(DTypeOf(found->first, found->second).status());
  return &found->second;
}

absl::StatusOr<std::unique_ptr<Capture>> Capture::Open(const std::string& path) {
  std::unique_ptr<Capture> capture(new Capture);
  KV_ASSIGN_OR_RETURN(capture->file_, Safetensors::Open(path));
  KV_RETURN_IF_ERROR(capture->CheckShapes(path));
  return capture;
}

absl::Status Capture::CheckShapes(const std::string& path) {
  const TensorMetadata& metadata = file_->metadata();
  const auto text = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  model_.model = text("model");
  model_.revision = text("revision");
  if (model_.model.empty()) {
    return InvalidField(absl::StrCat("capture ", path, ": metadata model"), "absent", "the model's name");
  }
  const TensorMap& tensors = file_->tensors();
  while (model_.layers <= kLayersMax && tensors.count(NameOf(model_.layers, "k")) != 0) ++model_.layers;
  if (model_.layers < 1 || model_.layers > kLayersMax) {
    return InvalidField(absl::StrCat("capture ", path, ": layers (tensors layers.0.k, layers.1.k, ...)"), model_.layers,
                        absl::StrCat("1..", kLayersMax));
  }
  has_w_o_ = tensors.count(NameOf(0, "w_o")) != 0;
  const size_t wanted = size_t(model_.layers) * (has_w_o_ ? 4 : 3);
  const auto shape_error = [](const std::string& name, absl::Span<const uint64_t> shape, absl::string_view bound) {
    return InvalidField(absl::StrCat("capture tensor ", name, " shape"), ShapeText(shape), bound);
  };
  for (int layer = 0; layer < model_.layers; ++layer) {
    KV_ASSIGN_OR_RETURN(const Tensor* const q, Find(layer, "q"));
    KV_ASSIGN_OR_RETURN(const Tensor* const k, Find(layer, "k"));
    KV_ASSIGN_OR_RETURN(const Tensor* const v, Find(layer, "v"));
    if (layer == 0) {
      const std::string name = NameOf(0, "k");
      if (k->shape.size() != 3) return shape_error(name, k->shape, "[kv_heads, tokens, head_dim]");
      const uint64_t heads = k->shape[0], d = k->shape[2];
      if (heads < 1 || heads > PageLayout::kKvHeadsMax) {
        return shape_error(name, k->shape, absl::StrCat("of 1..", PageLayout::kKvHeadsMax, " KV heads"));
      }
      if (d < PageLayout::kHeadDimMin || d > PageLayout::kHeadDimMax || d % 16 != 0) {
        return shape_error(name, k->shape,
                           absl::StrCat("of a head_dim that is a multiple of 16 in ", PageLayout::kHeadDimMin, "..",
                                        PageLayout::kHeadDimMax));
      }
      if (k->shape[1] < 1 || k->shape[1] > kTokensMax) return shape_error(name, k->shape, "of at least one token");
      model_.kv_heads = int(heads);
      model_.head_dim = int(d);
      tokens_ = k->shape[1];
      if (q->shape.size() != 3 || q->shape[0] < heads || q->shape[0] % heads != 0 ||
          q->shape[0] > 64 * uint64_t{PageLayout::kKvHeadsMax}) {
        return shape_error(NameOf(0, "q"), q->shape,
                           absl::StrCat("[query_heads, ", tokens_, ",", d, "], query_heads a multiple of ", heads));
      }
      model_.query_heads = int(q->shape[0]);
    }
    const std::vector<uint64_t> q_shape = {uint64_t(model_.query_heads), tokens_, uint64_t(model_.head_dim)};
    const std::vector<uint64_t> kv_shape = {uint64_t(model_.kv_heads), tokens_, uint64_t(model_.head_dim)};
    if (q->shape != q_shape) return shape_error(NameOf(layer, "q"), q->shape, ShapeText(q_shape));
    if (k->shape != kv_shape) return shape_error(NameOf(layer, "k"), k->shape, ShapeText(kv_shape));
    if (v->shape != kv_shape) return shape_error(NameOf(layer, "v"), v->shape, ShapeText(kv_shape));
    if (has_w_o_) {
      KV_ASSIGN_OR_RETURN(const Tensor* const w_o, Find(layer, "w_o"));
      const uint64_t inputs = uint64_t(model_.query_heads) * model_.head_dim;
      if (w_o->shape.size() != 2 || w_o->shape[0] < 1 || w_o->shape[1] != inputs) {
        return shape_error(NameOf(layer, "w_o"), w_o->shape, absl::StrCat("[hidden, ", inputs, "]"));
      }
    }
  }
  if (tensors.size() != wanted) {
    for (const auto& [name, tensor] : tensors) {
      bool known = false;
      for (int layer = 0; layer < model_.layers && !known; ++layer) {
        for (const char* part : {"q", "k", "v", "w_o"})
          known |= name == NameOf(layer, part) && (has_w_o_ || part[0] != 'w');
      }
      if (!known) {
        return InvalidField(absl::StrCat("capture ", path, ": tensor"), absl::CHexEscape(name.substr(0, 80)),
                            absl::StrCat("layers.I.q, .k, .v or .w_o of layers 0..", model_.layers - 1,
                                         ", without gaps, w_o in all layers or none"));
      }
    }
  }
  return ReadWindows(path);
}

absl::Status Capture::ReadWindows(const std::string& path) {
  const auto text = [&](const char* key) {
    const auto found = file_->metadata().find(key);
    return found == file_->metadata().end() ? std::string() : found->second;
  };
  window_ = tokens_;
  if (const std::string windows = text("windows"); !windows.empty()) {
    if (!absl::SimpleAtoi(windows, &window_) || window_ < 1 || window_ > tokens_) {
      return InvalidField(absl::StrCat("capture ", path, ": metadata windows"), absl::CHexEscape(windows.substr(0, 40)),
                          absl::StrCat("1..", tokens_, ", the tokens of one context"));
    }
    if (window_ < tokens_ && window_ % kPageTokens != 0) {
      return InvalidField(absl::StrCat("capture ", path, ": metadata windows"), window_,
                          absl::StrCat("a multiple of ", kPageTokens, ", or ", tokens_, " for one context alone"));
    }
  }
  if (const std::string sinks = text("sinks"); !sinks.empty()) {
    if (!absl::SimpleAtoi(sinks, &sinks_) || sinks_ % kPageTokens != 0 || sinks_ >= window_) {
      return InvalidField(
          absl::StrCat("capture ", path, ": metadata sinks"), absl::CHexEscape(sinks.substr(0, 40)),
          absl::StrCat("a multiple of ", kPageTokens, " below ", window_, ", the tokens of one context"));
    }
  }
  return absl::OkStatus();
}

uint64_t Capture::counted_tokens() const {
  const uint64_t rest = tokens_ % window_;
  return tokens_ / window_ * (window_ - sinks_) + (rest > sinks_ ? rest - sinks_ : 0);
}

void Capture::CopyRows(int layer, Part part, int head, uint64_t first, uint64_t count, float* out,
                       size_t stride) const {
  const absl::StatusOr<const Tensor*> found = Find(layer, kPartNames[static_cast<int>(part)]);
  KV_CHECK(found.ok());
  const Tensor& tensor = **found;
  const DType dtype = *DTypeOf("", tensor);
  const uint64_t tokens = tensor.shape[1], d = tensor.shape[2];
  KV_CHECK(head >= 0 && uint64_t(head) < tensor.shape[0] && first <= tokens && count <= tokens - first && stride >= d);
  for (uint64_t t = 0; t < count; ++t) {
    const uint64_t from = (head * tokens + first + t) * d;
    for (uint64_t c = 0; c < d; ++c) out[t * stride + c] = LoadElement(tensor.bytes.data(), dtype, from + c);
  }
}

std::vector<float> Capture::OutputProjection(int layer) const {
  const absl::StatusOr<const Tensor*> found = Find(layer, "w_o");
  KV_CHECK(found.ok());
  const Tensor& tensor = **found;
  const DType dtype = *DTypeOf("", tensor);
  std::vector<float> w_o(tensor.shape[0] * tensor.shape[1]);
  for (size_t i = 0; i < w_o.size(); ++i) w_o[i] = LoadElement(tensor.bytes.data(), dtype, i);
  return w_o;
}

}  // namespace kvmanager::calibrate
