// An append to one layer in host memory, done in pieces (append_lease.h): slots are reserved, pages written and tokens
// committed for some hundred pages at a time.
//
// Open pages that it goes on in are pinned, so that they stay where they are while a worker writes behind their tokens,
// whatever becomes of their sequences. It is made, used and destroyed on the store's thread, but for WriteNext.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/store/store_appends.h"

namespace kvmanager {

class AppendInPieces {
 public:
  AppendInPieces(StoreAppends* appends, std::shared_ptr<Cache> cache, int layer, absl::Span<const AppendEntry> entries,
                 size_t pages_at_once);
  ~AppendInPieces();
  AppendInPieces(const AppendInPieces&) = delete;
  AppendInPieces& operator=(const AppendInPieces&) = delete;

  /// Once, before all else. Errors: Appends::Begin's.
  absl::Status Begin();
  // AppendLease's.
  bool ReserveNext();
  bool WriteNext();
  bool CommitNext();
  absl::Status status() const { return status_; }
  /// Some tokens are the sequences', and others are to become so.
  bool committing() const { return committing_ && committed_ < pieces_.size(); }

 private:
  static constexpr size_t kWrittenAtOnce = 64 << 10;  // bytes
  /// Consecutive pages.
  struct Piece {
    explicit Piece(SlotPool* pool) : slots(pool, Reservation::Cleaning::kByUser) {}
    Reservation slots;
    std::vector<absl::Span<uint8_t>> unclean;  // slots; they are zeroed first
    size_t cleaned = 0;                        // of them
    std::vector<PageWrite> writes;
    size_t written = 0;                        // of them
    std::vector<StoreAppends::PageSums> sums;  // of each
  };

  bool store_has_gone() const { return alive_.expired(); }
  SlotPool* pool() const { return cache_->tier->pool(); }
  bool MakeRoom();  // false: there is room, or status_ says that there is none
  absl::Status AddPiece();
  SlotCounts CountPages(size_t* pages) const;  // from reserved_ on; *pages: at most so many before, how many after
  void WritePage(Piece& piece);
  /// That the sequences are as they were in Begin.
  absl::Status CheckUnchanged() const;
  bool AgeSome();  // false: all is done
  void CommitPiece(Piece& piece);
  void LetGo();  // of what Begin took

  StoreAppends* const appends_;  // while the store is there
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> cache_;
  const int layer_;
  const std::vector<AppendEntry> entries_;
  const size_t pages_at_once_;
  absl::Status status_;
  std::vector<Sequence*> sequences_;  // as they were when last looked for; nullptr: gone
  std::vector<PageRef> pins_;
  bool holds_ = false;  // Begin has been here, and LetGo has not
  SlotCounts wanted_;
  bool has_room_ = false;
  std::deque<Piece> pieces_;
  AppendPlace reserved_;  // behind the last page of pieces_
  size_t writing_ = 0;    // piece
  bool committing_ = false;
  size_t aged_ = 0;       // entries
  size_t committed_ = 0;  // pieces
  AppendPlace committed_to_;
};

}  // namespace kvmanager
