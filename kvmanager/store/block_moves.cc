#include "kvmanager/store/block_moves.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

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
  const Page page = block.pages()[layer];
  // Its sequence may have filled it since; its raw bytes stay.
  if (block.index >= forms.full_blocks) return {page.raw.valid() ? page.raw : page.encoded, PageId()};
  KV_CHECK(!page.awaits_encoding() && (page.raw.valid() || page.encoded.valid()));
  if (page.declined || !page.encoded.valid()) return {page.raw, PageId()};
  return {forms.with_raw(block, layer) ? page.raw : PageId(), page.encoded};
}

}  // namespace

void BlockMoves::CountSlots(const Block& block, const Cache& to, const MoveForms& forms, SlotCounts* wanted) {
  for (uint32_t layer = 0; layer < block.pages().size(); ++layer) {
    const Sources sources = SourcesOf(block, layer, forms);
    wanted->raw += sources.raw.valid();
    if (sources.encoded.valid()) to.CountEncodedSlots(layer, 1, wanted);
  }
}

void BlockMoves::Start(const std::shared_ptr<Cache>& from, const std::shared_ptr<Cache>& to,
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
    KV_CHECK(source->cache == from.get());
    Block* const target = parts_.blocks->New(to, source->index);
    BlockMove::Pair pair;
    pair.from = source;
    pair.to = target;
    pair.first_page = pages.size();
    pair.named = source->published;
    pair.name = source->name;
    for (uint32_t layer = 0; layer < source->pages().size(); ++layer) {
      const Sources sources = SourcesOf(*source, layer, forms);
      const bool is_open = source->index >= forms.full_blocks;
      MovingPage page;
      page.to = {target, layer};
      PageChange reserved;
      if (sources.raw.valid()) {
        reserved.raw = slots->TakeRaw();
        page.source = PageData(*from, sources.raw);
        page.target = PageData(*to, reserved.raw);
        page.bytes = to->layout(layer).raw_bytes();
        page.raw = true;
        page.stays = !sources.encoded.valid();
        page.open_tokens = is_open ? forms.open_tokens : 0;
        page.checksum = page.stays && !is_open ? source->pages()[layer].checksum : 0;
        move->bytes += page.bytes;
        pages.push_back(page);
      }
      if (sources.encoded.valid()) {
        reserved.encoded = slots->TakeEncoded(*to, layer);
        page = {page.to, PageData(*from, sources.encoded), PageData(*to, reserved.encoded), to->page_bytes(layer)};
        page.checksum = source->pages()[layer].checksum;
        move->bytes += page.bytes;
        pages.push_back(page);
      }
      parts_.blocks->Apply(page.to, PageEvent::kReserve, reserved);
      parts_.blocks->Pin({source, layer});
    }
    if (pair.named) {
      target->name = pair.name;
      pair.arriving = to->tier == move->upper && to->arriving.emplace(pair.name.key, target).second;
    }
    copies->push_back(target);
    move->blocks.push_back(std::move(pair));
  }
  if (demotes) move->upper->Count(&Tier::Bytes::demoting, static_cast<int64_t>(move->bytes));
  moves_.push_back(move);
  parts_.mover->Move(*move->upper, to, std::move(pages), /*given_up=*/nullptr,
                     [this, move](bool moved, const std::vector<MovingPage>& landed) { Land(*move, moved, landed); });
}

void BlockMoves::Land(BlockMove& move, bool moved, absl::Span<const MovingPage> pages) {
  Tier& upper = *move.upper;
  if (move.demotes) upper.Count(&Tier::Bytes::demoting, -static_cast<int64_t>(move.bytes));
  // Children first (EvictionPolicy).
  size_t end = pages.size();
  for (auto pair = move.blocks.rbegin(); pair != move.blocks.rend(); ++pair) {
    LandBlock(move, *pair, moved, pages.subspan(pair->first_page, end - pair->first_page));
    end = pair->first_page;
  }
  for (const std::shared_ptr<Cache>& cache : {move.from, move.to}) {
    --cache->leases;
    if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
  }
  moves_.erase(std::find_if(moves_.begin(), moves_.end(), [&](const auto& each) { return each.get() == &move; }));
  upper.DemoteAhead();
  parts_.encodes->NotifyWaiters();
}

