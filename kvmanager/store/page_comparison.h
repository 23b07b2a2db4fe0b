// Pages of held blocks that are compared with their checksums, away from the store's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvmanager/store/block_index.h"

namespace kvmanager {

/// So many bytes may be compared on the store's thread at once.
constexpr uint64_t kVerifiedAtOnceBytes = 256 << 10;

/// On the store's thread, but for CompareOne.
class PageComparison {
 public:
  /// index outlives it.
  explicit PageComparison(BlockIndex* index) : index_(index) {}

  /// Lists the pages of a block, which is held until Settle. Pages that wait to be encoded have nothing to compare
  /// with.
  void Add(Block* block);
  size_t pages() const { return pages_.size(); }
  uint64_t bytes() const { return bytes_; }
  /// Compares one page. False: none is left. Any thread.
  bool CompareOne();
  /// Tells the index what was found, and forgets the blocks. False: one has changed, and those behind it were not
  /// looked at.
  bool Settle();

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Listed {
    const MemoryBackend* memory;
    const uint8_t* bytes;
    size_t size;
    uint64_t checksum;
    size_t block;
  };
  struct Of {
    Block* block;
    bool partial;  // some page waits to be encoded
  };

  BlockIndex* const index_;
  std::vector<Of> blocks_;
  std::vector<Listed> pages_;
  uint64_t bytes_ = 0;
  size_t compared_ = 0;     // pages
  size_t corrupt_ = kNone;  // of blocks_
};

}  // namespace kvmanager
