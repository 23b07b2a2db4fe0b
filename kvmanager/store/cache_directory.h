// The caches of a store: opened, described, searched by name and purged. On the store's thread, but for MakeCodec.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/page_attention.h"
#include "codecs/registry.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/block_check.h"
#include "kvmanager/store/block_transfers.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/prefix_match.h"
#include "kvmanager/store/retaining.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

constexpr size_t kSequenceBlocksMax = 65536;  // of one sequence; kSequenceBlocksMax * page_tokens tokens

struct CacheInfo {
  CacheId cache = 0;
  CacheConfig config;  // codec spec canonical
  CacheDigest digest;
  CodecInfo codec;
  uint64_t sequences = 0;
  uint64_t published_blocks = 0;
  uint64_t raw_bytes = 0;      // resident, raw and open pages
  uint64_t encoded_bytes = 0;  // resident, encoded pages
  uint64_t activation_bytes = 0;
  uint64_t pool_bytes = 0;  // of its memory, that whoever pays for it may have at most
};

/// Of one open cache. The tenant's name is there during the visit.
struct CacheUse {
  absl::string_view tenant;
  int device = 0;
  uint64_t sequences = 0, published_blocks = 0;
  uint64_t raw_bytes = 0, encoded_bytes = 0, activation_bytes = 0;
};

class CacheDirectory {
 public:
  static constexpr size_t kCachesMax = 4096;
  static constexpr size_t kTenantCachesMax = kCachesMax / 2;  // of one payer, so that another finds room
  static constexpr size_t kNamesMax = kSequenceBlocksMax;     // of one call
  static constexpr uint64_t kRetentionMsMax = uint64_t{10} * 365 * 24 * 3600 * 1000;
  virtual ~CacheDirectory() = default;

  /// Opens a cache, or finds the one with an equal digest. It stays until purged, or until another is opened while
  /// kCachesMax are open: that closes the least recently opened of those without sequence, lease and block. codec: what
  /// MakeCodec gave for an equal config; nullptr: it is made here, which may read files. Errors: INVALID_ARGUMENT
  /// (config, codec), FAILED_PRECONDITION (no such memory), RESOURCE_EXHAUSTED (kCachesMax in use; a page that does not
  /// fit a slab).
  virtual absl::StatusOr<CacheId> Open(const CacheConfig& config, std::shared_ptr<const Codec> codec) = 0;
  absl::StatusOr<CacheId> Open(const CacheConfig& config) { return Open(config, nullptr); }
  /// Checks `config` and makes its codec, for which it reads the artifacts that it names: this may take long. Any
  /// thread. Errors: Open's, and those of CodecRegistry::Create.
  static absl::StatusOr<std::shared_ptr<const Codec>> MakeCodec(const CodecRegistry& registry,
                                                                const CacheConfig& config);
  virtual absl::StatusOr<CacheInfo> Describe(CacheId cache) const = 0;
  virtual std::vector<CacheInfo> List() const = 0;
  /// What each open cache uses: thousands of them take a fraction of a millisecond, unlike List().
  virtual void ForEachUse(absl::FunctionRef<void(const CacheUse&)> visit) const = 0;
  /// The cache of this digest on `device`; nothing: it is not open there.
  virtual std::optional<CacheId> FindOpen(const CacheDigest& digest, int device) const = 0;
  virtual std::shared_ptr<const Codec> codec(CacheId cache) const = 0;  // nullptr: no such cache
  virtual const PageAttention* raw_attention(CacheId cache) const = 0;  // nullptr: no such cache
  /// How far `names` can be found; those that are count as used now. They are not pinned, and their bytes are not
  /// verified: a sequence that begins with them does that. Errors: NOT_FOUND; INVALID_ARGUMENT beyond kNamesMax.
  virtual absl::StatusOr<std::unique_ptr<PrefixMatch>> BeginMatch(CacheId cache, std::vector<BlockName> names) = 0;
  /// All of it at once.
  absl::StatusOr<MatchResult> Match(CacheId cache, absl::Span<const BlockName> names) {
    auto match = BeginMatch(cache, std::vector<BlockName>(names.begin(), names.end()));
    if (!match.ok()) return match.status();
    while ((*match)->DoPiece()) {
    }
    return (*match)->result();
  }
  /// Blocks `names`, a range or not, are kept as `priority` says, in every memory and on the disk (RetainingEviction):
  /// below Retention::kOfPolicy they go before others of who pays for them, above behind them; kOfPolicy takes this
  /// back. ttl_ms: that ends then; 0: with the block, or the daemon. A name that is nowhere is not counted; one whose
  /// `tokens` are all zeros is found by its key. Errors: NOT_FOUND (cache); INVALID_ARGUMENT beyond kNamesMax,
  /// Retention::kPriorityMax or kRetentionMsMax.
  virtual absl::StatusOr<std::unique_ptr<Retaining>> BeginRetain(CacheId cache, std::vector<BlockName> names,
                                                                 uint32_t priority, uint64_t ttl_ms) = 0;
  /// All of it at once.
  absl::StatusOr<RetainResult> Retain(CacheId cache, absl::Span<const BlockName> names, uint32_t priority,
                                      uint64_t ttl_ms) {
    auto retaining = BeginRetain(cache, std::vector<BlockName>(names.begin(), names.end()), priority, ttl_ms);
    if (!retaining.ok()) return retaining.status();
    while ((*retaining)->DoPiece()) {
    }
    return (*retaining)->result();
  }
  /// What a sequence that has `names` would verify, to be verified before on another thread; nullptr: nothing, or so
  /// little that it need not.
  virtual absl::StatusOr<std::unique_ptr<BlockCheck>> Check(CacheId cache, absl::Span<const BlockName> names) = 0;
  /// For a cache in host memory: blocks `names`, the first of which is block `first` of its sequence, to be copied out
  /// or written (block_transfers.h). Reads end before a block whose pages exceed `room`. raw: [names][layers], 1 where
  /// a page comes raw. Errors: NOT_FOUND; INVALID_ARGUMENT (more than kTransferPagesMax pages, names, forms);
  /// FAILED_PRECONDITION naming `device`; of writes, RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<BlockReads>> ReadBlocks(CacheId cache, uint32_t first,
                                                                 absl::Span<const BlockName> names,
                                                                 const ReadRoom& room) = 0;
  virtual absl::StatusOr<std::unique_ptr<BlockWrites>> WriteBlocks(CacheId cache, uint32_t first,
                                                                   absl::Span<const BlockName> names,
                                                                   absl::Span<const uint8_t> raw) = 0;
  /// For a cache in host memory: slabs of its tenant, ahead of need, and a descriptor of one of them (ShownSlabs::Bind
  /// and ShowBound). Errors: theirs; NOT_FOUND; FAILED_PRECONDITION naming `device`.
  virtual absl::StatusOr<std::unique_ptr<SlabBinding>> BeginBind(CacheId cache, uint64_t bytes) = 0;
  virtual absl::StatusOr<ShownSlab> ShowSlab(CacheId cache, uint32_t slab) = 0;
  /// Drops published blocks that nothing pins, of one cache or of all, in every memory and on the disk, and closes
  /// caches that are then empty and have no sequence. Returns the number of blocks, each counted wherever it was.
  virtual absl::StatusOr<uint64_t> Purge(CacheId cache) = 0;
  virtual uint64_t PurgeAll() = 0;
  /// done: once what was purged before this call is gone after a crash too. Errors: UNAVAILABLE (the disk refuses: it
  /// is tried again later).
  virtual void WhenPurged(absl::AnyInvocable<void(absl::Status)> done) = 0;
};

}  // namespace kvmanager
