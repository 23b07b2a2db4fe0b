// The bytes that two daemons exchange over TCP, version 2. Parsing is pure: bytes in, a struct or INVALID_ARGUMENT out;
// nothing is allocated before a length is checked against its limit. Plain values, any thread.
//
// A hand-off has one control connection, which carries messages about pages, and data connections, which carry the
// pages. Integers are little-endian. On every connection both sides first send HELLO (over TCP, where peers must have a
// key, behind the exchange of peer_key.h); on a data connection JOIN may follow before the other side's HELLO has
// arrived. S is the sender of pages and R the receiver:
//
//   control   S: OFFER         R: WAITING* ACCEPT   S: LAST   R: EXTENDED   R: GOT*   R: DONE
//   data      S: JOIN(n)       R: JOINED            S: (PAGES, REGION, MEMORY, LOCAL)*
//   control,
//   resumed   S: JOIN(0)       R: JOINED, then again those of ACCEPT, EXTENDED and DONE that R has sent before
//   probe     S: PROBE         R: LOAD
//
// Both sides send PING when a control connection has been silent: a side that receives nothing for its stall time gives
// up. R may send ERROR in place of any frame, at any moment; S may send CANCEL. Either ends the hand-off. A connection
// that breaks, or that carries bytes whose check fails, is made again within the stall time: JOINED lists the pages
// that have arrived, and S sends the other pages of that connection again. A page may come on any data connection, in
// any order, once. S sends at most ACCEPT's or the last GOT's window of pages ahead of what GOT confirmed.
//
// Data connections are TCP connections or, between daemons of one host and user, local ones: connections of R's Unix
// socket. On a local connection S may pass the memory that holds its pages (REGION) and say where they are (LOCAL), and
// R copies them out of it. If both sides have UCX, S may describe its memory on a TCP connection (MEMORY) and say where
// in it pages are (LOCAL), and R reads them.
//
// HELLO, 24 bytes:
//    0  8  magic "KVMPAGE\0"
//    8  2  version       the newest that this side speaks
//   10  2  version_min   the oldest; the two sides use min(version, version), which must be at least both version_min
//   12  4  check
//   16  4  features      bits; both sides use the bits set in both; unknown bits are ignored. Bit 0: pages of GPUs;
//                        1: this side takes MEMORY
//   20  4  stall_ms      1..kStallMsMax
//
// Every other frame begins with a header, 16 bytes:
//    0  1  type          as FrameType
//    1  3  zero
//    4  4  check
//    8  8  body_bytes    what follows
// A check is the low 32 bits of XXH3-64 of what follows it, the four bytes before it being the seed.
//
// Bodies (a bitmap has page i in bit i%8 of byte i/8, bits past the last page zero):
//   OFFER    0 16  token          random, of S: names the hand-off in JOIN
//           16  4  room_ms        0..SendRequest::kRoomMsMax
//           20  4  manifest_bytes 1..HandOffPart::kManifestBytesMax
//           24  4  runs r         0..HandOffPart::kPagesMax
//           28  4  gpu            1: all pages are in the memory of a GPU, and come on a local connection only; else 0
//           32 16  host           the boot id of S's host if S can share its pages' memory; else zeros
//           48 16  name           of that GPU, only if there is one
//              8r  a run of pages of one size: 4 how many, 4 bytes of each, 1..HandOffPart::kPageBytesMax; in all at
//                  most kPagesMax
//           then the manifest
//   JOIN     0 16  token
//           16  4  connection     0: the control connection; 1..kConnectionsMax
//           20  4  zero
//   WAITING        as ERROR
//   ACCEPT   0  8  window         bytes of pages, at least 1
//            8  4  connections    data connections: at most so many, 1..kConnectionsMax
//           12  4  ticket_bytes   1..HandOffReceiver::kTicketBytesMax
//           16  4  page count n
//           20  4  local_bytes    0..kLocalNameBytesMax; 0: no local connections
//           24     the ticket, then the name of R's abstract Unix socket, then the bitmap of pages that are wanted
//   LAST     0  4  manifest_bytes
//            4  4  runs r         pages of both parts at most kPagesMax
//            8  4  withdrawn w    0..kPagesMax
//           12  4  zero
//           16 8r  runs of pages, as OFFER
//              4w  pages of the header that will not come, ascending
//           then the manifest
//   EXTENDED 0  4  page count m
//            4  4  zero
//            8     bitmap of the trailer's pages that are wanted
//   PAGES    16 bytes for each page, 1..kPagesPerFrameMax of them: 4 page, 4 zero, 8 XXH3-64 of its bytes.
//            The pages' bytes follow, one page after the other; body_bytes and check do not cover them.
//   REGION   0  4  region         names it in LOCAL; 0..kRegionsMax - 1
//            4  4  gpu            1: memory of a GPU; else 0
//            8  8  bytes          its descriptor comes with the header's first byte: a memfd that cannot shrink, or one
//                                 of CUDA's virtual memory management
//           16 16  GPU's name, and 16 of the memory (DeviceSlab), only of a GPU's
//   LOCAL    32 bytes for each page: 4 page, 4 region, 8 offset, 8 XXH3-64, 8 zero. 1..kPagesPerFrameMax of them; of
//            GPUs' pages 1..kDevicePagesPerFrameMax
//   MEMORY   0  4  region         as REGION's
//            4  4  zero
//            8     what R's UCX needs to read it, 1..RemoteMemory::kDescriptionBytesMax (transport/ucx/description.h,
//                  the token being its context)
//   GOT      0  8  window
//            8 4k  pages that have arrived, k in 0..kGotPagesMax
//   JOINED   0  4  page count     of the parts that R knows; 0 before it has accepted
//            4  4  last_known     1: it has read LAST; else 0
//            8     bitmap of pages that have arrived
//   PING, DONE, CANCEL, PROBE     empty
//   ERROR    0  4  code, as absl::StatusCode, 1..16
//            4 16  four lengths of 4 bytes, each 0..kErrorTextBytesMax: message, and the error's field, value and bound
//            then the four texts
//   LOAD     five times 8 bytes: capacity_bytes, free_bytes, waiting_offers, active_transfers, queued_bytes
//
// A change of meaning raises the version; an addition that old peers need not know takes a feature bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/remote_memory.h"
#include "transport/transport.h"

