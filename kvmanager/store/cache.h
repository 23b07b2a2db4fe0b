// A cache of the store, and slots taken for it. Plain structs of the store, on its thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "codecs/codec.h"
#include "codecs/layer_group.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/page_table.h"
#include "kvmanager/store/slot_classes.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class Tier;

struct Cache : std::enable_shared_from_this<Cache> {
  CacheId id = 0;
  CacheConfig config;  // codec canonical
  CacheDigest digest;
  std::shared_ptr<const Codec> codec;  // shared with encode jobs and attention under way
  LayerGroups groups;                  // the codec's, of all layers; each has the cache's layout
  std::unique_ptr<Codec> raw;          // for attention on raw pages
  Tier* tier = nullptr;
  TenantId tenant = 0;
  PayerId payer = 0;                              // the tenant's
  std::string tenant_label;                       // TenantLabel
  WorkerPool::Owner owner = WorkerPool::kDaemon;  // the tenant's
  uint64_t raw_slot_bytes = 0;                    // as the pool rounds them
  uint64_t activation_slot_bytes = 0;             // 0: this cache keeps none
  SlotClasses encoded_slots;                      // of_layer: [rungs][layers]
  DeviceIndexLayout index;                        // on a GPU; its slots are two more classes than pages have
  const PageGauges* gauges = nullptr;             // of K and V
  const PageGauges* activation_gauges = nullptr;  // nullptr: this cache keeps none
  PageTable table;
  absl::flat_hash_map<BlockKey, Block*> arriving;  // being fetched: nobody else's, and not to be found yet
  absl::flat_hash_map<const Block*, absl::Status> failed_arrivals;  // of Block::never_arrives
  uint64_t blocks = 0;                                              // BlockIndex's
  uint64_t sequences = 0;
  uint64_t leases = 0;
  uint64_t opened = 0;     // order of openings, by clients and hand-offs
  bool wanted = false;     // by a client or a visible sequence; else it goes with the last unfinished import
  uint64_t raw_bytes = 0;  // of slots
  uint64_t encoded_bytes = 0;
  uint64_t activation_bytes = 0;

  /// Of what all layers have alike.
  const PageLayout& layout() const { return config.layout; }
  /// Of a page of this layer.
  const PageLayout& layout(uint32_t layer) const { return groups.of(layer).layout; }
  /// Codecs of its encoded pages; more than one of a ladder.
  int rungs() const { return codec->rungs(); }
  int page_tokens() const { return config.layout.page_tokens; }
  ReadingRule reading() const { return {page_tokens(), config.lag_pages}; }
  uint32_t layers() const { return static_cast<uint32_t>(config.layers); }
  /// Without sequence, lease and block: closing it loses nothing.
  bool unused() const { return sequences == 0 && leases == 0 && table.size() == 0; }
  bool identity() const { return codec->info().identity; }
  /// Whether the codec declines this page whatever is in it: a sink, or of a layer that stays raw.
  bool keeps_raw(uint32_t block, uint32_t layer) const {
    return codec->info().keeps_raw(static_cast<int>(layer), uint64_t{block} * page_tokens());
  }
  /// Bytes of the form in which an aged page is read, unless the codec declines it for what is in it.
  uint64_t aged_bytes(uint32_t block, uint32_t layer) const {
    return keeps_raw(block, layer) ? layout(layer).raw_bytes() : page_bytes(layer);
  }
  FormBytes slot_bytes(uint32_t layer, PageKind kind = PageKind::kKeysValues, int rung = 0) const {
    if (kind == PageKind::kActivations) return {activation_slot_bytes, activation_slot_bytes};
    return {raw_slot_bytes, encoded_slots.bytes[slot_class(layer, rung)]};
  }
  absl::Status CheckLayers(LayerRange range) const {
    if (range.first >= 0 && range.count >= 1 && range.first <= config.layers - range.count) return absl::OkStatus();
    return InvalidField("layer", range.first, absl::StrCat("0..", config.layers - std::max(range.count, 1)));
  }
  /// The error of a hand-off out of or into memory where indexes take slots.
  absl::Status IndexStaysHere() const {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(config.device),
                      "host memory: an index that lies in slots is neither sent nor received");
  }
  /// The error of a hand-off of a cache with a ladder.
  absl::Status LadderStaysHere() const { return NotOfLadders("a hand-off has one codec for all pages"); }
  bool keeps_activations() const { return activation_slot_bytes > 0; }
  size_t activation_row_bytes() const { return size_t(config.hidden) * DTypeBytes(layout().dtype); }
  size_t activation_page_bytes() const { return page_tokens() * activation_row_bytes(); }
  /// Of the encoded form: what is sent and checked, in a slot of slot_bytes(layer).encoded.
  size_t page_bytes(uint32_t layer, int rung = 0) const {
    return codec->rung(rung).info().page_bytes(static_cast<int>(layer));
  }
  /// Of an encoded page.
  size_t slot_class(uint32_t layer, int rung = 0) const {
    return encoded_slots.of_layer[static_cast<size_t>(rung) * layers() + layer];
  }
  size_t book_class() const { return encoded_slots.bytes.size() - 2; }
  size_t chunk_class() const { return encoded_slots.bytes.size() - 1; }
  void CountEncodedSlots(uint32_t layer, size_t count, SlotCounts* wanted, int rung = 0) const {
    wanted->encoded[slot_class(layer, rung)] += count;
  }
  /// The error of a call that a cache with a ladder does not have. why: what it would have to know.
  absl::Status NotOfLadders(absl::string_view why) const {
    if (rungs() == 1) return absl::OkStatus();
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec", config.codec, absl::StrCat("no ladder: ", why));
  }
};

/// Slots of one cache, taken from the pool; those not taken out go back.
class Reservation {
 public:
  /// Who zeroes bytes of other tenants (SlotPool::Allocate).
  enum class Cleaning : uint8_t { kByPool, kByUser };
  explicit Reservation(SlotPool* pool, Cleaning cleaning = Cleaning::kByPool) : pool_(pool), cleaning_(cleaning) {}
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  /// The pool has gone.
  void Forget() {
    for (Slots* slots : {&raw, &activations}) slots->ids.clear();
    for (Slots& slots : encoded) slots.ids.clear();
    unclean.clear();
  }
  std::vector<PageId>* uncleaned() { return cleaning_ == Cleaning::kByUser ? &unclean : nullptr; }
  PageId TakeRaw() { return Take(&raw); }
  PageId TakeActivations() { return Take(&activations); }
  PageId TakeOfClass(size_t slot_class) { return Take(&encoded[slot_class]); }
  PageId TakeEncoded(const Cache& cache, uint32_t layer, int rung = 0) {
    return Take(&encoded[cache.slot_class(layer, rung)]);
  }

  struct Slots {
    std::vector<PageId> ids;
    size_t taken = 0;
  };
  Slots raw, activations;
  std::array<Slots, kSlotClassesMax> encoded;  // by class
  std::vector<PageId> unclean;                 // of these, which the user cleans

 private:
  static PageId Take(Slots* slots) {
    KV_CHECK(slots->taken < slots->ids.size());
    return slots->ids[slots->taken++];
  }
  SlotPool* pool_;
  const Cleaning cleaning_;
};

}  // namespace kvmanager
