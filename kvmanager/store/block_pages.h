// The pages of a block, in the memory that they need: at rest, while nobody uses the block, a page is its slot and its
// checksum, 16 bytes; awake it has all of Page.
//
// What reads a page gets a copy. What changes one wakes all pages of the block, by Wake; BlockIndex puts them to rest
// when the block becomes evictable. On the store's thread.
//
// Invariant: pages at rest are Resident in one form, without pins and holds of the raw form, and those of K and V are
// on one rung; activations may be Free as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvmanager/store/page_state.h"

namespace kvmanager {

class BlockPages {
 public:
  BlockPages() = default;
  /// All Free and awake. activations: [layers] pages of these, too.
  BlockPages(uint32_t layers, bool activations);
  BlockPages(BlockPages&&) = default;
  BlockPages& operator=(BlockPages&&) = default;

  /// Pages of one kind, by layer: copies, of when they are read.
  class View {
   public:
    View(const BlockPages& pages, uint32_t begin, uint32_t end) : pages_(pages), begin_(begin), end_(end) {}
    size_t size() const { return end_ - begin_; }
    bool empty() const { return end_ == begin_; }
    Page operator[](size_t layer) const { return pages_.At(begin_ + static_cast<uint32_t>(layer)); }

    class Iterator {
     public:
      Iterator(const BlockPages& pages, uint32_t at) : pages_(pages), at_(at) {}
      Page operator*() const { return pages_.At(at_); }
      Iterator& operator++() {
        ++at_;
        return *this;
      }
      bool operator!=(const Iterator& other) const { return at_ != other.at_; }

     private:
      const BlockPages& pages_;
      uint32_t at_;
    };
    Iterator begin() const { return {pages_, begin_}; }
    Iterator end() const { return {pages_, end_}; }

   private:
    const BlockPages& pages_;
    const uint32_t begin_, end_;
  };
  View keys_values() const { return {*this, 0, layers()}; }
  View activations() const { return {*this, layers(), count()}; }  // empty in a cache without activations
  View all() const { return {*this, 0, count()}; }

  /// To be changed; the reference is valid until the pages rest.
  Page& WakeKeysValues(uint32_t layer) { return Wake(layer); }
  Page& WakeActivations(uint32_t layer) { return Wake(layers() + layer); }
  /// Puts the pages to rest, if all of them may.
  void Rest();
  bool at_rest() const { return memory_ != nullptr && !memory_->awake; }
  /// Pages, of both kinds, that are not Free, and those that encode jobs work on.
  uint32_t live() const { return memory_ == nullptr ? 0 : memory_->live; }
  uint32_t busy() const { return memory_ == nullptr ? 0 : memory_->busy; }
  /// The first of them, into the processor's caches.
  void Prefetch() const {
    for (size_t byte = 0; byte < 256; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(memory_.get()) + byte, /*rw=*/1);
    }
  }
  /// A woken page was changed, and was as `before`.
  void NoteChange(const Page& before, const Page& after) {
    memory_->live += (after.state != PageState::kFree) - (before.state != PageState::kFree);
    memory_->busy += after.busy - before.busy;
  }
  static bool MayRest(const Page& page, bool activations);

 private:
  // In front of the pages, in one allocation.
  struct alignas(8) Memory {
    uint16_t layers = 0, live = 0, busy = 0;
    bool activations : 1 = false;
    bool awake : 1 = false;
    uint8_t rung = 0;  // at rest: of the encoded forms
  };
  // Behind the resting pages is a bit for each: its form is the raw one.
  struct Resting {
    PageId slot;
    uint64_t checksum = 0;
  };
  struct Delete {
    void operator()(Memory* memory) const;
  };
  using Owned = std::unique_ptr<Memory, Delete>;

  uint32_t layers() const { return memory_ == nullptr ? 0 : memory_->layers; }
  uint32_t count() const { return memory_ == nullptr ? 0 : memory_->layers * (memory_->activations ? 2u : 1u); }
  static Owned Allocate(const Memory& header, size_t bytes);
  Page At(uint32_t at) const;
  Page& Wake(uint32_t at);
  Page* awake_pages() const { return reinterpret_cast<Page*>(memory_.get() + 1); }
  Resting* resting_pages() const { return reinterpret_cast<Resting*>(memory_.get() + 1); }
  uint8_t* raw_bits() const { return reinterpret_cast<uint8_t*>(resting_pages() + count()); }

  Owned memory_;
};

}  // namespace kvmanager
