// A context as a plug-in's entries see it, with what it points to. A value of one call; not copied.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "codecs/abi/kvmanager_codec.h"
#include "codecs/registry.h"
#include "kvmanager/base/aligned_buffer.h"

namespace kvmanager {

/// A struct of the interface with its struct_size, else zeros.
template <typename T>
T SizedStruct() {
  T t = {};
  t.struct_size = sizeof t;
  return t;
}

/// The artifact as a file; empty: there is none.
inline std::string CalibrationFile(const CodecContext& context) {
  if (context.calibration == nullptr) return "";
  const Calibration& from = *context.calibration;
  return SerializeCalibration(from.model(), from.tensors(), from.metadata());
}

/// `given` outlives it.
struct PassedContext {
  PassedContext(const CodecContext& context, const CodecParameters& given) {
    for (const auto& [key, value] : given) parameters.push_back({key.c_str(), value.c_str()});
    passed = SizedStruct<kvmc_context>();
    passed.dtype = context.layout.dtype == DType::kBFloat16 ? KVMC_BFLOAT16 : KVMC_FLOAT16;
    passed.kv_heads = context.layout.kv_heads;
    passed.head_dim = context.layout.head_dim;
    passed.page_tokens = context.layout.page_tokens;
    passed.layers = static_cast<uint32_t>(context.layers);
    passed.query_heads = static_cast<uint32_t>(context.query_heads);
    passed.parameters = parameters.data();
    passed.parameter_count = parameters.size();
    passed.parameter_item_bytes = sizeof(kvmc_parameter);
    const std::string file = CalibrationFile(context);
    if (file.empty()) return;
    calibration = AlignedBuffer(file.size());
    std::memcpy(calibration.data(), file.data(), file.size());
    passed.calibration = calibration.data();
    passed.calibration_bytes = file.size();
  }
  PassedContext(const PassedContext&) = delete;
  PassedContext& operator=(const PassedContext&) = delete;

  std::vector<kvmc_parameter> parameters;
  AlignedBuffer calibration;
  kvmc_context passed = {};
};

}  // namespace kvmanager
