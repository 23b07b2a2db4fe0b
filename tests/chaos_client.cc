// A client under tools/chaos: works at one daemon, hands sequences to another through a proxy, and checks every byte
// that it reads against what it wrote.
//
//   chaos_client HERE THERE PEER SEED
//
// HERE, THERE: addresses of the two daemons; PEER: where the second receives hand-offs. Commands come on standard
// input, a line each, and are answered on standard output:
//
//   go      works until the next line; "going"
//   rest    gives back all that it holds; "rested {...}", counts since the last
//   purge   purges both daemons; "purged {...}", what they hold
//
// What must never be is a line of its own, at once, as this process may be killed: "WRONG ..." (bytes), "LATE ..." (a
// call that ended behind its deadline), "UNEXPECTED ..." (an error that no fault explains). It ends with its input.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::StepEntry;
using client::TensorView;

constexpr int64_t kDeadlineMs = 3000, kGraceMs = 1500;  // of every call; and for a machine with other work
constexpr int kSeeds = 12, kTokens = 640, kBlocks = kTokens / 64;
constexpr size_t kHeldMax = 6;
constexpr size_t kRowBytes = 256;        // of a token of one layer and side
constexpr size_t kQueryValues = 4 * 64;  // of a token's queries
constexpr const char* kCodecs[] = {"raw", "hack"};

/// Milliseconds that this process has run: time under SIGSTOP is no time that a call took.
class AwakeClock {
 public:
  AwakeClock() : thread_([this] { Tick(); }) { thread_.detach(); }
  int64_t ms() const { return awake_us_ / 1000; }

 private:
  void Tick() {
    auto last = std::chrono::steady_clock::now();
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto now = std::chrono::steady_clock::now();
      const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(now - last).count();
      awake_us_ += us < 400000 ? us : 5000;  // longer: it was stopped
      last = now;
    }
  }
  std::atomic<int64_t> awake_us_{0};
  std::thread thread_;
};

/// Rows of a seed's tokens, by layer: as they are written, and as a codec gives them back; queries, and what attention
/// gave them when it was first asked over raw pages.
struct Rows {
  std::vector<uint8_t> k[2], v[2], decoded_k[2], decoded_v[2];
  std::vector<float> q[2], out[2];
  std::vector<bool> known[2];
};

struct Counts {
  uint64_t calls = 0, checked_bytes = 0, hits = 0, handed_off = 0, refused = 0, unavailable = 0, late = 0, wrong = 0,
           unexpected = 0;
};

struct Side {
  std::string address;
  std::unique_ptr<Client> client;
  std::unique_ptr<Cache> caches[2];
};

struct Held {
  int codec = 0;
  uint64_t seed = 0;
  uint64_t tokens = 0;
  std::unique_ptr<client::Sequence> sequence;
};

class Worker {
 public:
  Worker(std::string here, std::string there, std::string peer, uint64_t seed) : peer_(std::move(peer)), random_(seed) {
    here_.address = std::move(here);
    there_.address = std::move(there);
  }

  void Round() {
    if (!Ready(here_)) return;
    switch (Draw(13)) {
      case 0:
      case 1:
      case 2:
        Create();
        break;
      case 3:
      case 4:
        Append();
        break;
      case 5:
        Read();
        break;
      case 6:
        Fork();
        break;
      case 7:
        Crop();
        break;
      case 8:
        HandOff(false);
        break;
      case 9:
        HandOff(true);
        break;
      case 10:
        UseArena();
        break;
      case 11:
        Attend();
        break;
      default:
        Cancel();
    }
    if (held_.size() > kHeldMax) held_.erase(held_.begin() + static_cast<int64_t>(Draw(held_.size())));
  }

  void Rest() {
    Drop(here_);
    Drop(there_);
    here_.client.reset();
    there_.client.reset();
    std::printf(
        "rested {\"calls\": %llu, \"checked_bytes\": %llu, \"hits\": %llu, \"handed_off\": %llu, \"refused\": %llu, "
        "\"unavailable\": %llu, \"late\": %llu, \"wrong\": %llu, \"unexpected\": %llu}\n",
        (unsigned long long)counts_.calls, (unsigned long long)counts_.checked_bytes, (unsigned long long)counts_.hits,
        (unsigned long long)counts_.handed_off, (unsigned long long)counts_.refused,
        (unsigned long long)counts_.unavailable, (unsigned long long)counts_.late, (unsigned long long)counts_.wrong,
        (unsigned long long)counts_.unexpected);
    counts_ = {};
  }

