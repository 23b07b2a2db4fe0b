#include "transport/recompute/cuda_executor.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_memory.h"
#include "transport/recompute/convert.h"
#include "transport/recompute/cuda_lanes.h"
#include "transport/recompute/cuda_projection.h"

namespace kvmanager::recompute {
namespace {

constexpr int kTileRows = CudaExecutorOptions::kTileRows;
constexpr int kWarmRowsMax = 1024;          // of each size up to this one product is made before the first reload
constexpr size_t kPieceBytesMin = 8 << 20;  // of K and V: between two posts the link rests for the time of 260 KB
constexpr int kFirstChunkShare = 3;
constexpr int64_t kAllFinite = -1;

absl::Status Check(cudaError_t error, absl::string_view call) { return CudaStatus(error, call); }

class CudaExecutor final : public ReloadExecutor {
 public:
  CudaExecutor(const ProjectionModel& model, const CudaExecutorOptions& options, std::shared_ptr<CudaLanes> lanes)
      : model_(model),
        options_(options),
        lanes_(std::move(lanes)),
        device_(lanes_->device),
        not_finite_(lanes_->not_finite.get()),
        layers_(model.layers),
        staging_(options.buffers) {
    copy_.stream = lanes_->copy;
    compute_.stream = lanes_->compute;
  }

