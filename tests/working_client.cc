#include "tests/working_client.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::Client;
using client::StepEntry;
using client::TensorView;

constexpr int kTokens = KnownRows::kTokens, kBlocks = KnownRows::kBlocks, kLayers = KnownRows::kLayers;
constexpr size_t kRowBytes = KnownRows::kRowBytes, kQueryValues = KnownRows::kQueryValues;
constexpr size_t kHeldMax = 6;
constexpr size_t kBlobBytesMax = 64 << 10;

TensorView RowsView(const std::vector<uint8_t>& of, uint64_t first, uint64_t tokens) {
  return TensorView::Inline(of.data() + first * kRowBytes, tokens * kRowBytes);
}
TensorView Floats(const float* data, size_t count) { return TensorView::Inline(data, count * sizeof(float)); }

}  // namespace

void WorkCounts::Add(const WorkCounts& other) {
  calls += other.calls;
  checked_bytes += other.checked_bytes;
  hits += other.hits;
  handed_off += other.handed_off;
  refused += other.refused;
  unavailable += other.unavailable;
  late += other.late;
  wrong += other.wrong;
  unexpected += other.unexpected;
  over_share += other.over_share;
  passed_back += other.passed_back;
  for (const auto& [call, codes] : other.by_call) {
    for (const auto& [code, count] : codes) by_call[call][code] += count;
  }
  first_said.insert(other.first_said.begin(), other.first_said.end());
}

WorkingClient::WorkingClient(KnownRows& known, WorkingClientOptions options)
    : known_(known), options_(std::move(options)), random_(options_.seed), there_(options_.there.size()) {
  here_.at = &options_.here;
  for (size_t i = 0; i < there_.size(); ++i) there_[i].at = &options_.there[i];
}

void WorkingClient::Turn() {
  if (!Ready(here_)) return;
  Do(options_.works[Draw(options_.works.size())]);
  if (held_.size() > kHeldMax) held_.erase(held_.begin() + static_cast<int64_t>(Draw(held_.size())));
}

void WorkingClient::Do(Work work) {
  switch (work) {
    case Work::kCreate:
      return Create();
    case Work::kAppend:
      return Append();
    case Work::kStep:
      return Step();
    case Work::kAttend:
      return Attend();
    case Work::kRead:
      return Read();
    case Work::kMatch:
      return Match();
    case Work::kPublish:
      return Publish();
    case Work::kFork:
      return Fork();
    case Work::kCrop:
      return Crop();
    case Work::kHandOff:
      return HandOff(false);
    case Work::kHandOffAsGrows:
      return HandOff(true);
    case Work::kArena:
      return UseArena();
    case Work::kCancel:
      return Cancel();
    case Work::kHoard:
      return Hoard();
    case Work::kMistake:
      return Mistake();
    case Work::kList:
      return List();
    case Work::kLeave:
      return Leave(false);
    case Work::kCut:
      return Leave(true);
  }
}

void WorkingClient::Rest() {
  Drop(here_);
  here_.client.reset();
  for (Side& side : there_) {
    Drop(side);
    side.client.reset();
  }
}

WorkCounts WorkingClient::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

WorkCounts WorkingClient::TakeCounts() {
  const MutexLock lock(mutex_);
  return std::exchange(counts_, {});
}

void WorkingClient::Count(const std::function<void(WorkCounts&)>& add) {
  const MutexLock lock(mutex_);
  add(counts_);
}

void WorkingClient::Wrong(const std::string& text) {
  Count([](WorkCounts& counts) { ++counts.wrong; });
  options_.shout("WRONG", text);
}

void WorkingClient::Drop(Side& side) {
  if (&side == &here_) held_.clear();
  side.caches.clear();
}

void WorkingClient::Note(const char* what, int64_t deadline_ms, int64_t took_ms, const absl::Status& status) {
  const bool late = took_ms > deadline_ms + options_.grace_ms;
  const absl::StatusCode code = status.code();
  const bool refused = code == absl::StatusCode::kResourceExhausted;
  const bool unavailable = code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kDeadlineExceeded ||
                           code == absl::StatusCode::kFailedPrecondition ||  // a handle of an earlier boot
                           code == absl::StatusCode::kNotFound ||  // a ticket that expired, or of a killed daemon
                           code == absl::StatusCode::kCancelled;
  const bool unexpected = !status.ok() && !refused && !unavailable;
  Count([&](WorkCounts& counts) {
    ++counts.calls;
    if (counts.by_call[what][code]++ == 0 && !status.ok()) {
      counts.first_said.emplace(std::make_pair(what, code), absl::StrCat(status.message()));
    }
    counts.refused += refused;
    counts.unavailable += unavailable;
    counts.unexpected += unexpected;
    counts.late += late;
    counts.over_share += refused && absl::StrContains(status.message(), "share is at most");
  });
  if (late) options_.shout("LATE", absl::StrCat(what, ": ", took_ms, " ms, its deadline ", deadline_ms));
  if (unexpected) options_.shout("UNEXPECTED", absl::StrCat(what, ": ", status.ToString()));
}

