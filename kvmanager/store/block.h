// A block: the pages of the same tokens in all layers. A plain struct of the store, on the store's thread.
//
// Owned by the store's set of blocks while a sequence or an unfinished hand-off holds it, it can be found by name, a
// lease pins one of its pages, or an encode job runs on one; then deleted.
#pragma once

#include <boost/intrusive/unordered_set_hook.hpp>
#include <cstdint>

#include "kvmanager/base/ids.h"
#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/store/block_pages.h"

namespace kvmanager {

struct Cache;

/// K and V of a block's tokens in one layer, or the activations that these can be recomputed from (the input of the
/// layer's K and V projections). Both live by the table of page_state.h; the bytes of activations are [page_tokens]
/// [hidden] values of the cache's dtype, and have one form, as pages of an identity codec have: raw while they are
/// filled, encoded from the seal on.
enum class PageKind : uint8_t { kKeysValues = 0, kActivations };

/// A time of the store's clock, to 67 ms: in 32 bits, nine years. Rounded down.
class CoarseTime {
 public:
  CoarseTime() = default;  // not set
  explicit CoarseTime(int64_t ns) : next_(static_cast<uint32_t>(ns >> kShift) + 1) {}
  bool is_set() const { return next_ != 0; }
  int64_t ns() const { return (int64_t{next_} - 1) << kShift; }

 private:
  static constexpr int kShift = 26;
  uint32_t next_ = 0;  // of units of 2^kShift ns, the one behind it; 0: not set
};

struct Block : Evictable {
  // In what the base leaves free.
  bool published : 1 = false;      // in its cache's table, under `name`
  bool corrupt : 1 = false;        // its bytes changed: never published again
  bool from_disk : 1 = false;      // it came from there, and nobody has taken it since
  bool is_lowering : 1 = false;    // BlockLowering encodes it again
  bool stays_on_rung : 1 = false;  // the codec of the next rung declined it
  bool never_arrives : 1 = false;  // its pages that are Receiving: Cache::failed_arrivals says why

  using Link = boost::intrusive::link_mode<boost::intrusive::normal_link>;
  boost::intrusive::unordered_set_member_hook<Link> in_table;  // PageTable

  Cache* cache = nullptr;  // BlockIndex keeps it, also while it is closed: of a block under a lease
  BlockPages all_pages;    // BlockIndex's to change
  uint64_t recorded = 0;   // Recovery's; 0: it is not recorded
  BlockName name;
  uint32_t holders = 0;        // sequences and hand-offs
  uint32_t other_holders = 0;  // of these, those that are no sequences and no moves (BlockIndex)
  uint32_t pins = 0;           // of all pages, here and below of both kinds
  CoarseTime last_use;
  CoarseTime verified;         // when its bytes were last compared with their checksums
  uint32_t unnamed_place = 0;  // UnnamedBlocks'

  BlockPages::View pages() const { return all_pages.keys_values(); }  // [layers]
  /// [layers], Free where the engine gave none; empty in a cache without activations.
  BlockPages::View activations() const { return all_pages.activations(); }
  uint32_t jobs() const { return all_pages.busy(); }  // encode jobs under way
  /// The slot of the page of activations that goes on where an append goes on in this page of K and V; invalid: some
  /// token before had none.
  PageId OpenActivations(uint32_t layer) const {
    if (activations().empty()) return PageId();
    const Page page = activations()[layer];
    return page.state == PageState::kFilling ? page.raw : PageId();
  }
  /// Called some blocks ahead of one that is held: it and its pages lie anywhere in memory.
  void Prefetch() const {
    for (size_t byte = 0; byte < sizeof(Block); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(this) + byte, /*rw=*/1);
    }
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(this + 1) - 1, /*rw=*/1);  // it may begin within a line
  }
  /// Of its encoded pages: the rung that they are on, all on one (Codec::rung). 0: it has none.
  int rung() const {
    for (const Page page : pages()) {
      if (page.encoded.valid()) return page.rung;
    }
    return 0;
  }
  /// It was lowered, or can be: what stays raw has no part in how a ladder shares memory.
  bool HasRungs() const { return can_lower || rung() > 0; }
  /// Whether BlockLowering may take it once nobody uses it; rungs: its cache's.
  bool CanBeLowered(int rungs) const {
    if (stays_on_rung || rung() + 1 >= rungs) return false;
    bool has_encoded = false;
    for (const Page page : pages()) {
      if (page.state != PageState::kResident) return false;
      has_encoded |= page.encoded.valid();
    }
    return has_encoded;
  }
  /// Whether it is the block that a name with its key means at place `at` of a sequence.
  bool Is(const BlockName& with_its_key, uint32_t at) const {
    return index == at && name.tokens == with_its_key.tokens;
  }
  /// Every layer's page of K and V is sealed. (Activations are a help: nothing waits for them.)
  bool is_full() const {
    for (const Page page : pages()) {
      if (!page.is_full()) return false;
    }
    return true;
  }
  /// Every layer's page of K and V has its last form.
  bool is_resident() const {
    for (const Page page : pages()) {
      if (page.state != PageState::kResident) return false;
    }
    return true;
  }
};

/// A page of a block.
struct PageRef {
  Block* block = nullptr;
  uint32_t layer = 0;
  PageKind kind = PageKind::kKeysValues;
  /// As it is now.
  Page page() const { return (kind == PageKind::kKeysValues ? block->pages() : block->activations())[layer]; }
};

}  // namespace kvmanager
