#include "codecs/pq/pq_selector.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kvmanager/base/status.h"

namespace kvmanager::pq {
namespace {

/// Tokens that one preparation codes, of one KV head.
constexpr uint64_t kPrepareTokens = 64;

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

class Selector final : public TokenSelector {
 public:
  explicit Selector(SelectorParts parts);

  uint64_t first_position() const override { return parts_.first_position; }
  uint64_t tokens_read(uint64_t position) const override { return p_.ReadsOf(position).total(position); }
  int preparations() const override { return int(units_.size()); }
  void Prepare(int preparation, absl::Span<const uint8_t* const> pages) override;
  size_t workspace_bytes(uint64_t position, int rows) const override { return LayOut(position, rows).bytes; }
  void Attend(const SelectiveTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) override;
  uint64_t selection_multiply_adds(uint64_t position, int rows) const override;
  Counts counts() const override {
    return {selections_.load(std::memory_order_relaxed), hits_.load(std::memory_order_relaxed),
            misses_.load(std::memory_order_relaxed), evictions_.load(std::memory_order_relaxed)};
  }

  PreparedCodes Prepared() const;

 private:
  struct Pending {
    uint64_t first = 0, count = 0;
    std::shared_ptr<CodeChunk> codes;  // [kv_heads][m][count]; shared with what takes it back
  };
  /// Tokens first .. first + count - 1 of a version's pending ones, of one KV head.
  struct Unit {
    uint32_t version;
    int head;
    uint64_t first, count;
  };
  struct Layout {
    explicit Layout(const SelectionScratch& selection) : selection(selection) {}
    SelectionScratch selection;
    size_t runs_at, runs_max, k_at, v_at, uses_at, bytes;
  };
  Layout LayOut(uint64_t position, int rows) const;
  size_t VersionOf(uint64_t position) const;
  absl::Span<const CodeRun> RunsOf(size_t version, int head, uint64_t first, uint64_t count, CodeRun* runs) const;
  const uint8_t* KeyOf(const SelectiveTask& task, uint64_t token) const {
    const PageLayout& layout = parts_.shape->layout;
    return task.pages[token / layout.page_tokens] + layout.raw_offset(0, task.kv_head, int(token % layout.page_tokens));
  }
  void ScoreKeys(const SelectiveTask& task, const SelectionTask& selection, const SelectionScratch& scratch,
                 uint8_t* workspace) const;
  void AddRows(const SelectiveTask& task, uint64_t first, uint64_t count, size_t step, const uint8_t** k,
               const uint8_t** v) const;
  size_t AddChosen(const SelectiveTask& task, absl::Span<const uint32_t> chosen, size_t step, BlockCache* cache,
                   BlockCache::Use* uses, const uint8_t** k, const uint8_t** v) const;
  void FillBlock(const SelectiveTask& task, uint64_t block, uint8_t* to) const;
  void PrefetchNextLayer(int head) const;

