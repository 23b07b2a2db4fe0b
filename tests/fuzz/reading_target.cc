// Which form of which page a query reads: plans of CPUs and of GPUs against ReadingRule, on sequences that an input
// makes.
#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/device_plan.h"
#include "attention/prefill_plan.h"
#include "attention/step_tables.h"
#include "codecs/codec.h"
#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"
#include "tests/fuzz/fuzz_target.h"

namespace kvmanager::fuzz {
namespace {

constexpr uint32_t kPagesMax = 64;    // of a sequence
constexpr int kQueryTokensMax = 160;  // of a query: more than DevicePlanner takes, and PrefillPlanner::kTokensMin
constexpr int kStepsMax = 24;
constexpr int kHeadDim = 64;
constexpr int kPageStride = 64;  // between the addresses of two pages, whose bytes nobody reads

enum Form : uint8_t { kUnread = 0, kRaw, kEncoded };

/// What queries at `position` and behind read, [tokens][pages].
struct Reads {
  uint64_t position = 0;
  int page_tokens = 0;
  uint32_t pages = 0;
  std::vector<Form> forms;
  Form& At(int token, uint32_t page) { return forms[size_t(token) * pages + page]; }
};

/// Writes down which pages it is given for which query, whose number is its first value.
class Recorder final : public PageAttention {
 public:
  Recorder(Form form, Reads* reads) : form_(form), reads_(reads) {}
  const uint8_t* Page(uint32_t number) const { return bytes_ + size_t{number} * kPageStride; }

  size_t workspace_bytes(int) const override { return 64; }
  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t>) const override {
    for (int row = 0; row < task.rows; ++row) {
      const int token = int(task.q[row * kHeadDim]);
      const uint64_t position = reads_->position + token, page_tokens = reads_->page_tokens;
      const uint64_t own = position / page_tokens;
      uint64_t visible = 0;
      for (const uint8_t* const data : task.pages) {
        const uint64_t page = size_t(data - bytes_) / kPageStride;
        KV_CHECK(page <= own);
        visible += page == own ? position % page_tokens + 1 : page_tokens;
        Form& form = reads_->At(token, uint32_t(page));
        KV_CHECK(form == kUnread);
        form = form_;
      }
      KV_CHECK(visible == (task.visible == nullptr ? task.pages.size() * page_tokens : uint64_t(task.visible[row])));
      state.max[row] = 0;
      state.sum[row] = 1;
    }
  }

 private:
  alignas(64) uint8_t bytes_[kPagesMax * kPageStride] = {};
  const Form form_;
  Reads* const reads_;
};

class RecordingCodec final : public Codec {
 public:
  explicit RecordingCodec(Reads* reads) : attention_(kEncoded, reads) {
    info_.name = "recording";
    info_.encoded_bytes = kPageStride;
  }
  void Begin(const PageLayout& layout, uint64_t sink_tokens) {
    layout_ = layout;
    info_.sink_tokens = sink_tokens;
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem>, absl::Span<uint8_t>) const override {}
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const Recorder& attention() const override { return attention_; }

