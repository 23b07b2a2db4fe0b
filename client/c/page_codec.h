// A cache's codec in this process: what stands behind kvm_create_page_codec's object.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/c/object.h"
#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/paged_copy.h"

namespace kvmanager::client::c {

struct PageCodecObject final : kvm_object {
  static constexpr Kind kKind = Kind::kPageCodec;
  PageCodecObject(std::shared_ptr<Session> of, const std::string& calibration_dir, int layers_of_cache)
      : kvm_object(kKind, std::move(of)), layers(layers_of_cache), codecs(std::in_place, calibration_dir) {}
  void Drop() override {
    device_codec.reset();
    device.reset();
    codec.reset();
    codecs.reset();
  }

  const int layers;
  CacheDigest digest;  // of the cache that it was made for
  std::optional<LocalCodecs> codecs;
  std::shared_ptr<const Codec> codec;
  AlignedBuffer workspace;                    // of the CPU
  bool on_device = false;                     // else the CPU
  std::unique_ptr<Device> device;             // nullptr: the CPU, or device_error says why
  absl::Status device_error;                  // of a codec with one form
  std::unique_ptr<DeviceCodec> device_codec;  // nullptr: the CPU, or a codec with one form
  PagedShape paged;                           // of the engine's caches; no layers: they are not known
  const PagedLayer* paged_layers = nullptr;   // the caller's
};

constexpr uint64_t kPageAlign = 64;  // api/kvmanager.capnp, BlocksRequest

inline uint64_t AlignedPage(uint64_t bytes) { return (bytes + kPageAlign - 1) / kPageAlign * kPageAlign; }

/// Of a page of `layer` as it is stored: raw, or in the codec's other form.
inline uint64_t StoredBytes(const PageCodecObject& object, bool raw, uint32_t layer) {
  return raw ? object.codec->layout().raw_bytes() : object.codec->info().page_bytes(static_cast<int>(layer));
}

/// Calls `f` with the object that a caller of the interface named.
template <typename F>
int AskCodec(kvm_object* object, F f) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(PageCodecObject * used, Use<PageCodecObject>(object));
    return f(*used);
  });
}

inline CUstream_st* StreamOf(void* stream) { return static_cast<CUstream_st*>(stream); }

/// Makes the codec's GPU the thread's.
inline absl::Status UseDevice(const PageCodecObject& object) {
  KV_RETURN_IF_ERROR(object.device_error);
  return object.device->Use();
}

/// Calls `launch` for each run of items whose layers have one codec.
template <typename Item, typename Launch>
absl::Status ForEachRun(const DeviceCodec& codec, const Item* items, uint32_t count, Launch launch) {
  for (uint32_t begin = 0, end = 0; begin < count; begin = end) {
    const DeviceCodec& of = codec.of(static_cast<int>(items[begin].layer));
    while (end < count && &codec.of(static_cast<int>(items[end].layer)) == &of) ++end;
    KV_RETURN_IF_ERROR(launch(of, begin, end - begin));
  }
  return absl::OkStatus();
}

/// Copies pages from host memory to `to`, one behind the other, each from the next multiple of kPageAlign on; those
/// that lie so already at once. Returns the number of copies.
absl::StatusOr<uint64_t> CopyPages(const PageCodecObject& object, const uint64_t* from, const uint64_t* bytes,
                                   uint32_t count, uint8_t* to, CUstream_st* stream);

}  // namespace kvmanager::client::c
