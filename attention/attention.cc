// The plan of one layer's attention.
//
// Query tokens of one page form a group, since which pages they read raw or encoded is the same for all of them. A
// group's rows (token, head of the KV head's group) are cut into tiles of at most PageAttentionTask::kRowsMax. A tile
// takes as many KV heads as leave enough work for every thread, cut so that tiles read as many bytes (heads of a codec
// may differ), and its length may be cut further; with several heads it visits a page's heads one after the other
// before the next page, so that memory is read in long runs.
//
// Pages of one form follow each other in runs: raw, or encoded by one rung of the codec (a ladder has several). Where a
// group reads several rungs, its pages are attended to in order of their rung, raw ones last, so that runs are long
// however rungs alternate. Each space that pages are kept in, which rungs may share, has queries and states of its own:
// queries are mapped once, a part's states are joined at its end.
//
// Invariants:
// 1. Where the length is cut depends on the query's own page and `threads` alone, and what is in each part on the forms
//    of the pages besides, not on the batch or on how query tokens were chunked; the parts are merged in order, whoever
//    computed them. So a row's result is the same bits in every batch and chunking that is planned for as many threads.
// 2. Running allocates nothing but what the pool's queue needs: states and workspaces are made with the plan.
// 3. A part is written by one worker; the worker that finishes a tile's last part merges the others.
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "attention/rows.h"
#include "attention/selective_plan.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// Parts of a tile's length that one thread should have to choose from, so that threads finish together.
constexpr int kPartsPerThread = 4;
// A part shorter than this costs more in merging than it gains.
constexpr int kPartTokensMin = 1024;
// Pages that one call attends to, times rows: some 0.3 ms of a core, since a turn ends between calls.
constexpr uint32_t kVisitRowPagesMax = 512;
// Bytes of one head that one call attends to before it goes on with the tile's next head: more make the calls fewer,
// but reads jump. At least a page.
constexpr size_t kVisitBytes = 12 << 10;

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

uint32_t VisitPages(const PageLayout& layout, size_t page_bytes) {
  return uint32_t(std::max<size_t>(kVisitBytes * layout.kv_heads / page_bytes, 1));
}

/// What is attended to of a codec's rung (Codec::rung).
struct Rung {
  const PageAttention* attention;  // nullptr: no codec
  bool maps;                       // its pages have a space of their own
  uint32_t space;                  // the first rung whose space it is
  uint32_t visit_pages;
  std::vector<uint64_t> head_bytes;      // [kv_heads + 1] of one page: what the heads before each take together
  uint64_t pages;                        // of the batch
  size_t mapped_q_at, mapped_states_at;  // where the space is its own
};

/// Consecutive pages that a group reads in the same form.
struct PageRun {
  bool raw;
  uint8_t rung;  // 0 where raw
  uint32_t begin;
  uint32_t end;
};

struct Sequence {
  const void* q;
  void* out;
  float* lse;
  uint32_t first_page;  // of this sequence in the plan's tables of pages
};

/// Query tokens of one sequence whose own page is the same.
struct Group {
  uint32_t sequence;
  uint32_t first_token;  // in the sequence's q
  uint32_t tokens;
  uint32_t offset;     // of the first token in its page
  uint32_t pages;      // own page and all before it
  uint32_t run_begin;  // in runs_
  uint32_t run_end;
  uint32_t part_pages;
  uint32_t parts;
  uint32_t spaces;      // a bit for each space that is needed: of its first rung
  size_t sorted_pages;  // its first in sorted_pages_, whose order its runs then refer to; or kInOrder
  static constexpr size_t kInOrder = SIZE_MAX;
};

struct Tile {
  uint32_t group;
  uint32_t first_head;  // KV heads first_head .. first_head + heads - 1
  uint32_t heads;
  uint32_t first_row;  // of the group's tokens * G rows
  uint32_t rows;
  uint32_t remaining_index;  // of its counter, when its parts are items of their own
  size_t state_offset;       //  of its first part's states, one per head, likewise
};

/// A unit of work: one part of a tile, or all of them.
struct Item {
  uint32_t tile;
  int32_t part;  // -1: all
  uint64_t cost;
};

class Plan final : public AttentionPlan {
 public:
  Plan(const AttentionBatch& batch, int threads);
  ~Plan() override { std::free(scratch_); }

  AttentionCounts counts() const override { return counts_; }
  uint64_t multiply_adds() const override {
    return (counts_.encoded_pairs + counts_.raw_pairs) * query_heads_ * layout_.head_dim * 2;
  }
  void RunHere() override;
  void Run(WorkerPool& pool, absl::AnyInvocable<void()> done) override;
  void Cancel() override { cancelled_.store(true, std::memory_order_relaxed); }

