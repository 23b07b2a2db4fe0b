// What a WorkingClient does that an engine would not, or seldom: dropped calls and connections, mistakes, hoards.
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/working_client.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::Client;
using client::ReadResult;
using client::StepEntry;
using client::StepResult;
using client::TensorView;

constexpr size_t kRowBytes = KnownRows::kRowBytes, kQueryValues = KnownRows::kQueryValues;
constexpr int kLayers = KnownRows::kLayers, kTokens = KnownRows::kTokens;
constexpr size_t kHoardMax = 12;

}  // namespace

void WorkingClient::Cancel() {
  Held* const held = Any();
  if (held == nullptr) return;
  std::vector<uint8_t> k(held->tokens * kRowBytes), v(k.size());
  const StepEntry entry{held->sequence->id(), 0, static_cast<int>(held->tokens)};
  for (uint64_t i = 1 + Draw(6); i > 0; --i) {
    auto read = CacheOf(*held).ReadAsync({.layer = static_cast<int>(Draw(kLayers)),
                                          .entries = {&entry, 1},
                                          .k = TensorView::Inline(k.data(), k.size()),
                                          .v = TensorView::Inline(v.data(), v.size())});
    Count([](WorkCounts& counts) { ++counts.calls; });
    for (uint64_t turns = Draw(4); turns > 0 && !read.ready(); --turns) usleep(100);
  }
  const uint64_t queries = 1 + Draw(held->tokens);
  const StepEntry newest{held->sequence->id(), held->tokens - queries, static_cast<int>(queries)};
  std::vector<float> out(queries * kQueryValues);
  auto attended = CacheOf(*held).StepAsync(
      {.layer = 0,
       .entries = {&newest, 1},
       .q = TensorView::Inline(known_.Of(held->seed).q[0].data() + newest.position * kQueryValues,
                               out.size() * sizeof(float)),
       .out = TensorView::Inline(out.data(), out.size() * sizeof(float))});
  for (uint64_t turns = Draw(4); turns > 0 && !attended.ready(); --turns) usleep(100);
  Count([](WorkCounts& counts) {
    ++counts.calls;
    ++counts.by_call["cancel"][absl::StatusCode::kOk];
  });
  if (there_.empty() || Draw(3) > 0) return;
  auto sent = held->sequence->HandOffAsync(there_[Draw(there_.size())].at->peer, "dropped",
                                           client::HandOffOptions{.timeout_ms = options_.hand_off_ms});
  for (uint64_t turns = Draw(16); turns > 0 && !sent.ready(); --turns) usleep(200);
}

void WorkingClient::Hoard() {
  const KnownRows::Rows& rows = known_.Of(1);
  std::vector<Held> hoard;
  while (hoard.size() < kHoardMax) {
    Held held{0, 1, 0, nullptr};
    auto made = Timed("hoard", [&] { return CacheOf(held).CreateSequence(); });
    if (!made.ok()) return;
    held.sequence = std::move(made->sequence);
    const StepEntry entry{held.sequence->id(), 0, kTokens};
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto done = Timed("hoard", [&] {
        return CacheOf(held).Step({.layer = layer,
                                   .entries = {&entry, 1},
                                   .k = TensorView::Inline(rows.k[layer].data(), rows.k[layer].size()),
                                   .v = TensorView::Inline(rows.v[layer].data(), rows.v[layer].size())});
      });
      if (!done.ok()) return;
    }
    held.tokens = kTokens;
    hoard.push_back(std::move(held));
  }
}

template <typename Call>
void WorkingClient::MustRefuse(const char* what, Call call) {
  const int64_t begun = options_.now_ms();
  const absl::Status status = StatusOf(call());
  // Of what the others may be refused for there is no need to be sure that it was for the mistake.
  const bool right = status.code() == absl::StatusCode::kInvalidArgument ||
                     status.code() == absl::StatusCode::kOutOfRange ||
                     status.code() == absl::StatusCode::kPermissionDenied;
  Note("mistake", options_.here.client.deadline_ms, options_.now_ms() - begun,
       right ? absl::NotFoundError("as it must be") : status);
  if (status.ok()) Wrong(absl::StrCat("a mistake was not refused: ", what));
}

