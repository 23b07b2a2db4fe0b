#include "kvmanager/daemon/server.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "codecs/builtin.h"
#include "codecs/cpu_isa.h"
#include "codecs/registry.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/host_facts.h"
#include "kvmanager/daemon/limit_table.h"
#include "kvmanager/daemon/limit_use.h"
#include "kvmanager/daemon/server_access.h"
#include "kvmanager/daemon/server_devices.h"
#include "kvmanager/daemon/server_disk.h"
#include "kvmanager/daemon/server_end.h"
#include "kvmanager/daemon/server_memory.h"
#include "kvmanager/daemon/server_metrics.h"
#include "kvmanager/daemon/server_plugins.h"
#include "kvmanager/daemon/server_ucx.h"
#include "kvmanager/daemon/tenant_gauges.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/gpu/process_steps.h"
#include "kvmanager/handoff/arrivals.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/outgoing_hand_offs.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/arena_bytes.h"
#include "kvmanager/rpc/call_records.h"
#include "kvmanager/rpc/connections.h"
#include "kvmanager/rpc/daemon_facts.h"
#include "kvmanager/rpc/device_calls.h"
#include "kvmanager/rpc/disposals.h"
#include "kvmanager/rpc/held_sequences.h"
#include "kvmanager/rpc/host_calls.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/message_room.h"
#include "kvmanager/rpc/read.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/taking_turns.h"
#include "kvmanager/store/encode_executor.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/quality.h"
#include "monitoring/exporter.h"
#include "monitoring/recent_errors.h"
#include "monitoring/web_page.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport_metrics.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager {
namespace {

static_assert(Options::kHostPoolBytesMax == PagePool::kPoolBytesMax);

constexpr char kPeerListen[] = "--peer-listen", kMetricsListen[] = "--metrics-listen", kHttpListen[] = "--http-listen";

constexpr int64_t kLookMs = 1000;    // at what only a look shows: tenants, pools of GPUs
constexpr int kBackgroundNice = 10;  // of the thread for what takes long in one piece
constexpr int kCopyThreadsMax = 4;   // that copy pages from other daemons of this host: memory has no more to give

// Members stand in the order of who needs whom: each outlives those after it, but for the threads (transport, workers),
// which Close() ends first.
class ServerImpl final : public Server {
 public:
  explicit ServerImpl(const Options& options)
      : options_(options),
        plugins_(&registry_, &metrics_.all),
        tenant_gauges_(&metrics_.all),
        drain_(&metrics_.all),
        held_(&metrics_.all),
        arenas_(&metrics_.all, options.arena_bytes),
        calls_(&metrics_.all, &errors_, &clock_),
        access_(&options_),
        devices_(&options_, &metrics_.all, &clock_, &polls_),
        end_(&options_, &drain_, &held_, &calls_) {}

  ~ServerImpl() noexcept override { Close(); }

