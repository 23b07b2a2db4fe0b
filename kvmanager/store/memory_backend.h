// How bytes get into the pages of a tier, and who looks at them: the daemon's CPU at once, in host memory, or kernels
// that run later, in the order of submission, on a GPU. The store keeps the same books for both: host memory is a
// device whose stream completes at once.
//
// Stateless; every method is called on the store's thread, unless it says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/sequence_index.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/page_executor.h"
#include "kvmanager/store/sequence.h"
#include "kvmanager/store/step_lease.h"

namespace kvmanager {

class Reservation;
struct Cache;

/// Where an append goes on that is done page by page.
struct AppendPlace {
  uint32_t entry = 0;
  int first = 0;  // token of the entry
};

/// A checked append to layers `layers` of a cache, or `pages` pages of it from `from` on, with the slots that are
/// reserved for these. Nothing of them is committed yet.
struct PendingAppend {
  const Cache& cache;
  LayerRange layers;
  absl::Span<const AppendEntry> entries;
  absl::Span<Sequence* const> sequences;  // of each entry
  const Reservation& slots;               // new raw slots and slots of activations, in the order of the entries
  AppendPlace from;
  size_t pages = SIZE_MAX;
};

/// Tokens of an entry that go to one raw page.
struct PageWrite {
  uint32_t entry = 0;
  int first = 0, tokens = 0;  // of the entry
  int at = 0;                 // token of the page
  bool opens = false;         // the page is new: the reservation's raw slot `slot`. Else it is the sequence's
  size_t slot = 0;
  uint8_t* page = nullptr;
  uint8_t* activations = nullptr;  // of the same tokens; nullptr: they are not kept
};

/// The training of one layer's index.
struct IndexTraining {
  const Cache& cache;
  const Sequence& sequence;
  std::shared_ptr<IndexJob> job;
  std::vector<const uint8_t*> pages;  // raw, pinned until `done`
  absl::AnyInvocable<void(absl::Status)> done;
};

class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;

  // What this memory can do.

  /// Readers find pages by tables that follow the store (SlotTables::TakeChanges). Else a read lists its pages, and
  /// pins them.
  virtual bool follows_tables() const = 0;
  /// What is appended is written when Write returns. Else Exports::Written says when.
  virtual bool writes_at_once() const = 0;
  virtual bool keeps_activations() const = 0;
  /// Whether calls read and write whole blocks of a cache. Errors: FAILED_PRECONDITION naming "device".
  virtual absl::Status CheckTransfers(const Cache& cache) const = 0;
  /// The slots that a sequence's index takes here; zeros: it takes none.
  virtual DeviceIndexLayout index_layout(const Codec& codec) const = 0;
  /// nullptr: the codec has no indexes.
  virtual std::unique_ptr<SequenceIndex> NewIndex(const Codec& codec, const IndexFacts& facts) const = 0;

  // What moves or reads bytes.

  /// Copies the entries' rows into their pages and checks the copies; nothing where kernels write them. Errors:
  /// INVALID_ARGUMENT naming entry, side, token, head and channel of a NaN or an infinity, or more than one layer.
  virtual absl::Status Write(const PendingAppend& append) const = 0;
  /// The same page by page: Write is Plan, then WritePage of each. In memory that is written at once.
  virtual absl::Status Plan(const PendingAppend& append, std::vector<PageWrite>* writes) const = 0;
  /// Any thread.
  virtual absl::Status WritePage(const Cache& cache, int layer, const AppendEntry& entry,
                                 const PageWrite& write) const = 0;
  /// Copies the first `tokens` tokens of a raw page to slot `to`, or adds to `copies` what a kernel shall copy.
  virtual void CopyOpen(const Cache& cache, uint32_t layer, const Page& from, PageId to, int tokens,
                        std::vector<OpenCopy>* copies) const = 0;
  /// XXH3-64 of bytes in this memory; 0: it is made when they leave this memory.
  virtual uint64_t Checksum(const uint8_t* bytes, size_t size) const = 0;
  /// Of a page that a peer has sent: what `look` finds in its bytes and returns, their checksum; 0 where nobody looks
  /// at bytes here. Any thread.
  virtual absl::StatusOr<uint64_t> LookAtArrival(absl::FunctionRef<absl::StatusOr<uint64_t>()> look) const = 0;
  /// Trains an index: on workers, or on the GPU behind what was submitted. Calls `done` once, on the store's thread.
  virtual void Train(IndexTraining training) const = 0;
};

/// executor: outlives it.
std::unique_ptr<MemoryBackend> MakeHostMemory(EncodeExecutor* executor);
std::unique_ptr<MemoryBackend> MakeGpuMemory(EncodeExecutor* executor);

}  // namespace kvmanager
