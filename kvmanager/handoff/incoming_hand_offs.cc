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
#include "kvmanager/handoff/offer_check.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {

namespace {

// A sample of a link: long enough that it holds several pages of each lane.
constexpr int64_t kLinkSampleBytes = 64 << 10, kLinkSampleNs = 2'000'000;

// Of "HOST:PORT".
std::string HostOf(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

}  // namespace

// A sequence being received. Targets are read on the transport's thread, bytes on workers; the import itself belongs to
// the loop's, and is sent back there wherever this is destroyed. Shared by the transport, workers and messages.
class IncomingHandOffs::Incoming final : public IncomingHandOff,
                                         public RecomputeOwner,
                                         public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(IncomingHandOffs* owner, std::unique_ptr<ImportLease> import, std::string peer, std::string ticket,
           uint64_t tokens, size_t first_pages, GpuLanding landing, std::shared_ptr<ProjectionSet> projections,
           WorkerPool* workers, WorkerPool::Owner payer)
      : peer(std::move(peer)),
        ticket(std::move(ticket)),
        tokens(tokens),
        landing(std::move(landing)),
        projections(std::move(projections)),
        owner_(owner),
        queue_(owner->parts_.queue),
        workers_(workers),
        payer_(payer),
        import_(std::move(import)) {
    AddTargets(first_pages, &first_targets_);
  }
  ~Incoming() override {
    queue_->Post([import = std::move(import_), landing = std::move(landing)]() mutable { import.reset(); });
  }

  absl::Span<uint8_t> target(uint32_t page) const override {
    if (page < first_targets_.size()) return first_targets_[page];
    KV_CHECK(page - first_targets_.size() < last_targets_.size());
    return last_targets_[page - first_targets_.size()];
  }
  std::vector<uint32_t> Unwanted(uint32_t first, uint32_t) const override {
    return {std::lower_bound(unwanted_.begin(), unwanted_.end(), first), unwanted_.end()};
  }
  void Arrived(absl::Span<const uint32_t> pages) override {
    MeasureLink(pages);
    if (landing.gpu != nullptr) {
      std::vector<ArrivedPage> good;  // which are a GPU's to look at
      good.reserve(pages.size());
      for (const uint32_t page : pages) good.push_back({page, 0});
      queue_->Post([self = shared_from_this(), good = std::move(good)]() mutable {
        self->owner_->Landed(*self, std::move(good));
      });
      return;
    }
    for (size_t at = 0; at < pages.size(); at += kValidateAtOnce) {
      const auto some = pages.subspan(at, kValidateAtOnce);
      workers_->Post(
          WorkerPool::Priority::kEncode,
          [self = shared_from_this(), some = std::vector<uint32_t>(some.begin(), some.end())]() mutable {
            absl::StatusOr<std::vector<ArrivedPage>> looked = self->Validate(some);
            MessageQueue* const queue = self->queue_;
            queue->Post([self = std::move(self), looked = std::move(looked)]() mutable {
              self->owner_->Landed(*self, std::move(looked));
            });
          },
          payer_);
    }
  }
  void Extend(HandOffPart last, absl::AnyInvocable<void(absl::Status)> reply) override {
    link_begin_ns_ = owner_->parts_.clock->NowNs();
    queue_->Post([self = shared_from_this(), last = std::move(last), reply = std::move(reply)]() mutable {
      reply(self->owner_->Extend(*self, last));
    });
  }
  void Complete(absl::AnyInvocable<void(absl::Status)> reply) override {
    queue_->Post([self = shared_from_this(), reply = std::move(reply)]() mutable {
      self->owner_->Complete(*self, std::move(reply));
    });
  }
  void Abort(absl::Status why) override {
    cancelled = true;
    queue_->Post([self = shared_from_this(), why = std::move(why)] { self->owner_->Abort(*self, why); });
  }

  void OnRecomputed(absl::StatusOr<std::vector<ArrivedPage>> pages) override {
    owner_->Recomputed(*this, std::move(pages));
  }

  // On a worker.
  absl::StatusOr<std::vector<ArrivedPage>> Validate(const std::vector<uint32_t>& pages) const {
    std::vector<ArrivedPage> good;
    good.reserve(pages.size());
    for (const uint32_t page : pages) {
      KV_ASSIGN_OR_RETURN(const uint64_t checksum, import_->Validate(page));
      good.push_back({page, checksum});
    }
    return good;
  }

