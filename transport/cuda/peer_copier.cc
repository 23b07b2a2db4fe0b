#include "transport/cuda/peer_copier.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/page_hash.h"
#include "kvmanager/memory/pinned_region.h"

namespace kvmanager {
namespace {

constexpr size_t kWordStride = 64;
constexpr int kPollsPerLook = 4096;  // at whether the GPU has failed, between polls of a word that it writes
constexpr uint32_t kCopyUnit = 16;   // slots are multiples of more

absl::Status GpuError(absl::string_view what, const absl::Status& why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "gpu", absl::StrCat(what, ": ", why.message()),
                    "memory that a GPU here can copy from");
}

class Slab final : public DeviceCopier::Source {
 public:
  explicit Slab(const DeviceSlab& facts) : facts(facts) {}
  ~Slab() override {
    if (facts.fd >= 0) ::close(facts.fd);
  }
  DeviceSlab facts;                      // fd: -1 once it is imported
  std::shared_ptr<DeviceRegion> region;  // of the GPU that copies: all targets of one data connection are on one GPU
};

class CudaPeerCopier final : public PeerCopier {
 public:
  explicit CudaPeerCopier(int copy_blocks) : copy_blocks_(copy_blocks) {}
  ~CudaPeerCopier() override;
  /// Once, before all else. Errors: Create's.
  absl::Status Init(absl::Span<const Device* const> devices);

  bool Reaches(const GpuName& from, int to) const override;
  std::shared_ptr<Source> Open(const DeviceSlab& slab) override;
  void Expect() override;
  void Copy(int device, std::vector<std::shared_ptr<Source>> sources, std::vector<Page> pages, Copied copied) override;
  void Sweep() override;

 private:
  struct Import {
    std::shared_ptr<DeviceRegion> region;
    bool used = true;  // since the last Sweep
  };
  struct Job {
    std::vector<std::shared_ptr<Source>> sources;
    std::vector<Page> pages;
    Copied copied;
    absl::Status status;
    uint64_t number = 0;    // that its stream writes behind it
    bool enqueued = false;  // at least in part
  };
  // One GPU. `waiting` is guarded by mutex_; the rest is the thread's.
  struct Gpu {
    const Device* device = nullptr;
    std::vector<GpuName> reaches;
    std::array<CUstream_st*, 2> copy_streams = {};
    CUstream_st* hash_stream = nullptr;
    std::unique_ptr<PinnedRegion> pinned;  // kJobsAtOnce words, 64 bytes apart, then as many lists of checksums
    std::map<std::array<uint8_t, 16>, Import> imports;
    std::deque<Job> running;  // in the order in which they were started
    uint64_t started = 0;
    bool failed = false;
    std::deque<Job> waiting;
  };

  void Run();
  void StartJobs(Gpu& gpu);
  void EndJobs(Gpu& gpu);
  absl::Status Enqueue(Gpu& gpu, Job& job);
  absl::StatusOr<std::shared_ptr<DeviceRegion>> ImportFor(Gpu& gpu, Slab& slab);
  void LetGoOfUnused(Gpu& gpu);
  static std::array<CUstream_st*, 3> Streams(const Gpu& gpu) {
    return {gpu.copy_streams[0], gpu.copy_streams[1], gpu.hash_stream};
  }
  static bool Quiet(const Gpu& gpu);
  Gpu* Find(int device) const;

