// What the index of a disk says of a record, as keys and values.
//
// Pure functions; any thread. Integers little-endian:
//
//   key: "b", cache digest (32), block key (32)
//   value, version 1: version (4), segment (4), offset (8), bytes (8), index (4), tokens (4), token digest (32), the
//     header's checksum (8), layers (2), which of them are raw ((layers + 7) / 8), length of the payer's name (2), it
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/record.h"

namespace kvmanager {

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
/// What the index is to say of a record. payer: at most kPayerBytesMax.
IndexRecord IndexRecordOf(const DiskRecord& of, const SegmentPlace& place, uint64_t header_checksum,
                          absl::string_view payer);
/// Of hostile bytes. false: no record, or no sound one.
bool ParseIndexRecord(absl::string_view key, absl::string_view value, IndexRecord* record);

}  // namespace kvmanager