bool WorkingClient::Ready(Side& side) {
  if (side.client != nullptr && side.client->connected() && !side.caches.empty()) return true;
  Drop(side);
  side.client.reset();
  auto client =
      Timed("connect", side.at->client.connect_ms, [&] { return Client::Connect(side.at->address, side.at->client); });
  if (!client.ok()) return false;
  side.client = *std::move(client);
  for (const WorkingClientOptions::OfCache& kind : options_.caches) {
    auto cache = Timed("openCache", [&] { return side.client->OpenCache(kind.options); });
    if (!cache.ok()) {
      Drop(side);
      return false;
    }
    side.caches.push_back(*std::move(cache));
  }
  return true;
}

bool WorkingClient::AppendRows(Cache& cache, Held& held, uint64_t tokens) {
  const KnownRows::Rows& rows = known_.Of(held.seed);
  const StepEntry entry{held.sequence->id(), held.tokens, static_cast<int>(tokens)};
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto done = Timed("append", [&] {
      return cache.Step({.layer = layer,
                         .entries = {&entry, 1},
                         .k = RowsView(rows.k[layer], held.tokens, tokens),
                         .v = RowsView(rows.v[layer], held.tokens, tokens)});
    });
    if (!done.ok()) return false;
  }
  held.tokens += tokens;
  return true;
}

bool WorkingClient::Check(Cache& cache, const Held& held, uint64_t first, uint64_t tokens, const char* when,
                          client::Arena* arena) {
  if (tokens == 0) return true;
  std::vector<uint8_t> k(tokens * kRowBytes), v(tokens * kRowBytes);
  const StepEntry entry{held.sequence->id(), first, static_cast<int>(tokens)};
  for (int layer = 0; layer < kLayers; ++layer) {
    const TensorView to_k = arena == nullptr ? TensorView::Inline(k.data(), k.size()) : arena->View(0, k.size());
    const TensorView to_v =
        arena == nullptr ? TensorView::Inline(v.data(), v.size()) : arena->View(512 << 10, v.size());
    const auto read = Timed("read", [&] {
      return cache.Read({.layer = layer, .entries = {&entry, 1}, .k = to_k, .v = to_v});
    });
    if (!read.ok()) return false;
    const std::string differs =
        known_.Differs(held.seed, KindOf(held).form, layer, first, tokens, static_cast<const uint8_t*>(to_k.data),
                       static_cast<const uint8_t*>(to_v.data));
    if (!differs.empty()) Wrong(absl::StrCat(when, ": codec ", KindOf(held).options.codec, differs));
    if (KindOf(held).form != KnownRows::Form::kUnknown) {
      Count([&](WorkCounts& counts) { counts.checked_bytes += k.size() + v.size(); });
    }
  }
  return true;
}

void WorkingClient::Create() {
  Held held;
  held.cache = Draw(options_.caches.size());
  held.seed = 1 + Draw(KnownRows::kSeeds);
  Cache& cache = CacheOf(held);
  const std::vector<BlockName> names = Names(cache, known_.SourceOf(held.seed), kBlocks);
  auto made = Timed("createSequence", [&] { return cache.CreateSequence(names); });
  if (!made.ok()) return;
  held.sequence = std::move(made->sequence);
  held.tokens = uint64_t(made->match.hit_blocks) * 64;
  Count([&](WorkCounts& counts) { counts.hits += made->match.hit_blocks; });
  if (!Check(cache, held, 0, held.tokens, "a prefix hit")) return;
  if (held.tokens < kTokens && !AppendRows(cache, held, 1 + Draw(kTokens - held.tokens))) return;
  const size_t full = held.tokens / 64;
  if (full > 0 && Draw(3) > 0) {
    const auto published =
        Timed("publish", [&] { return held.sequence->Publish(absl::MakeConstSpan(names).subspan(0, full)); });
    if (!published.ok()) return;
  }
  held_.push_back(std::move(held));
}

