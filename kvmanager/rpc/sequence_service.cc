// Sequence, and a hand-off of one that is under way.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/gpu/written_publish.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/outgoing_hand_off.h"
#include "kvmanager/handoff/peer_choice.h"
#include "kvmanager/rpc/do_long_call.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

// Params: with a peer, timeoutMs, roomMs and goesOn.
template <typename Params>
absl::StatusOr<HandOffTargets> ReadTargets(const std::vector<std::string>& peers_allowed, const CacheConfig& of,
                                           const Params& params) {
  KV_ASSIGN_OR_RETURN(std::vector<std::string> peers, ParsePeers(ViewOf(params.getPeer())));
  KV_RETURN_IF_ERROR(CheckPeersAllowed("peer", peers, peers_allowed));
  const uint32_t timeout_ms = params.getTimeoutMs(), room_ms = params.getRoomMs();
  if (timeout_ms == 0 || timeout_ms > limits::kHandOffTimeoutMsMax) {
    return InvalidField("timeoutMs", timeout_ms, absl::StrCat("1..", limits::kHandOffTimeoutMsMax));
  }
  if (room_ms > limits::kHandOffTimeoutMsMax) {
    return InvalidField("roomMs", room_ms, absl::StrCat("at most ", limits::kHandOffTimeoutMsMax));
  }
  return HandOffTargets{std::move(peers), room_ms, timeout_ms, params.getGoesOn(), std::string(PayerName(of.tenant))};
}

absl::StatusOr<SharedBlob> ReadBlob(capnp::Data::Reader blob) {
  if (blob.size() > limits::kBlobBytesMax) {
    return InvalidField("blob", absl::StrCat(blob.size(), " bytes long"),
                        absl::StrCat("at most ", limits::kBlobBytesMax, " bytes long"));
  }
  return std::make_shared<const std::string>(reinterpret_cast<const char*>(blob.begin()), blob.size());
}

void WriteSent(Session& session, Method method, const absl::StatusOr<SentHandOff>& sent,
               api::HandOffReply::Builder reply) {
  if (!sent.ok()) {
    session.calls().NoteError(method, sent.status());
    return WriteStatus(sent.status(), reply.initStatus());
  }
  reply.setTicket(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(sent->ticket.data()), sent->ticket.size()));
  reply.setBytesSent(sent->result.bytes_sent);
  reply.setPagesSent(sent->result.pages_sent);
  reply.setPagesSkipped(sent->result.pages_skipped);
  reply.setSeconds(sent->result.seconds);
  reply.setBytesResent(sent->result.bytes_resent);
  reply.setResumes(sent->result.resumes);
  reply.setPeer(TextOf(sent->peer));
  reply.setSendingSeconds(sent->result.sending_seconds);
  reply.setBegunUnixNs(sent->begun_unix_ns);
  auto layers = reply.initLayers(static_cast<uint32_t>(sent->result.groups.size()));
  for (uint32_t i = 0; i < layers.size(); ++i) {
    const SendTimes& times = sent->result.groups[i];
    layers[i].setReadyFirst(times.posted_first);
    layers[i].setReadyLast(times.posted_last);
    layers[i].setSentFirst(times.sent_first);
    layers[i].setArrivedLast(times.arrived_last);
  }
}

constexpr int64_t kDeadlineGraceMs = 100;

class HandOffService final : public api::HandOff::Server {
 public:
  /// What was appended to the sequence so far.
  struct Appended {
    /// Resolves once it is in the sequence's pages, or could not be.
    absl::AnyInvocable<kj::Promise<absl::Status>()> written = [] { return absl::OkStatus(); };
    /// Whether it is; an error: something is wrong with it.
    absl::AnyInvocable<absl::StatusOr<bool>()> look = [] { return true; };
  };

  HandOffService(std::shared_ptr<Session> session, api::Sequence::Client sequence, kj::Own<CancelOnDrop> hand_off,
                 Appended appended)
      : session_(std::move(session)),
        sequence_(kj::mv(sequence)),
        hand_off_(kj::mv(hand_off)),
        appended_(std::move(appended)) {}

