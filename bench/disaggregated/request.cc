#include "bench/disaggregated/request.h"

#include <future>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/engine/generation.h"
#include "kvmanager/base/status.h"

namespace kvmanager::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

constexpr int64_t kDeadlineMs = 300000;  // of a call, and of a hand-off over the slowest link
// The blob holds the next token, so the receiver goes on behind the prompt.
constexpr client::HandOffOptions kHandOff = {.timeout_ms = kDeadlineMs, .will_append = true};

double Seconds(Time from, Time to) { return std::chrono::duration<double>(to - from).count(); }

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const std::string& address) {
  return client::Client::Connect(address, {.name = "disaggregated", .deadline_ms = kDeadlineMs});
}

/// The decode engine, on a thread of its own: claims one sequence, and goes on from it.
class DecodeEngine {
 public:
  struct Outcome {
    absl::Status status;
    Time second, ended;  // the second token is known; all are
    std::vector<uint32_t> tokens;
  };

  DecodeEngine(const engine::Model* model, std::string address, engine::KvEngineOptions options, int count)
      : thread_([this, model, address = std::move(address), options = std::move(options), count] {
          outcome_.status = Run(*model, address, options, count);
        }) {}
  ~DecodeEngine() {
    if (!thread_.joinable()) return;
    if (!told_) ticket_.set_value({});
    thread_.join();
  }
  /// Once it is connected and only waits for a ticket, or has failed.
  void WaitReady() { ready_.get_future().wait(); }
  void Claim(std::string ticket) {
    told_ = true;
    ticket_.set_value(std::move(ticket));
  }
  /// REQUIRES: Claim was called. Waits for its end.
  const Outcome& Join() {
    thread_.join();
    return outcome_;
  }

 private:
  absl::Status Run(const engine::Model& model, const std::string& address, const engine::KvEngineOptions& options,
                   int count) {
    std::unique_ptr<client::Client> client;
    std::unique_ptr<engine::KvEngine> kv;
    std::unique_ptr<engine::Runner> runner;
    const absl::Status opened = [&]() -> absl::Status {
      KV_ASSIGN_OR_RETURN(client, Connect(address));
      KV_ASSIGN_OR_RETURN(kv, engine::KvEngine::Open(client.get(), model, options));
      runner = std::make_unique<engine::Runner>(&model, kv.get(), 1);
      return absl::OkStatus();
    }();
    ready_.set_value();
    const std::string ticket = ticket_.get_future().get();
    KV_RETURN_IF_ERROR(opened);
    if (ticket.empty()) return absl::CancelledError("no ticket came");
    KV_ASSIGN_OR_RETURN(const client::ClaimedSequence claimed, kv->cache().ClaimAsync(ticket, kDeadlineMs).Wait());
    KV_ASSIGN_OR_RETURN(engine::HandOffBlob blob, engine::DecodeBlob(claimed.blob, model.config().vocab_size));
    KV_RETURN_IF_ERROR(engine::Decode(
        *runner, claimed.sequence->id(), claimed.tokens, blob.first_token, count, &blob.sampling,
        [this](uint32_t) {
          if (outcome_.tokens.size() == 2) outcome_.second = Clock::now();
        },
        &outcome_.tokens));
    outcome_.ended = Clock::now();
    return absl::OkStatus();
  }

