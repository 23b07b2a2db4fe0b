// How fast blocks go to a disk and come back, beside fio and beside RocksDB's blob files on the same directory in the
// same run; how fast the index of a million blocks is loaded, and what it takes in memory.
//
//   disk_bench DIRECTORY [--mib=N] [--records=N]
//
// DIRECTORY: on the disk to be measured; a folder is made in it and removed. --mib: bytes of each row (1024).
// --records: of the index (1000000). Columns of fio are empty where it is not installed. Times count from the first
// call until the last block is durable, or was read and compared with its checksums.
#include <malloc.h>
#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/record.h"

namespace kvmanager::testing {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr size_t kLayers = 28;
constexpr int kBlobThreads = 8;  // reads in flight

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Speeds {
  double write = 0, read = 0;  // MiB/s
};

/// Blocks of equal size; their bytes are those of one buffer, at different places.
struct Blocks {
  Blocks(uint64_t block_bytes, uint64_t all_bytes) : count(all_bytes / block_bytes) {
    page_bytes = static_cast<uint32_t>(block_bytes / kLayers / 64 * 64);
    bytes.resize(block_bytes + 4096 * 8);
    std::mt19937_64 random(1);
    for (size_t at = 0; at < bytes.size(); at += 8) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + at, &word, 8);
    }
  }
  uint64_t size() const { return uint64_t{page_bytes} * kLayers; }
  const uint8_t* Page(uint64_t number, size_t layer) const {
    return bytes.data() + number % 4096 * 8 + page_bytes * layer;
  }
  DiskRecord Record(uint64_t number) const {
    DiskRecord record;
    record.cache = TestDigest(1);
    record.name = {TestDigest(2 * number), TestDigest(2 * number + 1)};
    record.index = static_cast<uint32_t>(number % 128);
    record.tokens = 64;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      record.pages.push_back({page_bytes, false, Checksum(Page(number, layer), page_bytes)});
    }
    return record;
  }
  uint64_t count;
  uint32_t page_bytes;
  std::vector<uint8_t> bytes;
};

Speeds OfDisk(const std::string& folder, const Blocks& blocks, bool threads) {
  BlockDisk::Options options;
  options.directory = folder + "/disk";
  options.bytes = blocks.count * blocks.size() * 2 + (uint64_t{1} << 30);
  BlockDiskParts parts;
  parts.make_io = threads ? MakeThreadIo : MakeUringIo;
  TestLoop loop;
  Speeds speeds;
  {
    TestDisk disk(&loop, options, parts);
    KV_CHECK(disk.Load());
    const double begin = Seconds();
    uint64_t done = 0;
    for (uint64_t number = 0; number < blocks.count; ++number) {
      KV_CHECK(loop.RunUntil([&] { return disk->CanWrite(blocks.size()); }));
      std::vector<const uint8_t*> sources;
      for (size_t layer = 0; layer < kLayers; ++layer) sources.push_back(blocks.Page(number, layer));
      disk->Write(blocks.Record(number), "p", std::move(sources), [&](bool durable) {
        KV_CHECK(durable);
        ++done;
      });
    }
    KV_CHECK(loop.RunUntil([&] { return done == blocks.count; }));
    speeds.write = static_cast<double>(blocks.count * blocks.size()) / kMiB / (Seconds() - begin);
  }
  TestDisk disk(&loop, options, parts);
  KV_CHECK(disk.Load());
  const uint64_t at_once = std::max<uint64_t>(2, 64 * kMiB / blocks.size());
  std::vector<std::vector<uint8_t>> slots(std::min<uint64_t>(at_once, 256), std::vector<uint8_t>(blocks.size()));
  std::vector<size_t> free;
  for (size_t i = 0; i < slots.size(); ++i) free.push_back(i);
  const double begin = Seconds();
  uint64_t done = 0;
  for (uint64_t number = 0; number < blocks.count; ++number) {
    KV_CHECK(loop.RunUntil([&] { return !free.empty(); }));
    const size_t slot = free.back();
    free.pop_back();
    std::vector<BlockDisk::Target> targets;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      targets.push_back({slots[slot].data() + layer * blocks.page_bytes, blocks.page_bytes});
    }
    disk->Read(TestDigest(1), TestDigest(2 * number), std::move(targets), [&, slot](auto checksums) {
      KV_CHECK(checksums.ok());
      for (size_t layer = 0; layer < kLayers; ++layer) {
        KV_CHECK(Checksum(slots[slot].data() + layer * blocks.page_bytes, blocks.page_bytes) == (*checksums)[layer]);
      }
      free.push_back(slot);
      ++done;
    });
  }
  KV_CHECK(loop.RunUntil([&] { return done == blocks.count; }));
  speeds.read = static_cast<double>(blocks.count * blocks.size()) / kMiB / (Seconds() - begin);
  disk->EraseAll();
  return speeds;
}

