// One item of work is one query token and one KV head: the selector chooses its tokens and attends to them. Before the
// first of them, what the selectors want prepared is done, as items too: a barrier lies between, which is no wait: the
// worker that finishes the last preparation posts the rest.
//
// Invariants:
// 1. An item's result depends on its query and its sequence alone, not on the batch, the threads or the chunking.
// 2. An item is one worker's; it writes its own rows of the output.
// 3. Queries that read everything are an ordinary plan beside it, which runs at the same time.
#include "attention/selective_plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "attention/rows.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// Query tokens from which on the sequence's queries choose: its tokens 0 .. that - 1 read everything.
int ExactTokens(const AttentionSequence& s) {
  if (s.selector == nullptr || s.selector->first_position() <= s.first_position)
    return s.selector == nullptr ? s.tokens : 0;
  return int(std::min<uint64_t>(s.selector->first_position() - s.first_position, uint64_t(s.tokens)));
}

class SelectivePlan final : public AttentionPlan {
 public:
  SelectivePlan(const AttentionBatch& batch, int threads);
  ~SelectivePlan() override { std::free(scratch_); }

  AttentionCounts counts() const override { return counts_; }
  uint64_t multiply_adds() const override { return multiply_adds_; }
  void RunHere() override;
  void Run(WorkerPool& pool, absl::AnyInvocable<void()> done) override;
  void Cancel() override {
    cancelled_.store(true, std::memory_order_relaxed);
    if (exact_ != nullptr) exact_->Cancel();
  }

 private:
  struct Sequence {
    TokenSelector* selector;
    uint64_t first_position;
    const char* q;
    char* out;
    float* lse;
    size_t first_page, pages;  // in pages_
  };
  struct Item {
    uint32_t sequence;
    uint32_t token;
    uint32_t kv_head;
  };
  struct Preparation {
    uint32_t sequence;
    uint32_t index;
  };

  void AddSequence(const AttentionSequence& sequence, uint32_t exact_tokens);
  absl::Span<const uint8_t* const> PagesOf(const Sequence& s) const {
    return absl::MakeConstSpan(pages_).subspan(s.first_page, s.pages);
  }
  // False: the turn is over before all was begun.
  bool Prepare(const Turn& turn);
  bool Work(int worker, const Turn& turn);
  void RunItem(const Item& item, uint8_t* scratch);
  /// Posts `tasks` tasks that run `work`, then, after the last of them, `then`.
  template <typename WorkFn>
  void Post(WorkerPool& pool, size_t tasks, WorkFn work, void (SelectivePlan::*then)(WorkerPool&));
  template <typename WorkFn>
  void PostTurn(WorkerPool& pool, int worker, WorkFn work, void (SelectivePlan::*then)(WorkerPool&));
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  void RunItems(WorkerPool& pool);
  void EndLeg(WorkerPool& pool);

  const PageLayout layout_;
  const uint32_t query_heads_;
  const uint32_t group_heads_;
  const float scale_;
  const DType q_dtype_;
  const int threads_;
  const Isa isa_;

  AttentionCounts counts_;
  uint64_t multiply_adds_ = 0;
  std::unique_ptr<AttentionPlan> exact_;  // nullptr: every query chooses
  std::vector<Sequence> sequences_;
  std::vector<const uint8_t*> pages_;
  std::vector<Preparation> preparations_;
  std::vector<Item> items_;

  // Scratch of a worker: [q][state: max, sum, acc][the selector's workspace].
  size_t q_bytes_ = 0, state_bytes_ = 0, workspace_bytes_ = 0, worker_bytes_ = 0;
  uint8_t* scratch_ = nullptr;

  const WorkerPool::Owner owner_;
  std::atomic<bool> cancelled_{false};
  std::atomic<uint32_t> next_{0};
  std::atomic<uint32_t> tasks_left_{0};
  std::atomic<uint32_t> legs_left_{0};
  absl::AnyInvocable<void()> done_;
};

