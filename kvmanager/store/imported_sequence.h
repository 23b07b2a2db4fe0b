// A sequence that is being received, while nobody else sees it: its blocks, which of its pages are to come, and where
// they go. A plain struct of the store; what it holds goes back with it. Made by ImportBeginning in pieces, then an
// ImportLease's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/hand_off_check.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

/// What receiving needs of the store. Everything outlives it and its leases, or the store has gone: then `alive` has
/// expired.
struct ImportParts {
  StoreMetrics* metrics = nullptr;
  CacheTable* caches = nullptr;
  BlockIndex* blocks = nullptr;
  EncodeJobs* encodes = nullptr;
  SequenceIndexes* indexes = nullptr;
  SequenceTable* sequences = nullptr;
  TierOwner* owner = nullptr;
  std::weak_ptr<const bool> alive;
};

struct ImportedSequence {
  /// A block that was not here. Beside the sequence this holds it while pages are to come, but for the open one, which
  /// is the sequence's alone.
  struct NewBlock {
    Block* block = nullptr;  // nullptr: shared, or every page is here
    uint32_t awaited = 0;    // pages of K and V
    bool held = false;
  };

  ImportedSequence(const ImportParts& parts, std::shared_ptr<Cache> cache, std::shared_ptr<const HandOffHeader> header);
  ~ImportedSequence();
  ImportedSequence(const ImportedSequence&) = delete;
  ImportedSequence& operator=(const ImportedSequence&) = delete;

  uint32_t full_blocks() const { return static_cast<uint32_t>(header->blocks.size()); }
  uint32_t pages_per_layer() const { return full_blocks() + (header->tokens % cache->page_tokens() != 0); }
  ArrivalForm& form(uint32_t block, uint32_t layer) { return forms[size_t{layer} * pages_per_layer() + block]; }
  bool is_activations(uint32_t number) const { return number >= header->pages.size() && number < header->size(); }
  /// All pages of a block are here, or will not come.
  void LetGo(NewBlock& block);

  const ImportParts parts;
  const std::shared_ptr<Cache> cache;  // shared: see Block
  /// Shared with what looks at it on workers.
  const std::shared_ptr<const HandOffHeader> header;
  std::vector<ArrivalForm> forms;    // [layers][pages_per_layer()]
  uint64_t trailer_pages = 0;        // of them, kRaw
  std::unique_ptr<Sequence> hidden;  // nullptr once it is visible
  std::vector<NewBlock> new_blocks;  // [pages_per_layer()]
  /// By number of the header's pages. Unchanged once the lease is there.
  std::vector<absl::Span<uint8_t>> targets;
  std::vector<uint32_t> unwanted;  // numbers without a target, ascending
  std::vector<bool> awaited;       // by number, those of the trailer too: wanted, and not here yet
  uint64_t awaited_first = 0;      // of the header
  bool shows_whole = false;        // with a codec that has indexes: they are made from all pages
};

}  // namespace kvmanager
