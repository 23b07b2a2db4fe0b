#include "kvmanager/disk/record_marks.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/sha256.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr char kMagic[] = "KVMMARKS";
constexpr uint32_t kVersion = 1;
constexpr size_t kMagicBytes = 8, kTagBytes = 8;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <typename T>
void Append(std::string* to, const T& value) {
  to->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void Append(std::string* to, const Digest& digest) { Append(to, digest.bytes); }
void Append(std::string* to, const RecordPlace& place) {
  Append(to, place.segment);
  Append(to, place.offset);
}
// Of bytes that are known to be there.
template <typename T>
T Take(absl::string_view* from) {
  T value;
  std::memcpy(&value, from->data(), sizeof value);
  from->remove_prefix(sizeof value);
  return value;
}
Digest TakeDigest(absl::string_view* from) {
  Digest digest;
  digest.bytes = Take<decltype(digest.bytes)>(from);
  return digest;
}
RecordPlace TakePlace(absl::string_view* from) {
  RecordPlace place;
  place.segment = Take<uint32_t>(from);
  place.offset = Take<uint64_t>(from);
  return place;
}

absl::Status Wrong(absl::string_view what) { return absl::DataLossError(absl::StrCat("marks of purges: ", what)); }
absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(error)));
}

}  // namespace

uint64_t RecordSeal::TagOf(const RecordPlace& place, absl::Span<const uint8_t> header) const {
  std::string text;
  Append(&text, secret_);
  Append(&text, place);
  Append(&text, RecordHeaderChecksum(header));
  const Digest digest = Sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  uint64_t tag;
  std::memcpy(&tag, digest.bytes.data(), sizeof tag);
  return tag;
}

void RecordSeal::Sign(const RecordPlace& place, std::string* header) const {
  const uint64_t tag = TagOf(place, {reinterpret_cast<const uint8_t*>(header->data()), header->size()});
  std::memcpy(header->data() + header->size() - kTagBytes, &tag, sizeof tag);
}

bool RecordSeal::IsSigned(const RecordPlace& place, absl::Span<const uint8_t> header) const {
  const uint64_t tag = TagOf(place, header);
  return std::memcmp(header.data() + header.size() - kTagBytes, &tag, sizeof tag) == 0;
}

RecordMarks RecordMarks::New() {
  Digest secret;
  KV_CHECK(getrandom(secret.bytes.data(), secret.bytes.size(), 0) == static_cast<ssize_t>(secret.bytes.size()));
  RecordMarks marks;
  marks.seal_ = RecordSeal(secret);
  return marks;
}

absl::StatusOr<RecordMarks> RecordMarks::Parse(absl::string_view bytes) {
  constexpr size_t kFixedBytes = 72, kCacheBytes = 44, kChecksumBytes = 8;
  if (bytes.size() < kFixedBytes + kChecksumBytes) return Wrong("they are cut off");
  absl::string_view from = bytes;
  if (from.substr(0, kMagicBytes) != kMagic) return Wrong("they do not begin with KVMMARKS");
  from.remove_prefix(kMagicBytes);
  const auto version = Take<uint32_t>(&from), caches = Take<uint32_t>(&from);
  if (version != kVersion) return Wrong(absl::StrCat("version ", version, ", must be ", kVersion));
  if (caches > kCachesMax || bytes.size() != kFixedBytes + kCacheBytes * caches + kChecksumBytes) {
    return Wrong(absl::StrCat(bytes.size(), " bytes are not those of ", caches, " purges"));
  }
  absl::string_view last = bytes.substr(bytes.size() - kChecksumBytes);
  if (Take<uint64_t>(&last) != Checksum(bytes.data(), bytes.size() - kChecksumBytes)) {
    return Wrong("their checksum differs");
  }
  RecordMarks marks;
  marks.seal_ = RecordSeal(TakeDigest(&from));
  marks.all_ = TakePlace(&from);
  marks.some_ = TakePlace(&from);
  for (uint32_t i = 0; i < caches; ++i) {
    const CacheDigest cache = TakeDigest(&from);
    marks.caches_[cache] = TakePlace(&from);
  }
  if (marks.segment_of_most() > kSegmentMax) return Wrong("a place is too far");
  return marks;
}

std::string RecordMarks::Encode() const {
  std::string bytes(kMagic, kMagicBytes);
  Append(&bytes, kVersion);
  Append(&bytes, static_cast<uint32_t>(caches_.size()));
  Append(&bytes, seal_.secret());
  Append(&bytes, all_);
  Append(&bytes, some_);
  for (const auto& [cache, end] : caches_) {
    Append(&bytes, cache);
    Append(&bytes, end);
  }
  Append(&bytes, Checksum(bytes.data(), bytes.size()));
  return bytes;
}

absl::StatusOr<RecordMarks> RecordMarks::Read(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT ? absl::NotFoundError(path + " is missing") : Failed("opening", path, errno);
  struct stat of;
  std::string bytes;
  ssize_t got = fstat(fd, &of);
  const bool is_file = got == 0 && S_ISREG(of.st_mode);
  if (is_file) {
    bytes.resize(kBytesMax + 1);
    got = read(fd, bytes.data(), bytes.size());
  }
  const int error = errno;
  close(fd);
  if (got == 0 && !is_file) return absl::DataLossError(path + " is not a file");
  if (got < 0) return Failed("reading", path, error);
  bytes.resize(static_cast<size_t>(got));
  absl::StatusOr<RecordMarks> marks = Parse(bytes);
  if (marks.ok()) return marks;
  return absl::DataLossError(absl::StrCat(path, ": ", marks.status().message()));
}

absl::Status RecordMarks::Write(const std::string& path, DiskFiles* files) const {
  const int error = files->Replace(path, Encode());
  return error == 0 ? absl::OkStatus() : Failed("writing", path, -error);
}

void RecordMarks::NotePurge(const CacheDigest& cache, const RecordPlace& end) {
  if (caches_.size() >= kCachesMax && !caches_.contains(cache)) {
    for (const auto& [each, of] : caches_) some_ = std::max(some_, of);
    some_ = std::max(some_, end);
    caches_.clear();
    return;
  }
  RecordPlace& of = caches_[cache];
  of = std::max(of, end);
}

void RecordMarks::NotePurgeOfAll(const RecordPlace& end) {
  all_ = std::max(all_, end);
  absl::erase_if(caches_, [&](const auto& each) { return each.second <= all_; });
}

bool RecordMarks::IsPurged(const CacheDigest& cache, const RecordPlace& place) const {
  if (place < all_) return true;
  const auto found = caches_.find(cache);
  return found != caches_.end() && place < found->second;
}

bool RecordMarks::MayBePurged(const CacheDigest& cache, const RecordPlace& place) const {
  return place < some_ || IsPurged(cache, place);
}

void RecordMarks::Drop(const RecordMarks& earlier) {
  if (all_ == earlier.all_) all_ = {};
  if (some_ == earlier.some_) some_ = {};
  for (const auto& [cache, end] : earlier.caches_) {
    const auto found = caches_.find(cache);
    if (found != caches_.end() && found->second == end) caches_.erase(found);
  }
}

uint32_t RecordMarks::segment_of_most() const {
  uint32_t most = std::max(all_.segment, some_.segment);
  for (const auto& [cache, end] : caches_) most = std::max(most, end.segment);
  return most;
}

}  // namespace kvmanager
