#include "kvmanager/keep/kept_manifest.h"

#include <openssl/rand.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

struct KeptManifest::RegionHead {
  char format[8] = {};
  uint64_t bytes = 0, pool_bytes = 0, slab_bytes = 0, seed = 0;
  uint64_t zeros[2] = {};
  uint64_t check = 0;  // of what is before it
};

struct KeptManifest::Head {
  uint64_t check = 0;
  uint32_t bytes = 0;
  uint32_t index = 0;
  uint32_t tokens = 0;
  uint16_t pages = 0;
  uint16_t tenant_bytes = 0;
  CacheDigest cache;
  BlockName name;
};

struct KeptManifest::PageEntry {
  uint32_t slot = 0;
  uint16_t size = 0;
  uint8_t raw = 0;
  uint8_t rung = 0;
  uint64_t slot_bytes = 0;
  uint64_t checksum = 0;
};

namespace {

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

// 0 says that there is no entry.
uint64_t KeptManifest::CheckOf(const uint8_t* entry, uint64_t bytes) const {
  const uint64_t check = XXH3_64bits_withSeed(entry + sizeof(uint64_t), bytes - sizeof(uint64_t), seed_);
  return std::max<uint64_t>(check, 1);
}

KeptManifest::RegionHead KeptManifest::HeadOf(const Pool& pool, uint64_t seed) {
  RegionHead head;
  static_assert(sizeof kFormat == sizeof head.format + 1);
  std::copy_n(kFormat, sizeof head.format, head.format);
  head.seed = seed;
  head.bytes = BytesFor(pool);
  head.pool_bytes = pool.bytes;
  head.slab_bytes = pool.slab_bytes;
  head.check = Checksum(&head, offsetof(RegionHead, check));
  return head;
}

KeptManifest::KeptManifest(std::unique_ptr<Region> region, uint64_t seed, bool all_free)
    : region_(std::move(region)),
      seed_(seed),
      room_(region_->bytes() / kAlign * kAlign - kAlign, all_free),
      is_recovered_(all_free) {}

absl::StatusOr<std::unique_ptr<KeptManifest>> KeptManifest::Create(const Pool& pool) {
  static_assert(sizeof(RegionHead) == kAlign && sizeof(Head) == 120 && sizeof(PageEntry) == 24);
  Region::Options options;
  options.name = "kvmanager-kept";
  options.bytes = BytesFor(pool);
  options.sharing = Region::Sharing::kKept;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Create(options));
  uint64_t seed;
  KV_CHECK(RAND_bytes(reinterpret_cast<uint8_t*>(&seed), sizeof seed) == 1);
  const RegionHead head = HeadOf(pool, seed);
  std::memcpy(region->data(), &head, sizeof head);
  return std::unique_ptr<KeptManifest>(new KeptManifest(std::move(region), seed, /*all_free=*/true));
}

absl::StatusOr<std::unique_ptr<KeptManifest>> KeptManifest::TakeOver(int fd, const Pool& pool) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::TakeOver(fd, BytesFor(pool)));
  const uint64_t seed = Load<RegionHead>(region->data()).seed;
  const RegionHead head = HeadOf(pool, seed);
  if (std::memcmp(region->data(), &head, sizeof head) != 0) {
    return absl::FailedPreconditionError("kept memory: it is of another pool, or of another version of this daemon");
  }
  return std::unique_ptr<KeptManifest>(new KeptManifest(std::move(region), seed, /*all_free=*/false));
}

uint64_t KeptManifest::EntryBytes(uint64_t at) const {
  const uint64_t room = region_->bytes() / kAlign * kAlign - at;
  const uint8_t* const entry = region_->data() + at;
  const uint64_t check = Load<uint64_t>(entry);
  if (check == 0 || room < sizeof(Head)) return 0;
  const Head head = Load<Head>(entry);
  const uint64_t bytes = sizeof(Head) + sizeof(PageEntry) * head.pages + head.tenant_bytes;
  if (head.bytes != bytes || bytes > room || head.pages < 1 || head.pages > kPagesMax ||
      head.tenant_bytes > kTenantBytesMax) {
    return 0;
  }
  return CheckOf(entry, bytes) == check ? bytes : 0;
}

KeptBlock KeptManifest::Read(uint64_t at) const {
  KeptBlock block;
  ReadInto(at, &block);
  return block;
}

void KeptManifest::ReadInto(uint64_t at, KeptBlock* block) const {
  const uint8_t* from = region_->data() + at;
  const Head head = Load<Head>(from);
  block->cache = head.cache;
  block->name = head.name;
  block->index = head.index;
  block->tokens = head.tokens;
  from += sizeof head;
  block->pages.resize(head.pages);
  for (KeptPage& page : block->pages) {
    const auto entry = Load<PageEntry>(from);
    page = {{entry.slot, entry.size, entry.slot_bytes}, entry.raw != 0, entry.checksum, entry.rung};
    from += sizeof entry;
  }
  block->tenant.assign(reinterpret_cast<const char*>(from), head.tenant_bytes);
}

void KeptManifest::Recover(absl::FunctionRef<void(uint64_t entry, const KeptBlock& block)> fn) {
  if (std::exchange(is_recovered_, true)) return;
  const uint64_t end = region_->bytes() / kAlign * kAlign;
  uint64_t free_from = kAlign;
  const auto give_back = [&](uint64_t to) {
    if (to > free_from) room_.GiveBack(free_from - kAlign, to - free_from);
  };
  KeptBlock block;
  for (uint64_t at = kAlign; at < end;) {
    const uint64_t bytes = EntryBytes(at);
    if (bytes == 0) {
      at += kAlign;
      continue;
    }
    give_back(at);
    ReadInto(at, &block);
    fn(at, block);
    at += (bytes + kAlign - 1) / kAlign * kAlign;
    free_from = at;
  }
  give_back(end);
}

uint64_t KeptManifest::Write(const KeptBlock& block) {
  if (block.pages.empty() || block.pages.size() > kPagesMax || block.tenant.size() > kTenantBytesMax) return 0;
  Head head;
  head.bytes = static_cast<uint32_t>(sizeof(Head) + sizeof(PageEntry) * block.pages.size() + block.tenant.size());
  const auto taken = room_.Take(head.bytes);
  if (!taken) return 0;
  head.index = block.index;
  head.tokens = block.tokens;
  head.pages = static_cast<uint16_t>(block.pages.size());
  head.tenant_bytes = static_cast<uint16_t>(block.tenant.size());
  head.cache = block.cache;
  head.name = block.name;
  const uint64_t at = *taken + kAlign;
  uint8_t* const entry = region_->data() + at;
  std::memcpy(entry, &head, sizeof head);
  uint8_t* to = entry + sizeof head;
  for (const KeptPage& page : block.pages) {
    const PageEntry each{
        page.place.number, static_cast<uint16_t>(page.place.size), page.raw, page.rung, page.place.slot_bytes,
        page.checksum};
    std::memcpy(to, &each, sizeof each);
    to += sizeof each;
  }
  std::memcpy(to, block.tenant.data(), block.tenant.size());
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(entry))
      .store(CheckOf(entry, head.bytes), std::memory_order_release);
  return at;
}

void KeptManifest::Erase(uint64_t at) {
  uint8_t* const entry = region_->data() + at;
  const auto head = Load<Head>(entry);
  // Nothing that is written behind this may come before it.
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(entry)).exchange(0, std::memory_order_seq_cst);
  std::memset(entry, 0, head.bytes);
  room_.GiveBack(at - kAlign, head.bytes);
}

}  // namespace kvmanager
