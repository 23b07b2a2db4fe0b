// Admin: what kvctl shows and switches.
#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/cpu_isa.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/handoff/peer_choice.h"
#include "kvmanager/rpc/explain_call.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/prefetch_call.h"
#include "kvmanager/rpc/retain_call.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"

namespace kvmanager {
namespace {

class AdminService final : public api::Admin::Server {
 public:
  AdminService(std::shared_ptr<Session> session, const AdminParts& parts)
      : session_(std::move(session)), parts_(parts) {}

  kj::Promise<void> status(StatusContext context) override {
    return Answer(Method::kStatus, context, [&] {
      const DaemonFacts& facts = *parts_.facts;
      auto out = context.getResults().initStatus();
      out.setVersion(TextOf(facts.version));
      out.setBootEpoch(facts.boot_epoch);
      out.setUptimeSeconds(double(parts_.clock->NowNs() - facts.start_ns) * 1e-9);
      out.setDraining(parts_.drain->on());
      auto pools = out.initPools(1 + parts_.gpus.size());
      auto pool = pools[0];
      pool.setTier("host");
      pool.setCapacityBytes(parts_.host_pool->capacity_bytes());
      pool.setUsedBytes(parts_.host_pool->used_bytes());
      pool.setSlabBytes(parts_.host_pool->slab_bytes());
      pool.setFreeSlabs(parts_.host_pool->free_slabs());
      pool.setHugePages(TextOf(parts_.host_pool->huge_page_state()));
      for (size_t i = 0; i < parts_.gpus.size(); ++i) {
        const DevicePool& device_pool = *parts_.gpus[i]->pool();
        pools[1 + i].setTier(TextOf(absl::StrCat("device:", parts_.gpus[i]->ordinal())));
        pools[1 + i].setCapacityBytes(device_pool.capacity_bytes());
        pools[1 + i].setUsedBytes(device_pool.used_bytes());
        pools[1 + i].setSlabBytes(device_pool.slab_bytes());
        pools[1 + i].setFreeSlabs(device_pool.free_slabs());
      }
      if (const HostPinner* const pinner = parts_.pinner; pinner != nullptr) {
        out.setPinnedBytes(pinner->ready_bytes());
        out.setPinTotalBytes(pinner->total_bytes());
        if (pinner->done()) out.setPinError(TextOf(std::string(pinner->status().message())));
      }
      if (const std::optional<DiskFacts> disk = facts.disk(); disk.has_value()) {
        auto of = out.initDisk();
        of.setPath(TextOf(disk->path));
        of.setCapacityBytes(disk->capacity_bytes);
        of.setUsedBytes(disk->used_bytes);
        of.setBlocks(disk->blocks);
        of.setUnwrittenBlocks(disk->unwritten_blocks);
        of.setState(TextOf(disk->state));
      }
      if (const std::optional<KeptMemoryFacts> kept = facts.kept_memory(); kept.has_value()) {
        auto of = out.initKeptMemory();
        of.setStateDir(TextOf(kept->state_dir));
        of.setState(TextOf(kept->state));
        of.setPid(kept->pid);
        of.setUnclaimedBlocks(parts_.store->report().Use().unclaimed_blocks);
      }
      out.setGpus(TextOf(facts.gpus));
      out.setUcx(TextOf(facts.ucx()));
      uint64_t caches = 0, blocks = 0;
      parts_.store->caches().ForEachUse([&](const CacheUse& cache) {
        ++caches;
        blocks += cache.published_blocks;
      });
      out.setConnections(static_cast<uint32_t>(parts_.connections->open.Value()));
      out.setLeases(parts_.held->count());
      out.setWaitingHandOffs(parts_.incoming->tickets().size());
      out.setCaches(static_cast<uint32_t>(caches));
      out.setPublishedBlocks(blocks);
      out.setCpuTarget(IsaName(BestIsa()));
      out.setThreads(parts_.workers->threads());
      out.setListen(TextOf(facts.listen));
      out.setPeerListen(TextOf(facts.peer_listen));
      out.setMetricsListen(TextOf(facts.metrics_listen));
      out.setHttpListen(TextOf(facts.http_listen));
    });
  }

