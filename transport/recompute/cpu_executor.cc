#include "transport/recompute/cpu_executor.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <vector>

#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/projection.h"

namespace kvmanager::recompute {
namespace {

class CpuExecutor final : public ReloadExecutor {
 public:
  CpuExecutor(const ProjectionModel& model, const CpuExecutorOptions& options, CopyLink* link, WorkerPool* pool,
              const Clock* clock, const Blas* blas)
      : model_(model),
        options_(options),
        link_(link),
        clock_(clock),
        projection_(model, options.chunk_rows, pool, blas),
        row_bytes_(size_t(model.hidden) * DTypeBytes(model.layout.dtype)),
        staging_(options.buffers, std::vector<uint8_t>(row_bytes_ * options.chunk_rows)),
        staged_(options.buffers, false),
        copier_([this] { CopyLane(); }),
        computer_([this] { ComputeLane(); }) {}

  ~CpuExecutor() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      aborted_ = true;
    }
    wake_.notify_all();
    copier_.join();
    computer_.join();
  }

  const ProjectionModel& model() const override { return model_; }
  int buffers() const override { return options_.buffers; }
  int chunk_rows() const override { return options_.chunk_rows; }
  absl::Status RegisterWeights(int layer, const LayerWeights& weights) override {
    return projection_.RegisterWeights(layer, weights);
  }
  bool HasWeights(int layer) const override { return projection_.HasWeights(layer); }

  void Begin(const std::atomic<bool>* cancelled) override {
    MutexLock lock(mutex_);
    KV_CHECK(copies_.empty() && projections_.empty() && done_.empty());
    cancelled_ = cancelled;
    aborted_ = false;
    staged_.assign(options_.buffers, false);
  }

  void PostActivations(int buffer, absl::Span<const ActivationRows> rows) override {
    Post([&] { copies_.push_back({.buffer = buffer, .rows = rows}); });
  }
  void PostKv(absl::Span<const CopyPiece> pieces) override {
    Post([&] { copies_.push_back({.pieces = pieces}); });
  }
  void PostProjection(int buffer, int layer, absl::Span<const PageRows> pages) override {
    Post([&] { projections_.push_back({buffer, layer, pages}); });
  }

  Done Wait() override {
    MutexLock lock(mutex_);
    while (done_.empty()) lock.Wait(answered_);
    Done done = std::move(done_.front());
    done_.pop_front();
    return done;
  }

  void Abort() override {
    aborted_ = true;
    MutexLock lock(mutex_);  // a lane that is about to sleep sees it, or is woken
    wake_.notify_all();
  }

 private:
  struct CopyJob {
    int buffer = -1;  // -1: K and V
    absl::Span<const ActivationRows> rows;
    absl::Span<const CopyPiece> pieces;
  };
  struct ProjectionJob {
    int buffer = 0, layer = 0;
    absl::Span<const PageRows> pages;
  };

  template <typename Push>
  void Post(Push push) {
    {
      MutexLock lock(mutex_);
      push();
    }
    wake_.notify_all();
  }

  bool Stopped() const {
    const std::atomic<bool>* const cancelled = cancelled_;
    return aborted_.load() || (cancelled != nullptr && cancelled->load());
  }
  absl::Status State() const { return Stopped() ? absl::CancelledError("the reload was cancelled") : absl::OkStatus(); }

  void CopySliced(const uint8_t* from, uint8_t* to, size_t bytes) {
    for (size_t slice = link_->slice_bytes(); bytes > 0 && !Stopped();) {
      const size_t now = std::min(slice, bytes);
      link_->Copy(from, to, now);
      from += now, to += now, bytes -= now;
    }
  }

