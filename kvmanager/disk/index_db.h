// The index of a disk in RocksDB: which block is where. The only place that knows RocksDB.
//
//   "meta"                        -> kIndexMeta: the format's version
//   IndexKey                      -> EncodeIndexValue
//
// Memory of RocksDB: two memtables of kMemtableBytes, a cache of kCacheBytes for
// everything it reads (index blocks and filters, too), kOpenFilesMax descriptors; 30 MB or so, whatever it holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/disk/index_record.h"

namespace rocksdb {
class FileSystem;
}

namespace kvmanager {

constexpr char kIndexMeta[] = "kvmanager disk index 1";
constexpr uint64_t kMemtableBytes = uint64_t{4} << 20;
constexpr uint64_t kCacheBytes = uint64_t{8} << 20;
constexpr int kOpenFilesMax = 64;

class IndexDb {
 public:
  /// file_system: of tests, outlives it; nullptr: the machine's. Errors: FAILED_PRECONDITION: another process has it
  /// open; DATA_LOSS: damaged, foreign, or the device cannot read it; UNIMPLEMENTED: of another version; UNAVAILABLE:
  /// I/O.
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