  absl::Status Prepare() {
    KV_RETURN_IF_ERROR(device_->Use());
    const size_t rows = RoundedRows(options_.chunk_rows), pairs = model_.rope.rotary_dims / 2;
    const size_t row_bytes = size_t(model_.hidden) * DTypeBytes(model_.layout.dtype);
    CUstream_st* const stream = compute_.stream;
    for (Staging& staging : staging_) {
      KV_ASSIGN_OR_RETURN(staging.rows, AllocateOnDevice<uint8_t>(rows * row_bytes, stream));
      // Rows that fill up a tile are products of something finite, if of nothing in particular.
      KV_RETURN_IF_ERROR(Check(cudaMemsetAsync(staging.rows.get(), 0, rows * row_bytes, stream), "cudaMemsetAsync"));
      KV_ASSIGN_OR_RETURN(staging.angles, AllocateOnDevice<float>(rows * 2 * pairs, stream));
      KV_ASSIGN_OR_RETURN(staging.turned, TakeEvent());
      if (!options_.pages_in_host_memory) continue;
      KV_ASSIGN_OR_RETURN(staging.pages, AllocateOnDevice<uint8_t>(PagesAtOnce() * model_.layout.raw_bytes(), stream));
      KV_ASSIGN_OR_RETURN(staging.made, TakeEvent());
    }
    KV_ASSIGN_OR_RETURN(products_, AllocateOnDevice<float>(rows * 2 * model_.width(), stream));
    KV_ASSIGN_OR_RETURN(frequencies_, AllocateOnDevice<double>(pairs, stream));
    const std::vector<double> frequencies = Rope(model_.rope).frequencies();
    KV_RETURN_IF_ERROR(Upload(frequencies.data(), pairs * sizeof(double), frequencies_.get()));
    // What other streams use of it is there.
    KV_RETURN_IF_ERROR(Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
    return WarmUp();
  }

  ~CudaExecutor() override {
    (void)device_->Use();
    for (Lane* const lane : {&copy_, &compute_}) {
      if (!lane->posts.empty()) {
        cudaStreamSynchronize(lane->stream);
        cudaStreamSynchronize(lanes_->angles);
        cudaStreamSynchronize(lanes_->back);
      }
      for (const Post& post : lane->posts) {
        Recycle(post.begin);
        Recycle(post.end);
      }
      Recycle(lane->previous_end);
    }
    for (const Staging& staging : staging_) {
      Recycle(staging.turned);
      Recycle(staging.made);
    }
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  const ProjectionModel& model() const override { return model_; }
  int buffers() const override { return options_.buffers; }
  int chunk_rows() const override { return options_.chunk_rows; }
  int first_chunk_rows() const override {
    return std::max<int>(model_.layout.page_tokens, options_.chunk_rows / kFirstChunkShare / kTileRows * kTileRows);
  }
  size_t kv_piece_bytes() const override { return std::max(kPieceBytesMin, ReloadExecutor::kv_piece_bytes()); }
  bool HasWeights(int layer) const override { return layers_[layer].weights != nullptr; }

  absl::Status RegisterWeights(int layer, const LayerWeights& w) override {
    KV_RETURN_IF_ERROR(CheckWeights(model_, layer, w));
    if (w.dtype != model_.layout.dtype) {
      return InvalidField("weights.dtype", int(w.dtype),
                          absl::StrCat(int(model_.layout.dtype), ", that of activations, on a GPU"));
    }
    KV_RETURN_IF_ERROR(device_->Use());
    Layer made;
    KV_ASSIGN_OR_RETURN(made.weights, AllocateOnDevice<uint8_t>(w.k.size() + w.v.size(), compute_.stream));
    KV_RETURN_IF_ERROR(Upload(w.k.data(), w.k.size(), made.weights.get()));
    KV_RETURN_IF_ERROR(Upload(w.v.data(), w.v.size(), made.weights.get() + w.k.size()));
    if (!w.k_bias.empty() || !w.v_bias.empty()) {
      std::vector<float> bias(2 * model_.width());
      Widen(w.k_bias.data(), w.dtype, w.k_bias.size() / DTypeBytes(w.dtype), bias.data());
      Widen(w.v_bias.data(), w.dtype, w.v_bias.size() / DTypeBytes(w.dtype), bias.data() + model_.width());
      KV_ASSIGN_OR_RETURN(made.bias, AllocateOnDevice<float>(bias.size(), compute_.stream));
      KV_RETURN_IF_ERROR(Upload(bias.data(), bias.size() * sizeof(float), made.bias.get()));
    }
    layers_[layer] = std::move(made);
    return absl::OkStatus();
  }

  void Begin(const std::atomic<bool>* cancelled) override {
    KV_CHECK(copy_.posts.empty() && compute_.posts.empty());
    cancelled_ = cancelled;
    aborted_ = false;
    begun_ = device_->Use();
    for (Staging& staging : staging_) staging.status = absl::FailedPreconditionError("nothing was staged");
  }

  void PostActivations(int buffer, absl::Span<const ActivationRows> rows) override {
    Staging& staging = staging_[buffer];
    Post post{.what = Done::What::kActivations, .buffer = buffer};
    copies_.clear();
    uint8_t* to = staging.rows.get();
    for (const ActivationRows& piece : rows) {
      copies_.push_back({piece.from, to, piece.bytes});
      to += piece.bytes;
    }
    EnqueueOnCopyLane(&post, copies_);
    staging.status = post.status;
    staging.arrived = post.status.ok() ? post.end : nullptr;
    copy_.posts.push_back(std::move(post));
  }

  void PostKv(absl::Span<const CopyPiece> pieces) override {
    Post post{.what = Done::What::kKv};
    EnqueueOnCopyLane(&post, pieces);
    copy_.posts.push_back(std::move(post));
  }

  void PostProjection(int buffer, int layer, absl::Span<const PageRows> pages) override {
    Post post{.what = Done::What::kProjection, .buffer = buffer, .layer = layer, .pages = pages};
    post.status = Enqueueable();
    if (post.status.ok()) post.status = staging_[buffer].status;
    if (post.status.ok()) {
      not_finite_[buffer] = kAllFinite;
      post.status = EnqueueProjection(staging_[buffer], layers_[layer], pages, &not_finite_[buffer], &post);
      post.enqueued = true;
    }
    compute_.posts.push_back(std::move(post));
  }

  Done Wait() override {
    KV_CHECK(!copy_.posts.empty() || !compute_.posts.empty());
    while (true) {
      for (Lane* const lane : {&compute_, &copy_}) {
        if (lane->posts.empty()) continue;
        const Post& post = lane->posts.front();
        if (!post.status.ok()) return Answer(lane, absl::OkStatus());
        const cudaError_t passed = cudaEventQuery(post.end);
        if (passed != cudaErrorNotReady) return Answer(lane, Check(passed, "cudaEventQuery"));
      }
      std::this_thread::yield();
    }
  }

  void Abort() override { aborted_ = true; }

 private:
  struct Staging {
    DeviceArray<uint8_t> rows;      // [chunk_rows, whole tiles][hidden]
    DeviceArray<float> angles;      // [chunk_rows, whole tiles][pairs][cos, sin]
    cudaEvent_t turned = nullptr;   // angles are there
    DeviceArray<uint8_t> pages;     // [PagesAtOnce()] raw, of those that lie in host memory
    cudaEvent_t made = nullptr;     // they are
    cudaEvent_t arrived = nullptr;  // of activations that are posted; nullptr: they have been answered
    absl::Status status;            // why there are none to project
  };
  struct Layer {
    DeviceArray<uint8_t> weights;  // [side][width][hidden]
    DeviceArray<float> bias;       // [side][width], or nullptr
  };
  struct Post {
    Done::What what = Done::What::kKv;
    int buffer = -1, layer = 0;
    absl::Span<const PageRows> pages;
    cudaEvent_t begin = nullptr;  // nullptr: when the lane's post before it ended
    cudaEvent_t end = nullptr;
    bool enqueued = false;  // perhaps in part, if status is an error
    absl::Status status;
  };
  struct Lane {
    CUstream_st* stream = nullptr;
    std::deque<Post> posts;
    cudaEvent_t previous_end = nullptr;
  };

  size_t PagesAtOnce() const { return size_t(options_.chunk_rows) / model_.layout.page_tokens; }
  static size_t RoundedRows(size_t rows) { return CudaExecutorOptions::WholeTiles(rows); }

  /// Behind what the compute stream has; `from` may go.
  absl::Status Upload(const void* from, size_t bytes, void* to) {
    if (bytes == 0) return absl::OkStatus();
    KV_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, compute_.stream), "cudaMemcpyAsync"));
    return Check(cudaStreamSynchronize(compute_.stream), "cudaStreamSynchronize");
  }

