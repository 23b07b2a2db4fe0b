// Pages of a cache, encoded and decoded in this process.
#include "client/c/page_codec.h"

#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/c/describe.h"
#include "client/c/object.h"
#include "codecs/builtin.h"
#include "codecs/codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/memory/page_hash.h"

namespace kvmanager::client::c {

LocalCodecs::LocalCodecs(const std::string& calibration_dir) {
  RegisterBuiltinCodecs(registry_);
  if (calibration_dir.empty()) return;
  calibrations_ = MakeCalibrationDirectory(calibration_dir);
  registry_.SetCalibrations(calibrations_.get());
}

absl::StatusOr<std::shared_ptr<const Codec>> LocalCodecs::Create(const CacheOptions& cache) const {
  CodecContext context;
  context.layout.dtype = cache.dtype;
  context.layout.kv_heads = uint16_t(cache.kv_heads);  // the daemon has opened the cache: they are in range
  context.layout.head_dim = uint16_t(cache.head_dim);
  context.layout.page_tokens = uint16_t(cache.page_tokens);
  context.layers = cache.layers;
  context.query_heads = cache.query_heads;
  context.model = cache.model;
  context.revision = cache.revision;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry_.Create(cache.codec, context));
  return std::shared_ptr<const Codec>(std::move(codec));  // shared by who encodes or attends, and their kernels
}

absl::StatusOr<uint64_t> CopyPages(const PageCodecObject& object, const uint64_t* from, const uint64_t* bytes,
                                   uint32_t count, uint8_t* to, CUstream_st* stream) {
  uint64_t copies = 0;
  for (uint32_t begin = 0, end = 0; begin < count; begin = end) {
    uint64_t size = bytes[begin], next = AlignedPage(size);
    for (end = begin + 1; end < count && from[end] == from[begin] + next; ++end) {
      size = next + bytes[end];
      next += AlignedPage(bytes[end]);
    }
    const auto* const source = reinterpret_cast<const void*>(from[begin]);
    if (object.on_device) {
      KV_RETURN_IF_ERROR(object.device->EnqueueCopy(stream, to, source, size));
    } else {
      std::memcpy(to, source, size);
    }
    to += next;
    ++copies;
  }
  return copies;
}

namespace {

// The structs of the interface are those that kernels read.
static_assert(sizeof(kvm_encode_item) == sizeof(DeviceEncodeItem) &&
              sizeof(kvm_decode_item) == sizeof(DeviceDecodeItem));
static_assert(offsetof(kvm_encode_item, encoded) == offsetof(DeviceEncodeItem, encoded));
static_assert(offsetof(kvm_encode_item, first_token) == offsetof(DeviceEncodeItem, first_token));
static_assert(offsetof(kvm_encode_item, layer) == offsetof(DeviceEncodeItem, layer));
static_assert(offsetof(kvm_decode_item, raw) == offsetof(DeviceDecodeItem, raw));
static_assert(offsetof(kvm_decode_item, layer) == offsetof(DeviceDecodeItem, layer));

// Layers are the caller's, and index what the codec keeps of each.
template <typename Item>
absl::Status CheckItems(const PageCodecObject& object, const Item* items, uint32_t count) {
  if (object.codec->info().identity) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec", object.codec->info().spec,
                      "one that encodes: pages of this one are stored raw");
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (items[i].layer >= static_cast<uint32_t>(object.layers)) {
      return InvalidField(absl::StrCat("items[", i, "].layer"), items[i].layer, absl::StrCat("below ", object.layers));
    }
  }
  return absl::OkStatus();
}

