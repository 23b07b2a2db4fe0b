// What a step appends and reads, and the lease on what it reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codecs/page_attention.h"
#include "codecs/sequence_index.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

constexpr size_t kStepEntriesMax = 4096;      // of one append or attend
constexpr uint64_t kLeasePagesMax = 1 << 24;  // under all leases, each time that one names it: 40 bytes
constexpr uint64_t kTenantLeasePagesMax = kLeasePagesMax / 2;  // of one payer's, so that another finds room

struct AppendEntry {
  SequenceId sequence = 0;
  uint64_t position = 0;  // the layer's token count that the caller expects; another one is FAILED_PRECONDITION
  int tokens = 0;         // >= 1
  const uint8_t* k =
      nullptr;  // [tokens][kv_heads][head_dim] of the layout's dtype; may change under the copy (it is checked after)
  const uint8_t* v = nullptr;
  /// Activations, [tokens][CacheConfig::hidden] of the layout's dtype, or none. Kept of pages all of whose tokens had
  /// them; may change under the copy as K and V.
  const uint8_t* x = nullptr;
};

/// Layers `first` .. `first + count - 1`; one layer where none says how many.
struct LayerRange {
  LayerRange(int layer) : first(layer) {}  // NOLINT: a layer is a range of one
  LayerRange(int first_layer, int layers) : first(first_layer), count(layers) {}
  int end() const { return first + count; }
  int first = 0;
  int count = 1;
};

struct AttendEntry {
  SequenceId sequence = 0;
  uint64_t position = 0;  // of the first query token
  int tokens = 0;         // position + tokens <= the layer's token count
};

/// What a batch of queries will read, or pages that are read back. Pages that it lists are pinned until it is destroyed
/// (on the store's thread). Where kernels find pages by tables it lists none: once it is ready it may go, since slots
/// stay as long as plans (ReleaseEpochs) that were opened before the store's next call may name them; and who had to
/// wait attends again, since only then does TakeChanges tell which pages were declined.
class AttendLease {
 public:
  virtual ~AttendLease() = default;
  /// Every page that must be read encoded is encoded and here, or will never be.
  virtual bool ready() const = 0;
  /// Calls `fn` once on the store's thread: at once if ready, else when it becomes so.
  virtual void OnReady(absl::AnyInvocable<void()> fn) = 0;
  /// After it is ready. UNAVAILABLE: pages of an entry were to arrive by a hand-off that ended early.
  /// FAILED_PRECONDITION: a query that is not the last token of its own page would read that encoded.
  virtual const absl::Status& status() const = 0;
  /// Pages of the i-th entry; only after it is ready, with an OK status. Valid while the lease lives.
  virtual absl::Span<const AttentionPage> pages(size_t entry) const = 0;
  /// Chooses what the i-th entry's queries read; nullptr: everything. As pages(), and it goes before the lease's pages.
  virtual TokenSelector* selector(size_t entry) const = 0;
  /// Pages [0, aged) of the i-th entry are read encoded, whatever the distance.
  virtual uint32_t aged(size_t entry) const = 0;
  /// The position from which on the i-th entry's queries choose what they read; SequenceIndex::kNever: all read
  /// everything.
  virtual uint64_t sparse_from(size_t entry) const = 0;
};

/// The first `tokens` tokens of a raw page are to be copied into another slot before anything else touches it. A crop
/// gives `from` up, so the plan (ReleaseEpochs) under which the copy runs is opened before the call, not after.
struct OpenCopy {
  uint32_t layer = 0;
  PageId from, to;
  int tokens = 0;
};

}  // namespace kvmanager
