// Formats and pages for tests and benchmarks of ZACK.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codecs/calibrate/synthetic.h"
#include "codecs/zack/zack_format.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {

struct FreeBytes {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], FreeBytes>;

/// 64-byte aligned, filled with fp16 NaN: whoever reads what was never written shows it.
inline Bytes MakeBytes(size_t n) {
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(64, (n + 63) / 64 * 64));
  std::memset(data, 0xff, (n + 63) / 64 * 64);
  return Bytes(data);
}

inline PageLayout MakeLayout(int kv_heads, int head_dim, int page_tokens = 64, DType dtype = DType::kFloat16) {
  PageLayout layout;
  layout.dtype = dtype;
  layout.kv_heads = uint16_t(kv_heads);
  layout.head_dim = uint16_t(head_dim);
  layout.page_tokens = uint16_t(page_tokens);
  return layout;
}

/// The context of a cache, with a synthetic artifact for it.
inline CodecContext MakeContext(const PageLayout& layout, int layers, int query_heads) {
  CodecContext context;
  context.layout = layout;
  context.layers = layers;
  context.query_heads = query_heads;
  CalibrationModel model;
  model.model = context.model = "synthetic";
  model.layers = layers;
  model.kv_heads = layout.kv_heads;
  model.query_heads = query_heads;
  model.head_dim = layout.head_dim;
  context.calibration = SyntheticCalibration(model, 1, {});
  return context;
}

/// Synthetic factors at given ranks [layers][kv_heads][2].
inline ZackFormat MakeFormat(const CodecContext& context, const std::string& mode, bool fold,
                             const std::vector<int32_t>& ranks) {
  ZackParameters parameters;
  parameters.mode = mode;
  parameters.fold = fold;
  const absl::StatusOr<Factors> factors = ReadFactors(context, mode);
  KV_CHECK(factors.ok());
  return LayOut(context.layout, parameters, *factors, ranks);
}

/// A full raw page of normal values.
inline Bytes RandomPage(const PageLayout& layout, std::mt19937_64& random, float std_dev = 1) {
  std::normal_distribution<float> normal(0, std_dev);
  Bytes page = MakeBytes(layout.raw_bytes());
  for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) StoreElement(page.get(), layout.dtype, i, normal(random));
  return page;
}

}  // namespace kvmanager::zack