  /// A kernel of cuBLAS is loaded when it is first used, which waits for the device: now, not in a reload.
  absl::Status WarmUp() {
    if (lanes_->Met(model_, options_.chunk_rows)) return absl::OkStatus();
    Layer zeros;
    const size_t bytes = 2 * size_t(model_.width()) * model_.hidden * DTypeBytes(model_.layout.dtype);
    KV_ASSIGN_OR_RETURN(zeros.weights, AllocateOnDevice<uint8_t>(bytes, compute_.stream));
    KV_RETURN_IF_ERROR(Check(cudaMemsetAsync(zeros.weights.get(), 0, bytes, compute_.stream), "cudaMemsetAsync"));
    const size_t rows_max = RoundedRows(options_.chunk_rows);
    for (size_t rows = kTileRows; rows <= std::min<size_t>(rows_max, kWarmRowsMax); rows += kTileRows) {
      KV_RETURN_IF_ERROR(Multiply(staging_[0], zeros, rows));
    }
    if (rows_max > kWarmRowsMax) KV_RETURN_IF_ERROR(Multiply(staging_[0], zeros, rows_max));
    zeros.weights = nullptr;
    KV_RETURN_IF_ERROR(Check(cudaStreamSynchronize(compute_.stream), "cudaStreamSynchronize"));
    lanes_->Meet(model_, options_.chunk_rows);
    return absl::OkStatus();
  }

  absl::Status Multiply(const Staging& staging, const Layer& layer, size_t rows) {
    return lanes_->cublas->Multiply(model_.layout.dtype, int(rows), 2 * model_.width(), model_.hidden,
                                    staging.rows.get(), layer.weights.get(), products_.get());
  }

  bool Stopped() const { return aborted_ || (cancelled_ != nullptr && cancelled_->load()); }
  absl::Status Enqueueable() const {
    if (!begun_.ok()) return begun_;
    return Stopped() ? absl::CancelledError("the reload was cancelled") : absl::OkStatus();
  }

  absl::StatusOr<cudaEvent_t> TakeEvent() {
    if (events_.empty()) {
      cudaEvent_t event = nullptr;
      KV_RETURN_IF_ERROR(Check(cudaEventCreate(&event), "cudaEventCreate"));
      return event;
    }
    const cudaEvent_t event = events_.back();
    events_.pop_back();
    return event;
  }
  void Recycle(cudaEvent_t event) {
    if (event != nullptr) events_.push_back(event);
  }
  absl::Status Record(cudaEvent_t* event, CUstream_st* stream) {
    KV_ASSIGN_OR_RETURN(*event, TakeEvent());
    return Check(cudaEventRecord(*event, stream), "cudaEventRecord");
  }

  void EnqueueOnCopyLane(Post* post, absl::Span<const CopyPiece> pieces) {
    post->status = Enqueueable();
    if (!post->status.ok()) return;
    post->enqueued = true;
    post->status = [&] {
      if (copy_.posts.empty()) KV_RETURN_IF_ERROR(Record(&post->begin, copy_.stream));
      KV_RETURN_IF_ERROR(EnqueueCopies(pieces, copy_.stream));
      return Record(&post->end, copy_.stream);
    }();
  }