 private:
  /// Where a worker is in its item, when its turn is over.
  struct Progress {
    static constexpr uint32_t kNone = UINT32_MAX;
    uint32_t item = kNone;
    bool has_queries = false;
    uint32_t part = 0;
    bool in_part = false;
    uint32_t run = 0, page = 0;  // of the part
  };

  void AddSequence(const AttentionBatch& batch, const AttentionSequence& sequence);
  void AddGroup(const AttentionBatch& batch, const AttentionSequence& sequence, uint32_t first_token, uint32_t tokens);
  void AddRun(const Group& group, bool raw, uint8_t rung, uint32_t begin, uint32_t end);
  void SortPages(Group* group);
  void AddItems();
  uint32_t LastHead(uint32_t head, uint32_t heads_wanted, uint32_t heads_max) const;
  uint64_t Cost(const Group& group, const Tile& tile, uint32_t begin, uint32_t end) const;
  void AllocateScratch();

  void Reset();
  void RunTurn(WorkerPool& pool, int worker);
  // False: the turn is over, or the plan cancelled, before it was done.
  bool Work(int worker, const Turn& turn);
  bool RunItem(const Item& item, uint8_t* scratch, const Turn& turn, Progress& at);
  bool AttendPart(const Tile& tile, uint8_t* scratch, uint8_t* states, const Turn& turn, Progress& at);
  void MergeStates(const Tile& tile, uint8_t* from, uint8_t* into) const;
  void MapQueries(const Tile& tile, uint8_t* scratch) const;
  void JoinSpaces(const Tile& tile, uint8_t* scratch, uint8_t* states) const;
  void LoadQueries(const Tile& tile, float* q) const;
  void StoreOutput(const Tile& tile, uint8_t* states) const;

