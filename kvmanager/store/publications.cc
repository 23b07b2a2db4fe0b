#include "kvmanager/store/publications.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/page_comparison.h"

namespace kvmanager {

// First all names are looked at, then, piece by piece, equal blocks are found and compared, and the others are named.
// At last the equal ones that the sequence does not take are given back, children first (EvictionPolicy).
class Publications::Impl final : public Publication {
 public:
  Impl(const Parts& parts, SequenceId sequence, std::vector<BlockName> names)
      : parts_(parts), id_(sequence), names_(std::move(names)), comparison_(parts.blocks) {
    keys_.reserve(names_.size());
  }
  ~Impl() override {
    if (parts_.alive.expired()) return;
    for (; !piece_.empty(); piece_.pop_back()) GiveBack(piece_.back());
    for (; !deferred_.empty(); deferred_.pop_back()) GiveBack(deferred_.back());
  }

  Next DoPiece() override {
    if (parts_.alive.expired()) {
      status_ = absl::UnavailableError("the store has closed");
      return Next::kDone;
    }
    if (status_.ok() && looked_ < names_.size()) {
      status_ = LookAtPiece();
      return Next::kPiece;
    }
    if (status_.ok() && !finding_ && named_ < names_.size()) {
      status_ = FindPiece();
      if (comparison_.bytes() > kVerifiedAtOnceBytes) return Next::kCompare;
      while (comparison_.CompareOne()) {
      }
    }
    if (finding_) {
      comparison_.Settle();
      for (; !piece_.empty(); piece_.pop_back()) GiveBack(piece_.back());
      if (status_.ok()) status_ = NamePiece();
      finding_ = false;
      return Next::kPiece;
    }
    for (size_t i = 0; i < kNamesOfPiece && !deferred_.empty(); ++i, deferred_.pop_back()) GiveBack(deferred_.back());
    if (!deferred_.empty()) return Next::kPiece;
    return Next::kDone;
  }

  bool CompareOne() override { return comparison_.CompareOne(); }

  absl::StatusOr<PublishResult> result() const override {
    KV_RETURN_IF_ERROR(status_);
    return result_;
  }

 private:
  static constexpr size_t kNamesOfPiece = 256;  // some 0.1 ms

  // What may have changed since the last piece.
  absl::StatusOr<Sequence*> FindSequence() const {
    KV_ASSIGN_OR_RETURN(Sequence * sequence, parts_.sequences->FindWhole(id_));
    const uint64_t full_blocks = sequence->TokensInEveryLayer() / sequence->cache->page_tokens();
    if (names_.size() <= full_blocks) return sequence;
    return FieldError(absl::StatusCode::kFailedPrecondition, "names", absl::StrCat(names_.size()),
                      absl::StrCat("at most ", full_blocks, ", the blocks full in every layer"));
  }
  absl::Status LookAt(const Sequence& sequence, size_t i) const {
    const BlockName& name = names_[i];
    const Block* const block = sequence.blocks[i];
    const auto field = [i] { return absl::StrCat("names[", i, "]"); };
    if (block->published && block->name.key != name.key) {
      return FieldError(absl::StatusCode::kFailedPrecondition, field(), name.key.ToHex(8),
                        absl::StrCat(block->name.key.ToHex(8), ", its name so far"));
    }
    const Block* const known = sequence.cache->table.FindKey(name.key);
    if (known != nullptr && known->name.tokens != name.tokens) {
      return InvalidField(absl::StrCat(field(), ".tokens"), name.tokens.ToHex(8),
                          absl::StrCat(known->name.tokens.ToHex(8), ", what this key names"));
    }
    if (known != nullptr && known->index != i) {
      return InvalidField(field(), name.key.ToHex(8),
                          absl::StrCat("the key of block ", i, ", not of block ", known->index));
    }
    return absl::OkStatus();
  }