  std::promise<void> ready_;
  std::promise<std::string> ticket_;
  bool told_ = false;
  Outcome outcome_;  // the thread's until it is joined
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CodecPair>> CodecPair::Open(const engine::Model* model, const Daemons& daemons,
                                                           const engine::KvEngineOptions& options,
                                                           const RequestShape& shape) {
  std::unique_ptr<CodecPair> pair(new CodecPair(model, daemons, shape));
  engine::KvEngineOptions prefill = options;
  prefill.rows_max = shape.chunk > 0 ? shape.chunk : int(shape.prompt.size());
  pair->decode_options_ = options;
  pair->decode_options_.rows_max = 1;
  KV_ASSIGN_OR_RETURN(pair->client_, Connect(daemons.prefill));
  KV_ASSIGN_OR_RETURN(pair->prefill_, engine::KvEngine::Open(pair->client_.get(), *model, prefill));
  pair->runner_ = std::make_unique<engine::Runner>(model, pair->prefill_.get(), shape.threads);
  return pair;
}

CodecPair::~CodecPair() = default;

absl::StatusOr<uint32_t> CodecPair::Prefill() {
  std::vector<float> logits;
  KV_RETURN_IF_ERROR(engine::Prefill(
      *runner_, sequence_->id(), shape_.prompt, 0, prefill_->rows_max(), [](uint64_t) {}, &logits));
  engine::SamplingState greedy;
  return engine::Sample(logits, &greedy);
}

std::string CodecPair::Blob(uint32_t first) const { return engine::EncodeBlob({shape_.prompt.size(), first, {}}); }

absl::StatusOr<RequestTimes> CodecPair::Here() {
  sequence_ = nullptr;
  const Time begun = Clock::now();
  // Without names of blocks nothing is found, and nothing will be.
  KV_ASSIGN_OR_RETURN(client::CreatedSequence created, prefill_->CreateSequence({}, shape_.prompt.size()));
  sequence_ = std::move(created.sequence);
  KV_ASSIGN_OR_RETURN(const uint32_t first, Prefill());
  const Time known = Clock::now();
  RequestTimes times;
  engine::SamplingState greedy;
  KV_RETURN_IF_ERROR(engine::Decode(
      *runner_, sequence_->id(), shape_.prompt.size(), first, shape_.decode_tokens, &greedy, [](uint32_t) {},
      &times.tokens));
  const Time ended = Clock::now();
  times.prefill = Seconds(begun, known);
  times.decode = Seconds(known, ended);
  times.job = Seconds(begun, ended);
  sequence_ = nullptr;
  return times;
}

absl::StatusOr<RequestTimes> CodecPair::Streamed() {
  sequence_ = nullptr;
  DecodeEngine decode(model_, daemons_.decode, decode_options_, shape_.decode_tokens);
  decode.WaitReady();

  const Time begun = Clock::now();
  KV_ASSIGN_OR_RETURN(client::CreatedSequence created, prefill_->CreateSequence({}, shape_.prompt.size()));
  sequence_ = std::move(created.sequence);
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<client::HandOff> hand_off,
                      sequence_->BeginHandOff(daemons_.decode_peer, shape_.prompt.size(), kHandOff));
  decode.Claim(hand_off->ticket());
  KV_ASSIGN_OR_RETURN(first_token_, Prefill());
  const Time known = Clock::now();
  KV_ASSIGN_OR_RETURN(const client::HandOffOutcome sent, hand_off->Finish(Blob(first_token_)));
  const Time there = Clock::now();
  const DecodeEngine::Outcome& decoded = decode.Join();
  KV_RETURN_IF_ERROR(decoded.status);

  RequestTimes times;
  times.prefill = Seconds(begun, known);
  times.exposed = Seconds(known, there);
  const double step = Seconds(decoded.second, decoded.ended) / double(shape_.decode_tokens - 2);
  times.wait = Seconds(known, decoded.second) - step;
  times.decode = Seconds(decoded.second, decoded.ended) + step;
  times.job = Seconds(begun, decoded.ended);
  times.bytes = sent.bytes_sent;
  times.resent = sent.bytes_resent;
  times.tokens = decoded.tokens;
  if (sent.pages_skipped > 0) {
    return absl::InternalError(absl::StrCat(sent.pages_skipped, " pages were at the receiver before they were sent"));
  }
  return times;
}

absl::StatusOr<AloneTimes> CodecPair::Alone() {
  if (sequence_ == nullptr) return absl::FailedPreconditionError("nothing was streamed");
  DecodeEngine decode(model_, daemons_.decode, decode_options_, shape_.decode_tokens);
  decode.WaitReady();
  const Time begun = Clock::now();
  KV_ASSIGN_OR_RETURN(const client::HandOffOutcome sent,
                      sequence_->HandOff(daemons_.decode_peer, Blob(first_token_), kHandOff));
  const Time there = Clock::now();
  decode.Claim(sent.ticket);
  const DecodeEngine::Outcome& decoded = decode.Join();
  KV_RETURN_IF_ERROR(decoded.status);
  sequence_ = nullptr;
  return AloneTimes{Seconds(begun, there), sent.bytes_sent, decoded.tokens};
}

}  // namespace kvmanager::bench
