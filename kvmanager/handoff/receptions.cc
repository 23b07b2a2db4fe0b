#include "kvmanager/handoff/receptions.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "codecs/waiting_codec.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/parse_then.h"

namespace kvmanager {
namespace {

// A sample of a link: long enough that it holds several pages of each data connection.
constexpr int64_t kLinkSampleBytes = 64 << 10, kLinkSampleNs = 2'000'000;

}  // namespace

// A sequence being received. Targets are read on the transport's thread, bytes on workers; the import itself belongs to
// the loop's, and is sent back there wherever this is destroyed. Shared by the transport, workers and messages.
class Receptions::Incoming final : public IncomingHandOff,
                                   public RecomputeOwner,
                                   public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(Receptions* owner, std::unique_ptr<ImportLease> import, std::string peer, std::string ticket,
           std::string payer, uint64_t tokens, GpuLanding landing, std::shared_ptr<ProjectionSet> projections,
           WorkerPool* workers)
      : peer(std::move(peer)),
        ticket(std::move(ticket)),
        payer(std::move(payer)),
        tokens(tokens),
        landing(std::move(landing)),
        projections(std::move(projections)),
        owner_(owner),
        queue_(owner->parts_.queue),
        workers_(workers),
        owner_of_work_(WorkerPool::OwnerOf(this->payer)),
        import_(std::move(import)) {}
  ~Incoming() override {
    queue_->Post([import = std::move(import_), landing = std::move(landing)]() mutable { import.reset(); });
  }

  // Of the header from the beginning, and of the trailer from its reply on, these stay as they are.
  absl::Span<uint8_t> target(uint32_t page) const override { return import_->target(page); }
  std::vector<uint32_t> Unwanted(uint32_t first, uint32_t) const override {
    const absl::Span<const uint32_t> all = import_->unwanted();
    return {std::lower_bound(all.begin(), all.end(), first), all.end()};
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
          owner_of_work_);
    }
  }
  void Extend(HandOffPart trailer, absl::AnyInvocable<void(absl::Status)> reply) override {
    link_begin_ns_ = owner_->parts_.clock->NowNs();
    const size_t trailer_bytes = trailer.manifest.size();
    auto parse = [trailer = std::move(trailer)] {
      return ParseHandOffTrailer(trailer.manifest, trailer.page_bytes, trailer.withdrawn);
    };
    auto extend = [self = shared_from_this(),
                   reply = std::move(reply)](absl::StatusOr<TrailerManifest> manifest) mutable {
      Receptions* const owner = self->owner_;
      owner->Extend(std::move(self), std::move(manifest), std::move(reply));
    };
    ParseThen(owner_->parts_, trailer_bytes, owner_of_work_, std::move(parse), std::move(extend));
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

  // The loop's.
  ImportLease& import() { return *import_; }

  const std::string peer;
  const std::string ticket;
  const std::string payer;
  const uint64_t tokens;
  GpuLanding landing;                                // where its targets are; unchanged while this lives
  const std::shared_ptr<ProjectionSet> projections;  // shared: as registered when pages were chosen; or nullptr
  SequenceId sequence = 0;                           // once it is shown
  absl::Status failed;                               // why it ended early
  absl::AnyInvocable<void(absl::Status)> completed;  // the sender has sent everything
  bool committing = false;                           // in pieces

 private:
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

  Receptions* const owner_;
  MessageQueue* const queue_;
  WorkerPool* const workers_;  // that look at pages
  const WorkerPool::Owner owner_of_work_;
  std::unique_ptr<ImportLease> import_;  // as long as this
  // The transport's thread: of the link's sample under way; 0: before the trailer.
  int64_t link_begin_ns_ = 0, link_bytes_ = 0;
};

std::shared_ptr<IncomingHandOff> Receptions::Begin(const Offered& offered, std::unique_ptr<ImportLease> import,
                                                   std::string ticket) {
  return std::make_shared<Incoming>(this, std::move(import), offered.peer, std::move(ticket), offered.payer,
                                    offered.header->tokens, offered.landing, offered.projections,
                                    WorkersOf(**offered.codec, parts_.workers));
}

void Receptions::Extend(std::shared_ptr<Incoming> incoming, absl::StatusOr<TrailerManifest> manifest,
                        absl::AnyInvocable<void(absl::Status)> reply) {
  if (!incoming->failed.ok()) return reply(incoming->failed);
  absl::Status status = manifest.status();
  if (status.ok()) status = tickets_.SetBlob(incoming->ticket, std::move(manifest->blob));
  if (!status.ok()) {
    Refuse(*incoming, status);
    return reply(status);
  }
  incoming->import().BeginExtend(std::move(manifest->trailer));
  ExtendSoon(std::move(incoming), std::move(reply));
}

void Receptions::ExtendSoon(std::shared_ptr<Incoming> incoming, absl::AnyInvocable<void(absl::Status)> reply) {
  const std::string payer = incoming->payer;
  turns_.Post(payer, [this, incoming = std::move(incoming), reply = std::move(reply)]() mutable {
    ExtendSome(std::move(incoming), std::move(reply));
  });
}

