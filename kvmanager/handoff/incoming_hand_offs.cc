#include "kvmanager/handoff/incoming_hand_offs.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/gpu/make_device_codec.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/handoff/offer_bytes.h"
#include "kvmanager/handoff/offer_digest.h"
#include "kvmanager/handoff/parse_then.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {

// ---- offers ----

void IncomingHandOffs::Offer(std::string peer, HandOffPart part, int64_t room_ms, OfferReply reply) {
  auto offered = std::make_shared<Offered>();
  offered->peer = std::move(peer);
  offered->room_ms = std::min(room_ms, kRoomMsMax);
  offered->reply = std::move(reply);
  offered->gpu = part.gpu;
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(HostOf(offered->peer));
  const size_t bytes = part.manifest.size();
  auto parse = [part = std::move(part)] { return ParseHandOffHeader(part.manifest, part.page_bytes); };
  auto look = [this, offered = std::move(offered)](absl::StatusOr<HandOffHeader> header) mutable {
    Look(std::move(offered), std::move(header));
  };
  ParseThen(parts_, bytes, owner, std::move(parse), std::move(look));
}

void IncomingHandOffs::Look(std::shared_ptr<Offered> offered, absl::StatusOr<HandOffHeader> header) {
  absl::Status may = CheckDrain();
  if (may.ok()) may = header.status();
  if (may.ok()) may = CheckTenant(header->config.tenant);
  if (!may.ok()) return Answer(*offered, std::move(may));
  offered->header = std::make_shared<HandOffHeader>(*std::move(header));
  offered->payer = std::string(PayerName(offered->header->config.tenant));
  if (may = tickets_.CheckRoom(offered->payer); !may.ok()) return Answer(*offered, std::move(may));
  Consider(std::move(offered));
}

ReceiverLoad IncomingHandOffs::Load() const {
  const StoreMetrics& store = *parts_.store_metrics;  // whose values any thread may read
  ReceiverLoad load;
  load.capacity_bytes = static_cast<uint64_t>(store.pool_capacity_bytes.Value());
  const double free = store.pool_capacity_bytes.Value() - store.pool_used_bytes.Value() + store.evictable_bytes.Value();
  load.free_bytes = static_cast<uint64_t>(std::max(free, 0.0));
  load.waiting_offers = static_cast<uint64_t>(parts_.metrics->waiting.Value());
  return load;
}

// A codec may read a large artifact, and work on it: on the background's thread.
void IncomingHandOffs::Consider(std::shared_ptr<Offered> offered) {
  WorkerPool* const workers = MakingWorkers(parts_.codec_workers, offered->header->config.codec, parts_.background);
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
  auto make = [this, queue = parts_.queue, registry = parts_.registry, offered = std::move(offered)]() mutable {
    offered->codec = CacheDirectory::MakeCodec(*registry, offered->header->config);
    if (offered->codec.ok()) offered->bytes_at_least = BytesAtLeast(*offered->header, (*offered->codec)->info());
    queue->Post([this, offered = std::move(offered)]() mutable {
      if (!offered->codec.ok()) return Answer(*offered, offered->codec.status());
      if (offered->gpu != GpuName()) return ConsiderGpu(std::move(offered));
      absl::Status turn = waiting_.CheckTurn(offered->payer);
      turn.ok() ? Try(std::move(offered)) : EndTry(offered, std::move(turn));
    });
  };
  workers->Post(WorkerPool::Priority::kEncode, std::move(make), owner);
}

// Pages of a GPU land on one at once, or the sender sends them by way of the host, where they may wait for room. What a
// codec has on a GPU is uploaded: there, too.
void IncomingHandOffs::ConsiderGpu(std::shared_ptr<Offered> offered) {
  const std::shared_ptr<const Codec> codec = *offered->codec;
  const auto chosen = ChooseGpu(parts_.gpus, parts_.copier, *parts_.store, offered->gpu, *offered->header, *codec);
  if (!chosen.ok()) return Answer(*offered, chosen.status());
  offered->header->config.device = (*chosen)->ordinal();
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
  auto make = [this, queue = parts_.queue, gpu = *chosen, codec, offered = std::move(offered)]() mutable {
    auto made = MakeDeviceCodec(gpu->device(), gpu->streams(), *codec, offered->header->config.layers);
    queue->Post([this, gpu, made = std::move(made), offered = std::move(offered)]() mutable {
      if (!made.ok()) return Answer(*offered, OfferFromHost(made.status()));
      offered->landing = {gpu, *std::move(made), offered->header->config.layout.raw_bytes()};
      Try(std::move(offered));
    });
  };
  parts_.background->Post(WorkerPool::Priority::kEncode, std::move(make), owner);
}

absl::Status IncomingHandOffs::CheckDrain() const {
  return parts_.drain->on() ? absl::UnavailableError("this daemon is draining: it receives no hand-offs")
                            : absl::OkStatus();
}

