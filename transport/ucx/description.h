// What a daemon says of its memory to one that reads it through UCX, sealed with the key that both have. UCX has no
// lengths for addresses that it is given and believes what is in them, so none reaches it that no holder of the key has
// made. Plain values, any thread.
//
// Integers are little-endian:
//    0  2  UCX's major version, of the sender     both have the same: UCX promises no more of its addresses
//    2  2  its minor version
//    4  4  address bytes    1..kAddressBytesMax
//    8  4  memory           which of the sender's; 0..kMemoriesMax - 1
//   12  4  zero
//   16  8  bytes of it      1..kMemoryBytesMax
//   24 16  ticket           which whoever reads must show
//   40     the address of the sender's worker
//   then 32 HMAC-SHA-256 of the context and of all before
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager::ucx {

inline constexpr size_t kAddressBytesMax = 8 << 10;
inline constexpr uint32_t kMemoriesMax = 4096;
inline constexpr uint64_t kMemoryBytesMax = uint64_t{1} << 46;
inline constexpr size_t kSealBytes = 32;

/// Random, of one process.
using Ticket = std::array<uint8_t, 16>;

struct Description {
  uint16_t major = 0, minor = 0;
  uint32_t memory = 0;
  uint64_t bytes = 0;
  Ticket ticket = {};
  std::string address;
};

/// REQUIRES: an address of 1..kAddressBytesMax bytes.
std::string Seal(const Description& description, absl::Span<const uint8_t> context, absl::Span<const uint8_t> key);

/// UNAVAILABLE if it was not sealed with this key in this context; INVALID_ARGUMENT if it was, and is still wrong.
absl::StatusOr<Description> Unseal(absl::Span<const uint8_t> sealed, absl::Span<const uint8_t> context,
                                   absl::Span<const uint8_t> key);

}  // namespace kvmanager::ucx