  const SelectorParts parts_;
  const Parameters& p_;
  const size_t v_offset_;  // of a token's V from its K, in a page
  const size_t row_bytes_;
  std::vector<Pending> pending_;  // [versions]
  std::vector<Unit> units_;
  std::atomic<size_t> prepared_{0};
  std::atomic<uint64_t> selections_{0}, hits_{0}, misses_{0}, evictions_{0};
};

Selector::Selector(SelectorParts parts)
    : parts_(std::move(parts)),
      p_(parts_.shape->parameters),
      v_offset_(parts_.shape->layout.raw_offset(1, 0, 0)),
      row_bytes_(parts_.shape->layout.head_dim * DTypeBytes(parts_.shape->layout.dtype)) {
  pending_.resize(parts_.versions.size());
  for (uint32_t i = 0; i < parts_.versions.size(); ++i) {
    const SelectorParts::Version& version = parts_.versions[i];
    Pending& pending = pending_[i];
    pending.first = version.codes.tokens();
    if (version.needed <= pending.first) continue;
    pending.count = version.needed - pending.first;
    pending.codes = std::make_shared<CodeChunk>(parts_.shape->code_rows(), pending.count);
    for (int head = 0; head < parts_.shape->layout.kv_heads; ++head) {
      for (uint64_t first = 0; first < pending.count; first += kPrepareTokens) {
        units_.push_back({i, head, first, std::min(kPrepareTokens, pending.count - first)});
      }
    }
  }
}

void Selector::Prepare(int preparation, absl::Span<const uint8_t* const> pages) {
  const Unit& unit = units_[preparation];
  const Shape& shape = *parts_.shape;
  const Codebook& codebook = parts_.versions[unit.version].training->codebook();
  Pending& pending = pending_[unit.version];
  alignas(64) float x[kPrepareTokens * PageLayout::kHeadDimMax];
  for (int sub = 0; sub < codebook.m; ++sub) {
    LoadSubVectors(shape, pages, unit.head, sub, pending.first + unit.first, unit.count, x);
    shape.kernels->nearest(x, unit.count, codebook.width, codebook.centroids_of(unit.head, sub),
                           codebook.half_norms_of(unit.head, sub), codebook.count,
                           pending.codes->row(size_t(unit.head) * codebook.m + sub) + unit.first);
  }
  prepared_.fetch_add(1, std::memory_order_release);
}

PreparedCodes Selector::Prepared() const {
  PreparedCodes prepared;
  prepared.layer = parts_.layer;
  prepared.crops = parts_.crops;
  if (prepared_.load(std::memory_order_acquire) != units_.size()) return prepared;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i].count == 0) continue;
    prepared.versions.push_back(
        {parts_.versions[i].training->tokens(), pending_[i].first, pending_[i].count, pending_[i].codes});
  }
  return prepared;
}

Selector::Layout Selector::LayOut(uint64_t position, int rows) const {
  // Grows with the position, so that a step's last query bounds them all. A sink less is a middle token more.
  const uint64_t context = position + 1, budget = std::min(p_.Budget(position), context);
  const uint64_t read = std::min<uint64_t>(context, p_.sinks + 2 * budget);
  Layout layout(SelectionScratch(p_, rows, context, budget));
  layout.runs_max = context / CodeChunk::kTokens + 4;
  layout.runs_at = AlignUp(layout.selection.bytes);
  layout.k_at = layout.runs_at + AlignUp(layout.runs_max * sizeof(CodeRun));
  layout.v_at = layout.k_at + AlignUp(read * sizeof(void*));
  layout.uses_at = layout.v_at + AlignUp(read * sizeof(void*));
  const uint64_t blocks = parts_.caches.empty() ? 0 : std::min(budget, context / kCacheBlockTokens + 1);
  layout.bytes = layout.uses_at + AlignUp(blocks * sizeof(BlockCache::Use));
  return layout;
}

uint64_t Selector::selection_multiply_adds(uint64_t position, int rows) const {
  const uint64_t d = parts_.shape->layout.head_dim;
  if (p_.scores == Parameters::Scores::kExact) return (position + 1) * d * rows;
  // A table of every centroid; then a look-up per token and sub-vector, and its share of an exp: about 4 multiply-adds.
  return uint64_t(rows) * (uint64_t(p_.centroids()) * d + (position + 1) * (p_.m + 4));
}

size_t Selector::VersionOf(uint64_t position) const {
  const uint64_t trained = p_.TrainedTokens(parts_.prompt_tokens, position);
  for (size_t i = 0; i < parts_.versions.size(); ++i) {
    if (parts_.versions[i].training->tokens() == trained) return i;
  }
  KV_CHECK(false);
  return 0;
}

absl::Span<const CodeRun> Selector::RunsOf(size_t version, int head, uint64_t first, uint64_t count,
                                           CodeRun* runs) const {
  const size_t row = size_t(head) * p_.m;
  const uint64_t end = first + count;
  size_t n = 0;
  const auto add = [&](const CodeChunk& chunk, uint64_t begins, uint64_t ends) {
    const uint64_t from = std::max(first, begins), to = std::min(end, ends);
    if (from < to) runs[n++] = {chunk.row(row) + (from - begins), chunk.capacity, to - from};
  };
  const Codes& codes = parts_.versions[version].codes;
  for (size_t i = first / CodeChunk::kTokens; i < codes.chunks().size(); ++i) {
    const uint64_t begins = i * CodeChunk::kTokens;
    if (begins >= end) break;
    add(*codes.chunks()[i], begins, std::min(begins + CodeChunk::kTokens, codes.tokens()));
  }
  const Pending& pending = pending_[version];
  if (pending.count > 0) add(*pending.codes, pending.first, pending.first + pending.count);
  return {runs, n};
}

