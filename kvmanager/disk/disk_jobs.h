// Records on their way to a disk and from it: what the loop's thread hands to the disk's threads and gets back.
//
// Each is one thread's at a time: the loop's, then the mover's, then (writes) the committer's, then the loop's again;
// `cancelled` alone is anybody's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/record.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {

struct MoveJob {
  SegmentPlace place;
  RecordLayout layout;
  std::vector<uint32_t> page_bytes;  // [pages]
  absl::Status status;               // how it ended
  int64_t begun_ns = 0;

  // The mover's.
  SegmentFiles::Shared file;
  uint64_t started = 0;  // bytes of the record
  uint32_t in_flight = 0;
};

struct WriteJob : MoveJob {
  DiskRecord record;
  std::string header, payer;
  uint64_t header_checksum = 0;
  std::vector<const uint8_t*> sources;  // [pages]
  bool is_first = false;                // of its segment, which is not there yet
  std::atomic<bool> cancelled{false};   // it was erased meanwhile, and is not to be in the index
  const char* failed_at = "";           // "write", "sync", "index"
};

/// Without a place. nullptr: no record can be of these pages, or their sources are not as many.
std::shared_ptr<WriteJob> MakeWriteJob(DiskRecord record, absl::string_view payer, std::vector<const uint8_t*> sources,
                                       int64_t now_ns);

struct DiskEntry;

struct ReadJob : MoveJob {
  DiskEntry* entry = nullptr;  // the loop's
  CacheDigest cache;           // and what its header must say
  BlockKey key;
  TokenDigest tokens;
  uint32_t index = 0, header_check = 0;
  std::vector<uint8_t*> targets;    // [pages]
  std::vector<uint64_t> checksums;  // [pages], of the header
  bool is_lost = false;             // its bytes are not there: reading it again is of no use
};

/// layers: of the entry. nullptr: its record has other pages than these targets.
std::shared_ptr<ReadJob> MakeReadJob(DiskEntry* entry, uint32_t layers, const CacheDigest& cache, const BlockKey& key,
                                     absl::Span<const BlockDisk::Target> targets, int64_t now_ns);

}  // namespace kvmanager
