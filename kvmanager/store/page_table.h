// Names to blocks, for one cache. Owned by the cache, on the store's thread; the blocks are the store's.
//
// The table grows by one bucket with each block, so that no insertion takes long: at a million blocks the longest moves
// the buckets' heads, which takes a few milliseconds.
//
// Invariant: a block is in the table exactly while it is `published`, under its name's key.
#pragma once

#include <boost/intrusive/unordered_set.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/miss_reason.h"

namespace kvmanager {

class PageTable {
 public:
  PageTable() : buckets_(kBucketsMin), blocks_(Blocks::bucket_traits(buckets_.data(), buckets_.size())) {}
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  /// The block named `name` at place `index` of a sequence, or nullptr and the reason.
  Block* Find(const BlockName& name, uint32_t index, MissReason* reason) const;
  /// The block with this key, whatever its place and tokens, or nullptr.
  Block* FindKey(const BlockKey& key) const;
  /// `fill` is called when a key is not found: true: it has inserted the block now. nullptr: nobody is asked.
  void SetFiller(std::function<bool(const BlockKey& key)> fill) { fill_ = std::move(fill); }

  /// `block->name.key` must be new.
  void Insert(Block* block);
  void Erase(Block* block);

  size_t size() const { return size_; }

  /// To look at all blocks in pieces: buckets 0 .. buckets() - 1, as many as there are by then. A block that is there
  /// from the first piece to the last is visited, perhaps twice: a bucket that is split leaves half to a later one.
  size_t buckets() const { return blocks_.split_count(); }
  template <typename Visit>
  void VisitBucket(size_t bucket, Visit&& visit) const {
    for (auto it = blocks_.begin(bucket); it != blocks_.end(bucket); ++it) visit(*it);
  }

 private:
  struct KeyOf {
    using type = BlockKey;
    const BlockKey& operator()(const Block& block) const { return block.name.key; }
  };
  // Whose values clients cannot foresee.
  struct HashOf {
    size_t operator()(const BlockKey& key) const { return absl::HashOf(key); }
  };
  using Blocks = boost::intrusive::unordered_set<
      Block,
      boost::intrusive::member_hook<Block, boost::intrusive::unordered_set_member_hook<Block::Link>, &Block::in_table>,
      boost::intrusive::key_of_value<KeyOf>, boost::intrusive::hash<HashOf>, boost::intrusive::power_2_buckets<true>,
      boost::intrusive::incremental<true>, boost::intrusive::constant_time_size<false>>;
  static constexpr size_t kBucketsMin = 16;

 public:
  using Iterator = Blocks::iterator;
  Iterator begin() { return blocks_.begin(); }
  Iterator end() { return blocks_.end(); }

 private:
  void Grow();

  std::vector<Blocks::bucket_type> buckets_;  // 8 bytes each
  Blocks blocks_;
  size_t size_ = 0;
  std::function<bool(const BlockKey&)> fill_;
};

}  // namespace kvmanager
