// The lease of who receives a sequence (hand_off_lease.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kvmanager/store/hand_off_check.h"
#include "kvmanager/store/imported_sequence.h"

namespace kvmanager {

class ImportLeaseImpl final : public ImportLease {
 public:
  explicit ImportLeaseImpl(std::unique_ptr<ImportedSequence> in);
  ~ImportLeaseImpl() override;

  CacheId cache() const override { return cache_.id; }
  absl::Span<uint8_t> target(size_t page) const override {
    if (page < in_->targets.size()) return in_->targets[page];
    KV_CHECK(page - in_->targets.size() < last_targets_.size());
    return last_targets_[page - in_->targets.size()];
  }
  absl::Span<const uint32_t> unwanted() const override { return in_->unwanted; }
  void BeginExtend(HandOffTrailer trailer) override;
  bool ExtendNext() override;
  absl::Status extended() const override { return extending_; }
  absl::StatusOr<uint64_t> Validate(uint32_t page) const override;
  absl::Status Arrived(absl::Span<const ArrivedPage> pages) override;
  std::vector<RecomputePage> TakeRecomputable() override { return std::exchange(recomputable_, {}); }
  absl::Status Recomputed(absl::Span<const ArrivedPage> pages) override;
  bool can_show() const override { return extended_ && awaited_last_ == 0 && (!first_awaited() || !in_->shows_whole); }
  absl::StatusOr<SequenceId> Show() override;
  bool complete() const override { return extended_ && awaited_last_ == 0 && !first_awaited(); }
  bool CommitNext() override;
  absl::Status committed() const override { return committing_; }
  void Break(const absl::Status& why) override;

 private:
  static constexpr size_t kBlocksAtOnce = 128, kPagesAtOnce = 1024;
  static constexpr uint64_t kBytesAtOnce = 1 << 20;  // of slots, which may have to be zeroed

  // Of ExtendNext.
  enum class Stage : uint8_t { kCheck, kCount, kRoom, kWithdraw, kTargets, kDone };
  void GoTo(Stage stage) {
    stage_ = stage;
    at_ = 0;
  }
  void CountWithdrawn();
  void MakeRoom();
  void WithdrawSome();
  void FindTargetsSome();

  absl::StatusOr<uint64_t> Look(uint32_t number, absl::Span<const uint8_t> bytes) const;
  bool first_awaited() const { return in_->awaited_first > 0 || recomputing_.size() > 0; }
  const HandOffHeader& header() const { return *in_->header; }
  const HandOffPage& page_of(uint32_t number) const {
    return number < header().size() ? header().page(number) : trailer_.pages[number - header().size()];
  }
  /// A page that the codec keeps raw has its raw slot: senders of earlier builds withdraw pages of raw layers.
  bool NeedsRawSlot(uint32_t number) const {
    const HandOffPage& page = header().pages[number];
    return in_->awaited[number] && in_->form(page.block, page.layer) != ArrivalForm::kKeptRaw;
  }
  // A full page of K and V is in its slot; it is to be encoded unless it came so or stays raw.
  void ShowFull(PageRef ref, uint64_t checksum, std::vector<PageRef>* to_encode);
  void LetGoOf(absl::Span<const ArrivedPage> pages);

  const std::unique_ptr<ImportedSequence> in_;
  const ImportParts& parts_;
  Cache& cache_;
  SequenceId sequence_ = 0;  // after Show; it may have been dropped since
  HandOffTrailer trailer_;
  std::vector<absl::Span<uint8_t>> last_targets_;  // unchanged once the trailer is taken
  uint64_t awaited_last_ = 0;
  std::vector<RecomputePage> recomputable_;    // not taken yet
  absl::flat_hash_set<uint32_t> recomputing_;  // numbers of activations that are here, whose K and V are not

  absl::Status extending_;  // an error: why the trailer was not taken
  std::optional<TrailerCheck> check_;
  Stage stage_ = Stage::kDone;
  size_t at_ = 0;            // of what the stage goes through
  uint64_t raw_wanted_ = 0;  // slots for pages that were withdrawn
  bool extended_ = false;

  absl::Status committing_;
  size_t named_ = 0;  // blocks
  bool committed_ = false, broken_ = false;
};

}  // namespace kvmanager
