// Published blocks on a disk: written once, as they are in host memory, found by name after a restart, and read back.
//
// A block is one record: a header, which says what it is and has each page's checksum, and the pages behind it. Records
// are appended to segment files; RocksDB has the index, which names a record only once its bytes are on the disk.
// Nothing that is indexed is written again: a record that goes leaves a hole in its file, which the file system gives
// back. So a crash at any moment loses records that were not durable yet, and no others.
//
// Where the index is lost it is made anew from the headers. Then blocks that were evicted or erased may be found again,
// and who paid for a block is not known; what EraseCache and EraseAll erased stays so (record_marks.h).
//
// What comes from the disk is hostile until it was checked. This checks the header (who the block is, how long its
// pages are); whoever reads compares each page with its checksum before anybody uses it.
//
// Everything here is called on the loop's thread, and callbacks run there; I/O is done by threads of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

struct DiskMetrics;

/// One page of a block, in the one form that stays.
struct DiskPage {
  uint32_t bytes = 0;
  bool raw = false;       // else encoded
  uint64_t checksum = 0;  // XXH3-64
};

/// What a record says of its block.
struct DiskRecord {
  CacheDigest cache;
  BlockName name;
  uint32_t index = 0;           // its place in its sequence
  uint32_t tokens = 0;          // of a block
  std::vector<DiskPage> pages;  // [layers], 1..kDiskPagesMax
};
constexpr size_t kDiskPagesMax = 1024;
constexpr uint64_t kDiskRecordBytesMax = uint64_t{1} << 30;

/// What is known of a record without reading it.
struct DiskBlock {
  TokenDigest tokens;
  uint32_t index = 0;
  uint32_t layers = 0;
  std::vector<uint8_t> raw;  // bit l % 8 of byte l / 8: layer l has its page raw
  Retention retention;       // of this daemon's life: it is not written
  bool IsRaw(uint32_t layer) const { return (raw[layer / 8] >> (layer % 8) & 1) != 0; }
};

/// A page whose reader found bytes that are not those that were written.
struct DiskBadPage {
  uint32_t layer = 0;
  uint64_t checksum = 0;  // of its bytes
  uint64_t expected = 0;  // that the record's header has; equal: they are as written, and none that a page may have
};

/// Why a block is found no more: room was short, its cache or all was erased, its record is wrong, or a page of it.
enum class DiskLoss : uint8_t { kEvicted, kErased, kWrong, kChecksum };

class BlockDisk {
 public:
  struct Options {
    std::string directory;  // made with mode 0700 if it is not there; of this daemon alone
    uint64_t bytes = 0;     // of records and their index, at least kBytesMin
    EvictionKind eviction = EvictionKind::kCost;
  };
  static constexpr uint64_t kBytesMin = uint64_t{64} << 20;

  /// Opens what an earlier daemon left there, or begins anew. An index that is damaged or missing is made anew from the
  /// records; what is of another format, or cannot be made anew, is set aside; both with a line in the log. Returns
  /// before all records are known: see loaded(). queue, metrics: outlive it. Errors:
  /// INVALID_ARGUMENT naming the option; FAILED_PRECONDITION (another process has it open, foreign owner or mode);
  /// UNAVAILABLE (the file system refuses).
  static absl::StatusOr<std::unique_ptr<BlockDisk>> Open(const Options& options, MessageQueue* queue,
                                                         DiskMetrics* metrics);
  /// Waits for what is being written or read, and makes it durable. Callbacks that have not run are destroyed.
  virtual ~BlockDisk() = default;

  /// All records of the last start are known. Before that some are found already.
  virtual bool loaded() const = 0;
  /// For people: "ready", "reading its index", "making its index anew from its records", or what is wrong, and whether
  /// it takes records then.
  virtual const char* state() const = 0;

  /// The block of this name, if a record of it is durable; until the next call of anything here. nullptr: there is
  /// none.
  virtual const DiskBlock* Find(const CacheDigest& cache, const BlockKey& key) const = 0;
  /// A run (EvictionRun) used these blocks: they go later. Parents first.
  virtual void NoteUse(const CacheDigest& cache, absl::Span<const BlockName> names) = 0;

  /// How long a block is kept (RetainingEviction), from now on and until the daemon ends; until_ns is of the clock that
  /// the disk was given, or of SteadyClock. Returns the bytes of its record; 0: there is none that is durable.
  virtual uint64_t Retain(const CacheDigest& cache, const BlockKey& key, const Retention& retention) = 0;
  /// To be called now and then, once a second: notices retentions that have ended, and has a thread of its own look
  /// whether its folder is still there.
  virtual void Look() = 0;

  /// Whether it takes records, now or once others are written: not for a while after an error, nor any more once its
  /// index was found damaged or its folder has gone.
  bool TakesWrites() const { return TakesWritesWithin(0); }
  /// Whether it does, or that while ends within so many ns.
  virtual bool TakesWritesWithin(int64_t ns) const = 0;
  /// Whether a record of `page_bytes` would be taken now: not while much is on its way, nor for a while after an error.
  virtual bool CanWrite(uint64_t page_bytes) const = 0;
  /// Writes a block that Find does not find and that is not on its way; others go for it, if room is short, of the
  /// payer who has most. payer: who pays for it (payer_name.h). sources: [layers], whose bytes stay as they are until
  /// `done`. done(true): it is durable, and found. False: an error, or it was erased meanwhile.
  virtual void Write(DiskRecord record, absl::string_view payer, std::vector<const uint8_t*> sources,
                     absl::AnyInvocable<void(bool durable)> done) = 0;

  /// Where the bytes of a page go.
  struct Target {
    uint8_t* to = nullptr;
    uint32_t bytes = 0;
  };
  /// Reads the pages of a block that Find finds, which stays until `done`. targets: [layers], which stay until `done`.
  /// done: checksums, [layers], with which the pages are yet to be compared. Errors: NOT_FOUND (it is not there);
  /// DATA_LOSS (its header is wrong, or says other sizes: the record goes); UNAVAILABLE (I/O: the block is not found
  /// for some seconds, and then is again).
  virtual void Read(const CacheDigest& cache, const BlockKey& key, std::vector<Target> targets,
                    absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done) = 0;

  /// Not found from now on; nor after a crash, but for one within the milliseconds until the index has it.
  virtual void Erase(const CacheDigest& cache, const BlockKey& key) = 0;
  /// A page that was read is bad: the block goes as by Erase, is counted, and has a line in the log.
  virtual void EraseBad(const CacheDigest& cache, const BlockKey& key, const DiskBadPage& page) = 0;
  /// All of a cache, or all; also those on their way. Returns how many were found.
  virtual uint64_t EraseCache(const CacheDigest& cache) = 0;
  virtual uint64_t EraseAll() = 0;
  /// done: once what was erased before this call is so after a crash too. Errors: UNAVAILABLE (the index refuses: it is
  /// tried again later).
  virtual void WhenErased(absl::AnyInvocable<void(absl::Status)> done) = 0;
  /// fn is called when a block is found no more: of one that a Write evicts, during that call.
  virtual void OnGone(std::function<void(const CacheDigest& cache, const BlockKey& key, DiskLoss loss)> fn) = 0;

  struct Use {
    uint64_t capacity_bytes = 0;
    uint64_t used_bytes = 0;  // of records, with those on their way
    uint64_t blocks = 0;
    uint64_t writing_bytes = 0, reading_bytes = 0;  // on their way
  };
  virtual Use use() const = 0;
  /// Knows, and holds to, its own rules. For tests.
  virtual void CheckInvariants() const = 0;
};

}  // namespace kvmanager