  absl::Status LookAtPiece() {
    KV_ASSIGN_OR_RETURN(const Sequence* const sequence, FindSequence());
    for (const size_t end = EndOfPiece(looked_); looked_ < end; ++looked_) {
      if (!keys_.insert(names_[looked_].key).second) {
        return InvalidField(absl::StrCat("names[", looked_, "]"), names_[looked_].key.ToHex(8), "named once");
      }
      KV_RETURN_IF_ERROR(LookAt(*sequence, looked_));
    }
    return absl::OkStatus();
  }
  // Equal blocks whose bytes are to be compared first.
  absl::Status FindPiece() {
    KV_ASSIGN_OR_RETURN(Sequence* const sequence, FindSequence());
    finding_ = true;
    for (size_t i = named_; i < EndOfPiece(named_); ++i) {
      if (sequence->blocks[i]->published) continue;
      MissReason reason;
      Block* const equal = parts_.blocks->Find(*sequence->cache, names_[i], static_cast<uint32_t>(i),
                                               BlockIndex::Bytes::kTrust, &reason);
      if (equal == nullptr) continue;
      if (parts_.blocks->IsUnverified(*equal)) comparison_.Add(equal);
      parts_.blocks->NoteHolder(equal);
      piece_.push_back(equal);
    }
    return absl::OkStatus();
  }
  absl::Status NamePiece() {
    KV_ASSIGN_OR_RETURN(Sequence* const sequence, FindSequence());
    for (const size_t end = EndOfPiece(named_); named_ < end; ++named_) {
      if (sequence->blocks[named_]->published) continue;
      KV_RETURN_IF_ERROR(LookAt(*sequence, named_));
      NameBlock(*sequence, static_cast<uint32_t>(named_));
    }
    return absl::OkStatus();
  }
  void NameBlock(Sequence& sequence, uint32_t i) {
    Block*& block = sequence.blocks[i];
    Cache& cache = *sequence.cache;
    MissReason reason;
    Block* const equal = parts_.blocks->Find(cache, names_[i], i, BlockIndex::Bytes::kVerify, &reason);
    if (equal == nullptr) {
      if (block->corrupt) return;
      parts_.blocks->Name(block, names_[i], &sequence.run);
      ++result_.published;
      parts_.metrics->published.Increment();
      return;
    }
    const bool aged = std::all_of(sequence.aged.begin(), sequence.aged.end(), [i](uint32_t n) { return n > i; });
    if (!aged) {
      parts_.blocks->NoteHolder(equal);
      deferred_.push_back(equal);
      ++result_.deferred;
      return;
    }
    parts_.blocks->Release(block);  // it has no raw hold of this sequence any more
    block = equal;
    cache.tier->eviction().Found(&sequence.run, block);
    for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
      sequence.NoteChange(layer, i);
      sequence.settled[layer] = std::min(sequence.settled[layer], i);  // the other block may still be encoded
    }
    ++result_.shared;
    parts_.metrics->published_shared.Increment();
  }
  size_t EndOfPiece(size_t begin) const { return std::min(names_.size(), begin + kNamesOfPiece); }
  void GiveBack(Block* block) {
    parts_.blocks->ForgetHolder(block);
    parts_.blocks->Release(block);
  }

  const Parts parts_;  // it may outlive the store
  const SequenceId id_;
  const std::vector<BlockName> names_;
  absl::flat_hash_set<BlockKey> keys_;
  size_t looked_ = 0, named_ = 0;  // of the names
  bool finding_ = false;           // the equal blocks of a piece, which is named next
  std::vector<Block*> piece_;      // these, held
  PageComparison comparison_;      // of these
  std::vector<Block*> deferred_;   // held
  PublishResult result_;
  absl::Status status_;
};

absl::StatusOr<std::unique_ptr<Publication>> Publications::Begin(SequenceId id, std::vector<BlockName> names) {
  KV_RETURN_IF_ERROR(parts_.sequences->FindWhole(id).status());
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  return std::unique_ptr<Publication>(std::make_unique<Impl>(parts_, id, std::move(names)));
}

}  // namespace kvmanager