// The sender knows the name that it said; which others there are is not its to know.
absl::Status IncomingHandOffs::CheckTenant(const std::string& tenant) const {
  const std::vector<std::string>& may = parts_.peer_tenants;
  if (may == std::vector<std::string>{"any"} || std::find(may.begin(), may.end(), tenant) != may.end()) {
    return absl::OkStatus();
  }
  return FieldError(absl::StatusCode::kPermissionDenied, "tenant", tenant.empty() ? "none" : tenant,
                    "of the receiver's --peer-tenants");
}

// ---- room ----

absl::Status IncomingHandOffs::BeginImport(Offered& offered) {
  KV_RETURN_IF_ERROR(CheckDrain());
  KV_RETURN_IF_ERROR(tickets_.CheckRoom(offered.payer));
  const std::shared_ptr<const Codec> codec = *offered.codec;
  offered.projections = nullptr;
  if (!offered.header->activations.empty()) {
    offered.projections = parts_.recomputer->Find(DigestOfOffer(*offered.header, *codec));
  }
  auto recompute = [this, projections = offered.projections, host = HostOf(offered.peer), codec,
                    query_heads = offered.header->config.query_heads](uint32_t layer, uint32_t pages,
                                                                      uint32_t with_activations) {
    return parts_.recomputer->Choose(projections.get(), host, static_cast<int>(layer),
                                     codec->info().page_bytes(static_cast<int>(layer)), query_heads, pages,
                                     with_activations);
  };
  KV_ASSIGN_OR_RETURN(offered.importing, parts_.store->imports().Begin(offered.header, codec, std::move(recompute)));
  return absl::OkStatus();
}

void IncomingHandOffs::Try(std::shared_ptr<Offered> offered) {
  if (absl::Status begun = BeginImport(*offered); !begun.ok()) return EndTry(offered, std::move(begun));
  TrySoon(std::move(offered));
}

void IncomingHandOffs::TrySoon(std::shared_ptr<Offered> offered) {
  const std::string payer = offered->payer;
  turns_.Post(payer, [this, offered = std::move(offered)]() mutable { TrySome(std::move(offered)); });
}

void IncomingHandOffs::TrySome(std::shared_ptr<Offered> offered) {
  if (offered->answered || offered->gone()) return EndTry(offered, absl::CancelledError("its sender is gone"));
  const int64_t begun_ns = parts_.clock->NowNs();
  const Turn turn(HandOffTurns::kPiece);
  LongCall::Next next = LongCall::Next::kPiece;
  while (next == LongCall::Next::kPiece && !turn.over()) next = offered->importing->DoPiece();
  if (offered->waits) retry_took_ns_ += parts_.clock->NowNs() - begun_ns;
  switch (next) {
    case LongCall::Next::kPiece:
      return TrySoon(std::move(offered));
    case LongCall::Next::kCompare: {
      const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
      auto compare = [offered] { return offered->importing->CompareOne(); };
      return OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kEncode, owner, std::move(compare))
          .then([this, offered = std::move(offered)]() mutable { TrySoon(std::move(offered)); })
          .detach(
              [](kj::Exception&& exception) { spdlog::error("event loop: {}", exception.getDescription().cStr()); });
    }
    case LongCall::Next::kDone:
      return EndTry(offered, Accept(*offered));
  }
}

absl::StatusOr<HandOffReceiver::Accepted> IncomingHandOffs::Accept(Offered& offered) {
  KV_RETURN_IF_ERROR(offered.importing->status());
  // Others may have come in between.
  KV_RETURN_IF_ERROR(CheckDrain());
  KV_RETURN_IF_ERROR(tickets_.CheckRoom(offered.payer));
  std::unique_ptr<ImportLease> import = offered.importing->Commit();
  const std::string name = tickets_.Make(import->cache(), offered.payer, offered.header->tokens);
  Accepted accepted{receptions_.Begin(offered, std::move(import), name), name};
  if (offered.landing.gpu != nullptr) accepted.device = offered.landing.gpu->ordinal();
  return accepted;
}

void IncomingHandOffs::EndTry(const std::shared_ptr<Offered>& offered, absl::StatusOr<Accepted> accepted) {
  GiveUpImport(*offered);
  const bool of_gpu = offered->landing.gpu != nullptr, waits = offered->waits;
  const bool may_wait = !of_gpu && absl::IsResourceExhausted(accepted.status()) && offered->room_ms > 0 &&
                        offered->bytes_at_least <= parts_.host_pool_bytes;
  if (offered->answered) {
    // Its time was over meanwhile, or the daemon ends.
  } else if (may_wait && waits) {
    offered->full = accepted.status();
    full_.push_back(offered->payer);
  } else if (may_wait) {
    Wait(offered, accepted.status());
  } else {
    if (waiting_.Take(offered.get()) != nullptr) NoteFree();
    const bool by_host =
        of_gpu && (absl::IsResourceExhausted(accepted.status()) || absl::IsFailedPrecondition(accepted.status()));
    Answer(*offered, by_host ? OfferFromHost(accepted.status()) : std::move(accepted));
  }
  if (waits) parts_.queue->Post([this] { RetryNext(); });
}

// What it gives back itself is no news for those that wait.
void IncomingHandOffs::GiveUpImport(Offered& offered) {
  if (offered.importing == nullptr) return;
  if (awaits_room_) parts_.store->imports().OnRoom(nullptr);
  offered.importing = nullptr;
  if (awaits_room_) AwaitRoom();
}

