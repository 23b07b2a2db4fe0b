#include "kvmanager/daemon/server.h"

#include <sched.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/abi/plugin_codec.h"
#include "codecs/builtin.h"
#include "codecs/cpu_isa.h"
#include "codecs/registry.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/plugin_events.h"
#include "kvmanager/daemon/server_devices.h"
#include "kvmanager/daemon/tenant_gauges.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/connections.h"
#include "kvmanager/rpc/context.h"
#include "kvmanager/rpc/listen_socket.h"
#include "kvmanager/rpc/server_metrics.h"
#include "kvmanager/store/encode_executor.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/quality.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/exporter.h"
#include "monitoring/metrics.h"
#include "monitoring/recent_errors.h"
#include "monitoring/web_page.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport_metrics.h"
#include "transport/ucx/ucx_memory.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager {
namespace {

static_assert(Options::kHostPoolBytesMax == PagePool::kPoolBytesMax);

constexpr int64_t kLookMs = 1000;   // at what only a look shows: tenants, pools of GPUs
constexpr int kCopyThreadsMax = 4;  // that copy pages from other daemons of this host: memory has no more to give

int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::clamp<int>(CPU_COUNT(&set), 1, Options::kThreadsMax);
}

uint64_t RandomEpoch() {
  uint64_t epoch = 0;
  while (epoch == 0) KV_CHECK(getrandom(&epoch, sizeof epoch, 0) == sizeof epoch);
  return epoch;
}

absl::StatusOr<std::string> ReadKey(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string key(UcxMemory::kKeyBytesMax + 1, '\0');
  file.read(key.data(), static_cast<std::streamsize>(key.size()));
  key.resize(static_cast<size_t>(file.gcount()));
  if (key.size() >= UcxMemory::kKeyBytesMin && key.size() <= UcxMemory::kKeyBytesMax) return key;
  return InvalidField("--peer-ucx-key", path,
                      absl::StrCat("a file that can be read, of ", UcxMemory::kKeyBytesMin, "..",
                                   UcxMemory::kKeyBytesMax, " bytes; this has ", key.size(), " or more"));
}

// Members stand in the order of who needs whom: each outlives those after it, but for the threads (transport, workers),
// which Close() ends first.
class ServerImpl final : public Server {
 public:
  explicit ServerImpl(const Options& options)
      : options_(options),
        store_metrics_(&metrics_),
        transport_metrics_(&metrics_),
        server_metrics_(&metrics_),
        recompute_metrics_(&metrics_),
        plugin_events_(&metrics_),
        tenant_gauges_(&metrics_),
        devices_(&options_, &metrics_, &server_metrics_, &clock_, &polls_) {}

  ~ServerImpl() noexcept override { Close(); }