namespace kvmanager::tcp {

inline constexpr char kMagic[8] = {'K', 'V', 'M', 'P', 'A', 'G', 'E', '\0'};
inline constexpr uint16_t kVersion = 2;
inline constexpr uint16_t kVersionMin = 2;
inline constexpr uint32_t kFeatureGpuPages = 1;
inline constexpr uint32_t kFeatureRemoteMemory = 2;
inline constexpr uint32_t kFeatures = kFeatureGpuPages;  // of every daemon

inline constexpr size_t kHelloBytes = 24;
inline constexpr size_t kHeaderBytes = 16;
inline constexpr size_t kPageRecordBytes = 16;
inline constexpr size_t kPagesPerFrameMax = 60;  // with header and records in one write of 64 pieces
inline constexpr size_t kGotPagesMax = 4096;
inline constexpr size_t kLocalRecordBytes = 32;
inline constexpr size_t kDevicePagesPerFrameMax = 2048;
inline constexpr uint64_t kDeviceOffsetAlign = 16;  // bytes: what GPUs copy in one piece
inline constexpr size_t kLocalNameBytesMax = 100;
inline constexpr uint32_t kRegionsMax = 4096;
inline constexpr uint32_t kConnectionsMax = 64;
inline constexpr int64_t kStallMsMax = 3600 * 1000;
inline constexpr size_t kErrorTextBytesMax = 4096;
inline constexpr int kBadPagesMax = 3;  // pages or frames that R takes for changed on their way; one more ends it

/// Names a hand-off between its two sides; nobody else can guess it.
using Token = std::array<uint8_t, 16>;
/// The boot id of a host; zeros: unknown.
using HostId = std::array<uint8_t, 16>;

enum class FrameType : uint8_t {
  kOffer = 1,
  kJoin,
  kWaiting,
  kAccept,
  kLast,
  kExtended,
  kPages,
  kGot,
  kJoined,
  kPing,
  kDone,
  kError,
  kCancel,
  kProbe,
  kLoad,
  kRegion,
  kLocal,
  kMemory,
};

struct FrameHeader {
  FrameType type = FrameType::kPing;
  uint32_t check = 0;
  uint64_t body_bytes = 0;  // within the bounds of its type
};

struct HelloFrame {
  uint16_t version = kVersion;
  uint16_t version_min = kVersionMin;
  uint32_t features = kFeatures;
  uint32_t stall_ms = SendRequest::kStallMsDefault;
};
struct OfferFrame {
  Token token = {};
  int64_t room_ms = 0;
  HostId host = {};
  HandOffPart part;
};
struct JoinFrame {
  Token token = {};
  uint32_t connection = 0;
};
struct WaitingFrame {
  absl::Status why;  // as ErrorFrame's
};
/// A set of pages.
struct PageBitmap {
  PageBitmap() = default;
  explicit PageBitmap(size_t pages) : count(static_cast<uint32_t>(pages)), bits((pages + 7) / 8) {}
  bool has(uint32_t page) const { return page < count && bits[page / 8] >> (page % 8) & 1; }
  void Add(uint32_t page) { bits[page / 8] = static_cast<uint8_t>(bits[page / 8] | 1 << (page % 8)); }
  void Remove(uint32_t page) { bits[page / 8] = static_cast<uint8_t>(bits[page / 8] & ~(1 << (page % 8))); }
  static PageBitmap All(size_t pages) {
    PageBitmap all(pages);
    std::fill(all.bits.begin(), all.bits.end(), uint8_t{0xff});
    if (pages % 8 != 0) all.bits.back() = static_cast<uint8_t>((1 << (pages % 8)) - 1);
    return all;
  }
  /// Calls take(page) for each that is not in it, in order. Mostly none is.
  template <typename Take>
  void ForEachMissing(Take take) const {
    for (size_t i = 0; i < bits.size(); ++i) {
      if (bits[i] == 0xff) continue;
      const auto end = static_cast<uint32_t>(std::min<size_t>(8 * i + 8, count));
      for (auto page = static_cast<uint32_t>(8 * i); page < end; ++page) {
        if (!has(page)) take(page);
      }
    }
  }

