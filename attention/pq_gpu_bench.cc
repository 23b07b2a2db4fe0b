// PQ on a GPU: microseconds of one layer's sparse selection and attention, KV on the device or in pinned host memory,
// and how fast keys become codes.
//
//   bazel run --config=opt //attention:pq_gpu_bench -- [--json FILE] [--host] [--encode] [--blocks N]
//
// pq:m=4,bits=8,ratio=0.1. Random keys, values, queries and centroids; codes are the keys'. Pages are distinct and
// shuffled; each call has its own queries, codebooks, codes and, where they are small, pages, so that nothing is in the
// second-level cache. A CUDA graph is replayed; medians are printed. bench/gpu/compare_torch.py --also runs the same
// shapes through torch.
//
// --host: a step's time with all K and V in pinned host memory, beside one copy of all of them over the same link;
// without copies of blocks, and with some under LFU and LRU. Queries are fresh each step, or drift from step to step.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/gpu_bench_fill.h"
#include "attention/selected_plan.h"
#include "codecs/pq/pq_rows_cuda.h"
#include "codecs/pq/pq_selects.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/gpu_benchmark.h"

namespace kvmanager {
namespace {

std::vector<SelectedList> ListsOf(const std::vector<pq::DeviceSelect>& queries) {
  std::vector<SelectedList> lists;
  for (const pq::DeviceSelect& query : queries)
    lists.push_back({query.list, query.list_stride, query.rows(), query.token});
  return lists;
}

constexpr int kWarmUps = 3, kRepetitions = 11, kCalls = 8;
constexpr size_t kRotateBytes = size_t{320} << 20;
constexpr size_t kPageBytesMax = size_t{24} << 30;  // of the full grid: making them takes the host longer than reading
constexpr int kPageTokens = 64, kHeadDim = 128;

struct Shape {
  int batch, context, query_heads, kv_heads;
};

template <typename T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Nearly a normal one.
float Drawn(std::mt19937_64& random) {
  const uint64_t bits = random();
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += float(bits >> 16 * i & 0xffff) / 65536 - 0.5f;
  return sum * 1.7320508f;
}

/// A batch: pages, codes, plans and everything that a launch reads.
class Batch {
 public:
  /// pages: where K and V lie, which the device reads; of `sets` sets. one_index: all calls have the codes of call 0.
  /// copies: of blocks, of each KV head.
  Batch(const Shape& shape, uint8_t* pages, int sets, int multiprocessors, bool one_index = false, uint32_t copies = 0,
        uint32_t admitted = 0, bool lru = false)
      : shape_(shape), sets_(sets) {
    layout_.kv_heads = uint16_t(shape.kv_heads);
    layout_.head_dim = kHeadDim;
    layout_.page_tokens = kPageTokens;
    ds_.kv_heads = shape.kv_heads;
    ds_.query_heads = shape.query_heads;
    ds_.head_dim = kHeadDim;
    ds_.page_tokens = kPageTokens;
    ds_.m = parameters_.m;
    ds_.bits = parameters_.bits;
    const uint32_t page_units = uint32_t(layout_.raw_bytes() / pq::kRowUnitBytes);
    const size_t of_sequence = size_t(shape.context) / kPageTokens, of_set = of_sequence * shape.batch;
    std::mt19937_64 random(5);
    std::vector<uint32_t> slots(of_set * sets);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    for (uint32_t& slot : slots) slot *= page_units;
    slots_ = Upload(slots);

    // Queries and codebooks of each call; codes of each codebook and the call's pages.
    const size_t chunks = (size_t(shape.context) + pq::kCodeChunkTokens - 1) / pq::kCodeChunkTokens;
    const size_t book_bytes = (ds_.book_bytes() + 255) / 256 * 256,
                 index_bytes = book_bytes + chunks * ds_.chunk_bytes();
    index_bytes_ = index_bytes;
    indexes_ = Allocate<uint8_t>(index_bytes * kCalls * shape.batch);
    CHECK_CUDA(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreateWithFlags(&begins_, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&ends_, cudaEventDisableTiming));
    CHECK_CUDA(cudaMemset(indexes_.get(), 0, index_bytes * kCalls * shape.batch));
    std::vector<uint8_t*> book_at;
    std::vector<uint32_t> index;  // of each: its codebook, and its chunks
    std::vector<float> book(ds_.bounds_at() / 4);
    for (int i = 0; i < kCalls * shape.batch; ++i) {
      uint8_t* const at = indexes_.get() + i * index_bytes;
      book_at.push_back(at);
      index.push_back(uint32_t(i * index_bytes / pq::kRowUnitBytes));
      for (size_t c = 0; c < chunks; ++c) {
        index.push_back(uint32_t((i * index_bytes + book_bytes + c * ds_.chunk_bytes()) / pq::kRowUnitBytes));
      }
      if (i < 4) MakeBook(random, &book);  // the others are the same at other places
      CHECK_CUDA(cudaMemcpy(at, book.data(), book.size() * 4, cudaMemcpyHostToDevice));
    }
    const auto d_books = Upload(book_at);
    CHECK_CUDA(pq::LaunchPqPrepareBooks(ds_, d_books.get(), uint32_t(book_at.size()), nullptr));
    index_slots_ = Upload(index);
    std::vector<pq::DeviceEncodeCodes> items;
    for (int call = 0; call < kCalls; ++call) {
      for (int s = 0; s < shape.batch; ++s) {
        const size_t at = one_index ? s : size_t(call) * shape.batch + s;
        for (uint32_t t = 0; t < uint32_t(shape.context); t += pq::kEncodeTokensMax) {
          items.push_back({uint32_t(at * (1 + chunks)), uint32_t((call % sets) * of_set + s * of_sequence), t,
                           pq::kEncodeTokensMax});
        }
      }
    }
    pool_ = pages;
    encode_items_ = Upload(items);
    encode_count_ = uint32_t(items.size() / kCalls);
    CHECK_CUDA(pq::LaunchPqEncode(ds_, pool_, slots_.get(), {indexes_.get(), index_slots_.get()}, encode_items_.get(),
                                  uint32_t(items.size()), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());

    const uint32_t blocks_of = uint32_t(shape.context) / pq::kDeviceBlockTokens;
    const uint32_t heads = uint32_t(shape.batch * shape.kv_heads);
    cached_ = Upload(std::vector<uint32_t>(size_t{heads} * blocks_of, pq::kNoUnit));
    std::vector<pq::DeviceSelect> all;
    std::vector<uint32_t> tables;
    for (int call = 0; call < kCalls; ++call) {
      std::vector<pq::DeviceSelect> queries(shape.batch);
      for (int s = 0; s < shape.batch; ++s) {
        const size_t at = one_index ? s : size_t(call) * shape.batch + s;
        pq::DeviceSelect& query = queries[s];
        query.index = uint32_t(at * (1 + chunks));
        query.table = uint32_t((call % sets) * of_set + s * of_sequence);
        query.token = uint32_t(s);
        if (copies > 0) {
          query.cached = cached_.get() + size_t(s) * shape.kv_heads * blocks_of;
          query.cached_stride = blocks_of;
        }
        pq::SetReads(parameters_, uint64_t(shape.context) - 1, &query);
      }
      const auto sizes = pq::PlaceSelects(ds_, absl::MakeSpan(queries));
      if (!sizes.ok()) Fail(sizes.status());
      sizes_ = *sizes;
      Append(all, queries);
    }
    queries_ = std::vector<pq::DeviceSelect>(all.begin(), all.begin() + shape.batch);
    selects_ = Upload(all);
    blocks_ = pq::SelectBlocks(ds_, uint32_t(shape.batch), sizes_.middle_max, multiprocessors);
    kernels_ = pq::SelectedRowsKernels(kHeadDim);
    CHECK_CUDA(kernels_->prepare());
    CHECK_CUDA(pq::PrepareSelect());
    SelectedPlanner planner(layout_, shape.query_heads, multiprocessors * kernels_->grid.blocks_per_sm,
                            kernels_->grid.warps);
    std::vector<device::AttendItem> plan(1 << 16);
    const auto planned = planner.Plan(ListsOf(queries_), absl::MakeSpan(plan));
    if (!planned.ok()) Fail(planned.status());
    plan.resize(planned->items);
    items_ = Upload(plan);
    rows_max_ = planned->rows_max;
    grid_ = multiprocessors * kernels_->grid.blocks_per_sm;

    const size_t q_elements = size_t(shape.batch) * shape.query_heads * kHeadDim;
    q_ = Allocate<uint16_t>(q_elements * kCalls);
    CHECK_CUDA(FillRandomElements(q_.get(), q_elements * kCalls, 9, 1, false));
    out_ = Allocate<uint16_t>(q_elements);
    scratch_ = Allocate<uint8_t>(pq::SelectScratchBytes(ds_, sizes_.runs));
    rows_ = Allocate<uint32_t>(sizes_.rows);
    chosen_ = Allocate<uint32_t>(sizes_.rows);
    const size_t parts = size_t{planned->parts} * device::kTileRows;
    partial_ = Allocate<float>(parts * kHeadDim);
    partial_max_ = Allocate<float>(parts * 2);
    arrived_ = Allocate<uint32_t>(parts);
    CHECK_CUDA(cudaMemset(arrived_.get(), 0, parts * 4));

    if (copies == 0) return;
    const uint32_t second_unit = uint32_t(of_set * sets) * page_units;
    copied_ = Allocate<uint8_t>(size_t(shape.batch) * copies * 2 * layout_.raw_bytes());
    second_ = Upload(std::vector<pq::SecondPlace>{{copied_.get(), second_unit}});
    cache_slots_ = Upload(std::vector<pq::DeviceCacheSlot>(size_t{heads} * copies));
    counts_ = Upload(std::vector<pq::DeviceCacheCounts>(heads));
    copy_lists_ = Allocate<uint32_t>(size_t{heads} * (1 + 2 * admitted));
    std::vector<pq::DeviceCache> caches(heads);
    for (uint32_t i = 0; i < heads; ++i) {
      caches[i].cached = cached_.get() + size_t{i} * blocks_of;
      caches[i].slots = cache_slots_.get() + size_t{i} * copies;
      caches[i].counts = counts_.get() + i;
      caches[i].copies = copy_lists_.get() + size_t{i} * (1 + 2 * admitted);
      caches[i].first_unit = second_unit + i / shape.kv_heads * copies * 2 * page_units;
    }
    caches_ = Upload(caches);
    cache_.shape = ds_;
    cache_.pool = pool_;
    cache_.second = copied_.get();
    cache_.second_unit = second_unit;
    cache_.slots = slots_.get();
    cache_.count = uint32_t(shape.batch);
    cache_.chosen = chosen_.get();
    cache_.caches = caches_.get();
    cache_.slot_count = copies;
    cache_.admitted_max = admitted;
    cache_.blocks_max = blocks_of;
    cache_.lru = lru;
  }

  ~Batch() {
    cudaEventDestroy(begins_);
    cudaEventDestroy(ends_);
    cudaStreamDestroy(side_);
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  int Select(int call, cudaStream_t stream, int blocks = 0, bool early = false) const {
    pq::SelectParams p;
    p.shape = ds_;
    p.slots = slots_.get();
    p.index = {indexes_.get(), index_slots_.get()};
    p.queries = selects_.get() + size_t(call) * shape_.batch;
    p.count = uint32_t(shape_.batch);
    p.q = Queries(call);
    p.scale = Scale();
    p.scratch = scratch_.get();
    p.runs = sizes_.runs;
    p.rows = rows_.get();
    p.chosen = chosen_.get();
    p.early = early;
    return pq::LaunchPqSelect(p, blocks == 0 ? blocks_ : blocks, sizes_.middle_max, stream);
  }
  int Attend(int call, cudaStream_t stream) const {
    device::AttendParams p;
    p.pool = pool_;
    p.slots = rows_.get();
    p.items = items_.get();
    p.q = Queries(call);
    p.out = out_.get();
    p.partial = partial_.get();
    p.partial_max = partial_max_.get();
    p.arrived = arrived_.get();
    p.query_heads = shape_.query_heads;
    p.kv_heads = shape_.kv_heads;
    p.page_tokens = kPageTokens;
    p.scale_log2 = float(M_LOG2E) * Scale();
    p.codec = second_.get();
    return kernels_->launch(p, rows_max_, grid_, stream);
  }
  int UpdateCopies(int call, cudaStream_t stream) const {
    if (caches_ == nullptr) return 0;
    pq::CacheParams p = cache_;
    p.queries = selects_.get() + size_t(call) * shape_.batch;
    return pq::LaunchPqCacheUpdate(p, stream);
  }
  int Step(int call, cudaStream_t stream, int blocks = 0, bool early = false) const {
    int error = Select(call, stream, blocks, early);
    if (error == 0) error = Attend(call, stream);
    return error != 0 ? error : UpdateCopies(call, stream);
  }
  /// As Step, but the next call's index is read on another stream while this one's rows are, so that it may be in the
  /// second-level cache when it is wanted.
  int StepAndFetchNext(int call, cudaStream_t stream) const {
    int error = Select(call, stream);
    if (error == 0) error = cudaEventRecord(begins_, stream);
    if (error == 0) error = cudaStreamWaitEvent(side_, begins_);
    const size_t bytes = index_bytes_ * shape_.batch;
    if (error == 0) error = ReadAll(indexes_.get() + (call + 1) % kCalls * bytes, bytes, side_);
    if (error == 0) error = cudaEventRecord(ends_, side_);
    if (error == 0) error = Attend(call, stream);
    return error != 0 ? error : cudaStreamWaitEvent(stream, ends_);
  }
  int Encode(int call, cudaStream_t stream) const {
    return pq::LaunchPqEncode(ds_, pool_, slots_.get(), {indexes_.get(), index_slots_.get()},
                              encode_items_.get() + size_t(call) * encode_count_, encode_count_, stream);
  }
  /// Queries of call i are `likeness` times those of the call before, and noise.
  void Drift(float likeness) {
    std::mt19937_64 random(11);
    const size_t elements = size_t(shape_.batch) * shape_.query_heads * kHeadDim;
    std::vector<float> now(elements);
    for (float& x : now) x = Drawn(random);
    std::vector<uint16_t> q;
    for (int call = 0; call < kCalls; ++call) {
      for (float& x : now) {
        q.push_back(FloatToHalf(x));
        x = likeness * x + std::sqrt(1 - likeness * likeness) * Drawn(random);
      }
    }
    CHECK_CUDA(cudaMemcpy(q_.get(), q.data(), q.size() * 2, cudaMemcpyHostToDevice));
  }
  /// Of chosen tokens that copies had, since the last call; NaN without copies.
  double HitRatio() {
    if (counts_ == nullptr) return NAN;
    pq::DeviceCacheCounts sum;
    const size_t heads = size_t(shape_.batch) * shape_.kv_heads;
    for (const pq::DeviceCacheCounts& c : Download(counts_.get(), heads)) sum.hits += c.hits, sum.misses += c.misses;
    CHECK_CUDA(cudaMemset(counts_.get(), 0, heads * sizeof(pq::DeviceCacheCounts)));
    return double(sum.hits) / double(sum.hits + sum.misses);
  }
  double rows() const { return double(shape_.batch) * shape_.kv_heads * queries_[0].rows(); }
  double row_bytes() const { return rows() * 4 * kHeadDim; }
  double index_bytes() const {
    return double(shape_.batch) * (double(ds_.half_norms_at()) + double(shape_.context) * shape_.kv_heads * 4);
  }
  double key_bytes() const { return double(shape_.batch) * shape_.context * shape_.kv_heads * kHeadDim * 2; }
  int blocks() const { return blocks_; }

 private:
  [[noreturn]] static void Fail(const absl::Status& status) {
    std::fprintf(stderr, "pq_gpu_bench: %s\n", status.ToString().c_str());
    std::exit(1);
  }
  void MakeBook(std::mt19937_64& random, std::vector<float>* book) const {
    const int count = ds_.count(), width = ds_.width();
    float* half = book->data() + ds_.half_norms_at() / 4;
    for (int at = 0; at < ds_.kv_heads * ds_.m; ++at) {
      float* const centroids = book->data() + size_t(at) * width * count;
      for (int c = 0; c < count; ++c) {
        float sum = 0;
        for (int j = 0; j < width; ++j) {
          const float x = centroids[j * count + c] = Drawn(random);
          sum += x * x;
        }
        half[at * count + c] = sum / 2;
      }
    }
  }
  const void* Queries(int call) const { return q_.get() + size_t(call) * shape_.batch * shape_.query_heads * kHeadDim; }
  static float Scale() { return float(1 / std::sqrt(double{kHeadDim})); }

  const Shape shape_;
  const int sets_;
  const pq::Parameters parameters_;
  PageLayout layout_;
  pq::DeviceShape ds_;
  const uint8_t* pool_ = nullptr;
  pq::SelectSizes sizes_;
  std::vector<pq::DeviceSelect> queries_;  // of call 0
  const device::AttendKernels* kernels_ = nullptr;
  int blocks_ = 1, rows_max_ = 0, grid_ = 0;
  uint32_t encode_count_ = 0;
  size_t index_bytes_ = 0;  // of a sequence
  cudaStream_t side_ = nullptr;
  cudaEvent_t begins_ = nullptr, ends_ = nullptr;
  DeviceArray<uint32_t> slots_, index_slots_, cached_, rows_, chosen_, arrived_, copy_lists_;
  DeviceArray<uint8_t> indexes_, scratch_, copied_;
  DeviceArray<pq::DeviceEncodeCodes> encode_items_;
  DeviceArray<pq::DeviceSelect> selects_;
  DeviceArray<device::AttendItem> items_;
  DeviceArray<uint16_t> q_, out_;
  DeviceArray<float> partial_, partial_max_;
  DeviceArray<pq::SecondPlace> second_;
  DeviceArray<pq::DeviceCacheSlot> cache_slots_;
  DeviceArray<pq::DeviceCacheCounts> counts_;
  DeviceArray<pq::DeviceCache> caches_;
  pq::CacheParams cache_;
};

size_t PageBytes(const Shape& s) { return size_t(s.batch) * s.context * s.kv_heads * kHeadDim * 4; }

double Measure(const auto& call) { return GraphUs(kCalls, kWarmUps, kRepetitions, call); }

nlohmann::json OnDevice(const Shape& shape, int multiprocessors, double ceiling, int blocks, bool encode) {
  const int sets = int(std::clamp<size_t>((kRotateBytes + PageBytes(shape) - 1) / PageBytes(shape), 1, kCalls));
  const auto pages = Allocate<uint8_t>(PageBytes(shape) * sets);
  CHECK_CUDA(FillRandomElements(pages.get(), PageBytes(shape) * sets / 2, 3, 1, false));
  const Batch batch(shape, pages.get(), sets, multiprocessors);
  const double us = Measure([&](int call, cudaStream_t stream) { return batch.Step(call, stream, blocks); });
  const double select_us = Measure([&](int call, cudaStream_t stream) { return batch.Select(call, stream, blocks); });
  const double attend_us = Measure([&](int call, cudaStream_t stream) { return batch.Attend(call, stream); });
  const double early_us =
      Measure([&](int call, cudaStream_t stream) { return batch.Step(call, stream, blocks, true); });
  const double fetched_us =
      Measure([&](int call, cudaStream_t stream) { return batch.StepAndFetchNext(call, stream); });
  const double bytes = batch.row_bytes() + batch.index_bytes();
  std::printf("%5d %7d %3d/%-3d %9.2f %8.3f %6.2f %10.2f %10.2f %7d %10.2f %10.2f\n", shape.batch, shape.context,
              shape.query_heads, shape.kv_heads, us, bytes / us * 1e-6, bytes / us * 1e-6 / ceiling, select_us,
              attend_us, blocks == 0 ? batch.blocks() : blocks, early_us, fetched_us);
  nlohmann::json run = {{"codec", "pq:m=4,bits=8,ratio=0.1"},
                        {"batch", shape.batch},
                        {"context", shape.context},
                        {"query_heads", shape.query_heads},
                        {"kv_heads", shape.kv_heads},
                        {"us", us},
                        {"select_us", select_us},
                        {"attend_us", attend_us},
                        {"early_us", early_us},
                        {"fetched_us", fetched_us},
                        {"bytes", bytes},
                        {"tb_per_s", bytes / us * 1e-6},
                        {"of_read_ceiling", bytes / us * 1e-6 / ceiling}};
  if (encode) {
    const double encode_us =
        GraphUs(1, 2, kRepetitions, [&](int call, cudaStream_t stream) { return batch.Encode(call, stream); });
    run["encode_gb_per_s"] = batch.key_bytes() / encode_us * 1e-3;
    std::printf("codes of %.2f GB of keys: %.1f GB/s\n", batch.key_bytes() * 1e-9,
                batch.key_bytes() / encode_us * 1e-3);
  }
  std::fflush(stdout);
  return run;
}

nlohmann::json OnHost(const Shape& shape, int multiprocessors) {
  nlohmann::json runs = nlohmann::json::array();
  void* memory = nullptr;
  const size_t bytes = PageBytes(shape);
  CHECK_CUDA(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
  uint8_t* const pages = static_cast<uint8_t*>(memory);
  double stream_us = 0;
  {
    const auto on_device = Allocate<uint8_t>(bytes);
    CHECK_CUDA(FillRandomElements(on_device.get(), bytes / 2, 3, 1, false));
    CHECK_CUDA(cudaMemcpy(pages, on_device.get(), bytes, cudaMemcpyDeviceToHost));
    stream_us = GraphUs(1, 1, 5, [&](int, cudaStream_t stream) {
      return cudaMemcpyAsync(on_device.get(), pages, bytes, cudaMemcpyHostToDevice, stream);
    });
  }
  std::printf("all %.2f GB of K and V over the link: %.0f us (%.1f GB/s)\n", bytes * 1e-9, stream_us,
              bytes / stream_us * 1e-3);
  std::printf("%-8s %7s %9s %9s %10s %7s %7s\n", "policy", "copies", "admitted", "queries", "step us", "faster",
              "hits");
  struct Try {
    uint32_t copies, admitted;
    bool lru;
    float likeness;
  };
  for (const Try& t :
       {Try{0, 0, false, 0}, Try{32, 2, false, 0}, Try{32, 2, true, 0}, Try{0, 0, false, 0.98f},
        Try{32, 2, false, 0.98f}, Try{32, 2, true, 0.98f}, Try{64, 4, false, 0.98f}, Try{64, 1, true, 0.98f}}) {
    Batch batch(shape, pages, 1, multiprocessors, true, t.copies, t.admitted, t.lru);
    if (t.likeness != 0) batch.Drift(t.likeness);
    const auto steps = [&](int call, cudaStream_t stream) { return batch.Step(call, stream); };
    CHECK_CUDA(cudaDeviceSynchronize());
    GraphUs(kCalls, 0, 1, steps);
    batch.HitRatio();
    const double us = GraphUs(kCalls, 0, 3, steps), hits = batch.HitRatio();
    std::printf("%-8s %7u %9u %9s %10.1f %7.2f %7.3f\n",
                t.copies == 0 ? "-"
                : t.lru       ? "lru"
                              : "lfu",
                t.copies, t.admitted, t.likeness == 0 ? "fresh" : "drifting", us, stream_us / us, hits);
    std::fflush(stdout);
    runs.push_back({{"copies", t.copies},
                    {"admitted", t.admitted},
                    {"policy", t.lru ? "lru" : "lfu"},
                    {"likeness", t.likeness},
                    {"us", us},
                    {"faster", stream_us / us},
                    {"hit_ratio", std::isnan(hits) ? 0 : hits}});
  }
  cudaFreeHost(memory);
  return {{"stream_us", stream_us}, {"runs", runs}};
}

int Main(int argc, char** argv) {
  CLI::App app(
      "PQ on a GPU: sparse selection and attention of one layer, from device or host memory, and codes of keys.");
  std::string json, grid = "bars";
  bool host = false, encode = false;
  int blocks = 0;
  app.add_option("--json", json, "write the results to this file");
  app.add_option("--grid", grid, "bars (the shapes that the project promises numbers for), small (batches) or full")
      ->check(CLI::IsMember({"bars", "small", "full"}))
      ->capture_default_str();
  app.add_flag("--host", host, "K and V in pinned host memory too");
  app.add_flag("--encode", encode, "codes of keys too");
  app.add_option("--blocks", blocks, "of threads that choose, per query and KV head; 0: as many as suit")
      ->check(CLI::IsMember({0, 1, 2, 4, 8}));
  CLI11_PARSE(app, argc, argv);
  NeedGpu();
  int multiprocessors = 0, khz = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  CHECK_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  double ceiling = 0;
  {
    const size_t bytes = size_t{4} << 30;
    const auto memory = Allocate<uint8_t>(bytes);
    CHECK_CUDA(FillRandomBits(memory.get(), bytes, 1));
    ceiling = bytes / Measure([&](int, cudaStream_t stream) { return ReadAll(memory.get(), bytes, stream); }) * 1e-6;
  }
  std::printf("read ceiling %.3f TB/s, SM clock at most %.0f MHz\n", ceiling, khz / 1e3);
  // Of a step: `us` as a layer's step launches it, early with the selection launched into the end of what is before it,
  // fetched with the next index read on another stream meanwhile.
  std::printf("%5s %7s %6s %10s %8s %6s %10s %10s %7s %10s %10s\n", "batch", "context", "heads", "us", "TB/s", "share",
              "select us", "attend us", "blocks", "early us", "fetched us");
  nlohmann::json results = {{"read_ceiling_tb_per_s", ceiling}, {"runs", nlohmann::json::array()}};
  std::vector<Shape> shapes = {{16, 32768, 32, 8}, {1, 131072, 32, 8}, {64, 8192, 32, 8}, {1, 4096, 32, 8}};
  if (grid == "small") shapes = {{1, 16384, 32, 8}, {1, 32768, 32, 8}, {8, 4096, 32, 8}, {8, 32768, 64, 8}};
  if (grid == "full") {
    shapes.clear();
    for (const auto& [q, kv] : {std::pair{32, 32}, {32, 8}, {64, 8}, {32, 4}, {8, 1}}) {
      for (const int batch : {1, 8, 32, 128}) {
        for (const int context : {4096, 16384, 32768, 131072}) {
          const Shape shape = {batch, context, q, kv};
          if (PageBytes(shape) <= kPageBytesMax) shapes.push_back(shape);
        }
      }
    }
  }
  for (const Shape& shape : shapes) {
    results["runs"].push_back(OnDevice(shape, multiprocessors, ceiling, blocks, encode && shape.batch == 16));
  }
  if (host) results["host"] = OnHost({16, 32768, 32, 8}, multiprocessors);
  if (!json.empty()) std::ofstream(json) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) { return kvmanager::Main(argc, argv); }
