// Sending a growing sequence of a GPU by way of the host: each page is copied into a slot there as soon as it is ready.
//
// What is exported out of the GPU's memory stays as it is (exported_sequence.h); this takes its pages, copies them,
// has workers look at the copies, as at all that leaves a GPU, and offers those. Room for all of them is taken before
// the hand-off is offered, so that prefill cannot run into a full host. It is taken, and pages are copied, in pieces.
//
// Shared by its lease and by moves on their way, which may end after it: slots of either memory stay until then. On the
// store's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/exported_sequence.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/sequence_exports.h"

namespace kvmanager {

class HostExport final : public std::enable_shared_from_this<HostExport>, private ExportWork {
 public:
  /// For what is exported out of `from`'s GPU, copied to the next lower tier. Errors: FAILED_PRECONDITION (a GPU that
  /// moves no pages), UNAVAILABLE (pages cannot move yet), RESOURCE_EXHAUSTED (caches).
  static absl::StatusOr<std::shared_ptr<HostExport>> Make(SequenceExports* exports, const std::shared_ptr<Cache>& from);
  HostExport(SequenceExports* exports, std::shared_ptr<Cache> from, std::shared_ptr<Cache> to);
  ~HostExport() override;
  HostExport(const HostExport&) = delete;
  HostExport& operator=(const HostExport&) = delete;

  /// Once, first: what is copied, listed.
  void Take(std::unique_ptr<ExportedSequence> sent);
  /// Then, until it is false: takes room for some pages. Errors: RESOURCE_EXHAUSTED.
  absl::StatusOr<bool> ReserveNext();
  /// Then.
  static std::unique_ptr<ExportLease> Start(std::shared_ptr<HostExport> copies);

  // The lease's.
  /// Nobody wants it any more.
  void Close();
  ExportLease& sent() const { return *sent_; }
  const absl::Status& status() const { return status_; }
  std::vector<ExportedPage> TakeReady(size_t pages_max);
  const HandOffTrailer* trailer() const { return settled() ? sent_->trailer() : nullptr; }
  absl::Span<const ExportedPage> trailer_pages() const { return trailer_pages_; }
  void OnReady(absl::AnyInvocable<void()> fn);

 private:
  // Pages on their way, and their numbers in the hand-off.
  struct Copies {
    std::vector<uint32_t> numbers;
    std::vector<MovingPage> pages;
  };

  void Tell() override;
  // Copies some of what has become ready.
  bool DoSome() override { return later_ = CopySome(); }
  bool CopySome();
  // The same, and the rest later.
  void Go();

  const SequenceExports::Parts& parts() const { return exports_->parts(); }
  const HandOffHeader& header() const { return sent_->header(); }
  // Slots may have to be zeroed.
  size_t slots_at_once() const {
    return std::clamp<size_t>(SequenceExports::kBytesAtOnce / to_->raw_slot_bytes, 1, SequenceExports::kPagesAtOnce);
  }
  uint32_t full_blocks() const { return static_cast<uint32_t>(header().blocks.size()); }
  int open_tokens() const { return static_cast<int>(header().tokens % to_->page_tokens()); }
  bool goes_encoded(uint32_t block, uint32_t layer) const {
    return block < full_blocks() && sent_->has(block, layer) && !to_->keeps_raw(block, layer);
  }
  bool took_trailer() const {
    return sent_->trailer() != nullptr && trailer_pages_.size() == sent_->trailer()->pages.size();
  }
  bool settled() const { return took_trailer() && on_their_way_ == 0 && status_.ok(); }
  void Fail(absl::Status why);
  SlotCounts CountAll() const;
  // Some of the trailer's. False: that was all.
  absl::StatusOr<bool> TakeTrailer(Copies* copies);
  void Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies);
  void Move(Copies copies);
  void Land(absl::Span<const uint32_t> numbers, absl::Span<const MovingPage> pages);

  SequenceExports* const exports_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> from_, to_;  // shared: see Block
  std::unique_ptr<ExportedSequence> sent_;
  bool has_room_ = false;
  std::vector<Block*> blocks_;  // of the copies, each with this as its holder
  std::deque<ExportedPage> ready_;
  std::vector<ExportedPage> trailer_pages_;
  size_t withdrawn_taken_ = 0;
  size_t on_their_way_ = 0;  // moves
  bool later_ = false;       // in the list of SequenceExports
  bool told_trailer_ = false;
  const std::shared_ptr<bool> closed_ = std::make_shared<bool>(false);  // shared with moves on their way
  absl::Status status_;
  absl::AnyInvocable<void()> fn_;
};

}  // namespace kvmanager
