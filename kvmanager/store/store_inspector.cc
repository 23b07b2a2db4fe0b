#include "kvmanager/store/store_inspector.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/tenant_label.h"
#include "kvmanager/store/explanations.h"

namespace kvmanager {
namespace {

using Slots = absl::flat_hash_set<uint32_t>;

void CheckSlot(const SlotPool& pool, PageId slot, uint64_t bytes, Slots* seen) {
  if (!slot.valid()) return;
  KV_CHECK(pool.IsCurrent(slot) && pool.SlotBytes(slot) == bytes);
  KV_CHECK(seen->insert(slot.slot).second);
}

void CheckPage(const Block& block, const Page& page, bool identity) {
  KV_CHECK(page.pins >= page.encoded_pins);
  const bool raw = page.raw.valid(), encoded = page.encoded.valid();
  switch (page.state) {
    case PageState::kFree:
      KV_CHECK(!raw && !encoded && page.pins == 0 && !page.busy);
      break;
    case PageState::kFilling:
      KV_CHECK(raw && !encoded && !page.busy);
      break;
    case PageState::kReceiving:
      KV_CHECK((raw || encoded) && !page.busy && !block.published);
      break;
    case PageState::kSealed:
      KV_CHECK(raw && encoded && !page.busy);
      break;
    case PageState::kEncoding:
      KV_CHECK(raw && encoded && page.busy);
      break;
    case PageState::kResident:
      KV_CHECK(!page.busy && (page.declined ? raw && !encoded : encoded));
      if (!page.declined) KV_CHECK(!identity || !raw);
      if (raw && !page.declined) KV_CHECK(page.raw_holds > 0 || page.pins > page.encoded_pins);
      if (page.raw_holds > 0) KV_CHECK(raw || identity);
      break;
    case PageState::kQuarantined:
      KV_CHECK((raw || encoded) && (page.pins > 0 || page.busy) && block.holders == 0 && !block.published);
      break;
  }
}

// A page of activations beside K and V of the same tokens.
void CheckActivations(const Page& keys_values, const Page& page) {
  KV_CHECK(!page.declined && page.raw_holds == 0);
  switch (page.state) {
    case PageState::kFilling:
      KV_CHECK(keys_values.state == PageState::kFilling);
      break;
    case PageState::kReceiving:
      KV_CHECK(keys_values.state == PageState::kReceiving && page.encoded.valid() && !page.raw.valid());
      break;
    case PageState::kResident:
      KV_CHECK(keys_values.is_full() || keys_values.state == PageState::kReceiving);
      break;
    default:
      KV_CHECK(page.state == PageState::kFree || page.state == PageState::kQuarantined);
  }
}

}  // namespace

std::string StoreInspector::HeldByTenant(const Cache& of) const {
  std::vector<std::pair<uint64_t, const Cache*>> caches;
  for (const auto& [id, cache] : parts_.caches->all()) {
    const uint64_t bytes = cache->raw_bytes + cache->encoded_bytes + cache->activation_bytes;
    if (cache->tenant == of.tenant && cache->tier == of.tier && bytes > 0) caches.emplace_back(bytes, cache.get());
  }
  const size_t named = std::min(kCachesNamed, caches.size());
  std::partial_sort(caches.begin(), caches.begin() + named, caches.end(), [](const auto& a, const auto& b) {
    return std::pair(b.first, a.second->id) < std::pair(a.first, b.second->id);
  });
  caches.resize(named);
  return absl::StrJoin(caches, ", ", [](std::string* out, const auto& each) {
    absl::StrAppend(out, each.first, " in cache ", each.second->id, " with ", each.second->sequences, " sequences");
  });
}

absl::Status StoreInspector::Exhausted(const Cache& cache, const SlotCounts& counts) const {
  if (!cache.tier->awaits_release()) parts_.metrics->exhausted.Increment();  // else whoever asks may ask again
  std::string wanted;
  const auto add = [&wanted](size_t count, uint64_t bytes) {
    if (count > 0) absl::StrAppend(&wanted, wanted.empty() ? "" : " and ", count, " slots of ", bytes);
  };
  add(counts.raw, cache.raw_slot_bytes);
  for (size_t i = 0; i < cache.encoded_slots.bytes.size(); ++i) add(counts.encoded[i], cache.encoded_slots.bytes[i]);
  add(counts.activations, cache.activation_slot_bytes);
  const std::string held = HeldByTenant(cache);
  const SlotPool& pool = *cache.tier->pool();
  const PoolShares::Account* const share = pool.shares().Find(cache.payer);
  KV_CHECK(share != nullptr);
  const uint64_t retired = cache.tier->retired_slots();
  return FieldError(
      absl::StatusCode::kResourceExhausted, pool.limit(),
      absl::StrCat(pool.used_bytes(), " used, and ", wanted, " wanted by tenant ", TenantLabel(cache.config.tenant)),
      absl::StrCat(
          "at most ", pool.capacity_bytes(), " in slabs of ", pool.slab_bytes(), ", ", pool.free_slabs(),
          " of them free, each of one tenant and slot size; this tenant's share is at most ", share->most_bytes,
          " with ", share->guaranteed_bytes, " guaranteed, and it takes nothing from those who have less; it has ",
          share->charge, " in slabs, and evicting what it may would not make room",
          retired == 0 ? "" : absl::StrCat(" before kernels have done with ", retired, " slots that were given up"),
          "; this tenant has ", held.empty() ? "nothing there" : held));
}

StoreUse StoreInspector::Use() const {
  StoreUse use;
  parts_.sequences->WriteUse(&use);
  use.caches = parts_.caches->all().size();
  use.lease_pages = parts_.reads->pages().all();
  use.tenant_lease_pages = parts_.reads->pages().most();
  use.mapped_pages = parts_.mapped_pages->all();
  use.tenant_mapped_pages = parts_.mapped_pages->most();
  use.tenant_caches = parts_.caches->of_payers().most();
  use.sent_pages = parts_.exports->pages().all();
  use.tenant_sent_pages = parts_.exports->pages().most();
  use.encoding_pages = parts_.encodes->pages();
  use.unwritten_blocks = parts_.disk_writes->unwritten();
  use.unclaimed_blocks = parts_.recovery->unclaimed();
  return use;
}

absl::StatusOr<std::unique_ptr<Explanation>> StoreInspector::BeginExplain(CacheId cache, std::vector<BlockName> names) {
  return MakeExplanation({parts_.caches, parts_.gone, parts_.disk, parts_.clock, parts_.alive}, cache,
                         std::move(names));
}

absl::Status StoreInspector::SetQuotas(Quotas quotas) {
  KV_RETURN_IF_ERROR(parts_.payers->SetQuotas(std::move(quotas)));
  parts_.imports->RoomCame();
  return absl::OkStatus();
}

// From the outside in.
void StoreInspector::CheckInvariants() const {
  absl::flat_hash_set<const Block*> blocks;
  for (const Block* block : parts_.blocks->All()) KV_CHECK(blocks.insert(block).second);
  const auto& sequences = parts_.sequences->all();
  for (const auto& tier : *parts_.tiers) tier->pool()->CheckInvariants();
  absl::flat_hash_map<const Block*, uint32_t> holders;
  absl::flat_hash_map<std::pair<const Block*, uint32_t>, uint32_t> raw_holds;  // and layer
  absl::flat_hash_map<const Cache*, uint64_t> sequences_of;
  const auto check_sequence = [&](const Sequence& sequence, bool visible) {
    const Cache& cache = *sequence.cache;
    if (visible) ++sequences_of[&cache];
    KV_CHECK(sequence.tokens.size() == cache.layers() && sequence.aged.size() == cache.layers());
    for (uint32_t i = 0; i < sequence.blocks.size(); ++i) {
      const Block* block = sequence.blocks[i];
      KV_CHECK(blocks.contains(block) && block->index == i && block->cache == sequence.cache.get());
      ++holders[block];
      bool full = true;
      for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
        const Page page = block->pages()[layer];
        if (sequence.HoldsRaw(i, layer)) ++raw_holds[{block, layer}];
        const uint64_t begin = uint64_t{i} * cache.page_tokens();
        full &= page.is_full() || page.state == PageState::kReceiving;
        if (!visible) continue;
        if (sequence.tokens[layer] <= begin) {
          KV_CHECK(page.state == PageState::kFree);
        } else if (sequence.tokens[layer] < begin + cache.page_tokens()) {
          KV_CHECK(page.state == PageState::kFilling);
        } else {
          const bool to_come = sequence.arriving || !sequence.broken.ok();
          // What is recomputed needs its raw form for the codec; what the codec keeps raw has no other.
          const bool arrives =
              page.state == PageState::kReceiving &&
              (!page.raw.valid() || cache.keeps_raw(i, layer) || block->activations()[layer].state != PageState::kFree);
          KV_CHECK(page.is_full() || (to_come && arrives));
        }
      }
      if (!full) KV_CHECK(block->holders == 1 && !block->published);
    }
    for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
      KV_CHECK(!visible || sequence.tokens[layer] <= sequence.blocks.size() * cache.page_tokens());
      KV_CHECK(uint64_t{sequence.aged[layer]} * cache.page_tokens() <= sequence.tokens[layer]);
    }
  };
  for (const auto& [id, sequence] : sequences) check_sequence(*sequence, true);
  for (const Sequence* sequence : parts_.sequences->hidden()) check_sequence(*sequence, false);
  for (const SequenceTable::Left& left : parts_.sequences->left()) {
    KV_CHECK(left.cache->leases > 0);
    for (const Block* block : left.blocks) {
      KV_CHECK(blocks.contains(block) && block->cache == left.cache.get());
      ++holders[block];
      for (uint32_t layer = 0; layer < left.cache->layers(); ++layer) {
        if (block->index >= left.aged[layer]) ++raw_holds[{block, layer}];
      }
    }
  }
  for (const Block* block : blocks) {
    if (block->other_holders > 0) holders[block] += block->other_holders;
  }
  for (const ExportHolds& left : parts_.exports->left()) {
    KV_CHECK(left.cache->leases > 0 && left.pages.size() == left.numbers.size());
    for (const auto* const pins : {&left.pages, &left.tail, &left.open, &left.activations}) {
      for (const PageRef& ref : *pins) {
        if (ref.block != nullptr) KV_CHECK(blocks.contains(ref.block) && ref.page().pins > 0);
      }
    }
    for (const Block* block : left.blocks) KV_CHECK(blocks.contains(block) && block->holders > 0);
  }
  absl::flat_hash_map<const Cache*, uint64_t> arriving = parts_.disk_loads->Arriving();
  absl::flat_hash_map<const Tier*, uint64_t> demoting_bytes;
  demoting_bytes[(*parts_.tiers)[0].get()] = parts_.disk_writes->demoting_bytes();
  for (const auto& move : parts_.moves->all()) {
    KV_CHECK(move->from->leases > 0 && move->to->leases > 0);
    for (const BlockMove::Pair& pair : move->blocks) {
      KV_CHECK(blocks.contains(pair.from) && blocks.contains(pair.to) && pair.from->pins > 0);
      ++holders[pair.to];
      for (const Page page : pair.to->pages()) KV_CHECK(page.state == PageState::kReceiving);
      if (!pair.arriving) continue;
      KV_CHECK(move->to->arriving.at(pair.name.key) == pair.to);
      ++arriving[move->to.get()];
    }
    if (move->demotes) demoting_bytes[move->from->tier] += move->bytes;
  }

  struct Sums {
    std::array<double, kPageStates> pages{}, raw_bytes{}, encoded_bytes{};
  };
  absl::flat_hash_map<const PageGauges*, Sums> sums;
  std::array<std::pair<double, double>, Codec::kRungsMax> rungs{};  // encoded pages of ladders, and their bytes
  struct CacheBytes {
    uint64_t raw = 0, encoded = 0, activations = 0;
  };
  absl::flat_hash_map<const Cache*, CacheBytes> cache_bytes;
  absl::flat_hash_map<const Cache*, uint64_t> named;
  struct TierSums {
    Slots slots;
    uint64_t used_bytes = 0, evictable_bytes = 0, kept_bytes = 0, kept_longer_bytes = 0;
    absl::flat_hash_map<PayerId, Tier::LadderBytes> ladders;
  };
  absl::flat_hash_map<const Tier*, TierSums> tiers;
  for (const Block* each : blocks) {
    const Block& block = *each;
    Cache& cache = *block.cache;
    TierSums& tier = tiers[cache.tier];
    uint32_t pins = 0, jobs = 0, live_pages = 0;
    uint64_t bytes = 0;
    KV_CHECK(block.pages().size() == cache.layers());
    KV_CHECK(block.activations().size() == (cache.keeps_activations() ? cache.layers() : 0));
    for (uint32_t at = 0; at < block.pages().size() + block.activations().size(); ++at) {
      const uint32_t layer = at % cache.layers();
      const bool activations = at >= cache.layers();
      const PageKind kind = activations ? PageKind::kActivations : PageKind::kKeysValues;
      const Page page = activations ? block.activations()[layer] : block.pages()[layer];
      const FormBytes slot_bytes = cache.slot_bytes(layer, kind, page.rung);
      CheckPage(block, page, activations || cache.identity());
      if (activations) CheckActivations(block.pages()[layer], page);
      const auto held = activations ? raw_holds.end() : raw_holds.find({&block, layer});
      KV_CHECK(page.raw_holds == (held == raw_holds.end() ? 0 : held->second));
      CheckSlot(*cache.tier->pool(), page.raw, slot_bytes.raw, &tier.slots);
      CheckSlot(*cache.tier->pool(), page.encoded, slot_bytes.encoded, &tier.slots);
      pins += page.pins;
      jobs += page.busy;
      live_pages += page.state != PageState::kFree;
      bytes += slot_bytes.Of(page.raw, page.encoded);
      Sums& sum = sums[activations ? cache.activation_gauges : cache.gauges];
      const size_t state = static_cast<size_t>(page.state);
      sum.pages[state] += 1;
      if (page.raw.valid()) sum.raw_bytes[state] += static_cast<double>(slot_bytes.raw);
      if (page.encoded.valid()) sum.encoded_bytes[state] += static_cast<double>(slot_bytes.encoded);
      if (cache.rungs() > 1 && !activations && page.encoded.valid()) {
        ++rungs[page.rung].first;
        rungs[page.rung].second += static_cast<double>(slot_bytes.encoded);
      }
      CacheBytes& of = cache_bytes[&cache];
      (activations ? of.activations : of.raw) += page.raw.valid() ? slot_bytes.raw : 0;
      (activations ? of.activations : of.encoded) += page.encoded.valid() ? slot_bytes.encoded : 0;
    }
    KV_CHECK(block.pins == pins && block.jobs() == jobs && block.all_pages.live() == live_pages &&
             block.bytes == bytes);
    const auto holding = holders.find(&block);
    KV_CHECK(block.holders == (holding == holders.end() ? 0 : holding->second));
    KV_CHECK(live_pages > 0);
    KV_CHECK(block.evictable == (block.published && block.holders == 0 && block.pins == 0 && block.jobs() == 0));
    if (block.published) {
      ++named[&cache];
      KV_CHECK(cache.table.FindKey(block.name.key) == &block && block.is_full() && !block.corrupt);
    }
    for (const Page page : block.pages()) KV_CHECK(page.encoded.valid() ? page.rung == block.rung() : page.rung == 0);
    KV_CHECK(block.rung() < cache.rungs());
    if (block.evictable) {
      bool may_rest = true;
      for (const Page page : block.pages()) may_rest &= BlockPages::MayRest(page, /*activations=*/false);
      for (const Page page : block.activations()) may_rest &= BlockPages::MayRest(page, /*activations=*/true);
      KV_CHECK(block.all_pages.at_rest() == may_rest);
      tier.evictable_bytes += bytes;
      KV_CHECK(block.can_lower == BlockLowering::CanLower(block, parts_.disk != nullptr));
    }
    if (block.evictable && block.HasRungs()) {
      Tier::LadderBytes& ladder = tier.ladders[block.payer];
      ladder.all += bytes;
      if (block.can_lower) ladder.lowerable += bytes;
    }
    if (block.evictable && block.kept) tier.kept_bytes += bytes;
    if (block.evictable && block.retention.priority() > Retention::kOfPolicy) tier.kept_longer_bytes += bytes;
    tier.used_bytes += bytes;
  }
  for (const auto& [block, count] : holders) KV_CHECK(blocks.contains(block));
  // Of indexes, besides: what jobs and moves hold of sequences that are gone.
  absl::flat_hash_map<const Tier*, uint64_t> index_bytes;
  absl::flat_hash_set<const IndexMemory*> index_memory;
  for (const auto& [id, sequence] : sequences) {
    const Cache& cache = *sequence->cache;
    const auto check = [&](const IndexMemory* memory, size_t slot_class) {
      if (memory == nullptr || !index_memory.insert(memory).second) return;
      const uint64_t bytes = cache.encoded_slots.bytes[slot_class];
      CheckSlot(*cache.tier->pool(), memory->slot, bytes, &tiers[cache.tier].slots);
      index_bytes[cache.tier] += bytes;
    };
    for (uint32_t layer = 0; layer < sequence->index_places.size(); ++layer) {
      const Sequence::IndexPlaces& places = sequence->index_places[layer];
      check(places.book.get(), cache.book_class());
      for (const auto& chunk : places.chunks) check(chunk.get(), cache.chunk_class());
      KV_CHECK(places.chunks.empty() || places.book != nullptr);
    }
  }
  for (const auto& tier : *parts_.tiers) {
    const TierSums& sum = tiers[tier.get()];
    const bool retired = tier->retired_slots() > 0;
    KV_CHECK(index_bytes[tier.get()] <= tier->bytes().index);
    const uint64_t used_bytes = sum.used_bytes + tier->bytes().index + tier->bytes().unclaimed + tier->bytes().lowering;
    KV_CHECK(retired ? used_bytes < tier->pool()->slot_bytes_used() : used_bytes == tier->pool()->slot_bytes_used());
    KV_CHECK(sum.evictable_bytes == tier->bytes().evictable &&
             sum.evictable_bytes + tier->bytes().unclaimed == tier->pool()->reclaimable_bytes());
    KV_CHECK(sum.kept_longer_bytes == tier->eviction().kept_longer().bytes);
    tier->eviction().CheckInvariants();
    KV_CHECK(sum.ladders == tier->bytes().ladders);
    KV_CHECK(sum.kept_bytes == tier->bytes().kept && demoting_bytes[tier.get()] == tier->bytes().demoting);
  }
  for (const auto& [gauges, sum] : sums) {
    for (size_t state = 1; state < kPageStates; ++state) {
      KV_CHECK(gauges->pages[state]->Value() == sum.pages[state]);
      KV_CHECK(gauges->raw_bytes[state]->Value() == sum.raw_bytes[state]);
      KV_CHECK(gauges->encoded_bytes[state]->Value() == sum.encoded_bytes[state]);
    }
  }
  for (int rung = 0; rung < Codec::kRungsMax; ++rung) {
    if (rungs[rung].first == 0) continue;
    KV_CHECK(parts_.metrics->Rung(rung).pages->Value() == rungs[rung].first);
    KV_CHECK(parts_.metrics->Rung(rung).bytes->Value() == rungs[rung].second);
  }
  parts_.lowering->CheckInvariants();
  parts_.caches->CheckInvariants();
  parts_.payers->CheckInvariants();
  parts_.recovery->CheckInvariants();
  for (const auto& [id, cache] : parts_.caches->all()) {
    KV_CHECK(cache->arriving.size() == arriving[cache.get()]);
    KV_CHECK(cache->sequences == sequences_of[cache.get()] && cache->table.size() == named[cache.get()]);
    const CacheBytes& bytes = cache_bytes[cache.get()];
    KV_CHECK(cache->raw_bytes == bytes.raw && cache->encoded_bytes == bytes.encoded &&
             cache->activation_bytes == bytes.activations);
  }
  parts_.encodes->CheckInvariants();
  const std::vector<PageFollower*>& followers = parts_.encodes->followers();
  size_t following = 0;
  for (const auto& [id, sequence] : sequences) {
    following += sequence->followers.size();
    for (const PageFollower* follower : sequence->followers) {
      KV_CHECK(std::find(followers.begin(), followers.end(), follower) != followers.end());
      for (const uint64_t tokens : sequence->tokens) KV_CHECK(tokens <= follower->tokens());
    }
  }
  KV_CHECK(following <= followers.size());
}

}  // namespace kvmanager