  const int copy_blocks_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  Mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool sweep_due_ ABSL_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point awake_until_ ABSL_GUARDED_BY(mutex_);
  uint64_t polls_ = 0;  // the thread's
  std::thread thread_;
};

absl::Status CudaPeerCopier::Init(absl::Span<const Device* const> devices) {
  int seen = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&seen), "cudaGetDeviceCount"));
  for (const Device* device : devices) {
    auto gpu = std::make_unique<Gpu>();
    gpu->device = device;
    for (int other = 0; other < seen; ++other) {
      int can = other == device->info().ordinal;
      if (can == 0 && cudaDeviceCanAccessPeer(&can, device->info().ordinal, other) != cudaSuccess) continue;
      cudaDeviceProp properties;
      if (can == 0 || cudaGetDeviceProperties(&properties, other) != cudaSuccess) continue;
      GpuName name;
      std::memcpy(name.data(), properties.uuid.bytes, name.size());
      gpu->reaches.push_back(name);
    }
    for (CUstream_st** stream : {&gpu->copy_streams[0], &gpu->copy_streams[1], &gpu->hash_stream}) {
      KV_ASSIGN_OR_RETURN(*stream, device->NewStream(StreamPriority::kLowest));
    }
    KV_ASSIGN_OR_RETURN(gpu->pinned, PinnedRegion::Make(device, kJobsAtOnce * (kWordStride + kJobPagesMax * 8)));
    gpus_.push_back(std::move(gpu));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

CudaPeerCopier::~CudaPeerCopier() {
  if (thread_.joinable()) {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  for (const auto& gpu : gpus_) {
    gpu->imports.clear();
    for (CUstream_st* stream : Streams(*gpu)) {
      if (stream != nullptr) gpu->device->DestroyStream(stream);
    }
  }
}

CudaPeerCopier::Gpu* CudaPeerCopier::Find(int device) const {
  for (const auto& gpu : gpus_) {
    if (gpu->device->info().ordinal == device) return gpu.get();
  }
  return nullptr;
}

bool CudaPeerCopier::Reaches(const GpuName& from, int to) const {
  const Gpu* const gpu = Find(to);
  return gpu != nullptr && std::find(gpu->reaches.begin(), gpu->reaches.end(), from) != gpu->reaches.end();
}

std::shared_ptr<DeviceCopier::Source> CudaPeerCopier::Open(const DeviceSlab& slab) {
  return std::make_shared<Slab>(slab);
}

void CudaPeerCopier::Copy(int device, std::vector<std::shared_ptr<Source>> sources, std::vector<Page> pages,
                          Copied copied) {
  Gpu* const gpu = Find(device);
  KV_CHECK(gpu != nullptr && pages.size() <= kJobPagesMax);
  Job job;
  job.sources = std::move(sources);
  job.pages = std::move(pages);
  job.copied = std::move(copied);
  MutexLock lock(mutex_);
  gpu->waiting.push_back(std::move(job));
  changed_.notify_all();
}

void CudaPeerCopier::Expect() {
  MutexLock lock(mutex_);
  awake_until_ = std::chrono::steady_clock::now() + kExpect;
  changed_.notify_all();
}

void CudaPeerCopier::Sweep() {
  MutexLock lock(mutex_);
  sweep_due_ = true;
  changed_.notify_all();
}

void CudaPeerCopier::Run() {
  for (bool idle = false;;) {
    bool sweeps = false;
    {
      MutexLock lock(mutex_);
      const auto waits = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return std::any_of(gpus_.begin(), gpus_.end(), [](const auto& gpu) { return !gpu->waiting.empty(); });
      };
      const auto awake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return std::chrono::steady_clock::now() < awake_until_;
      };
      while (idle && !waits() && !stopping_ && !sweep_due_ && !awake()) lock.Wait(changed_);
      if (idle && !waits() && stopping_) return;
      sweeps = std::exchange(sweep_due_, false);
    }
    idle = true;
    for (const auto& gpu : gpus_) {
      if (sweeps) LetGoOfUnused(*gpu);
      StartJobs(*gpu);
      EndJobs(*gpu);
      idle &= gpu->running.empty();
    }
    std::this_thread::yield();
  }
}

void CudaPeerCopier::StartJobs(Gpu& gpu) {
  while (gpu.running.size() < kJobsAtOnce) {
    Job job;
    {
      MutexLock lock(mutex_);
      if (gpu.waiting.empty()) return;
      job = std::move(gpu.waiting.front());
      gpu.waiting.pop_front();
    }
    // Jobs end in their order: a place that was used so long ago is free.
    job.number = ++gpu.started;
    job.status = gpu.failed ? absl::UnavailableError("the GPU has failed") : Enqueue(gpu, job);
    gpu.running.push_back(std::move(job));
  }
}

absl::StatusOr<std::shared_ptr<DeviceRegion>> CudaPeerCopier::ImportFor(Gpu& gpu, Slab& slab) {
  const auto found = gpu.imports.find(slab.facts.name);
  if (found != gpu.imports.end() && found->second.region->slab_bytes() == slab.facts.bytes) {
    found->second.used = true;
    return found->second.region;
  }
  const int fd = std::exchange(slab.facts.fd, -1);
  auto region = DeviceRegion::Reserve(gpu.device, slab.facts.bytes, 1);
  if (!region.ok()) {
    ::close(fd);
    return region.status();
  }
  KV_RETURN_IF_ERROR((*region)->Import(0, fd, /*writable=*/false));
  std::shared_ptr<DeviceRegion> imported = *std::move(region);
  gpu.imports[slab.facts.name] = {imported};
  return imported;
}

