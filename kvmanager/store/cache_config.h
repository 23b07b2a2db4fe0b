// What a cache is: a model's identity, a tenant, and how pages are kept. Its digest is part of every block key, so
// nothing is ever shared between caches that differ in any of this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

struct CacheConfig {
  static constexpr int kLayersMax = 1024;
  static constexpr int kGroupMax = 64;  // query heads per KV head
  static constexpr int kLagPagesMax = 64;
  static constexpr int kHiddenMax = 1 << 17;    // a page of 256 tokens is then what a transport takes as one
  static constexpr size_t kTextBytesMax = 256;  // of each name
  static constexpr size_t kCodecBytesMax = 4096;

  std::string model;               // name, 1..kTextBytesMax bytes
  std::string revision;            // may be empty
  std::string tenant;              // salt: caches of different tenants share nothing, not even slabs
  std::string rope;                // RoPE facts, as the engine writes them: "default:theta=500000"
  std::string calibration_digest;  // hex, empty without one
  int layers = 0;                  // 1..kLayersMax
  int query_heads = 0;             // of this shard: a multiple of layout.kv_heads, G = 1..kGroupMax
  int tensor_parallel_rank = 0;    // 0 .. tensor_parallel_size - 1
  int tensor_parallel_size = 1;    // 1..1024
  PageLayout layout;
  std::string codec = "raw";  // canonical after the store opened it: "hack:k_axis=channel,..."
  int lag_pages = 2;          // 0..kLagPagesMax: newest full pages that are read raw
  int hidden = 0;             // values of an activation, 0..kHiddenMax; 0: no activations are kept (nor on a GPU)

  /// Where its pages are computed on: in host memory, or on the GPU with this ordinal. Not part of the digest: the same
  /// page has the same bytes and the same name everywhere.
  static constexpr int kHost = -1;
  static constexpr int kDeviceMax = 1023;
  int device = kHost;
};

/// Checks everything but the codec. Errors: INVALID_ARGUMENT with field, value and bound.
absl::Status ValidateCacheConfig(const CacheConfig& config);

/// SHA-256 of every field, as lines of "name=value"; `codec_version` is the codec's byte-format version. `hidden` has a
/// line where it is not 0, so that caches without activations have the digests that they had before there were any.
CacheDigest DigestOf(const CacheConfig& config, uint32_t codec_version);

/// What two caches of different digests differ in, by the names of CacheInfo's fields; none for equal ones.
std::vector<const char*> DifferingFields(const CacheConfig& a, const CacheConfig& b);

}  // namespace kvmanager