void Selector::ScoreKeys(const SelectiveTask& task, const SelectionTask& selection, const SelectionScratch& scratch,
                         uint8_t* workspace) const {
  constexpr size_t kBlock = 128;
  const uint8_t* keys[kBlock];
  float* scores = reinterpret_cast<float*>(workspace + scratch.scores_at);
  RowArguments a{};
  a.q = task.q;
  a.rows = task.rows;
  a.head_dim = parts_.shape->layout.head_dim;
  a.bfloat16 = parts_.shape->layout.dtype == DType::kBFloat16;
  a.scale = task.scale;
  a.k = keys;
  for (size_t at = 0; at < selection.middle; at += kBlock) {
    a.tokens = std::min(kBlock, selection.middle - at);
    for (size_t i = 0; i < a.tokens; ++i) keys[i] = KeyOf(task, selection.first + at + i);
    parts_.shape->kernels->score_rows(a, scores + at, scratch.score_stride);
  }
}

// k, v: every `step`-th is written.
void Selector::AddRows(const SelectiveTask& task, uint64_t first, uint64_t count, size_t step, const uint8_t** k,
                       const uint8_t** v) const {
  const PageLayout& layout = parts_.shape->layout;
  while (count > 0) {
    const uint64_t in_page = std::min<uint64_t>(count, layout.page_tokens - first % layout.page_tokens);
    const uint8_t* key = KeyOf(task, first);
    for (uint64_t i = 0; i < in_page; ++i, key += row_bytes_, k += step, v += step) {
      *k = key;
      *v = key + v_offset_;
    }
    first += in_page;
    count -= in_page;
  }
}

// As AddRows; returns the number of blocks used.
size_t Selector::AddChosen(const SelectiveTask& task, absl::Span<const uint32_t> chosen, size_t step, BlockCache* cache,
                           BlockCache::Use* uses, const uint8_t** k, const uint8_t** v) const {
  if (cache == nullptr) {
    // 32 bits: tokens are, and divide faster.
    const uint32_t page_tokens = uint32_t(parts_.shape->layout.page_tokens);
    const size_t head = parts_.shape->layout.raw_offset(0, task.kv_head, 0);
    const uint8_t* const* pages = task.pages.data();
    for (const uint32_t token : chosen) {
      const uint32_t page = token / page_tokens;
      *k = pages[page] + head + (token - page * page_tokens) * row_bytes_;
      *v = *k + v_offset_;
      k += step;
      v += step;
    }
    return 0;
  }
  size_t n = 0;
  const uint8_t* copy = nullptr;
  for (const uint32_t token : chosen) {
    const uint64_t block = token / kCacheBlockTokens, at = token % kCacheBlockTokens;
    if (n == 0 || uses[n - 1].block != block) {
      uses[n++] = {block, 0, (block + 1) * kCacheBlockTokens <= task.position + 1};
      copy = cache->Find(block);
    }
    ++uses[n - 1].tokens;
    *k = copy == nullptr ? KeyOf(task, token) : copy + at * row_bytes_;
    *v = *k + (copy == nullptr ? v_offset_ : kCacheBlockTokens * row_bytes_);
    k += step;
    v += step;
  }
  return n;
}

void Selector::FillBlock(const SelectiveTask& task, uint64_t block, uint8_t* to) const {
  for (uint64_t i = 0; i < kCacheBlockTokens; ++i) {
    const uint8_t* key = KeyOf(task, block * kCacheBlockTokens + i);
    std::memcpy(to + i * row_bytes_, key, row_bytes_);
    std::memcpy(to + (kCacheBlockTokens + i) * row_bytes_, key + v_offset_, row_bytes_);
  }
}

// On a CPU the first chunk alone: the look-up fetches the others while it runs, and what is asked for in bulk is
// dropped or evicted again. On a device this is where the copy would begin.
void Selector::PrefetchNextLayer(int head) const {
  const Codes& codes = parts_.next_layer;
  if (codes.chunks().empty()) return;
  const uint64_t tokens = std::min(CodeChunk::kTokens, codes.tokens());
  for (int sub = 0; sub < p_.m; ++sub) {
    const uint8_t* row = codes.chunks()[0]->row(size_t(head) * p_.m + sub);
    for (uint64_t at = 0; at < tokens; at += 64) __builtin_prefetch(row + at, 0, 1);
  }
}

