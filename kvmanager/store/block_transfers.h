// Blocks that are read from host memory, or written into it, by name and in the form in which they are stored: for
// engines that encode and decode pages themselves.
//
//   BlockReads    found blocks, whose pages are copied out, or read where they lie by a process that maps them
//   BlockWrites   slots for new blocks, which get their names once their bytes are in place
//   SlabBinding   slabs that such a process maps before it reads
//
// A page has one form: encoded, or raw where the codec keeps it raw or declined it. Pages are listed block by block,
// and of a block layer by layer. Leases are made and destroyed on the store's thread, perhaps after the store has
// closed, and outlive whoever touches the bytes that they list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/miss_reason.h"

namespace kvmanager {

/// Pages of one transfer: enough that a call costs little, few enough for one turn of the store's thread.
constexpr size_t kTransferPagesMax = 16384;
/// Of pages that clients read where they lie, under all of their leases, each time that one has it: 60 bytes. And of
/// one payer's, so that another finds room.
constexpr uint64_t kMappedPagesMax = 1 << 22;
constexpr uint64_t kTenantMappedPagesMax = kMappedPagesMax / 2;

/// Where the bytes of a page are.
struct StoredPage {
  uint8_t* data = nullptr;  // nullptr: of a block that is not written, since the store has it
  uint32_t bytes = 0;
  uint32_t layer = 0;
  bool raw = false;                          // the codec keeps the page raw, or declined it
  std::optional<SlotPool::SlabPlace> place;  // where a process may map it, if that was asked for
};

/// Of the pages that are read, those to be copied fit `bytes_max` when each is rounded up to `align`.
struct ReadRoom {
  uint64_t bytes_max = 0;
  uint64_t align = 1;
  bool mapped = false;  // those that have a place are not copied
};

/// A slab that a process may map for reading.
struct ShownSlab {
  int fd = -1;  // the receiver's
  uint64_t bytes = 0;
};

/// Slabs that become a tenant's ahead of need, in pieces that each take less than a turn of the event loop. Made, used
/// and destroyed on the store's thread, perhaps destroyed after the store has closed.
class SlabBinding {
 public:
  virtual ~SlabBinding() = default;
  /// Binds the next ones. False: that was the last piece.
  virtual bool DoPiece() = 0;
  /// After the last piece: all that are bound. Errors: UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<std::vector<uint32_t>> result() const = 0;
};

class BlockReads {
 public:
  virtual ~BlockReads() = default;
  /// Consecutive blocks that were found, from the first name on.
  virtual size_t blocks() const = 0;
  /// Why there are no more; kNone: all were found, or more would have exceeded a limit.
  virtual MissReason reason() const = 0;
  /// [blocks()][layers]
  virtual absl::Span<const StoredPage> pages() const = 0;
  /// Whether page `page` still holds what was written: true at once if its block was compared within the last minute.
  /// Takes as long as reading it otherwise. Any thread.
  virtual bool Verify(size_t page) const = 0;
  /// The same, and compares in any case.
  virtual bool Compare(size_t page) const = 0;
  /// Blocks before `intact` were verified, and so was the next one, in vain, if `corrupt` says so: it loses its name.
  /// Pages with a place need not have been: then their blocks are taken for as old as before.
  virtual void NoteVerified(size_t intact, bool corrupt) = 0;
  /// What was found of block `block` when all of its pages were compared.
  virtual void NoteCompared(size_t block, bool intact) = 0;
  /// XXH3-64 of the bytes of page `page` when they were stored.
  virtual uint64_t checksum(size_t page) const = 0;
  /// A slab in which one of the pages has its place. Errors: INVALID_ARGUMENT; UNAVAILABLE (the store has closed);
  /// ShownSlabs::Show's.
  virtual absl::StatusOr<ShownSlab> ShowSlab(uint32_t slab) = 0;
  /// Slabs that the process should map no longer, if it does (ShownSlabs::Recalled).
  virtual std::vector<uint32_t> Recalled() const = 0;
  /// Whether the store has closed: its memory may be gone.
  virtual bool closed() const = 0;
};

class BlockWrites {
 public:
  virtual ~BlockWrites() = default;
  virtual size_t blocks() const = 0;
  /// Blocks that the store has already: nothing is written of them.
  virtual size_t present() const = 0;
  /// [blocks()][layers]
  virtual absl::Span<const StoredPage> pages() const = 0;
  /// Puts the bytes of page `page`, which has `data`, in place, checks what was put there, and returns its checksum,
  /// also if somebody writes to `from` meanwhile. Any thread. Errors: INVALID_ARGUMENT naming page and place (NaN or
  /// Inf), the codec's.
  virtual absl::StatusOr<uint64_t> Put(size_t page, const uint8_t* from) const = 0;
  /// The same of bytes that a device has put in place, with up to 63 bytes behind them, which become zeros. known: the
  /// checksum of an encoded page as who wrote it says, which is then not made; 0: none.
  virtual absl::StatusOr<uint64_t> CheckPut(size_t page, uint64_t known) const = 0;
  /// All bytes are in place. checksums: [pages] of Put. Gives the blocks their names, but for names that others gave
  /// meanwhile; returns how many. At most once. Errors: UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<size_t> Commit(absl::Span<const uint64_t> checksums) = 0;
};

}  // namespace kvmanager