  absl::Status Open() {
    KV_ASSIGN_OR_RETURN(std::string peer_key, access_.ReadPeerKey());
    for (const std::string& each : OpenListeners(options_))
      spdlog::warn("--insecure: whoever reaches {} is trusted", each);
    RegisterBuiltinCodecs(registry_);
    KV_RETURN_IF_ERROR(plugins_.Load(options_));
    KV_RETURN_IF_ERROR(access_.ReadFiles());
    calibrations_ = MakeCalibrationDirectory(options_.calibration_dir);
    registry_.SetCalibrations(calibrations_.get());
    KV_RETURN_IF_ERROR(memory_.Open(options_, &clock_, &metrics_.memory));
    facts_.gpus = DeviceSummary();
    spdlog::info("GPUs: {}", facts_.gpus);
    KV_RETURN_IF_ERROR(devices_.Open(memory_.pool()));
    workers_ = std::make_unique<WorkerPool>(options_.threads > 0 ? static_cast<int>(options_.threads) : UsableCpus());
    copiers_ = std::make_unique<WorkerPool>(BlockCalls::WorkersOf(workers_->threads()));
    background_ = std::make_unique<WorkerPool>(1, Turn::kLength, kBackgroundNice);
    executor_ = std::make_unique<PoolEncodeExecutor>(workers_.get(), &queue_, &metrics_.encodes, &clock_);
    std::vector<StoreDevice> devices;
    for (Gpu* const gpu : devices_.gpus()) {
      devices.push_back({gpu->ordinal(), gpu->pool(), gpu->epochs(), gpu->encode_queue(), gpu->mover()});
      gpu->indexes()->SetWorkers(executor_.get());
    }
    if (!options_.disk_path.empty()) {
      KV_ASSIGN_OR_RETURN(disk_, BlockDisk::Open({options_.disk_path, options_.disk_bytes, options_.eviction}, &queue_,
                                                 &metrics_.disk));
    }
    store_ = PageStore::Make(memory_.pool(), &registry_, executor_.get(), &metrics_.store, &clock_, devices,
                             options_.eviction, disk_.get(), memory_.manifest());
    if (memory_.manifest() != nullptr) {
      spdlog::info("{:.0f} blocks of an earlier daemon are in memory", metrics_.store.recovered_blocks.Value());
    }
    if (options_.quality_sample > 0) {
      quality_ = std::make_unique<QualityMonitor>(executor_.get(), &metrics_.all, uint32_t(options_.quality_sample));
      for (Gpu* const gpu : devices_.gpus()) quality_->SetReader(gpu->ordinal(), gpu->reads());
      store_->report().SetSampler(quality_.get());
    }
    recomputer_ =
        std::make_unique<Recomputer>(workers_.get(), &queue_, &clock_, &metrics_.recompute, options_.recompute_bytes,
                                     Recomputer::Gpus{devices_.recompute_devices(), options_.recompute_device_bytes});
    IncomingHandOffs::Parts incoming;
    incoming.store = store_.get();
    incoming.store_metrics = &metrics_.store;
    incoming.registry = &registry_;
    incoming.workers = workers_.get();
    incoming.background = background_.get();
    incoming.codec_workers = &plugins_.workers();
    incoming.queue = &queue_;
    incoming.clock = &clock_;
    incoming.recomputer = recomputer_.get();
    incoming.drain = &drain_;
    incoming.metrics = &metrics_.hand_offs;
    incoming.gpus = devices_.gpus();
    incoming.copier = devices_.copier();
    incoming.host_pool_bytes = memory_.pool()->capacity_bytes();
    incoming.lease_ms = options_.hand_off_lease_ms;
    incoming.peer_tenants = options_.peer_tenants;
    incoming_ = std::make_unique<IncomingHandOffs>(incoming);

    facts_.version = std::string(kVersion);
    facts_.boot_epoch = RandomEpoch();
    facts_.start_ns = clock_.NowNs();
    facts_.busy_polls = options_.busy_poll_us > 0;
    KV_RETURN_IF_ERROR(access_.Open(store_.get(), &facts_));
    KV_ASSIGN_OR_RETURN(ucx_, OpenUcx(options_, *memory_.pool()));
    facts_.ucx = [this] { return DescribeUcx(ucx_.get()); };
    facts_.kept_memory = [this] { return memory_.Describe(); };
    facts_.disk = [this] { return DescribeDisk(disk_.get(), options_.disk_path, *store_); };
    if (ucx_ != nullptr) spdlog::info("peers with the same key: {}", facts_.ucx());
    TcpTransport::Options transport;
    transport.listen = options_.peer_listen;
    transport.listen_fd = FindHanded(options_.sockets, kPeerListen, options_.peer_listen);
    transport.receiver = incoming_.get();
    transport.metrics = &metrics_.transport;
    transport.peer_key = std::move(peer_key);
    transport.tls = access_.tls();
    transport.send_bytes_per_s = options_.peer_rate_bytes;
    transport.window_bytes = options_.peer_window_bytes;
    transport.local_connections = options_.peer_local_copy;
    transport.copy_threads = std::min(UsableCpus(), kCopyThreadsMax);
    transport.connections = std::min<uint32_t>(static_cast<uint32_t>(UsableCpus()), transport.connections);
    if (options_.peer_local_copy && options_.peer_rate_bytes == 0) {
      for (const auto& region : memory_.pool()->regions()) {
        transport.memory.push_back({region->data(), region->bytes(), region->fd()});
      }
    }
    if (!options_.peer_zero_copy) transport.zero_copy = tcp::ZeroCopyUse::kNever;
    transport.remote_memory = ucx_.get();
    transport.device_copier = options_.peer_local_copy ? devices_.copier() : nullptr;
    KV_ASSIGN_OR_RETURN(transport_, TcpTransport::Create(std::move(transport)));
    facts_.peer_listen = transport_->listen_address();
    if (!options_.metrics_listen.empty()) {
      KV_ASSIGN_OR_RETURN(exporter_,
                          Exporter::Start(options_.metrics_listen, &metrics_.all, options_.http_hosts,
                                          FindHanded(options_.sockets, kMetricsListen, options_.metrics_listen)));
      facts_.metrics_listen = WithPort(options_.metrics_listen, exporter_->port());
    }
    return OpenPage();
  }

