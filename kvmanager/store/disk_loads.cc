#include "kvmanager/store/disk_loads.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/prefix_walk.h"

namespace kvmanager {
namespace {

constexpr size_t kNamesOfPiece = 128;  // that are looked for: some 0.05 ms
constexpr size_t kPagesOfPiece = 256;  // for which slots are taken, and those of one block more
constexpr size_t kReleasedAtOnce = 64;
constexpr size_t kNotedMax = 2048;  // uses of a prefix that the disk's policy is told of: some 0.5 ms

}  // namespace

// First it walks along the names and begins to read what only the disk has; then it waits until all has come.
class DiskLoads::Load final : public DiskLoad {
 public:
  Load(DiskLoads* loads, std::shared_ptr<Cache> cache, std::vector<BlockName> names, uint32_t first,
       LoadUrgency urgency)
      : loads_(*loads),
        alive_(loads->parts_.alive),
        cache_(std::move(cache)),
        names_(std::move(names)),
        first_(first),
        ahead_(urgency == LoadUrgency::kAhead) {
    ++cache_->leases;
    loads_.loads_.insert(this);
  }
  ~Load() override {
    if (alive_.expired()) return;
    loads_.loads_.erase(this);
    StopWaiting();
    loads_.GiveBack(std::move(held_));
    for (const std::shared_ptr<Cache>& cache : {cache_, host_}) {
      if (cache == nullptr) continue;
      --cache->leases;
      if (!cache->wanted) loads_.parts_.caches->CloseIfUnused(cache);
    }
  }

  bool DoPiece() override {
    waits_ = false;
    if (alive_.expired() || done_) {
      done_ = true;
      return false;
    }
    for (; awaited_ < held_.size() && Came(*held_[awaited_]); ++awaited_) {
      on_their_way_ -= bytes_[awaited_];
    }
    if (!walked_) return Walk();
    if (awaited_ == held_.size()) {
      done_ = true;
    } else {
      WaitForBlock();
    }
    return false;
  }
  bool done() const override { return done_; }
  std::vector<BlockName> TakeNames() override { return std::exchange(names_, {}); }
  void OnMore(absl::AnyInvocable<void()> fn) override {
    if (!waits_ || alive_.expired()) return fn();
    fn_ = std::move(fn);
  }
  const CacheDigest& digest() const { return cache_->digest; }
  /// Its blocks are purged: what has come is given back, and nothing more is read.
  void LetGo() {
    std::vector<Block*> come, coming;
    std::vector<uint64_t> coming_bytes;
    on_their_way_ = 0;
    for (size_t i = 0; i < held_.size(); ++i) {
      if (Came(*held_[i])) {
        come.push_back(held_[i]);
        continue;
      }
      coming.push_back(held_[i]);
      coming_bytes.push_back(bytes_[i]);
      on_their_way_ += bytes_[i];
    }
    held_ = std::move(coming);
    bytes_ = std::move(coming_bytes);
    awaited_ = 0;
    walked_ = true;
    if (std::erase(ahead_ ? loads_.ahead_for_room_ : loads_.for_room_, this) > 0) loads_.waking_.push_back(this);
    loads_.GiveBack(std::move(come));
  }
  void Wake() {
    waits_ = false;
    absl::AnyInvocable<void()> fn = std::move(fn_);
    fn_ = nullptr;
    if (fn) fn();
  }

 private:
  static bool Came(const Block& block) { return block.corrupt || block.pages()[0].state != PageState::kReceiving; }