  /// Row `row` of a tile's group as an index into [tokens][query_heads] of its sequence.
  size_t RowIndex(const Group& group, uint32_t kv_head, uint32_t row) const {
    return size_t(group.first_token + row / group_heads_) * query_heads_ + size_t(kv_head) * group_heads_ +
           row % group_heads_;
  }
  size_t state_bytes(size_t rows) const {
    return 2 * AlignUp(rows * sizeof(float)) + rows * layout_.head_dim * sizeof(float);
  }
  SoftmaxRows StateAt(uint8_t* at, size_t rows) const {
    float* max = reinterpret_cast<float*>(at);
    float* sum = reinterpret_cast<float*>(at + AlignUp(rows * sizeof(float)));
    float* acc = reinterpret_cast<float*>(at + 2 * AlignUp(rows * sizeof(float)));
    return {max, sum, acc};
  }
  void Clear(const SoftmaxRows& state, size_t rows) const {
    std::fill_n(state.max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(state.sum, rows, 0.0f);
    std::fill_n(state.acc, rows * layout_.head_dim, 0.0f);
  }

  /// Calls `visit` with the first rung of each space that the group needs.
  template <typename Visit>
  void ForEachSpace(const Group& group, Visit visit) const {
    for (uint32_t rung = 0; group.spaces >> rung != 0; ++rung) {
      if ((group.spaces >> rung & 1) != 0) visit(rungs_[rung]);
    }
  }

  const PageAttention* const raw_attention_;
  const PageLayout layout_;
  std::vector<Rung> rungs_;  // at least one; up to the highest of the batch
  const Rung* usual_rung_;   // that most encoded pages are on
  const bool identity_;
  const bool folds_;  // outputs stay in the codec's space; it has one rung then
  const int layer_;
  const uint32_t query_heads_;
  const uint32_t group_heads_;  // G
  const float scale_;
  const DType q_dtype_;
  const int threads_;
  const Isa isa_;
  const uint32_t raw_visit_pages_;

  AttentionCounts counts_;
  std::vector<Sequence> sequences_;
  std::vector<const uint8_t*> raw_pages_;
  std::vector<const uint8_t*> encoded_pages_;
  std::vector<const uint8_t*> sorted_pages_;
  std::vector<PageRun> runs_;
  std::vector<Group> groups_;
  std::vector<Tile> tiles_;
  std::vector<Item> items_;
  std::vector<std::atomic<uint32_t>> remaining_;  // [tiles whose parts are items]: parts not yet done

  //  Scratch of a worker: [q][states, one per head][states of the part being folded][visible][workspace], for each
  //  space of encoded pages [mapped q][states in that space], and where there are any [rows on their way between the
  //  spaces].
  uint32_t rows_max_ = 0;
  size_t q_bytes_ = 0;       // largest of any tile, all its heads
  size_t states_bytes_ = 0;  // likewise
  uint32_t parts_max_ = 1;
  size_t part_state_at_ = 0;
  size_t visible_at_ = 0;
  size_t workspace_at_ = 0;
  size_t workspace_bytes_ = 0;
  size_t spare_at_ = 0;
  size_t worker_bytes_ = 0;
  size_t part_states_bytes_ = 0;
  uint8_t* scratch_ = nullptr;  // [threads_ workers][states of parts]

  const WorkerPool::Owner owner_;
  std::vector<Progress> progress_;  // [threads_]
  std::atomic<bool> cancelled_{false};
  std::atomic<uint32_t> next_item_{0};
  std::atomic<uint32_t> workers_left_{0};
  absl::AnyInvocable<void()> done_;
};

/// Of one rung of the codec; nullptr: of raw pages alone.
Rung MakeRung(const AttentionBatch& batch, const Codec* codec) {
  const PageAttention* const attention = codec == nullptr ? nullptr : &codec->attention();
  const size_t page_bytes = codec == nullptr ? batch.layout.raw_bytes() : codec->info().page_bytes(batch.layer);
  Rung rung{attention, attention != nullptr && attention->maps(batch.layer), 0, 1, {0}, 0, 0, 0};
  if (attention != nullptr) {
    rung.visit_pages =
        std::max(VisitPages(batch.layout, page_bytes), uint32_t(std::max(attention->visit_pages_min(batch.layer), 1)));
  }
  for (int head = 0; head < batch.layout.kv_heads; ++head) {
    const size_t bytes = attention == nullptr ? 0 : attention->head_bytes(batch.layer, head);
    rung.head_bytes.push_back(rung.head_bytes.back() + (bytes != 0 ? bytes : page_bytes / batch.layout.kv_heads));
  }
  return rung;
}

bool SharesSpace(const Rung& a, const Rung& b, int layer) {
  return a.maps && b.maps && !a.attention->space(layer).empty() &&
         a.attention->space(layer) == b.attention->space(layer);
}

/// With the pages of each.
std::vector<Rung> RungsOf(const AttentionBatch& batch) {
  uint64_t pages[Codec::kRungsMax] = {};
  size_t count = 1;
  for (const AttentionSequence& s : batch.sequences) {
    for (const AttentionPage& page : s.pages) {
      if (page.encoded == nullptr) continue;
      KV_CHECK(batch.codec != nullptr && page.rung < batch.codec->rungs());
      ++pages[page.rung];
      count = std::max<size_t>(count, page.rung + 1);
    }
  }
  std::vector<Rung> rungs;
  for (size_t rung = 0; rung < count; ++rung) {
    rungs.push_back(MakeRung(batch, rung == 0 ? batch.codec : &batch.codec->rung(int(rung))));
    rungs.back().pages = pages[rung];
    rungs.back().space =
        uint32_t(std::find_if(rungs.begin(), rungs.end() - 1,
                              [&](const Rung& other) { return SharesSpace(other, rungs.back(), batch.layer); }) -
                 rungs.begin());
  }
  return rungs;
}

Plan::Plan(const AttentionBatch& batch, int threads)
    : raw_attention_(batch.raw_attention),
      layout_(batch.layout),
      rungs_(RungsOf(batch)),
      usual_rung_(&*std::max_element(rungs_.begin(), rungs_.end(),
                                     [](const Rung& a, const Rung& b) { return a.pages < b.pages; })),
      identity_(batch.codec != nullptr && batch.codec->info().identity),
      folds_(rungs_[0].maps && rungs_[0].attention->folds_output(batch.layer)),
      layer_(batch.layer),
      query_heads_(batch.query_heads),
      group_heads_(batch.query_heads / batch.layout.kv_heads),
      scale_(batch.scale != 0 ? batch.scale : 1.0f / std::sqrt(float(batch.layout.head_dim))),
      q_dtype_(batch.q_dtype),
      threads_(std::max(threads, 1)),
      isa_(BestIsa()),
      raw_visit_pages_(VisitPages(layout_, layout_.raw_bytes())),
      owner_(batch.owner) {
  KV_CHECK(batch.query_heads > 0 && batch.query_heads % layout_.kv_heads == 0);
  KV_CHECK(raw_attention_ != nullptr);
  KV_CHECK(!folds_ || rungs_.size() == 1);
  size_t pages = 0, groups = 0;
  for (const AttentionSequence& s : batch.sequences) {
    pages += s.pages.size();
    groups += s.tokens / layout_.page_tokens + 2;
  }
  sequences_.reserve(batch.sequences.size());
  raw_pages_.reserve(pages);
  encoded_pages_.reserve(pages);
  runs_.reserve(2 * groups);
  groups_.reserve(groups);
  for (const AttentionSequence& s : batch.sequences) AddSequence(batch, s);
  AddItems();
  AllocateScratch();
}

void Plan::AddSequence(const AttentionBatch& batch, const AttentionSequence& sequence) {
  const uint64_t page_tokens = layout_.page_tokens;
  KV_CHECK(sequence.tokens >= 1);
  KV_CHECK((sequence.first_position + sequence.tokens - 1) / page_tokens < sequence.pages.size());
  sequences_.push_back({sequence.q, sequence.out, sequence.lse, uint32_t(raw_pages_.size())});
  for (const AttentionPage& page : sequence.pages) {
    KV_CHECK(page.raw != nullptr || page.encoded != nullptr);
    raw_pages_.push_back(page.raw);
    encoded_pages_.push_back(page.encoded);
  }
  for (uint32_t token = 0; token < uint32_t(sequence.tokens);) {
    const uint64_t offset = (sequence.first_position + token) % page_tokens;
    const uint32_t tokens = uint32_t(std::min<uint64_t>(page_tokens - offset, sequence.tokens - token));
    AddGroup(batch, sequence, token, tokens);
    token += tokens;
  }
}

void Plan::AddGroup(const AttentionBatch& batch, const AttentionSequence& sequence, uint32_t first_token,
                    uint32_t tokens) {
  const uint32_t page_tokens = layout_.page_tokens;
  const uint64_t position = sequence.first_position + first_token;
  Group group;
  group.sequence = uint32_t(sequences_.size() - 1);
  group.first_token = first_token;
  group.tokens = tokens;
  group.offset = uint32_t(position % page_tokens);
  const uint32_t own = uint32_t(position / page_tokens);
  group.pages = own + 1;
  group.run_begin = uint32_t(runs_.size());
  group.spaces = folds_ ? 1 : 0;
  group.sorted_pages = Group::kInOrder;
  uint64_t encoded_pages = 0;
  uint32_t rungs = 0;  // a bit for each
  for (uint32_t j = 0; j <= own; ++j) {
    const AttentionPage& page = sequence.pages[j];
    const bool raw = ReadingRule::ReadsRaw(page.raw != nullptr, page.encoded != nullptr, page.lag_applies, own - j,
                                           uint32_t(batch.lag_pages));
    encoded_pages += !raw && j != own;
    if (!raw) rungs |= 1u << page.rung;
    AddRun(group, raw, raw ? 0 : page.rung, j, j + 1);
  }
  // A codec's attention sees whole pages; a page that its reader sees in part is its own, and that one has a raw form.
  KV_CHECK(runs_.back().raw || identity_ || (tokens == 1 && group.offset + 1 == page_tokens));

  const uint64_t own_pairs = uint64_t{tokens} * (group.offset + 1) + uint64_t{tokens} * (tokens - 1) / 2;
  counts_.encoded_pairs += encoded_pages * page_tokens * tokens;
  counts_.raw_pairs += (own - encoded_pages) * page_tokens * tokens;
  (runs_.back().raw ? counts_.raw_pairs : counts_.encoded_pairs) += own_pairs;

  const uint32_t wanted = threads_ == 1 ? 1 : kPartsPerThread * threads_;
  const uint32_t part_pages_min = (kPartTokensMin + page_tokens - 1) / page_tokens;
  group.part_pages = std::max((group.pages + wanted - 1) / wanted, part_pages_min);
  group.parts = (group.pages + group.part_pages - 1) / group.part_pages;
  parts_max_ = std::max(parts_max_, group.parts);
  for (size_t rung = 0; rung < rungs_.size(); ++rung) {
    if ((rungs >> rung & 1) != 0 && rungs_[rung].maps) group.spaces |= 1u << rungs_[rung].space;
  }
  if ((rungs & (rungs - 1)) != 0) SortPages(&group);
  group.run_end = uint32_t(runs_.size());
  groups_.push_back(group);
}

// Adds pages begin .. end - 1 behind the group's others.
void Plan::AddRun(const Group& group, bool raw, uint8_t rung, uint32_t begin, uint32_t end) {
  if (runs_.size() > group.run_begin && runs_.back().raw == raw && runs_.back().rung == rung) {
    runs_.back().end = end;
  } else {
    runs_.push_back({raw, rung, begin, end});
  }
}

// In order of rung, then of position. A page that is seen in part is still the last: it is raw.
void Plan::SortPages(Group* group) {
  const std::vector<PageRun> in_order(runs_.begin() + group->run_begin, runs_.end());
  runs_.resize(group->run_begin);
  group->sorted_pages = sorted_pages_.size();
  const size_t first_page = sequences_[group->sequence].first_page;
  const auto add = [&](bool raw, uint8_t rung) {
    const auto pages = (raw ? raw_pages_ : encoded_pages_).begin() + first_page;
    for (const PageRun& run : in_order) {
      if (run.raw != raw || run.rung != rung) continue;
      const uint32_t begin = uint32_t(sorted_pages_.size() - group->sorted_pages);
      sorted_pages_.insert(sorted_pages_.end(), pages + run.begin, pages + run.end);
      AddRun(*group, raw, rung, begin, begin + run.end - run.begin);
    }
  };
  for (size_t rung = 0; rung < rungs_.size(); ++rung) add(false, uint8_t(rung));
  add(true, 0);
}

void Plan::AddItems() {
  // A tile's rows, all its heads together, are at most kRowsMax: more would not share anything.
  constexpr uint32_t kRowsMax = PageAttentionTask::kRowsMax;
  const uint32_t kv_heads = layout_.kv_heads;
  const size_t wanted = threads_ == 1 ? 1 : size_t(kPartsPerThread) * threads_;
  size_t row_tiles = 0, largest_tiles = 0, parts = 0;
  for (const Group& g : groups_) {
    const uint32_t rows = g.tokens * group_heads_;
    const size_t tiles = (rows + kRowsMax - 1) / kRowsMax;
    const uint32_t heads = std::clamp(kRowsMax / std::min(rows, kRowsMax), 1u, kv_heads);
    row_tiles += tiles;
    largest_tiles += tiles * ((kv_heads + heads - 1) / heads);
    parts += tiles * g.parts;
  }
  // Parts become items only where whole tiles are too few to keep the threads busy.
  const bool split = largest_tiles < wanted && parts_max_ > 1;
  const uint32_t heads_shared =
      uint32_t(std::clamp<size_t>((split ? parts : row_tiles) * kv_heads / wanted, 1, kv_heads));
  tiles_.reserve(row_tiles * ((kv_heads + heads_shared - 1) / heads_shared));
  uint32_t counters = 0;
  for (uint32_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    const uint32_t rows = group.tokens * group_heads_;
    const uint32_t heads_max = std::max(kRowsMax / std::min(rows, kRowsMax), 1u);
    for (uint32_t head = 0, end; head < kv_heads; head = end) {
      end = LastHead(head, std::min(heads_shared, heads_max), heads_max) + 1;
      for (uint32_t row = 0; row < rows; row += kRowsMax) {
        Tile tile{i, head, end - head, row, std::min(rows - row, kRowsMax), 0, 0};
        const size_t states_bytes = tile.heads * state_bytes(tile.rows);
        rows_max_ = std::max(rows_max_, tile.rows);
        q_bytes_ = std::max(q_bytes_, size_t{tile.heads} * tile.rows * layout_.head_dim * sizeof(float));
        states_bytes_ = std::max(states_bytes_, states_bytes);
        if (!split || group.parts == 1) {
          items_.push_back({uint32_t(tiles_.size()), -1, Cost(group, tile, 0, group.pages)});
        } else {
          tile.remaining_index = counters++;
          tile.state_offset = part_states_bytes_;
          part_states_bytes_ += group.parts * states_bytes;
          for (uint32_t part = 0; part < group.parts; ++part) {
            const uint32_t begin = part * group.part_pages, past = std::min(begin + group.part_pages, group.pages);
            items_.push_back({uint32_t(tiles_.size()), int32_t(part), Cost(group, tile, begin, past)});
          }
        }
        tiles_.push_back(tile);
      }
    }
  }
  remaining_ = std::vector<std::atomic<uint32_t>>(counters);
  // The longest first, so that no thread is left alone with one at the end.
  if (threads_ > 1) {
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
      return a.cost != b.cost ? a.cost > b.cost : std::pair(a.tile, a.part) < std::pair(b.tile, b.part);
    });
  }
}