  void Run(int signal_fd) override {
    Running running(*this);
    EventLoop& loop = running.loop;
    running_ = &running;
    end_.SetRunning({&loop, background_.get(), &queue_, store_.get(), incoming_.get(), &running.outgoing,
                     &running.requests, &running.replies, &memory_, disk_.get()});
    const auto run_messages = [this] { return queue_.RunSome(); };
    loop.WatchMessages([=, this] { return InLoopTurn(calls_.turns(), "messages", run_messages); });
    incoming_->SetLoop(&loop);
    {
      kj::Promise<void> signals = nullptr;
      std::unique_ptr<kj::UnixEventPort::FdObserver> signal_observer;
      if (signal_fd >= 0) {
        signal_observer = std::make_unique<kj::UnixEventPort::FdObserver>(loop.port(), signal_fd,
                                                                          kj::UnixEventPort::FdObserver::OBSERVE_READ);
        signals = ReadSignals(signal_fd, *signal_observer).eagerlyEvaluate(nullptr);
      }
      polls_.SetLoop(&loop);
      devices_.SetLoop(&loop);
      kj::Promise<void> looking = Look().eagerlyEvaluate(nullptr);
      Connections connections({&loop, &metrics_.connections, &running.session, &running.daemon, access_.tls()},
                              access_.sockets());
      facts_.limits = [this, holders = running.Holders(*this, &connections)] {
        return ListLimits(options_, MeasureLimits(holders));
      };
      loop.Run([this] { return end_.Over(); });
      successor_.program = end_.successor();
      if (!successor_.program.empty()) HandOver();
    }
    devices_.SetLoop(nullptr);
    polls_.SetLoop(nullptr);
    running.departed.Clear();
    end_.SetRunning({});
    incoming_->DropAll();
    // The last completions find nobody waiting, and give back what they pinned: by workers and messages.
    transport_.reset();
    loop.RunReady();
    recomputer_->Stop();
    loop.RunReady();
    plugins_.Stop();
    for (const auto* threads : {&workers_, &copiers_, &background_}) (*threads)->Stop();
    loop.RunReady();
    incoming_->DropAll();  // what workers still posted may wait again
    loop.RunReady();
    devices_.End();
    disk_.reset();
    incoming_->SetLoop(nullptr);
    running_ = nullptr;
  }

  void Stop() override {
    queue_.Post([this] { end_.Stop(); });
  }
  void Terminate() override {
    queue_.Post([this] { end_.Terminate(); });
  }

  std::string listen_address() const override { return facts_.listen; }
  std::string peer_address() const override { return facts_.peer_listen; }
  std::string metrics_address() const override { return facts_.metrics_listen; }
  std::string http_address() const override { return facts_.http_listen; }
  std::string admin_address() const override { return facts_.admin_listen; }
  std::string MetricsText() const override { return metrics_.all.Text(); }
  Successor TakeSuccessor() override {
    exporter_.reset();
    return std::exchange(successor_, {});
  }

