#include "kvmanager/disk/index_db.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint64_t kScanAheadBytes = uint64_t{2} << 20;
constexpr uint64_t kTableBytes = uint64_t{16} << 20;

/// Errors of RocksDB as lines of our log; the rest of what it says is not kept.
class QuietLogger final : public rocksdb::Logger {
 public:
  QuietLogger() : rocksdb::Logger(rocksdb::InfoLogLevel::ERROR_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list values) override { Logv(rocksdb::InfoLogLevel::INFO_LEVEL, format, values); }
  void Logv(const rocksdb::InfoLogLevel level, const char* format, va_list values) override {
    if (level < rocksdb::InfoLogLevel::ERROR_LEVEL || level == rocksdb::InfoLogLevel::HEADER_LEVEL) return;
    char text[512];
    std::vsnprintf(text, sizeof text, format, values);
    spdlog::warn("disk index: {}", text);
  }
};

absl::Status FromRocks(const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat("index: ", status.ToString());
  // "While lock file: PATH", "lock hold by current process": not any path with "lock" in it.
  const bool is_locked = absl::StrContains(text, "lock file") || absl::StrContains(text, "lock hold");
  if (status.IsIOError() && is_locked) return absl::FailedPreconditionError(text);
  const bool is_unreadable = status.IsIOError() && absl::StrContains(text, std::strerror(EIO));
  if (is_unreadable || status.IsCorruption() || status.IsPathNotFound() || status.IsInvalidArgument() ||
      status.IsNotSupported() || status.IsNotFound()) {
    return absl::DataLossError(text);
  }
  return absl::UnavailableError(text);
}

rocksdb::Options OptionsOf(rocksdb::Env* env) {
  rocksdb::Options options;
  options.env = env;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  // What a crash cut off is left out. What is wrong before it is an error: the index is made anew then, and misses
  // nothing.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.info_log = std::make_shared<QuietLogger>();
  options.info_log_level = rocksdb::InfoLogLevel::ERROR_LEVEL;
  options.write_buffer_size = kMemtableBytes;
  options.max_write_buffer_number = 2;
  options.max_total_wal_size = 2 * kMemtableBytes;
  options.target_file_size_base = kTableBytes;
  options.max_bytes_for_level_base = 4 * kTableBytes;
  options.compression = rocksdb::kNoCompression;
  options.max_open_files = kOpenFilesMax;
  options.max_file_opening_threads = 1;
  options.max_background_jobs = 2;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.keep_log_file_num = 1;
  options.max_manifest_file_size = uint64_t{4} << 20;
  options.skip_stats_update_on_db_open = true;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(kCacheBytes, 2);
  table.cache_index_and_filter_blocks = true;
  table.block_size = 16 << 10;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

class RocksIndexDb final : public IndexDb {
 public:
  RocksIndexDb(std::string path, std::unique_ptr<rocksdb::Env> env) : path_(std::move(path)), env_(std::move(env)) {}

  absl::Status OpenDb() {
    rocksdb::DB* db = nullptr;
    const rocksdb::Status opened =
        rocksdb::DB::Open(OptionsOf(env_ != nullptr ? env_.get() : rocksdb::Env::Default()), path_, &db);
    if (opened.IsNotSupported()) return absl::UnimplementedError(absl::StrCat("index: ", opened.ToString()));
    KV_RETURN_IF_ERROR(FromRocks(opened));
    db_.reset(db);
    rocksdb::PinnableSlice meta;
    const rocksdb::Status got = db_->Get({}, db_->DefaultColumnFamily(), "meta", &meta);
    if (got.ok()) {
      if (meta == rocksdb::Slice(kIndexMeta)) return absl::OkStatus();
      return absl::UnimplementedError(
          absl::StrCat("index: it is \"", meta.ToString().substr(0, 100), "\", must be \"", kIndexMeta, "\""));
    }
    if (!got.IsNotFound()) return FromRocks(got);
    // Without it nothing else may be there.
    const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
    it->SeekToFirst();
    if (it->Valid()) return absl::DataLossError("index: it has records, but does not say of which version");
    KV_RETURN_IF_ERROR(FromRocks(it->status()));
    rocksdb::WriteOptions durable;
    durable.sync = true;
    is_new_ = true;
    return FromRocks(db_->Put(durable, "meta", kIndexMeta));
  }
  bool is_new() const override { return is_new_; }

  void Put(absl::string_view key, absl::string_view value) override { (void)batch_.Put(Slice(key), Slice(value)); }
  void Delete(absl::string_view key) override { (void)batch_.Delete(Slice(key)); }
  void DeletePrefix(absl::string_view prefix) override {
    std::string end(prefix);
    while (!end.empty() && static_cast<uint8_t>(end.back()) == 0xff) end.pop_back();
    KV_CHECK(!end.empty());
    end.back() = static_cast<char>(static_cast<uint8_t>(end.back()) + 1);
    (void)batch_.DeleteRange(Slice(prefix), end);
  }
  absl::Status Commit() override {
    if (batch_.Count() == 0) return absl::OkStatus();
    absl::Status status = is_broken_ ? Reopen() : absl::OkStatus();
    if (status.ok()) {
      rocksdb::WriteOptions durable;
      durable.sync = true;
      status = FromRocks(db_->Write(durable, &batch_));
      is_broken_ = !status.ok();
    }
    batch_.Clear();
    if (status.ok()) return status;
    return absl::UnavailableError(status.message());
  }

  absl::Status Scan(absl::FunctionRef<bool(absl::string_view, absl::string_view)> fn) override {
    {
      MutexLock lock(mutex_);
      if (is_reopening_) return absl::UnavailableError("index: it is being opened anew");
      ++scans_;
    }
    absl::Status status;
    {
      rocksdb::ReadOptions options;
      options.verify_checksums = true;
      options.fill_cache = false;
      options.readahead_size = kScanAheadBytes;
      const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options));
      for (it->Seek(kIndexPrefixOfAll); it->Valid() && it->key().starts_with(kIndexPrefixOfAll); it->Next()) {
        if (!fn(View(it->key()), View(it->value()))) break;
      }
      status = FromRocks(it->status());
    }
    MutexLock lock(mutex_);
    --scans_;
    return status;
  }

 private:
  static rocksdb::Slice Slice(absl::string_view text) { return {text.data(), text.size()}; }
  static absl::string_view View(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

  // RocksDB writes no more after an error of its log until it is opened anew.
  absl::Status Reopen() {
    {
      MutexLock lock(mutex_);
      if (scans_ > 0) return absl::UnavailableError("index: it is being read");
      is_reopening_ = true;
    }
    db_.reset();
    absl::Status status = OpenDb();
    if (!status.ok()) db_.reset();
    MutexLock lock(mutex_);
    is_reopening_ = !status.ok();
    return status;
  }

  const std::string path_;
  const std::unique_ptr<rocksdb::Env> env_;  // nullptr: the machine's
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::WriteBatch batch_;
  bool is_new_ = false;
  bool is_broken_ = false;  // a Commit failed
  Mutex mutex_;
  int scans_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_reopening_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IndexDb>> IndexDb::Open(const std::string& path, rocksdb::FileSystem* file_system) {
  std::unique_ptr<rocksdb::Env> env;
  if (file_system != nullptr) {
    // Not shared: it outlives this.
    env = rocksdb::NewCompositeEnv(std::shared_ptr<rocksdb::FileSystem>(file_system, [](rocksdb::FileSystem*) {}));
  }
  auto db = std::make_unique<RocksIndexDb>(path, std::move(env));
  KV_RETURN_IF_ERROR(db->OpenDb());
  return db;
}

}  // namespace kvmanager