/// RocksDB with blob files. synced: every 1 MiB or block is durable; else none is before the end.
Speeds OfBlobFiles(const std::string& folder, const Blocks& blocks, bool synced) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.enable_blob_files = true;
  options.min_blob_size = 0;
  options.blob_file_size = 256 * kMiB;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = 64 * kMiB;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  const std::string path = folder + "/blob";
  rocksdb::DB* opened = nullptr;
  KV_CHECK(rocksdb::DB::Open(options, path, &opened).ok());
  std::unique_ptr<rocksdb::DB> db(opened);
  Speeds speeds;
  double begin = Seconds();
  rocksdb::WriteOptions write;
  write.disableWAL = !synced;
  const uint64_t batch_blocks = std::max<uint64_t>(1, kMiB / blocks.size());
  rocksdb::WriteBatch batch;
  const auto key_of = [](uint64_t number) { return TestDigest(2 * number).ToHex(); };
  for (uint64_t number = 0; number < blocks.count; ++number) {
    KV_CHECK(batch.Put(key_of(number), {reinterpret_cast<const char*>(blocks.Page(number, 0)), blocks.size()}).ok());
    if ((number + 1) % batch_blocks != 0 && number + 1 < blocks.count) continue;
    write.sync = synced;
    KV_CHECK(db->Write(write, &batch).ok());
    batch.Clear();
  }
  KV_CHECK(db->Flush({}).ok());
  speeds.write = static_cast<double>(blocks.count * blocks.size()) / kMiB / (Seconds() - begin);
  begin = Seconds();
  std::atomic<uint64_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kBlobThreads; ++i) {
    threads.emplace_back([&] {
      for (uint64_t number = next++; number < blocks.count; number = next++) {
        rocksdb::PinnableSlice value;
        KV_CHECK(db->Get({}, db->DefaultColumnFamily(), key_of(number), &value).ok() && value.size() == blocks.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  speeds.read = static_cast<double>(blocks.count * blocks.size()) / kMiB / (Seconds() - begin);
  db.reset();
  (void)rocksdb::DestroyDB(path, options);
  return speeds;
}

/// MiB/s of fio's direct sequential I/O with pieces of this size, 32 of them in flight; 0: there is no fio.
double OfFio(const std::string& folder, const char* what, uint64_t mib, uint64_t piece_bytes) {
  const std::string command = absl::StrFormat(
      "fio --name=f --filename=%s/fio --rw=%s --bs=%d --size=%dM --direct=1 --ioengine=io_uring --iodepth=32 "
      "--end_fsync=1 --output-format=terse --terse-version=3 2>/dev/null",
      folder, what, piece_bytes, mib);
  FILE* const out = popen(command.c_str(), "r");
  std::string text;
  char piece[4096];
  while (out != nullptr && std::fgets(piece, sizeof piece, out) != nullptr) text += piece;
  if (out == nullptr || pclose(out) != 0) return 0;
  // Fields of version 3: the 7th is the read bandwidth in KiB/s, the 48th that of writes.
  size_t at = 0;
  for (int field = std::string(what) == "read" ? 6 : 47; field > 0; --field) at = text.find(';', at) + 1;
  double kib = 0;
  (void)absl::SimpleAtod(text.substr(at, text.find(';', at) - at), &kib);
  return kib / 1024;
}

void Row(const char* name, Speeds speeds, Speeds fio) {
  const auto ratio = [](double of, double to) { return to > 0 ? absl::StrFormat("%.2f", of / to) : std::string("-"); };
  absl::PrintF("| %s | %.0f | %s | %.0f | %s |\n", name, speeds.write, ratio(speeds.write, fio.write), speeds.read,
               ratio(speeds.read, fio.read));
  std::fflush(stdout);
}

uint64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

void MeasureLoad(const std::string& folder, uint64_t records) {
  constexpr uint64_t kRecordBytes = 64 << 10, kOfSegment = (uint64_t{1} << 30) / kRecordBytes;
  BlockDisk::Options options;
  options.directory = folder + "/load";
  options.bytes = records * kRecordBytes * 2 + (uint64_t{1} << 30);
  TestLoop loop;
  TestDisk(&loop, options).Load();
  {
    auto db = IndexDb::Open(options.directory + "/index", nullptr);
    KV_CHECK(db.ok());
    for (uint64_t i = 0; i < records; ++i) {
      const uint32_t segment = static_cast<uint32_t>(1 + i / kOfSegment);
      if (i % kOfSegment == 0) {
        const std::string path = absl::StrFormat("%s/segments/%08u", options.directory, segment);
        std::ofstream(path) << "";
        KV_CHECK(truncate(path.c_str(), off_t{1} << 30) == 0);
      }
      IndexRecord record;
      record.cache = TestDigest(i % 4);
      record.key = TestDigest(2 * i);
      record.tokens_digest = TestDigest(2 * i + 1);
      record.place = {segment, i % kOfSegment * kRecordBytes, kRecordBytes};
      record.index = static_cast<uint32_t>(i % 128);
      record.tokens = 64;
      record.header_checksum = i;
      record.layers = kLayers;
      record.raw.assign((kLayers + 7) / 8, '\0');
      record.payer = "uid:1000";
      (*db)->Put(IndexKey(record.cache, record.key), EncodeIndexValue(record));
      if (i % 10000 == 9999 || i + 1 == records) KV_CHECK((*db)->Commit().ok());
    }
  }
  uint64_t index_bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(options.directory + "/index")) {
    index_bytes += file.file_size();
  }
  malloc_trim(0);
  const uint64_t before = HeapBytes();
  const double begin = Seconds();
  TestDisk disk(&loop, options);
  KV_CHECK(disk.status().ok());
  const double opened = Seconds();
  const uint64_t heap_opened = HeapBytes() - before;
  std::vector<double> turns;
  while (!disk->loaded()) {
    const double turn = Seconds();
    if (!loop.queue().RunSome()) {
      std::this_thread::yield();
      continue;
    }
    turns.push_back(Seconds() - turn);
  }
  const double loaded = Seconds();
  std::sort(turns.begin(), turns.end());
  usleep(500000);  // the loader gives its own memory back
  const uint64_t heap = HeapBytes() - before;
  std::printf("\nindex of %llu blocks: %.0f MiB on disk; opened in %.3f s, loaded in %.2f s more\n",
              (unsigned long long)records, static_cast<double>(index_bytes) / kMiB, opened - begin, loaded - opened);
  std::printf("the loop's turns meanwhile: %zu, median %.3f ms, 99%% %.3f ms, longest %.3f ms\n", turns.size(),
              turns[turns.size() / 2] * 1e3, turns[turns.size() * 99 / 100] * 1e3, turns.back() * 1e3);
  std::printf("heap of the loop: %.0f MiB more than when it was opened (%.0f): %.0f bytes a block\n",
              (static_cast<double>(heap) - static_cast<double>(heap_opened)) / kMiB,
              static_cast<double>(heap_opened) / kMiB,
              (static_cast<double>(heap) - static_cast<double>(heap_opened)) / static_cast<double>(records));
}

int Main(int argc, char** argv) {
  uint64_t mib = 1024, records = 1000000;
  std::string base;
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (absl::ConsumePrefix(&flag, "--mib=") && absl::SimpleAtoi(flag, &mib)) continue;
    if (absl::ConsumePrefix(&flag, "--records=") && absl::SimpleAtoi(flag, &records)) continue;
    base = std::string(flag);
  }
  if (base.empty()) {
    std::fprintf(stderr, "usage: disk_bench DIRECTORY [--mib=N] [--records=N]\n");
    return 2;
  }
  std::string folder = base + "/disk-bench-XXXXXX";
  KV_CHECK(mkdtemp(folder.data()) != nullptr);
  for (const uint64_t block_bytes : {uint64_t{1382400}, uint64_t{64} << 10}) {
    const Blocks blocks(block_bytes, mib * kMiB);
    const uint64_t piece = std::min<uint64_t>(kMiB, block_bytes);
    std::printf(
        "\n%llu blocks of %llu KiB, MiB/s\n\n| | write | of fio's | read | of fio's |\n| --- | --- | --- | --- | --- "
        "|\n",
        (unsigned long long)blocks.count, (unsigned long long)(blocks.size() >> 10));
    Speeds fio;
    fio.write = OfFio(folder, "write", mib, piece);
    fio.read = fio.write > 0 ? OfFio(folder, "read", mib, piece) : 0;
    (void)unlink((folder + "/fio").c_str());
    Row("fio, direct, 32 in flight", fio, fio);
    Row("segments, io_uring", OfDisk(folder, blocks, /*threads=*/false), fio);
    Row("segments, threads", OfDisk(folder, blocks, /*threads=*/true), fio);
    Row("blob files, durable every MiB", OfBlobFiles(folder, blocks, /*synced=*/true), fio);
    Row("blob files, durable at the end", OfBlobFiles(folder, blocks, /*synced=*/false), fio);
  }
  if (records > 0) MeasureLoad(folder, records);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return 0;
}

}  // namespace

int RunBench(int argc, char** argv) { return Main(argc, argv); }

}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::RunBench(argc, argv); }
