// Checks one StepRequest, or ReadRequest, against its cache: what a hostile client says becomes plain spans and
// numbers, or an error that names the field, its value and its bound. Pure; reads each part of the message once.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// A tensor that is where it should be and as long as its shape. Inline ones point into the request's message.
struct StepTensor {
  enum class Where : uint8_t { kNone, kInline, kArena };
  Where where = Where::kNone;
  uint32_t arena = 0;
  absl::Span<uint8_t> bytes;  // inline: to be read only
  bool given() const { return where != Where::kNone; }
};

struct CheckedStep {
  int layer = 0;
  absl::InlinedVector<AttendEntry, 4> entries;
  uint64_t tokens = 0;  // of all entries
  StepTensor k, v, x, q, out, lse;
  DType q_dtype = DType::kFloat32;
  float scale = 0;
  bool lse_inline = false;  // wanted, and to be sent inline
  uint64_t out_bytes = 0;   // of the output, wherever it goes; 0 without q
  uint64_t lse_bytes = 0;   // 0 if not wanted
  /// At most this many multiply-adds.
  uint64_t multiply_adds_max = 0;
  /// The queries are so many that whether they are finite is left to CheckQueries; in host memory, where it matters.
  bool queries_unchecked = false;

  bool append() const { return k.given(); }
  bool attend() const { return q.given(); }
};

struct CheckedRead {
  int layer = 0;
  absl::InlinedVector<AttendEntry, 4> entries;
  uint64_t tokens = 0;  // of all entries
  uint64_t bytes = 0;   // of K, and of V
  StepTensor k, v;      // arena ranges, or none: inline
};

/// A row of queries for the quality monitor; it points into the request's message.
struct CheckedQueryRow {
  int layer = 0;
  absl::Span<const uint8_t> q;
};
using CheckedQueryRows = absl::InlinedVector<CheckedQueryRow, limits::kQueryRowsMax>;

/// Of an ExtendRequest; that they are finite is not looked at. Errors: INVALID_ARGUMENT.
absl::StatusOr<CheckedQueryRows> CheckQueryRows(const CacheConfig& config, capnp::List<api::QueryRow>::Reader in);

/// A tensor of `want` bytes, or none. Errors: INVALID_ARGUMENT and NOT_FOUND naming `field`.
absl::StatusOr<StepTensor> CheckTensor(absl::string_view field, api::Tensor::Reader in, uint64_t want,
                                       absl::FunctionRef<absl::Span<uint8_t>(uint32_t id)> arena);

/// Entries of a step, or of an ExtendRequest; returns the tokens of all.
absl::StatusOr<uint64_t> CheckStepEntries(capnp::List<api::StepEntry>::Reader in,
                                          absl::FunctionRef<bool(SequenceId)> owned,
                                          absl::InlinedVector<AttendEntry, 4>* entries);

/// Queries in host memory that the event loop looks at in one turn, some 0.5 ms; more are left to CheckQueries. What
/// comes inline has at least as much as is left, or the request is small and is not kept (MessageMemory).
constexpr uint64_t kQueryBytesAtOnceMax = 1 << 20;

/// Looks for NaN and Inf in `part`, which is whole elements of step.q.bytes: an output of NaN would be an answer, and
/// one of Inf times 0 a plausible one. Any thread. Errors: INVALID_ARGUMENT naming the entry, token, head and channel.
absl::Status CheckQueries(const CheckedStep& step, const CacheConfig& config, absl::Span<const uint8_t> part);

/// arena: the bytes of an arena of this connection; empty for an unknown id. owned: whether this connection holds the
/// sequence, in this cache. Positions are compared with the store's by the store, which also looks for NaN and Inf in K
/// and V; those of q are found here, up to kQueryBytesAtOnceMax. Of a cache on a GPU all tensors are in arenas, whose
/// bytes nobody here reads. A client that writes to q in an arena after this check spoils its own output only.
absl::StatusOr<CheckedStep> CheckStep(const CacheConfig& config, api::StepRequest::Reader request,
                                      absl::FunctionRef<absl::Span<uint8_t>(uint32_t id)> arena,
                                      absl::FunctionRef<bool(SequenceId)> owned);

/// The same for a read, of a cache in host memory.
absl::StatusOr<CheckedRead> CheckRead(const CacheConfig& config, api::ReadRequest::Reader request,
                                      absl::FunctionRef<absl::Span<uint8_t>(uint32_t id)> arena,
                                      absl::FunctionRef<bool(SequenceId)> owned);

}  // namespace kvmanager