  absl::Status Open() {
    RegisterBuiltinCodecs(registry_);
    KV_RETURN_IF_ERROR(LoadCodecPlugins(options_.codec_plugins, registry_, &plugin_events_));
    calibrations_ = MakeCalibrationDirectory(options_.calibration_dir);
    registry_.SetCalibrations(calibrations_.get());
    PagePool::Options pool;
    pool.pool_bytes = options_.host_pool_bytes;
    pool.slab_bytes = options_.slab_bytes;
    KV_ASSIGN_OR_RETURN(pool_, PagePool::Create(pool));
    daemon_.gpu_summary = DeviceSummary();
    spdlog::info("GPUs: {}", daemon_.gpu_summary);
    KV_RETURN_IF_ERROR(devices_.Open(pool_.get()));
    workers_ = std::make_unique<WorkerPool>(options_.threads > 0 ? static_cast<int>(options_.threads) : UsableCpus());
    executor_ = std::make_unique<PoolEncodeExecutor>(workers_.get(), &queue_, &server_metrics_, &clock_);
    std::vector<StoreDevice> devices;
    for (const auto& parts : devices_.parts()) {
      devices.push_back(
          {parts->context.ordinal, parts->pool.get(), &parts->epochs, &parts->encode_queue, parts->mover.get()});
    }
    store_ = PageStore::Create(pool_.get(), &registry_, executor_.get(), &store_metrics_, &clock_, devices);
    if (options_.quality_sample > 0) {
      quality_ = std::make_unique<QualityMonitor>(executor_.get(), &metrics_, uint32_t(options_.quality_sample));
      for (const auto& parts : devices_.parts()) quality_->SetReader(parts->context.ordinal, parts->reads.get());
      store_->SetSampler(quality_.get());
    }
    Recomputer::Gpus gpus;
    gpus.bytes_max_each = options_.recompute_device_bytes;
    for (const auto& parts : devices_.parts()) {
      if (parts->recompute != nullptr) gpus.devices.push_back(parts->recompute.get());
    }
    recomputer_ = std::make_unique<Recomputer>(workers_.get(), &queue_, &clock_, &recompute_metrics_,
                                               options_.recompute_bytes, gpus);
    desk_ = std::make_unique<HandOffDesk>(&daemon_);

    daemon_.options = &options_;
    daemon_.clock = &clock_;
    daemon_.registry = &registry_;
    daemon_.pool = pool_.get();
    daemon_.store = store_.get();
    daemon_.workers = workers_.get();
    daemon_.queue = &queue_;
    daemon_.metrics = &server_metrics_;
    daemon_.all_metrics = &metrics_;
    daemon_.errors = &errors_;
    daemon_.store_metrics = &store_metrics_;
    daemon_.desk = desk_.get();
    daemon_.recomputer = recomputer_.get();
    daemon_.quality = quality_.get();
    for (const auto& parts : devices_.parts()) {
      parts->indexes->SetWorkers(executor_.get());
      daemon_.devices.push_back(&parts->context);
    }
    daemon_.pinner = devices_.pinner();
    daemon_.copier = devices_.copier();
    daemon_.polls = &polls_;
    daemon_.boot_epoch = RandomEpoch();
    daemon_.start_ns = clock_.NowNs();

    for (const std::string& address : options_.listen) {
      KV_ASSIGN_OR_RETURN(std::unique_ptr<ListenSocket> socket, ListenSocket::Bind(address));
      sockets_.push_back(std::move(socket));
    }
    daemon_.listen = absl::StrJoin(
        sockets_, ",", [](std::string* out, const auto& socket) { absl::StrAppend(out, socket->address()); });
    KV_RETURN_IF_ERROR(OpenUcx());
    TcpTransport::Options transport;
    transport.listen = options_.peer_listen;
    transport.receiver = desk_.get();
    transport.metrics = &transport_metrics_;
    transport.send_bytes_per_s = options_.peer_rate_bytes;
    transport.window_bytes = options_.peer_window_bytes;
    transport.local_lanes = options_.peer_local_copy;
    transport.copy_threads = std::min(UsableCpus(), kCopyThreadsMax);
    transport.lanes = std::min<uint32_t>(static_cast<uint32_t>(UsableCpus()), transport.lanes);
    if (options_.peer_local_copy && options_.peer_rate_bytes == 0) {
      for (const auto& region : pool_->regions()) {
        transport.memory.push_back({region->data(), region->bytes(), region->fd()});
      }
    }
    if (!options_.peer_zero_copy) transport.zero_copy = tcp::ZeroCopyUse::kNever;
    transport.remote_memory = ucx_.get();
    transport.device_copier = options_.peer_local_copy ? devices_.copier() : nullptr;
    KV_ASSIGN_OR_RETURN(transport_, TcpTransport::Create(std::move(transport)));
    daemon_.transport = transport_.get();
    daemon_.peer_listen = transport_->listen_address();
    if (!options_.metrics_listen.empty()) {
      KV_ASSIGN_OR_RETURN(exporter_, Exporter::Start(options_.metrics_listen, &metrics_));
      const size_t colon = options_.metrics_listen.rfind(':');
      daemon_.metrics_listen = absl::StrCat(options_.metrics_listen.substr(0, colon + 1), exporter_->port());
    }
    return OpenPage();
  }