// The last head of the tile that begins with `head`, for tiles of about heads_wanted heads, at most heads_max: the cut
// nearest to where tiles of equal bytes would end.
uint32_t Plan::LastHead(uint32_t head, uint32_t heads_wanted, uint32_t heads_max) const {
  const uint32_t left = layout_.kv_heads - head;
  const uint64_t tiles = (left + heads_wanted - 1) / heads_wanted;
  const uint64_t* bytes = usual_rung_->head_bytes.data() + head;
  const uint64_t wanted = (bytes[left] - bytes[0]) / tiles;
  uint32_t heads = 1;
  while (heads < std::min(heads_max, left) && (tiles == 1 || heads + tiles - 1 < left) &&
         bytes[heads] + bytes[heads + 1] <= 2 * (bytes[0] + wanted)) {
    ++heads;
  }
  return head + heads - 1;
}

// Of pages begin .. end - 1 of the group: bytes read, once per row.
uint64_t Plan::Cost(const Group& group, const Tile& tile, uint32_t begin, uint32_t end) const {
  const uint64_t raw_bytes = 2 * tile.heads * layout_.raw_head_bytes();
  uint64_t bytes = 0;
  for (uint32_t i = group.run_begin; i < group.run_end; ++i) {
    const PageRun& run = runs_[i];
    const uint32_t from = std::max(run.begin, begin), to = std::min(run.end, end);
    const std::vector<uint64_t>& heads = rungs_[run.rung].head_bytes;
    const uint64_t page_bytes = run.raw ? raw_bytes : heads[tile.first_head + tile.heads] - heads[tile.first_head];
    if (from < to) bytes += (to - from) * page_bytes;
  }
  return bytes * tile.rows;
}