void IncomingHandOffs::Wait(const std::shared_ptr<Offered>& offered, absl::Status full) {
  if (absl::Status place = waiting_.CheckPlace(offered->payer); !place.ok()) {
    return Answer(*offered, std::move(place));
  }
  NoteFree();
  offered->full = std::move(full);
  offered->deadline = loop_->timer()
                          .afterDelay(offered->room_ms * kj::MILLISECONDS)
                          .then([this, offered = offered.get()] {
                            const std::shared_ptr<Offered> late = waiting_.Take(offered);
                            if (late == nullptr) return;
                            late->deadline.detach([](kj::Exception&&) {});  // it runs now
                            Answer(*late, std::move(late->full));
                            RetrySoon(/*changed=*/true);  // those behind it may need less
                          })
                          .eagerlyEvaluate(nullptr);
  spdlog::info("hand-off from {} waits for room, at most {} ms: {}", offered->peer, offered->room_ms,
               std::string(offered->full.message()));
  offered->reply.waiting(offered->full);
  offered->waits = true;
  waiting_.Push(offered);
  parts_.metrics->waiting.Set(double(waiting_.size()));
  AwaitRoom();
}

void IncomingHandOffs::Answer(Offered& offered, absl::StatusOr<Accepted> accepted) {
  if (WantsHostPages(accepted.status())) {
    spdlog::info("hand-off from {} is to come by way of the host: {}", offered.peer, accepted.status().ToString());
  } else if (!accepted.ok()) {
    parts_.metrics->refused.Increment();
    spdlog::warn("hand-off from {} refused: {}", offered.peer, accepted.status().ToString());
  }
  parts_.metrics->waiting.Set(double(waiting_.size()));
  offered.answered = true;
  offered.reply.done(std::move(accepted));
}

void IncomingHandOffs::AwaitRoom() {
  awaits_room_ = true;
  parts_.store->imports().OnRoom([this, queue = parts_.queue] {
    awaits_room_ = false;
    queue->Post([this] { RetrySoon(/*changed=*/false); });
  });
}

// What those that wait have been tried with, at least.
void IncomingHandOffs::NoteFree() { tried_free_bytes_ = std::min(tried_free_bytes_, Load().free_bytes); }

// What a try that failed gives back comes as room, too, some of it later: without more room than that try found there
// is time.
void IncomingHandOffs::RetrySoon(bool changed) {
  if (waiting_.empty()) return;
  if (retrying_) {
    retry_again_ = true;
    retry_changed_ |= changed;
    return;
  }
  const bool late = !changed && Load().free_bytes <= tried_free_bytes_;
  if (late && !awaits_room_) AwaitRoom();
  if (retry_due_ && (late || !retry_late_)) return;
  retry_due_ = true;
  retry_late_ = late;
  retry_ = loop_->timer()
               .afterDelay((kRoomRetryMs + (late ? kNoRoomRetryMs : 0)) * kj::MILLISECONDS +
                           kRoomRetryTimes * retry_took_ns_ * kj::NANOSECONDS)
               // Not within the promise that another look replaces.
               .then([this] { parts_.queue->Post([this] { RetryOffers(); }); })
               .eagerlyEvaluate(nullptr);
}

void IncomingHandOffs::OfferGone() {
  parts_.queue->Post([this] {
    ForgetGone();
    RetrySoon(/*changed=*/true);
  });
}

void IncomingHandOffs::ForgetGone() {
  std::vector<const Offered*> gone;
  for (const auto& each : waiting_.all()) {
    if (each->gone()) gone.push_back(each.get());
  }
  for (const Offered* each : gone) Answer(*waiting_.Take(each), absl::CancelledError("its sender is gone"));
}

// One after the other, so that none takes a part of the room that another needs whole.
void IncomingHandOffs::RetryOffers() {
  retry_due_ = false;
  if (retrying_) {
    retry_again_ = retry_changed_ = true;
    return;
  }
  retrying_ = true;
  ForgetGone();
  full_.clear();
  retry_took_ns_ = 0;
  tried_free_bytes_ = Load().free_bytes;
  AwaitRoom();  // of others, from here on
  RetryNext();
}

void IncomingHandOffs::RetryNext() {
  std::shared_ptr<Offered> next = waiting_.Next(full_);
  if (next != nullptr) return Try(std::move(next));
  retrying_ = false;
  if (std::exchange(retry_again_, false)) RetrySoon(std::exchange(retry_changed_, false));
  if (!waiting_.empty()) return;
  parts_.store->imports().OnRoom(nullptr);
  awaits_room_ = false;
}

void IncomingHandOffs::DropAll() {
  tickets_.DropAll();
  for (const auto& offered : waiting_.TakeAll()) {
    offered->deadline = nullptr;
    Answer(*offered, absl::UnavailableError("this daemon ends"));
  }
  retry_ = nullptr;
  retry_due_ = false;
  awaits_room_ = false;
  parts_.store->imports().OnRoom(nullptr);
}

}  // namespace kvmanager
