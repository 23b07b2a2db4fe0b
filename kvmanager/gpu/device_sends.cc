#include "kvmanager/gpu/device_sends.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

using Word = SharedSemaphores::Word;

absl::StatusOr<std::unique_ptr<DeviceSends>> DeviceSends::Create(const Device* device, DevicePool* pool,
                                                                 PollList* polls) {
  std::unique_ptr<DeviceSends> sends(new DeviceSends(device, pool, polls));
  sends->slabs_.resize(pool->slabs());
  KV_CHECK(getrandom(&sends->process_, sizeof(sends->process_), 0) == sizeof(sends->process_));
  KV_ASSIGN_OR_RETURN(sends->words_, SharedSemaphores::Create());
  KV_RETURN_IF_ERROR(sends->words_->Pin(device));
  KV_ASSIGN_OR_RETURN(sends->sums_, PinnedRegion::Make(device, kPagesAtOnce * sizeof(uint64_t)));
  KV_ASSIGN_OR_RETURN(sends->stream_, device->NewStream(StreamPriority::kLowest));
  return sends;
}

DeviceSends::~DeviceSends() {
  if (stream_ != nullptr) device_->DestroyStream(stream_);
}

absl::StatusOr<std::shared_ptr<const DeviceSlab>> DeviceSends::SlabOf(const uint8_t* page) {
  const auto slab = static_cast<uint32_t>(static_cast<uint64_t>(page - pool_->data()) / pool_->slab_bytes());
  KV_CHECK(page >= pool_->data() && slab < slabs_.size());
  if (std::shared_ptr<const DeviceSlab> known = slabs_[slab].lock()) return known;
  KV_RETURN_IF_ERROR(device_->Use());
  KV_ASSIGN_OR_RETURN(const int fd, pool_->Export(slab));
  auto* const made = new DeviceSlab;
  made->gpu = device_->info().uuid;
  const uint32_t memory[2] = {slab, pool_->generation(slab)};
  static_assert(sizeof(process_) + sizeof(memory) == sizeof(made->name));
  std::memcpy(made->name.data(), &process_, sizeof(process_));
  std::memcpy(made->name.data() + sizeof(process_), memory, sizeof(memory));
  made->data = pool_->data() + slab * pool_->slab_bytes();
  made->bytes = pool_->slab_bytes();
  made->fd = fd;
  // A shared_ptr, since several hand-offs send pages out of a slab.
  const std::shared_ptr<const DeviceSlab> shared(made, [pool = pool_, slab](const DeviceSlab* gone) {
    ::close(gone->fd);
    delete gone;
    pool->ImporterGone(slab);
  });
  slabs_[slab] = shared;
  return shared;
}

void DeviceSends::Prepare(Work work, absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done) {
  KV_CHECK(!work.pages.empty());
  Job job;
  job.work = std::move(work);
  job.done = std::move(done);
  jobs_.push_back(std::move(job));
  if (jobs_.size() == 1 && failed_.ok()) failed_ = EnqueueNext();
  if (std::exchange(polling_, true)) return;
  polls_->Add([this] { return Poll(); });
}

// More of the first job.
absl::Status DeviceSends::EnqueueNext() {
  Job& job = jobs_.front();
  KV_RETURN_IF_ERROR(device_->Use());
  if (job.enqueued == 0) KV_RETURN_IF_ERROR(EnqueueOpenPageCopies(job.work.open, job.work.shape, stream_));
  const auto pages = absl::MakeConstSpan(job.work.pages).subspan(job.enqueued, kPagesAtOnce);
  KV_RETURN_IF_ERROR(EnqueuePageHashes(pages, reinterpret_cast<uint64_t*>(sums_->data()), stream_));
  KV_RETURN_IF_ERROR(device_->EnqueueWrite(stream_, words_->Address(Word::kDone), last_ + 1));
  ++last_;
  job.enqueued += pages.size();
  return absl::OkStatus();
}

bool DeviceSends::Quiet() const {
  const auto idle = device_->IsIdle(stream_);
  return !idle.ok() || *idle;
}

bool DeviceSends::Poll() {
  const bool done = words_->Load(Word::kDone) == last_;
  if (failed_.ok() && !done) {
    if (const auto idle = device_->IsIdle(stream_); !idle.ok()) failed_ = idle.status();
  }
  if (!failed_.ok()) {
    if (!Quiet()) return false;  // what failed may have begun
    spdlog::error("GPU {} sends no pages any more: {}", device_->info().ordinal, std::string(failed_.message()));
    for (Job& job : std::exchange(jobs_, {})) job.done(absl::UnavailableError(failed_.message()));
  } else if (done && !jobs_.empty()) {
    Job& first = jobs_.front();
    const auto* const sums = reinterpret_cast<const uint64_t*>(sums_->data());
    first.checksums.insert(first.checksums.end(), sums, sums + (first.enqueued - first.checksums.size()));
    if (first.enqueued == first.work.pages.size()) {
      Job ended = std::move(first);
      jobs_.pop_front();
      ended.done(std::move(ended.checksums));  // may prepare more
      if (!jobs_.empty() && jobs_.front().enqueued > 0) return false;
    }
    if (!jobs_.empty() && failed_.ok()) failed_ = EnqueueNext();
  }
  polling_ = !jobs_.empty();
  return !polling_;
}

bool DeviceSends::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!Quiet()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  jobs_.clear();  // with what they keep
  return true;
}

}  // namespace kvmanager