void Plan::AllocateScratch() {
  workspace_bytes_ = raw_attention_->workspace_bytes(rows_max_);
  for (const Rung& rung : rungs_) {
    if (rung.attention == nullptr) continue;
    workspace_bytes_ = std::max(workspace_bytes_, rung.attention->workspace_bytes(rows_max_));
  }
  part_state_at_ = q_bytes_ + states_bytes_;
  visible_at_ = part_state_at_ + (parts_max_ > 1 ? states_bytes_ : 0);
  workspace_at_ = visible_at_ + AlignUp(rows_max_ * sizeof(int));
  worker_bytes_ = workspace_at_ + AlignUp(workspace_bytes_);
  uint32_t spaces = 0;
  for (const Group& group : groups_) spaces |= group.spaces;
  for (size_t rung = 0; rung < rungs_.size(); ++rung) {
    if ((spaces >> rung & 1) == 0) continue;
    rungs_[rung].mapped_q_at = worker_bytes_;
    rungs_[rung].mapped_states_at = worker_bytes_ + q_bytes_;
    worker_bytes_ += q_bytes_ + states_bytes_;
  }
  spare_at_ = worker_bytes_;
  if (spaces != 0) worker_bytes_ += size_t{rows_max_} * layout_.head_dim * sizeof(float);
  scratch_ = static_cast<uint8_t*>(
      std::aligned_alloc(64, std::max<size_t>(worker_bytes_ * threads_ + part_states_bytes_, 64)));
  KV_CHECK(scratch_ != nullptr);
}

