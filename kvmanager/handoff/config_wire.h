// Between the schema's structs that clients and peers both send (texts, digests, a cache's configuration) and the
// daemon's values. Pure functions; what comes from outside is checked for form here (lengths, enumerants) and for
// meaning by the caller.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache_config.h"

namespace kvmanager {

inline absl::string_view ViewOf(capnp::Text::Reader text) { return absl::string_view(text.cStr(), text.size()); }
inline absl::Span<const uint8_t> BytesOf(capnp::Data::Reader data) { return {data.begin(), data.size()}; }
inline capnp::Data::Reader DataOf(const Digest& digest) {
  return capnp::Data::Reader(digest.bytes.data(), digest.bytes.size());
}
inline capnp::Text::Reader TextOf(const std::string& text) { return capnp::Text::Reader(text.c_str(), text.size()); }

/// INVALID_ARGUMENT for an enumerant that this build does not know.
absl::StatusOr<DType> ReadDType(absl::string_view field, api::DType dtype);

/// Numbers that do not fit the config's types are INVALID_ARGUMENT; the rest is for ValidateCacheConfig.
absl::StatusOr<CacheConfig> ReadCacheConfig(api::CacheConfig::Reader in);
void WriteCacheConfig(const CacheConfig& config, api::CacheConfig::Builder out);

/// 32 bytes, or INVALID_ARGUMENT.
absl::StatusOr<Digest> ReadDigest(absl::string_view field, capnp::Data::Reader data);

}  // namespace kvmanager
