#include "kvmanager/store/block_lowering.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "codecs/ladder/lower_pages.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/page_bytes.h"

namespace kvmanager {
namespace {

constexpr size_t kPagesOfTask = 4;  // some 0.5 ms of a worker

}  // namespace

// Shared by its tasks and by its end. Tasks write `items`, `checksums`, `corrupt` and `error`, each its own places.
struct BlockLowering::Job {
  Block* block = nullptr;
  std::shared_ptr<Cache> cache;
  int rung = 0;                      // of the pages; they go to the next
  std::vector<PageRef> pages;        // pinned
  std::vector<PageId> slots;         // [pages] of what they become
  std::vector<LowerItem> items;      // [pages]
  std::vector<uint64_t> expected;    // [pages] checksums of what is read
  std::vector<uint64_t> checksums;   // [pages] of what was written
  std::atomic<bool> corrupt{false};  // what was read is not what was stored
  size_t measured = 0;               // the page whose error is measured
  double error = NAN;
  uint64_t slot_bytes = 0;  // of all slots
};

bool BlockLowering::Lower(Block* block) {
  KV_CHECK(block->evictable && block->can_lower);
  const std::shared_ptr<Cache> cache = block->cache->shared_from_this();
  auto job = std::make_shared<Job>();
  job->block = block;
  job->cache = cache;
  job->rung = block->rung();
  SlotCounts wanted;
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    if (!block->pages()[layer].encoded.valid()) continue;
    job->pages.push_back({block, layer});
    cache->CountEncodedSlots(layer, 1, &wanted, job->rung + 1);
  }
  Tier& tier = *cache->tier;
  Reservation slots(tier.pool());
  if (!tier.ReserveFree(*cache, wanted, &slots)) return false;

  block->is_lowering = true;
  for (const PageRef& ref : job->pages) {
    const Page page = ref.page();
    job->slots.push_back(slots.TakeEncoded(*cache, ref.layer, job->rung + 1));
    job->slot_bytes += cache->slot_bytes(ref.layer, ref.kind, job->rung + 1).encoded;
    LowerItem item;
    item.encoded = PageData(*cache, page.encoded);
    item.lowered = PageData(*cache, job->slots.back());
    item.layer = ref.layer;
    item.first_token = uint64_t{block->index} * cache->page_tokens();
    job->items.push_back(item);
    job->expected.push_back(page.checksum);
    parts_.blocks->PinEncoded(ref);
  }
  job->checksums.resize(job->items.size());
  job->measured = block->index % job->items.size();
  ++cache->leases;
  Count(&tier, static_cast<int64_t>(job->slot_bytes));
  jobs_.push_back(job);

  std::vector<absl::AnyInvocable<void()>> tasks;
  for (size_t begin = 0; begin < job->items.size(); begin += kPagesOfTask) {
    const size_t end = std::min(begin + kPagesOfTask, job->items.size());
    // A task keeps the codec, which outlives the cache with it, and touches nothing else of the store's.
    tasks.push_back([job = job.get(), codec = cache->codec, begin, end] {
      AlignedBuffer workspace(LowerWorkspaceBytes(*codec));
      const auto bytes_of = [&](size_t i, int rung) {
        return codec->rung(rung).info().page_bytes(static_cast<int>(job->items[i].layer));
      };
      for (size_t i = begin; i < end; ++i) {
        LowerItem& item = job->items[i];
        if (Checksum(item.encoded, bytes_of(i, job->rung)) != job->expected[i]) {
          job->corrupt.store(true, std::memory_order_relaxed);
          return;
        }
        LowerPages(*codec, job->rung, {&item, 1}, workspace.span());
        if (item.declined) return;
        job->checksums[i] = Checksum(item.lowered, bytes_of(i, job->rung + 1));
        if (i == job->measured) job->error = LoweringError(*codec, job->rung, item, workspace.span());
      }
    });
  }
  tier.executor()->Run(std::move(tasks), [this, alive = parts_.alive, job] {
    if (!alive.expired()) End(job);
  });
  return true;
}

void BlockLowering::Count(Tier* tier, int64_t bytes) {
  tier->Count(&Tier::Bytes::lowering, bytes);
  parts_.metrics->lowering_bytes.Set(static_cast<double>(tier->bytes().lowering));
}

bool BlockLowering::CanSettle(const Job& job) const {
  const Block& block = *job.block;
  if (!block.published || block.holders > 0 || block.jobs() > 0 || block.pins != job.pages.size()) return false;
  return std::none_of(job.items.begin(), job.items.end(), [](const LowerItem& item) { return item.declined; });
}

void BlockLowering::Settle(Job& job) {
  Block* const block = job.block;
  const uint64_t before = block->bytes;
  parts_.recovery->Forget(block);
  const uint8_t rung = static_cast<uint8_t>(job.rung + 1);
  for (size_t i = 0; i < job.pages.size(); ++i) {
    parts_.blocks->Apply(job.pages[i], PageEvent::kLower, {PageId(), job.slots[i], false, job.checksums[i], rung});
  }
  job.slots.clear();
  parts_.recovery->Record(block);
  RungMetrics& metrics = parts_.metrics->Rung(rung);
  metrics.lowered_blocks->Increment();
  metrics.lowered_freed_bytes->Increment(static_cast<double>(before - block->bytes));
  if (std::isfinite(job.error)) metrics.lowering_error->Observe(job.error);
}

void BlockLowering::End(const std::shared_ptr<Job>& job) {
  const std::shared_ptr<Cache> cache = job->cache;
  Tier& tier = *cache->tier;
  Block* const block = job->block;
  Count(&tier, -static_cast<int64_t>(job->slot_bytes));
  if (job->corrupt.load(std::memory_order_relaxed)) {
    parts_.blocks->NoteCompared(block, /*intact=*/false);
  } else if (CanSettle(*job)) {
    Settle(*job);
  } else {
    const bool declined =
        std::any_of(job->items.begin(), job->items.end(), [](const LowerItem& item) { return item.declined; });
    block->stays_on_rung |= declined;
    parts_.metrics->Rung(job->rung + 1).unlowered_blocks->Increment();
  }
  block->is_lowering = false;
  for (const PageId slot : job->slots) tier.Free(slot);
  // The last unpinning may delete the block.
  for (const PageRef& ref : job->pages) parts_.blocks->UnpinEncoded(ref);
  jobs_.remove(job);
  --cache->leases;
  tier.LowerAhead(*cache);
  if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
}

uint64_t BlockLowering::NotePurge(const CacheDigest* digest) {
  uint64_t purged = 0;
  for (const auto& job : jobs_) {
    Block* const block = job->block;
    if (digest != nullptr && job->cache->digest != *digest) continue;
    if (!block->published || block->holders > 0 || block->pins != job->pages.size()) continue;
    parts_.blocks->Unname(block, GoneReason::kPurged);  // its slots stay until they were read
    ++purged;
  }
  parts_.metrics->purged_blocks.Increment(static_cast<double>(purged));
  return purged;
}

void BlockLowering::CheckInvariants() const {
  for (const auto& job : jobs_) {
    KV_CHECK(job->block->is_lowering && job->pages.size() == job->slots.size());
    for (const PageRef& ref : job->pages) {
      KV_CHECK(ref.page().encoded_pins > 0 && ref.page().rung == job->rung);
      KV_CHECK(job->cache->tier->pool()->IsCurrent(job->slots[&ref - job->pages.data()]));
    }
  }
}

}  // namespace kvmanager