void BlockMoves::LandBlock(BlockMove& move, const BlockMove::Pair& pair, bool moved,
                           absl::Span<const MovingPage> pages) {
  Block* const from = pair.from;
  Block* const to = pair.to;
  Cache& cache = *move.to;
  if (pair.arriving) cache.arriving.erase(pair.name.key);
  const bool refused = std::any_of(pages.begin(), pages.end(), [](const MovingPage& page) { return page.refused; });
  if (moved && !refused) {
    for (const MovingPage& moving : pages) {
      if (!moving.stays) continue;
      const Page page = moving.to.page();
      if (moving.open_tokens > 0) {
        parts_.blocks->Apply(moving.to, PageEvent::kReceivedOpen, {page.raw, page.encoded});
      } else {
        parts_.blocks->Apply(moving.to, PageEvent::kReceivedCopy,
                             {page.raw, page.encoded, moving.raw, moving.checksum});
        parts_.blocks->ReleaseRawIfUnused(moving.to);
      }
    }
    if (pair.named && !move.purged && cache.table.FindKey(pair.name.key) == nullptr) {
      parts_.blocks->Name(to, pair.name);
      to->CopyUse(*from);
    }
    const bool demoted = move.from->tier == move.upper;
    (demoted ? from : to)->kept = pair.named && !move.purged;
    (demoted ? parts_.metrics->demoted_blocks : parts_.metrics->fetched_blocks).Increment();
    (demoted ? parts_.metrics->demoted_bytes : parts_.metrics->fetched_bytes).Increment(static_cast<double>(to->bytes));
  } else {
    parts_.metrics->lost_moves.Increment();
    to->corrupt = true;
    // What the host refuses is wrong on the GPU, too.
    if (refused) {
      from->corrupt = true;
      if (from->published) parts_.blocks->Unname(from, GoneReason::kChecksum);
    }
  }
  parts_.blocks->Release(to);
  for (uint32_t layer = 0, layers = static_cast<uint32_t>(from->pages().size()); layer < layers; ++layer) {
    if (layer + 1 == layers && move.purged && from->published && from->holders == 0 && from->pins == 1)
      parts_.blocks->Unname(from, GoneReason::kPurged);
    parts_.blocks->Unpin({from, layer});
  }
}

void BlockMoves::NotKept(const Block& block) {
  for (const auto& tier : *parts_.tiers) {
    if (tier->lower() != block.cache->tier || tier->mover() == nullptr) continue;
    const std::shared_ptr<Cache> counterpart = parts_.caches->FindIn(block.cache->digest, tier.get());
    if (counterpart == nullptr) continue;
    Block* const there = counterpart->table.FindKey(block.name.key);
    if (there != nullptr) tier->SetKept(there, false);
  }
}

bool BlockMoves::Demote(Block* block) {
  KV_CHECK(block->evictable);
  const std::shared_ptr<Cache> from = block->cache->shared_from_this();
  Tier& tier = *from->tier;
  if (!tier.can_move()) return false;
  if (const std::shared_ptr<Cache> counterpart = parts_.caches->FindIn(from->digest, tier.lower())) {
    if (Block* const known = counterpart->table.FindKey(block->name.key)) {
      counterpart->tier->eviction().Touch(known, /*run=*/nullptr);
      tier.SetKept(block, true);
      return false;
    }
  }
  tier.SetKept(block, false);
  if (!block->is_resident()) return false;
  const absl::StatusOr<std::shared_ptr<Cache>> to = parts_.caches->OpenCounterpart(*from, *tier.lower());
  if (!to.ok()) return false;
  SlotCounts wanted;
  const MoveForms forms{NoRaw};
  CountSlots(*block, **to, forms, &wanted);
  Reservation slots((*to)->tier->pool());
  std::vector<Block*> copies;
  if (!(*to)->tier->CanReserve(**to, wanted) || !(*to)->tier->Reserve(**to, wanted, &slots).ok()) {
    if (!(*to)->wanted) parts_.caches->CloseIfUnused(*to);
    return false;
  }
  Start(from, *to, {&block, 1}, forms, /*demotes=*/true, &slots, &copies);
  return true;
}

void BlockMoves::NotePurge(const CacheDigest* digest) {
  for (const auto& move : moves_) move->purged |= digest == nullptr || move->from->digest == *digest;
}

}  // namespace kvmanager
