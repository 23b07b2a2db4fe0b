#include "kvmanager/gpu/make_device_codec.h"

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::shared_ptr<const DeviceCodec>> MakeDeviceCodec(const Device* device, DeviceStreams* streams,
                                                                   const Codec& codec, int layers) {
  KV_RETURN_IF_ERROR(device->Use());
  if (codec.rungs() > 1) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec", codec.info().spec,
                      "one without rungs: a ladder is for caches in host memory");
  }
  std::unique_ptr<DeviceCodec> made = codec.NewDeviceCodec();
  for (int layer = 0; layer < layers; ++layer) {
    if (made != nullptr && made->attention(layer) != nullptr) continue;
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "codec", codec.info().spec,
        "one with kernels for a GPU, in pages of 64 tokens with head_dim 64 or 128: raw, pq by codes and without "
        "rebuild, hack, zack, million, zack+hack or zack+million, with the parameters that docs/api.md names (Caches "
        "on a GPU)");
  }
  // Freeing what it has on the device waits for all streams.
  return std::shared_ptr<const DeviceCodec>(made.release(), [streams](const DeviceCodec* gone) {
    streams->Retire(std::shared_ptr<const DeviceCodec>(gone));
  });
}

}  // namespace kvmanager
