#include "tests/misbehaviour/victim.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "kvmanager/base/status.h"

namespace kvmanager::testing {

using client::Client;
using client::CreatedSequence;
using client::TensorView;
using std::chrono::steady_clock;

namespace {

constexpr int kBlocks = 16;  // published

client::CacheOptions Options() {
  client::CacheOptions options = SmallCache("hack");
  options.tenant = "victim";
  return options;
}

double MsSince(steady_clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begun).count();
}

}  // namespace

double Times::At(double q) const {
  return ms.empty() ? 0 : ms[std::min(ms.size() - 1, static_cast<size_t>(q * double(ms.size())))];
}

absl::StatusOr<std::unique_ptr<Victim>> Victim::Make(const std::string& address, int64_t deadline_ms) {
  auto victim = std::make_unique<Victim>();
  KV_ASSIGN_OR_RETURN(victim->client_, Client::Connect(address, {.name = "victim", .deadline_ms = deadline_ms}));
  KV_ASSIGN_OR_RETURN(victim->cache_, victim->client_->OpenCache(Options()));
  KV_ASSIGN_OR_RETURN(victim->context_, victim->cache_->CreateSequence());
  victim->source_ = {5, Kind::kNormal, Options()};
  KV_RETURN_IF_ERROR(
      Load(*victim->cache_, victim->context_.sequence->id(), victim->source_, 0, kContext, /*chunk=*/1024));
  KV_RETURN_IF_ERROR(victim->context_.sequence->Publish(Names(*victim->cache_, victim->source_, kBlocks)).status());
  victim->k_ = victim->source_.K(0, kContext, kStepsOfFork);
  victim->v_ = victim->source_.V(0, kContext, kStepsOfFork);
  victim->q_ = victim->source_.Q(0, kContext, kStepsOfFork);
  return victim;
}

absl::StatusOr<std::vector<float>> Victim::Look() {
  return Ask(*cache_, context_.sequence->id(), source_, kContext - 1);
}

Decoded Victim::Decode(int64_t ms) {
  Decoded decoded;
  std::unique_ptr<client::Sequence> fork;
  const size_t kv = k_.size() / kStepsOfFork, q = q_.size() / kStepsOfFork;
  std::vector<float> out(q);
  const auto end = steady_clock::now() + std::chrono::milliseconds(ms);
  auto due = steady_clock::now();
  for (int step = 0; steady_clock::now() < end; ++step) {
    const int at = step % kStepsOfFork;
    if (at == 0) {
      // Not a step, but it counts as late if it is: those behind it are due.
      fork.reset();
      absl::StatusOr<std::unique_ptr<client::Sequence>> made = context_.sequence->Fork();
      if (!made.ok()) {
        decoded.failed = made.status();
        break;
      }
      fork = *std::move(made);
    }
    std::this_thread::sleep_until(due);
    const client::StepEntry entry{fork->id(), uint64_t{kContext} + at, 1};
    for (int layer = 0; layer < source_.shape.layers && decoded.failed.ok(); ++layer) {
      decoded.failed = cache_
                           ->Step({.layer = layer,
                                   .entries = {&entry, 1},
                                   .k = TensorView::Inline(k_.data() + at * kv, kv),
                                   .v = TensorView::Inline(v_.data() + at * kv, kv),
                                   .q = TensorView::Inline(q_.data() + at * q, q * sizeof(float)),
                                   .out = TensorView::Inline(out.data(), q * sizeof(float))})
                           .status();
    }
    decoded.steps.ms.push_back(MsSince(due));
    if (!decoded.failed.ok()) break;
    due += std::chrono::microseconds(kPeriodUs);
  }
  std::sort(decoded.steps.ms.begin(), decoded.steps.ms.end());
  return decoded;
}

void OwnCalls::Run(const std::string& address, int64_t deadline_ms, const std::atomic<bool>& stop) {
  const auto note = [this](steady_clock::time_point begun, const absl::Status& status) {
    times.ms.push_back(MsSince(begun));
    if (absl::IsResourceExhausted(status)) {
      ++refused;
    } else if (!status.ok() && failed.ok()) {
      failed = status;
    }
    return status.ok();
  };
  auto begun = steady_clock::now();
  auto client = Client::Connect(address, {.name = "own", .deadline_ms = deadline_ms});
  if (!note(begun, client.status())) return;
  const Source source{5, Kind::kNormal, Options()};
  while (!stop && failed.ok()) {
    begun = steady_clock::now();
    auto cache = (*client)->OpenCache(Options());
    if (!note(begun, cache.status())) continue;
    const std::vector<BlockName> names = Names(**cache, source, kBlocks);
    const absl::Span<const BlockName> prefix = names;
    begun = steady_clock::now();
    note(begun, (*cache)->Match({&prefix, 1}).status());
    begun = steady_clock::now();
    absl::StatusOr<CreatedSequence> made = (*cache)->CreateSequence(names);
    if (!note(begun, made.status())) continue;
    const uint64_t tokens = uint64_t(made->match.hit_blocks) * 64;
    begun = steady_clock::now();
    note(begun, Load(**cache, made->sequence->id(), source, tokens, 1, 1));
    begun = steady_clock::now();
    note(begun, made->sequence->Fork().status());
    begun = steady_clock::now();
    note(begun, (*client)->Ping());
    begun = steady_clock::now();
    note(begun, (*client)->Status().status());
    usleep(20000);
  }
  std::sort(times.ms.begin(), times.ms.end());
}

}  // namespace kvmanager::testing