  void Purge() {
    std::string text;
    for (Side* const side : {&here_, &there_}) {
      uint64_t leases = UINT64_MAX, used = UINT64_MAX, waiting = UINT64_MAX;
      auto client = Client::Connect(side->address, {.name = "chaos-purge", .deadline_ms = kDeadlineMs});
      if (client.ok() && (*client)->Purge(Client::kAllCaches).ok()) {
        if (const auto status = (*client)->Status(); status.ok()) {
          leases = status->leases;
          waiting = status->waiting_hand_offs;
          used = 0;
          for (const auto& pool : status->pools) used += pool.used_bytes;
        }
      }
      absl::StrAppend(&text, text.empty() ? "" : ", ", "{\"leases\": ", leases, ", \"used_bytes\": ", used,
                      ", \"waiting_hand_offs\": ", waiting, "}");
    }
    std::printf("purged [%s]\n", text.c_str());
  }

 private:
  uint64_t Draw(uint64_t below) { return random_() % below; }

  Rows& RowsOf(uint64_t seed) {
    std::unique_ptr<Rows>& rows = rows_[seed];
    if (rows != nullptr) return *rows;
    rows = std::make_unique<Rows>();
    const CacheOptions options = SmallCache(kCodecs[1], 1);
    const Source source{seed, Kind::kNormal, options};
    ModelSequence model(options);
    LoadModel(model, source, 0, kTokens, kTokens);
    model.MarkShared(kTokens);
    for (int layer = 0; layer < 2; ++layer) {
      rows->k[layer] = source.K(layer, 0, kTokens);
      rows->v[layer] = source.V(layer, 0, kTokens);
      ModelSequence::Rows decoded = model.Read(layer, 0, kTokens);
      rows->decoded_k[layer] = std::move(decoded.k);
      rows->decoded_v[layer] = std::move(decoded.v);
      rows->q[layer] = source.Q(layer, 0, kTokens);
      rows->out[layer].resize(rows->q[layer].size());
      rows->known[layer].resize(kTokens);
    }
    return *rows;
  }

  void Shout(const char* what, const std::string& text) {
    std::printf("%s %s\n", what, text.c_str());
    std::fflush(stdout);
  }

  void Drop(Side& side) {
    if (&side == &here_) held_.clear();
    for (auto& cache : side.caches) cache.reset();
  }

