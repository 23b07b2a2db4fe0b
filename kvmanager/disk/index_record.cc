#include "kvmanager/disk/index_record.h"

#include <cstring>
#include <limits>

namespace kvmanager {
namespace {

constexpr uint32_t kValueVersion = 1;
constexpr size_t kKeyBytes = 1 + 32 + 32;

template <typename T>
void Append(std::string* to, T value) {
  to->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void Append(std::string* to, const Digest& digest) {
  to->append(reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size());
}
template <typename T>
bool Take(absl::string_view* from, T* value) {
  if (from->size() < sizeof *value) return false;
  std::memcpy(value, from->data(), sizeof *value);
  from->remove_prefix(sizeof *value);
  return true;
}
bool Take(absl::string_view* from, Digest* digest) { return Take(from, &digest->bytes); }

}  // namespace

std::string IndexPrefix(const CacheDigest& cache) {
  std::string prefix = kIndexPrefixOfAll;
  Append(&prefix, cache);
  return prefix;
}

std::string IndexKey(const CacheDigest& cache, const BlockKey& key) {
  std::string text = IndexPrefix(cache);
  Append(&text, key);
  return text;
}

std::string EncodeIndexValue(const IndexRecord& record) {
  std::string value;
  value.reserve(96 + record.raw.size() + record.payer.size());
  Append<uint32_t>(&value, kValueVersion);
  Append<uint32_t>(&value, record.place.segment);
  Append<uint64_t>(&value, record.place.offset);
  Append<uint64_t>(&value, record.place.bytes);
  Append<uint32_t>(&value, record.index);
  Append<uint32_t>(&value, record.tokens);
  Append(&value, record.tokens_digest);
  Append<uint64_t>(&value, record.header_checksum);
  Append<uint16_t>(&value, static_cast<uint16_t>(record.layers));
  value += record.raw;
  Append<uint16_t>(&value, static_cast<uint16_t>(record.payer.size()));
  value += record.payer;
  return value;
}

IndexRecord IndexRecordOf(const DiskRecord& of, const SegmentPlace& place, uint64_t header_checksum,
                          absl::string_view payer) {
  IndexRecord record;
  record.cache = of.cache;
  record.key = of.name.key;
  record.tokens_digest = of.name.tokens;
  record.place = place;
  record.index = of.index;
  record.tokens = of.tokens;
  record.header_checksum = header_checksum;
  record.layers = static_cast<uint32_t>(of.pages.size());
  record.raw.resize((of.pages.size() + 7) / 8);
  for (size_t i = 0; i < of.pages.size(); ++i) {
    if (of.pages[i].raw) record.raw[i / 8] = static_cast<char>(record.raw[i / 8] | 1 << (i % 8));
  }
  record.payer = std::string(payer);
  return record;
}

bool ParseIndexRecord(absl::string_view key, absl::string_view value, IndexRecord* record) {
  if (key.size() != kKeyBytes || key[0] != kIndexPrefixOfAll[0]) return false;
  key.remove_prefix(1);
  uint32_t version = 0;
  uint16_t layers = 0, payer_bytes = 0;
  if (!Take(&key, &record->cache) || !Take(&key, &record->key) || !Take(&value, &version) || version != kValueVersion ||
      !Take(&value, &record->place.segment) || !Take(&value, &record->place.offset) ||
      !Take(&value, &record->place.bytes) || !Take(&value, &record->index) || !Take(&value, &record->tokens) ||
      !Take(&value, &record->tokens_digest) || !Take(&value, &record->header_checksum) || !Take(&value, &layers)) {
    return false;
  }
  const size_t raw_bytes = (size_t{layers} + 7) / 8;
  if (layers < 1 || layers > kDiskPagesMax || value.size() < raw_bytes) return false;
  record->layers = layers;
  record->raw = std::string(value.substr(0, raw_bytes));
  value.remove_prefix(raw_bytes);
  if (layers % 8 != 0 && static_cast<uint8_t>(record->raw.back()) >> (layers % 8) != 0) return false;
  if (!Take(&value, &payer_bytes) || payer_bytes > kPayerBytesMax || value.size() != payer_bytes) return false;
  record->payer = std::string(value);
  const SegmentPlace& place = record->place;
  return place.offset % kRecordAlign == 0 && place.bytes % kRecordAlign == 0 && place.bytes > 0 &&
         place.bytes <= kDiskRecordBytesMax + kRecordAlign &&
         place.offset <= std::numeric_limits<uint32_t>::max() * kRecordAlign && place.segment <= kSegmentMax;
}

}  // namespace kvmanager
