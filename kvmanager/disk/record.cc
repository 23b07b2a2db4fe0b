#include "kvmanager/disk/record.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/checksum.h"

namespace kvmanager {
namespace {

constexpr char kMagic[9] = "KVMBLOCK";
constexpr uint64_t kFixedBytes = 128, kPageBytes = 16, kChecksumBytes = 8;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename T>
void Store(std::string* to, uint64_t at, T value) {
  std::memcpy(to->data() + at, &value, sizeof value);
}
void Store(std::string* to, uint64_t at, const Digest& digest) {
  std::memcpy(to->data() + at, digest.bytes.data(), digest.bytes.size());
}
Digest LoadDigest(const uint8_t* from) {
  Digest digest;
  std::memcpy(digest.bytes.data(), from, digest.bytes.size());
  return digest;
}

absl::Status Wrong(absl::string_view what) { return absl::DataLossError(absl::StrCat("record header: ", what)); }

}  // namespace

uint64_t RecordHeaderBytes(size_t pages) {
  return RoundUp(kFixedBytes + kPageBytes * pages + kChecksumBytes, kRecordPageAlign);
}

RecordLayout RecordLayout::Of(absl::Span<const uint32_t> page_bytes) {
  RecordLayout layout;
  layout.offsets.reserve(page_bytes.size());
  uint64_t at = RecordHeaderBytes(page_bytes.size());
  for (const uint32_t bytes : page_bytes) {
    layout.offsets.push_back(at);
    at = RoundUp(at + bytes, kRecordPageAlign);
  }
  layout.bytes = RoundUp(at, kRecordAlign);
  return layout;
}

bool IsRecord(absl::Span<const uint32_t> page_bytes) {
  if (page_bytes.empty() || page_bytes.size() > kDiskPagesMax) return false;
  if (std::find(page_bytes.begin(), page_bytes.end(), 0u) != page_bytes.end()) return false;
  uint64_t bytes = RecordHeaderBytes(page_bytes.size());
  for (const uint32_t of : page_bytes) bytes += RoundUp(of, kRecordPageAlign);
  return bytes <= kDiskRecordBytesMax;
}

std::string EncodeRecordHeader(const DiskRecord& record) {
  const size_t pages = record.pages.size();
  std::string header(RecordHeaderBytes(pages), '\0');
  std::memcpy(header.data(), kMagic, 8);
  Store<uint32_t>(&header, 8, kRecordVersion);
  Store<uint32_t>(&header, 12, static_cast<uint32_t>(header.size()));
  Store(&header, 16, record.cache);
  Store(&header, 48, record.name.key);
  Store(&header, 80, record.name.tokens);
  Store<uint32_t>(&header, 112, record.index);
  Store<uint32_t>(&header, 116, record.tokens);
  Store<uint32_t>(&header, 120, static_cast<uint32_t>(pages));
  for (size_t i = 0; i < pages; ++i) {
    const uint64_t at = kFixedBytes + kPageBytes * i;
    Store<uint32_t>(&header, at, record.pages[i].bytes);
    Store<uint32_t>(&header, at + 4, record.pages[i].raw ? 1 : 0);
    Store<uint64_t>(&header, at + 8, record.pages[i].checksum);
  }
  const uint64_t end = kFixedBytes + kPageBytes * pages;
  Store<uint64_t>(&header, end, Checksum(header.data(), end));
  return header;
}

uint64_t RecordHeaderChecksum(absl::Span<const uint8_t> header) {
  return Load<uint64_t>(header.data() + kFixedBytes + kPageBytes * Load<uint32_t>(header.data() + 120));
}

absl::StatusOr<DiskRecord> ParseRecordHeader(absl::Span<const uint8_t> bytes) {
  if (bytes.size() < kFixedBytes) return Wrong("it is cut off");
  const uint8_t* const from = bytes.data();
  if (std::memcmp(from, kMagic, 8) != 0) return Wrong("it does not begin with KVMBLOCK");
  const auto version = Load<uint32_t>(from + 8);
  if (version != kRecordVersion) return Wrong(absl::StrCat("version ", version, ", must be ", kRecordVersion));
  const auto pages = Load<uint32_t>(from + 120);
  if (pages < 1 || pages > kDiskPagesMax) {
    return Wrong(absl::StrCat("it names ", pages, " pages, must be 1..", kDiskPagesMax));
  }
  if (Load<uint32_t>(from + 12) != RecordHeaderBytes(pages)) return Wrong("its length is not that of its pages");
  const uint64_t end = kFixedBytes + kPageBytes * pages;
  if (bytes.size() < RecordHeaderBytes(pages)) return Wrong("it is cut off");
  const auto said = Load<uint64_t>(from + end), is = Checksum(from, end);
  if (is != said) return Wrong(absl::StrFormat("it has checksum %016x, and says %016x", is, said));
  if (Load<uint32_t>(from + 124) != 0) return Wrong("a reserved field is not 0");
  DiskRecord record;
  record.cache = LoadDigest(from + 16);
  record.name = {LoadDigest(from + 48), LoadDigest(from + 80)};
  record.index = Load<uint32_t>(from + 112);
  record.tokens = Load<uint32_t>(from + 116);
  record.pages.resize(pages);
  std::vector<uint32_t> page_bytes(pages);
  for (size_t i = 0; i < pages; ++i) {
    const uint8_t* const at = from + kFixedBytes + kPageBytes * i;
    const auto raw = Load<uint32_t>(at + 4);
    if (raw > 1) return Wrong("a page is neither raw nor encoded");
    page_bytes[i] = Load<uint32_t>(at);
    record.pages[i] = {page_bytes[i], raw == 1, Load<uint64_t>(at + 8)};
  }
  if (!IsRecord(page_bytes)) return Wrong("its pages are empty or too large");
  return record;
}

}  // namespace kvmanager
