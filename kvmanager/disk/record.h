// The bytes of one block in a segment file: a header that says what the block is, and its pages.
//
// Pure functions; any thread. The format, version 1, integers little-endian:
//
//   offset     bytes  what
//   0          8      "KVMBLOCK"
//   8          4      version: 1
//   12         4      header bytes: 136 + 16 * pages, rounded up to 64
//   16         32     cache digest
//   48         32     block key
//   80         32     token digest
//   112        4      index: place in its sequence
//   116        4      tokens of a block
//   120        4      pages: 1..kDiskPagesMax
//   124        4      0
//   128        16 n   of each page: bytes (4), raw (4; 0 or 1), checksum (8)
//   128 + 16n  8      XXH3-64 of all bytes before
//   end - 8    8      of the header: RecordSeal's tag, or 0 (written by a daemon that knew none); not read by the index
//
// Pages follow, each on a multiple of 64; between them, and up to a multiple of 4096 behind the last, are zeros. A
// change of these bytes is a new version.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/disk/block_disk.h"

namespace kvmanager {

constexpr uint32_t kRecordVersion = 1;
constexpr uint64_t kRecordAlign = 4096;  // of O_DIRECT
constexpr uint64_t kRecordPageAlign = 64;
constexpr uint64_t kRecordHeaderBytesMax = (136 + 16 * kDiskPagesMax + 63) / 64 * 64;

/// Of a record of so many pages.
uint64_t RecordHeaderBytes(size_t pages);

/// Where the pages of a record are.
struct RecordLayout {
  uint64_t bytes = 0;             // of the record
  std::vector<uint64_t> offsets;  // [pages], in the record
  static RecordLayout Of(absl::Span<const uint32_t> page_bytes);
};

constexpr uint32_t kSegmentMax = UINT32_MAX / 2;  // a segment's number

/// A record's bytes.
struct SegmentPlace {
  uint32_t segment = 0;
  uint64_t offset = 0, bytes = 0;  // multiples of kRecordAlign
};

/// Whether a record of these pages can be: their number, the bytes of each (1 or more), and of all.
bool IsRecord(absl::Span<const uint32_t> page_bytes);

/// Its header. record: IsRecord.
std::string EncodeRecordHeader(const DiskRecord& record);
/// The header's own checksum. header: of EncodeRecordHeader, or one that ParseRecordHeader takes.
uint64_t RecordHeaderChecksum(absl::Span<const uint8_t> header);
/// bytes: the record's first RecordHeaderBytes or more, hostile. Errors: DATA_LOSS naming what is wrong. What it
/// returns is IsRecord.
absl::StatusOr<DiskRecord> ParseRecordHeader(absl::Span<const uint8_t> bytes);

}  // namespace kvmanager
