// What a stranger says of a sequence that it hands over, looked at before anything is reserved for it. In pieces, and
// on any one thread: of a cache only what never changes is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/hand_off_lease.h"

namespace kvmanager {

/// How a page of a received sequence travels: with the header, encoded or raw since the codec keeps it so; raw with the
/// trailer; as activations.
enum class ArrivalForm : uint8_t { kEncoded, kKeptRaw, kRaw, kRecomputed };

/// Names of blocks, each key once.
class BlockNamesCheck {
 public:
  /// Looks at names of `blocks` from `*at` on, count_max of them. False: one was named before, and status() says which.
  bool Next(absl::string_view field, absl::Span<const HandOffBlock> blocks, size_t* at, size_t count_max);
  void Reserve(size_t names) { seen_.reserve(names); }
  const absl::Status& status() const { return status_; }

 private:
  absl::flat_hash_set<BlockKey> seen_;
  absl::Status status_;
};

/// Whether a header is of one piece: blocks and pages as its token count says, with the sizes of the cache's forms.
class HeaderCheck {
 public:
  /// cache, header: outlive it.
  HeaderCheck(const Cache& cache, const HandOffHeader& header) : cache_(cache), header_(header) {}

  /// Looks at some more. False: that was all, or status() is an error.
  bool Next();
  /// Errors: INVALID_ARGUMENT with field, value and bound.
  const absl::Status& status() const { return status_; }

  /// After the last Next: [layers][pages of a layer] how each travels, as if none were recomputed; and how many of
  /// them raw with the trailer.
  std::vector<ArrivalForm> TakeForms() { return std::move(forms_); }
  uint64_t trailer_pages() const { return trailer_pages_; }

 private:
  static constexpr size_t kAtOnce = 1024;

  enum class Stage : uint8_t { kCounts, kNames, kPages, kActivations, kDone };
  absl::Status CheckCounts();
  absl::Status CheckPage(size_t i);
  absl::Status CheckActivations(size_t i);
  void GoTo(Stage stage) {
    stage_ = stage;
    at_ = 0;
  }

  const Cache& cache_;
  const HandOffHeader& header_;
  absl::Status status_;
  Stage stage_ = Stage::kCounts;
  size_t at_ = 0;    // of what is looked at
  size_t page_ = 0;  // behind that of the last activations
  BlockNamesCheck names_;
  std::vector<ArrivalForm> forms_;
  size_t pages_per_layer_ = 0;
  uint64_t trailer_pages_ = 0;
};

/// Whether a trailer goes with its header. Which pages have arrived is not looked at.
class TrailerCheck {
 public:
  /// forms: of the header's pages, of which trailer_pages are raw. All outlive it.
  TrailerCheck(const Cache& cache, const HandOffHeader& header, std::vector<ArrivalForm> forms, uint64_t trailer_pages,
               const HandOffTrailer& trailer)
      : cache_(cache), header_(header), trailer_(trailer), forms_(std::move(forms)), trailer_pages_(trailer_pages) {}

  /// As HeaderCheck's.
  bool Next();
  const absl::Status& status() const { return status_; }

 private:
  static constexpr size_t kAtOnce = 1024;

  enum class Stage : uint8_t { kCounts, kWithdrawn, kNames, kNewNames, kPages, kDone };
  absl::Status CheckCounts();
  absl::Status CheckWithdrawn(size_t i);
  absl::Status CheckNewNames(size_t from, size_t to);
  absl::Status CheckPage(size_t i);
  void GoTo(Stage stage) {
    stage_ = stage;
    at_ = 0;
  }

  const Cache& cache_;
  const HandOffHeader& header_;
  const HandOffTrailer& trailer_;
  std::vector<ArrivalForm> forms_;
  uint64_t trailer_pages_;
  absl::Status status_;
  Stage stage_ = Stage::kCounts;
  size_t at_ = 0;    // of what is looked at
  size_t form_ = 0;  // behind that of the last page
  BlockNamesCheck names_;
};

}  // namespace kvmanager