  // The loop's. The trailer's targets are there before its reply lets the transport ask for them.
  ImportLease& import() { return *import_; }
  void SetLastTargets(size_t pages) { AddTargets(pages, &last_targets_); }

  const std::string peer;
  const std::string ticket;
  const uint64_t tokens;
  GpuLanding landing;                                // where its targets are; unchanged while this lives
  const std::shared_ptr<ProjectionSet> projections;  // shared: as registered when pages were chosen; or nullptr
  SequenceId sequence = 0;                           // once it is shown
  absl::Status failed;                               // why it ended early
  absl::AnyInvocable<void(absl::Status)> completed;  // the sender has sent everything

 private:
  void AddTargets(size_t pages, std::vector<absl::Span<uint8_t>>* targets) {
    const size_t first = first_targets_.size() + last_targets_.size();
    targets->reserve(pages);
    for (size_t page = first; page < first + pages; ++page) {
      targets->push_back(import_->target(page));
      if (targets->back().empty()) unwanted_.push_back(static_cast<uint32_t>(page));
    }
  }
  // The transport's thread. From the trailer on the sender has everything, so that pages come as fast as the link
  // carries them.
  void MeasureLink(absl::Span<const uint32_t> pages) {
    if (link_begin_ns_ == 0) return;
    for (const uint32_t page : pages) link_bytes_ += target(page).size();
    const int64_t now_ns = owner_->parts_.clock->NowNs();
    if (link_bytes_ < kLinkSampleBytes || now_ns - link_begin_ns_ < kLinkSampleNs) return;
    owner_->parts_.recomputer->RecordLink(HostOf(peer), link_bytes_, now_ns - link_begin_ns_);
    link_begin_ns_ = now_ns;
    link_bytes_ = 0;
  }

  IncomingHandOffs* const owner_;
  MessageQueue* const queue_;
  WorkerPool* const workers_;            // that look at pages
  const WorkerPool::Owner payer_;        // whose work that is
  std::unique_ptr<ImportLease> import_;  // as long as this
  std::vector<absl::Span<uint8_t>> first_targets_, last_targets_;
  std::vector<uint32_t> unwanted_;  // those that are empty
  // The transport's thread: of the link's sample under way; 0: before the trailer.
  int64_t link_begin_ns_ = 0, link_bytes_ = 0;
};

// ---- offers ----

void IncomingHandOffs::Offer(std::string peer, HandOffPart part, int64_t room_ms, OfferReply reply) {
  parts_.queue->Post(
      [this, peer = std::move(peer), part = std::move(part), room_ms, reply = std::move(reply)]() mutable {
        auto offered = std::make_shared<Offered>();
        offered->peer = std::move(peer);
        offered->room_ms = std::min(room_ms, kRoomMsMax);
        offered->reply = std::move(reply);
        if (absl::Status may = CheckDrain(); !may.ok()) return Answer(*offered, std::move(may));
        absl::StatusOr<HandOffHeader> first = ParseFirstManifest(part.manifest, part.page_bytes);
        if (!first.ok()) return Answer(*offered, first.status());
        if (absl::Status may = CheckTenant(first->config.tenant); !may.ok()) return Answer(*offered, std::move(may));
        offered->first = *std::move(first);
        offered->payer = std::string(PayerName(offered->first.config.tenant));
        if (absl::Status may = tickets_.CheckRoom(offered->payer); !may.ok()) return Answer(*offered, std::move(may));
        offered->gpu = part.gpu;
        Consider(std::move(offered));
      });
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
  WorkerPool* const workers = MakingWorkers(parts_.codec_workers, offered->first.config.codec, parts_.background);
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
  auto make = [this, queue = parts_.queue, registry = parts_.registry, offered = std::move(offered)]() mutable {
    offered->codec = CacheDirectory::MakeCodec(*registry, offered->first.config);
    queue->Post([this, offered = std::move(offered)]() mutable {
      if (!offered->codec.ok()) return Answer(*offered, offered->codec.status());
      if (offered->gpu != GpuName()) return ConsiderGpu(std::move(offered));
      std::shared_ptr<BlockCheck> check = CheckOfOffer(*parts_.store, offered->first, **offered->codec);
      Verify(std::move(offered), std::move(check));
    });
  };
  workers->Post(WorkerPool::Priority::kEncode, std::move(make), owner);
}

