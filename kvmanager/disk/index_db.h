// The index of a disk in RocksDB: which block is where. The only place that knows RocksDB.
//
//   "meta"                        -> kIndexMeta: the format's version
//   "b" cache digest block key    -> an IndexRecord, version 1
//
// Values are checked as hostile bytes. Memory of RocksDB: two memtables of kMemtableBytes, a cache of kCacheBytes for
// everything it reads (index blocks and filters, too), kOpenFilesMax descriptors; 30 MB or so, whatever it holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/segment_files.h"

namespace rocksdb {
class FileSystem;
}

namespace kvmanager {

constexpr char kIndexMeta[] = "kvmanager disk index 1";
constexpr uint64_t kMemtableBytes = uint64_t{4} << 20;
constexpr uint64_t kCacheBytes = uint64_t{8} << 20;
constexpr int kOpenFilesMax = 64;
constexpr size_t kPayerBytesMax = 1024;

/// What the index knows of a record.
struct IndexRecord {
  CacheDigest cache;
  BlockKey key;
  TokenDigest tokens_digest;
  SegmentPlace place;
  uint32_t index = 0, tokens = 0;
  uint64_t header_checksum = 0;
  uint32_t layers = 0;
  std::string raw;    // (layers + 7) / 8 bytes, as DiskBlock::raw
  std::string payer;  // at most kPayerBytesMax
};

std::string IndexKey(const CacheDigest& cache, const BlockKey& key);
std::string IndexPrefix(const CacheDigest& cache);
constexpr char kIndexPrefixOfAll[] = "b";
std::string EncodeIndexValue(const IndexRecord& record);
/// false: no record, or no sound one.
bool ParseIndexRecord(absl::string_view key, absl::string_view value, IndexRecord* record);

class IndexDb {
 public:
  /// file_system: of tests, outlives it; nullptr: the machine's. Errors: FAILED_PRECONDITION: another process has it
  /// open; DATA_LOSS: damaged, foreign or of another version; UNAVAILABLE: I/O.
  static absl::StatusOr<std::unique_ptr<IndexDb>> Open(const std::string& path, rocksdb::FileSystem* file_system);
  virtual ~IndexDb() = default;
  /// There was none.
  virtual bool is_new() const = 0;

  // Changes, of one thread: collected until Commit, which makes them durable together or fails.
  virtual void Put(absl::string_view key, absl::string_view value) = 0;
  virtual void Delete(absl::string_view key) = 0;
  virtual void DeletePrefix(absl::string_view prefix) = 0;
  /// UNAVAILABLE: whether they are durable is not known. The next one tries to open the index anew first.
  virtual absl::Status Commit() = 0;

  /// Any other thread: all of a moment's records, by key. fn: false ends it. Errors: DATA_LOSS, UNAVAILABLE.
  virtual absl::Status Scan(absl::FunctionRef<bool(absl::string_view key, absl::string_view value)> fn) = 0;
};

}  // namespace kvmanager
