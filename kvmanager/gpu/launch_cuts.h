// How much work one launch on a GPU may be, so that it takes no longer than kLaunchNs and what other clients run there
// has its turn: how much of a step's attention, and how many pages. Times are estimates, from rates that were measured
// on an H200. Values and pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvmanager {

/// What a launch is planned to take at most. The promise is 2 ms (docs/operating.md, "GPUs"). The rest is for what
/// estimates do not know: a GPU whose load rises after a pause lowers its clock by a quarter for a tenth of a second
/// (docs/benchmarks/2026-11-22-gpu-beside.md).
inline constexpr double kLaunchNs = 1.4e6;

/// Raw K and V that one launch of an encoder reads, or one page: 1.2 ms at the 3.6 GB/s of million:m=32,bits=12, the
/// slowest that was measured (docs/benchmarks/2026-11-22-gpu-whole.md). Others take 2 to 90 us, and have more
/// (DeviceEncodes::kFastNs).
inline constexpr uint64_t kEncodeLaunchBytes = 4 << 20;
/// At least 1.
uint32_t EncodeLaunchPages(uint64_t raw_page_bytes);

/// What one layer's attention takes, in nanoseconds of the whole GPU.
struct AttentionRates {
  /// A query token and a context token that it reads, in a kernel for many query tokens; 0: there is none.
  double long_pair = 0;
  /// A context token for a tile of up to 8 rows (query token, head of a group), in all KV heads, by kernels for few
  /// query tokens: of encoded and of raw pages.
  double tile_encoded = 0, tile_raw = 0;
  double raw_tokens = 0;  // of a context's newest, which are on raw pages
  /// The same for a query token that chooses what it reads.
  double sparse_pair = 0;
  double query_token = 0;  // to map q and the output, whatever is read
  int group_heads = 1;     // query heads to a KV head
};

/// What the rates follow from.
struct AttentionShape {
  int kv_heads = 0, query_heads = 0, head_dim = 0;
  int lag_pages = 0;
  int multiprocessors = 0;
  bool identity = false;          // the encoded form is the raw form
  double encoded_cost = 0;        // of one head of an encoded page (device::AttendKernels), the mean where heads differ
  bool has_long_kernels = false;  // device::Prefill
};
AttentionRates RatesOf(const AttentionShape& shape);

/// An entry of a step.
struct AttentionWork {
  uint64_t position = 0;   // of its first query token, in the context
  int tokens = 0;          // 1 or more
  int sparse_queries = 0;  // the last ones, which choose what they read
};

/// Which pages a step's short entries are taken to read before the newest.
enum class ReadForm : uint8_t { kEncoded, kRaw };

/// Of one entry's attention.
double AttentionNs(const AttentionRates& rates, const AttentionWork& work, ReadForm pages);
double AttentionNs(const AttentionRates& rates, absl::Span<const AttentionWork> entries, ReadForm pages);

/// What one launch attends to: the first `entries` entries, of the last one its first `tokens_of_last` tokens.
struct LaunchCut {
  size_t entries = 0;
  int tokens_of_last = 0;
  friend bool operator==(const LaunchCut&, const LaunchCut&) = default;
};
/// The first launch of a step: as much as kLaunchNs allows, and one query token at least. An entry that kernels for
/// many query tokens serve is cut into pieces that they serve too, where its context allows that. REQUIRES: an entry.
LaunchCut FirstLaunch(const AttentionRates& rates, absl::Span<const AttentionWork> entries, ReadForm pages);

/// Whether a launch that was cut for ReadForm::kEncoded reads so much of raw pages that it takes too long after all: of
/// pages that their codec declined, a step knows once it is planned. *_pairs: (query token, context token) that it
/// reads in either form. Not of one query token, which cannot be cut.
bool TakesTooLong(const AttentionRates& rates, absl::Span<const AttentionWork> entries, uint64_t encoded_pairs,
                  uint64_t raw_pairs);

}  // namespace kvmanager
