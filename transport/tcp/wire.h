// The bytes that two daemons exchange over TCP, version 1. Parsing is pure: bytes in, a struct or INVALID_ARGUMENT out;
// nothing is allocated before a length is checked against its limit. Plain values, any thread.
//
// One connection carries one hand-off. Integers are little-endian. Both sides send HELLO first; then, S the sender and
// R the receiver of pages:
//
//   S: OFFER   R: ANSWER   S: PAGE ... PAGE END   R: DONE
//
// R may send ERROR in place of anything it owes, and at any moment between; S may send CANCEL between two of its
// frames. Both then close. Each wanted page is sent exactly once, by ascending index: so R knows the place of every
// byte after ANSWER, and reads several pages and their headers by one scattered read, straight into the slots. Bytes
// after END, DONE, ERROR or CANCEL: none.
//
// HELLO, 24 bytes:
//    0  8  magic "KVMPAGE\0"
//    8  2  version       the newest that this side speaks
//   10  2  version_min   the oldest; the two sides use min(version, version), which must be at least both version_min
//   12  4  zero
//   16  8  features      bits; both sides use the bits set in both. Version 1 defines none; unknown bits are ignored.
//
// Every other frame begins with a header, 16 bytes:
//    0  1  type          1 OFFER, 2 ANSWER, 3 PAGE, 4 END, 5 DONE, 6 ERROR, 7 CANCEL
//    1  3  zero
//    4  4  page          PAGE: its index in the offer; else zero
//    8  8  body_bytes    what follows
//
// Bodies:
//   OFFER   0  4  manifest_bytes, 1..SendRequest::kManifestBytesMax
//           4  4  page count n, 0..SendRequest::kPagesMax
//           8 16n per page: 8 bytes length, 1..SendRequest::kPageBytesMax; 8 bytes XXH3-64 of its bytes
//           then the manifest
//   ANSWER  0  4  page count, that of the offer
//           4  4  zero
//           8  ceil(n/8)  bitmap, page i is bit i%8 of byte i/8; 1: wanted. Bits past n are zero.
//   PAGE    the page's bytes, as many as the offer said
//   END     0  8  pages sent
//           8  8  bytes of those pages
//   DONE    the ticket, 0..kTicketBytesMax
//   ERROR   0  4  code, as absl::StatusCode, 1..16
//           4 16  four lengths of 4 bytes, each 0..kErrorTextBytesMax: message, and the error's field, value and bound
//           then the four texts
//   CANCEL  empty
//
// A change of meaning raises the version; an addition that old peers need not know takes a feature bit.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/transport.h"

namespace kvmanager::tcp {

inline constexpr char kMagic[8] = {'K', 'V', 'M', 'P', 'A', 'G', 'E', '\0'};
inline constexpr uint16_t kVersion = 1;
inline constexpr uint16_t kVersionMin = 1;
inline constexpr uint64_t kFeatures = 0;

inline constexpr size_t kHelloBytes = 24;
inline constexpr size_t kHeaderBytes = 16;
inline constexpr size_t kOfferFixedBytes = 8;
inline constexpr size_t kPageRecordBytes = 16;
inline constexpr size_t kAnswerFixedBytes = 8;
inline constexpr size_t kEndBytes = 16;
inline constexpr size_t kErrorFixedBytes = 20;
inline constexpr size_t kErrorTextBytesMax = 4096;
inline constexpr size_t kTicketBytesMax = 4096;
inline constexpr size_t kOfferBytesMax =
    kOfferFixedBytes + kPageRecordBytes * SendRequest::kPagesMax + SendRequest::kManifestBytesMax;

enum class FrameType : uint8_t { kOffer = 1, kAnswer, kPage, kEnd, kDone, kError, kCancel };

struct FrameHeader {
  FrameType type = FrameType::kCancel;
  uint32_t page = 0;
  uint64_t body_bytes = 0;
};

struct HelloFrame {
  uint16_t version = kVersion;
  uint16_t version_min = kVersionMin;
  uint64_t features = kFeatures;
};
struct OfferFrame {
  std::string manifest;
  std::vector<uint64_t> page_bytes;      // each 1..SendRequest::kPageBytesMax
  std::vector<uint64_t> page_checksums;  // as many
  uint64_t total_bytes = 0;              // sum of page_bytes; cannot overflow within the limits
};
struct AnswerFrame {
  uint32_t page_count = 0;
  std::vector<uint8_t> bitmap;  // ceil(page_count/8)
  bool wanted(uint32_t page) const { return bitmap[page / 8] >> (page % 8) & 1; }
};
struct PageFrame {  // the header alone: the payload is read where it belongs
  uint32_t page = 0;
  uint64_t bytes = 0;
};
struct EndFrame {
  uint64_t pages = 0;
  uint64_t bytes = 0;
};
struct DoneFrame {
  std::string ticket;
};
struct ErrorFrame {
  absl::Status status;  // never OK; with ErrorDetail; bytes other than printable ASCII became '?'
};
struct CancelFrame {};
using Frame =
    std::variant<HelloFrame, OfferFrame, AnswerFrame, PageFrame, EndFrame, DoneFrame, ErrorFrame, CancelFrame>;

/// The header in `bytes` (kHeaderBytes of them), its body length within the bounds of its type.
absl::StatusOr<FrameHeader> ParseHeader(absl::Span<const uint8_t> bytes);

/// The frame that fills `bytes` exactly: a HELLO, or header and body (of PAGE the header alone). INVALID_ARGUMENT
/// otherwise.
absl::StatusOr<Frame> ParseFrame(absl::Span<const uint8_t> bytes);

/// OK if a peer that said `hello` can be spoken to; UNIMPLEMENTED naming both versions if not.
absl::Status CheckVersion(const HelloFrame& hello);

/// `header` into `out`, kHeaderBytes long.
void PutHeader(const FrameHeader& header, uint8_t* out);

std::string EncodeHello(const HelloFrame& hello = {});
/// REQUIRES: manifest and pages within SendRequest's limits.
std::string EncodeOffer(absl::Span<const SendPage> pages, const std::string& manifest);
std::string EncodeAnswer(const AnswerFrame& answer);
std::string EncodeEnd(const EndFrame& end);
/// REQUIRES: ticket.size() <= kTicketBytesMax.
std::string EncodeDone(const std::string& ticket);
/// Texts longer than kErrorTextBytesMax are cut. REQUIRES: !status.ok().
std::string EncodeError(const absl::Status& status);
std::string EncodeCancel();

}  // namespace kvmanager::tcp
