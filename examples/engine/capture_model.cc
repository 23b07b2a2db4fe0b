#include "examples/engine/capture_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/engine/observe.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

constexpr int kPageTokens = ObserveOptions::kPageTokens;

int ContextTokens(const CaptureOptions& options) { return int(std::min<int64_t>(options.window, options.tokens)); }

uint64_t TensorBytes(const ModelConfig& c, const CaptureOptions& options) {
  const uint64_t q = uint64_t(c.query_heads) * c.head_dim, kv = uint64_t(c.kv_heads) * c.head_dim;
  const uint64_t elements =
      uint64_t(options.tokens) * (q + 2 * kv) + (options.output_projection ? c.hidden_size * q : 0);
  return c.layers * elements * DTypeBytes(options.dtype);
}

/// The tensors of a capture, which rows come into by token.
class Tensors {
 public:
  explicit Tensors(DType dtype) : dtype_(dtype) {}

  void Add(const std::string& name, std::vector<uint64_t> shape) {
    uint64_t elements = 1;
    for (const uint64_t extent : shape) elements *= extent;
    std::vector<uint8_t>& bytes = bytes_[name];
    bytes.resize(elements * DTypeBytes(dtype_));
    tensors_[name] = {dtype_ == DType::kFloat16 ? "F16" : "F32", std::move(shape), bytes};
  }

  /// Elements [at, at + values) of a tensor. Errors: INVALID_ARGUMENT for one that is not finite in the file.
  absl::Status Store(const std::string& name, uint64_t at, absl::Span<const float> values) {
    uint8_t* const to = bytes_.at(name).data();
    for (size_t i = 0; i < values.size(); ++i) {
      StoreElement(to, dtype_, at + i, values[i]);
      if (!std::isfinite(LoadElement(to, dtype_, at + i))) {
        return InvalidField(
            absl::StrCat("an element of ", name), values[i],
            dtype_ == DType::kFloat16 && std::isfinite(values[i]) ? "finite in fp16 (--dtype f32 takes it)" : "finite");
      }
    }
    return absl::OkStatus();
  }

  const TensorMap& tensors() const { return tensors_; }

 private:
  const DType dtype_;
  std::map<std::string, std::vector<uint8_t>> bytes_;
  TensorMap tensors_;
};

std::string NameOf(int layer, const char* part) { return absl::StrCat("layers.", layer, ".", part); }

}  // namespace

absl::Status CheckCaptureOptions(const CaptureOptions& options) {
  if (options.dtype != DType::kFloat16 && options.dtype != DType::kFloat32) {
    return InvalidField("dtype", "bfloat16", "float16 or float32");
  }
  if (options.tokens < kPageTokens || options.tokens > CaptureOptions::kTokensMax) {
    return InvalidField("tokens", options.tokens,
                        absl::StrCat(kPageTokens, "..", CaptureOptions::kTokensMax, ", a page at least"));
  }
  if (options.window < kPageTokens || options.window % kPageTokens != 0) {
    return InvalidField("window", options.window,
                        absl::StrCat("a multiple of ", kPageTokens, ", the tokens of a page"));
  }
  if (options.tokens > options.window && options.tokens % options.window != 0) {
    return InvalidField("tokens", options.tokens,
                        absl::StrCat("at most ", options.window, ", those of one window, or a multiple of them"));
  }
  return absl::OkStatus();
}

absl::Status CheckCapture(const ModelConfig& config, absl::Span<const uint8_t> text, const CaptureOptions& options) {
  KV_RETURN_IF_ERROR(CheckCaptureOptions(options));
  if (text.size() < uint64_t(options.tokens)) {
    return InvalidField("text bytes", text.size(),
                        absl::StrCat("at least ", options.tokens, ", the tokens to capture"));
  }
  if (const uint64_t bytes = TensorBytes(config, options); bytes > CaptureOptions::kBytesMax) {
    return InvalidField("bytes of the capture", bytes,
                        absl::StrCat("at most ", CaptureOptions::kBytesMax, ": fewer tokens, or --dtype f16"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CaptureModel(const Model& model, absl::Span<const uint8_t> text,
                                         const CaptureOptions& options,
                                         absl::FunctionRef<void(int64_t, int64_t)> progress) {
  const ModelConfig& c = model.config();
  KV_RETURN_IF_ERROR(CheckCapture(c, text, options));
  const uint64_t tokens = options.tokens, d = c.head_dim, query_heads = c.query_heads, kv_heads = c.kv_heads;
  ObserveOptions windows;
  windows.window = ContextTokens(options);
  windows.windows = int(options.tokens / windows.window);
  windows.threads = options.threads;
  Tensors tensors(options.dtype);
  for (int layer = 0; layer < c.layers; ++layer) {
    tensors.Add(NameOf(layer, "q"), {query_heads, tokens, d});
    tensors.Add(NameOf(layer, "k"), {kv_heads, tokens, d});
    tensors.Add(NameOf(layer, "v"), {kv_heads, tokens, d});
    if (!options.output_projection) continue;
    tensors.Add(NameOf(layer, "w_o"), {uint64_t(c.hidden_size), query_heads * d});
    KV_RETURN_IF_ERROR(tensors.Store(NameOf(layer, "w_o"), 0, model.layers()[layer].o));
  }
  const auto store = [&](const Observation& seen) -> absl::Status {
    const struct {
      const char* part;
      absl::Span<const float> rows;
      uint64_t heads;
    } parts[] = {{"q", seen.q, query_heads}, {"k", seen.k, kv_heads}, {"v", seen.v, kv_heads}};
    for (const auto& [part, rows, heads] : parts) {
      const std::string name = NameOf(seen.layer, part);
      size_t row = 0;
      for (size_t i = 0; i < seen.entries.size(); ++i) {
        const uint64_t first = (seen.first_window + i) * windows.window + seen.entries[i].position;
        for (int t = 0; t < seen.entries[i].tokens; ++t, ++row) {
          for (uint64_t head = 0; head < heads; ++head) {
            KV_RETURN_IF_ERROR(
                tensors.Store(name, (head * tokens + first + t) * d, rows.subspan((row * heads + head) * d, d)));
          }
        }
      }
    }
    return absl::OkStatus();
  };
  KV_RETURN_IF_ERROR(ObserveWindows(model, text.first(tokens), windows, store, progress));
  return SerializeSafetensors(
      tensors.tensors(), {{"model", c.name}, {"revision", model.digest()}, {"windows", absl::StrCat(windows.window)}});
}

}  // namespace kvmanager::engine
