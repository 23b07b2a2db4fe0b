#include "kvmanager/store/block_writes.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/stream_copy.h"
#include "kvmanager/store/page_bytes.h"
#include "kvmanager/store/page_check.h"

namespace kvmanager {
namespace {

class BlockWritesImpl final : public BlockWrites {
 public:
  BlockWritesImpl(const BlockWritesParts& parts, std::shared_ptr<Cache> cache)
      : parts_(parts), cache_(std::move(cache)) {
    ++cache_->leases;
  }
  ~BlockWritesImpl() override {
    if (parts_.alive.expired()) return;
    Release();
    --cache_->leases;
  }

  absl::Status Reserve(uint32_t first, absl::Span<const BlockName> names, absl::Span<const uint8_t> raw);

  size_t blocks() const override { return names_.size(); }
  size_t present() const override { return present_; }
  absl::Span<const StoredPage> pages() const override { return pages_; }
  absl::StatusOr<uint64_t> Put(size_t page, const uint8_t* from) const override {
    const StoredPage& stored = pages_[page];
    KV_CHECK(stored.data != nullptr);
    std::memset(stored.data + stored.bytes, 0, slack_[page]);
    if (stored.bytes > kCopyBytesMax) {
      std::memcpy(stored.data, from, stored.bytes);
      return Check(page, stored.data);
    }
    // A copy that stays in the core's cache is checked, and goes to the slot past the caches: the slot is read much
    // later, and its lines need not be fetched to be written.
    thread_local const AlignedBuffer copy(kCopyBytesMax);
    std::memcpy(copy.data(), from, stored.bytes);
    absl::StatusOr<uint64_t> checksum = Check(page, copy.data());
    StoreStreaming(copy.data(), stored.data, stored.bytes);
    EndStreaming();
    return checksum;
  }
  absl::StatusOr<uint64_t> CheckPut(size_t page, uint64_t known) const override {
    const StoredPage& stored = pages_[page];
    KV_CHECK(stored.data != nullptr);
    std::memset(stored.data + stored.bytes, 0, slack_[page]);
    if (known == 0 || stored.raw || cache_->identity()) return Check(page, stored.data);
    KV_RETURN_IF_ERROR(CheckPageValues(*cache_, stored.layer, /*raw=*/false, {stored.data, stored.bytes}, "page"));
    return known;  // the block was never compared: that is done before its first use
  }
  absl::StatusOr<size_t> Commit(absl::Span<const uint64_t> checksums) override;

 private:
  static constexpr size_t kCopyBytesMax = 512 << 10;

  absl::StatusOr<uint64_t> Check(size_t page, const uint8_t* bytes) const {
    const StoredPage& stored = pages_[page];
    return CheckPageBytes(*cache_, stored.layer, stored.raw, {bytes, stored.bytes},
                          absl::StrCat("pages[block ", page / cache_->layers(), "][layer ", stored.layer, "]"));
  }
  uint32_t layers() const { return cache_->layers(); }
  void Release() {
    // Of a chain, children first (EvictionPolicy).
    for (; !held_.empty(); held_.pop_back()) {
      parts_.blocks->ForgetHolder(held_.back());
      parts_.blocks->Release(held_.back(), &run_);
    }
  }
  void Hold(Block* block) {
    parts_.blocks->NoteHolder(block);
    held_.push_back(block);
  }

