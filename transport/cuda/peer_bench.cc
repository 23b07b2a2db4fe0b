// Bytes per second of one hand-off between two transports of this process, out of a pool on one GPU into a pool on
// another, beside one large cudaMemcpyPeer in the same run. Random bytes; every page's checksum is made by the sender's
// GPU, within the time that is measured, and verified by the receiver's. Where there is one GPU, it copies to itself:
// then the limit beside it is that of its own memory.
#include <cuda_runtime_api.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/page_hash.h"
#include "kvmanager/memory/pinned_region.h"
#include "transport/cuda/peer_copier.h"
#include "transport/tcp/tcp_transport.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{256} << 20;
constexpr size_t kPostPages = 2048;  // hashed, and then posted, at once

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
template <typename T>
T Value(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::exit(1);
}
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return double(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * double(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/// A pool of slabs on one GPU, cut into pages.
class Pool {
 public:
  Pool(const Device* device, uint64_t bytes) : device_(device) {
    const auto slabs = static_cast<uint32_t>((bytes + kSlabBytes - 1) / kSlabBytes);
    region_ = Value(DeviceRegion::Reserve(device, kSlabBytes, slabs));
    for (uint32_t i = 0; i < slabs; ++i) {
      Check(region_->Make(i));
      DeviceSlab slab;
      slab.gpu = device->info().uuid;
      slab.name = {static_cast<uint8_t>(i), 1};
      slab.data = region_->data() + i * kSlabBytes;
      slab.bytes = kSlabBytes;
      slab.fd = Value(region_->Export(i));
      slabs_.push_back(slab);
    }
  }
  void Fill() {
    Check(device_->Use());
    std::vector<uint64_t> bytes(kSlabBytes / 8);
    std::mt19937_64 random(1);
    for (uint64_t& word : bytes) word = random();
    for (const DeviceSlab& slab : slabs_) {
      bytes[0] = random();
      Check(cudaMemcpy(const_cast<uint8_t*>(slab.data), bytes.data(), kSlabBytes, cudaMemcpyHostToDevice), "filling");
    }
  }
  void Clear() {
    Check(device_->Use());
    for (const DeviceSlab& slab : slabs_) {
      Check(cudaMemset(const_cast<uint8_t*>(slab.data), 0, kSlabBytes), "clearing");
    }
    Check(cudaDeviceSynchronize(), "clearing");
  }
  /// Slots for pages of so many bytes.
  std::vector<SendPage> Pages(uint64_t page_bytes, uint64_t bytes) const {
    std::vector<SendPage> pages;
    const uint64_t slot = (page_bytes + 63) / 64 * 64;
    for (const DeviceSlab& slab : slabs_) {
      for (uint64_t at = 0; at + slot <= kSlabBytes && pages.size() * page_bytes < bytes; at += slot) {
        pages.push_back({static_cast<uint32_t>(pages.size()), {slab.data + at, page_bytes}, 0, 0, &slab});
      }
    }
    return pages;
  }
  const Device* device() const { return device_; }

 private:
  const Device* const device_;
  std::unique_ptr<DeviceRegion> region_;
  std::vector<DeviceSlab> slabs_;
};

/// Makes checksums of pages, in pinned memory.
class Hasher {
 public:
  Hasher(const Device* device, size_t pages) : device_(device), out_(Value(PinnedRegion::Make(device, 8 * pages))) {
    Check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "event");
  }
  void Hash(absl::Span<SendPage> pages) {
    Check(device_->Use());
    std::vector<PageBytes> list;
    list.reserve(pages.size());
    for (const SendPage& page : pages) list.push_back({page.bytes.data(), static_cast<uint32_t>(page.bytes.size())});
    auto* const out = reinterpret_cast<uint64_t*>(out_->data());
    Check(EnqueuePageHashes(list, out, device_->service_stream()));
    Check(cudaEventRecord(done_, device_->service_stream()), "event");
    Check(cudaEventSynchronize(done_), "hashing");
    for (size_t i = 0; i < pages.size(); ++i) pages[i].checksum = out[i];
  }

 private:
  const Device* const device_;
  std::unique_ptr<PinnedRegion> out_;
  cudaEvent_t done_ = nullptr;
};

/// Accepts everything into one pool.
class PoolReceiver final : public HandOffReceiver {
 public:
  PoolReceiver(int device, const std::vector<SendPage>* targets) : device_(device), targets_(targets) {}
  class HandOff final : public IncomingHandOff {
   public:
    explicit HandOff(const std::vector<SendPage>* targets) : targets_(targets) {}
    absl::Span<uint8_t> target(uint32_t page) const override {
      const auto& bytes = (*targets_)[page].bytes;
      return {const_cast<uint8_t*>(bytes.data()), bytes.size()};
    }
    std::vector<uint32_t> Unwanted(uint32_t, uint32_t) const override { return {}; }
    void Arrived(absl::Span<const uint32_t>) override {}
    void Extend(HandOffPart, absl::AnyInvocable<void(absl::Status)> reply) override { reply(absl::OkStatus()); }
    void Complete(absl::AnyInvocable<void(absl::Status)> reply) override { reply(absl::OkStatus()); }
    void Abort(absl::Status why) override { std::printf("aborted: %s\n", why.ToString().c_str()); }

   private:
    const std::vector<SendPage>* const targets_;
  };
  void Offer(std::string, HandOffPart, int64_t, OfferReply reply) override {
    Accepted accepted{std::make_shared<HandOff>(targets_), "ticket"};
    accepted.device = device_;
    reply.done(std::move(accepted));
  }
  ReceiverLoad Load() const override { return {}; }

 private:
  const int device_;
  const std::vector<SendPage>* const targets_;
};

struct Measured {
  double seconds = 0;
  double accepted_s = 0;  // until the receiver had said which pages it wants
  double cpu_s = 0;
};

/// hashes: made within the time; else before.
Measured HandOff(Transport& sender, const std::string& peer, std::vector<SendPage> pages, Hasher& hasher, bool hashes) {
  SendRequest request;
  request.peer = peer;
  request.header.manifest = "bench";
  request.header.gpu = pages[0].slab->gpu;
  for (const SendPage& page : pages) request.header.page_bytes.push_back(page.bytes.size());
  std::promise<absl::StatusOr<SendResult>> promise;
  SendEvents events;
  events.done = [&](absl::StatusOr<SendResult> result) { promise.set_value(std::move(result)); };
  HandOffPart last;
  last.manifest = "end";
  if (!hashes) {
    for (size_t at = 0; at < pages.size(); at += kPostPages) {
      hasher.Hash(absl::MakeSpan(pages).subspan(at, kPostPages));
    }
  }
  const double start = Seconds(), cpu = CpuSeconds();
  double accepted = 0;  // written before `done`
  events.accepted = [&](const std::string&) { accepted = Seconds(); };
  const uint64_t id = sender.Begin(std::move(request), std::move(events));
  for (size_t at = 0; at < pages.size(); at += kPostPages) {
    const absl::Span<SendPage> some = absl::MakeSpan(pages).subspan(at, kPostPages);
    if (hashes) hasher.Hash(some);
    sender.Post(id, {some.begin(), some.end()});
  }
  sender.Finish(id, std::move(last));
  const SendResult result = Value(promise.get_future().get());
  KV_CHECK(result.pages_sent == pages.size());
  return {Seconds() - start, accepted - start, CpuSeconds() - cpu};
}

/// One large copy between two plain allocations.
double PeerCopySeconds(int from, int to, uint64_t bytes, int repetitions) {
  void *source = nullptr, *target = nullptr;
  cudaStream_t stream = nullptr;
  Check(cudaSetDevice(from), "cudaSetDevice");
  Check(cudaMalloc(&source, bytes), "cudaMalloc");
  if (from != to) {
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) Check(enabled, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
  }
  Check(cudaSetDevice(to), "cudaSetDevice");
  Check(cudaMalloc(&target, bytes), "cudaMalloc");
  if (from != to) {
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(from, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) Check(enabled, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
  }
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::vector<double> all;
  for (int i = 0; i <= repetitions; ++i) {
    const double start = Seconds();
    Check(cudaMemcpyPeerAsync(target, to, source, from, bytes, stream), "cudaMemcpyPeerAsync");
    Check(cudaStreamSynchronize(stream), "cudaMemcpyPeerAsync");
    if (i > 0) all.push_back(Seconds() - start);  // the first makes the way
  }
  Check(cudaStreamDestroy(stream), "stream");
  Check(cudaFree(target), "cudaFree");
  Check(cudaFree(source), "cudaFree");
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

int Main(int argc, char** argv) {
  CLI::App app("One hand-off from a GPU's pool into another's, beside one large peer copy.");
  uint64_t mib = 4096;
  std::vector<uint64_t> page_bytes = {48640, 98304, 262144};
  int from = 0, to = -1, repetitions = 5;
  std::vector<int> blocks = {PeerCopier::kCopyBlocksDefault};
  app.add_option("--mib", mib, "MiB of one hand-off")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--page-bytes", page_bytes,
                 "bytes of a page: hack K3V2 with 8 KV heads of 128, 64 tokens; its raw page is 262144")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--from", from, "the sender's GPU")->capture_default_str();
  app.add_option("--to", to, "the receiver's; by default another, if there is one");
  app.add_option("--blocks", blocks, "of a copying launch, one row for each")->delimiter(',')->capture_default_str();
  app.add_option("--repetitions", repetitions, "the median of so many")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  int gpus = 0;
  Check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (to < 0) to = gpus > 1 ? (from + 1) % gpus : from;
  const auto sending = Value(Device::Open(from)), receiving = Value(Device::Open(to));
  std::printf("%s; pages go from GPU %d to GPU %d\n", DeviceSummary().c_str(), from, to);
  const uint64_t bytes = mib << 20;
  Pool source(sending.get(), bytes + bytes / 16), target(receiving.get(), bytes + bytes / 16);
  source.Fill();
  Hasher hasher(sending.get(), kPostPages), checker(receiving.get(), kPostPages);
  std::printf("%10s %8s %7s %10s %10s %14s %14s %14s %12s %7s %9s\n", "page bytes", "pages", "blocks", "first GB/s",
              "accepted ms", "hand-off GB/s", "hashed before", "hashing GB/s", "peer GB/s", "ratio", "CPU s/GiB");
  for (const uint64_t size : page_bytes) {
    std::vector<SendPage> pages = source.Pages(size, bytes);
    const std::vector<SendPage> targets = target.Pages(size, bytes);
    const auto all = static_cast<double>(pages.size() * size);
    for (const int n : blocks) {
      target.Clear();
      const Device* const device = receiving.get();
      const auto copier = Value(PeerCopier::Create({&device, 1}, n));
      KV_CHECK(copier->Reaches(sending->info().uuid, to));
      PoolReceiver receiver(to, &targets);
      Metrics registry;
      TransportMetrics metrics(&registry);
      TcpTransport::Options options;
      options.metrics = &metrics;
      const auto sender = Value(TcpTransport::Create(options));
      options.listen = "127.0.0.1:0";
      options.receiver = &receiver;
      options.local_connections = true;
      options.device_copier = copier.get();
      const auto taker = Value(TcpTransport::Create(options));
      const Measured first = HandOff(*sender, taker->listen_address(), pages, hasher, true);
      std::vector<double> whole, copied, hashed, peer;
      double cpu = 0, accepted = 0;
      for (int i = 0; i < repetitions; ++i) {
        const Measured warm = HandOff(*sender, taker->listen_address(), pages, hasher, true);
        whole.push_back(warm.seconds);
        cpu += warm.cpu_s;
        accepted += warm.accepted_s;
        copied.push_back(HandOff(*sender, taker->listen_address(), pages, hasher, false).seconds);
        const double start = Seconds();
        for (size_t at = 0; at < pages.size(); at += kPostPages) {
          hasher.Hash(absl::MakeSpan(pages).subspan(at, kPostPages));
        }
        hashed.push_back(Seconds() - start);
        peer.push_back(PeerCopySeconds(from, to, static_cast<uint64_t>(all), 1));
      }
      // What is there now, against what was sent.
      std::vector<SendPage> arrived = targets;
      for (size_t at = 0; at < arrived.size(); at += kPostPages) {
        checker.Hash(absl::MakeSpan(arrived).subspan(at, kPostPages));
      }
      for (size_t i = 0; i < pages.size(); ++i) KV_CHECK(arrived[i].checksum == pages[i].checksum);
      const auto rate = [&](std::vector<double>& seconds) {
        std::sort(seconds.begin(), seconds.end());
        return all / seconds[seconds.size() / 2] / 1e9;
      };
      const double ours = rate(whole), theirs = rate(peer);
      std::printf("%10lu %8zu %7d %10.1f %10.2f %14.1f %14.1f %14.1f %12.1f %7.3f %9.4f\n", size, pages.size(), n,
                  all / first.seconds / 1e9, accepted / repetitions * 1e3, ours, rate(copied), rate(hashed), theirs,
                  ours / theirs, cpu / repetitions / all * (1 << 30));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) { return kvmanager::Main(argc, argv); }
