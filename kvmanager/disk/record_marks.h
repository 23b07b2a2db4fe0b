// What the records of a disk cannot say of themselves, for an index that is made anew from them: which of them this
// disk wrote where they are, and which were purged.
//
// RecordSeal: a client chooses the bytes of its pages, and could put the header of a record of somebody else's among
// them. So each header ends in a tag, of a secret that no client sees, and of the header's place. RecordMarks: purges,
// each with the place where records ended when it was asked for. Records are appended, so those that begin before it
// are dead, and those behind it live.
//
// Values. The file, version 1, integers little-endian:
//
//   offset  bytes  what
//   0       8      "KVMMARKS"
//   8       4      version: 1
//   12      4      purges of caches: 0..kCachesMax
//   16      32     secret
//   48      12     all records before this place are purged: segment (4), offset (8)
//   60      12     all records before this place may be purged: an index that is made anew leaves them out
//   72      44 n   purges of caches: cache digest (32), place (12)
//   72+44n  8      XXH3-64 of all bytes before
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/disk/disk_io.h"
#include "kvmanager/disk/record.h"

namespace kvmanager {

/// Where a record begins, or would.
struct RecordPlace {
  uint32_t segment = 0;
  uint64_t offset = 0;
  friend auto operator<=>(const RecordPlace&, const RecordPlace&) = default;
};

class RecordSeal {
 public:
  RecordSeal() = default;
  explicit RecordSeal(const Digest& secret) : secret_(secret) {}
  const Digest& secret() const { return secret_; }

  /// header: of EncodeRecordHeader. Its last 8 bytes, which its checksum leaves out, become the tag.
  void Sign(const RecordPlace& place, std::string* header) const;
  /// header: one that ParseRecordHeader takes.
  bool IsSigned(const RecordPlace& place, absl::Span<const uint8_t> header) const;

 private:
  uint64_t TagOf(const RecordPlace& place, absl::Span<const uint8_t> header) const;

  Digest secret_;
};

class RecordMarks {
 public:
  static constexpr size_t kCachesMax = 4096;                 // of more, the last place takes the place of all
  static constexpr size_t kBytesMax = 80 + 44 * kCachesMax;  // of its file

  /// Of a new disk: a secret of its own, no purges.
  static RecordMarks New();
  /// bytes: hostile. Errors: DATA_LOSS naming what is wrong.
  static absl::StatusOr<RecordMarks> Parse(absl::string_view bytes);
  std::string Encode() const;
  /// Of the file of this path. Errors: NOT_FOUND; DATA_LOSS; UNAVAILABLE (I/O).
  static absl::StatusOr<RecordMarks> Read(const std::string& path);
  /// Durable, or as it was. Errors: UNAVAILABLE.
  absl::Status Write(const std::string& path, DiskFiles* files) const;

  const RecordSeal& seal() const { return seal_; }
  /// end: no record that was there, or on its way, begins at it or behind it.
  void NotePurge(const CacheDigest& cache, const RecordPlace& end);
  void NotePurgeOfAll(const RecordPlace& end);
  bool IsPurged(const CacheDigest& cache, const RecordPlace& place) const;
  /// It, or another one of then that is known no more.
  bool MayBePurged(const CacheDigest& cache, const RecordPlace& place) const;
  /// The bytes of all records that `earlier`, as these were at some time, names have gone for good.
  void Drop(const RecordMarks& earlier);
  bool empty() const { return caches_.empty() && all_ == RecordPlace{} && some_ == RecordPlace{}; }
  /// The highest segment that a mark names. New records are to go behind it.
  uint32_t segment_of_most() const;

 private:
  RecordSeal seal_;
  RecordPlace all_, some_;
  absl::flat_hash_map<CacheDigest, RecordPlace> caches_;
};

}  // namespace kvmanager
