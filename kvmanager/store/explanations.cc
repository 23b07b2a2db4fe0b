#include "kvmanager/store/explanations.h"

#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kNamesOfPiece = 128;  // that are looked for: some 0.05 ms
constexpr size_t kCachesOfPiece = 32;
constexpr size_t kBucketsOfPiece = 256;  // with about as many blocks

// First it looks for the keys, cache by cache; then it asks how those that are missing went; then it walks through the
// blocks of all caches for the missing ones' tokens, those caches first that differ in the least.
class ExplanationImpl final : public Explanation {
 public:
  ExplanationImpl(ExplanationParts parts, std::shared_ptr<const Cache> asked, std::vector<BlockName> names)
      : parts_(std::move(parts)), asked_(asked == nullptr ? 0 : asked->id), names_(std::move(names)) {
    if (asked != nullptr) {
      config_ = asked->config;
      digest_ = asked->digest;
      same_names_.push_back(asked_);
    }
    out_.blocks.reserve(names_.size());
  }

  bool DoPiece() override {
    if (parts_.alive.expired()) {
      status_ = absl::UnavailableError("the daemon is stopping");
      return false;
    }
    switch (stage_) {
      case Stage::kListCaches:
        return ListCaches();
      case Stage::kLook:
        return Look();
      case Stage::kRemember:
        return Remember();
      case Stage::kWalk:
        return Walk();
      case Stage::kAssign:
        return Assign();
    }
    return false;
  }
  absl::StatusOr<Explained> Take() override {
    if (!status_.ok()) return status_;
    return std::move(out_);
  }

 private:
  enum class Stage : uint8_t { kListCaches, kLook, kRemember, kWalk, kAssign };
  struct Other {
    CacheId id;
    std::vector<const char*> differs;
  };
  bool Goes(Stage next) {
    stage_ = next;
    cache_ = at_ = 0;
    return true;
  }
  BlockExplanation& BlockAt(size_t at) {
    return at == out_.blocks.size() ? out_.blocks.emplace_back() : out_.blocks[at];
  }

  // Caches may be opened and closed between two pieces.
  bool ListCaches() {
    const auto& all = parts_.caches->all();
    auto next = all.upper_bound(last_listed_);
    for (size_t i = 0; i < kCachesOfPiece && next != all.end(); ++i, ++next) {
      const Cache& cache = *next->second;
      last_listed_ = cache.id;
      if (cache.id == asked_) continue;
      if (asked_ == 0 || cache.digest == digest_) {
        same_names_.push_back(cache.id);
        continue;
      }
      std::vector<const char*> differs = DifferingFields(cache.config, config_);
      const size_t rank = differs.size();
      others_.emplace(rank, Other{cache.id, std::move(differs)});
    }
    if (next != all.end()) return true;
    walked_ = others_.begin();
    return Goes(Stage::kLook);
  }

  bool Look() {
    for (size_t looked = 0; looked < kNamesOfPiece; ++looked) {
      if (cache_ == same_names_.size()) return Goes(Stage::kRemember);
      const auto found = parts_.caches->Find(same_names_[cache_]);
      if (!found.ok() || at_ == names_.size()) {
        ++cache_;
        at_ = 0;
        continue;
      }
      LookIn(**found, names_[at_], &BlockAt(at_));
      ++at_;
    }
    return true;
  }
  void LookIn(const Cache& cache, const BlockName& name, BlockExplanation* out) const {
    const auto is_here = [&](BlockPlace place, int tier, const TokenDigest& tokens, const Retention& retention) {
      out->place = place;
      out->tier = tier;
      out->cache = cache.id;
      out->other_tokens = name.tokens != TokenDigest() && name.tokens != tokens;
      const int64_t now_ns = parts_.clock->NowNs();
      const bool holds = !retention.has_ended(now_ns), ends = holds && retention.until_ns() != 0;
      out->priority = holds ? retention.priority() : Retention::kOfPolicy;
      out->ends_ms = ends ? static_cast<uint64_t>((retention.until_ns() - now_ns + 999999) / 1000000) : 0;
    };
    if (out->place == BlockPlace::kMemory) return;
    if (const Block* const block = cache.table.FindKey(name.key)) {
      return is_here(BlockPlace::kMemory, cache.config.device, block->name.tokens, block->retention);
    }
    if (out->place == BlockPlace::kArriving) return;
    if (const auto arriving = cache.arriving.find(name.key); arriving != cache.arriving.end()) {
      return is_here(BlockPlace::kArriving, cache.config.device, arriving->second->name.tokens,
                     arriving->second->retention);
    }
    if (out->place == BlockPlace::kDisk || parts_.disk == nullptr) return;
    const DiskBlock* const there = parts_.disk->Find(cache.digest, name.key);
    if (there != nullptr) is_here(BlockPlace::kDisk, kDiskTier, there->tokens, there->retention);
  }

