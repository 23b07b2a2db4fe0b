#include "transport/tcp/copy_job.h"

#include <utility>

#include "transport/tcp/copy_hash.h"

namespace kvmanager::tcp {

void CopyJob::Start(const std::shared_ptr<CopyJob>& job, WorkerPool& workers, absl::AnyInvocable<void()> copied) {
  job->copied_ = std::move(copied);
  std::vector<WorkerPool::Task> tasks;
  tasks.reserve(workers.threads());
  for (int i = 0; i < workers.threads(); ++i) tasks.emplace_back([job] { job->Work(); });
  workers.Post(WorkerPool::Priority::kEncode, absl::MakeSpan(tasks));
}

void CopyJob::Work() {
  CopyHash copy;
  absl::AnyInvocable<void()> copied;
  for (bool more = true; more;) {
    size_t at = 0;
    {
      MutexLock lock(mutex_);
      if (next_ >= pages_.size()) return;
      at = next_++;
      ++working_;
    }
    Page& page = pages_[at];
    page.copied_checksum = copy.Copy(page.from, page.to.data(), page.to.size());
    MutexLock lock(mutex_);
    --working_;
    if (++finished_ == pages_.size()) copied = std::move(copied_);
    more = next_ < pages_.size();
    if (working_ == 0) idle_.notify_all();
  }
  if (copied) copied();
}

void CopyJob::StartRemotely(const std::shared_ptr<CopyJob>& job, RemoteMemory& memory,
                            const std::shared_ptr<WorkerPool>& workers, std::vector<Place> places,
                            absl::AnyInvocable<void()> copied) {
  job->copied_ = std::move(copied);
  for (size_t i = 0; i < places.size(); ++i) {
    memory.Read(std::move(places[i].source), places[i].offset, job->pages_[i].to.size(),
                [job, i, workers](absl::StatusOr<std::unique_ptr<RemoteMemory::Piece>> piece) {
                  if (!piece.ok()) return job->OnRead(i, std::move(piece));
                  workers->Post(WorkerPool::Priority::kEncode,
                                [job, i, piece = std::move(piece)]() mutable { job->OnRead(i, std::move(piece)); });
                });
  }
}

void CopyJob::OnRead(size_t at, absl::StatusOr<std::unique_ptr<RemoteMemory::Piece>> piece) {
  {
    MutexLock lock(mutex_);
    if (abandoned_) return;
    ++working_;
  }
  Page& page = pages_[at];
  if (piece.ok()) {
    CopyHash copy;
    page.copied_checksum = copy.Copy((*piece)->bytes().data(), page.to.data(), page.to.size());
    piece->reset();
  }
  absl::AnyInvocable<void()> copied;
  {
    MutexLock lock(mutex_);
    if (!piece.ok() && status_.ok()) status_ = std::move(piece).status();
    --working_;
    if (++finished_ == pages_.size()) copied = std::move(copied_);
    if (working_ == 0) idle_.notify_all();
  }
  if (copied) copied();
}

void CopyJob::StartOnDevice(const std::shared_ptr<CopyJob>& job, DeviceCopier& copier, int device,
                            std::vector<std::shared_ptr<DeviceCopier::Source>> sources,
                            std::vector<DeviceCopier::Page> copies, absl::AnyInvocable<void()> copied) {
  job->copied_ = std::move(copied);
  {
    MutexLock lock(job->mutex_);
    job->next_ = job->pages_.size();
    job->working_ = 1;
  }
  copier.Copy(
      device, std::move(sources), std::move(copies),
      [job](absl::Status status, std::vector<DeviceCopier::Page> done) { job->OnDeviceDone(std::move(status), done); });
}

void CopyJob::OnDeviceDone(absl::Status status, absl::Span<const DeviceCopier::Page> copies) {
  absl::AnyInvocable<void()> copied;
  {
    MutexLock lock(mutex_);
    for (size_t i = 0; status.ok() && i < pages_.size(); ++i) pages_[i].copied_checksum = copies[i].checksum;
    status_ = std::move(status);
    working_ = 0;
    finished_ = pages_.size();
    copied = std::move(copied_);
    idle_.notify_all();
  }
  if (copied) copied();
}

void CopyJob::Abandon() {
  MutexLock lock(mutex_);
  next_ = pages_.size();
  abandoned_ = true;
  copied_ = nullptr;
  while (working_ > 0) lock.Wait(idle_);
}

bool CopyJob::AbandonLater(absl::AnyInvocable<void()> ended) {
  MutexLock lock(mutex_);
  if (working_ == 0) {
    next_ = pages_.size();
    abandoned_ = true;
    copied_ = nullptr;
    return false;
  }
  copied_ = std::move(ended);
  return true;
}

bool CopyJob::done() const {
  MutexLock lock(mutex_);
  return finished_ == pages_.size();
}

}  // namespace kvmanager::tcp