absl::Status CudaPeerCopier::Enqueue(Gpu& gpu, Job& job) {
  KV_RETURN_IF_ERROR(gpu.device->Use());
  std::vector<PageCopy> copies;
  std::vector<PageBytes> hashes;
  copies.reserve(job.pages.size());
  hashes.reserve(job.pages.size());
  for (const Page& page : job.pages) {
    Slab& slab = static_cast<Slab&>(*page.from);
    if (slab.region == nullptr) {
      KV_ASSIGN_OR_RETURN(slab.region, ImportFor(gpu, slab));
    }
    const uint32_t bytes = (page.bytes + kCopyUnit - 1) / kCopyUnit * kCopyUnit;
    copies.push_back({page.to, slab.region->data() + page.offset, bytes});
    hashes.push_back({page.to, page.bytes});
    if (page.bytes >= kPageHashBytesMin) continue;
    return InvalidField("page bytes", page.bytes, absl::StrCat("at least ", kPageHashBytesMin));
  }
  CUstream_st* const copies_on = gpu.copy_streams[job.number % gpu.copy_streams.size()];
  const size_t place = job.number % kJobsAtOnce;
  auto* const checksums = reinterpret_cast<uint64_t*>(gpu.pinned->data() + kJobsAtOnce * kWordStride);
  job.enqueued = true;
  KV_RETURN_IF_ERROR(
      EnqueuePageCopies(PageDirection::kFetch, copies, copies_on, PageCopyMethod::kKernel, copy_blocks_));
  KV_RETURN_IF_ERROR(gpu.device->Follow(gpu.hash_stream, copies_on));
  KV_RETURN_IF_ERROR(EnqueuePageHashes(hashes, checksums + place * kJobPagesMax, gpu.hash_stream));
  return gpu.device->EnqueueWrite(gpu.hash_stream, gpu.pinned->data() + place * kWordStride, job.number);
}

bool CudaPeerCopier::Quiet(const Gpu& gpu) {
  const auto streams = Streams(gpu);
  return std::all_of(streams.begin(), streams.end(), [&](CUstream_st* stream) {
    const auto idle = gpu.device->IsIdle(stream);
    return !idle.ok() || *idle;
  });
}

void CudaPeerCopier::EndJobs(Gpu& gpu) {
  while (!gpu.running.empty()) {
    Job& job = gpu.running.front();
    const size_t place = job.number % kJobsAtOnce;
    if (job.status.ok()) {
      const auto* const word = reinterpret_cast<const uint64_t*>(gpu.pinned->data() + place * kWordStride);
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != job.number) {
        if (++polls_ % kPollsPerLook != 0) return;
        for (CUstream_st* stream : Streams(gpu)) {
          if (const auto idle = gpu.device->IsIdle(stream); !idle.ok()) job.status = idle.status();
        }
        if (job.status.ok()) return;
        gpu.failed = true;
      }
    }
    // What was enqueued in part may still write.
    if (!job.status.ok() && job.enqueued && !Quiet(gpu)) return;
    if (job.status.ok()) {
      const auto* const checksums = reinterpret_cast<const uint64_t*>(gpu.pinned->data() + kJobsAtOnce * kWordStride);
      for (size_t i = 0; i < job.pages.size(); ++i) job.pages[i].checksum = checksums[place * kJobPagesMax + i];
    }
    Job ended = std::move(job);
    gpu.running.pop_front();
    ended.copied(ended.status.ok()
                     ? absl::OkStatus()
                     : GpuError(absl::StrCat("GPU ", gpu.device->info().ordinal, " copied nothing"), ended.status),
                 std::move(ended.pages));
  }
}

void CudaPeerCopier::LetGoOfUnused(Gpu& gpu) {
  for (auto entry = gpu.imports.begin(); entry != gpu.imports.end();) {
    Import& import = entry->second;
    const bool kept = std::exchange(import.used, false) || import.region.use_count() > 1;
    entry = kept ? std::next(entry) : gpu.imports.erase(entry);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCopier>> PeerCopier::Create(absl::Span<const Device* const> devices,
                                                               int copy_blocks) {
  auto copier = std::make_unique<CudaPeerCopier>(copy_blocks);
  KV_RETURN_IF_ERROR(copier->Init(devices));
  return copier;
}

}  // namespace kvmanager