  uint32_t count = 0;
  std::vector<uint8_t> bits;  // ceil(count/8)
};
struct AcceptFrame {
  uint64_t window = 1;
  uint32_t connections = 1;
  std::string ticket;
  PageBitmap wanted;
  std::string local_name = {};
};
struct TrailerFrame {
  HandOffPart part;
};
struct ExtendedFrame {
  PageBitmap wanted;
};
struct PageRecord {
  uint32_t page = 0;
  uint64_t checksum = 0;
};
struct PagesFrame {  // without the pages' bytes, which are read where they belong
  std::vector<PageRecord> pages;
};
struct RegionFrame {
  uint32_t region = 0;
  uint64_t bytes = 0;
  GpuName gpu = {};                   // zeros: host memory
  std::array<uint8_t, 16> name = {};  // of a GPU's memory
};
struct MemoryFrame {
  uint32_t region = 0;
  std::string description;
};
struct LocalRecord {
  uint32_t page = 0;
  uint32_t region = 0;
  uint64_t offset = 0;
  uint64_t checksum = 0;
};
struct LocalFrame {
  std::vector<LocalRecord> pages;
};
struct GotFrame {
  uint64_t window = 1;
  std::vector<uint32_t> pages;
};
struct JoinedFrame {
  bool last_known = false;
  PageBitmap arrived;
};
struct PingFrame {};
struct DoneFrame {};
struct ErrorFrame {
  absl::Status status;  // never OK; with ErrorDetail; bytes other than printable ASCII became '?'
};
struct CancelFrame {};
struct ProbeFrame {};
struct LoadFrame {
  ReceiverLoad load;
};
using Frame = std::variant<HelloFrame, OfferFrame, JoinFrame, WaitingFrame, AcceptFrame, TrailerFrame, ExtendedFrame,
                           PagesFrame, GotFrame, JoinedFrame, PingFrame, DoneFrame, ErrorFrame, CancelFrame, ProbeFrame,
                           LoadFrame, RegionFrame, LocalFrame, MemoryFrame>;

const char* FrameTypeName(FrameType type);

/// The header in `bytes` (kHeaderBytes of them), its body length within the bounds of its type. The check can be
/// verified only with the body.
absl::StatusOr<FrameHeader> ParseHeader(absl::Span<const uint8_t> bytes);

/// The frame that fills `bytes` exactly: a HELLO, or header and body. DATA_LOSS if its check does not match, which
/// comes before everything but its lengths; INVALID_ARGUMENT if it is not a good frame.
absl::StatusOr<Frame> ParseFrame(absl::Span<const uint8_t> bytes);

/// OK if a peer that said `hello` can be spoken to; UNIMPLEMENTED naming both versions if not.
absl::Status CheckVersion(const HelloFrame& hello);

/// OK if `part` is within its limits; `pages_before` of a trailer: those of the header.
absl::Status CheckPart(const HandOffPart& part, size_t pages_before);

std::string EncodeHello(const HelloFrame& hello);
/// REQUIRES: the parts passed CheckPart.
std::string EncodeOffer(const Token& token, int64_t room_ms, const HandOffPart& part, const HostId& host = {});
std::string EncodeTrailer(const HandOffPart& part);
std::string EncodeJoin(const JoinFrame& join);
/// Texts longer than kErrorTextBytesMax are cut. REQUIRES: !why.ok().
std::string EncodeWaiting(const absl::Status& why);
std::string EncodeError(const absl::Status& status);
/// REQUIRES: a ticket of 1..kTicketBytesMax bytes.
std::string EncodeAccept(const AcceptFrame& accept);
std::string EncodeExtended(const ExtendedFrame& extended);
/// Header and records into `out`, kHeaderBytes + kPageRecordBytes for each page. REQUIRES: 1..kPagesPerFrameMax pages.
void PutPagesHead(absl::Span<const PageRecord> pages, uint8_t* out);
std::string EncodeRegion(const RegionFrame& region);
/// REQUIRES: a description of 1..RemoteMemory::kDescriptionBytesMax bytes.
std::string EncodeMemory(const MemoryFrame& memory);
/// REQUIRES: 1..kDevicePagesPerFrameMax pages.
std::string EncodeLocal(absl::Span<const LocalRecord> pages);
/// REQUIRES: at most kGotPagesMax pages.
std::string EncodeGot(uint64_t window, absl::Span<const uint32_t> pages);
std::string EncodeJoined(const JoinedFrame& joined);
std::string EncodeLoad(const ReceiverLoad& load);
/// PING, DONE, CANCEL or PROBE.
std::string EncodeEmpty(FrameType type);

}  // namespace kvmanager::tcp