  void CopyLane() {
    while (true) {
      CopyJob job;
      {
        MutexLock lock(mutex_);
        while (copies_.empty() && !stopping_) lock.Wait(wake_);
        if (stopping_) return;
        job = copies_.front();
      }
      const int64_t begin_ns = clock_->NowNs();
      if (job.buffer >= 0) {
        uint8_t* to = staging_[job.buffer].data();
        for (const ActivationRows& rows : job.rows) {
          CopySliced(rows.from, to, rows.bytes);
          to += rows.bytes;
        }
      } else {
        for (const CopyPiece& piece : job.pieces) CopySliced(piece.from, piece.to, piece.bytes);
      }
      const int64_t elapsed_ns = clock_->NowNs() - begin_ns;
      {
        MutexLock lock(mutex_);
        copies_.pop_front();
        if (job.buffer >= 0) staged_[job.buffer] = true;
        done_.push_back(
            {job.buffer >= 0 ? Done::What::kActivations : Done::What::kKv, job.buffer, elapsed_ns, State()});
      }
      answered_.notify_one();
      wake_.notify_all();
    }
  }

  void ComputeLane() {
    while (true) {
      ProjectionJob job;
      {
        MutexLock lock(mutex_);
        while ((projections_.empty() || !(staged_[projections_.front().buffer] || Stopped())) && !stopping_) {
          lock.Wait(wake_);
        }
        if (stopping_) return;
        job = projections_.front();
      }
      const int64_t begin_ns = clock_->NowNs();
      absl::Status status = State();
      if (status.ok()) {
        status = projection_.Run(staging_[job.buffer].data(), job.layer, job.pages, cancelled_, aborted_);
      }
      const int64_t elapsed_ns = clock_->NowNs() - begin_ns;
      {
        MutexLock lock(mutex_);
        projections_.pop_front();
        staged_[job.buffer] = false;
        done_.push_back({Done::What::kProjection, job.buffer, elapsed_ns, std::move(status)});
      }
      answered_.notify_one();
    }
  }

  const ProjectionModel model_;
  const CpuExecutorOptions options_;
  CopyLink* const link_;
  const Clock* const clock_;
  Projection projection_;
  const size_t row_bytes_;
  std::vector<std::vector<uint8_t>> staging_;  // [buffers][chunk_rows * row_bytes_]: the lanes take turns by staged_
  std::atomic<bool> aborted_{false};
  std::atomic<const std::atomic<bool>*> cancelled_{nullptr};

  Mutex mutex_;
  std::condition_variable wake_;      // both lanes
  std::condition_variable answered_;  // Wait
  std::deque<CopyJob> copies_ ABSL_GUARDED_BY(mutex_);
  std::deque<ProjectionJob> projections_ ABSL_GUARDED_BY(mutex_);
  std::deque<Done> done_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> staged_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread copier_, computer_;  // last: they use everything above
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCpuExecutor(const ProjectionModel& model,
                                                                const CpuExecutorOptions& options, CopyLink* link,
                                                                WorkerPool* pool, const Clock* clock) {
  KV_CHECK(link != nullptr && clock != nullptr);
  KV_RETURN_IF_ERROR(CheckModel(model));
  if (options.chunk_rows < model.layout.page_tokens || options.chunk_rows > CpuExecutorOptions::kChunkRowsMax) {
    return InvalidField("chunk_rows", options.chunk_rows,
                        absl::StrCat(model.layout.page_tokens, "..", CpuExecutorOptions::kChunkRowsMax));
  }
  if (options.buffers < 2 || options.buffers > ReloadExecutor::kBuffersMax) {
    return InvalidField("buffers", options.buffers, absl::StrCat("2..", ReloadExecutor::kBuffersMax));
  }
  const int64_t row_bytes = int64_t{model.hidden} * (4 + 2 * options.buffers) + 8 * int64_t{model.width()};
  if (options.chunk_rows * row_bytes > CpuExecutorOptions::kStagingBytesMax) {
    return InvalidField("chunk_rows", options.chunk_rows,
                        absl::StrCat("at most ", CpuExecutorOptions::kStagingBytesMax / row_bytes, ", of ", row_bytes,
                                     " staging bytes each"));
  }
  KV_ASSIGN_OR_RETURN(const Blas* const blas, LoadBlas());
  return std::unique_ptr<ReloadExecutor>(std::make_unique<CpuExecutor>(model, options, link, pool, clock, blas));
}

}  // namespace kvmanager::recompute