  const BlockWritesParts parts_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  std::vector<BlockName> names_;
  std::vector<Block*> held_;       // [blocks] those that are here, and new ones; empty once committed
  std::vector<bool> is_new_;       // [blocks]
  std::vector<StoredPage> pages_;  // [blocks][layers]
  std::vector<uint32_t> slack_;    // [pages] bytes of the slot behind the page
  std::vector<PageId> unclean_;    // slots as other tenants left them, until every byte was written
  size_t present_ = 0;
  EvictionRun run_;
};

absl::Status CheckNames(const Cache& cache, uint32_t first, absl::Span<const BlockName> names) {
  absl::flat_hash_set<BlockKey> keys;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string field = absl::StrCat("names[", i, "]");
    if (!keys.insert(names[i].key).second) return InvalidField(field, names[i].key.ToHex(8), "named once");
    const Block* const known = cache.table.FindKey(names[i].key);
    if (known == nullptr) continue;
    if (known->name.tokens != names[i].tokens) {
      return InvalidField(absl::StrCat(field, ".tokens"), names[i].tokens.ToHex(8),
                          absl::StrCat(known->name.tokens.ToHex(8), ", what this key names"));
    }
    if (known->index != first + i) {
      return InvalidField(field, names[i].key.ToHex(8),
                          absl::StrCat("the key of block ", first + i, ", not of block ", known->index));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckForms(const Cache& cache, uint32_t first, size_t blocks, absl::Span<const uint8_t> raw) {
  if (raw.size() != blocks * cache.layers()) {
    return InvalidField("raw", absl::StrCat(raw.size(), " bytes long"),
                        absl::StrCat(blocks * cache.layers(), " bytes long, one for each block and layer"));
  }
  for (size_t i = 0; i < raw.size(); ++i) {
    const uint32_t block = first + static_cast<uint32_t>(i / cache.layers());
    const uint32_t layer = static_cast<uint32_t>(i % cache.layers());
    const bool stays_raw = cache.keeps_raw(block, layer);
    const bool fits = cache.identity() ? raw[i] == 0 : stays_raw ? raw[i] == 1 : raw[i] <= 1;
    if (fits) continue;
    return InvalidField(absl::StrCat("raw[block ", i / cache.layers(), "][layer ", layer, "]"), int{raw[i]},
                        cache.identity() ? "0: the codec has one form"
                        : stays_raw      ? "1: the codec keeps this page raw"
                                         : "0 or 1");
  }
  return absl::OkStatus();
}

// Pages of one form follow one another in the range that they come from: where slots do so too, copies are joined.
void SortByAddress(const SlotPool& pool, std::vector<PageId>* ids) {
  const auto is_before = [&](PageId a, PageId b) { return pool.Data(a) < pool.Data(b); };
  if (!std::is_sorted(ids->begin(), ids->end(), is_before)) std::sort(ids->begin(), ids->end(), is_before);
}

absl::Status BlockWritesImpl::Reserve(uint32_t first, absl::Span<const BlockName> names,
                                      absl::Span<const uint8_t> raw) {
  KV_RETURN_IF_ERROR(CheckNames(*cache_, first, names));
  KV_RETURN_IF_ERROR(CheckForms(*cache_, first, names.size(), raw));
  // Find and hold first: reserving may evict.
  std::vector<Block*> here(names.size(), nullptr);
  SlotCounts wanted;
  for (size_t i = 0; i < names.size(); ++i) {
    MissReason reason;
    here[i] =
        parts_.blocks->Find(*cache_, names[i], first + static_cast<uint32_t>(i), BlockIndex::Bytes::kTrust, &reason);
    for (uint32_t layer = 0; here[i] == nullptr && layer < layers(); ++layer) {
      if (raw[i * layers() + layer] != 0) {
        ++wanted.raw;
      } else {
        cache_->CountEncodedSlots(layer, 1, &wanted);
      }
    }
  }
  SlotPool& pool = *cache_->tier->pool();
  Reservation slots(&pool, Reservation::Cleaning::kByUser);
  if (absl::Status status = cache_->tier->Reserve(*cache_, wanted, &slots); !status.ok()) {
    for (auto block = here.rbegin(); block != here.rend(); ++block) {
      if (*block != nullptr) parts_.blocks->Release(*block);
    }
    return status;
  }
  SortByAddress(pool, &slots.raw.ids);
  for (Reservation::Slots& of_class : slots.encoded) SortByAddress(pool, &of_class.ids);
  names_.assign(names.begin(), names.end());
  pages_.reserve(raw.size());
  for (size_t i = 0; i < names.size(); ++i) {
    is_new_.push_back(here[i] == nullptr);
    present_ += here[i] != nullptr;
    Block* const block = here[i] != nullptr ? here[i] : parts_.blocks->New(cache_, first + static_cast<uint32_t>(i));
    Hold(block);
    for (uint32_t layer = 0; layer < layers(); ++layer) {
      StoredPage page{.layer = layer, .raw = raw[i * layers() + layer] != 0};
      page.bytes = static_cast<uint32_t>(page.raw ? cache_->layout(layer).raw_bytes() : cache_->page_bytes(layer));
      if (is_new_.back()) {
        PageChange reserved;
        const PageId slot = page.raw ? slots.TakeRaw() : slots.TakeEncoded(*cache_, layer);
        (page.raw ? reserved.raw : reserved.encoded) = slot;
        parts_.blocks->Apply({block, layer}, PageEvent::kReserve, reserved);
        page.data = PageData(*cache_, slot);
        slack_.push_back(static_cast<uint32_t>(pool.SlotBytes(slot) - page.bytes));
      } else {
        slack_.push_back(0);
      }
      pages_.push_back(page);
    }
  }
  unclean_ = std::move(slots.unclean);
  return absl::OkStatus();
}

absl::StatusOr<size_t> BlockWritesImpl::Commit(absl::Span<const uint64_t> checksums) {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  KV_CHECK(checksums.size() == pages_.size() && held_.size() == names_.size());
  for (const PageId slot : unclean_) cache_->tier->pool()->NoteCleaned(slot);
  size_t named = 0;
  for (size_t i = 0; i < held_.size(); ++i) {
    if (!is_new_[i]) {
      cache_->tier->eviction().Found(&run_, held_[i]);
      continue;
    }
    Block* const block = held_[i];
    for (uint32_t layer = 0; layer < layers(); ++layer) {
      const Page page = block->pages()[layer];
      const uint64_t checksum = checksums[i * layers() + layer];
      if (page.raw.valid()) {
        parts_.blocks->Apply({block, layer}, PageEvent::kReceivedCopy, {page.raw, PageId(), true, checksum});
        if (cache_->keeps_raw(block->index, layer)) parts_.metrics->sink_pages.Increment();
      } else {
        parts_.blocks->Apply({block, layer}, PageEvent::kReceivedEncoded, {PageId(), page.encoded, false, checksum});
      }
    }
    if (cache_->table.FindKey(names_[i].key) != nullptr) continue;  // somebody published it meanwhile
    parts_.blocks->Name(block, names_[i], &run_);
    ++named;
  }
  parts_.metrics->published.Increment(static_cast<double>(named));
  Release();
  return named;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockWrites>> MakeBlockWrites(const BlockWritesParts& parts,
                                                             const std::shared_ptr<Cache>& cache, uint32_t first,
                                                             absl::Span<const BlockName> names,
                                                             absl::Span<const uint8_t> raw) {
  auto writes = std::make_unique<BlockWritesImpl>(parts, cache);
  KV_RETURN_IF_ERROR(writes->Reserve(first, names, raw));
  return writes;
}

}  // namespace kvmanager
