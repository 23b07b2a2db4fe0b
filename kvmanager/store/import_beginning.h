// What a received sequence begins with, in pieces: its header is looked at, blocks that are here already are found and
// compared with their checksums, and the others get slots.
//
// Found blocks are held before slots are reserved, since that may evict. On the store's thread, but for CompareOne.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "kvmanager/store/imported_sequence.h"
#include "kvmanager/store/page_comparison.h"

namespace kvmanager {

class ImportBeginning final : public Importing {
 public:
  ImportBeginning(const ImportParts& parts, std::shared_ptr<Cache> cache, std::shared_ptr<const HandOffHeader> header,
                  OwnedRecomputeChoice recompute)
      : in_(std::make_unique<ImportedSequence>(parts, std::move(cache), std::move(header))),
        recompute_(std::move(recompute)),
        check_(*in_->cache, *in_->header),
        comparison_(parts.blocks) {}
  ~ImportBeginning() override;

  Next DoPiece() override;
  bool CompareOne() override { return stage_ == Stage::kHeader ? check_.Next() : comparison_.CompareOne(); }
  const absl::Status& status() const override { return status_; }
  std::unique_ptr<ImportLease> Commit() override;

 private:
  // Of a piece: what takes a slot, or is looked up; and what is only counted.
  static constexpr size_t kPagesOfPiece = 128, kCountedOfPiece = 4096;
  static constexpr uint64_t kBytesOfPiece = 1 << 20;  // of slots, which may have to be zeroed

  enum class Stage : uint8_t {
    kHeader,
    kFind,
    kCountWhole,
    kCountActivations,
    kChoose,
    kCount,
    kRoom,
    kSlots,
    kTargets,
    kDone
  };
  void GoTo(Stage stage) {
    stage_ = stage;
    at_ = 0;
  }
  bool keeps_activations() const { return cache().keeps_activations() && !header().activations.empty(); }
  Cache& cache() const { return *in_->cache; }
  const HandOffHeader& header() const { return *in_->header; }
  uint32_t full_blocks() const { return in_->full_blocks(); }

  void TakeHeader();
  Next FindSome();
  /// Those of the piece that are intact stay found. False: some are to be compared again.
  bool SettleFound();
  bool CanShare(const Block& block) const;
  void CountPagesSome();
  void ChooseSome();
  void CountSlotsSome();
  SlotCounts SlotsOf(uint32_t block, uint32_t layer) const;
  void MakeRoom();
  void TakeSlotsSome();
  bool is_here(size_t block) const { return block < full_blocks() && found_[block] != nullptr; }
  void TakeSlotsOf(uint32_t layer, Reservation* slots);  // of `begun_`
  void AddBegun();
  void FindTargetsSome();
  void LeaveFound();

  std::unique_ptr<ImportedSequence> in_;
  OwnedRecomputeChoice recompute_;
  HeaderCheck check_;
  absl::Status status_;
  Stage stage_ = Stage::kHeader;
  bool looked_ = false;  // at the header, by a worker
  size_t at_ = 0;        // of what the stage goes through
  // [full blocks] here already, and held until they are the sequence's; nullptr: to come.
  std::vector<Block*> found_;
  std::vector<Block*> unfit_;  // found, held, and without the raw pages that the sequence reads
  size_t piece_begin_ = 0;     // in found_: compared from here on
  PageComparison comparison_;
  std::vector<uint32_t> pages_of_layer_, recomputed_of_layer_;  // [layers] to come; with activations, then: chosen
  SlotCounts wanted_;
  Block* begun_ = nullptr;  // that is to come, held, and has slots of the layers before layer_
  uint32_t layer_ = 0;
};

}  // namespace kvmanager
