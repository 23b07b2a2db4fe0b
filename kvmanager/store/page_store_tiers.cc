// Blocks in two memories: a GPU's pages go to the host before their room is needed, and come back when they are asked
// for; sequences are copied from one to the other, to be handed over or taken over.
//
// Caches of equal digest are one cache in several memories, so what leaves a GPU is an ordinary published block of the
// host's cache: found, evicted, handed over and purged as any other. A move is a hand-off inside the daemon: its source
// is pinned, its target is Receiving and found by nobody until it lands. Bytes that come from a GPU are checked as a
// peer's are, since engines write there themselves.
#include <algorithm>
#include <utility>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

bool NoRaw(const Block&, uint32_t) { return false; }

// Slots of a page that are copied, and in which form their copies are. A page whose sequence has gone is copied all the
// same, since it is pinned.
struct Sources {
  PageId raw;
  PageId encoded;
};
Sources SourcesOf(const Block& block, uint32_t layer, const MoveForms& forms) {
  const Page& page = block.pages[layer];
  // Its sequence may have filled it since; its raw bytes stay.
  if (block.index >= forms.full_blocks) return {page.raw.valid() ? page.raw : page.encoded, PageId()};
  KV_CHECK(!page.awaits_encoding() && (page.raw.valid() || page.encoded.valid()));
  if (page.declined || !page.encoded.valid()) return {page.raw, PageId()};
  return {forms.with_raw(block, layer) ? page.raw : PageId(), page.encoded};
}

}  // namespace

std::shared_ptr<Cache> PageStoreImpl::LowerCounterpart(const Cache& cache) const {
  const Tier* const lower = cache.tier->lower();
  if (lower == nullptr) return nullptr;
  const auto found = cache_by_digest_.find({cache.digest, lower->device()});
  return found == cache_by_digest_.end() ? nullptr : caches_.at(found->second);
}

absl::StatusOr<std::shared_ptr<Cache>> PageStoreImpl::CounterpartOn(const Cache& cache, int device) {
  CacheConfig config = cache.config;
  config.device = device;
  return FindOrOpen(config, cache.codec, nullptr);
}

bool PageStoreImpl::IsCounterpart(CacheId id, SequenceId sequence) const {
  const auto cache = FindCache(id);
  const auto found = FindSequence(sequence);
  return cache.ok() && found.ok() && (*cache)->digest == (*found)->cache->digest && (*found)->cache != *cache;
}

void PageStoreImpl::CountSlots(const Block& block, const Cache& to, const MoveForms& forms, SlotCounts* wanted) {
  for (uint32_t layer = 0; layer < block.pages.size(); ++layer) {
    const Sources sources = SourcesOf(block, layer, forms);
    wanted->raw += sources.raw.valid();
    if (sources.encoded.valid()) to.CountEncodedSlots(layer, 1, wanted);
  }
}

void PageStoreImpl::StartMove(const std::shared_ptr<Cache>& from, const std::shared_ptr<Cache>& to,
                              absl::Span<Block* const> blocks, const MoveForms& forms, bool demotes, Reservation* slots,
                              std::vector<Block*>* copies) {
  auto move = std::make_shared<BlockMove>();
  move->upper = UpperOf(from->tier, to->tier);
  KV_CHECK(move->upper != nullptr);
  move->from = from;
  move->to = to;
  move->demotes = demotes;
  ++from->leases;
  ++to->leases;
  std::vector<MovingPage> pages;
  for (Block* source : blocks) {
    KV_CHECK(source->cache == from);
    Block* const target = NewBlock(to, source->index);
    BlockMove::Pair pair;
    pair.from = source;
    pair.to = target;
    pair.first_page = pages.size();
    pair.named = source->published;
    pair.name = source->name;
    for (uint32_t layer = 0; layer < source->pages.size(); ++layer) {
      const Sources sources = SourcesOf(*source, layer, forms);
      const bool is_open = source->index >= forms.full_blocks;
      MovingPage page;
      page.to = {target, layer};
      PageChange reserved;
      if (sources.raw.valid()) {
        reserved.raw = slots->TakeRaw();
        page.source = Data(*from, sources.raw);
        page.target = Data(*to, reserved.raw);
        page.bytes = to->layout().raw_bytes();
        page.raw = true;
        page.stays = !sources.encoded.valid();
        page.open_tokens = is_open ? forms.open_tokens : 0;
        page.checksum = page.stays && !is_open ? source->pages[layer].checksum : 0;
        move->bytes += page.bytes;
        pages.push_back(page);
      }
      if (sources.encoded.valid()) {
        reserved.encoded = slots->TakeEncoded(*to, layer);
        page = {page.to, Data(*from, sources.encoded), Data(*to, reserved.encoded), to->page_bytes(layer)};
        page.checksum = source->pages[layer].checksum;
        move->bytes += page.bytes;
        pages.push_back(page);
      }
      Apply(page.to, PageEvent::kReserve, reserved);
      Pin({source, layer});
    }
    if (pair.named) {
      target->name = pair.name;
      pair.arriving = to->tier == move->upper && to->arriving.emplace(pair.name.key, target).second;
    }
    copies->push_back(target);
    move->blocks.push_back(std::move(pair));
  }
  if (demotes) move->upper->BeginDemotion(move->bytes);
  moves_.push_back(move);
  mover_->Move(*move->upper, to, std::move(pages), /*given_up=*/nullptr,
               [this, move](bool moved, std::vector<MovingPage> landed) { Land(*move, moved, landed); });
}