  kj::Promise<void> finish(FinishContext context) override {
    return Serve(*session_, Method::kFinishHandOff, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(SharedBlob blob, ReadBlob(context.getParams().getBlob()));
      context.releaseParams();
      return FinishWritten(std::move(blob))
          .then([this, context](absl::StatusOr<SentHandOff> sent) mutable {
            WriteSent(*session_, Method::kFinishHandOff, sent, context.getResults().initReply());
          })
          .attach(thisCap());
    });
  }

 private:
  kj::Promise<absl::StatusOr<SentHandOff>> FinishWritten(SharedBlob blob) {
    return appended_.written().then(
        [this, blob = std::move(blob)](absl::Status written) mutable -> kj::Promise<absl::StatusOr<SentHandOff>> {
          // Looked at once more in the turn in which it is finished: a call may have come in between.
          const absl::StatusOr<bool> all = written.ok() ? appended_.look() : absl::StatusOr<bool>(std::move(written));
          if (!all.ok()) {
            (*hand_off_)->Cancel();
            return absl::StatusOr<SentHandOff>(all.status());
          }
          return *all ? (*hand_off_)->Finish(std::move(blob)) : FinishWritten(std::move(blob));
        });
  }

  const std::shared_ptr<Session> session_;
  const api::Sequence::Client sequence_;  // kept
  const kj::Own<CancelOnDrop> hand_off_;
  Appended appended_;
};

class SequenceService final : public api::Sequence::Server {
 public:
  SequenceService(std::shared_ptr<Session> session, const SequenceParts& parts, SequenceId id,
                  std::shared_ptr<const BoundCache> bound)
      : session_(std::move(session)), parts_(parts), id_(id), bound_(std::move(bound)), publish_(parts.store, id) {
    session_->Hold(id_, bound_->cache.id);
  }
  ~SequenceService() { session_->Release(id_); }
  /// Nobody holds it any more (disposals.h).
  void LetGo() { session_->LetGo(); }

  // These need the sequence as a whole: of one that still arrives by a hand-off they wait until it has, or has not.
  kj::Promise<void> fork(ForkContext context) override { return WhenWhole(context, &SequenceService::ForkNow); }
  kj::Promise<void> crop(CropContext context) override { return WhenWhole(context, &SequenceService::CropNow); }
  kj::Promise<void> publish(PublishContext context) override {
    return WhenWhole(context, &SequenceService::PublishNow);
  }
  kj::Promise<void> handOff(HandOffContext context) override {
    return WhenWhole(context, &SequenceService::HandOffNow);
  }
  kj::Promise<void> beginHandOff(BeginHandOffContext context) override {
    return WhenWhole(context, &SequenceService::BeginHandOffNow);
  }

