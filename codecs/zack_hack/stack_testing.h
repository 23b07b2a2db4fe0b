// Pages, contexts and artifacts for tests of codecs over rotated K and V.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/codec.h"
#include "codecs/cpu_isa.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {

struct FreeMemory {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t[], FreeMemory>;

/// 64-byte aligned, filled with 0xff.
inline Memory MakeMemory(size_t bytes) {
  const size_t size = (bytes + 63) / 64 * 64;
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
  std::memset(data, 0xff, size);
  return Memory(data);
}

inline std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= BestIsa()) isas.push_back(isa);
  }
  return isas;
}

inline CodecContext SyntheticContext(const PageLayout& layout, int layers, int query_heads,
                                     std::vector<std::string> specs = {}) {
  CodecContext context;
  context.layout = layout;
  context.layers = layers;
  context.query_heads = query_heads;
  context.model = "synthetic";
  const CalibrationModel model = {"synthetic", "", layers, layout.kv_heads, query_heads, layout.head_dim};
  context.calibration = SyntheticCalibration(model, 1, std::move(specs));
  return context;
}

/// `context` with tensors of its artifact replaced, or removed where the new ones are empty; and metadata set.
inline CodecContext WithTensors(const CodecContext& context, const TensorMap& changes, const TensorMetadata& set = {}) {
  TensorMap tensors = context.calibration->tensors();
  for (const auto& [name, tensor] : changes) {
    if (tensor.bytes.empty()) {
      tensors.erase(name);
    } else {
      tensors[name] = tensor;
    }
  }
  TensorMetadata metadata = context.calibration->metadata();
  metadata.erase("digest");
  for (const auto& [key, value] : set) metadata[key] = value;
  auto parsed = Calibration::Parse(SerializeCalibration(context.calibration->model(), tensors, metadata), "changed");
  KV_CHECK(parsed.ok());
  CodecContext changed = context;
  changed.calibration = *std::move(parsed);
  return changed;
}

/// `context` with an artifact by which the first 16 rotated channels of K, a hundred times the others, hold most of its
/// energy in every second head.
inline CodecContext WithLoudKeys(const CodecContext& context) {
  const size_t d = context.layout.head_dim, heads = context.layout.kv_heads;
  TensorMap tensors;
  std::vector<float> values[2];
  for (int mode = 0; mode < 2; ++mode) {
    const std::string name = mode == 0 ? "zack_hack.balanced.energy" : "zack_hack.joint.energy";
    const auto energy = context.calibration->Floats(name, {uint64_t(context.layers), heads, 2, d}, "");
    KV_CHECK(energy.ok());
    values[mode].assign(energy->begin(), energy->end());
    for (size_t head = 0; head < size_t(context.layers) * heads; head += 2) {
      for (size_t c = 0; c < 16; ++c) values[mode][head * 2 * d + c] *= 1e4f;
    }
    Tensor tensor = context.calibration->tensors().at(name);
    tensor.bytes = {reinterpret_cast<const uint8_t*>(values[mode].data()), values[mode].size() * sizeof(float)};
    tensors[name] = tensor;
  }
  return WithTensors(context, tensors);
}

/// Values of a normal distribution, with a mean and a spread of its own for each channel.
inline Memory RandomRawPage(const PageLayout& layout, std::mt19937_64& random, float size = 1) {
  std::normal_distribution<float> normal;
  Memory page = MakeMemory(layout.raw_bytes());
  for (int side = 0; side < 2; ++side) {
    for (int h = 0; h < layout.kv_heads; ++h) {
      std::vector<float> mean(layout.head_dim), spread(layout.head_dim);
      for (float& x : mean) x = size * normal(random);
      for (float& x : spread) x = size * std::exp(normal(random));
      for (int t = 0; t < layout.page_tokens; ++t) {
        for (int c = 0; c < layout.head_dim; ++c) {
          StoreElement(page.get() + layout.raw_offset(side, h, t), layout.dtype, c,
                       mean[c] + spread[c] * normal(random));
        }
      }
    }
  }
  return page;
}

struct EncodedPage {
  Memory bytes;
  bool declined = false;
};

inline EncodedPage EncodeOne(const Codec& codec, int layer, const uint8_t* raw, uint64_t first_token = 0) {
  EncodedPage out{MakeMemory(codec.info().page_bytes(layer))};
  const Memory workspace = MakeMemory(codec.encode_workspace_bytes());
  EncodeItem item;
  item.raw = raw;
  item.encoded = out.bytes.get();
  item.layer = uint32_t(layer);
  item.first_token = first_token;
  codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec.encode_workspace_bytes()));
  out.declined = item.declined;
  return out;
}

}  // namespace kvmanager::zack
