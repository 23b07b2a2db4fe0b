// Bytes per second of one hand-off between two transports of this process: over loopback TCP, beside iperf3 with as
// many connections in the same run (what the kernel's sockets give); over a local connection, beside one memcpy of as
// much by one thread; and through UCX's TCP and shared memory, beside the same. Random bytes, a pool as large as the
// hand-off on each side, checksums made before. Transports are made once, as daemons' are; the first hand-off over a
// local connection, which maps the sender's pool, is a row of its own. Prints the CPU time of both sides as well, what
// the kernel sent straight from pages and what it copied though it was asked to (loopback always copies), and what
// memcpy of all cores together makes.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/tls_testing.h"
#include "kvmanager/memory/region.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_memory.h"

namespace kvmanager::tcp {
namespace {

struct Measured {
  double bytes_per_s = 0;
  double cpu_s_per_gib = 0;                         // of both sides
  double zero_copy_sent = 0, zero_copy_copied = 0;  // shares of the bytes
};

double CpuSeconds(int who) {
  rusage usage;
  getrusage(who, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double CpuOfProcess(pid_t pid) {
  clockid_t clock;
  timespec time{};
  KV_CHECK(clock_getcpuclockid(pid, &clock) == 0 && clock_gettime(clock, &time) == 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Memory of a pool, as the daemon's: another process could map it.
class Pool {
 public:
  Pool(uint64_t bytes, uint64_t seed) {
    auto region = Region::Create({.bytes = bytes, .huge_pages = true, .sharing = Region::Sharing::kReadOnly});
    KV_CHECK(region.ok());
    region_ = *std::move(region);
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t word = random();
      std::memcpy(region_->data() + i, &word, 8);
    }
  }
  uint8_t* data() const { return region_->data(); }
  uint64_t size() const { return region_->bytes(); }
  SharedMemory shared() const { return {region_->data(), region_->bytes(), region_->fd()}; }

 private:
  std::unique_ptr<Region> region_;
};

/// Accepts everything into one buffer.
class PoolReceiver final : public HandOffReceiver {
 public:
  explicit PoolReceiver(const Pool* pool) : pool_(pool) {}
  class HandOff final : public IncomingHandOff {
   public:
    absl::Span<uint8_t> target(uint32_t page) const override { return targets[page]; }
    void Arrived(absl::Span<const uint32_t>) override {}
    void Extend(HandOffPart, absl::AnyInvocable<void(absl::Status)> reply) override { reply(absl::OkStatus()); }
    void Complete(absl::AnyInvocable<void(absl::Status)> reply) override { reply(absl::OkStatus()); }
    void Abort(absl::Status why) override { std::printf("aborted: %s\n", why.ToString().c_str()); }
    std::vector<absl::Span<uint8_t>> targets;
  };
  void Offer(std::string, HandOffPart first, int64_t, OfferReply reply) override {
    auto hand_off = std::make_shared<HandOff>();
    size_t at = 0;
    for (const uint64_t size : first.page_bytes) {
      hand_off->targets.push_back(absl::MakeSpan(pool_->data() + at, size));
      at += size;
    }
    reply.done(Accepted{std::move(hand_off), "ticket"});
  }
  ReceiverLoad Load() const override { return {}; }

 private:
  const Pool* pool_;
};

/// UCX over the transports `tls`; nullptr if there is none, which it says.
std::unique_ptr<UcxMemory> OpenUcx(const Pool& pool, const std::string& tls) {
  UcxMemory::Options options;
  options.program = {std::filesystem::canonical("/proc/self/exe").parent_path() / "../ucx/ucx_process_main"};
  options.key = "a key of the benchmark";
  options.memory = {{pool.data(), pool.size(), pool.shared().fd}};
  options.settings = {{"TLS", tls}};
  absl::StatusOr<std::unique_ptr<UcxMemory>> ucx = UcxMemory::Create(options);
  if (ucx.ok()) return *std::move(ucx);
  std::printf("%s\n", ucx.status().ToString().c_str());
  return nullptr;
}

/// A sender and a receiver, made once as a daemon's are. connections: over TCP; 0: one local connection. Through UCX if
/// both have it.
class Pair {
 public:
  Pair(const Pool& from, const Pool& to, uint64_t page_bytes, uint32_t connections, UcxMemory* from_ucx = nullptr,
       UcxMemory* to_ucx = nullptr, ZeroCopyUse zero_copy = ZeroCopyUse::kWhereItPays, const TlsSwitch* tls = nullptr)
      : from_(from), to_(to), by_ucx_(from_ucx != nullptr), receiver_(&to) {
    TcpTransport::Options options;
    options.metrics = &metrics_;
    options.connections = std::max(connections, 1u);
    options.copy_threads =
        std::min<int>(static_cast<int>(std::thread::hardware_concurrency()), TcpTransport::kCopyThreadsMax);
    if (connections == 0) options.memory = {from.shared()};
    options.remote_memory = from_ucx;
    options.zero_copy = zero_copy;
    options.tls = tls;
    sending_ = *TcpTransport::Create(options);
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.local_connections = true;
    options.remote_memory = to_ucx;
    receiving_ = *TcpTransport::Create(options);
    for (uint64_t at = 0; at + page_bytes <= from.size(); at += page_bytes) {
      pages_.push_back({static_cast<uint32_t>(pages_.size()), absl::MakeConstSpan(from.data() + at, page_bytes),
                        Checksum(from.data() + at, page_bytes)});
    }
  }

  Measured HandOff() {
    SendRequest request;
    request.peer = receiving_->listen_address();
    request.header.manifest = "bench";
    for (const SendPage& page : pages_) request.header.page_bytes.push_back(page.bytes.size());
    std::promise<absl::StatusOr<SendResult>> promise;
    SendEvents events;
    events.done = [&](absl::StatusOr<SendResult> result) { promise.set_value(std::move(result)); };
    HandOffPart last;
    last.manifest = "end";
    std::memset(to_.data(), 0, to_.size());
    const double ucx_before = metrics_.received.ucx_bytes.Value();
    const TransportMetrics::ZeroCopy& zero_copy = metrics_.zero_copy;
    const double sent_before = zero_copy.sent.Value(), copied_before = zero_copy.copied.Value();
    const double cpu_before = CpuSeconds(RUSAGE_SELF);
    const uint64_t id = sending_->Begin(std::move(request), std::move(events));
    sending_->Post(id, pages_);
    sending_->Finish(id, std::move(last));
    const absl::StatusOr<SendResult> result = promise.get_future().get();
    const double cpu = CpuSeconds(RUSAGE_SELF) - cpu_before;
    KV_CHECK(result.ok());
    KV_CHECK(std::memcmp(from_.data(), to_.data(), result->bytes_sent) == 0);
    const auto sent = static_cast<double>(result->bytes_sent);
    KV_CHECK(metrics_.received.ucx_bytes.Value() - ucx_before == (by_ucx_ ? sent : 0));
    return {sent / result->seconds, cpu / sent * (1 << 30), (zero_copy.sent.Value() - sent_before) / sent,
            (zero_copy.copied.Value() - copied_before) / sent};
  }

 private:
  const Pool& from_;
  const Pool& to_;
  const bool by_ucx_;
  std::vector<SendPage> pages_;
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
  PoolReceiver receiver_;
  std::unique_ptr<TcpTransport> sending_, receiving_;
};

/// One memcpy of all of it by one thread, or a share of it by each of several.
Measured Copy(const Pool& from, const Pool& to, uint64_t threads) {
  const double cpu_before = CpuSeconds(RUSAGE_SELF);
  const auto start = std::chrono::steady_clock::now();
  const auto copy = [&](uint64_t thread) {
    const uint64_t begin = from.size() / threads * thread;
    const uint64_t end = thread + 1 == threads ? from.size() : from.size() / threads * (thread + 1);
    std::memcpy(to.data() + begin, from.data() + begin, end - begin);
  };
  std::vector<std::thread> others;
  for (uint64_t i = 1; i < threads; ++i) others.emplace_back(copy, i);
  copy(0);
  for (std::thread& other : others) other.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto bytes = static_cast<double>(from.size());
  return {bytes / seconds, (CpuSeconds(RUSAGE_SELF) - cpu_before) / bytes * (1 << 30)};
}

/// What iperf3 measures; nothing if it is not installed.
Measured Iperf(int port, uint32_t connections, uint64_t bytes) {
  Measured out;
  const std::string command = absl::StrCat(
      "iperf3 --server --one-off --port ", port, " >/dev/null 2>&1 & sleep 0.5; iperf3 --client 127.0.0.1 --port ",
      port, " --parallel ", connections, " --bytes ", bytes / connections, " --json 2>/dev/null; wait");
  const double cpu_before = CpuSeconds(RUSAGE_CHILDREN);
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return out;
  std::string text;
  char chunk[4096];
  for (size_t n; (n = std::fread(chunk, 1, sizeof(chunk), pipe)) > 0;) text.append(chunk, n);
  ::pclose(pipe);
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const nlohmann::json::json_pointer rate("/end/sum_received/bits_per_second"), moved("/end/sum_received/bytes");
  if (json.is_discarded() || !json.contains(rate)) return out;
  out.bytes_per_s = json[rate].get<double>() / 8;
  out.cpu_s_per_gib = (CpuSeconds(RUSAGE_CHILDREN) - cpu_before) / json[moved].get<double>() * (1 << 30);
  return out;
}

int Main(int argc, char** argv) {
  CLI::App app("One hand-off over loopback TCP, beside iperf3.");
  uint64_t mib = 2048, page_bytes = 48640;
  std::vector<uint32_t> connections = {1, 2, 4};
  int port = 5309, repetitions = 3;
  ZeroCopyUse zero_copy = ZeroCopyUse::kWhereItPays;
  const std::map<std::string, ZeroCopyUse> uses = {
      {"never", ZeroCopyUse::kNever}, {"auto", zero_copy}, {"always", ZeroCopyUse::kAlways}};
  app.add_option("--mib", mib, "MiB of one hand-off")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--page-bytes", page_bytes, "bytes of a page (default: hack K3V2, 64 tokens, 8 KV heads of 128)")
      ->check(CLI::Range(uint64_t{1}, HandOffPart::kPageBytesMax))
      ->capture_default_str();
  app.add_option("--connections,--lanes", connections, "data connections, one row for each")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--port", port, "that iperf3 listens on")->capture_default_str();
  app.add_option("--repetitions", repetitions, "the median of so many")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_option("--zero-copy", zero_copy, "zero copy on TCP connections: never, auto (default), always")
      ->transform(CLI::CheckedTransformer(uses))
      ->type_name("USE");
  bool tls = false;
  app.add_flag("--tls", tls, "TLS on TCP connections, both sides in this process");
  CLI11_PARSE(app, argc, argv);
  TlsSwitch contexts;
  if (tls) {
    kvmanager::testing::TestAuthority authority;
    contexts.Set(kvmanager::testing::PeerContexts(authority.Daemon(), authority.certificate()));
  }
  const Pool from(mib << 20, 1), to(mib << 20, 2);
  const auto median = [](std::vector<Measured>& all) {
    std::sort(all.begin(), all.end(),
              [](const Measured& a, const Measured& b) { return a.bytes_per_s < b.bytes_per_s; });
    return all[all.size() / 2];
  };
  std::printf("%-12s %16s %16s %8s %26s\n", "", "hand-off GB/s", "peer GB/s", "ratio", "CPU s/GiB, and the peer's");
  const auto print = [](const std::string& name, const Measured& a, const Measured& b) {
    std::printf("%-12s %16.2f %16.2f %8.2f %16.2f %9.2f\n", name.c_str(), a.bytes_per_s / 1e9, b.bytes_per_s / 1e9,
                b.bytes_per_s > 0 ? a.bytes_per_s / b.bytes_per_s : 0, a.cpu_s_per_gib, b.cpu_s_per_gib);
    std::fflush(stdout);
  };
  for (const uint32_t n : connections) {
    Pair pair(from, to, page_bytes, n, nullptr, nullptr, zero_copy, &contexts);
    std::vector<Measured> ours, theirs;
    for (int i = 0; i < repetitions; ++i) {
      ours.push_back(pair.HandOff());
      theirs.push_back(Iperf(port, n, mib << 20));
    }
    if (median(theirs).bytes_per_s == 0) std::printf("(iperf3 is not installed, or could not run)\n");
    print(absl::StrCat(tls ? "tls, " : "tcp, ", n), median(ours), median(theirs));
    std::printf("%12s of its bytes %.2f%% sent zero-copy, %.2f%% copied by the kernel after all\n", "",
                100 * median(ours).zero_copy_sent, 100 * median(ours).zero_copy_copied);
  }
  const auto cpus = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Measured> first, ours, one, all;
  for (int i = 0; i < repetitions; ++i) {
    Pair pair(from, to, page_bytes, 0);
    first.push_back(pair.HandOff());
    ours.push_back(pair.HandOff());
    one.push_back(Copy(from, to, 1));
    all.push_back(Copy(from, to, cpus));
  }
  print("local, first", median(first), median(one));
  print("local", median(ours), median(one));
  for (const auto& [name, tls] : {std::pair("ucx, tcp", "tcp"), std::pair("ucx, shared", "posix,cma")}) {
    const auto from_ucx = OpenUcx(from, tls), to_ucx = OpenUcx(to, tls);
    if (from_ucx == nullptr || to_ucx == nullptr) continue;
    Pair pair(from, to, page_bytes, 1, from_ucx.get(), to_ucx.get());
    const auto processes = [&] { return CpuOfProcess(from_ucx->process()) + CpuOfProcess(to_ucx->process()); };
    std::vector<Measured> read, beside;
    for (int i = 0; i < repetitions; ++i) {
      const double before = processes();
      read.push_back(pair.HandOff());
      read.back().cpu_s_per_gib += (processes() - before) / static_cast<double>(from.size()) * (1 << 30);
      beside.push_back(Copy(from, to, 1));
    }
    print(name, median(read), median(beside));
  }
  std::printf("one thread's memcpy, and that of %u threads: %.2f and %.2f GB/s\n", cpus, median(one).bytes_per_s / 1e9,
              median(all).bytes_per_s / 1e9);
  return 0;
}

}  // namespace
}  // namespace kvmanager::tcp

int main(int argc, char** argv) { return kvmanager::tcp::Main(argc, argv); }
