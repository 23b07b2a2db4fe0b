// Tensors under construction: owns their bytes, in the dtypes of an artifact. One thread.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {

class TensorSet {
 public:
  /// A name that is there already is replaced. The elements must be as many as `shape` says.
  void AddFloats(const std::string& name, std::vector<uint64_t> shape, absl::Span<const float> values) {
    std::memcpy(Add(name, "F32", std::move(shape), values.size(), sizeof(float)), values.data(),
                values.size() * sizeof(float));
  }
  void AddIntegers(const std::string& name, std::vector<uint64_t> shape, absl::Span<const int32_t> values) {
    std::memcpy(Add(name, "I32", std::move(shape), values.size(), sizeof(int32_t)), values.data(),
                values.size() * sizeof(int32_t));
  }
  /// Rounded to fp16.
  void AddHalves(const std::string& name, std::vector<uint64_t> shape, absl::Span<const float> values) {
    uint8_t* at = Add(name, "F16", std::move(shape), values.size(), sizeof(uint16_t));
    for (size_t i = 0; i < values.size(); ++i) StoreElement(at, DType::kFloat16, i, values[i]);
  }

  /// Valid until the next Add.
  const TensorMap& tensors() const { return tensors_; }

 private:
  uint8_t* Add(const std::string& name, const char* dtype, std::vector<uint64_t> shape, size_t elements,
               size_t element_bytes) {
    uint64_t wanted = 1;
    for (uint64_t extent : shape) wanted *= extent;
    KV_CHECK(wanted == elements);
    std::vector<uint8_t>& bytes = bytes_[name];
    bytes.resize(elements * element_bytes);
    tensors_[name] = {dtype, std::move(shape), bytes};
    return bytes.data();
  }

  std::map<std::string, std::vector<uint8_t>> bytes_;
  TensorMap tensors_;  // into bytes_
};

}  // namespace kvmanager::calibrate