void WorkingClient::Mistake() {
  Held* const held = Any();
  const uint64_t which = Draw(12);
  if (which == 0) {
    client::CacheOptions options = options_.caches[0].options;
    options.codec = Draw(2) == 0 ? "hack:k_bits=99" : "no such codec";
    return MustRefuse("a codec", [&] { return here_.client->OpenCache(options); });
  }
  if (which == 1) {
    client::CacheOptions options = options_.caches[0].options;
    options.tenant = Draw(2) == 0 ? "cert:somebody/else" : "uid:12345/default";
    return MustRefuse("a forged tenant", [&] { return here_.client->OpenCache(options); });
  }
  if (which == 2) {
    client::CacheOptions options = options_.caches[0].options;
    (Draw(2) == 0 ? options.layers : options.head_dim) = static_cast<int>(Draw(2)) * -1;
    return MustRefuse("a shape", [&] { return here_.client->OpenCache(options); });
  }
  if (which == 3) {
    return MustRefuse("a ticket", [&] { return here_.caches[0]->Claim(absl::StrCat("no ticket ", Draw(1000))); });
  }
  if (held == nullptr) return;
  Cache& cache = CacheOf(*held);
  const uint64_t tokens = held->tokens;
  std::vector<uint8_t> rows(2 * kRowBytes, 0);
  const auto step = [&](const StepEntry& entry, int layer, size_t bytes) {
    const TensorView view = TensorView::Inline(rows.data(), bytes);
    return cache.Step({.layer = layer, .entries = {&entry, 1}, .k = view, .v = view});
  };
  switch (which) {
    case 4:
      rows[1 + 2 * Draw(64)] = 0x7f;  // NaN or infinity
      return MustRefuse("NaN", [&] { return step({held->sequence->id(), tokens, 1}, 0, kRowBytes); });
    case 5:
      return MustRefuse("a gap", [&] { return step({held->sequence->id(), tokens + 1, 1}, 0, kRowBytes); });
    case 6:
      return MustRefuse("no such sequence", [&] {
        return step({held->sequence->id() + 1000003 + Draw(1000), tokens, 1}, 0, kRowBytes);
      });
    case 7:
      return MustRefuse("a layer", [&] { return step({held->sequence->id(), tokens, 1}, kLayers + 7, kRowBytes); });
    case 8:
      return MustRefuse("a size", [&] { return step({held->sequence->id(), tokens, 1}, 0, kRowBytes + 2); });
    case 9:
      return MustRefuse("a crop", [&] { return held->sequence->Crop(tokens + 1); });
    case 10: {
      const std::vector<BlockName> names = Names(cache, known_.SourceOf(held->seed), static_cast<int>(tokens / 64) + 1);
      return MustRefuse("names of blocks that are not full", [&] { return held->sequence->Publish(names); });
    }
    default: {
      const StepEntry entry{held->sequence->id(), tokens, 1};
      const TensorView view = TensorView::Inline(rows.data(), kRowBytes);
      return MustRefuse("a read behind its end", [&] {
        return cache.Read({.layer = 0, .entries = {&entry, 1}, .k = view, .v = view});
      });
    }
  }
}

void WorkingClient::List() {
  if (Held* const held = Any(); held != nullptr) (void)Timed("info", [&] { return held->sequence->Info(); });
  (void)Timed("refresh", [&] { return here_.caches[Draw(here_.caches.size())]->Refresh(); });
  (void)Timed("ping", [&] { return here_.client->Ping(); });
  (void)Timed("outputFactors", [&] { return here_.caches[Draw(here_.caches.size())]->OutputFactors(0); });
  if (!options_.administers) return;
  switch (Draw(8)) {
    case 0:
      return void(Timed("status", [&] { return here_.client->Status(); }));
    case 1:
      return void(Timed("caches", [&] { return here_.client->Caches(); }));
    case 2:
      return void(Timed("sequences", [&] { return here_.client->Sequences(); }));
    case 3:
      return void(Timed("peers", [&] { return here_.client->Peers(); }));
    case 4:
      return void(Timed("metrics", [&] { return here_.client->MetricsText(); }));
    case 5:
      return void(Timed("recompute", [&] { return here_.client->Recompute(); }));
    case 6:
      return void(Timed("purge", [&] { return here_.client->Purge(here_.caches[0]->description().id); }));
    default:
      (void)Timed("drain", [&] { return here_.client->Drain(true); });
      (void)Timed("drain", [&] { return here_.client->Drain(false); });
  }
}

void WorkingClient::Leave(bool cut) {
  std::deque<std::vector<uint8_t>> rows;  // calls keep where they are
  std::deque<std::vector<float>> outs;
  std::vector<client::Pending<absl::StatusOr<ReadResult>>> reads;
  std::vector<client::Pending<absl::StatusOr<StepResult>>> steps;
  for (const Held& held : held_) {
    const StepEntry entry{held.sequence->id(), 0, static_cast<int>(held.tokens)};
    auto& k = rows.emplace_back(held.tokens * kRowBytes);
    auto& v = rows.emplace_back(held.tokens * kRowBytes);
    reads.push_back(CacheOf(held).ReadAsync({.layer = 0,
                                             .entries = {&entry, 1},
                                             .k = TensorView::Inline(k.data(), k.size()),
                                             .v = TensorView::Inline(v.data(), v.size())}));
    auto& out = outs.emplace_back(held.tokens * kQueryValues);
    steps.push_back(
        CacheOf(held).StepAsync({.layer = 1,
                                 .entries = {&entry, 1},
                                 .q = TensorView::Inline(known_.Of(held.seed).q[1].data(), out.size() * sizeof(float)),
                                 .out = TensorView::Inline(out.data(), out.size() * sizeof(float))}));
  }
  Count([&](WorkCounts& counts) {
    counts.calls += 2 * held_.size();
    ++counts.by_call[cut ? "cut" : "leave"][absl::StatusCode::kOk];
  });
  for (uint64_t turns = Draw(8); turns > 0 && !steps.empty() && !steps.back().ready(); --turns) usleep(200);
  if (cut && options_.cut != nullptr) options_.cut();
  if (cut) (void)here_.client->Ping();
  // Any order: what is left keeps the connection.
  if (Draw(2) == 0) std::shuffle(held_.begin(), held_.end(), random_);
  if (Draw(2) == 0) reads.clear();
  Drop(here_);
  here_.client.reset();
}

}  // namespace kvmanager::testing
