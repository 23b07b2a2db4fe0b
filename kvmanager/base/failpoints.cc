#include "kvmanager/base/failpoints.h"

#include <array>
#include <chrono>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint64_t kOfMax = 1000000000;
constexpr std::array<const char*, kFailpoints> kNames = {
    "accept",       "read.allocate", "step.allocate", "arena.map",  "append.reserve", "encode.decline", "encode.slow",
    "peer.connect", "peer.send",     "peer.receive",  "disk.write", "disk.read",      "disk.sync",
};
static_assert(static_cast<int>(Failpoint::kDiskSync) + 1 == kFailpoints);

struct State {
  std::array<uint64_t, kFailpoints> fail = {}, of = {};  // of every `of` passes `fail` do, in the mean; of 0: off
  uint64_t seed = 1;
  std::array<std::atomic<uint64_t>, kFailpoints> passes = {};
};
State state;

// Bits of two numbers mixed (splitmix64's finalizer).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

absl::Status Wrong(absl::string_view entry) {
  return InvalidField(kFailpointsVariable, entry,
                      absl::StrCat("NAME=N/M[,NAME=N/M...][,seed=S] with 0 <= N <= M <= ", kOfMax, " and NAME one of ",
                                   absl::StrJoin(kNames, ", ")));
}

}  // namespace

absl::Status SetFailpoints(absl::string_view text) {
  std::array<uint64_t, kFailpoints> fail = {}, of = {};
  uint64_t seed = 1;
  for (const absl::string_view entry : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> named = absl::StrSplit(entry, absl::MaxSplits('=', 1));
    if (named.first == "seed") {
      if (!absl::SimpleAtoi(named.second, &seed)) return Wrong(entry);
      continue;
    }
    const std::pair<absl::string_view, absl::string_view> rate = absl::StrSplit(named.second, absl::MaxSplits('/', 1));
    size_t at = 0;
    while (at < kNames.size() && named.first != kNames[at]) ++at;
    if (at == kNames.size() || !absl::SimpleAtoi(rate.first, &fail[at]) || !absl::SimpleAtoi(rate.second, &of[at]) ||
        of[at] == 0 || of[at] > kOfMax || fail[at] > of[at]) {
      return Wrong(entry);
    }
  }
  state.fail = fail;
  state.of = of;
  state.seed = seed;
  for (std::atomic<uint64_t>& passes : state.passes) passes = 0;
  bool any = false;
  for (const uint64_t rate : of) any |= rate != 0;
  failpoints::on.store(any, std::memory_order_relaxed);
  return absl::OkStatus();
}

bool failpoints::Draw(Failpoint point) {
  const size_t at = static_cast<size_t>(point);
  if (state.of[at] == 0) return false;
  const uint64_t pass = state.passes[at].fetch_add(1, std::memory_order_relaxed);
  return Mix(Mix(state.seed * kFailpoints + at) + pass * 0x9e3779b97f4a7c15) % state.of[at] < state.fail[at];
}

void MaybeSlow(Failpoint point) {
  if (Fails(point)) std::this_thread::sleep_for(std::chrono::milliseconds(kFailpointSlowMs));
}

}  // namespace kvmanager