SelectivePlan::SelectivePlan(const AttentionBatch& batch, int threads)
    : layout_(batch.layout),
      query_heads_(batch.query_heads),
      group_heads_(batch.query_heads / batch.layout.kv_heads),
      scale_(batch.scale != 0 ? batch.scale : 1.0f / std::sqrt(float(batch.layout.head_dim))),
      q_dtype_(batch.q_dtype),
      threads_(std::max(threads, 1)),
      isa_(BestIsa()),
      owner_(batch.owner) {
  // A selector reads raw rows; and its query rows are one group's.
  KV_CHECK(batch.codec != nullptr && batch.codec->info().identity);
  KV_CHECK(group_heads_ <= uint32_t(PageAttentionTask::kRowsMax));
  std::vector<AttentionSequence> exact;
  for (const AttentionSequence& s : batch.sequences) {
    const int exact_tokens = ExactTokens(s);
    if (exact_tokens > 0) {
      exact.push_back(s);
      exact.back().tokens = exact_tokens;
      exact.back().selector = nullptr;
    }
    if (exact_tokens < s.tokens) AddSequence(s, uint32_t(exact_tokens));
  }
  if (!exact.empty()) {
    AttentionBatch rest = batch;
    rest.sequences = exact;
    exact_ = AttentionPlan::Make(rest, threads);
    counts_.encoded_pairs = exact_->counts().encoded_pairs;
    counts_.raw_pairs += exact_->counts().raw_pairs;
    multiply_adds_ += exact_->multiply_adds();
  }
  q_bytes_ = AlignUp(group_heads_ * layout_.head_dim * sizeof(float));
  state_bytes_ = 2 * AlignUp(group_heads_ * sizeof(float)) + q_bytes_;
  worker_bytes_ = q_bytes_ + state_bytes_ + AlignUp(workspace_bytes_);
  scratch_ = static_cast<uint8_t*>(std::aligned_alloc(64, worker_bytes_ * threads_));
  KV_CHECK(scratch_ != nullptr);
}

void SelectivePlan::AddSequence(const AttentionSequence& s, uint32_t exact_tokens) {
  const uint64_t last = s.first_position + s.tokens - 1;
  const size_t pages = last / layout_.page_tokens + 1;
  KV_CHECK(pages <= s.pages.size());
  const uint32_t index = uint32_t(sequences_.size());
  sequences_.push_back({s.selector, s.first_position, static_cast<const char*>(s.q), static_cast<char*>(s.out), s.lse,
                        pages_.size(), pages});
  for (const AttentionPage& page : s.pages.first(pages)) {
    pages_.push_back(page.raw != nullptr ? page.raw : page.encoded);
    KV_CHECK(pages_.back() != nullptr);
  }
  for (int i = 0; i < s.selector->preparations(); ++i) preparations_.push_back({index, uint32_t(i)});
  for (uint32_t token = exact_tokens; token < uint32_t(s.tokens); ++token) {
    const uint64_t position = s.first_position + token, read = s.selector->tokens_read(position);
    counts_.raw_pairs += read;
    multiply_adds_ += read * query_heads_ * layout_.head_dim * 2 +
                      layout_.kv_heads * s.selector->selection_multiply_adds(position, int(group_heads_));
    for (uint32_t head = 0; head < layout_.kv_heads; ++head) items_.push_back({index, token, head});
  }
  workspace_bytes_ = std::max(workspace_bytes_, s.selector->workspace_bytes(last, int(group_heads_)));
}

void SelectivePlan::RunHere() {
  if (exact_ != nullptr) exact_->RunHere();
  next_.store(0, std::memory_order_relaxed);
  Prepare(Turn::Endless());
  next_.store(0, std::memory_order_relaxed);
  Work(0, Turn::Endless());
}

template <typename WorkFn>
void SelectivePlan::Post(WorkerPool& pool, size_t items, WorkFn work, void (SelectivePlan::*then)(WorkerPool&)) {
  const int tasks = std::max<int>(1, int(std::min<size_t>({size_t(threads_), items, size_t(pool.threads())})));
  next_.store(0, std::memory_order_relaxed);
  tasks_left_.store(tasks, std::memory_order_relaxed);
  for (int worker = 0; worker < tasks; ++worker) PostTurn(pool, worker, work, then);
}