  void Run(int signal_fd) override {
    EventLoop loop(&queue_, options_.busy_poll_us);
    daemon_.loop = &loop;
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
      Connections connections(&daemon_, sockets_);
      loop.Run([this] { return Over(); });
    }
    devices_.SetLoop(nullptr);
    polls_.SetLoop(nullptr);
    daemon_.departed.clear();
    drain_deadline_ = nullptr;
    desk_->DropAll();
    // The last completions find nobody waiting, and give back what they pinned. The transport's last messages still
    // give workers work.
    transport_.reset();
    loop.RunReady();
    recomputer_->Stop();
    loop.RunReady();
    workers_.reset();
    loop.RunReady();
    desk_->DropAll();
    devices_.End();
    daemon_.loop = nullptr;
  }

  void Stop() override {
    queue_.Post([this] { stop_ = true; });
  }

  void Terminate() override {
    queue_.Post([this] { BeginTermination(); });
  }

  std::string listen_address() const override { return daemon_.listen; }
  std::string peer_address() const override { return daemon_.peer_listen; }
  std::string metrics_address() const override { return daemon_.metrics_listen; }
  std::string http_address() const override { return daemon_.http_listen; }
  std::string MetricsText() const override { return metrics_.Text(); }

 private:
  absl::Status OpenUcx() {
    daemon_.ucx_summary = [this] {
      if (ucx_ == nullptr) return absl::StrCat("off, ", UcxBuild());
      return ucx_->process() == 0 ? std::string("its process has ended, and is started anew")
                                  : absl::StrCat("UCX ", ucx_->version(), ", process ", ucx_->process());
    };
    if (options_.peer_ucx_key.empty()) return absl::OkStatus();
    UcxMemory::Options options;
    options.program = {"/proc/self/exe", kUcxProcessFlag};
    KV_ASSIGN_OR_RETURN(options.key, ReadKey(options_.peer_ucx_key));
    for (const auto& region : pool_->regions()) {
      options.memory.push_back({region->data(), region->bytes(), region->fd()});
    }
    absl::StatusOr<std::unique_ptr<UcxMemory>> ucx = UcxMemory::Create(std::move(options));
    if (!ucx.ok()) {
      return absl::Status(ucx.status().code(), absl::StrCat("--peer-ucx-key asks for UCX, but ", ucx.status().message(),
                                                            "; leave the option out to do without"));
    }
    ucx_ = *std::move(ucx);
    spdlog::info("peers with the same key: {}", daemon_.ucx_summary());
    return absl::OkStatus();
  }

  absl::Status OpenPage() {
    if (options_.http_listen.empty()) return absl::OkStatus();
    DashboardFacts facts;
    facts.version = std::string(kVersion);
    facts.listen = daemon_.listen;
    facts.peer_listen = daemon_.peer_listen;
    facts.metrics_listen = daemon_.metrics_listen;
    facts.cpu_target = IsaName(BestIsa());
    facts.gpus = daemon_.gpu_summary;
    facts.threads = workers_->threads();
    facts.start_ns = daemon_.start_ns;
    KV_ASSIGN_OR_RETURN(page_, WebPage::Start(options_.http_listen, &metrics_, &errors_, &clock_, std::move(facts)));
    const size_t colon = options_.http_listen.rfind(':');
    daemon_.http_listen = absl::StrCat(options_.http_listen.substr(0, colon + 1), page_->port());
    return absl::OkStatus();
  }

  kj::Promise<void> Look() {
    tenant_gauges_.Set(store_->Caches());
    devices_.Look(store_.get());
    return daemon_.loop->timer().afterDelay(kLookMs * kj::MILLISECONDS).then([this] { return Look(); });
  }

  void BeginTermination() {
    if (terminating_) {
      stop_ = true;
      return;
    }
    terminating_ = true;
    daemon_.SetDraining(true);
    spdlog::info("draining: {} sequences are held and {} received ones wait to be claimed; waiting at most {} s",
                 daemon_.held_sequences, desk_->tickets().size(), options_.drain_s);
    drain_deadline_ = daemon_.loop->timer()
                          .afterDelay(options_.drain_s * kj::SECONDS)
                          .then([this] {
                            if (daemon_.held_sequences > 0)
                              spdlog::warn("{} sequences are still held, and are lost", daemon_.held_sequences);
                            stop_ = true;
                          })
                          .eagerlyEvaluate(nullptr);
  }

  // What a peer was told is accepted counts as held, until it is claimed or expires.
  bool Over() const {
    return stop_ ||
           (terminating_ && daemon_.held_sequences == 0 && daemon_.sends_active == 0 && desk_->tickets().size() == 0);
  }

  kj::Promise<void> ReadSignals(int fd, kj::UnixEventPort::FdObserver& observer) {
    signalfd_siginfo signal;
    while (read(fd, &signal, sizeof signal) == sizeof signal) BeginTermination();
    return observer.whenBecomesReadable().then([this, fd, &observer] { return ReadSignals(fd, observer); });
  }

  void Close() {
    page_.reset();
    exporter_.reset();
    transport_.reset();
    if (recomputer_ != nullptr) recomputer_->Stop();
    workers_.reset();
  }

  const Options options_;
  const SteadyClock clock_;
  Metrics metrics_;
  StoreMetrics store_metrics_;
  TransportMetrics transport_metrics_;
  ServerMetrics server_metrics_;
  RecomputeMetrics recompute_metrics_;
  PluginEvents plugin_events_;
  TenantGauges tenant_gauges_;
  RecentErrors errors_;
  std::unique_ptr<CalibrationSource> calibrations_;
  CodecRegistry registry_;
  std::unique_ptr<PagePool> pool_;
  PollList polls_;
  ServerDevices devices_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<PoolEncodeExecutor> executor_;
  std::unique_ptr<QualityMonitor> quality_;
  std::unique_ptr<PageStore> store_;
  std::unique_ptr<Recomputer> recomputer_;
  MessageQueue queue_;  // its messages hold leases of the store, and projections
  DaemonContext daemon_;
  std::unique_ptr<HandOffDesk> desk_;
  std::vector<std::unique_ptr<ListenSocket>> sockets_;
  std::unique_ptr<UcxMemory> ucx_;
  std::unique_ptr<TcpTransport> transport_;
  std::unique_ptr<Exporter> exporter_;
  std::unique_ptr<WebPage> page_;

  // The loop's thread.
  bool stop_ = false;
  bool terminating_ = false;
  kj::Promise<void> drain_deadline_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const Options& options) {
  auto server = std::make_unique<ServerImpl>(options);
  KV_RETURN_IF_ERROR(server->Open());
  return server;
}

}  // namespace kvmanager