 private:
  // What serves clients while the event loop runs. Members in the order of who needs whom.
  struct Running {
    explicit Running(ServerImpl& of)
        : loop(&of.queue_, of.options_.busy_poll_us),
          departed(&loop),
          arrivals(of.store_.get(), &of.clock_, &loop),
          // What a GPU reads of another goes at the link's rate.
          outgoing({.transport = of.transport_.get(),
                    .loop = &loop,
                    .metrics = &of.metrics_.hand_offs,
                    .gpus = of.devices_.gpus(),
                    .shares_gpu_memory = of.options_.peer_local_copy && of.options_.peer_rate_bytes == 0,
                    .turns = of.incoming_->turns(),
                    .workers = of.workers_.get(),
                    .background = of.background_.get()}),
          host_calls({.store = of.store_.get(),
                      .workers = of.workers_.get(),
                      .queue = &of.queue_,
                      .long_calls = &long_calls,
                      .clock = &of.clock_,
                      .quality = of.quality_.get(),
                      .metrics = &of.metrics_.attends}),
          device_calls({.store = of.store_.get(),
                        .polls = &of.polls_,
                        .loop = &loop,
                        .clock = &of.clock_,
                        .quality = of.quality_.get(),
                        .gpus = of.devices_.gpus(),
                        .metrics = &of.metrics_.attends}),
          reads({of.store_.get(), of.workers_.get(), &of.queue_, &of.polls_, &of.clock_, of.devices_.gpus(),
                 &of.metrics_.reads}),
          block_calls({of.store_.get(), of.copiers_.get(), &of.queue_, &of.clock_, &of.drain_, &of.metrics_.block_calls,
                       &long_calls, BlockCalls::MapsOf(of.options_.map_blocks), &disposals, &loop.timer(),
                       BlockCalls::ArenasOn(of.devices_.gpus())}),
          requests({.whole = of.options_.memory_beyond_pool_bytes / 2, .share = limits::kCallsInFlightBytesMax},
                   &of.clock_),
          replies({.whole = of.options_.memory_beyond_pool_bytes / 2, .share = limits::kReplyMemoryBytesMax},
                  &of.clock_),
          long_calls(&of.queue_),
          disposals(&long_calls, of.calls_.turns(),
                    [store = of.store_.get()] { return store->long_calls().ReleaseSome(); }),
          session(
              {.store = of.store_.get(),
               .drain = &of.drain_,
               .held = &of.held_,
               .arenas = &of.arenas_,
               .calls = &of.calls_,
               .requests = &requests,
               .replies = &replies,
               .uses = &uses,
               .gpus = {{of.store_.get(), &of.polls_, of.quality_.get()}, {of.store_.get(), &of.polls_, &departed}}}),
          daemon({.facts = &of.facts_,
                  .registry = &of.registry_,
                  .principals = of.access_.principals(),
                  .workers = of.workers_.get(),
                  .background = of.background_.get(),
                  .codec_workers = &of.plugins_.workers(),
                  .queue = &of.queue_,
                  .gpus = of.devices_.gpus(),
                  .samples_queries = of.quality_ != nullptr}) {
      daemon.cache = {.store = of.store_.get(),
                      .registry = &of.registry_,
                      .incoming = of.incoming_.get(),
                      .arrivals = &arrivals,
                      .recomputer = of.recomputer_.get(),
                      .host_calls = &host_calls,
                      .device_calls = &device_calls,
                      .reads = &reads,
                      .block_calls = &block_calls,
                      .matches = {&of.clock_, &of.metrics_.matches},
                      .prefetch = {of.store_.get(), &arrivals, of.workers_.get(), &of.queue_, &long_calls}};
      daemon.cache.sequence = {.store = of.store_.get(),
                               .loop = &loop,
                               .workers = of.workers_.get(),
                               .long_calls = &long_calls,
                               .disposals = &disposals,
                               .incoming = of.incoming_.get(),
                               .outgoing = &outgoing,
                               .arrivals = &arrivals,
                               .held = &of.held_,
                               .peers_allowed = &of.options_.hand_off_peers};
      daemon.admin = {
          .facts = &of.facts_,
          .clock = &of.clock_,
          .store = of.store_.get(),
          .host_pool = of.memory_.pool(),
          .gpus = of.devices_.gpus(),
          .pinner = of.devices_.pinner(),
          .workers = of.workers_.get(),
          .queue = &of.queue_,
          .long_calls = &long_calls,
          .drain = &of.drain_,
          .held = &of.held_,
          .incoming = of.incoming_.get(),
          .outgoing = &outgoing,
          .recomputer = of.recomputer_.get(),
          .all_metrics = &of.metrics_.all,
          .connections = &of.metrics_.connections,
          .peers_allowed = &of.options_.hand_off_peers,
          .prefetch = daemon.cache.prefetch,
          .upgrade = [end = &of.end_](const std::string& program, bool cold) { return end->Upgrade(program, cold); }};
      of.store_->long_calls().OnLeftovers([this] { disposals.NoteLeft(); });
    }
    ~Running() {
      daemon.cache.store->long_calls().OnLeftovers([] {});
    }

    LimitHolders Holders(ServerImpl& of, const Connections* connections) {
      return {of.store_.get(),    of.memory_.pool(), of.disk_.get(),
              of.devices_.gpus(), &of.arenas_,       of.recomputer_.get(),
              of.incoming_.get(), &outgoing,         of.access_.principals(),
              &requests,          &replies,          &uses,
              connections};
    }

    EventLoop loop;
    DepartedProcesses departed;
    Arrivals arrivals;
    OutgoingHandOffs outgoing;
    HostCalls host_calls;
    DeviceCalls device_calls;
    Reads reads;
    BlockCalls block_calls;
    MessageRoom requests, replies;
    SessionUses uses;
    TakingTurns long_calls;
    Disposals disposals;
    Session::Parts session;
    DaemonParts daemon;
    kj::Promise<void> files = nullptr;  // are read
  };

