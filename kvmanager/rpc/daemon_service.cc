// Daemon (the bootstrap capability) and Arena.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/gpu/make_device_codec.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

static_assert(DeviceArena::kBytesMax == limits::kArenaBytesMax);
static_assert(DeviceRegion::kGranularityBytes % limits::kArenaBytesStep == 0);

class ArenaService final : public api::Arena::Server {
 public:
  ArenaService(std::shared_ptr<Session> session, std::shared_ptr<Region> region)
      : session_(std::move(session)), region_(std::move(region)), id_(session_->AddArena(region_)) {}
  ~ArenaService() { session_->RemoveArena(id_); }

  kj::Maybe<int> getFd() override { return region_->fd(); }
  uint32_t id() const { return id_; }

 private:
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Region> region_;
  const uint32_t id_;
};

absl::StatusOr<std::unique_ptr<Region>> MakeRegion(uint64_t bytes) {
  Region::Options options;
  options.name = "kvmanager-arena";
  options.bytes = bytes;
  if (Fails(Failpoint::kArenaMap)) return absl::ResourceExhaustedError("failpoint arena.map");
  return Region::Create(options);
}

// The memory of an arena. The kernel takes long to give it, and to take it back: both are done in the background, and
// what is reserved for it is given back behind them. Destroyed on the loop's thread.
struct ArenaRegion {
  struct Freeing {
    WorkerPool* background;
    MessageQueue* queue;
    std::unique_ptr<ArenaMemory> reserved;
    void operator()(Region* region) {
      background->Post(WorkerPool::Priority::kEncode, [region = std::unique_ptr<Region>(region), queue = queue,
                                                       reserved = std::move(reserved)]() mutable {
        region.reset();
        queue->Post([reserved = std::move(reserved)] {});
      });
    }
  };

  absl::Status status;
  std::unique_ptr<ArenaMemory> reserved;  // where there is no region
  std::shared_ptr<Region> region;
};

std::string CleanName(capnp::Text::Reader text) {
  std::string name(ViewOf(text).substr(0, limits::kClientNameBytesMax));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return name;
}

class DaemonService final : public api::Daemon::Server {
 public:
  DaemonService(std::shared_ptr<Session> session, const DaemonParts& parts)
      : session_(std::move(session)), parts_(parts) {}

  kj::Promise<void> hello(HelloContext context) override {
    return Serve(
        *session_, Method::kHello, context,
        [&]() -> absl::StatusOr<kj::Promise<void>> {
          const auto request = context.getParams().getRequest();
          if (request.getApiMajor() != api::API_MAJOR) {
            return FieldError(absl::StatusCode::kFailedPrecondition, "apiMajor", absl::StrCat(request.getApiMajor()),
                              absl::StrCat(api::API_MAJOR));
          }
          std::optional<Digest> token;
          if (request.getToken().size() > 0) {
            KV_ASSIGN_OR_RETURN(token, parts_.principals->CheckToken(ViewOf(request.getToken())));
          }
          session_->Greet(CleanName(request.getClient()), token);
          auto reply = context.getResults().initReply();
          Describe(reply);
          return Done();
        },
        [&](const absl::Status& status) {
          auto reply = context.getResults().initReply();
          Describe(reply);
          WriteStatus(status, reply.initStatus());
        });
  }