void Plan::Reset() {
  next_item_.store(0, std::memory_order_relaxed);
  progress_.assign(threads_, Progress());
  for (const Tile& tile : tiles_) {
    const Group& group = groups_[tile.group];
    if (group.parts > 1 && !remaining_.empty()) {
      remaining_[tile.remaining_index].store(group.parts, std::memory_order_relaxed);
    }
  }
}

void Plan::RunHere() {
  Reset();
  Work(0, Turn::Endless());
}

void Plan::Run(WorkerPool& pool, absl::AnyInvocable<void()> done) {
  Reset();
  const int workers = std::max<int>(1, std::min<size_t>({size_t(threads_), items_.size(), size_t(pool.threads())}));
  done_ = std::move(done);
  workers_left_.store(workers, std::memory_order_relaxed);
  for (int worker = 0; worker < workers; ++worker) {
    pool.Post(
        WorkerPool::Priority::kAttend, [this, &pool, worker] { RunTurn(pool, worker); }, owner_);
  }
}

void Plan::RunTurn(WorkerPool& pool, int worker) {
  if (!Work(worker, pool.NewTurn()) && !cancelled_.load(std::memory_order_relaxed)) {
    return pool.Post(
        WorkerPool::Priority::kAttend, [this, &pool, worker] { RunTurn(pool, worker); }, owner_);
  }
  if (workers_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  absl::AnyInvocable<void()> done = std::move(done_);
  done();  // may destroy the plan
}

bool Plan::Work(int worker, const Turn& turn) {
  Progress& at = progress_[worker];
  uint8_t* scratch = scratch_ + worker_bytes_ * worker;
  for (;;) {
    if (at.item == Progress::kNone) {
      at.item = next_item_.fetch_add(1, std::memory_order_relaxed);
      if (at.item >= items_.size()) return true;
    }
    if (!RunItem(items_[at.item], scratch, turn, at)) return false;
    at = Progress();
    if (turn.over()) return false;
  }
}

bool Plan::RunItem(const Item& item, uint8_t* scratch, const Turn& turn, Progress& at) {
  const Tile& tile = tiles_[item.tile];
  const Group& group = groups_[tile.group];
  if (!at.has_queries) {
    LoadQueries(tile, reinterpret_cast<float*>(scratch));
    MapQueries(tile, scratch);
    at.has_queries = true;
    at.part = item.part < 0 ? 0 : uint32_t(item.part);
  }
  if (item.part < 0) {
    uint8_t* states = scratch + q_bytes_;
    for (; at.part < group.parts; ++at.part) {
      uint8_t* const into = at.part == 0 ? states : scratch + part_state_at_;
      if (!AttendPart(tile, scratch, into, turn, at)) return false;
      if (at.part > 0) MergeStates(tile, into, states);
    }
    StoreOutput(tile, states);
    return true;
  }
  uint8_t* states = scratch_ + worker_bytes_ * threads_ + tile.state_offset;
  const size_t states_bytes = tile.heads * state_bytes(tile.rows);
  if (!AttendPart(tile, scratch, states + at.part * states_bytes, turn, at)) return false;
  if (remaining_[tile.remaining_index].fetch_sub(1, std::memory_order_acq_rel) != 1) return true;
  for (uint32_t part = 1; part < group.parts; ++part) MergeStates(tile, states + part * states_bytes, states);
  StoreOutput(tile, states);
  return true;
}

bool Plan::AttendPart(const Tile& tile, uint8_t* scratch, uint8_t* states, const Turn& turn, Progress& at) {
  const Group& group = groups_[tile.group];
  int* visible = reinterpret_cast<int*>(scratch + visible_at_);
  const absl::Span<uint8_t> workspace(scratch + workspace_at_, workspace_bytes_);
  const size_t bytes = state_bytes(tile.rows);
  const uint32_t begin = at.part * group.part_pages;
  const uint32_t end = std::min(begin + group.part_pages, group.pages);
  if (!at.in_part) {
    for (uint32_t h = 0; h < tile.heads; ++h) {
      Clear(StateAt(states + h * bytes, tile.rows), tile.rows);
      ForEachSpace(group, [&](const Rung& rung) {
        Clear(StateAt(scratch + rung.mapped_states_at + h * bytes, tile.rows), tile.rows);
      });
    }
    at.in_part = true, at.run = group.run_begin, at.page = begin;
  }
  PageAttentionTask task;
  task.rows = tile.rows;
  task.scale = scale_;
  task.layer = layer_;
  for (; at.run < group.run_end; ++at.run) {
    const PageRun& run = runs_[at.run];
    const uint32_t from = std::max(run.begin, begin), to = std::min(run.end, end);
    if (from >= to) continue;
    at.page = std::max(at.page, from);
    const uint8_t* const* const pages =
        group.sorted_pages != Group::kInOrder
            ? sorted_pages_.data() + group.sorted_pages
            : (run.raw ? raw_pages_ : encoded_pages_).data() + sequences_[group.sequence].first_page;
    const Rung& rung = rungs_[run.rung];
    const PageAttention& attention = run.raw ? *raw_attention_ : *rung.attention;
    const Rung& space = rungs_[rung.space];
    const bool mapped = rung.maps && !run.raw;
    const float* q = reinterpret_cast<const float*>(scratch + (mapped ? space.mapped_q_at : 0));
    uint8_t* into = mapped ? scratch + space.mapped_states_at : states;
    const uint32_t least = run.raw ? raw_visit_pages_ : rung.visit_pages;
    const uint32_t visit_pages = tile.heads == 1 ? std::max(kVisitRowPagesMax / tile.rows, least) : least;
    bool announced = false;
    while (at.page < to) {
      if (cancelled_.load(std::memory_order_relaxed)) return false;
      const uint32_t page = at.page, visit_end = std::min(page + visit_pages, to);
      task.pages = absl::MakeConstSpan(pages + page, visit_end - page);
      task.visible = nullptr;
      if (visit_end == group.pages && group.offset + 1 < layout_.page_tokens) {
        const uint32_t before = (visit_end - 1 - page) * layout_.page_tokens + group.offset + 1;
        for (uint32_t r = 0; r < tile.rows; ++r) visible[r] = int(before + (tile.first_row + r) / group_heads_);
        task.visible = visible;
      }
      for (uint32_t h = 0; h < tile.heads; ++h) {
        const bool last = h + 1 == tile.heads;
        task.q = q + size_t{h} * tile.rows * layout_.head_dim;
        task.kv_head = tile.first_head + h;
        task.next_pages =
            !last ? task.pages : absl::MakeConstSpan(pages + visit_end, std::min(visit_pages, to - visit_end));
        task.next_kv_head = last ? tile.first_head : task.kv_head + 1;
        task.announced = announced || h > 0;
        attention.Attend(task, StateAt(into + h * bytes, tile.rows), workspace);
      }
      announced = true;
      at.page = visit_end;
      if (turn.over() && at.page < to) return false;
    }
  }
  JoinSpaces(tile, scratch, states);
  at.in_part = false;
  return true;
}

void Plan::MapQueries(const Tile& tile, uint8_t* scratch) const {
  const size_t head = size_t{tile.rows} * layout_.head_dim;
  const float* const q = reinterpret_cast<const float*>(scratch);
  ForEachSpace(groups_[tile.group], [&](const Rung& rung) {
    float* const mapped = reinterpret_cast<float*>(scratch + rung.mapped_q_at);
    for (uint32_t h = 0; h < tile.heads; ++h) {
      rung.attention->MapQueries(layer_, int(tile.first_head + h), int(tile.rows), q + h * head, mapped + h * head);
    }
  });
}

// All states of each head, of raw pages and of each space, into the one that the output is wanted in.
void Plan::JoinSpaces(const Tile& tile, uint8_t* scratch, uint8_t* states) const {
  const size_t elements = size_t{tile.rows} * layout_.head_dim;
  float* const spare = reinterpret_cast<float*>(scratch + spare_at_);
  const int rows = int(tile.rows);
  for (uint32_t h = 0; h < tile.heads; ++h) {
    const size_t at = h * state_bytes(tile.rows);
    const SoftmaxRows state = StateAt(states + at, tile.rows);
    const int head = int(tile.first_head + h);
    ForEachSpace(groups_[tile.group], [&](const Rung& rung) {
      const SoftmaxRows mapped = StateAt(scratch + rung.mapped_states_at + at, tile.rows);
      if (folds_) {
        rung.attention->ProjectOutput(layer_, head, rows, state.acc, spare);
        std::copy_n(spare, elements, state.acc);
      } else if (std::any_of(mapped.sum, mapped.sum + rows, [](float sum) { return sum > 0; })) {
        rung.attention->ExpandOutput(layer_, head, rows, mapped.acc, spare);
        std::copy_n(spare, elements, mapped.acc);
      }
      MergeSoftmax(rows, layout_.head_dim, mapped, state);
    });
  }
}

void Plan::MergeStates(const Tile& tile, uint8_t* from, uint8_t* into) const {
  for (uint32_t h = 0; h < tile.heads; ++h) {
    const size_t at = h * state_bytes(tile.rows);
    MergeSoftmax(tile.rows, layout_.head_dim, StateAt(from + at, tile.rows), StateAt(into + at, tile.rows));
  }
}

void Plan::LoadQueries(const Tile& tile, float* q) const {
  const Group& group = groups_[tile.group];
  const char* base = static_cast<const char*>(sequences_[group.sequence].q);
  const size_t d = layout_.head_dim;
  for (uint32_t h = 0; h < tile.heads; ++h) {
    for (uint32_t r = 0; r < tile.rows; ++r, q += d) {
      const size_t row = RowIndex(group, tile.first_head + h, tile.first_row + r);
      LoadRow(base + row * d * DTypeBytes(q_dtype_), q_dtype_, d, q, isa_);
    }
  }
}

void Plan::StoreOutput(const Tile& tile, uint8_t* states) const {
  const Group& group = groups_[tile.group];
  const Sequence& sequence = sequences_[group.sequence];
  const size_t d = layout_.head_dim;
  for (uint32_t h = 0; h < tile.heads; ++h) {
    const SoftmaxRows state = StateAt(states + h * state_bytes(tile.rows), tile.rows);
    for (uint32_t r = 0; r < tile.rows; ++r) {
      const size_t row = RowIndex(group, tile.first_head + h, tile.first_row + r);
      StoreRow(state, r, q_dtype_, d, static_cast<char*>(sequence.out) + row * d * DTypeBytes(q_dtype_),
               sequence.lse == nullptr ? nullptr : sequence.lse + row, isa_);
    }
  }
}

}  // namespace

std::unique_ptr<AttentionPlan> AttentionPlan::Make(const AttentionBatch& batch, int threads) {
  if (std::any_of(batch.sequences.begin(), batch.sequences.end(), IsSelective)) {
    return MakeSelectivePlan(batch, threads);
  }
  return std::make_unique<Plan>(batch, threads);
}

}  // namespace kvmanager