  absl::Status OpenPage() {
    if (options_.http_listen.empty()) return absl::OkStatus();
    DashboardFacts facts;
    facts.version = facts_.version;
    facts.listen = facts_.listen;
    facts.peer_listen = facts_.peer_listen;
    facts.metrics_listen = facts_.metrics_listen;
    facts.cpu_target = IsaName(BestIsa());
    facts.gpus = facts_.gpus;
    facts.threads = workers_->threads();
    facts.start_ns = facts_.start_ns;
    KV_ASSIGN_OR_RETURN(
        page_, WebPage::Start(options_.http_listen, &metrics_.all, &errors_, &clock_, std::move(facts),
                              options_.http_hosts, FindHanded(options_.sockets, kHttpListen, options_.http_listen)));
    facts_.http_listen = WithPort(options_.http_listen, page_->port());
    return absl::OkStatus();
  }

  kj::Promise<void> Look() {
    const LoopTurn turn(calls_.turns(), "look");
    tenant_gauges_.Set(*store_);
    devices_.Look(store_.get());
    store_->long_calls().LookAgain();
    memory_.Look(background_.get(), &queue_);
    // A request has its memory until there is room for its reply.
    const bool requests_wait = running_->requests.keeps_waiting();
    running_->requests.Look(requests_wait);
    running_->replies.Look(requests_wait || running_->replies.keeps_waiting());
    metrics_.messages.Set(running_->requests, running_->replies);
    return running_->loop.timer().afterDelay(kLookMs * kj::MILLISECONDS).then([this] { return Look(); });
  }

  // What listens goes on to listen, for the successor.
  void HandOver() {
    std::vector<HandedSocket>& sockets = successor_.sockets;
    access_.HandOver(&sockets);
    HandSocket(kPeerListen, options_.peer_listen, transport_->listen_fd(), &sockets);
    HandSocket(kMetricsListen, options_.metrics_listen, exporter_ == nullptr ? -1 : exporter_->listen_fd(), &sockets);
    HandSocket(kHttpListen, options_.http_listen, page_ == nullptr ? -1 : page_->listen_fd(), &sockets);
    RunSuccessorAtTheLatest(successor_, options_);
  }

  kj::Promise<void> ReadSignals(int fd, kj::UnixEventPort::FdObserver& observer) {
    signalfd_siginfo signal;
    while (read(fd, &signal, sizeof signal) == sizeof signal) {
      if (signal.ssi_signo != SIGHUP) end_.Terminate();
      if (signal.ssi_signo == SIGHUP) access_.ReadFilesAgain(background_.get(), &queue_, &running_->files);
    }
    return observer.whenBecomesReadable().then([this, fd, &observer] { return ReadSignals(fd, observer); });
  }

  void Close() {
    page_.reset();
    exporter_.reset();
    transport_.reset();
    if (recomputer_ != nullptr) recomputer_->Stop();
    plugins_.Stop();
    for (auto* threads : {&workers_, &copiers_, &background_}) threads->reset();
  }

  const Options options_;
  const SteadyClock clock_;
  ServerMetrics metrics_;
  ServerPlugins plugins_;
  TenantGauges tenant_gauges_;
  RecentErrors errors_;
  DrainSwitch drain_;
  HeldSequences held_;
  ArenaBytes arenas_;
  CallRecords calls_;
  ServerAccess access_;
  std::unique_ptr<CalibrationSource> calibrations_;
  CodecRegistry registry_;
  ServerMemory memory_;
  PollList polls_;
  ServerDevices devices_;
  std::unique_ptr<WorkerPool> workers_, copiers_, background_;
  std::unique_ptr<PoolEncodeExecutor> executor_;
  std::unique_ptr<QualityMonitor> quality_;
  std::unique_ptr<PageStore> store_;
  std::unique_ptr<Recomputer> recomputer_;
  MessageQueue queue_;               // its messages hold leases of the store, and projections
  std::unique_ptr<BlockDisk> disk_;  // nullptr: none
  DaemonFacts facts_;
  std::unique_ptr<IncomingHandOffs> incoming_;
  std::unique_ptr<UcxMemory> ucx_;
  std::unique_ptr<TcpTransport> transport_;
  std::unique_ptr<Exporter> exporter_;
  std::unique_ptr<WebPage> page_;

  Running* running_ = nullptr;  // while Run runs. The loop's thread, as what follows
  ServerEnd end_;
  Successor successor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const Options& options) {
  auto server = std::make_unique<ServerImpl>(options);
  KV_RETURN_IF_ERROR(server->Open());
  return server;
}

}  // namespace kvmanager
