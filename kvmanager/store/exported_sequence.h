// A sequence that is being sent (ExportLease): its pages are pinned as they become full, and offered as they become
// encoded.
//
// A page that the codec keeps raw whatever is in it, a sink, is sent like an encoded one, as soon as the codec has
// passed it. A page that the codec declines for its values is withdrawn and sent raw with the trailer.
//
// On a GPU a page is full once it is reserved, and its bytes come later. One that is encoded was written; one that
// travels as it was appended is offered when Written says so, and what the trailer brings once everything is written.
//
// What concerns every page is done in pieces: the header's pages are listed (ListNext), and once the sequence is
// complete names are read and the trailer is made (DoSome). Between two pieces the sequence may change:
//  - A page that becomes full, is encoded or is written before it was listed is found so when it is.
//  - What an append could take away of a complete sequence is pinned at once: pages that it reads raw, and open ones.
//  - It is not cropped while it is followed: until the names of its blocks are read.
//  - If it goes before its pages are listed, the hand-off does; later, it only has fewer names to tell.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/sequence_exports.h"

namespace kvmanager {

class ExportedSequence final : public ExportLease, public PageFollower, private ExportWork {
 public:
  /// Follows a sequence that is there. exports: while the store is. written: SequenceExports::Begin's. counted: pages,
  /// in SequenceExports::pages.
  ExportedSequence(SequenceExports* exports, SequenceId sequence, uint64_t tokens, const ExportOptions& options,
                   bool written, uint64_t counted);
  ~ExportedSequence() override;

  // Before anybody has the lease.
  /// Lists some pages; of a sequence that is complete also goes on as far as that can be now. False: that was all.
  /// Errors: NOT_FOUND (the sequence was dropped meanwhile).
  absl::StatusOr<bool> ListNext();
  /// The sequence is complete. Errors: Finish's.
  absl::Status Complete();
  /// It leaves from a cache in another memory.
  void GoFrom(const CacheConfig& config) { header_.config = config; }
  /// Whether the header has the page.
  bool has(uint32_t block, uint32_t layer) const {
    return block < header_.aged[layer] && holds_.numbers[first_at_[layer] + block] != ExportHolds::kNotEncoded;
  }

  /// Pages of the header that are sent encoded.
  size_t encoded_pages(uint32_t layer) const { return encoded_[layer]; }

  const HandOffHeader& header() const override { return header_; }
  uint64_t needed_bytes() const override;
  using ExportLease::TakeReady;
  std::vector<ExportedPage> TakeReady(size_t pages_max) override;
  void OnReady(absl::AnyInvocable<void()> fn) override;
  absl::Status Finish() override;
  bool finished() const override { return finished_; }
  const HandOffTrailer* trailer() const override { return settled_ ? &trailer_ : nullptr; }
  absl::Span<const ExportedPage> trailer_pages() const override { return trailer_pages_; }
  absl::Span<const ExportedOpenPage> open_pages() const override { return open_pages_; }

 private:
  // PageFollower's.
  uint64_t tokens() const override { return finished_ ? UINT64_MAX : header_.tokens; }
  void OnFull(uint32_t block, uint32_t layer) override;
  void OnEncoded(absl::Span<const PageRef> pages) override;
  bool AwaitsWrites(SequenceId sequence) const override { return sequence == sequence_ && !all_written(); }
  void OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) override;
  // ExportWork's, too.
  void Tell() override;
  bool DoSome() override { return later_ = DoPiece(); }

  const SequenceExports::Parts& parts() const { return exports_->parts(); }
  bool store_has_gone() const { return alive_.expired(); }
  bool all_written() const;
  bool is_written(const HandOffPage& page) const {
    return written_[page.layer] >= (uint64_t{page.block} + 1) * cache_->page_tokens();
  }
  bool has_written() const;  // some of unwritten_ are, by now
  int open_tokens() const { return static_cast<int>(header_.tokens % cache_->page_tokens()); }
  bool listed() const { return layer_ == cache_->layers(); }
  // Declined for what is in it: the header did not know.
  bool is_withdrawn(const PageRef& ref) const {
    return ref.page().declined && !cache_->keeps_raw(ref.block->index, ref.layer);
  }

  void ListSome(const Sequence& sequence);
  void ListPage(const Sequence& sequence, uint32_t block, uint32_t layer);
  void ListActivations(Block* block, uint32_t layer);
  // Page `at` of holds_ is full.
  void Take(size_t at, PageRef ref);
  // A page of the header that the codec has done with.
  void Offer(uint32_t number, const PageRef& ref);
  // Of a sequence that is complete, what can be done now. False: that was all.
  bool DoPiece();
  // The same, and the rest later.
  void GoOn();
  bool CopyOpenPages();  // false: all are copied
  bool ReadNames();      // false: all are read
  bool MakeTrailer();    // false: it is made
  // A page of the trailer. Returns how many bytes were hashed.
  size_t AddLast(const PageRef& ref, uint32_t block);
  void LeaveSequence();
  uint64_t ChecksumOf(absl::Span<const uint8_t> bytes) const;

  SequenceExports* const exports_;
  const std::weak_ptr<const bool> alive_;
  const SequenceId sequence_;
  const ExportOptions options_;
  std::shared_ptr<Cache> cache_;  // shared: see Block
  uint32_t full_blocks_ = 0;
  HandOffHeader header_;
  HandOffTrailer trailer_;
  std::vector<ExportedPage> trailer_pages_;
  // Its pages: of each layer those before aged[layer], as far as they are listed.
  ExportHolds holds_;
  std::vector<size_t> first_at_;                 // [layers] in these
  uint32_t layer_ = 0, block_ = 0;               // that is listed next
  std::vector<uint32_t> encoded_, kept_;         // [layers] of these, how many are sent encoded, and with the trailer
  uint64_t header_bytes_ = 0;                    // of first_.pages
  size_t awaited_ = 0;                           // in the header: full, and not encoded yet
  std::vector<uint64_t> written_;                // [layers] tokens
  std::vector<std::deque<uint32_t>> unwritten_;  // [layers] in the header: full, travel as they are appended
  std::deque<ExportedPage> ready_, ready_activations_;  // the latter numbered from 0
  std::vector<ExportedOpenPage> open_pages_;
  Block* copy_ = nullptr;                           // of zero-padded copies of open pages, in holds_
  uint32_t copied_ = 0;                             // layers of it
  uint32_t trailer_layer_ = 0, trailer_block_ = 0;  // that the trailer gets next
  size_t trailer_tail_ = 0;                         // of holds_.tail
  bool finished_ = false;
  bool following_ = true;
  bool later_ = false;  // in the list of SequenceExports
  bool settled_ = false;
  bool told_trailer_ = false;
  absl::AnyInvocable<void()> fn_;
};

}  // namespace kvmanager