 private:
  CodecInfo info_;
  PageLayout layout_;
  Recorder attention_;
};

/// The first byte has the lag, the page's tokens, the sinks and whether the codec is the identity, the second how many
/// pages a prefix hit gave. Then pairs: what is done to the sequence, and how much of it. Bytes also say which forms
/// pages have.
class ReadingTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    return {
        std::string("\x02\x00\x00\xff\x03\x00\x00\x40\x03\x10", 10),                  // appends and a decode step
        std::string("\x06\x03\x0c\xff\x0c\xff\x0d\xff\x03\x9f\x07\x50", 12),          // pages of 64, a hit, prefill
        std::string("\x0d\x00\x0c\xc8\x0c\xc8\x02\x80\x03\x05\x00\x09\x03\x02", 14),  // sinks, a crop
        std::string("\x21\x02\x0c\x80\x03\x20\x07\x00", 8),                           // the identity
        std::string("\x00\x05\x00\x0f\x03\x00\x00\x0f\x03\x00\x0b\x1f", 12),  // no lag, pages that just become full
    };
  }

  void Run(absl::Span<const uint8_t> input) override {
    size_t at = 0;
    const auto next = [&]() -> uint32_t { return at < input.size() ? input[at++] : 0; };
    const uint32_t head = next();
    rule_ = {head & 4 ? int(device::kPrefillPageTokens) : 16, int(head & 3)};
    identity_ = (head & 32) != 0;
    layout_.kv_heads = 1;
    layout_.head_dim = kHeadDim;
    layout_.page_tokens = rule_.page_tokens;
    codec_.Begin(layout_, uint64_t{head >> 3 & 3} * rule_.page_tokens);
    aged_ = next() % 8;
    tokens_ = uint64_t{aged_} * rule_.page_tokens;
    for (int step = 0; step < kStepsMax && at < input.size(); ++step) {
      const uint32_t what = next(), amount = next();
      switch (what % 4) {
        case 0:
        case 1:
          Append(uint64_t{amount + 1} * (1 + (what >> 2 & 3)));
          break;
        case 2:
          Crop(tokens_ * amount / 256);
          break;
        case 3:
          if (tokens_ == 0) break;
          const int count = int(std::min<uint64_t>({amount + 1, tokens_, kQueryTokensMax}));
          const uint64_t behind = std::min<uint64_t>(what >> 2, tokens_ - count);
          Query(tokens_ - count - behind, count, input.subspan(step));
      }
    }
  }

 private:
  struct Page {
    bool raw, encoded;
  };

  void Append(uint64_t count) {
    aged_ = std::max(aged_, rule_.AgedPages(tokens_));
    tokens_ = std::min(tokens_ + count, uint64_t{kPagesMax} * rule_.page_tokens);
  }
  void Crop(uint64_t to) {
    const uint32_t aged = tokens_ == 0 ? 0 : std::max(aged_, rule_.AgedPages(tokens_ - 1));
    if (to < uint64_t{aged} * rule_.page_tokens) to -= to % rule_.page_tokens;  // else it is refused
    aged_ = std::min(aged, uint32_t(to / rule_.page_tokens));
    tokens_ = to;
  }

  void Query(uint64_t position, int count, absl::Span<const uint8_t> forms) {
    const uint32_t first_own = rule_.PageOf(position), last_own = rule_.PageOf(position + count - 1);
    // A query's own page has its raw form, unless it is full and its last token alone asks.
    const bool at_end = position % rule_.page_tokens == uint64_t(rule_.page_tokens - 1);
    const uint32_t sinks = rule_.SinkPages(codec_.info().sink_tokens);
    pages_.clear();
    for (uint32_t page = 0; page <= last_own; ++page) {
      KV_CHECK(codec_.info().keeps_raw(0, uint64_t{page} * rule_.page_tokens) == (page < sinks));
      const uint8_t form = forms[page % forms.size()] ^ uint8_t(page);
      const bool full = uint64_t{page + 1} * rule_.page_tokens <= tokens_;
      const bool encoded = !identity_ && page >= sinks && full && form % 4 != 0;
      const bool own = page > first_own || (page == first_own && !at_end);
      pages_.push_back({!encoded || own || (form & 4) != 0, encoded});
    }
    Expect(position, count);
    PlanOnCpu(position, count);
    PlanOnGpu(position, count);
  }

  void Expect(uint64_t position, int count) {
    expected_.position = position;
    expected_.page_tokens = rule_.page_tokens;
    expected_.pages = uint32_t(pages_.size());
    expected_.forms.assign(size_t(count) * pages_.size(), kUnread);
    pairs_ = {};
    for (int token = 0; token < count; ++token) {
      const uint32_t own = rule_.PageOf(position + token), lag = uint32_t(rule_.lag_pages);
      const uint32_t first_raw = ReadingRule::FirstRawPage(own, aged_, lag);
      for (uint32_t page = 0; page <= own; ++page) {
        const Page& of = pages_[page];
        const bool raw = ReadingRule::ReadsRaw(of.raw, of.encoded, page >= aged_, own - page, lag);
        if (of.raw && of.encoded) KV_CHECK(raw == (page >= first_raw));
        expected_.At(token, page) = raw ? kRaw : kEncoded;
        const uint64_t seen = page == own ? (position + token) % rule_.page_tokens + 1 : rule_.page_tokens;
        (raw ? pairs_.raw_pairs : pairs_.encoded_pairs) += seen;
      }
    }
  }

  void PlanOnCpu(uint64_t position, int count) {
    read_ = expected_;
    std::fill(read_.forms.begin(), read_.forms.end(), kUnread);
    std::vector<AttentionPage> pages(pages_.size());
    for (uint32_t page = 0; page < pages.size(); ++page) {
      if (pages_[page].raw) pages[page].raw = raw_.Page(page);
      if (pages_[page].encoded) pages[page].encoded = codec_.attention().Page(page);
      pages[page].lag_applies = page >= aged_;
    }
    std::vector<float> q(size_t(count) * kHeadDim), out(q.size());
    for (int token = 0; token < count; ++token) q[size_t(token) * kHeadDim] = float(token);
    const AttentionSequence sequence{pages, position, count, q.data(), out.data(), nullptr};
    AttentionBatch batch;
    batch.codec = &codec_;
    batch.raw_attention = &raw_;
    batch.layout = layout_;
    batch.query_heads = 1;
    batch.lag_pages = rule_.lag_pages;
    batch.sequences = absl::MakeConstSpan(&sequence, 1);
    const std::unique_ptr<AttentionPlan> plan = AttentionPlan::Make(batch, /*threads=*/1 + count % 3);
    KV_CHECK(plan->counts().raw_pairs == pairs_.raw_pairs && plan->counts().encoded_pairs == pairs_.encoded_pairs);
    plan->RunHere();
    KV_CHECK(read_.forms == expected_.forms);
  }

  void PlanOnGpu(uint64_t position, int count) {
    StepTables::Options options;
    options.layers = 1;
    options.identity = identity_;
    options.lag_pages = rule_.lag_pages;
    options.page_tokens = uint32_t(rule_.page_tokens);
    options.pages_max = 2 * kPagesMax;
    options.sequences_max = 1;
    StepTables tables = StepTables::Make(options).value();
    const uint32_t place = tables.AddSequence(0).value();
    std::vector<DevicePage> slots(pages_.size());
    for (uint32_t page = 0; page < slots.size(); ++page) {
      if (pages_[page].raw) slots[page].raw = 2 * page;
      if (pages_[page].encoded) slots[page].encoded = 2 * page + 1;
    }
    KV_CHECK(tables.SetPages(place, 0, 0, slots).ok());
    DeviceStepEntry entry;
    entry.place = place;
    entry.position = position;
    entry.tokens = count;
    entry.aged = aged_;
    const auto entries = absl::MakeConstSpan(&entry, 1);
    StepReading reading;
    KV_CHECK(tables.Read(0, entries, /*append=*/false, /*attend=*/true, &reading).ok());
    std::vector<DeviceSequence> steps, prefills;
    const bool may_prefill = rule_.page_tokens == int(device::kPrefillPageTokens);
    tables.MakeSequences(entries, reading, &steps, may_prefill ? PrefillPlanner::kTokensMin : INT_MAX, &prefills);
    KV_CHECK(steps.empty() != prefills.empty());
    for (const std::vector<DeviceSequence>* const sequences : {&steps, &prefills}) {
      for (const DeviceSequence& sequence : *sequences) CompareForms(sequence);
    }
    if (steps.empty()) {
      PlanPrefill(prefills);
    } else {
      PlanSteps(steps);
    }
  }
  void CompareForms(const DeviceSequence& sequence) {
    for (int token = 0; token < sequence.tokens; ++token) {
      const uint64_t position = sequence.first_position + token;
      const uint32_t own = rule_.PageOf(position);
      DevicePlanner::SplitByForm(sequence, own, uint32_t(rule_.lag_pages), identity_, &forms_);
      uint32_t page = 0;
      for (const DevicePlanner::FormRun& run : forms_) {
        KV_CHECK(run.pages.first == page && run.pages.end > page);
        for (; page < run.pages.end; ++page) {
          const Form form = run.form == device::PageForm::kRaw ? kRaw : kEncoded;
          KV_CHECK(form == expected_.At(int(position - expected_.position), page));
        }
      }
      KV_CHECK(page == own + 1);
    }
  }
  void PlanSteps(const std::vector<DeviceSequence>& sequences) {
    DevicePlanner::Options options;
    options.layout = layout_;
    options.query_heads = 1;
    options.lag_pages = rule_.lag_pages;
    options.identity = identity_;
    options.blocks = 4;
    options.warps = 8;
    options.encoded_cost = 100;
    const auto size = DevicePlanner(options).Plan(sequences, absl::MakeSpan(items_));
    KV_CHECK(size.ok() && size->raw_pairs == pairs_.raw_pairs && size->encoded_pairs == pairs_.encoded_pairs);
  }
  void PlanPrefill(const std::vector<DeviceSequence>& sequences) {
    PrefillPlanner::Options options;
    options.layout = layout_;
    options.query_heads = 1;
    options.lag_pages = rule_.lag_pages;
    options.identity = identity_;
    options.blocks = 4;
    const auto size =
        PrefillPlanner(options).Plan(sequences, absl::MakeSpan(prefill_items_), absl::MakeSpan(prefill_runs_));
    KV_CHECK(size.ok() && size->raw_pairs == pairs_.raw_pairs && size->encoded_pairs == pairs_.encoded_pairs);
  }

  // The sequence, as the store keeps it.
  ReadingRule rule_;
  PageLayout layout_;
  bool identity_ = false;
  uint32_t aged_ = 0;
  uint64_t tokens_ = 0;
  // A query.
  std::vector<Page> pages_;  // up to its last token's
  Reads expected_, read_;
  AttentionCounts pairs_;  // expected

  RecordingCodec codec_{&read_};
  Recorder raw_{kRaw, &read_};
  std::vector<DevicePlanner::FormRun> forms_;
  std::vector<device::AttendItem> items_{4096};
  std::vector<device::PrefillItem> prefill_items_{4096};
  std::vector<device::PrefillRun> prefill_runs_{4096};
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeReadingTarget() { return std::make_unique<ReadingTarget>(); }

}  // namespace kvmanager::fuzz