nlohmann::json DescribePages(const Codec& codec, int layers, bool copies) {
  const CodecInfo& info = codec.info();
  nlohmann::json page_bytes = nlohmann::json::array(), raw_layers = nlohmann::json::array();
  for (int layer = 0; layer < layers; ++layer) {
    page_bytes.push_back(info.page_bytes(layer));
    if (!info.raw_layers.empty()) raw_layers.push_back(bool{info.raw_layers[layer]});
  }
  return {{"raw_bytes", codec.layout().raw_bytes()},
          {"page_bytes", page_bytes},
          {"identity", info.identity},
          {"copies", copies},
          {"sink_tokens", info.sink_tokens},
          {"raw_layers", raw_layers}};
}

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager;             // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client;     // NOLINT
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_create_page_codec(kvm_object* cache, const char* calibration_dir, size_t calibration_dir_bytes, int32_t device,
                          kvm_object** codec) {
  *codec = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * of, Use<CacheObject>(cache));
    const CacheOptions& options = of->handle->description().options;
    auto made = std::make_unique<PageCodecObject>(of->session, std::string(calibration_dir, calibration_dir_bytes),
                                                  options.layers);
    made->digest = of->handle->description().digest;
    KV_ASSIGN_OR_RETURN(made->codec, made->codecs->Create(options));
    if (device >= 0) {
      made->on_device = true;
      auto opened = Device::Open(device);
      made->device_error = opened.status();
      if (opened.ok()) made->device = *std::move(opened);
      if (!made->codec->info().identity) {
        KV_RETURN_IF_ERROR(UseDevice(*made));
        made->device_codec = made->codec->NewDeviceCodec();
        if (made->device_codec == nullptr) {
          return absl::UnavailableError(
              absl::StrCat("codec ", made->codec->info().spec, " has no kernels for a GPU here"));
        }
      }
    } else {
      KV_ASSIGN_OR_RETURN(
          made->workspace,
          AlignedBuffer::Make("workspace", std::max<size_t>(made->codec->encode_workspace_bytes(), 64)));
    }
    Leave(Text(DescribePages(*made->codec, options.layers, made->device_error.ok())));
    *codec = made.release();
    return absl::OkStatus();
  });
}

int kvm_encode_pages(kvm_object* codec, const kvm_encode_item* items, uint32_t count, uint32_t* declined,
                     void* stream) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckItems(object, items, count));
    if (object.device_codec != nullptr) {
      const auto* of_device = reinterpret_cast<const DeviceEncodeItem*>(items);
      return ForEachRun(*object.device_codec, items, count, [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
        return of.Encode(of_device + begin, pages, declined + begin, StreamOf(stream));
      });
    }
    std::vector<EncodeItem> on_cpu(count);
    for (uint32_t i = 0; i < count; ++i) {
      on_cpu[i].raw = static_cast<const uint8_t*>(items[i].raw);
      on_cpu[i].encoded = static_cast<uint8_t*>(items[i].encoded);
      on_cpu[i].layer = items[i].layer;
      on_cpu[i].first_token = items[i].first_token;
    }
    object.codec->Encode(absl::MakeSpan(on_cpu), absl::MakeSpan(object.workspace.data(), object.workspace.size()));
    for (uint32_t i = 0; i < count; ++i) declined[i] = on_cpu[i].declined;
    return absl::OkStatus();
  });
}

int kvm_decode_pages(kvm_object* codec, const kvm_decode_item* items, uint32_t count, void* stream) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckItems(object, items, count));
    if (object.device_codec != nullptr) {
      const auto* of_device = reinterpret_cast<const DeviceDecodeItem*>(items);
      return ForEachRun(*object.device_codec, items, count, [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
        return of.Decode(of_device + begin, pages, StreamOf(stream));
      });
    }
    std::vector<DecodeItem> on_cpu(count);
    for (uint32_t i = 0; i < count; ++i) {
      on_cpu[i] = {static_cast<const uint8_t*>(items[i].encoded), static_cast<uint8_t*>(items[i].raw), items[i].layer};
    }
    object.codec->Decode(on_cpu);
    return absl::OkStatus();
  });
}

int kvm_copy_pages(kvm_object* codec, const uint64_t* from, const uint64_t* bytes, uint32_t count, void* to,
                   void* stream, uint64_t* runs) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    if (object.on_device) KV_RETURN_IF_ERROR(UseDevice(object));
    KV_ASSIGN_OR_RETURN(const uint64_t copies,
                        CopyPages(object, from, bytes, count, static_cast<uint8_t*>(to), StreamOf(stream)));
    if (runs != nullptr) *runs = copies;
    return absl::OkStatus();
  });
}

int kvm_hash_pages(kvm_object* codec, const uint64_t* addresses, const uint64_t* bytes, uint32_t count, uint64_t* out,
                   void* stream) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    if (!object.on_device) {
      for (uint32_t i = 0; i < count; ++i) out[i] = Checksum(reinterpret_cast<const void*>(addresses[i]), bytes[i]);
      return absl::OkStatus();
    }
    KV_RETURN_IF_ERROR(UseDevice(object));
    constexpr uint64_t kBytesMax = std::numeric_limits<uint32_t>::max();
    std::vector<PageBytes> pages(count);
    for (uint32_t i = 0; i < count; ++i) {
      if (bytes[i] > kBytesMax) {
        return InvalidField(absl::StrCat("bytes[", i, "]"), bytes[i], absl::StrCat("at most ", kBytesMax));
      }
      pages[i] = {reinterpret_cast<const uint8_t*>(addresses[i]), static_cast<uint32_t>(bytes[i])};
    }
    return EnqueuePageHashes(pages, out, StreamOf(stream));
  });
}

}  // extern "C"
