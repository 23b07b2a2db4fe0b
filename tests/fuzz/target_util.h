// What several fuzz targets use.
#pragma once

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/cache_config.h"

namespace kvmanager::fuzz {

/// An error says what it is about.
inline void MustExplain(const absl::Status& status) {
  if (!status.ok()) KV_CHECK(!status.message().empty());
}

inline absl::string_view TextOf(absl::Span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline absl::Span<const uint8_t> BytesOf(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

/// A cache of two layers.
inline CacheConfig SmallConfig(const std::string& codec) {
  CacheConfig config;
  config.model = "fuzz";
  config.layers = 2;
  config.query_heads = 4;
  config.layout.kv_heads = 2;
  config.layout.head_dim = 32;
  config.codec = codec;
  return config;
}

/// A message as one flat array, and the other way round: whole words of `input`.
inline std::string Flat(capnp::MessageBuilder& message) {
  const kj::Array<capnp::word> words = capnp::messageToFlatArray(message);
  return std::string(words.asChars().begin(), words.asChars().size());
}
inline kj::Array<capnp::word> WordsOf(absl::Span<const uint8_t> input) {
  kj::Array<capnp::word> words = kj::heapArray<capnp::word>(input.size() / sizeof(capnp::word));
  if (words.size() > 0) std::memcpy(words.begin(), input.data(), words.size() * sizeof(capnp::word));
  return words;
}

/// Writes `input` to a fresh connection, ends it, and waits until the other side has ended it too.
void RunStream(const std::string& address, absl::Span<const uint8_t> input);

}  // namespace kvmanager::fuzz