  kj::Promise<void> info(InfoContext context) override {
    return Serve(*session_, Method::kSequenceInfo, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(const SequenceInfo info, store().Describe(id_));
      WriteHeldSequence(*parts_.held, info, context.getResults().initInfo());
      return Done();
    });
  }

 private:
  template <typename Context>
  kj::Promise<void> WhenWhole(Context context, kj::Promise<void> (SequenceService::*method)(Context)) {
    IncomingHandOffs& incoming = *parts_.incoming;
    if (!incoming.arriving(id_)) return (this->*method)(context);
    context.allowCancellation();
    return incoming.WhenSettled(id_)
        .then([this, context, method]() mutable { return (this->*method)(context); })
        .attach(thisCap());
  }

  kj::Promise<void> ForkNow(ForkContext context) {
    return Serve(*session_, Method::kFork, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(session_->CheckRoomForSequence(Session::Begins::kNow));
      KV_ASSIGN_OR_RETURN(const Forked fork, calls().Fork(*session_, bound_->cache, id_));
      auto reply = context.getResults().initReply();
      reply.setDone(fork.copied);
      reply.setSequence(MakeSequenceService(session_, parts_, fork.sequence, bound_));
      reply.setSequenceId(fork.sequence);
      return Done();
    });
  }

  kj::Promise<void> CropNow(CropContext context) {
    return Serve(*session_, Method::kCrop, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const uint64_t tokens = context.getParams().getTokens();
      KV_ASSIGN_OR_RETURN(const uint64_t done, calls().Crop(*session_, bound_->cache, id_, tokens));
      publish_.OnCrop(tokens);
      context.getResults().setDone(done);
      return Done();
    });
  }

  kj::Promise<void> PublishNow(PublishContext context) {
    return Serve(*session_, Method::kPublish, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      auto names = std::make_shared<BlockNamesReader>("names", context.getParams().getNames(), limits::kBlockNamesMax);
      // What the client sends next finds the names, or none of them.
      auto reading = session_->messages().HoldReading();
      return InTurns(session_, Method::kPublish, parts_.long_calls, bound_->cache.owner,
                     [names] { return names->ReadNext(); })
          .then([this, context, names, reading = std::move(reading)]() mutable -> kj::Promise<void> {
            if (!names->status().ok()) {
              ServeError(*session_, Method::kPublish, names->status(), context);
              return kj::READY_NOW;
            }
            context.releaseParams();
            // What others find must be there, and finite.
            if (calls().HasWritten(*session_, bound_->cache, id_)) {
              return PublishWritten(names->Take(), context).attach(std::move(reading));
            }
            reading = nullptr;
            return publish_
                .Publish(names->Take(), bound_->config.layout.page_tokens,
                         [session = session_, bound = bound_, id = id_] {
                           return bound->calls->WhenAllWritten(session, bound->cache, id);
                         })
                .then(
                    [this, context](absl::StatusOr<PublishResult> result) mutable { WritePublished(result, context); });
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> HandOffNow(HandOffContext context) {
    return Serve(*session_, Method::kHandOff, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto params = context.getParams();
      KV_ASSIGN_OR_RETURN(SharedBlob blob, ReadBlob(params.getBlob()));
      KV_ASSIGN_OR_RETURN(HandOffTargets targets, ReadTargets(*parts_.peers_allowed, bound_->config, params));
      auto sent = Send(std::move(targets), std::move(blob));
      context.releaseParams();
      return sent
          .then([context, session = session_](absl::StatusOr<SentHandOff> result) mutable {
            WriteSent(*session, Method::kHandOff, result, context.getResults().initReply());
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> BeginHandOffNow(BeginHandOffContext context) {
    return Serve(*session_, Method::kBeginHandOff, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto params = context.getParams();
      KV_ASSIGN_OR_RETURN(HandOffTargets targets, ReadTargets(*parts_.peers_allowed, bound_->config, params));
      const uint64_t tokens = params.getTokens();
      const int64_t ms = targets.timeout_ms;
      auto beginning = Begin(tokens, std::move(targets));
      context.releaseParams();
      return beginning
          .then([this, context, ms](absl::StatusOr<kj::Own<CancelOnDrop>> begun) mutable {
            if (!begun.ok()) {
              return ServeError(*session_, Method::kBeginHandOff, begun.status(), context);
            }
            kj::Own<CancelOnDrop> hand_off = *std::move(begun);
            const std::string& ticket = (*hand_off)->ticket();
            auto results = context.getResults();
            results.setTicket(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(ticket.data()), ticket.size()));
            results.setPeer(TextOf((*hand_off)->peer()));
            HandOffService::Appended appended;
            appended.written = [loop = parts_.loop, session = session_, bound = bound_, id = id_, ms] {
              return WithinMs(loop, WhenWritten(session, bound, id), ms);
            };
            appended.look = [session = session_, bound = bound_, id = id_]() -> absl::StatusOr<bool> {
              KV_RETURN_IF_ERROR(bound->calls->CheckUsable(*session, bound->cache, id));
              return bound->calls->HasWritten(*session, bound->cache, id);
            };
            results.setHandOff(kj::heap<HandOffService>(session_, thisCap(), kj::mv(hand_off), std::move(appended)));
          })
          .attach(thisCap());
    });
  }

  // Out of the cache's memory as its pages are written; where that cannot be, by way of the host's.
  kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> Begin(uint64_t tokens, HandOffTargets targets) {
    using Begun = absl::StatusOr<kj::Own<CancelOnDrop>>;
    const auto list = [parts = &parts_, session = session_, bound = bound_, id = id_, tokens,
                       will_append = targets.will_append](ExportWay way) {
      return [=](KeptRaw kept_raw) -> absl::StatusOr<std::unique_ptr<ExportBeginning>> {
        KV_RETURN_IF_ERROR(bound->calls->CheckUsable(*session, bound->cache, id));
        PageStore& store = *parts->store;
        KV_ASSIGN_OR_RETURN(auto beginning, store.exports().BeginGrowing(id, tokens, {will_append, way, kept_raw}));
        if (store.exports().AwaitsWrites(id)) {
          bound->calls->TellWhenWritten(*session, bound->cache, id, 0, store.Describe(id)->layer_tokens);
        }
        return beginning;
      };
    };
    return parts_.outgoing->Begin(list(ExportWay::kDirect), targets)
        .then([this, outgoing = parts_.outgoing, list, targets](Begun begun) -> kj::Promise<Begun> {
          if (!calls().GoesByHost(begun.status())) return begun;
          return outgoing->Begin(list(ExportWay::kByHost), targets);
        });
  }

  // Out of the cache's memory; where that cannot be, by way of the host's: what is sent is then a copy there, which
  // goes with the promise.
  kj::Promise<absl::StatusOr<SentHandOff>> Send(HandOffTargets targets, SharedBlob blob) {
    using Sent = kj::Promise<absl::StatusOr<SentHandOff>>;
    // Made once for each peer that is tried, perhaps much later.
    auto list = [store = parts_.store, session = session_, bound = bound_, id = id_, will_append = targets.will_append](
                    KeptRaw kept_raw) -> absl::StatusOr<std::unique_ptr<ExportBeginning>> {
      KV_RETURN_IF_ERROR(bound->calls->CheckUsable(*session, bound->cache, id));
      if (bound->calls->HasWritten(*session, bound->cache, id))
        return store->exports().BeginWhole(id, {.will_append = will_append, .kept_raw = kept_raw});
      return FieldError(absl::StatusCode::kFailedPrecondition, "sequence", absl::StrCat(id, ", which goes on"),
                        "one that nothing is appended to until a peer has accepted it");
    };
    // Deadlines of its parts, which know more, come first.
    const int64_t ms = targets.timeout_ms + targets.room_ms;
    auto deadline = parts_.loop->timer().afterDelay((ms + kDeadlineGraceMs) * kj::MILLISECONDS).then([ms] {
      return absl::StatusOr<SentHandOff>(absl::DeadlineExceededError(
          absl::StrCat("the hand-off did not end within ", ms, " ms, its copy to the host included")));
    });
    return OnceWritten<SentHandOff>(
               session_, bound_, id_,
               [outgoing = parts_.outgoing, list, targets, blob] { return outgoing->Send(list, targets, blob); })
        .then([this, targets, blob](absl::StatusOr<SentHandOff> sent) -> Sent {
          if (!calls().GoesByHost(sent.status())) return sent;
          return SendFromHost(parts_, session_, bound_, id_, targets, blob);
        })
        .exclusiveJoin(kj::mv(deadline));
  }
  static kj::Promise<absl::Status> WithinMs(EventLoop* loop, kj::Promise<absl::Status> promise, int64_t ms) {
    auto deadline = loop->timer().afterDelay(ms * kj::MILLISECONDS).then([ms] {
      return absl::Status(absl::DeadlineExceededError(
          absl::StrCat("what was appended was not written within ", ms, " ms: is the engine's stream stuck?")));
    });
    return promise.exclusiveJoin(kj::mv(deadline));
  }
  static kj::Promise<absl::StatusOr<SentHandOff>> SendFromHost(const SequenceParts& parts,
                                                               const std::shared_ptr<Session>& session,
                                                               const std::shared_ptr<const BoundCache>& bound,
                                                               SequenceId id, HandOffTargets targets, SharedBlob blob) {
    using Sent = kj::Promise<absl::StatusOr<SentHandOff>>;
    const auto copy = [&parts, id] { return parts.arrivals->Await(parts.store->Copy(id, CacheConfig::kHost)); };
    return OnceWritten<Arrived>(session, bound, id, copy)
        .then([&parts, targets = std::move(targets),
               blob = std::move(blob)](absl::StatusOr<Arrived> copy) mutable -> Sent {
          if (!copy.ok()) return absl::StatusOr<SentHandOff>(copy.status());
          auto list = [store = parts.store, id = copy->sequence(),
                       will_append = targets.will_append](KeptRaw kept_raw) {
            return store->exports().BeginWhole(id, {.will_append = will_append, .kept_raw = kept_raw});
          };
          auto sent = parts.outgoing->Send(std::move(list), std::move(targets), std::move(blob));
          return sent.attach(kj::heap<Arrived>(*std::move(copy)));
        });
  }
  // Calls `then` in the very turn in which everything that was appended to the sequence is in its pages, and nothing is
  // wrong with it: a call that comes in between would append more.
  template <typename T, typename Then>
  static kj::Promise<absl::StatusOr<T>> OnceWritten(const std::shared_ptr<Session>& session,
                                                    const std::shared_ptr<const BoundCache>& bound, SequenceId id,
                                                    Then then) {
    if (bound->calls->HasWritten(*session, bound->cache, id)) {
      const absl::Status found = bound->calls->CheckUsable(*session, bound->cache, id);
      if (!found.ok()) return absl::StatusOr<T>(found);
      return then();
    }
    return bound->calls->WhenAllWritten(session, bound->cache, id)
        .then([session, bound, id,
               then = std::move(then)](absl::Status appended) mutable -> kj::Promise<absl::StatusOr<T>> {
          if (!appended.ok()) return absl::StatusOr<T>(appended);
          return OnceWritten<T>(session, bound, id, std::move(then));  // the engine may have gone on meanwhile
        });
  }
  static kj::Promise<absl::Status> WhenWritten(const std::shared_ptr<Session>& session,
                                               const std::shared_ptr<const BoundCache>& bound, SequenceId id) {
    return OnceWritten<bool>(session, bound, id, [] { return absl::StatusOr<bool>(true); })
        .then([](absl::StatusOr<bool> written) { return written.status(); });
  }

  kj::Promise<void> PublishWritten(std::vector<BlockName> names, PublishContext context) {
    absl::Status usable = calls().CheckUsable(*session_, bound_->cache, id_);
    auto begun = usable.ok() ? store().long_calls().BeginPublish(id_, std::move(names)) : std::move(usable);
    if (!begun.ok()) {
      WritePublished(begun.status(), context);
      return kj::READY_NOW;
    }
    const std::shared_ptr<Publication> publication = *std::move(begun);
    return DoLongCall(session_, Method::kPublish, parts_, bound_->cache.owner, publication)
        .then([this, context, publication]() mutable { WritePublished(publication->result(), context); });
  }
  void WritePublished(const absl::StatusOr<PublishResult>& result, PublishContext& context) {
    if (!result.ok()) return ServeError(*session_, Method::kPublish, result.status(), context);
    auto reply = context.getResults().initReply();
    reply.setPublished(static_cast<uint32_t>(result->published));
    reply.setShared(static_cast<uint32_t>(result->shared));
    reply.setDeferred(static_cast<uint32_t>(result->deferred));
  }
  PageStore& store() { return *parts_.store; }
  const MemoryCalls& calls() const { return *bound_->calls; }

  const std::shared_ptr<Session> session_;
  const SequenceParts& parts_;
  const SequenceId id_;
  const std::shared_ptr<const BoundCache> bound_;
  WrittenPublish publish_;
};

}  // namespace

api::Sequence::Client MakeSequenceService(std::shared_ptr<Session> session, const SequenceParts& parts,
                                          SequenceId sequence, std::shared_ptr<const BoundCache> cache) {
  return parts.disposals->Make<SequenceService>(std::move(session), parts, sequence, std::move(cache));
}

}  // namespace kvmanager