WorkingClient::Held* WorkingClient::Any() { return held_.empty() ? nullptr : &held_[Draw(held_.size())]; }

void WorkingClient::Append() {
  Held* const held = Any();
  if (held == nullptr || held->tokens == kTokens) return;
  // Behind an error the layers may differ.
  if (!AppendRows(CacheOf(*held), *held, 1 + Draw(std::min<uint64_t>(80, kTokens - held->tokens)))) Forget(held);
}

void WorkingClient::Step() {
  Held* const held = Any();
  if (held == nullptr || held->tokens == kTokens) return;
  const KnownRows::Rows& rows = known_.Of(held->seed);
  const uint64_t first = held->tokens;
  const uint64_t tokens = Draw(3) > 0 ? 1 : 1 + Draw(std::min<uint64_t>(8, kTokens - first));
  std::vector<float> out(tokens * kQueryValues);
  const StepEntry entry{held->sequence->id(), first, static_cast<int>(tokens)};
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto done = Timed("step", [&] {
      return CacheOf(*held).Step({.layer = layer,
                                  .entries = {&entry, 1},
                                  .k = RowsView(rows.k[layer], first, tokens),
                                  .v = RowsView(rows.v[layer], first, tokens),
                                  .q = Floats(rows.q[layer].data() + first * kQueryValues, out.size()),
                                  .out = Floats(out.data(), out.size())});
    });
    if (!done.ok()) return Forget(held);
    for (uint64_t token = 0; token < tokens && KindOf(*held).raw; ++token) {
      if (!known_.SameOutput(held->seed, layer, first + token, {out.data() + token * kQueryValues, kQueryValues})) {
        Wrong(absl::StrCat("a step: seed ", held->seed, " layer ", layer, " token ", first + token));
      }
    }
  }
  held->tokens += tokens;
}

void WorkingClient::Attend() {
  Held* const held = Any();
  if (held == nullptr) return;
  const KnownRows::Rows& rows = known_.Of(held->seed);
  const uint64_t tokens = 1 + Draw(std::min<uint64_t>(64, held->tokens)), first = held->tokens - tokens;
  std::vector<float> out(tokens * kQueryValues);
  const StepEntry entry{held->sequence->id(), first, static_cast<int>(tokens)};
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto done = Timed("attend", [&] {
      return CacheOf(*held).Step({.layer = layer,
                                  .entries = {&entry, 1},
                                  .q = Floats(rows.q[layer].data() + first * kQueryValues, out.size()),
                                  .out = Floats(out.data(), out.size())});
    });
    if (!done.ok() || !KindOf(*held).raw) return;
    for (uint64_t token = 0; token < tokens; ++token) {
      if (!known_.SameOutput(held->seed, layer, first + token, {out.data() + token * kQueryValues, kQueryValues})) {
        Wrong(absl::StrCat("attention: seed ", held->seed, " layer ", layer, " token ", first + token));
      }
    }
  }
}

void WorkingClient::Read() {
  Held* const held = Any();
  if (held == nullptr) return;
  const uint64_t first = Draw(held->tokens);
  (void)Check(CacheOf(*held), *held, first, 1 + Draw(held->tokens - first), "what it wrote");
}

void WorkingClient::Match() {
  const size_t cache = Draw(options_.caches.size());
  std::vector<std::vector<BlockName>> names;
  for (uint64_t i = 1 + Draw(4); i > 0; --i) {
    names.push_back(Names(*here_.caches[cache], known_.SourceOf(1 + Draw(KnownRows::kSeeds)), 1 + int(Draw(kBlocks))));
  }
  const std::vector<absl::Span<const BlockName>> prefixes(names.begin(), names.end());
  const auto found = Timed("match", [&] { return here_.caches[cache]->Match(prefixes); });
  if (!found.ok()) return;
  for (size_t i = 0; i < found->size(); ++i) {
    if ((*found)[i].hit_blocks > int(names[i].size())) Wrong("a match of more blocks than were asked for");
  }
}

void WorkingClient::Publish() {
  Held* const held = Any();
  if (held == nullptr || held->tokens < 64) return;
  const std::vector<BlockName> names =
      Names(CacheOf(*held), known_.SourceOf(held->seed), 1 + static_cast<int>(Draw(held->tokens / 64)));
  (void)Timed("publish", [&] { return held->sequence->Publish(names); });
}