  bool Walk() {
    if (host_ == nullptr) {
      host_ = loads_.parts_.caches->FindIn(cache_->digest, loads_.parts_.host);
      if (host_ != nullptr) ++host_->leases;
    }
    size_t pages = 0;
    for (size_t looked = 0; looked < kNamesOfPiece && pages < kPagesOfPiece; ++looked) {
      const size_t at = held_.size();
      if (at == names_.size()) return EndWalk();
      const BlockName& name = names_[at];
      const uint32_t index = first_ + static_cast<uint32_t>(at);
      const NextBlock next = FindNextBlock(Places(), name, index);
      if (next.block != nullptr) {
        Hold(next.block, 0);
        continue;
      }
      if (next.on_disk == nullptr || !Fits(*cache_, *next.on_disk)) return EndWalk();
      if (on_their_way_ >= kLoadBytesMax) {
        WaitForBlock();
        return false;
      }
      if (loads_.reading_bytes_ >= (ahead_ ? kAheadBytesMax : kReadingBytesMax)) {
        (ahead_ ? loads_.ahead_for_room_ : loads_.for_room_).push_back(this);
        waits_ = true;
        return false;
      }
      if (!EnsureHost()) return EndWalk();
      Block* const block = loads_.Read(host_, *next.on_disk, name);
      if (block == nullptr) return EndWalk();
      if (ahead_) loads_.parts_.metrics->prefetched_blocks.Increment();
      Hold(block, loads_.readings_.at(block).bytes);
      pages += host_->layers();
    }
    return true;
  }
  bool EndWalk() {
    walked_ = true;
    // Of those in memory, too: what is used there is used on the disk.
    loads_.parts_.disk->NoteUse(cache_->digest, absl::MakeConstSpan(names_).first(std::min(held_.size(), kNotedMax)));
    loads_.WakeForRoom();
    return true;
  }
  // The cache's own memory, and the host's, where what the disk has comes to.
  PrefixPlaces Places() const {
    const PrefixPlaces::Memory host{host_.get(), /*arriving=*/true};
    if (cache_ == host_) return {host, {}, loads_.parts_.disk};
    return {{cache_.get()}, host, loads_.parts_.disk};
  }
  bool EnsureHost() {
    if (host_ != nullptr) return true;
    auto opened = loads_.parts_.caches->OpenCounterpart(*cache_, *loads_.parts_.host);
    if (!opened.ok()) return false;
    host_ = *std::move(opened);
    ++host_->leases;
    return true;
  }
  void Hold(Block* block, uint64_t bytes) {
    loads_.parts_.blocks->NoteHolder(block);
    loads_.parts_.blocks->Hold(block);
    held_.push_back(block);
    bytes_.push_back(bytes);
    on_their_way_ += bytes;
  }
  void WaitForBlock() {
    waits_ = true;
    loads_.readings_.at(held_[awaited_]).waiting.push_back(this);
  }
  void StopWaiting() {
    if (!std::exchange(waits_, false)) return;
    std::erase(ahead_ ? loads_.ahead_for_room_ : loads_.for_room_, this);
    std::erase(loads_.waking_, this);
    loads_.WakeForRoom();
    if (awaited_ == held_.size()) return;
    if (const auto reading = loads_.readings_.find(held_[awaited_]); reading != loads_.readings_.end()) {
      std::erase(reading->second.waiting, this);
    }
  }

  DiskLoads& loads_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> cache_;
  std::shared_ptr<Cache> host_;  // its counterpart in host memory, perhaps itself; nullptr: not open so far
  std::vector<BlockName> names_;
  const uint32_t first_;
  const bool ahead_;
  std::vector<Block*> held_;     // of the names, from the first on
  std::vector<uint64_t> bytes_;  // of each that this load began to read; 0 for the others
  size_t awaited_ = 0;           // of held_: those before it have come
  uint64_t on_their_way_ = 0;
  bool walked_ = false, done_ = false, waits_ = false;
  absl::AnyInvocable<void()> fn_;
};

bool DiskLoads::Fits(const Cache& cache, const DiskBlock& block) {
  if (block.layers != cache.layers()) return false;
  for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
    if (cache.identity() ? block.IsRaw(layer) : cache.keeps_raw(block.index, layer) && !block.IsRaw(layer))
      return false;
  }
  return true;
}

std::unique_ptr<DiskLoad> DiskLoads::Begin(CacheId id, std::vector<BlockName>* names, uint32_t first,
                                           LoadUrgency urgency) {
  if (parts_.disk == nullptr) return nullptr;
  auto cache = parts_.caches->Find(id);
  if (!cache.ok()) return nullptr;
  return std::make_unique<Load>(this, *std::move(cache), std::exchange(*names, {}), first, urgency);
}

Block* DiskLoads::Read(const std::shared_ptr<Cache>& cache, const DiskBlock& block, const BlockName& name) {
  SlotCounts wanted;
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    if (block.IsRaw(layer)) {
      ++wanted.raw;
    } else {
      cache->CountEncodedSlots(layer, 1, &wanted);
    }
  }
  const DiskBlock found = block;  // reserving may evict, and what is evicted is told of
  Reservation slots(cache->tier->pool());
  if (!cache->tier->Reserve(*cache, wanted, &slots).ok()) return nullptr;
  if (parts_.disk->Find(cache->digest, name.key) == nullptr) return nullptr;
  Block* const target = parts_.blocks->New(cache, found.index);
  target->name = name;
  parts_.blocks->NoteHolder(target);
  Reading reading{.cache = cache, .name = name};
  std::vector<MovingPage> pages;
  std::vector<BlockDisk::Target> targets;
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    const bool raw = found.IsRaw(layer);
    PageChange reserved;
    const PageId slot = raw ? slots.TakeRaw() : slots.TakeEncoded(*cache, layer);
    (raw ? reserved.raw : reserved.encoded) = slot;
    MovingPage page;
    page.to = {target, layer};
    page.target = PageData(*cache, slot);
    page.bytes = raw ? cache->layout(layer).raw_bytes() : cache->page_bytes(layer);
    page.raw = raw;
    parts_.blocks->Apply(page.to, PageEvent::kReserve, reserved);
    targets.push_back({page.target, static_cast<uint32_t>(page.bytes)});
    reading.bytes += page.bytes;
    pages.push_back(page);
  }
  ++cache->leases;
  cache->arriving.emplace(name.key, target);
  reading_bytes_ += reading.bytes;
  readings_.emplace(target, std::move(reading));
  parts_.disk->Read(cache->digest, name.key, std::move(targets),
                    [this, alive = parts_.alive, target,
                     pages = std::move(pages)](absl::StatusOr<std::vector<uint64_t>> checksums) mutable {
                      if (!alive.expired()) OnRead(target, std::move(pages), std::move(checksums));
                    });
  return target;
}

