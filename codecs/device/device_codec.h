// What a codec does on a GPU: attention on its pages, encode and decode.
//
// Codec::NewDeviceCodec() makes one for the calling thread's device; it may outlive the codec. It outlives what it
// put on streams. Immutable; any thread whose device is that one may call it. Nothing here waits for a stream.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "codecs/device/attend_launch.h"
#include "codecs/device/prefill_params.h"

namespace kvmanager {

class DeviceSelection;

struct DeviceEncodeItem {
  const uint8_t* raw;    // a full raw page, finite values only; 16-byte aligned
  uint8_t* encoded;      // CodecInfo::page_bytes(layer), 16-byte aligned; every byte is written
  uint64_t first_token;  // position in the context of the page's first token
  uint32_t layer;        // of the model
};

struct DeviceDecodeItem {
  const uint8_t* encoded;  // 16-byte aligned; any bytes are safe to decode
  uint8_t* raw;            // 16-byte aligned; every byte is written
  uint32_t layer = 0;      // of the model
};

class DeviceCodec {
 public:
  DeviceCodec() = default;
  virtual ~DeviceCodec() = default;
  DeviceCodec(const DeviceCodec&) = delete;
  DeviceCodec& operator=(const DeviceCodec&) = delete;

  /// Of encoded pages of a layer and raw pages beside them; static, and prepare() has yet to be called. nullptr: there
  /// is no kernel for them: encoded pages are decoded first.
  virtual const device::AttendKernels* attention(int layer) const = 0;
  /// What those kernels read beside pages (AttendParams::codec), on the device; lives as long as this object.
  virtual const void* attention_data(int layer) const { return nullptr; }
  /// Of a layer; what it points to lives as long as this object.
  virtual device::HeadCosts head_costs(int layer) const { return {}; }
  /// Of a layer, for many query tokens; as attention() otherwise. Without: attention()'s kernels serve these too.
  virtual device::Prefill prefill(int layer) const { return {}; }

  /// Of a codec whose queries choose what they read (Codec::NewIndex), by kernels of its own; lives as long as this
  /// object. nullptr: all read everything.
  virtual const DeviceSelection* selection() const { return nullptr; }

  /// The codec of a layer's pages, whose Encode and Decode serve them: this one, unless layers have their own.
  virtual const DeviceCodec& of(int layer) const { return *this; }
  /// The page that begins at this position of the context is not encoded, though it could be: it stays raw.
  virtual bool keeps_raw(int layer, uint64_t first_token) const { return false; }

  /// Bytes are those of Codec::Encode. items: [count], pages that do not overlap; declined: [count], out: 1 where a
  /// page cannot be encoded (its bytes are then all zero), else 0. Both in memory that the device reads, until the
  /// stream has passed them. May be captured in a graph. Errors: CUDA's; FAILED_PRECONDITION for an identity codec,
  /// whose pages are never encoded, and where layers have codecs of their own.
  virtual absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                              CUstream_st* stream) const = 0;
  /// As Codec::Decode; the same of `items` and errors.
  virtual absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const = 0;
};

}  // namespace kvmanager
