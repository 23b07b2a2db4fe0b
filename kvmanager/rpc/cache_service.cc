// Cache.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/load_blocks.h"
#include "kvmanager/rpc/output_factors.h"
#include "kvmanager/rpc/prefetch_call.h"
#include "kvmanager/rpc/retain_call.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/rpc/verify_blocks.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

class CacheService final : public api::Cache::Server {
 public:
  CacheService(std::shared_ptr<Session> session, const CacheParts& parts, std::shared_ptr<const void> place, CacheId id,
               std::shared_ptr<const DeviceCodec> device_codec)
      : session_(std::move(session)), parts_(parts), place_(std::move(place)) {
    Bind(id, std::move(device_codec));
  }

  kj::Promise<void> info(InfoContext context) override {
    return Serve(*session_, Method::kCacheInfo, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(EnsureOpen());
      KV_ASSIGN_OR_RETURN(const CacheInfo info, store().caches().Describe(id()));
      WriteCacheInfo(info, context.getResults().initInfo());
      return Done();
    });
  }

  kj::Promise<void> match(MatchContext context) override {
    return Serve(*session_, Method::kMatch, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto requests = context.getParams().getRequests();
      KV_RETURN_IF_ERROR(CheckRequests(requests.size()));
      KV_RETURN_IF_ERROR(EnsureOpen());
      auto call = std::make_shared<MatchCall>(
          &store().caches(), parts_.matches, id(), requests,
          PrefetchingOf(session_, parts_.prefetch, bound_, context.getParams().getPrefetch()));
      return Match(session_, parts_.sequence.long_calls, bound_->cache.owner, std::move(call), context)
          .attach(thisCap());
    });
  }

  // Each request has an answer of its own; a malformed list is answered for all of them.
  kj::Promise<void> createSequences(CreateSequencesContext context) override {
    uint32_t requests = 0;
    const auto refuse_all = [](CreateSequencesContext& to, uint32_t count, const absl::Status& status) {
      for (auto reply : to.getResults().initReplies(count)) WriteStatus(status, reply.initStatus());
    };
    return Serve(
        *session_, Method::kCreateSequences, context,
        [&]() -> absl::StatusOr<kj::Promise<void>> {
          auto creation = std::make_shared<Creation>(Creation{.list = context.getParams().getRequests()});
          requests = static_cast<uint32_t>(std::min<size_t>(creation->list.size(), limits::kSequenceRequestsMax));
          KV_RETURN_IF_ERROR(CheckRequests(creation->list.size()));
          KV_RETURN_IF_ERROR(EnsureOpen());
          return InTurns(session_, Method::kCreateSequences, parts_.sequence.long_calls, bound_->cache.owner,
                         [creation] {
                           auto& reader = creation->reader;
                           if (!reader) reader = PrefixReader(creation->list, creation->prefixes.size());
                           if (reader->ReadNext()) return true;
                           creation->wrong = reader->status();
                           if (!creation->wrong.ok()) return false;
                           creation->prefixes.push_back(reader->Take());
                           reader = nullptr;
                           return creation->prefixes.size() < creation->list.size();
                         })
              .then([this, creation, context, requests, refuse_all]() mutable -> kj::Promise<void> {
                if (!creation->wrong.ok()) {
                  session_->calls().NoteError(Method::kCreateSequences, creation->wrong);
                  refuse_all(context, requests, creation->wrong);
                  return kj::READY_NOW;
                }
                creation->replies = context.getResults().initReplies(requests);
                return CreateNext(creation);
              })
              .attach(thisCap());
        },
        [&](const absl::Status& status) { refuse_all(context, requests, status); });
  }

  kj::Promise<void> step(StepContext context) override {
    return Serve(*session_, Method::kStep, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(
          const CheckedStep step,
          CheckStep(
              config(), context.getParams().getRequest(),
              [this](uint32_t arena) { return bound_->calls->ArenaBytes(*session_, bound_->cache, arena); },
              [this](SequenceId sequence) { return session_->Holds(sequence, id()); }));
      return bound_->calls->Step(session_, bound_->cache, step, context);
    });
  }

  kj::Promise<void> read(ReadContext context) override {
    return Serve(*session_, Method::kRead, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(const CheckedRead read,
                          CheckRead(
                              config(), context.getParams().getRequest(),
                              [this](uint32_t arena) { return session_->ArenaBytes(arena); },
                              [this](SequenceId sequence) { return session_->Holds(sequence, id()); }));
      return parts_.reads->Run(session_, *bound_, read, context);
    });
  }

  kj::Promise<void> readBlocks(ReadBlocksContext context) override {
    return ServeBlocks(Method::kReadBlocks, context, &BlockCalls::Read);
  }

  kj::Promise<void> writeBlocks(WriteBlocksContext context) override {
    return ServeBlocks(Method::kWriteBlocks, context, &BlockCalls::Write);
  }

  kj::Promise<void> bindSlabs(BindSlabsContext context) override {
    return ServeBlocks(Method::kMapBlocks, context, &BlockCalls::BindSlabs);
  }

  kj::Promise<void> mapSlab(MapSlabContext context) override {
    return ServeBlocks(Method::kMapBlocks, context, &BlockCalls::MapSlab);
  }

  kj::Promise<void> prefetch(PrefetchContext context) override {
    return Serve(*session_, Method::kPrefetch, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(EnsureOpen());
      return Prefetch(session_, parts_.prefetch, bound_->cache.owner, id(), context).attach(thisCap());
    });
  }

  kj::Promise<void> retain(RetainContext context) override {
    return Serve(*session_, Method::kRetain, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(EnsureOpen());
      return Retain(session_, parts_.sequence.long_calls, bound_->cache.owner, &store().caches(), id(), context)
          .attach(thisCap());
    });
  }

  kj::Promise<void> extend(ExtendContext context) override {
    return Serve(*session_, Method::kExtend, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      return bound_->calls->Extend(session_, bound_->cache, context);
    });
  }

  kj::Promise<void> openProjections(OpenProjectionsContext context) override {
    return Serve(*session_, Method::kOpenProjections, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(EnsureOpen());
      if (config().hidden == 0) {
        return InvalidField("hiddenSize", 0, "above 0, as the cache was opened, to register projections");
      }
      KV_ASSIGN_OR_RETURN(const CacheInfo info, store().caches().Describe(id()));
      KV_ASSIGN_OR_RETURN(const recompute::ProjectionModel model,
                          ReadProjectionModel(context.getParams().getFacts(), config()));
      KV_ASSIGN_OR_RETURN(std::shared_ptr<ProjectionSet> set,
                          parts_.recomputer->Open(info.digest, PayerName(config().tenant), model, config().device));
      context.getResults().setProjections(
          MakeProjectionsService(session_, parts_.recomputer, std::move(set), config()));
      return Done();
    });
  }

  kj::Promise<void> outputFactors(OutputFactorsContext context) override {
    return Serve(*session_, Method::kOutputFactors, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const uint32_t layer = context.getParams().getLayer();
      if (layer >= static_cast<uint32_t>(config().layers)) {
        return InvalidField("layer", layer, absl::StrCat("0..", config().layers - 1));
      }
      if (!bound_->cache.codec->attention().folds_output(static_cast<int>(layer))) return Done();
      const uint64_t bytes = OutputFactorBytes(config().layout);
      if (bytes > limits::kReplyBytesMax) {
        return FieldError(absl::StatusCode::kResourceExhausted, "factors", absl::StrCat(bytes, " bytes"),
                          absl::StrCat("at most ", limits::kReplyBytesMax, " bytes"));
      }
      KV_ASSIGN_OR_RETURN(kj::Promise<MessageShare::Charge> room,
                          session_->messages().ReserveReply(SessionMessages::BytesToReserve(bytes)));
      return room
          .then([this, layer, context](MessageShare::Charge charge) mutable {
            return OnWorker<absl::StatusOr<AlignedBuffer>>(
                       WorkersOf(*bound_->cache.codec, parts_.sequence.workers), queue(), bound_->cache.owner,
                       [codec = bound_->cache.codec, layout = config().layout, layer] {
                         return MakeOutputFactors(*codec, layout, static_cast<int>(layer));
                       })
                .then([this, context, charge = std::move(charge)](absl::StatusOr<AlignedBuffer> factors) mutable {
                  if (!factors.ok()) return ServeError(*session_, Method::kOutputFactors, factors.status(), context);
                  auto results = context.getResults(capnp::MessageSize{kReplyWords, 0});
                  const auto orphanage = capnp::Orphanage::getForMessageContaining(results);
                  ReplyBuffer reply(*std::move(factors));
                  results.adoptFactors(SessionMessages::DataOf(orphanage, reply));
                  results.setFolds(true);
                  MessageShare::Lent parts;
                  parts.push_back(std::move(reply));
                  session_->messages().SendReply(std::move(charge), std::move(parts));
                });
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> claim(ClaimContext context) override {
    return Serve(*session_, Method::kClaim, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(session_->CheckRoomForSequence(Session::Begins::kBefore));
      KV_RETURN_IF_ERROR(EnsureOpen());
      const auto bytes = context.getParams().getTicket();
      const std::string ticket(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
      Tickets& tickets = parts_.incoming->tickets();
      if (const auto waiting = tickets.Find(ticket, id()); waiting.ok() && !IsElsewhere(*waiting)) {
        KV_ASSIGN_OR_RETURN(const Tickets::Claimed claimed, tickets.Claim(ticket, id()));
        KV_RETURN_IF_ERROR(WriteClaimed(claimed, context));
        return Done();
      }
      context.releaseParams();
      return tickets.WhenShown(ticket, id())
          .then([this, ticket, context](absl::Status shown) mutable {
            return shown.ok() ? ClaimShown(ticket, context) : kj::Promise<absl::Status>(std::move(shown));
          })
          .then([this, context](absl::Status status) mutable {
            if (status.ok()) return;
            ServeError(*session_, Method::kClaim, status, context);
          })
          .attach(thisCap());
    });
  }

 private:
  static constexpr size_t kReplyWords = 32;  // of a reply without its factors

  template <typename Context, typename Call>
  kj::Promise<void> ServeBlocks(Method method, Context& context, Call call) {
    return Serve(*session_, method, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(EnsureOpen());
      return (parts_.block_calls->*call)(session_, *bound_, context);
    });
  }

  // One call of createSequences: its requests are read first, then served one behind the other.
  struct Creation {
    PrefixRequests list;
    std::unique_ptr<BlockNamesReader> reader;  // of the next prefix
    std::vector<std::vector<BlockName>> prefixes;
    absl::Status wrong;
    capnp::List<api::SequenceReply>::Builder replies = nullptr;
    uint32_t next = 0;                             // of the requests
    std::unique_ptr<DiskLoad> load;                // of what the disk has of the prefix of request `next`
    bool loaded = false;                           // all of it, or there is no disk
    std::shared_ptr<SequenceBeginning> beginning;  // of request `next`
    bool compares = false;                         // before that goes on
    std::unique_ptr<BlockCheck> check;             // of blocks that request `next` begins with, to be fetched
    std::vector<kj::Promise<void>> fetching;
  };

  // Blocks are verified before the loop looks at them; the next request may begin with the same.
  kj::Promise<void> CreateNext(std::shared_ptr<Creation> creation) {
    return InTurns(session_, Method::kCreateSequences, parts_.sequence.long_calls, bound_->cache.owner,
                   [this, creation] { return Create(*creation); })
        .then([this, creation]() -> kj::Promise<void> {
          if (creation->load != nullptr && !creation->loaded) {
            return WhenMore(*creation->load).then([this, creation] { return CreateNext(creation); });
          }
          if (std::exchange(creation->compares, false)) {
            return OnWorkerInTurns(parts_.sequence.workers, queue(), WorkerPool::Priority::kAttend, bound_->cache.owner,
                                   [creation] { return creation->beginning->CompareOne(); })
                .then([this, creation] { return CreateNext(creation); });
          }
          if (creation->check != nullptr) {
            return Verify(std::move(creation->check)).then([this, creation] {
              CreateVerified(*creation);
              return CreateNext(creation);
            });
          }
          auto all = kj::heapArrayBuilder<kj::Promise<void>>(creation->fetching.size());
          for (kj::Promise<void>& each : creation->fetching) all.add(kj::mv(each));
          return kj::joinPromises(all.finish());
        });
  }
  // False: all are created, or the next one's blocks are to come, to be compared or verified.
  bool Create(Creation& creation) {
    if (creation.next == creation.prefixes.size()) return false;
    if (!creation.loaded) {
      std::unique_ptr<DiskLoad>& load = creation.load;
      if (load == nullptr) load = store().long_calls().BeginLoad(id(), &creation.prefixes[creation.next], 0);
      if (load != nullptr) {
        if (!load->done()) return load->DoPiece() || load->done();
        creation.prefixes[creation.next] = load->TakeNames();
      }
      creation.loaded = true;
    }
    if (!store().long_calls().Fetches(id())) return BeginNext(creation);
    auto check = store().caches().Check(id(), creation.prefixes[creation.next]);
    if (check.ok() && *check != nullptr) {
      creation.check = *std::move(check);
      return false;
    }
    CreateVerified(creation);
    return true;
  }
  bool BeginNext(Creation& creation) {
    absl::StatusOr<CreateResult> created;
    if (creation.beginning == nullptr) {
      absl::Status may = session_->CheckRoomForSequence(Session::Begins::kNow);
      if (may.ok()) may = EnsureOpen();  // it may have been purged since the call began
      auto begun = may.ok() ? store().long_calls().Begin(id(), std::move(creation.prefixes[creation.next]),
                                                         creation.list[creation.next].getPromptTokens())
                            : may;
      if (begun.ok()) {
        creation.beginning = *std::move(begun);
      } else {
        created = begun.status();
      }
    }
    if (creation.beginning != nullptr) {
      const LongCall::Next next = creation.beginning->DoPiece();
      creation.compares = next == LongCall::Next::kCompare;
      if (next != LongCall::Next::kDone) return !creation.compares;
      const absl::Status may = session_->CheckRoomForSequence(Session::Begins::kNow);
      created = may.ok() ? creation.beginning->Commit() : may;
      creation.beginning = nullptr;
    }
    WriteCreated(created, creation.replies[creation.next]);
    EndOf(creation);
    return true;
  }
  // What was loaded for the request is its sequence's now, or is pinned for it.
  static void EndOf(Creation& creation) {
    creation.load = nullptr;
    creation.loaded = false;
    ++creation.next;
  }
  void CreateVerified(Creation& creation) {
    const uint32_t i = creation.next;
    auto fetching = FetchOrCreate(creation.prefixes[i], creation.list[i].getPromptTokens(), creation.replies[i]);
    EndOf(creation);
    if (fetching.has_value()) creation.fetching.push_back(kj::mv(*fetching));
  }
  kj::Promise<void> Verify(std::unique_ptr<BlockCheck> check) {
    return VerifyBlocks(parts_.sequence.workers, queue(), bound_->cache.owner, session_->calls().turns(),
                        std::move(check));
  }

  // The sequence waits in its memory, perhaps while its last pages arrive. To a cache in another it comes as a copy,
  // once all of them are here; from one GPU to another by way of the host.
  kj::Promise<absl::Status> ClaimShown(const std::string& ticket, ClaimContext context) {
    IncomingHandOffs& incoming = *parts_.incoming;
    const absl::StatusOr<SequenceId> waiting = incoming.tickets().Find(ticket, id());
    if (!waiting.ok()) return waiting.status();
    if (!IsElsewhere(*waiting)) return ClaimHere(ticket, context);
    if (absl::Status begun = incoming.tickets().BeginClaim(ticket); !begun.ok()) return begun;
    return incoming.WhenSettled(*waiting)
        .then([this, id = *waiting] { return CopyHere(id); })
        .attach(kj::defer([&incoming, ticket] { incoming.tickets().EndClaim(ticket); }))
        .then([this, ticket, context](absl::StatusOr<Arrived> copy) mutable {
          return copy.ok() ? ClaimCopy(ticket, *std::move(copy), context) : copy.status();
        });
  }
  kj::Promise<absl::StatusOr<Arrived>> CopyHere(SequenceId id) {
    using Copied = kj::Promise<absl::StatusOr<Arrived>>;
    auto direct = store().Copy(id, config().device);
    if (!IsWrongMemory(direct.status())) return parts_.arrivals->Await(std::move(direct));
    return parts_.arrivals->Await(store().Copy(id, CacheConfig::kHost))
        .then([this](absl::StatusOr<Arrived> copy) -> Copied {
          if (!copy.ok()) return absl::StatusOr<Arrived>(copy.status());
          auto here = parts_.arrivals->Await(store().Copy(copy->sequence(), config().device));
          return here.attach(kj::heap<Arrived>(*std::move(copy)));
        });
  }
  absl::Status ClaimHere(const std::string& ticket, ClaimContext& context) {
    KV_RETURN_IF_ERROR(session_->CheckRoomForSequence(Session::Begins::kBefore));
    KV_ASSIGN_OR_RETURN(const Tickets::Claimed claimed, parts_.incoming->tickets().Claim(ticket, id()));
    return WriteClaimed(claimed, context);
  }
  absl::Status ClaimCopy(const std::string& ticket, Arrived copy, ClaimContext& context) {
    KV_RETURN_IF_ERROR(session_->CheckRoomForSequence(Session::Begins::kBefore));
    // It may have expired meanwhile.
    KV_ASSIGN_OR_RETURN(Tickets::Claimed claimed, parts_.incoming->tickets().Claim(ticket, id()));
    store().Drop(claimed.sequence);
    claimed.sequence = copy.Take().sequence;
    return WriteClaimed(claimed, context);
  }
  absl::Status WriteClaimed(const Tickets::Claimed& claimed, ClaimContext& context) {
    api::Sequence::Client sequence = MakeSequenceService(session_, parts_.sequence, claimed.sequence, bound_);
    KV_ASSIGN_OR_RETURN(const SequenceInfo info, store().Describe(claimed.sequence));
    auto results = context.getResults();
    auto reply = results.initReply();
    reply.setSequence(kj::mv(sequence));
    reply.setSequenceId(claimed.sequence);
    WriteHits({.hit_blocks = static_cast<int>(info.hit_blocks)}, reply.initMatch());
    results.setTokens(claimed.tokens);
    results.setBlob(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(claimed.blob.data()), claimed.blob.size()));
    return absl::OkStatus();
  }

  // Whether the sequence is this cache's in another memory.
  bool IsElsewhere(SequenceId sequence) {
    const auto info = store().Describe(sequence);
    if (!info.ok() || info->cache == id()) return false;
    const auto here = store().caches().Describe(id()), there = store().caches().Describe(info->cache);
    return here.ok() && there.ok() && here->digest == there->digest;
  }
  PageStore& store() { return *parts_.store; }
  MessageQueue* queue() const { return &parts_.sequence.loop->queue(); }
  const CacheConfig& config() const { return bound_->config; }
  CacheId id() const { return bound_->cache.id; }

  void Bind(CacheId id, std::shared_ptr<const DeviceCodec> device_codec) {
    const absl::StatusOr<CacheInfo> info = store().caches().Describe(id);
    KV_CHECK(info.ok());
    auto bound = std::make_shared<BoundCache>();
    bound->config = info->config;
    bound->calls = info->config.device == CacheConfig::kHost ? parts_.host_calls : parts_.device_calls;
    auto raw = parts_.registry->Create("raw", bound->config.layout);
    KV_CHECK(raw.ok());
    bound->cache = {id,
                    &bound->config,
                    store().caches().codec(id),
                    *std::move(raw),
                    std::move(device_codec),
                    WorkerPool::OwnerOf(PayerName(bound->config.tenant))};
    bound_ = session_->Bind(std::move(bound));
  }

  // A purge closes caches that hold nothing; this capability then opens its own anew.
  absl::Status EnsureOpen() {
    if (store().caches().codec(id()) != nullptr) return absl::OkStatus();
    KV_ASSIGN_OR_RETURN(const CacheId id, store().caches().Open(config(), bound_->cache.codec));
    Bind(id, bound_->cache.device_codec);
    return absl::OkStatus();
  }

  static absl::Status CheckRequests(size_t count) {
    if (count > 0 && count <= limits::kSequenceRequestsMax) return absl::OkStatus();
    return InvalidField("requests", absl::StrCat(count, " long"),
                        absl::StrCat("1..", limits::kSequenceRequestsMax, " long"));
  }

  // With the blocks that a lower tier has besides. Nothing: the reply is written.
  std::optional<kj::Promise<void>> FetchOrCreate(const std::vector<BlockName>& prefix, uint64_t prompt_tokens,
                                                 api::SequenceReply::Builder reply) {
    absl::Status may = session_->CheckRoomForSequence(Session::Begins::kNow);
    if (may.ok()) may = EnsureOpen();  // it may have been purged since the call began
    if (!may.ok()) {
      WriteCreated(may, reply);
      return std::nullopt;
    }
    auto fetched = store().Fetch(id(), prefix, prompt_tokens);
    if (!fetched.ok() || ((*fetched)->ready() && !(*fetched)->awaits_room())) {  // nothing has to be copied
      auto created = fetched.ok() ? (*fetched)->Commit() : fetched.status();
      if (fetched.ok()) fetched->reset();  // what it held makes room
      WriteCreated(OrOwnBlocks(std::move(created), prefix, prompt_tokens), reply);
      return std::nullopt;
    }
    return parts_.arrivals->Await(std::move(fetched))
        .then([this, prefix, prompt_tokens, reply](absl::StatusOr<Arrived> made) mutable {
          if (absl::Status may = session_->CheckRoomForSequence(Session::Begins::kNow); !may.ok())
            return WriteCreated(may, reply);
          using Created = absl::StatusOr<CreateResult>;
          WriteCreated(OrOwnBlocks(made.ok() ? Created(made->Take()) : Created(made.status()), prefix, prompt_tokens),
                       reply);
        });
  }
  // Where there is no room for all of it, what its own memory has is better than nothing.
  absl::StatusOr<CreateResult> OrOwnBlocks(absl::StatusOr<CreateResult> created, const std::vector<BlockName>& prefix,
                                           uint64_t prompt_tokens) {
    if (!absl::IsResourceExhausted(created.status())) return created;
    return store().Create(id(), prefix, prompt_tokens);
  }

  void WriteCreated(const absl::StatusOr<CreateResult>& created, api::SequenceReply::Builder reply) {
    if (!created.ok()) {
      session_->calls().NoteError(Method::kCreateSequences, created.status());
      return WriteStatus(created.status(), reply.initStatus());
    }
    reply.setSequence(MakeSequenceService(session_, parts_.sequence, created->sequence, bound_));
    reply.setSequenceId(created->sequence);
    WriteHits(created->match, reply.initMatch());
  }

  const std::shared_ptr<Session> session_;
  const CacheParts& parts_;
  const std::shared_ptr<const void> place_;  // ReserveCache
  std::shared_ptr<const BoundCache> bound_;
};

}  // namespace

api::Cache::Client MakeCacheService(std::shared_ptr<Session> session, const CacheParts& parts,
                                    std::shared_ptr<const void> place, CacheId cache,
                                    std::shared_ptr<const DeviceCodec> device_codec) {
  return parts.sequence.disposals->Make<CacheService>(std::move(session), parts, std::move(place), cache,
                                                      std::move(device_codec));
}

}  // namespace kvmanager
