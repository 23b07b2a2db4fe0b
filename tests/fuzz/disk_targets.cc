// What the disk tier reads back: headers of records, values of its index.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/index_record.h"
#include "kvmanager/disk/record.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"

namespace kvmanager::fuzz {
namespace {

Digest DigestOf(uint8_t byte) {
  Digest digest;
  digest.bytes.fill(byte);
  return digest;
}

/// The first byte says whether the rest is a header, or key and value of the index. A header's checksum is put right if
/// the byte says so, so that its fields are looked at.
class DiskTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (const size_t pages : {1, 3, 80}) {
      DiskRecord record;
      record.cache = DigestOf(1);
      record.name = {DigestOf(2), DigestOf(3)};
      record.index = 7;
      record.tokens = 64;
      for (size_t i = 0; i < pages; ++i) record.pages.push_back({static_cast<uint32_t>(1000 + i), i % 2 == 0, i});
      const std::string header = EncodeRecordHeader(record);
      seeds.push_back(absl::StrCat("h", header));
      seeds.push_back(absl::StrCat("H", header));
      IndexRecord entry;
      entry.cache = record.cache;
      entry.key = record.name.key;
      entry.tokens_digest = record.name.tokens;
      entry.place = {1, 8192, 4096};
      entry.layers = static_cast<uint32_t>(pages);
      entry.raw.assign((pages + 7) / 8, 1);
      entry.payer = "uid:1000";
      seeds.push_back(absl::StrCat("i", IndexKey(entry.cache, entry.key), EncodeIndexValue(entry)));
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    const uint8_t what = input[0];
    input.remove_prefix(1);
    if (what == 'i') return RunIndex(TextOf(input));
    std::string header(TextOf(input));
    // Where its number of pages says that the checksum is.
    if (what == 'H' && header.size() >= 128) {
      uint32_t pages;
      std::memcpy(&pages, header.data() + 120, sizeof pages);
      const uint64_t end = 128 + uint64_t{16} * pages;
      if (end + 8 <= header.size()) {
        const uint64_t checksum = Checksum(header.data(), end);
        std::memcpy(header.data() + end, &checksum, sizeof checksum);
      }
    }
    const absl::StatusOr<DiskRecord> record = ParseRecordHeader(BytesOf(header));
    MustExplain(record.status());
    if (!record.ok()) return;
    std::vector<uint32_t> page_bytes;
    for (const DiskPage& page : record->pages) page_bytes.push_back(page.bytes);
    KV_CHECK(IsRecord(page_bytes));
    const RecordLayout layout = RecordLayout::Of(page_bytes);
    KV_CHECK(layout.bytes <= kDiskRecordBytesMax + kRecordAlign && layout.bytes % kRecordAlign == 0);
    KV_CHECK(layout.offsets.back() + page_bytes.back() <= layout.bytes);
    const std::string again = EncodeRecordHeader(*record);
    KV_CHECK(again.size() <= header.size() && again.size() <= kRecordHeaderBytesMax);
    KV_CHECK(RecordHeaderChecksum(BytesOf(again)) == RecordHeaderChecksum(BytesOf(header)));
  }

 private:
  static void RunIndex(absl::string_view text) {
    const absl::string_view key = text.substr(0, std::min<size_t>(text.size(), 65)), value = text.substr(key.size());
    IndexRecord record;
    if (!ParseIndexRecord(key, value, &record)) return;
    KV_CHECK(IndexKey(record.cache, record.key) == key && EncodeIndexValue(record) == value);
    KV_CHECK(record.layers >= 1 && record.layers <= kDiskPagesMax && record.raw.size() == (record.layers + 7) / 8);
    KV_CHECK(record.place.offset / kRecordAlign <= UINT32_MAX && record.place.bytes % kRecordAlign == 0);
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeDiskTarget() { return std::make_unique<DiskTarget>(); }

}  // namespace kvmanager::fuzz