void Selector::Attend(const SelectiveTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) {
  const Shape& shape = *parts_.shape;
  const Parameters::Reads reads = p_.ReadsOf(task.position);
  const Layout layout = LayOut(task.position, task.rows);
  KV_CHECK(workspace.size() >= layout.bytes);
  uint8_t* scratch = workspace.data();
  SelectionTask selection;
  selection.q = task.q;
  selection.rows = task.rows;
  selection.scale = task.scale;
  selection.kv_head = task.kv_head;
  selection.first = reads.sinks;
  selection.middle = reads.local_begin - reads.sinks;
  selection.chosen = reads.chosen;
  absl::Span<const uint32_t> chosen;
  if (reads.chosen > 0 && p_.scores == Parameters::Scores::kExact) {
    ScoreKeys(task, selection, layout.selection, scratch);
    chosen = SelectByScores(*shape.kernels, selection, layout.selection, scratch);
  } else if (reads.chosen > 0) {
    const size_t version = VersionOf(task.position);
    CodeRun* runs = reinterpret_cast<CodeRun*>(scratch + layout.runs_at);
    chosen = SelectByCodes(*shape.kernels, parts_.versions[version].training->codebook(), selection,
                           RunsOf(version, task.kv_head, selection.first, selection.middle, runs), layout.selection,
                           scratch);
  }
  BlockCache* cache = parts_.caches.empty() ? nullptr : parts_.caches[task.kv_head].get();
  // Another step of this sequence has it: this one goes to the pages.
  if (cache != nullptr && !cache->TryLock()) cache = nullptr;
  const uint8_t** k = reinterpret_cast<const uint8_t**>(scratch + layout.k_at);
  const uint8_t** v = reinterpret_cast<const uint8_t**>(scratch + layout.v_at);
  BlockCache::Use* uses = reinterpret_cast<BlockCache::Use*>(scratch + layout.uses_at);
  // Chosen and local tokens by turns, then the local ones that are left: the former wait for memory, the latter lie in
  // order and are fetched ahead by the processor itself.
  const uint64_t local = task.position + 1 - reads.local_begin;
  const size_t turns = chosen.size(), at = reads.sinks, rest = at + 2 * turns;
  KV_CHECK(turns <= local);  // ReadsOf
  AddRows(task, 0, reads.sinks, 1, k, v);
  const size_t blocks = AddChosen(task, chosen, 2, cache, uses, k + at, v + at);
  AddRows(task, reads.local_begin, turns, 2, k + at + 1, v + at + 1);
  AddRows(task, reads.local_begin + turns, local - turns, 1, k + rest, v + rest);
  RowArguments a{};
  a.q = task.q;
  a.rows = task.rows;
  a.head_dim = shape.layout.head_dim;
  a.bfloat16 = shape.layout.dtype == DType::kBFloat16;
  a.scale = task.scale;
  a.k = k;
  a.v = v;
  a.tokens = reads.total(task.position);
  a.max = state.max;
  a.sum = state.sum;
  a.acc = state.acc;
  shape.kernels->attend_rows(a);
  if (cache != nullptr) {
    BlockCache::Counts counts;
    cache->Update(
        {uses, blocks}, [&](uint64_t block, uint8_t* to) { FillBlock(task, block, to); }, &counts);
    cache->Unlock();
    hits_.fetch_add(counts.hits, std::memory_order_relaxed);
    misses_.fetch_add(counts.misses, std::memory_order_relaxed);
    evictions_.fetch_add(counts.evictions, std::memory_order_relaxed);
  }
  PrefetchNextLayer(task.kv_head);
  selections_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

std::unique_ptr<TokenSelector> MakeSelector(SelectorParts parts) {
  return std::make_unique<Selector>(std::move(parts));
}

PreparedCodes PreparedOf(const TokenSelector& selector) { return static_cast<const Selector&>(selector).Prepared(); }

}  // namespace kvmanager::pq