  kj::Promise<void> caches(CachesContext context) override {
    return Answer(Method::kCaches, context, [&] {
      const std::vector<CacheInfo> caches = parts_.store->caches().List();
      auto out = context.getResults().initCaches(caches.size());
      for (size_t i = 0; i < caches.size(); ++i) WriteCacheInfo(caches[i], out[i]);
    });
  }

  kj::Promise<void> sequences(SequencesContext context) override {
    return Serve(*session_, Method::kSequences, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      // As many as there may be, of whatever length: in turns.
      struct Listing {
        std::vector<SequenceId> ids;
        size_t looked = 0, written = 0;
        std::vector<SequenceInfo> found;
        capnp::List<api::SequenceInfo>::Builder out = nullptr;
      };
      auto listing = std::make_shared<Listing>();
      return parts_.long_calls->Next()
          .then([this, listing] {
            const LoopTurn turn(session_->calls().turns(), MethodName(Method::kSequences));
            listing->ids = parts_.store->report().SequenceIds();
            return parts_.long_calls->Next();
          })
          .then([this, listing] {
            return InTurns(session_, Method::kSequences, parts_.long_calls, WorkerPool::kDaemon,
                           [store = parts_.store, listing] {
                             if (listing->looked == listing->ids.size()) return false;
                             auto info = store->Describe(listing->ids[listing->looked++]);
                             if (info.ok()) listing->found.push_back(*std::move(info));
                             return true;
                           });
          })
          .then([this, listing, context]() mutable {
            listing->out = context.getResults().initSequences(listing->found.size());
            return InTurns(session_, Method::kSequences, parts_.long_calls, WorkerPool::kDaemon, [this, listing] {
              const size_t i = listing->written++;
              if (i < listing->found.size()) WriteHeldSequence(*parts_.held, listing->found[i], listing->out[i]);
              return i < listing->found.size();
            });
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> peers(PeersContext context) override {
    return Serve(*session_, Method::kPeers, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(std::vector<PeerInfo> peers, ListedPeers(context.getParams().getPeers()));
      const bool load = context.getParams().getLoad();
      context.releaseParams();
      std::vector<std::string> asked;
      for (const PeerInfo& peer : peers) {
        if (load && !peer.incoming) asked.push_back(peer.peer);
      }
      return parts_.outgoing->Ask(std::move(asked))
          .then([context, peers = std::move(peers), load](std::vector<PeerCandidate> answers) mutable {
            auto out = context.getResults().initPeers(peers.size());
            size_t next = 0;
            for (size_t i = 0; i < peers.size(); ++i) {
              WritePeer(peers[i], out[i]);
              if (load && !peers[i].incoming) WriteLoad(answers[next++].load, out[i]);
            }
          });
    });
  }

  kj::Promise<void> recompute(RecomputeContext context) override {
    return Answer(Method::kRecomputeStatus, context, [&] {
      const Recomputer& recomputer = *parts_.recomputer;
      auto out = context.getResults().initRecompute();
      out.setWeightBytes(recomputer.bytes());
      out.setWeightBytesMax(recomputer.bytes_max());
      const auto write = [](const Recomputer::Rate& rate, api::RecomputeStatus::Rate::Builder to) {
        to.setPerSecond(rate.per_second);
        to.setSamples(rate.samples);
        to.setStale(rate.stale);
      };
      const std::vector<Recomputer::SetInfo> sets = recomputer.Sets();
      auto out_sets = out.initSets(sets.size());
      for (size_t i = 0; i < sets.size(); ++i) {
        out_sets[i].setDigest(DataOf(sets[i].digest));
        out_sets[i].setHiddenSize(sets[i].hidden);
        out_sets[i].setKvWidth(sets[i].width);
        out_sets[i].setLayers(sets[i].layers);
        out_sets[i].setLayersReady(sets[i].layers_ready);
        out_sets[i].setChunkTokens(sets[i].chunk_tokens);
        out_sets[i].setDevice(sets[i].device);
        out_sets[i].setFailed(TextOf(sets[i].failed));
        write(sets[i].flops, out_sets[i].initFlops());
      }
      const auto gpus = recomputer.GpuInfos();
      auto out_devices = out.initDevices(gpus.size());
      for (size_t i = 0; i < gpus.size(); ++i) {
        out_devices[i].setOrdinal(gpus[i].ordinal);
        out_devices[i].setWeightBytes(gpus[i].bytes);
        out_devices[i].setWeightBytesMax(gpus[i].bytes_max);
      }
      const auto links = recomputer.Links();
      auto out_links = out.initLinks(links.size());
      for (size_t i = 0; i < links.size(); ++i) {
        out_links[i].setPeer(TextOf(links[i].first));
        write(links[i].second, out_links[i].initBytes());
      }
    });
  }

  // Hundreds of series are a millisecond's work.
  kj::Promise<void> metrics(MetricsContext context) override {
    return Serve(*session_, Method::kMetricsText, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      return OnWorker<std::string>(parts_.workers, parts_.queue, WorkerPool::kDaemon,
                                   [all = parts_.all_metrics] { return all->Text(); })
          .then([context](std::string text) mutable { context.getResults().setText(TextOf(text)); });
    });
  }

  kj::Promise<void> limits(LimitsContext context) override {
    return Answer(Method::kLimits, context, [&] {
      const std::vector<Limit> limits = parts_.facts->limits();
      auto out = context.getResults().initLimits(static_cast<uint>(limits.size()));
      for (uint i = 0; i < out.size(); ++i) {
        const Limit& limit = limits[i];
        out[i].setName(TextOf(limit.name));
        out[i].setScope(TextOf(limit.scope));
        out[i].setUnit(TextOf(limit.unit));
        out[i].setLimit(limit.limit);
        out[i].setUsed(limit.used.value_or(0));
        out[i].setUsedKnown(limit.used.has_value());
        out[i].setFlag(TextOf(limit.flag));
        out[i].setBounds(TextOf(limit.bounds));
      }
    });
  }

  kj::Promise<void> explain(ExplainContext context) override {
    return Serve(*session_, Method::kExplain, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto params = context.getParams();
      auto call = std::make_shared<ExplainCall>(&parts_.store->report(), params.getCacheId(), params.getNames());
      return InTurns(session_, Method::kExplain, parts_.long_calls, WorkerPool::kDaemon,
                     [call] { return call->DoPiece(); })
          .then([this, call, context]() mutable -> kj::Promise<void> {
            if (!call->status().ok()) {
              ServeError(*session_, Method::kExplain, call->status(), context);
              return kj::READY_NOW;
            }
            call->BeginWriting(context.getResults());
            return InTurns(session_, Method::kExplain, parts_.long_calls, WorkerPool::kDaemon,
                           [call] { return call->WriteSome(); });
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> retain(RetainContext context) override {
    return Serve(*session_, Method::kRetain, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const CacheId cache = context.getParams().getCacheId();
      return Retain(session_, parts_.long_calls, WorkerPool::kDaemon, &parts_.store->caches(), cache, context)
          .attach(thisCap());
    });
  }

  kj::Promise<void> prefetch(PrefetchContext context) override {
    return Serve(*session_, Method::kPrefetch, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const CacheId cache = context.getParams().getCacheId();
      return Prefetch(session_, parts_.prefetch, WorkerPool::kDaemon, cache, context).attach(thisCap());
    });
  }

  kj::Promise<void> drain(DrainContext context) override {
    return Answer(Method::kDrain, context, [&] { SetDraining(true); });
  }

  kj::Promise<void> undrain(UndrainContext context) override {
    return Answer(Method::kUndrain, context, [&] { SetDraining(false); });
  }

  kj::Promise<void> purge(PurgeContext context) override {
    return Serve(*session_, Method::kPurge, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const bool all = context.getParams().getAll();
      const CacheId cache = context.getParams().getCacheId();
      // Behind what was let go of before, which is held until its turn (disposals.h).
      return parts_.long_calls->Next()
          .then([this, context, all, cache]() mutable -> kj::Promise<void> {
            CacheDirectory& caches = parts_.store->caches();
            const absl::StatusOr<uint64_t> blocks = all ? caches.PurgeAll() : caches.Purge(cache);
            if (!blocks.ok()) {
              ServeError(*session_, Method::kPurge, blocks.status(), context);
              return kj::READY_NOW;
            }
            spdlog::info("\"{}\" purged {} published blocks", session_->name(), *blocks);
            context.getResults().setBlocks(*blocks);
            auto purged = kj::newPromiseAndFulfiller<absl::Status>();
            caches.WhenPurged([fulfiller = kj::mv(purged.fulfiller)](absl::Status status) mutable {
              fulfiller->fulfill(std::move(status));
            });
            return purged.promise.then([this, context](absl::Status status) mutable {
              if (!status.ok()) ServeError(*session_, Method::kPurge, status, context);
            });
          })
          .attach(thisCap());
    });
  }

  kj::Promise<void> upgrade(UpgradeContext context) override {
    return Serve(*session_, Method::kUpgrade, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const std::string program(ViewOf(context.getParams().getProgram()));
      const bool cold = context.getParams().getCold();
      context.releaseParams();
      spdlog::info("\"{}\" asks for an upgrade", session_->name());
      return parts_.upgrade(program, cold)
          .then([this, context](absl::Status status) mutable {
            if (!status.ok()) ServeError(*session_, Method::kUpgrade, status, context);
          })
          .attach(thisCap());
    });
  }

 private:
  template <typename Context, typename Body>
  kj::Promise<void> Answer(Method method, Context& context, Body&& body) {
    return Serve(*session_, method, context, [&] {
      body();
      return Done();
    });
  }

  // Those that are named, or all that are known.
  absl::StatusOr<std::vector<PeerInfo>> ListedPeers(capnp::List<capnp::Text>::Reader named) const {
    std::vector<PeerInfo> known = parts_.outgoing->Peers();
    if (named.size() == 0) return known;
    if (named.size() > limits::kPeersAskedMax) {
      return InvalidField("peers", absl::StrCat(named.size(), " long"),
                          absl::StrCat("at most ", limits::kPeersAskedMax, " long"));
    }
    std::vector<PeerInfo> listed;
    for (const auto name : named) {
      if (name.size() > limits::kPeerTextBytesMax) {
        return InvalidField(absl::StrCat("peers[", listed.size(), "]"), absl::StrCat(name.size(), " bytes long"),
                            absl::StrCat("HOST:PORT of 1..", limits::kPeerTextBytesMax, " bytes"));
      }
      PeerInfo& info = listed.emplace_back();
      info.peer = std::string(ViewOf(name));
      KV_RETURN_IF_ERROR(
          CheckPeersAllowed(absl::StrCat("peers[", listed.size() - 1, "]"), {&info.peer, 1}, *parts_.peers_allowed));
      for (const PeerInfo& each : known) {
        if (!each.incoming && each.peer == info.peer) info = each;
      }
    }
    return listed;
  }

  static void WritePeer(const PeerInfo& peer, api::PeerStatus::Builder out) {
    out.setPeer(TextOf(peer.peer));
    out.setIncoming(peer.incoming);
    out.setTransfers(peer.transfers);
    out.setFailures(peer.failures);
    out.setBytes(peer.bytes);
    out.setCopiedBytes(peer.copied_bytes);
    out.setActive(peer.active);
    out.setBytesPerSecond(peer.bytes_per_s);
    out.setLastError(TextOf(peer.last_error));
  }
  static void WriteLoad(const absl::StatusOr<ReceiverLoad>& load, api::PeerStatus::Builder out) {
    if (!load.ok()) return WriteStatus(load.status(), out.initLoadError());
    auto to = out.initLoad();
    to.setCapacityBytes(load->capacity_bytes);
    to.setFreeBytes(load->free_bytes);
    to.setQueuedBytes(load->queued_bytes);
    to.setWaitingOffers(load->waiting_offers);
    to.setActiveTransfers(load->active_transfers);
  }

  void SetDraining(bool on) {
    parts_.drain->Set(on);
    spdlog::info("\"{}\" switched draining {}", session_->name(), on ? "on" : "off");
  }

  const std::shared_ptr<Session> session_;
  const AdminParts& parts_;
};

}  // namespace

api::Admin::Client MakeAdminService(std::shared_ptr<Session> session, const AdminParts& parts) {
  return kj::heap<AdminService>(std::move(session), parts);
}

}  // namespace kvmanager
