// One request of disaggregated serving: a prompt is prefilled against one daemon, its pages go to another while it is,
// and a second engine goes on from there.
//
// The prefill engine runs on the calling thread and the model's worker threads, the decode engine on a thread of its
// own; both in this process, so that their clocks are one. Daemons and model outlive a CodecPair. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/model.h"

namespace kvmanager::bench {

/// The two ends, as their engines reach them.
struct Daemons {
  std::string prefill, decode;  // "unix:PATH"
  std::string decode_peer;      // "HOST:PORT", as the prefill daemon reaches it
};

/// What is asked of both.
struct RequestShape {
  std::vector<uint32_t> prompt;
  int decode_tokens = 32;  // to generate, the first of which prefill gives: at least 3
  int chunk = 0;           // prompt tokens of a prefill step; 0: all at once, layer by layer
  int threads = 1;         // of the prefill engine
};

/// Seconds on this process's clock.
struct RequestTimes {
  double prefill = 0;   // from the request until its first token is known
  double exposed = 0;   // from then until the decode daemon has everything
  double wait = 0;      // by how much the decode engine's first step was late
  double decode = 0;    // its steps
  double job = 0;       // from the request until the last token
  uint64_t bytes = 0;   // of pages
  uint64_t resent = 0;  // of them, because a connection broke
  std::vector<uint32_t> tokens;
};

struct AloneTimes {
  double transfer = 0;  // from the call until the decode daemon has everything
  uint64_t bytes = 0;
  std::vector<uint32_t> tokens;  // generated from what arrived
};

/// Both engines of a codec.
class CodecPair {
 public:
  /// model outlives it.
  static absl::StatusOr<std::unique_ptr<CodecPair>> Open(const engine::Model* model, const Daemons& daemons,
                                                         const engine::KvEngineOptions& options,
                                                         const RequestShape& shape);
  ~CodecPair();

  const client::CacheDescription& cache() const { return prefill_->cache().description(); }

  /// Prefill and decode at the prefill daemon: no transfer. bytes, exposed and wait are 0.
  absl::StatusOr<RequestTimes> Here();
  /// The hand-off begins before prefill does, and ends behind it. The sequence stays for Alone.
  absl::StatusOr<RequestTimes> Streamed();
  /// The same hand-off of the sequence that was streamed last, once more, begun and ended now. Errors:
  /// FAILED_PRECONDITION (no such sequence).
  absl::StatusOr<AloneTimes> Alone();

 private:
  CodecPair(const engine::Model* model, Daemons daemons, RequestShape shape)
      : model_(model), daemons_(std::move(daemons)), shape_(std::move(shape)) {}
  /// Fills `sequence_`, which is new; its first token.
  absl::StatusOr<uint32_t> Prefill();
  std::string Blob(uint32_t first) const;

  const engine::Model* const model_;
  const Daemons daemons_;
  const RequestShape shape_;
  engine::KvEngineOptions decode_options_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<engine::KvEngine> prefill_;
  std::unique_ptr<engine::Runner> runner_;
  std::unique_ptr<client::Sequence> sequence_;
  uint32_t first_token_ = 0;  // behind it
};

}  // namespace kvmanager::bench
