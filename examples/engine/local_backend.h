// A model's KV cache in this process: a KvBackend with a codec, without a daemon, for training and measuring.
//
// Reads what the daemon would read (docs/design.md, idea 3): a query reads its own page and the lag_pages before it
// raw, older ones encoded, and a page that has aged is read encoded from then on. Full pages are encoded before the
// append that filled them returns. Owns its pages and buffers; model and codec outlive it. One thread calls it, and it
// works on its own threads beside that one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/attention.h"
#include "codecs/codec.h"
#include "examples/engine/kv_backend.h"
#include "examples/engine/model.h"
#include "examples/engine/windows.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::engine {

/// What a codec is made for, to keep `model`'s K and V in fp16 pages.
CodecContext LocalContext(const Model& model, int page_tokens = 64);

/// Whether a cache in this process can hold `model`'s K and V with `codec`. Errors: INVALID_ARGUMENT (a codec for other
/// pages; one with an index, since queries read every page here).
absl::Status CheckLocalCodec(const Model& model, const Codec& codec);

struct LocalBackendOptions {
  int lag_pages = 2;
  int rows_max = 512;  // of a step, all sequences together
  int threads = 1;     // 1..WorkerPool::kThreadsMax, the calling one included
};

/// Since the backend was made, summed over layers.
struct LocalCounts {
  PairCounts pairs;
  uint64_t encoded_pages = 0, declined_pages = 0;
  double encode_seconds = 0, attend_seconds = 0;
};

class LocalBackend final : public KvBackend {
 public:
  /// Sees q, k and v of every step of a layer, before attention; `out` of the buffers is not set yet.
  using Observer = absl::AnyInvocable<void(int layer, absl::Span<const KvEntry> entries, const StepBuffers& buffers)>;

  /// codec: made for LocalContext(model). Errors: INVALID_ARGUMENT (options), CheckLocalCodec's.
  static absl::StatusOr<std::unique_ptr<LocalBackend>> Create(const Model* model, const Codec* codec,
                                                              const LocalBackendOptions& options);

  int rows_max() const override { return options_.rows_max; }
  StepBuffers buffers() override { return buffers_; }
  /// Errors: INVALID_ARGUMENT (an unknown sequence, layer, rows; K or V that is not finite), FAILED_PRECONDITION (a
  /// position that is not the sequence's token count).
  absl::Status AppendAndAttend(int layer, absl::Span<const KvEntry> entries) override;

  static constexpr uint64_t kFirstSequence = 1;
  /// An empty sequence's id: kFirstSequence, and one more each time.
  uint64_t CreateSequence();
  void DropSequence(uint64_t sequence) { sequences_.erase(sequence); }

  void set_observer(Observer observer) { observer_ = std::move(observer); }
  const Codec& codec() const { return *codec_; }
  const LocalCounts& counts() const { return counts_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  using PageMemory = std::unique_ptr<uint8_t, Free>;
  struct Page {
    PageMemory raw, encoded;
  };
  struct LayerPages {
    uint64_t tokens = 0;
    uint32_t aged = 0;  // pages below are read encoded
    std::vector<Page> pages;
  };
  struct Sequence {
    std::vector<LayerPages> layers;
  };

  LocalBackend(const Model* model, const Codec* codec, const LocalBackendOptions& options);
  ReadingRule rule() const { return {layout_.page_tokens, options_.lag_pages}; }
  absl::Status Check(int layer, absl::Span<const KvEntry> entries, int* rows) const;
  void Append(int layer, absl::Span<const KvEntry> entries);
  void Encode(int layer);
  void Attend(int layer, absl::Span<const KvEntry> entries);
  /// Outputs that stay in the codec's space, taken out of it.
  void Unfold(int layer, int rows);

  const Model* const model_;
  const Codec* const codec_;
  const LocalBackendOptions options_;
  const PageLayout layout_;
  std::unique_ptr<PageAttention> raw_attention_;
  std::vector<float> q_, out_;
  std::vector<uint16_t> k_, v_;
  StepBuffers buffers_;
  Observer observer_;
  std::map<uint64_t, Sequence> sequences_;
  uint64_t next_sequence_ = kFirstSequence;
  std::vector<std::pair<Page*, uint64_t>> full_;  // pages to encode, with the positions of their first tokens
  std::vector<EncodeItem> items_;
  std::vector<PageMemory> workspaces_;  // [threads]
  LocalCounts counts_;
  std::unique_ptr<WorkerPool> workers_;  // nullptr: one thread
};

/// Windows that live in `backend`, which outlives them.
std::unique_ptr<WindowStore> MakeLocalWindows(LocalBackend* backend);

struct LocalEvaluation {
  std::string codec;  // canonical
  WindowLoss loss;
  double bytes_per_token_head = 0;  // codes, metadata and sums of encoded pages; K and V together
  LocalCounts counts;
  PairCounts expected_pairs;
  double seconds = 0;
};

/// Evaluate (evaluation.h) in this process: the same windows, and the same bits per byte up to the rounding of merges.
/// Errors: CheckEvaluate's and the backend's.
absl::StatusOr<LocalEvaluation> EvaluateLocal(const Model& model, const Codec& codec, absl::Span<const uint8_t> text,
                                              const EvaluateOptions& options, int lag_pages,
                                              absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
