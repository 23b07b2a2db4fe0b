#include "examples/engine/observe.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "codecs/builtin.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/registry.h"
#include "examples/engine/local_backend.h"
#include "examples/engine/windows.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {

absl::Status ObserveWindows(const Model& model, absl::Span<const uint8_t> text, const ObserveOptions& options,
                            absl::FunctionRef<absl::Status(const Observation&)> observe,
                            absl::FunctionRef<void(int64_t, int64_t)> progress) {
  constexpr int kPageTokens = ObserveOptions::kPageTokens;
  const ModelConfig& c = model.config();
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> raw, registry.Create("raw", LocalContext(model, kPageTokens)));
  EvaluateOptions windows;
  windows.window = options.window;
  windows.windows = options.windows;
  windows.stride = options.window;
  windows.threads = options.threads;
  LocalBackendOptions backend_options;
  backend_options.rows_max = EvaluateRowsMax(windows, kPageTokens);
  backend_options.threads = options.threads;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<LocalBackend> backend,
                      LocalBackend::Create(&model, raw.get(), backend_options));
  absl::Status observed;
  std::vector<float> k, v;
  backend->set_observer([&](int layer, absl::Span<const KvEntry> entries, const StepBuffers& buffers) {
    if (!observed.ok()) return;
    size_t rows = 0;
    for (const KvEntry& entry : entries) rows += entry.tokens;
    const size_t kv_elements = rows * c.kv_heads * c.head_dim, q_elements = rows * c.query_heads * c.head_dim;
    k.resize(kv_elements);
    v.resize(kv_elements);
    ConvertToFloat(buffers.k, DType::kFloat16, kv_elements, k.data());
    ConvertToFloat(buffers.v, DType::kFloat16, kv_elements, v.data());
    const int first_window = int(entries[0].sequence - LocalBackend::kFirstSequence);
    observed = observe({layer, entries, first_window, absl::MakeConstSpan(buffers.q, q_elements), k, v});
  });
  const std::unique_ptr<WindowStore> store = MakeLocalWindows(backend.get());
  // The protocol of windows wants a last target, which nobody looks at here.
  std::vector<uint8_t> padded(text.begin(), text.end());
  padded.push_back(0);
  KV_RETURN_IF_ERROR(VisitWindows(model, store.get(), padded, windows, kPageTokens, /*visit=*/nullptr, progress));
  return observed;
}

}  // namespace kvmanager::engine
