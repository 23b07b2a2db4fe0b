#include "codecs/million/million_device_codec.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "codecs/million/million_attention_cuda.h"
#include "codecs/million/million_device_format.h"
#include "codecs/million/million_encode_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::million {
namespace {

/// Device memory with what a host array has. cudaFree would wait for every stream of the device.
class Uploaded {
 public:
  Uploaded() = default;
  Uploaded(Uploaded&& from) noexcept : data_(std::exchange(from.data_, nullptr)) {}
  ~Uploaded() {
    if (data_ != nullptr) cudaFreeAsync(data_, nullptr);
  }
  /// false: there is no memory, or a call failed.
  template <typename T>
  bool Copy(const std::vector<T>& from) {
    const size_t bytes = from.size() * sizeof(T);
    if (bytes == 0) return true;
    if (cudaMallocAsync(&data_, bytes, nullptr) == cudaSuccess &&
        cudaMemcpy(data_, from.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess) {
      return true;
    }
    cudaGetLastError();  // the next call that looks would take it for its own
    return false;
  }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class MillionDeviceCodec final : public DeviceCodec {
 public:
  MillionDeviceCodec(const MillionDeviceShape& shape, Uploaded codebooks, Uploaded bytes, Uploaded pairs,
                     const device::AttendKernels* attention)
      : shape_(shape),
        codebooks_(std::move(codebooks)),
        bytes_(std::move(bytes)),
        pairs_(std::move(pairs)),
        attention_(attention) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  const void* attention_data(int layer) const override {
    const MillionPairTables* const pairs = pairs_.as<MillionPairTables>();
    return pairs == nullptr ? nullptr : pairs + size_t(layer) * shape_.kv_heads;
  }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(
        LaunchMillionEncode(shape_, codebooks_.as<uint64_t>(), bytes_.as<uint8_t>(), items, count, declined, stream),
        "encoding MILLION pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(
        LaunchMillionDecode(shape_, codebooks_.as<uint64_t>(), bytes_.as<uint8_t>(), items, count, stream),
        "decoding MILLION pages");
  }

 private:
  const MillionDeviceShape shape_;
  const Uploaded codebooks_, bytes_, pairs_;
  const device::AttendKernels* const attention_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeMillionDeviceCodec(const MillionFormat& format, const MillionTables& tables) {
  const MillionDeviceFormat made = MakeMillionDeviceFormat(format, tables);
  Uploaded codebooks, bytes, pairs;
  if (!codebooks.Copy(made.codebooks) || !bytes.Copy(made.bytes) || !pairs.Copy(made.pairs)) return nullptr;
  return std::make_unique<MillionDeviceCodec>(made.shape, std::move(codebooks), std::move(bytes), std::move(pairs),
                                              MillionAttentionKernels(format));
}

}  // namespace kvmanager::million