void Receptions::ExtendSome(std::shared_ptr<Incoming> incoming, absl::AnyInvocable<void(absl::Status)> reply) {
  if (!incoming->failed.ok()) return reply(incoming->failed);
  const Turn turn(HandOffTurns::kPiece);
  while (incoming->import().ExtendNext()) {
    if (turn.over()) return ExtendSoon(std::move(incoming), std::move(reply));
  }
  const absl::Status status = incoming->import().extended();
  status.ok() ? GoOn(*incoming) : Refuse(*incoming, status);
  reply(incoming->failed);
}

void Receptions::Landed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages) {
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
  Refuse(incoming, status);
}

// What Arrived gave to a GPU's queue, which is of all who use that GPU: its bytes are there.
void Receptions::PostEncodes(const Incoming& incoming) {
  if (incoming.landing.gpu == nullptr) return;
  for (DeviceEncodeJob& job : incoming.landing.gpu->encode_queue()->Take()) {
    incoming.landing.gpu->encodes()->Post(incoming.landing.codec, incoming.landing.raw_bytes, std::move(job));
  }
}

void Receptions::Recomputed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages) {
  // Whoever cancelled it says why in a message of its own, which may come later: it is no fault of the projections.
  if (!incoming.failed.ok() || incoming.cancelled) return;
  const absl::Status status = pages.ok() ? incoming.import().Recomputed(*pages) : pages.status();
  if (status.ok()) return GoOn(incoming);
  // The next attempt takes K and V as they are.
  parts_.recomputer->NoteFailure(*incoming.projections, status);
  parts_.metrics->aborted.Increment();
  Fail(incoming, status);
}

void Receptions::Complete(Incoming& incoming, absl::AnyInvocable<void(absl::Status)> reply) {
  if (!incoming.failed.ok()) return reply(incoming.failed);
  incoming.completed = std::move(reply);
  GoOn(incoming);
}

void Receptions::Abort(Incoming& incoming, const absl::Status& why) {
  if (!incoming.failed.ok()) return;
  parts_.metrics->aborted.Increment();
  Fail(incoming, why);
}

void Receptions::GoOn(Incoming& incoming) {
  ImportLease& import = incoming.import();
  if (incoming.sequence == 0 && import.can_show()) {
    const absl::StatusOr<SequenceId> shown = import.Show();
    if (!shown.ok()) return Fail(incoming, shown.status());
    incoming.sequence = *shown;
    arriving_[*shown];
    tickets_.Show(incoming.ticket, *shown);
  }
  if (incoming.completed == nullptr || !import.complete()) return;
  if (!std::exchange(incoming.committing, true)) CommitSoon(incoming.shared_from_this());
}

void Receptions::CommitSoon(std::shared_ptr<Incoming> incoming) {
  const std::string payer = incoming->payer;
  turns_.Post(payer, [this, incoming = std::move(incoming)]() mutable { CommitSome(std::move(incoming)); });
}

void Receptions::CommitSome(std::shared_ptr<Incoming> incoming) {
  if (!incoming->failed.ok()) return;
  const Turn turn(HandOffTurns::kPiece);
  while (incoming->import().CommitNext()) {
    if (turn.over()) return CommitSoon(std::move(incoming));
  }
  const absl::Status committed = incoming->import().committed();
  if (!committed.ok()) return Fail(*incoming, committed);
  parts_.metrics->received.Increment();
  if (incoming->landing.gpu != nullptr) parts_.metrics->between_gpus.Increment();
  spdlog::info("hand-off from {}: {} tokens are here", incoming->peer, incoming->tokens);
  Settle(incoming->sequence);
  std::exchange(incoming->completed, nullptr)(absl::OkStatus());
}

void Receptions::Refuse(Incoming& incoming, const absl::Status& why) {
  parts_.metrics->refused.Increment();
  Fail(incoming, why);
}

void Receptions::Fail(Incoming& incoming, const absl::Status& why) {
  incoming.failed = why;
  incoming.cancelled = true;
  spdlog::warn("hand-off from {} ended early, its pages are given back: {}", incoming.peer, why.ToString());
  incoming.import().Break(why);
  tickets_.Fail(incoming.ticket, why);
  if (incoming.sequence != 0) Settle(incoming.sequence);
  if (incoming.completed != nullptr) std::exchange(incoming.completed, nullptr)(why);
}

void Receptions::Settle(SequenceId sequence) {
  const auto found = arriving_.find(sequence);
  if (found == arriving_.end()) return;
  auto waiting = std::move(found->second);
  arriving_.erase(found);
  for (auto& each : waiting) each->fulfill();
}

kj::Promise<void> Receptions::WhenSettled(SequenceId sequence) {
  const auto found = arriving_.find(sequence);
  if (found == arriving_.end()) return kj::READY_NOW;
  auto waiting = kj::newPromiseAndFulfiller<void>();
  std::erase_if(found->second, [](auto& each) { return !each->isWaiting(); });
  found->second.push_back(kj::mv(waiting.fulfiller));
  return kj::mv(waiting.promise);
}

}  // namespace kvmanager