void IncomingHandOffs::Verify(std::shared_ptr<Offered> offered, std::shared_ptr<BlockCheck> check) {
  if (check != nullptr && !offered->gone() && check->Next()) {
    const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
    const auto compare = [check] { return check->CompareOne(); };
    OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kEncode, owner, compare)
        .then([this, offered = std::move(offered), check]() mutable { Verify(std::move(offered), std::move(check)); })
        .detach([](kj::Exception&& exception) { spdlog::error("event loop: {}", exception.getDescription().cStr()); });
    return;
  }
  check.reset();  // what it holds may have to go
  offered->verified_ns = parts_.clock->NowNs();
  offered->waits ? RetrySoon() : TryAccept(std::move(offered));
}

// Pages of a GPU land on one at once, or the sender sends them by way of the host, where they may wait for room. What a
// codec has on a GPU is uploaded: there, too.
void IncomingHandOffs::ConsiderGpu(std::shared_ptr<Offered> offered) {
  const std::shared_ptr<const Codec> codec = *offered->codec;
  const auto chosen = ChooseGpu(parts_.gpus, parts_.copier, *parts_.store, offered->gpu, offered->first, *codec);
  if (!chosen.ok()) return Answer(*offered, chosen.status());
  offered->first.config.device = (*chosen)->ordinal();
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(offered->payer);
  auto make = [this, queue = parts_.queue, gpu = *chosen, codec, offered = std::move(offered)]() mutable {
    auto made = MakeDeviceCodec(gpu->device(), gpu->streams(), *codec, offered->first.config.layers);
    queue->Post([this, gpu, made = std::move(made), offered = std::move(offered)]() mutable {
      if (!made.ok()) return Answer(*offered, OfferFromHost(made.status()));
      offered->landing = {gpu, *std::move(made), offered->first.config.layout.raw_bytes()};
      absl::StatusOr<Accepted> accepted = Accept(*offered);
      const bool by_host =
          absl::IsResourceExhausted(accepted.status()) || absl::IsFailedPrecondition(accepted.status());
      Answer(*offered, by_host ? OfferFromHost(accepted.status()) : std::move(accepted));
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

void IncomingHandOffs::TryAccept(std::shared_ptr<Offered> offered) {
  if (offered->gone()) return Answer(*offered, absl::CancelledError("its sender is gone"));
  absl::Status turn = waiting_.CheckTurn(offered->payer);
  absl::StatusOr<Accepted> accepted = turn.ok() ? Accept(*offered) : std::move(turn);
  const bool may_wait = absl::IsResourceExhausted(accepted.status()) && offered->room_ms > 0 &&
                        BytesAtLeast(offered->first, (*offered->codec)->info()) <= parts_.host_pool_bytes;
  if (!may_wait) return Answer(*offered, std::move(accepted));
  if (absl::Status place = waiting_.CheckPlace(offered->payer); !place.ok()) {
    return Answer(*offered, std::move(place));
  }
  offered->full = accepted.status();
  offered->deadline = loop_->timer()
                          .afterDelay(offered->room_ms * kj::MILLISECONDS)
                          .then([this, offered = offered.get()] {
                            const std::shared_ptr<Offered> late = waiting_.Take(offered);
                            if (late == nullptr) return;
                            late->deadline.detach([](kj::Exception&&) {});  // it runs now
                            Answer(*late, std::move(late->full));
                            RetrySoon();  // those behind it may need less
                          })
                          .eagerlyEvaluate(nullptr);
  spdlog::info("hand-off from {} waits for room, at most {} ms: {}", offered->peer, offered->room_ms,
               std::string(offered->full.message()));
  offered->reply.waiting(offered->full);
  offered->waits = true;
  waiting_.Push(std::move(offered));
  parts_.metrics->waiting.Set(double(waiting_.size()));
  AwaitRoom();
}

absl::StatusOr<HandOffReceiver::Accepted> IncomingHandOffs::Accept(Offered& offered) {
  KV_RETURN_IF_ERROR(CheckDrain());
  KV_RETURN_IF_ERROR(tickets_.CheckRoom(offered.payer));
  const std::shared_ptr<const Codec> codec = *offered.codec;
  std::shared_ptr<ProjectionSet> projections;
  const auto recompute = [&](uint32_t layer, uint32_t pages, uint32_t with_activations) {
    return parts_.recomputer->Choose(projections.get(), HostOf(offered.peer), static_cast<int>(layer),
                                     codec->info().page_bytes(static_cast<int>(layer)),
                                     offered.first.config.query_heads, pages, with_activations);
  };
  if (!offered.first.activations.empty()) {
    projections = parts_.recomputer->Find(DigestOfOffer(offered.first, *codec));
  }
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ImportLease> import,
                      parts_.store->imports().Import(offered.first, codec, recompute));
  const std::string name = tickets_.Make(import->cache(), offered.payer, offered.first.tokens);
  Accepted accepted{std::make_shared<Incoming>(this, std::move(import), offered.peer, name, offered.first.tokens,
                                               offered.first.size(), offered.landing, std::move(projections),
                                               WorkersOf(*codec, parts_.workers), WorkerPool::OwnerOf(offered.payer)),
                    name};
  if (offered.landing.gpu != nullptr) accepted.device = offered.landing.gpu->ordinal();
  return accepted;
}

void IncomingHandOffs::Answer(Offered& offered, absl::StatusOr<Accepted> accepted) {
  if (WantsHostPages(accepted.status())) {
    spdlog::info("hand-off from {} is to come by way of the host: {}", offered.peer, accepted.status().ToString());
  } else if (!accepted.ok()) {
    parts_.metrics->refused.Increment();
    spdlog::warn("hand-off from {} refused: {}", offered.peer, accepted.status().ToString());
  }
  parts_.metrics->waiting.Set(double(waiting_.size()));
  offered.reply.done(std::move(accepted));
}

void IncomingHandOffs::AwaitRoom() {
  parts_.store->imports().OnRoom([this, queue = parts_.queue] { queue->Post([this] { RetrySoon(); }); });
}

void IncomingHandOffs::RetrySoon() {
  if (waiting_.empty() || std::exchange(retry_due_, true)) return;
  retry_ = loop_->timer()
               .afterDelay(kRoomRetryMs * kj::MILLISECONDS + kRoomRetryTimes * retry_took_ns_ * kj::NANOSECONDS)
               .then([this] {
                 retry_due_ = false;
                 RetryOffers();
               })
               .eagerlyEvaluate(nullptr);
}

void IncomingHandOffs::OfferGone() {
  parts_.queue->Post([this] {
    ForgetGone();
    RetrySoon();
  });
}

void IncomingHandOffs::ForgetGone() {
  std::vector<const Offered*> gone;
  for (const auto& each : waiting_.all()) {
    if (each->gone()) gone.push_back(each.get());
  }
  for (const Offered* each : gone) Answer(*waiting_.Take(each), absl::CancelledError("its sender is gone"));
}

void IncomingHandOffs::RetryOffers() {
  const int64_t begun_ns = parts_.clock->NowNs();
  ForgetGone();
  waiting_.Retry([this](const std::shared_ptr<Offered>& offered) {
    if (parts_.clock->NowNs() - offered->verified_ns > BlockCheck::kVerifiedForNs / 2) {
      offered->verified_ns = INT64_MAX;  // until it is verified again
      Verify(offered, CheckOfOffer(*parts_.store, offered->first, **offered->codec));
    }
    if (offered->verified_ns == INT64_MAX) return offered->full;
    absl::StatusOr<Accepted> accepted = Accept(*offered);
    if (absl::IsResourceExhausted(accepted.status())) return accepted.status();
    Answer(*offered, std::move(accepted));
    return absl::OkStatus();
  });
  retry_took_ns_ = parts_.clock->NowNs() - begun_ns;
  if (!waiting_.empty()) AwaitRoom();
}

// ---- what arrives ----

absl::Status IncomingHandOffs::Extend(Incoming& incoming, const HandOffPart& part) {
  KV_RETURN_IF_ERROR(incoming.failed);
  absl::StatusOr<LastManifest> manifest = ParseLastManifest(part.manifest, part.page_bytes, part.withdrawn);
  absl::Status status = manifest.status();
  if (status.ok()) status = tickets_.SetBlob(incoming.ticket, std::move(manifest->blob));
  if (status.ok()) status = incoming.import().Extend(manifest->last);
  if (!status.ok()) {
    parts_.metrics->refused.Increment();
    Fail(incoming, status);
    return status;
  }
  incoming.SetLastTargets(manifest->last.pages.size());
  GoOn(incoming);
  return incoming.failed;
}

void IncomingHandOffs::Landed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages) {
  if (!incoming.failed.ok()) return;
  const absl::Status status = pages.ok() ? incoming.import().Arrived(*pages) : pages.status();
  PostEncodes(incoming);
  if (status.ok()) {
    std::vector<RecomputePage> to_recompute = incoming.import().TakeRecomputable();
    if (!to_recompute.empty()) {
      parts_.recomputer->Recompute(incoming.projections, incoming.shared_from_this(), std::move(to_recompute));
    }
    return GoOn(incoming);
  }
  parts_.metrics->refused.Increment();
  Fail(incoming, status);
}

// What Arrived gave to a GPU's queue, which is of all who use that GPU: its bytes are there.
void IncomingHandOffs::PostEncodes(const Incoming& incoming) {
  if (incoming.landing.gpu == nullptr) return;
  for (DeviceEncodeJob& job : incoming.landing.gpu->encode_queue()->Take()) {
    incoming.landing.gpu->encodes()->Post(incoming.landing.codec, incoming.landing.raw_bytes, std::move(job));
  }
}

void IncomingHandOffs::Recomputed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages) {
  // Whoever cancelled it says why in a message of its own, which may come later: it is no fault of the projections.
  if (!incoming.failed.ok() || incoming.cancelled) return;
  const absl::Status status = pages.ok() ? incoming.import().Recomputed(*pages) : pages.status();
  if (status.ok()) return GoOn(incoming);
  // The next attempt takes K and V as they are.
  parts_.recomputer->NoteFailure(*incoming.projections, status);
  parts_.metrics->aborted.Increment();
  Fail(incoming, status);
}

void IncomingHandOffs::Complete(Incoming& incoming, absl::AnyInvocable<void(absl::Status)> reply) {
  if (!incoming.failed.ok()) return reply(incoming.failed);
  incoming.completed = std::move(reply);
  GoOn(incoming);
}

void IncomingHandOffs::Abort(Incoming& incoming, const absl::Status& why) {
  if (!incoming.failed.ok()) return;
  parts_.metrics->aborted.Increment();
  Fail(incoming, why);
}

void IncomingHandOffs::GoOn(Incoming& incoming) {
  ImportLease& import = incoming.import();
  if (incoming.sequence == 0 && import.can_show()) {
    const absl::StatusOr<SequenceId> shown = import.Show();
    if (!shown.ok()) return Fail(incoming, shown.status());
    incoming.sequence = *shown;
    arriving_[*shown];
    tickets_.Show(incoming.ticket, *shown);
  }
  if (incoming.completed == nullptr || !import.complete()) return;
  const absl::Status committed = import.Commit();
  if (!committed.ok()) return Fail(incoming, committed);
  parts_.metrics->received.Increment();
  if (incoming.landing.gpu != nullptr) parts_.metrics->between_gpus.Increment();
  spdlog::info("hand-off from {}: {} tokens are here", incoming.peer, incoming.tokens);
  Settle(incoming.sequence);
  std::exchange(incoming.completed, nullptr)(absl::OkStatus());
}

void IncomingHandOffs::Fail(Incoming& incoming, const absl::Status& why) {
  incoming.failed = why;
  incoming.cancelled = true;
  spdlog::warn("hand-off from {} ended early, its pages are given back: {}", incoming.peer, why.ToString());
  incoming.import().Break(why);
  tickets_.Fail(incoming.ticket, why);
  if (incoming.sequence != 0) Settle(incoming.sequence);
  if (incoming.completed != nullptr) std::exchange(incoming.completed, nullptr)(why);
}

void IncomingHandOffs::Settle(SequenceId sequence) {
  const auto found = arriving_.find(sequence);
  if (found == arriving_.end()) return;
  auto waiting = std::move(found->second);
  arriving_.erase(found);
  for (auto& each : waiting) each->fulfill();
}

kj::Promise<void> IncomingHandOffs::WhenSettled(SequenceId sequence) {
  const auto found = arriving_.find(sequence);
  if (found == arriving_.end()) return kj::READY_NOW;
  auto waiting = kj::newPromiseAndFulfiller<void>();
  std::erase_if(found->second, [](auto& each) { return !each->isWaiting(); });
  found->second.push_back(kj::mv(waiting.fulfiller));
  return kj::mv(waiting.promise);
}

void IncomingHandOffs::DropAll() {
  tickets_.DropAll();
  for (const auto& offered : waiting_.TakeAll()) {
    offered->deadline = nullptr;
    Answer(*offered, absl::UnavailableError("this daemon ends"));
  }
  retry_ = nullptr;
  retry_due_ = false;
  parts_.store->imports().OnRoom(nullptr);
}

}  // namespace kvmanager
