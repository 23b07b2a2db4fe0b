#include "kvmanager/store/encode_executor.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "codecs/waiting_codec.h"
#include "kvmanager/base/failpoints.h"

namespace kvmanager {

EncodeMetrics::EncodeMetrics(Metrics* metrics)
    : seconds(
          metrics->Histogram("encode_seconds", "Encoding of one page on one worker", ExponentialBounds(4e-6, 2, 18))),
      input_bytes(metrics->Counter("encode_input_bytes_total", "Raw bytes of pages given to codecs")) {}

// Shared by the tasks of one batch and by its completion: the last to finish passes it on, hence shared_ptr.
struct PoolEncodeExecutor::Job {
  std::shared_ptr<const Codec> codec;
  std::vector<EncodeItem> items;
  WorkerPool::Owner owner = WorkerPool::kDaemon;
  WorkerPool* workers = nullptr;  // the codec's
  absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done;
  std::atomic<size_t> tasks_left{0};
};

PoolEncodeExecutor::PoolEncodeExecutor(WorkerPool* workers, MessageQueue* queue, EncodeMetrics* metrics,
                                       const Clock* clock)
    : workers_(workers), queue_(queue), metrics_(metrics), clock_(clock) {}

void PoolEncodeExecutor::Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items,
                                WorkerPool::Owner owner, absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) {
  auto job = std::make_shared<Job>();
  job->workers = WorkersOf(*codec, workers_);
  job->codec = std::move(codec);
  job->items = std::move(items);
  job->done = std::move(done);
  job->owner = owner;
  const size_t count = job->items.size();
  const size_t tasks = std::clamp<size_t>(count, 1, job->workers->threads());
  job->tasks_left = tasks;
  for (size_t t = 0; t < tasks; ++t) {
    const size_t begin = count * t / tasks, end = count * (t + 1) / tasks;
    PostTurn(job, begin, end);
  }
}

void PoolEncodeExecutor::PostTurn(std::shared_ptr<Job> job, size_t begin, size_t end) {
  const WorkerPool::Owner owner = job->owner;
  WorkerPool* const workers = job->workers;
  auto run = [this, job = std::move(job), begin, end]() mutable {
    const Turn turn = job->workers->NewTurn();
    do {
      const size_t next = std::min(begin + kPagesAtOnce, end);
      EncodePart(*job, begin, next);
      begin = next;
    } while (begin < end && !turn.over());
    if (begin < end) return PostTurn(std::move(job), begin, end);
    if (job->tasks_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    queue_->Post([job = std::move(job)] { job->done(job->items); });
  };
  workers->Post(WorkerPool::Priority::kEncode, std::move(run), owner);
}

void PoolEncodeExecutor::Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) {
  // Shared by the tasks: the last to finish passes the completion on.
  struct Batch {
    absl::AnyInvocable<void()> done;
    std::atomic<size_t> tasks_left{0};
  };
  auto batch = std::make_shared<Batch>();
  batch->done = std::move(done);
  batch->tasks_left = tasks.size();
  for (absl::AnyInvocable<void()>& task : tasks) {
    workers_->Post(WorkerPool::Priority::kEncode, [this, batch, task = std::move(task)]() mutable {
      task();
      task = nullptr;
      if (batch->tasks_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      queue_->Post([batch = std::move(batch)] { batch->done(); });
    });
  }
}

void PoolEncodeExecutor::EncodePart(Job& job, size_t begin, size_t end) {
  if (begin == end) return;
  MaybeSlow(Failpoint::kEncodeSlow);
  const int64_t start_ns = clock_->NowNs();
  AlignedBuffer workspace = TakeWorkspace(job.codec->encode_workspace_bytes());
  job.codec->Encode(absl::MakeSpan(job.items).subspan(begin, end - begin), workspace.span());
  GiveBack(std::move(workspace));
  for (size_t i = begin; i < end; ++i) job.items[i].declined |= Fails(Failpoint::kEncodeDecline);
  const int64_t sinks = std::count_if(job.items.begin() + begin, job.items.begin() + end,
                                      [](const EncodeItem& item) { return item.is_sink; });
  const double pages = double(end - begin) - double(sinks);  // a sink takes no time
  if (pages == 0) return;
  metrics_->seconds.Observe(double(clock_->NowNs() - start_ns) * 1e-9 / pages);
  metrics_->input_bytes.Increment(pages * double(job.codec->layout().raw_bytes()));
}

AlignedBuffer PoolEncodeExecutor::TakeWorkspace(size_t bytes) {
  {
    MutexLock lock(mutex_);
    if (!workspaces_.empty()) {
      AlignedBuffer workspace = std::move(workspaces_.back());
      workspaces_.pop_back();
      if (workspace.size() >= bytes) return workspace;
    }
  }
  return AlignedBuffer(bytes);
}

void PoolEncodeExecutor::GiveBack(AlignedBuffer workspace) {
  MutexLock lock(mutex_);
  workspaces_.push_back(std::move(workspace));
}

}  // namespace kvmanager