void PageStoreImpl::Land(BlockMove& move, bool moved, absl::Span<const MovingPage> pages) {
  Tier& upper = *move.upper;
  if (move.demotes) upper.EndDemotion(move.bytes);
  // Children first (EvictionPolicy).
  size_t end = pages.size();
  for (auto pair = move.blocks.rbegin(); pair != move.blocks.rend(); ++pair) {
    LandBlock(move, *pair, moved, pages.subspan(pair->first_page, end - pair->first_page));
    end = pair->first_page;
  }
  for (const std::shared_ptr<Cache>& cache : {move.from, move.to}) {
    --cache->leases;
    if (!cache->wanted) CloseIfUnused(cache);
  }
  moves_.erase(std::find_if(moves_.begin(), moves_.end(), [&](const auto& each) { return each.get() == &move; }));
  upper.DemoteAhead();
  NotifyWaiters();
}

void PageStoreImpl::LandBlock(BlockMove& move, const BlockMove::Pair& pair, bool moved,
                              absl::Span<const MovingPage> pages) {
  Block* const from = pair.from;
  Block* const to = pair.to;
  Cache& cache = *move.to;
  if (pair.arriving) cache.arriving.erase(pair.name.key);
  const bool refused = std::any_of(pages.begin(), pages.end(), [](const MovingPage& page) { return page.refused; });
  if (moved && !refused) {
    for (const MovingPage& moving : pages) {
      if (!moving.stays) continue;
      const Page& page = moving.to.page();
      if (moving.open_tokens > 0) {
        Apply(moving.to, PageEvent::kReceivedOpen, {page.raw, page.encoded});
      } else {
        Apply(moving.to, PageEvent::kReceivedCopy, {page.raw, page.encoded, moving.raw, moving.checksum});
        ReleaseRawIfUnused(moving.to);
      }
    }
    if (pair.named && !move.purged && cache.table.FindKey(pair.name.key) == nullptr) {
      cache.table.Insert(to);
      metrics_->published_blocks.Increment();
    }
    const bool demoted = move.from->tier == move.upper;
    (demoted ? from : to)->kept = pair.named && !move.purged;
    (demoted ? metrics_->demoted_blocks : metrics_->fetched_blocks).Increment();
    (demoted ? metrics_->demoted_bytes : metrics_->fetched_bytes).Increment(static_cast<double>(to->bytes));
  } else {
    metrics_->lost_moves.Increment();
    to->corrupt = true;
    // What the host refuses is wrong on the GPU, too.
    if (refused) {
      from->corrupt = true;
      if (from->published) Unname(from);
    }
  }
  Release(to);
  for (uint32_t layer = 0, layers = static_cast<uint32_t>(from->pages.size()); layer < layers; ++layer) {
    if (layer + 1 == layers && move.purged && from->published && from->holders == 0 && from->pins == 1) Unname(from);
    Unpin({from, layer});
  }
}

void PageStoreImpl::NotKept(const Block& block) {
  for (const auto& tier : tiers_) {
    if (tier->lower() != block.cache->tier || tier->mover() == nullptr) continue;
    const auto counterpart = cache_by_digest_.find({block.cache->digest, tier->device()});
    if (counterpart == cache_by_digest_.end()) continue;
    Block* const there = caches_.at(counterpart->second)->table.FindKey(block.name.key);
    if (there != nullptr) tier->SetKept(there, false);
  }
}

bool PageStoreImpl::Demote(Block* block) {
  KV_CHECK(block->evictable);
  const std::shared_ptr<Cache> from = block->cache;
  Tier& tier = *from->tier;
  if (!tier.can_move()) return false;
  if (const std::shared_ptr<Cache> counterpart = LowerCounterpart(*from)) {
    if (Block* const known = counterpart->table.FindKey(block->name.key)) {
      counterpart->tier->Touch(known);
      tier.SetKept(block, true);
      return false;
    }
  }
  tier.SetKept(block, false);
  for (const Page& page : block->pages) {
    if (page.state != PageState::kResident) return false;
  }
  const absl::StatusOr<std::shared_ptr<Cache>> to = CounterpartOn(*from, tier.lower()->device());
  if (!to.ok()) return false;
  SlotCounts wanted;
  const MoveForms forms{NoRaw};
  CountSlots(*block, **to, forms, &wanted);
  Reservation slots((*to)->tier->pool());
  std::vector<Block*> copies;
  if (!(*to)->tier->CanReserve(**to, wanted) || !(*to)->tier->Reserve(**to, wanted, &slots).ok()) {
    if (!(*to)->wanted) CloseIfUnused(*to);
    return false;
  }
  StartMove(from, *to, {&block, 1}, forms, /*demotes=*/true, &slots, &copies);
  return true;
}

}  // namespace kvmanager