template <typename WorkFn>
void SelectivePlan::PostTurn(WorkerPool& pool, int worker, WorkFn work, void (SelectivePlan::*then)(WorkerPool&)) {
  const auto turn = [this, &pool, worker, work, then] {
    if (!work(worker, pool.NewTurn())) return PostTurn(pool, worker, work, then);
    if (tasks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) (this->*then)(pool);
  };
  pool.Post(WorkerPool::Priority::kAttend, turn, owner_);
}

void SelectivePlan::Run(WorkerPool& pool, absl::AnyInvocable<void()> done) {
  done_ = std::move(done);
  legs_left_.store(exact_ != nullptr ? 2 : 1, std::memory_order_relaxed);
  if (exact_ != nullptr) exact_->Run(pool, [this, &pool] { EndLeg(pool); });
  if (preparations_.empty()) return RunItems(pool);
  Post(
      pool, preparations_.size(), [this](int, const Turn& turn) { return Prepare(turn); }, &SelectivePlan::RunItems);
}

void SelectivePlan::RunItems(WorkerPool& pool) {
  Post(
      pool, items_.size(), [this](int worker, const Turn& turn) { return Work(worker, turn); }, &SelectivePlan::EndLeg);
}

void SelectivePlan::EndLeg(WorkerPool&) {
  if (legs_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  absl::AnyInvocable<void()> done = std::move(done_);
  done();  // may destroy the plan
}

bool SelectivePlan::Prepare(const Turn& turn) {
  for (;;) {
    if (cancelled()) return true;
    const uint32_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= preparations_.size()) return true;
    const Sequence& sequence = sequences_[preparations_[i].sequence];
    sequence.selector->Prepare(int(preparations_[i].index), PagesOf(sequence));
    if (turn.over()) return false;
  }
}

bool SelectivePlan::Work(int worker, const Turn& turn) {
  for (;;) {
    if (cancelled()) return true;
    const uint32_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= items_.size()) return true;
    RunItem(items_[i], scratch_ + worker_bytes_ * worker);
    if (turn.over()) return false;
  }
}

void SelectivePlan::RunItem(const Item& item, uint8_t* scratch) {
  const Sequence& sequence = sequences_[item.sequence];
  const size_t d = layout_.head_dim, rows = group_heads_, element = DTypeBytes(q_dtype_);
  const size_t first_row = size_t(item.token) * query_heads_ + size_t(item.kv_head) * group_heads_;
  float* q = reinterpret_cast<float*>(scratch);
  float* max = reinterpret_cast<float*>(scratch + q_bytes_);
  float* sum = reinterpret_cast<float*>(scratch + q_bytes_ + AlignUp(rows * sizeof(float)));
  float* acc = reinterpret_cast<float*>(scratch + q_bytes_ + 2 * AlignUp(rows * sizeof(float)));
  for (size_t r = 0; r < rows; ++r) LoadRow(sequence.q + (first_row + r) * d * element, q_dtype_, d, q + r * d, isa_);
  std::fill_n(max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, rows, 0.0f);
  std::fill_n(acc, rows * d, 0.0f);
  SelectiveTask task;
  task.q = q;
  task.rows = int(rows);
  task.scale = scale_;
  task.kv_head = int(item.kv_head);
  task.position = sequence.first_position + item.token;
  task.pages = PagesOf(sequence);
  const SoftmaxRows state{max, sum, acc};
  sequence.selector->Attend(task, state, {scratch + q_bytes_ + state_bytes_, workspace_bytes_});
  for (size_t r = 0; r < rows; ++r) {
    StoreRow(state, r, q_dtype_, d, sequence.out + (first_row + r) * d * element,
             sequence.lse == nullptr ? nullptr : sequence.lse + first_row + r, isa_);
  }
}

}  // namespace

bool IsSelective(const AttentionSequence& sequence) { return ExactTokens(sequence) < sequence.tokens; }

std::unique_ptr<AttentionPlan> MakeSelectivePlan(const AttentionBatch& batch, int threads) {
  return std::make_unique<SelectivePlan>(batch, threads);
}

}  // namespace kvmanager