void WorkingClient::Fork() {
  Held* const held = Any();
  if (held == nullptr) return;
  auto fork = Timed("fork", [&] { return held->sequence->Fork(); });
  if (!fork.ok()) return;
  Held forked{held->cache, held->seed, held->tokens, *std::move(fork)};
  if (Check(CacheOf(forked), forked, 0, forked.tokens, "a fork")) held_.push_back(std::move(forked));
}

void WorkingClient::Crop() {
  Held* const held = Any();
  if (held == nullptr || !KindOf(*held).raw || held->tokens < 2) return;
  const uint64_t tokens = 1 + Draw(held->tokens - 1);
  const absl::Status cropped = Timed("crop", [&] { return held->sequence->Crop(tokens); });
  if (!cropped.ok()) return Forget(held);
  held->tokens = tokens;
}

void WorkingClient::HandOff(bool while_it_grows) {
  Held* const held = Any();
  if (held == nullptr || there_.empty()) return;
  Side& side = there_.size() == 1 ? there_[0] : there_[Draw(there_.size())];
  const std::string& peer = side.at->peer;
  std::string blob = absl::StrCat(held->cache, " ", held->seed);
  const client::HandOffOptions options{.timeout_ms = options_.hand_off_ms};
  const int64_t deadline_ms = options.timeout_ms + 1000;
  std::string ticket;
  if (while_it_grows && held->tokens < kTokens) {
    const uint64_t more = 1 + Draw(std::min<uint64_t>(200, kTokens - held->tokens));
    auto begun = Timed("beginHandOff", deadline_ms,
                       [&] { return held->sequence->BeginHandOff(peer, held->tokens + more, options); });
    if (!begun.ok()) return;
    if (!AppendRows(CacheOf(*held), *held, more)) {
      begun->reset();
      return Forget(held);
    }
    const auto sent = Timed("finishHandOff", deadline_ms, [&] { return (*begun)->Finish(blob); });
    if (!sent.ok()) return;
    ticket = sent->ticket;
  } else {
    const auto sent = Timed("handOff", deadline_ms, [&] { return held->sequence->HandOff(peer, blob, options); });
    if (!sent.ok()) return;
    ticket = sent->ticket;
  }
  Count([](WorkCounts& counts) { ++counts.handed_off; });
  if (Draw(8) == 0 || !Ready(side)) return;  // nobody claims it
  ClaimAt(side, *held, ticket, blob);
}

void WorkingClient::ClaimAt(Side& side, const Held& held, const std::string& ticket, const std::string& blob) {
  Cache& other = *side.caches[held.cache];
  auto claimed = Timed("claim", [&] { return other.Claim(ticket); });
  if (!claimed.ok()) return;
  if (claimed->tokens != held.tokens || claimed->blob != blob) {
    Wrong(absl::StrCat("a hand-off of ", held.tokens, " tokens came with ", claimed->tokens));
  }
  Held arrived{held.cache, held.seed, claimed->tokens, std::move(claimed->sequence)};
  if (!Check(other, arrived, 0, arrived.tokens, "a hand-off") || options_.here.peer.empty()) return;
  // It grows there and comes back.
  if (arrived.tokens < kTokens &&
      !AppendRows(other, arrived, 1 + Draw(std::min<uint64_t>(80, kTokens - arrived.tokens)))) {
    return;
  }
  const std::string large(Draw(kBlobBytesMax), 'b');
  const client::HandOffOptions options{.timeout_ms = options_.hand_off_ms};
  const auto sent = Timed("handOff", options.timeout_ms + 1000,
                          [&] { return arrived.sequence->HandOff(options_.here.peer, large, options); });
  if (!sent.ok() || Draw(8) == 0) return;
  auto back = Timed("claim", [&] { return here_.caches[held.cache]->Claim(sent->ticket); });
  if (!back.ok()) return;
  Count([](WorkCounts& counts) { ++counts.passed_back; });
  if (back->tokens != arrived.tokens || back->blob != large) Wrong("another sequence or blob came back");
  arrived.sequence = std::move(back->sequence);
  if (Check(CacheOf(arrived), arrived, 0, arrived.tokens, "what came back")) held_.push_back(std::move(arrived));
}

void WorkingClient::UseArena() {
  Held* const held = Any();
  if (held == nullptr) return;
  auto arena = Timed("createArena", [&] { return here_.client->CreateArena(1 << 20); });
  if (!arena.ok()) return;
  (void)Check(CacheOf(*held), *held, 0, held->tokens, "an arena", arena->get());
}

}  // namespace kvmanager::testing