  bool Remember() {
    for (size_t looked = 0; looked < kNamesOfPiece; ++looked, ++at_) {
      if (at_ == names_.size()) {
        out_.remembered = parts_.gone->size();
        out_.remembered_max = parts_.gone->blocks_max();
        out_.remembered_seconds = parts_.gone->seconds();
        return missing_ > 0 && Goes(Stage::kWalk);
      }
      BlockExplanation& block = BlockAt(at_);
      if (block.place != BlockPlace::kNowhere) continue;
      block.gone = parts_.gone->Find(names_[at_].key);
      if (asked_ == 0 || names_[at_].tokens == TokenDigest()) continue;
      if (wanted_.empty()) wanted_.reserve(names_.size() - at_);
      missing_ += wanted_.emplace(names_[at_].tokens, 0).second;
    }
    return true;
  }

  // Other caches before those of the same names, which have these tokens behind others.
  bool Walk() {
    static const std::vector<const char*> kNothing;
    for (size_t looked = 0; looked < kBucketsOfPiece; ++looked) {
      if (missing_ == 0) return Goes(Stage::kAssign);
      if (walked_ != others_.end()) {
        if (VisitNext(walked_->second.id, walked_->second.differs)) continue;
        ++walked_;
      } else {
        if (cache_ == same_names_.size()) return Goes(Stage::kAssign);
        if (VisitNext(same_names_[cache_], kNothing)) continue;
        ++cache_;
      }
      at_ = 0;
    }
    return true;
  }
  // The next bucket of a cache. False: there is none.
  bool VisitNext(CacheId id, const std::vector<const char*>& differs) {
    const auto found = parts_.caches->Find(id);
    if (!found.ok() || at_ >= (*found)->table.buckets()) return false;
    (*found)->table.VisitBucket(at_++, [&](const Block& block) {
      const auto wanted = wanted_.find(block.name.tokens);
      if (wanted == wanted_.end() || wanted->second != 0) return;
      wanted->second = id;
      --missing_;
      if (!out_.others.empty() && out_.others.back().cache == id) return;
      out_.others.push_back({id, (*found)->tenant_label, (*found)->config.device, differs});
    });
    return true;
  }

  bool Assign() {
    for (size_t looked = 0; looked < kNamesOfPiece; ++looked, ++at_) {
      if (at_ == names_.size()) return false;
      BlockExplanation& block = out_.blocks[at_];
      if (block.place != BlockPlace::kNowhere) continue;
      const auto found = wanted_.find(names_[at_].tokens);
      if (found != wanted_.end()) block.same_tokens = found->second;
    }
    return true;
  }

  const ExplanationParts parts_;
  const CacheId asked_;  // 0: none
  CacheConfig config_;   // the asked one's
  CacheDigest digest_;
  const std::vector<BlockName> names_;

  Stage stage_ = Stage::kListCaches;
  CacheId last_listed_ = 0;
  std::vector<CacheId> same_names_;      // the asked one and those of equal digest; all, if none was asked about
  std::multimap<size_t, Other> others_;  // by the number of differences
  std::multimap<size_t, Other>::const_iterator walked_;
  size_t cache_ = 0;  // of the stage: in same_names_
  size_t at_ = 0;     // of the stage: a name, or a bucket
  absl::flat_hash_map<TokenDigest, CacheId>
      wanted_;          // tokens of missing blocks, and a cache that has them; 0: none yet
  size_t missing_ = 0;  // of these
  Explained out_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Explanation>> MakeExplanation(ExplanationParts parts, CacheId id,
                                                             std::vector<BlockName> names) {
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  std::shared_ptr<const Cache> cache;
  if (id != 0) {
    KV_ASSIGN_OR_RETURN(cache, parts.caches->Find(id));
  }
  return std::unique_ptr<Explanation>(
      std::make_unique<ExplanationImpl>(std::move(parts), std::move(cache), std::move(names)));
}

}  // namespace kvmanager
