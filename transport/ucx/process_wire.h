// What a daemon and the process in which UCX runs say to one another, a packet at a time over a Unix socket of type
// SEQPACKET. Both are of one program, so packets are structs; the daemon still checks what it is told, since UCX may
// have spoilt the process. Plain values, any thread.
//
//   daemon: SET_UP   process: READY or FAILED, then   daemon: (OPEN READ* RELEASE)*   process: DONE*, one for each READ
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/types/optional.h"
#include "absl/types/span.h"

namespace kvmanager::ucx {

/// Descriptors of the process: the socket, the daemon's staging, and its memory, one behind the other.
inline constexpr int kSocketFd = 3, kStagingFd = 4, kMemoryFd = 5;
inline constexpr size_t kPayloadBytesMax = 16 << 10;

enum class PacketType : uint32_t {
  kSetUp = 1,  // bytes: of staging; offset: of answers; payload: 8 bytes for the size of each memory, then settings
  kOpen,       // source, payload: an address; ticket, memory
  kRead,       // read, source, offset, bytes, place
  kRelease,    // source: nobody reads it any more
  kReady,      // major, minor, ticket; payload: the worker's address
  kFailed,     // payload: why; the process ends
  kDone,       // read; payload: why it failed, or empty
};

struct PacketHead {
  PacketType type = PacketType::kSetUp;
  uint32_t memory = 0;  // index; in SET_UP how many
  uint64_t source = 0;
  uint64_t read = 0;
  uint64_t offset = 0, bytes = 0;  // in the peer's memory
  uint64_t place = 0;              // in staging
  uint32_t major = 0, minor = 0;
  uint8_t ticket[16] = {};
};

struct Packet {
  PacketHead head;
  std::string payload;
};

inline std::string EncodePacket(const Packet& packet) {
  std::string out(sizeof(PacketHead), '\0');
  std::memcpy(out.data(), &packet.head, sizeof(PacketHead));
  return out + packet.payload;
}

/// Nothing if it is none.
inline absl::optional<Packet> ParsePacket(absl::Span<const char> bytes) {
  if (bytes.size() < sizeof(PacketHead) || bytes.size() > sizeof(PacketHead) + kPayloadBytesMax) return absl::nullopt;
  Packet packet;
  std::memcpy(&packet.head, bytes.data(), sizeof(PacketHead));
  if (packet.head.type < PacketType::kSetUp || packet.head.type > PacketType::kDone) return absl::nullopt;
  packet.payload.assign(bytes.begin() + sizeof(PacketHead), bytes.end());
  return packet;
}

}  // namespace kvmanager::ucx