  /// Runs a call: how long it took, and whether its error is one that the faults of this test explain.
  template <typename Call>
  auto Timed(const char* what, int64_t deadline_ms, Call call) {
    ++counts_.calls;
    const int64_t begun = clock_.ms();
    auto result = call();
    const int64_t took = clock_.ms() - begun;
    if (took > deadline_ms + kGraceMs) {
      ++counts_.late;
      Shout("LATE", absl::StrCat(what, ": ", took, " ms, its deadline ", deadline_ms));
    }
    Note(what, StatusOf(result));
    return result;
  }
  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }
  void Note(const char* what, const absl::Status& status) {
    switch (status.code()) {
      case absl::StatusCode::kOk:
        return;
      case absl::StatusCode::kResourceExhausted:
        ++counts_.refused;
        return;
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kDeadlineExceeded:
      case absl::StatusCode::kFailedPrecondition:  // a handle of an earlier boot
      case absl::StatusCode::kNotFound:            // a ticket that expired, or of a daemon that was killed
      case absl::StatusCode::kCancelled:
        ++counts_.unavailable;
        return;
      default:
        ++counts_.unexpected;
        Shout("UNEXPECTED", absl::StrCat(what, ": ", status.ToString()));
    }
  }

  bool Ready(Side& side) {
    if (side.client != nullptr && side.client->connected() && side.caches[0] != nullptr) return true;
    Drop(side);
    side.client.reset();
    auto client = Timed("connect", 300, [&] {
      return Client::Connect(side.address, {.name = "chaos", .deadline_ms = kDeadlineMs, .connect_ms = 300});
    });
    if (!client.ok()) return false;
    side.client = *std::move(client);
    for (int codec = 0; codec < 2; ++codec) {
      CacheOptions options = SmallCache(kCodecs[codec], 1);
      options.tenant = "chaos";
      auto cache = Timed("openCache", kDeadlineMs, [&] { return side.client->OpenCache(options); });
      if (!cache.ok()) {
        Drop(side);
        return false;
      }
      side.caches[codec] = *std::move(cache);
    }
    return true;
  }

  Source SourceOf(uint64_t seed) const { return {seed, Kind::kNormal, SmallCache(kCodecs[1], 1)}; }

  bool AppendRows(Cache& cache, Held& held, uint64_t tokens) {
    const Rows& rows = RowsOf(held.seed);
    const StepEntry entry{held.sequence->id(), held.tokens, static_cast<int>(tokens)};
    for (int layer = 0; layer < 2; ++layer) {
      const auto view = [&](const std::vector<uint8_t>& of) {
        return TensorView::Inline(of.data() + held.tokens * kRowBytes, tokens * kRowBytes);
      };
      const auto done = Timed("append", kDeadlineMs, [&] {
        return cache.Step({.layer = layer, .entries = {&entry, 1}, .k = view(rows.k[layer]), .v = view(rows.v[layer])});
      });
      if (!done.ok()) return false;
    }
    held.tokens += tokens;
    return true;
  }

  /// Reads tokens first .. first + tokens - 1 of both layers and compares. False: they could not be read.
  bool Check(Cache& cache, const Held& held, uint64_t first, uint64_t tokens, const char* when,
             client::Arena* arena = nullptr) {
    if (tokens == 0) return true;
    const Rows& rows = RowsOf(held.seed);
    std::vector<uint8_t> k(tokens * kRowBytes), v(tokens * kRowBytes);
    const StepEntry entry{held.sequence->id(), first, static_cast<int>(tokens)};
    for (int layer = 0; layer < 2; ++layer) {
      const TensorView to_k = arena == nullptr ? TensorView::Inline(k.data(), k.size()) : arena->View(0, k.size());
      const TensorView to_v =
          arena == nullptr ? TensorView::Inline(v.data(), v.size()) : arena->View(512 << 10, v.size());
      const auto read = Timed("read", kDeadlineMs, [&] {
        return cache.Read({.layer = layer, .entries = {&entry, 1}, .k = to_k, .v = to_v});
      });
      if (!read.ok()) return false;
      const auto* const got_k = static_cast<const uint8_t*>(to_k.data);
      const auto* const got_v = static_cast<const uint8_t*>(to_v.data);
      // A page is as it was written, or as its codec gives it back; both sides alike.
      for (uint64_t at = first; at < first + tokens;) {
        const uint64_t end = std::min(first + tokens, (at / 64 + 1) * 64);
        const auto same = [&](const uint8_t* got, const std::vector<uint8_t>& want) {
          return std::memcmp(got + (at - first) * kRowBytes, want.data() + at * kRowBytes, (end - at) * kRowBytes) == 0;
        };
        const bool written = same(got_k, rows.k[layer]) && same(got_v, rows.v[layer]);
        const bool decoded =
            held.codec == 1 && same(got_k, rows.decoded_k[layer]) && same(got_v, rows.decoded_v[layer]);
        if (!written && !decoded) {
          ++counts_.wrong;
          Shout("WRONG", absl::StrCat(when, ": codec ", kCodecs[held.codec], " seed ", held.seed, " layer ", layer,
                                      " tokens ", at, "..", end));
        }
        at = end;
      }
      counts_.checked_bytes += k.size() + v.size();
    }
    return true;
  }

  void Create() {
    Held held;
    held.codec = static_cast<int>(Draw(2));
    held.seed = 1 + Draw(kSeeds);
    Cache& cache = *here_.caches[held.codec];
    const std::vector<BlockName> names = Names(cache, SourceOf(held.seed), kBlocks);
    auto made = Timed("createSequence", kDeadlineMs, [&] { return cache.CreateSequence(names); });
    if (!made.ok()) return;
    held.sequence = std::move(made->sequence);
    held.tokens = uint64_t(made->match.hit_blocks) * 64;
    counts_.hits += made->match.hit_blocks;
    if (!Check(cache, held, 0, held.tokens, "a prefix hit")) return;
    if (held.tokens < kTokens && !AppendRows(cache, held, 1 + Draw(kTokens - held.tokens))) return;
    const size_t full = held.tokens / 64;
    if (full > 0 && Draw(3) > 0) {
      const auto published = Timed("publish", kDeadlineMs,
                                   [&] { return held.sequence->Publish(absl::MakeConstSpan(names).subspan(0, full)); });
      if (!published.ok()) return;
    }
    held_.push_back(std::move(held));
  }

  /// One that is held, or nullptr.
  Held* Any() { return held_.empty() ? nullptr : &held_[Draw(held_.size())]; }
  void Forget(Held* held) { held_.erase(held_.begin() + (held - held_.data())); }

  void Append() {
    Held* const held = Any();
    if (held == nullptr || held->tokens == kTokens) return;
    // Behind an error the layers may differ.
    if (!AppendRows(*here_.caches[held->codec], *held, 1 + Draw(std::min<uint64_t>(80, kTokens - held->tokens)))) {
      Forget(held);
    }
  }

  void Read() {
    Held* const held = Any();
    if (held == nullptr) return;
    const uint64_t first = Draw(held->tokens);
    (void)Check(*here_.caches[held->codec], *held, first, 1 + Draw(held->tokens - first), "what it wrote");
  }

  void Fork() {
    Held* const held = Any();
    if (held == nullptr) return;
    auto fork = Timed("fork", kDeadlineMs, [&] { return held->sequence->Fork(); });
    if (!fork.ok()) return;
    Held forked{held->codec, held->seed, held->tokens, *std::move(fork)};
    if (Check(*here_.caches[forked.codec], forked, 0, forked.tokens, "a fork")) held_.push_back(std::move(forked));
  }

  void Crop() {
    Held* const held = Any();
    if (held == nullptr || held->codec != 0 || held->tokens < 2) return;
    const uint64_t tokens = 1 + Draw(held->tokens - 1);
    const absl::Status cropped = Timed("crop", kDeadlineMs, [&] { return held->sequence->Crop(tokens); });
    if (!cropped.ok()) return Forget(held);
    held->tokens = tokens;
  }

  void HandOff(bool while_it_grows) {
    Held* const held = Any();
    if (held == nullptr) return;
    const std::string blob = absl::StrCat(held->codec, " ", held->seed);
    std::string ticket;
    const client::HandOffOptions options{.timeout_ms = 2500};
    const int64_t deadline_ms = options.timeout_ms + 1000;
    if (while_it_grows && held->tokens < kTokens) {
      const uint64_t more = 1 + Draw(std::min<uint64_t>(200, kTokens - held->tokens));
      auto begun = Timed("beginHandOff", deadline_ms,
                         [&] { return held->sequence->BeginHandOff(peer_, held->tokens + more, options); });
      if (!begun.ok()) return;
      if (!AppendRows(*here_.caches[held->codec], *held, more)) {
        begun->reset();
        return Forget(held);
      }
      const auto sent = Timed("finishHandOff", deadline_ms, [&] { return (*begun)->Finish(blob); });
      if (!sent.ok()) return;
      ticket = sent->ticket;
    } else {
      const auto sent = Timed("handOff", deadline_ms, [&] { return held->sequence->HandOff(peer_, blob, options); });
      if (!sent.ok()) return;
      ticket = sent->ticket;
    }
    ++counts_.handed_off;
    if (Draw(8) == 0 || !Ready(there_)) return;  // nobody claims it
    Cache& other = *there_.caches[held->codec];
    auto claimed = Timed("claim", kDeadlineMs, [&] { return other.Claim(ticket); });
    if (!claimed.ok()) return;
    if (claimed->tokens != held->tokens || claimed->blob != blob) {
      ++counts_.wrong;
      Shout("WRONG", absl::StrCat("a hand-off of ", held->tokens, " tokens came with ", claimed->tokens));
    }
    const Held arrived{held->codec, held->seed, claimed->tokens, std::move(claimed->sequence)};
    (void)Check(other, arrived, 0, arrived.tokens, "a hand-off");
  }

  // Up to 64 of its newest queries: more than the loop attends to itself.
  void Attend() {
    Held* const held = Any();
    if (held == nullptr) return;
    Rows& rows = RowsOf(held->seed);
    const uint64_t tokens = 1 + Draw(std::min<uint64_t>(64, held->tokens)), first = held->tokens - tokens;
    std::vector<float> out(tokens * kQueryValues);
    const StepEntry entry{held->sequence->id(), first, static_cast<int>(tokens)};
    for (int layer = 0; layer < 2; ++layer) {
      const float* const q = rows.q[layer].data() + first * kQueryValues;
      const auto done = Timed("attend", kDeadlineMs, [&] {
        return here_.caches[held->codec]->Step({.layer = layer,
                                                .entries = {&entry, 1},
                                                .q = TensorView::Inline(q, out.size() * sizeof(float)),
                                                .out = TensorView::Inline(out.data(), out.size() * sizeof(float))});
      });
      if (!done.ok() || held->codec != 0) return;
      for (uint64_t token = 0; token < tokens; ++token) {
        float* const expected = rows.out[layer].data() + (first + token) * kQueryValues;
        const float* const got = out.data() + token * kQueryValues;
        if (!rows.known[layer][first + token]) {
          rows.known[layer][first + token] = true;
          std::copy(got, got + kQueryValues, expected);
        } else if (!std::equal(got, got + kQueryValues, expected,
                               [](float a, float b) { return std::abs(a - b) <= 1e-3f * (1 + std::abs(b)); })) {
          ++counts_.wrong;
          Shout("WRONG", absl::StrCat("attention: seed ", held->seed, " layer ", layer, " token ", first + token));
        }
      }
    }
  }

  void UseArena() {
    Held* const held = Any();
    if (held == nullptr) return;
    auto arena = Timed("createArena", kDeadlineMs, [&] { return here_.client->CreateArena(1 << 20); });
    if (!arena.ok()) return;
    (void)Check(*here_.caches[held->codec], *held, 0, held->tokens, "an arena", arena->get());
  }

  void Cancel() {
    Held* const held = Any();
    if (held == nullptr) return;
    std::vector<uint8_t> k(held->tokens * kRowBytes), v(k.size());
    const StepEntry entry{held->sequence->id(), 0, static_cast<int>(held->tokens)};
    for (uint64_t i = 1 + Draw(6); i > 0; --i) {
      auto read = here_.caches[held->codec]->ReadAsync({.layer = static_cast<int>(Draw(2)),
                                                        .entries = {&entry, 1},
                                                        .k = TensorView::Inline(k.data(), k.size()),
                                                        .v = TensorView::Inline(v.data(), v.size())});
      ++counts_.calls;
      for (uint64_t turns = Draw(4); turns > 0 && !read.ready(); --turns) usleep(100);
    }
  }

  AwakeClock& clock_ = *new AwakeClock;  // its thread ends with the process
  const std::string peer_;
  std::mt19937_64 random_;
  Side here_, there_;
  std::vector<Held> held_;
  std::map<uint64_t, std::unique_ptr<Rows>> rows_;
  Counts counts_;
};

int Run(Worker& worker) {
  bool going = false;
  std::string lines;
  for (;;) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, going ? 0 : -1) > 0) {
      char bytes[256];
      const ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
      if (n <= 0) return 0;
      lines.append(bytes, static_cast<size_t>(n));
      for (size_t end; (end = lines.find('\n')) != std::string::npos; lines.erase(0, end + 1)) {
        const std::string line = lines.substr(0, end);
        going = line == "go";
        if (going) std::printf("going\n");
        if (line == "rest") worker.Rest();
        if (line == "purge") worker.Purge();
        std::fflush(stdout);
      }
    }
    if (going) worker.Round();
  }
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: chaos_client HERE THERE PEER SEED\n");
    return 2;
  }
  kvmanager::testing::Worker worker(argv[1], argv[2], argv[3], std::stoull(argv[4]));
  return kvmanager::testing::Run(worker);
}
