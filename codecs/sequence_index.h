// Codecs that read a part of the context: an index per sequence, kept by the store, and what attention asks of it.
//
// A codec whose Codec::NewIndex() is not nullptr keeps for every sequence an index of its layers' keys, and lets each
// query choose by it which tokens it reads. Three objects take part:
//  - SequenceIndex belongs to a sequence of the store; every method is called on the store's thread.
//  - IndexJob is work on one layer's keys that takes long (training): the store pins the pages, runs its tasks on
//    workers behind attention, and calls Finish on its own thread. Several sequences may share one, hence shared_ptr.
//  - TokenSelector is what one step's queries of one sequence and layer read through: a snapshot that stays valid
//    whatever happens to the sequence meanwhile. Attention calls it on workers; the store takes it back afterwards.
//
// On a GPU (NewIndex with a layout) queries choose there (codecs/device/device_codec.h, choice), and there are no
// selectors: the index has facts and jobs, its memory on the GPU is the store's, and a job's tasks train alone, on keys
// that were copied to the host.
//
// What a query reads depends on its sequence's tokens and on the prompt's length alone, never on timing or chunking: a
// query that needs a job waits for it. Such codecs are of the identity kind (CodecInfo::identity): pages are raw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codecs/page_attention.h"
#include "kvmanager/base/ids.h"

namespace kvmanager {

/// The query rows of one token and one KV head.
struct SelectiveTask {
  const float* q = nullptr;  // [rows][head_dim], after RoPE, not scaled; 64-byte aligned. Rows are heads of the group
  int rows = 0;              // 1..PageAttentionTask::kRowsMax
  float scale = 1;
  int kv_head = 0;
  uint64_t position = 0;                   // of the query token: it may read tokens 0 .. position
  absl::Span<const uint8_t* const> pages;  // raw form, in order of position from 0; cover `position`
};

/// Memory of a sequence's index in one layer on a GPU; zero where a codec has none there.
struct DeviceIndexLayout {
  uint64_t book_bytes = 0;    // of the part that is made once
  uint64_t chunk_bytes = 0;   // of one chunk of codes
  uint64_t chunk_tokens = 0;  // tokens of a chunk
};

class TokenSelector {
 public:
  struct Counts {
    uint64_t selections = 0;                                         // of a query token and KV head
    uint64_t cache_hits = 0, cache_misses = 0, cache_evictions = 0;  // hits and misses in tokens, evictions in blocks
  };

  virtual ~TokenSelector() = default;

  /// Queries at positions below it read everything, and are not for Attend.
  virtual uint64_t first_position() const = 0;
  /// Tokens that a query at `position`, at least first_position(), reads of each KV head.
  virtual uint64_t tokens_read(uint64_t position) const = 0;

  /// Work to be done before Attend: each of 0 .. preparations() - 1 once, in any thread, also at once. pages: raw form,
  /// as in SelectiveTask, of the whole step.
  virtual int preparations() const = 0;
  virtual void Prepare(int preparation, absl::Span<const uint8_t* const> pages) = 0;

  /// Bytes of scratch that Attend needs for a query at `position` or before it.
  virtual size_t workspace_bytes(uint64_t position, int rows) const = 0;
  /// Chooses tokens and adds them to `state`. workspace: at least workspace_bytes, 64-byte aligned. Any thread, after
  /// every preparation; allocates and waits for nothing.
  virtual void Attend(const SelectiveTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) = 0;
  /// Multiply-adds that a selection costs beside attending to the tokens read, roughly.
  virtual uint64_t selection_multiply_adds(uint64_t position, int rows) const = 0;

  /// What Attend counted so far.
  virtual Counts counts() const = 0;
};

/// A slot of a GPU's pool that belongs to indexes: shared by those of forks, and given back with the last of them.
struct IndexMemory {
  PageId slot;
};

class IndexJob {
 public:
  virtual ~IndexJob() = default;
  virtual int layer() const = 0;
  /// It reads the keys of tokens 0 .. tokens() - 1.
  virtual uint64_t tokens() const = 0;
  virtual int tasks() const = 0;
  /// Any thread, each task once, also at once. pages: raw form, in order of position from 0.
  virtual void RunTask(int task, absl::Span<const uint8_t* const> pages) = 0;
  /// Store's thread, after every task.
  virtual void Finish() = 0;
  /// Store's thread.
  virtual bool done() const = 0;

  /// Why it ended without Finish, for whoever needs it. The store's.
  absl::Status failure;

  // On a GPU:

  /// What its tasks made, as the device wants it at the beginning of the index's fixed part. After every task, once,
  /// any thread; the bytes on the host are then given up.
  virtual uint64_t image_bytes() const { return 0; }
  virtual void WriteImage(uint8_t* to) {}
  /// Where that goes: the store's, which sets it before it begins the job.
  std::shared_ptr<const IndexMemory> place;
};

using IndexJobs = std::vector<std::shared_ptr<IndexJob>>;

/// What must be known of an index to make an equal one from the same tokens.
struct IndexFacts {
  static constexpr uint32_t kIterationsMax = 300;
  uint64_t prompt_tokens = 0;  // 0: not known yet; once known it stays
  uint32_t iterations = 0;     // of its training; 0: not chosen yet
};

class SequenceIndex {
 public:
  static constexpr uint64_t kNever = UINT64_MAX;

  virtual ~SequenceIndex() = default;

  virtual IndexFacts facts() const = 0;
  /// The position from which on queries choose, if the next append were of `tokens` tokens at `position`, or 0: none.
  /// kNever: it is not known yet.
  virtual uint64_t SparseFrom(uint64_t position, int tokens) const = 0;

  /// `tokens` tokens were appended to `layer`, the first at `position`. Without a prompt length, the first single token
  /// behind others ends the prompt. now_ns: of a monotonic clock, to learn how long a prefill takes.
  virtual void OnAppend(int layer, uint64_t position, int tokens, int64_t now_ns) = 0;
  /// Every layer has at least `tokens` tokens now, which came by other ways.
  virtual void OnTokens(uint64_t tokens) = 0;
  /// Only the first `tokens` tokens of each layer are left.
  virtual void Crop(uint64_t tokens) = 0;
  virtual std::unique_ptr<SequenceIndex> Fork() const = 0;

  /// The jobs that queries of `layer` at positions first .. last need: those that nobody has begun go to `begin`, and
  /// all that are not done to `wait` (also those in `begin`). Either may be nullptr; then such jobs are not made.
  virtual void Need(int layer, uint64_t first, uint64_t last, IndexJobs* begin, IndexJobs* wait) = 0;
  /// The jobs that `layer`'s next query will need, of the tokens that are there: to begin them early.
  virtual void NeedNext(int layer, IndexJobs* begin) = 0;

  /// A selector for queries of `layer` at positions first .. last, after Need has made their jobs: it may be used once
  /// they are done. nullptr if all of the queries read everything.
  virtual std::unique_ptr<TokenSelector> Select(int layer, uint64_t first, uint64_t last) = 0;
  /// Keeps what `selector`, of this index, prepared. Nothing if the sequence has changed under it.
  virtual void TakeBack(TokenSelector& selector) = 0;

  /// Memory of the index, jobs and shared parts in full.
  virtual uint64_t bytes() const = 0;
};

}  // namespace kvmanager
