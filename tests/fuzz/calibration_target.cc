// Calibration artifacts: as they come, and with the digest that a hostile author would have put right.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/calibration.h"
#include "codecs/codec.h"
#include "codecs/registry.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "tests/fuzz/fuzz_target.h"

namespace kvmanager::fuzz {
namespace {

constexpr const char* kSpecs[] = {
    "million:m=8,bits=4,calibration=x",
    "zack:rate=0.3,calibration=x",
    "zack:mode=joint,rate=0,fold=1,calibration=x",
    "zack+hack:bytes=40,calibration=x",
    "zack+hack:mode=joint,k_bits=2,v_bits=1,allocation=head,calibration=x",
    "zack+million:m=8,bits=4,calibration=x",
    "default:calibration=x",
};
// Larger artifacts are another run's business: this one looks for lies, not for size.
constexpr int kLayersMax = 4, kHeadsMax = 4, kHeadDimMax = 64;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;
Bytes Aligned(size_t bytes) {
  Bytes made(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
  std::memset(made.get(), 0, bytes);
  return made;
}

class OneArtifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return calibration; }
  std::shared_ptr<const Calibration> calibration;
};

class CalibrationTarget final : public FuzzTarget {
 public:
  CalibrationTarget() {
    RegisterBuiltinCodecs(registry_);
    registry_.SetCalibrations(&source_);
  }

  std::vector<std::string> Seeds() override {
    const CalibrationModel model{"m", "", 2, 1, 2, 32};
    const auto made = SyntheticCalibration(model, 3, {"million:m=8,bits=4", "zack+million:m=8,bits=4"});
    return {SerializeCalibration(model, made->tensors(), {}),
            SerializeCalibration(model, {}, {{"note", "nothing was trained"}})};
  }

  void Run(absl::Span<const uint8_t> input) override {
    const std::string bytes(reinterpret_cast<const char*>(input.data()), input.size());
    if (const auto parsed = Calibration::Parse(bytes, "fuzz"); parsed.ok()) {
      Use(*parsed);
    } else {
      KV_CHECK(!parsed.status().message().empty());
    }
    TensorMap tensors;
    TensorMetadata metadata;
    if (!ParseSafetensors(input, "fuzz", &tensors, &metadata).ok()) return;
    metadata["digest"] = CalibrationDigest(tensors, metadata);
    if (const auto parsed = Calibration::Parse(SerializeSafetensors(tensors, metadata), "fuzz"); parsed.ok()) {
      Use(*parsed);
    }
  }

 private:
  void Use(const std::shared_ptr<const Calibration>& calibration) {
    const CalibrationModel& model = calibration->model();
    if (model.layers > kLayersMax || model.kv_heads > kHeadsMax || model.head_dim > kHeadDimMax) return;
    source_.calibration = calibration;
    CodecContext context;
    context.layout.kv_heads = uint16_t(model.kv_heads);
    context.layout.head_dim = uint16_t(model.head_dim);
    context.layout.page_tokens = 64;
    context.layers = model.layers;
    context.query_heads = model.query_heads;
    for (const char* const spec : kSpecs) {
      const absl::StatusOr<std::unique_ptr<Codec>> codec = registry_.Create(spec, context);
      if (codec.ok()) {
        Read(**codec, model.layers - 1, model.kv_heads - 1);
      } else {
        KV_CHECK(!codec.status().message().empty());
      }
    }
  }

  /// Whatever the arrays hold, what is made of them stays inside its buffers, and valid pages are finite.
  static void Read(const Codec& codec, int layer, int kv_head) {
    const PageLayout& layout = codec.layout();
    Bytes raw = Aligned(layout.raw_bytes()), encoded = Aligned(codec.info().encoded_bytes);
    for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) {
      StoreElement(raw.get(), layout.dtype, i, float(int(i * 37 % 101) - 50) / 25);
    }
    const size_t encode_bytes = std::max<size_t>(codec.encode_workspace_bytes(), 64);
    Bytes workspace = Aligned(encode_bytes);
    EncodeItem item{raw.get(), encoded.get(), uint32_t(layer), 0};
    codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), encode_bytes));
    if (item.declined) return;
    KV_CHECK(codec.Validate(layer, absl::MakeConstSpan(encoded.get(), codec.info().page_bytes(layer))).ok());
    const DecodeItem decode{encoded.get(), raw.get(), uint32_t(layer)};
    codec.Decode(absl::MakeConstSpan(&decode, 1));
    const int d = layout.head_dim, rows = 2;
    Bytes q = Aligned(rows * d * 4), mapped = Aligned(rows * d * 4), acc = Aligned(rows * d * 4);
    float max[rows] = {-INFINITY, -INFINITY}, sum[rows] = {0, 0};
    for (int i = 0; i < rows * d; ++i) reinterpret_cast<float*>(q.get())[i] = float(i % 13) / 6 - 1;
    const PageAttention& attention = codec.attention();
    const size_t attend_bytes = std::max<size_t>(attention.workspace_bytes(rows), 64);
    Bytes scratch = Aligned(attend_bytes);
    PageAttentionTask task;
    task.q = reinterpret_cast<const float*>(q.get());
    if (attention.maps(layer)) {
      attention.MapQueries(layer, kv_head, rows, task.q, reinterpret_cast<float*>(mapped.get()));
      task.q = reinterpret_cast<const float*>(mapped.get());
    }
    task.rows = rows;
    task.scale = 0.2f;
    task.layer = layer;
    task.kv_head = kv_head;
    const uint8_t* const pages[1] = {encoded.get()};
    task.pages = pages;
    attention.Attend(task, {max, sum, reinterpret_cast<float*>(acc.get())},
                     absl::MakeSpan(scratch.get(), attend_bytes));
  }

  OneArtifact source_;
  CodecRegistry registry_;
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeCalibrationTarget() { return std::make_unique<CalibrationTarget>(); }

}  // namespace kvmanager::fuzz