  kj::Promise<void> openCache(OpenCacheContext context) override {
    return Serve(*session_, Method::kOpenCache, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(CheckGreeted());
      KV_ASSIGN_OR_RETURN(CacheConfig config, ReadCacheConfig(context.getParams().getConfig()));
      KV_ASSIGN_OR_RETURN(config.tenant, parts_.principals->TenantOf(session_->proof(), config.tenant));
      KV_ASSIGN_OR_RETURN(std::shared_ptr<const void> place, ReserveCache(session_));
      const WorkerPool::Owner owner = WorkerPool::OwnerOf(PayerName(config.tenant));
      context.releaseParams();
      Gpu* gpu = nullptr;
      if (config.device != CacheConfig::kHost) {
        KV_RETURN_IF_ERROR(ValidateCacheConfig(config));
        KV_ASSIGN_OR_RETURN(gpu, FindDevice(config.device));
      }
      // A codec may read a large artifact, and work on it.
      return OnWorker<absl::StatusOr<Codecs>>(
                 MakingWorkers(parts_.codec_workers, config.codec, parts_.background), parts_.queue, owner,
                 [registry = parts_.registry, config, gpu] { return MakeCodecs(*registry, config, gpu); })
          .then([context, session = session_, parts = &parts_.cache, config, owner,
                 place = std::move(place)](absl::StatusOr<Codecs> codecs) mutable {
            // Workers may be done with many at once.
            return parts->sequence.long_calls->Next(owner).then([context, session = std::move(session), parts,
                                                                 config = std::move(config), place = std::move(place),
                                                                 codecs = std::move(codecs)]() mutable {
              const LoopTurn turn(session->calls().turns(), MethodName(Method::kOpenCache));
              const absl::Status status =
                  OpenCache(session, *parts, std::move(place), config, std::move(codecs), context);
              if (status.ok()) return;
              ServeError(*session, Method::kOpenCache, status, context);
            });
          });
    });
  }

  kj::Promise<void> createArena(CreateArenaContext context) override {
    return Serve(*session_, Method::kCreateArena, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(CheckGreeted());
      if (!session_->proof().unix_socket) {
        return absl::FailedPreconditionError("arenas need a Unix socket; over TCP send tensors inline");
      }
      const uint64_t bytes = context.getParams().getBytes();
      KV_RETURN_IF_ERROR(session_->ReserveArena(bytes));
      ArenaRegion::Freeing freeing{parts_.background, parts_.queue, std::make_unique<ArenaMemory>(session_, bytes)};
      return OnWorker<ArenaRegion>(parts_.background, parts_.queue, BackgroundOwner(),
                                   [bytes, freeing = std::move(freeing)]() mutable {
                                     ArenaRegion made;
                                     absl::StatusOr<std::unique_ptr<Region>> region = MakeRegion(bytes);
                                     made.status = region.status();
                                     if (region.ok()) {
                                       made.region.reset(region->release(), std::move(freeing));
                                     } else {
                                       made.reserved = std::move(freeing.reserved);
                                     }
                                     return made;
                                   })
          .then([context, session = session_, disposals = parts_.cache.sequence.disposals](ArenaRegion made) mutable {
            if (!made.status.ok()) {
              return ServeError(*session, Method::kCreateArena, made.status, context);
            }
            auto arena = disposals->Make<ArenaService>(session, std::move(made.region));
            auto results = context.getResults();
            results.setId(arena->id());
            results.setArena(kj::mv(arena));
          });
    });
  }

  kj::Promise<void> openDevice(OpenDeviceContext context) override {
    return Serve(*session_, Method::kOpenDevice, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(CheckGreeted());
      KV_ASSIGN_OR_RETURN(Gpu* const gpu, FindDevice(context.getParams().getOrdinal()));
      KV_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceStream> stream, OpenDeviceStream(*gpu));
      auto results = context.getResults();
      results.setId(stream->id());
      WriteDeviceInfo(*gpu, results.initInfo());
      results.setStream(MakeDeviceStreamService(session_, gpu, stream));
      return Done();
    });
  }

  kj::Promise<void> createDeviceArena(CreateDeviceArenaContext context) override {
    return Serve(*session_, Method::kCreateDeviceArena, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(CheckGreeted());
      const auto params = context.getParams();
      KV_ASSIGN_OR_RETURN(Gpu* const gpu, FindDevice(params.getDevice()));
      KV_ASSIGN_OR_RETURN(const uint64_t bytes, DeviceArena::RoundedBytes(params.getBytes()));
      KV_RETURN_IF_ERROR(session_->ReserveArena(bytes));
      auto memory = std::make_unique<ArenaMemory>(session_, bytes);
      // Memory is zeroed, which is waited for.
      using MaybeArena = absl::StatusOr<std::unique_ptr<DeviceArena>>;
      return OnWorker<MaybeArena>(parts_.background, parts_.queue, BackgroundOwner(),
                                  [device = gpu->device(), bytes] { return DeviceArena::Make(device, bytes); })
          .then([context, session = session_, memory = std::move(memory), bytes](MaybeArena arena) mutable {
            if (!arena.ok()) {
              return ServeError(*session, Method::kCreateDeviceArena, arena.status(), context);
            }
            (*arena)->SetCharge(std::move(memory));
            auto results = context.getResults();
            uint32_t id = 0;
            results.setArena(MakeDeviceArenaService(session, *std::move(arena), &id));
            results.setId(id);
            results.setBytes(bytes);
          });
    });
  }

  kj::Promise<void> admin(AdminContext context) override {
    return Serve(*session_, Method::kAdmin, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_RETURN_IF_ERROR(CheckGreeted());
      if (!session_->proof().admin) {
        const absl::Status refused = NoAdminHere();
        // Clients of daemons that had Admin everywhere do not look at the status: their calls end with this.
        context.getResults().setAdmin(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                                                    kj::str(std::string(refused.message()).c_str())));
        return refused;
      }
      context.getResults().setAdmin(MakeAdminService(session_, parts_.admin));
      return Done();
    });
  }

  kj::Promise<void> ping(PingContext context) override {
    context.allowCancellation();
    session_->calls().NoteCall(Method::kPing);
    return kj::READY_NOW;
  }

 private:
  struct Codecs {
    std::shared_ptr<const Codec> codec;
    std::shared_ptr<const DeviceCodec> device;  // of a cache on a GPU
  };
  static absl::StatusOr<Codecs> MakeCodecs(const CodecRegistry& registry, const CacheConfig& config, Gpu* gpu) {
    Codecs codecs;
    KV_ASSIGN_OR_RETURN(codecs.codec, CacheDirectory::MakeCodec(registry, config));
    if (gpu != nullptr) {
      KV_ASSIGN_OR_RETURN(codecs.device, MakeDeviceCodec(gpu->device(), gpu->streams(), *codecs.codec, config.layers));
    }
    return codecs;
  }
  static absl::Status OpenCache(const std::shared_ptr<Session>& session, const CacheParts& parts,
                                std::shared_ptr<const void> place, const CacheConfig& config,
                                absl::StatusOr<Codecs> codecs, OpenCacheContext& context) {
    KV_RETURN_IF_ERROR(codecs.status());
    PageStore& store = *parts.store;
    KV_ASSIGN_OR_RETURN(const CacheId cache, store.caches().Open(config, std::move(codecs->codec)));
    KV_ASSIGN_OR_RETURN(const CacheInfo info, store.caches().Describe(cache));
    auto results = context.getResults();
    WriteCacheInfo(info, results.initInfo());
    results.setCache(MakeCacheService(session, parts, std::move(place), cache, std::move(codecs->device)));
    return absl::OkStatus();
  }

  absl::Status NoAdminHere() const {
    const std::string& where = parts_.facts->admin_listen;
    const std::string bound =
        where.empty()
            ? "the admin socket, which this daemon has not: start it with --admin-listen unix:PATH"
            : absl::StrCat("the admin socket: connect to ", where, " (--admin-listen), as the daemon's user or root");
    return FieldError(absl::StatusCode::kPermissionDenied, "the socket of this call to Admin", "one for engines",
                      bound);
  }

  // What connections ask for that names no tenant: a share for each of them.
  WorkerPool::Owner BackgroundOwner() const { return WorkerPool::Owner(reinterpret_cast<uintptr_t>(session_.get())); }

  absl::Status CheckGreeted() const {
    return session_->handshake_done() ? absl::OkStatus() : absl::FailedPreconditionError("call hello first");
  }

  /// The GPU of this ordinal. Errors: FAILED_PRECONDITION over TCP and where the daemon has no GPU pool, saying what to
  /// do; NOT_FOUND for another ordinal.
  absl::StatusOr<Gpu*> FindDevice(int ordinal) const {
    if (!session_->proof().unix_socket) {
      return absl::FailedPreconditionError("GPU memory is shared over Unix sockets alone: connect to unix:PATH");
    }
    if (parts_.gpus.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "this daemon uses no GPU: start it with --device-pool-bytes BYTES (it sees: ", parts_.facts->gpus, ")"));
    }
    if (Gpu* const gpu = FindGpu(parts_.gpus, ordinal); gpu != nullptr) return gpu;
    return FieldError(
        absl::StatusCode::kNotFound, "GPU", absl::StrCat(ordinal),
        absl::StrCat("one of the daemon's --devices, ", absl::StrJoin(parts_.gpus, ",", [](std::string* out, Gpu* gpu) {
                       absl::StrAppend(out, gpu->ordinal());
                     })));
  }

  // This connection has no stream on `gpu` yet.
  absl::StatusOr<std::shared_ptr<DeviceStream>> OpenDeviceStream(Gpu& gpu) const {
    if (session_->gpus().StreamOf(gpu.ordinal()) != nullptr) {
      return FieldError(absl::StatusCode::kFailedPrecondition,
                        absl::StrCat("streams of this connection on GPU ", gpu.ordinal()), "2", "at most 1");
    }
    return gpu.streams()->Open(session_->proof().uid.value_or(UINT32_MAX));
  }

  void WriteDeviceInfo(Gpu& gpu, api::DeviceInfo::Builder out) const {
    const DeviceInfo& info = gpu.device()->info();
    out.setOrdinal(gpu.ordinal());
    out.setUuid(capnp::Data::Reader(info.uuid.data(), info.uuid.size()));
    out.setName(TextOf(info.name));
    out.setPoolBytes(gpu.pool()->capacity_bytes());
    out.setSlabBytes(gpu.pool()->slab_bytes());
    out.setSlabs(gpu.pool()->slabs());
    out.setSamplesQueries(parts_.samples_queries);
  }

  void Describe(api::HelloReply::Builder& reply) {
    const DaemonFacts& facts = *parts_.facts;
    reply.setApiMajor(api::API_MAJOR);
    reply.setApiMinor(api::API_MINOR);
    reply.setBootEpoch(facts.boot_epoch);
    reply.setVersion(TextOf(facts.version));
    std::vector<const char*> names = {"inline",        "hand-off",    "hand-off-stream", "output-factors",
                                      "prompt-tokens", "choose-peer", "recompute",       "read",
                                      "metrics-text",  "tokens",      "limits",          "blocks",
                                      "explain",       "retain",      "upgrade",         "prefetch"};
    if (parts_.cache.block_calls->MayMap(*session_)) names.push_back("map-blocks");
    if (!session_->proof().admin) names.push_back("admin-socket");
    if (session_->proof().unix_socket) names.push_back("arena");
    if (session_->proof().unix_socket && !parts_.gpus.empty()) {
      names.push_back("device");
      names.push_back("device-blocks");
    }
    if (facts.busy_polls) names.push_back("busy-poll");
    auto features = reply.initFeatures(names.size());
    for (size_t i = 0; i < names.size(); ++i) features.set(i, names[i]);
    const auto codecs = parts_.registry->Names();
    auto codec_names = reply.initCodecs(codecs.size());
    uint32_t i = 0;
    for (const auto& [name, help] : codecs) codec_names.set(i++, TextOf(name));
    reply.setMessageBytesMax(limits::kMessageBytesMax);
    reply.setPeerAddress(TextOf(facts.peer_listen));
  }

  const std::shared_ptr<Session> session_;
  const DaemonParts& parts_;
};

}  // namespace

api::Daemon::Client MakeDaemonService(std::shared_ptr<Session> session, const DaemonParts& parts) {
  return kj::heap<DaemonService>(std::move(session), parts);
}

}  // namespace kvmanager