void DiskLoads::OnRead(Block* target, std::vector<MovingPage> pages, absl::StatusOr<std::vector<uint64_t>> checksums) {
  if (!checksums.ok() || checksums->size() != pages.size()) return Land(target, /*read=*/false, pages);
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i].checksum = (*checksums)[i];
    pages[i].must_match = true;
  }
  parts_.mover->Check(readings_.at(target).cache, std::move(pages),
                      [this, target](bool, auto landed) { Land(target, /*read=*/true, landed); });
}

void DiskLoads::Land(Block* target, bool read, absl::Span<const MovingPage> pages) {
  const auto found = readings_.find(target);
  Reading reading = std::move(found->second);
  readings_.erase(found);
  reading_bytes_ -= reading.bytes;
  Cache& cache = *reading.cache;
  cache.arriving.erase(reading.name.key);
  const auto refused = std::find_if(pages.begin(), pages.end(), [](const MovingPage& page) { return page.refused; });
  if (read && refused == pages.end()) {
    for (const MovingPage& moving : pages) {
      const Page page = moving.to.page();
      parts_.blocks->Apply(moving.to, PageEvent::kReceivedCopy, {page.raw, page.encoded, moving.raw, moving.checksum});
    }
    if (!reading.purged && cache.table.FindKey(reading.name.key) == nullptr) {
      parts_.blocks->Name(target, reading.name);
      parts_.blocks->NoteCompared(target, /*intact=*/true);
      target->from_disk = true;
    }
  } else {
    target->corrupt = true;
    if (refused != pages.end()) {
      parts_.metrics->checksum_failures.Increment();
      parts_.disk->EraseBad(cache.digest, reading.name.key, {refused->to.layer, refused->checksum, refused->expected});
    }
  }
  parts_.blocks->ForgetHolder(target);
  parts_.blocks->Release(target);
  --cache.leases;
  if (!cache.wanted) parts_.caches->CloseIfUnused(reading.cache);
  parts_.encodes->NotifyWaiters();
  waking_.insert(waking_.end(), reading.waiting.begin(), reading.waiting.end());
  WakeForRoom();
}

void DiskLoads::WakeForRoom() {
  if (!for_room_.empty() && reading_bytes_ < kReadingBytesMax) {
    waking_.push_back(for_room_.front());
    for_room_.pop_front();
  }
  if (!ahead_for_room_.empty() && reading_bytes_ < kAheadBytesMax) {
    waking_.push_back(ahead_for_room_.front());
    ahead_for_room_.pop_front();
  }
  // A callback may destroy any load.
  while (!waking_.empty()) {
    Load* const load = waking_.front();
    waking_.pop_front();
    load->Wake();
  }
}

void DiskLoads::NotePurge(const CacheDigest* digest) {
  for (auto& [target, reading] : readings_) reading.purged |= digest == nullptr || reading.cache->digest == *digest;
  for (Load* const load : loads_) {
    if (digest == nullptr || load->digest() == *digest) load->LetGo();
  }
  WakeForRoom();
}

void DiskLoads::GiveBack(std::vector<Block*> blocks) {
  ReleaseLast(blocks);
  if (blocks.empty()) return;
  left_.push_back(std::move(blocks));
  if (left_.size() == 1) on_leftovers_();
}

// Of a chain, children first (EvictionPolicy).
void DiskLoads::ReleaseLast(std::vector<Block*>& blocks) {
  for (size_t i = 0; i < kReleasedAtOnce && !blocks.empty(); ++i, blocks.pop_back()) {
    parts_.blocks->ForgetHolder(blocks.back());
    parts_.blocks->Release(blocks.back());
  }
}

bool DiskLoads::ReleaseSome() {
  if (left_.empty()) return false;
  // Room that comes may be taken at once, by somebody who looks for more here.
  std::vector<Block*> blocks = std::move(left_.front());
  left_.pop_front();
  ReleaseLast(blocks);
  if (!blocks.empty()) left_.push_front(std::move(blocks));
  return !left_.empty();
}

absl::flat_hash_map<const Cache*, uint64_t> DiskLoads::Arriving() const {
  absl::flat_hash_map<const Cache*, uint64_t> counts;
  for (const auto& [target, reading] : readings_) ++counts[reading.cache.get()];
  return counts;
}

}  // namespace kvmanager
