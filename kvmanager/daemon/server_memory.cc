#include "kvmanager/daemon/server_memory.h"

#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper.h"

namespace kvmanager {
namespace {

constexpr char kManifest[] = "manifest", kHasEnded[] = "the one before has ended";
constexpr size_t kLooks = 128;  // of a look, at slabs that engines map

constexpr size_t kTouchedBytes = Region::kHugePageBytes;
// Whoever grows the heap, maps or unmaps waits for the call that touches memory: a virtual machine may take 10 us for
// each page that its host has not given it yet. Between calls they get their turn: they would not for 4 ms, when the
// kernel has the touching thread stand back.
constexpr size_t kTouchedAtOnce = 512 << 10;
constexpr std::chrono::microseconds kBetweenCalls{50};
constexpr int kTouchingNice = 19;  // of the thread: what it does is not urgent

std::string RegionName(size_t index) { return absl::StrCat("pool-", index); }

std::string Content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Under systemd: a process that is started within a service ends with it.
bool EndsWithThisService(uint32_t pid) {
  const char* const supervisor = std::getenv("NOTIFY_SOCKET");
  if (supervisor == nullptr || *supervisor == '\0') return false;
  const std::string own = Content("/proc/self/cgroup");
  return !own.empty() && own == Content(absl::StrCat("/proc/", pid, "/cgroup"));
}

absl::Status Touch(uint8_t* data, size_t bytes) {
  thread_local const int nice = setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kTouchingNice);
  static_cast<void>(nice);
  for (size_t at = 0; at < bytes; at += kTouchedAtOnce) {
    if (madvise(data + at, std::min(kTouchedAtOnce, bytes - at), MADV_POPULATE_WRITE) != 0) {
      return absl::UnavailableError("the kernel does not touch memory ahead of use");  // before Linux 5.14
    }
    std::this_thread::sleep_for(kBetweenCalls);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ServerMemory::Open(const Options& options, const Clock* clock, MemoryMetrics* metrics) {
  metrics_ = metrics;
  KV_RETURN_IF_ERROR(OpenPool(options, clock));
  std::vector<absl::Span<uint8_t>> pieces;
  for (const auto& region : pool_->regions()) {
    for (size_t at = 0; at < region->bytes(); at += kTouchedBytes) {
      pieces.push_back({region->data() + at, std::min(kTouchedBytes, region->bytes() - at)});
    }
  }
  toucher_ = std::make_unique<HostPinner>(std::move(pieces), HostPinner::Calls{Touch, [](uint8_t*) {}});
  return absl::OkStatus();
}

absl::Status ServerMemory::OpenPool(const Options& options, const Clock* clock) {
  if (!options.state_dir.empty()) return OpenKept(options, clock);
  PagePool::Options pool;
  pool.pool_bytes = options.host_pool_bytes;
  pool.slab_bytes = options.slab_bytes;
  pool.clock = clock;
  KV_ASSIGN_OR_RETURN(pool_, PagePool::Create(pool));
  return absl::OkStatus();
}

void ServerMemory::Look(WorkerPool* background, MessageQueue* queue) {
  TakeBack(queue, std::min(kLooks, pool_->shown()->count()));
  if (!cleaner_.has_value()) cleaner_.emplace(pool_.get(), background, queue);
  cleaner_->Look();
  if (!state_dir_.empty() && !looks_.exchange(true)) {
    background->Post(WorkerPool::Priority::kEncode, [this] {
      LookAtKeeper();
      looks_ = false;
    });
  }
}

void ServerMemory::LookAtKeeper() {
  if ((keeps_ && !keeper_->gone() && keeper_->is_found()) || SteadyClock().NowNs() < try_again_ns_) return;
  const bool first = keeps_;
  if (first) metrics_->keepers_lost.Increment();
  const absl::Status kept = KeepAnew(keeper_->gone() ? kHasEnded : "the socket of the one before is gone");
  if (kept.ok()) return;
  const std::string why(kept.message());
  if (first) spdlog::error("--state-dir {}: nobody keeps the memory, a restart loses it: {}", state_dir_, why);
  ShowKept(absl::StrCat("nobody keeps it, a restart loses it: ", why), 0, /*outlives=*/false);
  try_again_ns_ = SteadyClock().NowNs() + kKeepTryNs;
}

void ServerMemory::ShowKept(std::string state, uint32_t pid, bool outlives) {
  metrics_->kept.Set(outlives ? 1 : 0);
  const MutexLock lock(mutex_);
  facts_ = {state_dir_, std::move(state), pid};
}

std::optional<KeptMemoryFacts> ServerMemory::Describe() const {
  if (state_dir_.empty()) return std::nullopt;
  const MutexLock lock(mutex_);
  return facts_;
}

void ServerMemory::TakeBack(MessageQueue* queue, size_t looks) {
  if (looks == 0) return;
  pool_->shown()->TakeBack();
  const size_t left = looks - std::min(looks, ShownSlabs::kLooksMax);
  if (left > 0) queue->Post([this, queue, left] { TakeBack(queue, left); });
}

absl::Status ServerMemory::OpenKept(const Options& options, const Clock* clock) {
  KV_ASSIGN_OR_RETURN(LockedFolder folder, LockedFolder::Open("--state-dir", options.state_dir));
  folder_.emplace(std::move(folder));
  state_dir_ = options.state_dir;
  keep_s_ = options.state_keep_s;
  KV_RETURN_IF_ERROR(OpenKeeper());
  PagePool::Options pool;
  pool.pool_bytes = options.host_pool_bytes;
  pool.slab_bytes = options.slab_bytes;
  pool.keep = true;
  pool.clock = clock;
  if (keeper_->left() > 0) {
    const absl::Status taken = TakeOver(pool);
    if (taken.ok()) return absl::OkStatus();
    spdlog::warn(
        "the memory of an earlier daemon is given up, with its blocks: {} (so after a change of --host-pool-bytes, "
        "--slab-bytes or its format)",
        std::string(taken.message()));
  }
  const absl::Status made = MakeAnew(pool);
  // A service's keeper may have taken its place meanwhile.
  return !made.ok() && pool_ != nullptr && keeper_->gone() ? KeepAnew(kHasEnded) : made;
}

absl::Status ServerMemory::OpenKeeper() {
  const std::string seconds = absl::StrCat(keep_s_);
  KV_ASSIGN_OR_RETURN(keeper_, MemoryKeeper::Open(state_dir_, {"/proc/self/exe", kKeeperFlag, state_dir_, seconds}));
  if (const absl::Status told = keeper_->SetIdle(keep_s_); !told.ok()) {
    spdlog::warn("--state-keep-s {} is not what the process that keeps the memory goes by: {}", seconds,
                 std::string(told.message()));
  }
  return absl::OkStatus();
}

absl::Status ServerMemory::KeepOn() {
  if (keeper_ == nullptr) return absl::OkStatus();
  if (!keeps_) return KeepAnew(kHasEnded);
  const absl::Status there = keeper_->Ping();
  if (there.ok() && keeper_->is_found()) return absl::OkStatus();
  if (there.ok()) return KeepAnew("the socket of the one before is gone");
  if (absl::IsDeadlineExceeded(there)) {
    return absl::UnavailableError(absl::StrCat("--state-dir ", state_dir_, ": ", there.message(),
                                               ": the memory would be lost; end the process that keeps it (kvmanagerd ",
                                               kKeeperFlag, " ", state_dir_, "), and another one takes its place"));
  }
  return KeepAnew(std::string(there.message()));
}

absl::Status ServerMemory::KeepAnew(const std::string& why) {
  keeps_ = false;
  if (!keeper_->gone()) (void)keeper_->Forget();  // nobody would find what it has
  KV_RETURN_IF_ERROR(OpenKeeper());
  KV_RETURN_IF_ERROR(keeper_->Forget());
  KV_RETURN_IF_ERROR(KeepAll());
  spdlog::warn("--state-dir {}: another process keeps the memory now, {} ({})", state_dir_, keeper_->pid(), why);
  return absl::OkStatus();
}

absl::Status ServerMemory::TakeOver(PagePool::Options pool) {
  for (int fd; (fd = keeper_->Take(RegionName(pool.kept.size()))) >= 0;) pool.kept.push_back(fd);
  if (pool.kept.empty()) return absl::FailedPreconditionError("it is not whole");
  KV_ASSIGN_OR_RETURN(std::unique_ptr<PagePool> taken, PagePool::Create(pool));
  const int fd = keeper_->Take(kManifest);
  if (fd < 0) return absl::FailedPreconditionError("it has no manifest");
  KV_ASSIGN_OR_RETURN(manifest_, KeptManifest::TakeOver(fd, {taken->capacity_bytes(), taken->slab_bytes()}));
  pool_ = std::move(taken);
  NoteKept();
  return absl::OkStatus();
}

absl::Status ServerMemory::MakeAnew(const PagePool::Options& pool) {
  // The host may not have memory for both.
  if (const absl::Status forgotten = keeper_->Forget(); !forgotten.ok()) {
    KV_RETURN_IF_ERROR(OpenKeeper());  // of a keeper that has just taken its place
    KV_RETURN_IF_ERROR(keeper_->Forget());
  }
  KV_ASSIGN_OR_RETURN(pool_, PagePool::Create(pool));
  KV_ASSIGN_OR_RETURN(manifest_, KeptManifest::Create({pool_->capacity_bytes(), pool_->slab_bytes()}));
  return KeepAll();
}

absl::Status ServerMemory::KeepAll() {
  for (size_t i = 0; i < pool_->regions().size(); ++i) {
    KV_RETURN_IF_ERROR(keeper_->Keep(RegionName(i), pool_->regions()[i]->keeper_fd()));
  }
  // Last: without it nothing is taken over.
  KV_RETURN_IF_ERROR(keeper_->Keep(kManifest, manifest_->keeper_fd()));
  NoteKept();
  return absl::OkStatus();
}

void ServerMemory::NoteKept() {
  keeps_ = true;
  if (EndsWithThisService(keeper_->pid())) {
    constexpr char kEnds[] = "a process of this service keeps it, and ends with it: systemctl start kvmanager-keeper";
    spdlog::warn("--state-dir {}: {}", state_dir_, kEnds);
    ShowKept(kEnds, keeper_->pid(), /*outlives=*/false);
  } else {
    ShowKept("a process keeps it", keeper_->pid(), /*outlives=*/true);
  }
}

}  // namespace kvmanager