  absl::Status EnqueueCopies(absl::Span<const CopyPiece> pieces, CUstream_st* stream) {
    if (pieces.empty()) return absl::OkStatus();
    if (pieces.size() == 1) {
      return Check(cudaMemcpyAsync(pieces[0].to, pieces[0].from, pieces[0].bytes, cudaMemcpyDefault, stream),
                   "cudaMemcpyAsync");
    }
    from_.clear(), to_.clear(), bytes_.clear();
    for (const CopyPiece& piece : pieces) {
      from_.push_back(piece.from);
      to_.push_back(piece.to);
      bytes_.push_back(piece.bytes);
    }
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    return Check(
        cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), bytes_.size(), &attributes, &first, 1, stream),
        "cudaMemcpyBatchAsync");
  }

  absl::Status EnqueueProjection(const Staging& staging, const Layer& layer, absl::Span<const PageRows> pages,
                                 int64_t* not_finite, Post* post) {
    const StoreBuffers buffers = {.frequencies = frequencies_.get(),
                                  .angles = staging.angles.get(),
                                  .products = products_.get(),
                                  .bias = layer.bias.get()};
    size_t rows = 0;
    for (const PageRows& page : pages) rows += page.tokens;
    // Ahead of the activations, and of the projections before this one.
    KV_RETURN_IF_ERROR(EnqueueAngles(model_, pages, buffers, lanes_->angles));
    KV_RETURN_IF_ERROR(Check(cudaEventRecord(staging.turned, lanes_->angles), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(Check(cudaStreamWaitEvent(compute_.stream, staging.turned, 0), "cudaStreamWaitEvent"));
    if (staging.arrived != nullptr) {
      KV_RETURN_IF_ERROR(Check(cudaStreamWaitEvent(compute_.stream, staging.arrived, 0), "cudaStreamWaitEvent"));
    }
    KV_RETURN_IF_ERROR(Record(&post->begin, compute_.stream));
    KV_RETURN_IF_ERROR(Multiply(staging, layer, RoundedRows(rows)));
    if (staging.pages == nullptr || pages.size() > PagesAtOnce()) {
      KV_RETURN_IF_ERROR(EnqueueStore(model_, pages, buffers, not_finite, compute_.stream));
      return Record(&post->end, compute_.stream);
    }
    std::vector<PageRows> here(pages.begin(), pages.end());
    for (size_t i = 0; i < here.size(); ++i) here[i].page = staging.pages.get() + i * model_.layout.raw_bytes();
    KV_RETURN_IF_ERROR(EnqueueStore(model_, here, buffers, not_finite, compute_.stream));
    KV_RETURN_IF_ERROR(Check(cudaEventRecord(staging.made, compute_.stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(Check(cudaStreamWaitEvent(lanes_->back, staging.made, 0), "cudaStreamWaitEvent"));
    KV_RETURN_IF_ERROR(EnqueueBack(here, pages));
    return Record(&post->end, lanes_->back);
  }

  /// What was made `here` goes to `pages`.
  absl::Status EnqueueBack(absl::Span<const PageRows> here, absl::Span<const PageRows> pages) {
    const PageLayout& layout = model_.layout;
    const size_t row_bytes = size_t(layout.head_dim) * DTypeBytes(layout.dtype),
                 head_bytes = layout.page_tokens * row_bytes;
    whole_.clear();
    for (size_t i = 0; i < pages.size(); ++i) {
      if (pages[i].tokens == layout.page_tokens) {
        whole_.push_back({here[i].page, pages[i].page, layout.raw_bytes()});
        continue;
      }
      KV_RETURN_IF_ERROR(
          Check(cudaMemcpy2DAsync(pages[i].page, head_bytes, here[i].page, head_bytes, pages[i].tokens * row_bytes,
                                  2 * size_t(layout.kv_heads), cudaMemcpyDefault, lanes_->back),
                "cudaMemcpy2DAsync"));
    }
    return EnqueueCopies(whole_, lanes_->back);
  }

  /// Of the lane's oldest post, whose end has passed or failed.
  Done Answer(Lane* lane, absl::Status passed) {
    Post post = std::move(lane->posts.front());
    lane->posts.pop_front();
    if (post.enqueued && !post.status.ok()) {  // what was enqueued of it
      cudaStreamSynchronize(lanes_->angles);
      cudaStreamSynchronize(lane->stream);
      cudaStreamSynchronize(lanes_->back);
    }
    Done done{.what = post.what, .buffer = post.buffer, .status = std::move(post.status)};
    if (done.status.ok()) done.status = std::move(passed);
    if (done.status.ok()) {
      float ms = 0;
      const cudaEvent_t begin = post.begin != nullptr ? post.begin : lane->previous_end;
      done.status = Check(cudaEventElapsedTime(&ms, begin, post.end), "cudaEventElapsedTime");
      // One that began while the lane's last one was on its way back worked from then on.
      float behind_ms = ms;
      if (done.status.ok() && post.begin != nullptr && lane->previous_end != nullptr) {
        done.status = Check(cudaEventElapsedTime(&behind_ms, lane->previous_end, post.end), "cudaEventElapsedTime");
      }
      done.elapsed_ns = int64_t(double(std::min(ms, behind_ms)) * 1e6);
    }
    if (done.what == Done::What::kActivations) staging_[post.buffer].arrived = nullptr;
    if (done.what == Done::What::kProjection && done.status.ok()) done.status = WhetherFinite(post);
    if (done.status.ok()) done.status = Enqueueable();  // CANCELLED meanwhile
    Recycle(post.begin);
    if (post.end != nullptr) {
      Recycle(lane->previous_end);
      lane->previous_end = post.end;
    }
    return done;
  }

  absl::Status WhetherFinite(const Post& post) const {
    const int64_t code = static_cast<const volatile int64_t&>(not_finite_[post.buffer]);
    if (code == kAllFinite) return absl::OkStatus();
    int64_t row = NotFiniteCode::row(code);
    size_t p = 0;
    for (; row >= post.pages[p].tokens; ++p) row -= post.pages[p].tokens;
    return NotFinite(post.layer, NotFiniteCode::side(code), NotFiniteCode::head(code), post.pages[p].position + row);
  }

  const ProjectionModel model_;
  const CudaExecutorOptions options_;
  const std::shared_ptr<CudaLanes> lanes_;  // shared: by the executors of a GPU
  const Device* const device_;
  int64_t* const not_finite_;  // [buffers]
  Lane copy_, compute_;
  std::vector<Layer> layers_;
  std::vector<Staging> staging_;
  DeviceArray<float> products_;      // [chunk_rows, whole tiles][side][width]
  DeviceArray<double> frequencies_;  // [pairs]

  const std::atomic<bool>* cancelled_ = nullptr;
  bool aborted_ = false;
  absl::Status begun_;
  std::vector<cudaEvent_t> events_;  // that nothing uses
  std::vector<CopyPiece> copies_;    // of activations, while they are posted
  std::vector<CopyPiece> whole_;     // of pages on their way back
  std::vector<const void*> from_;
  std::vector<void*> to_;
  std::vector<size_t> bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel& model,
                                                                 const CudaExecutorOptions& options,
                                                                 std::shared_ptr<CudaLanes> lanes) {
  KV_RETURN_IF_ERROR(CheckModel(model));
  if (options.chunk_rows < model.layout.page_tokens || options.chunk_rows > CudaExecutorOptions::kChunkRowsMax) {
    return InvalidField("chunk_rows", options.chunk_rows,
                        absl::StrCat(model.layout.page_tokens, "..", CudaExecutorOptions::kChunkRowsMax));
  }
  if (options.buffers < 2 || options.buffers > ReloadExecutor::kBuffersMax) {
    return InvalidField("buffers", options.buffers, absl::StrCat("2..", ReloadExecutor::kBuffersMax));
  }
  const int64_t row_bytes = int64_t{model.hidden} * 2 * options.buffers + 8 * int64_t{model.width()} +
                            4 * int64_t{model.rope.rotary_dims} +
                            (options.pages_in_host_memory ? 4 * int64_t{model.width()} * options.buffers : 0);
  if (options.chunk_rows * row_bytes > CudaExecutorOptions::kStagingBytesMax) {
    return InvalidField("chunk_rows", options.chunk_rows,
                        absl::StrCat("at most ", CudaExecutorOptions::kStagingBytesMax / row_bytes, ", of ", row_bytes,
                                     " staging bytes each"));
  }
  auto executor = std::make_unique<CudaExecutor>(model, options, std::move(lanes));
  KV_RETURN_IF_ERROR(executor->Prepare());
  return std::unique_ptr<ReloadExecutor>(std::move(executor));
}

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel& model,
                                                                 const CudaExecutorOptions& options,
                                                                 const Device* device) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<CudaLanes> lanes, MakeCudaLanes(device));
  return MakeCudaExecutor(model, options, std::move(lanes));
}

}  // namespace kvmanager::recompute
