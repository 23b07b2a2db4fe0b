#include "tests/device_engines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/calibration.h"
#include "codecs/registry.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::testing {

using client::Client;
using client::DeviceClient;
using client::InProcess;
using client::StepEntry;
using client::TensorView;

namespace {
constexpr char kModel[] = "captured";
}  // namespace

Text RandomText(uint64_t seed, Text shape) {
  Text text = std::move(shape);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](size_t row, std::vector<uint16_t>* out) {
    out->resize(text.tokens * row);
    for (uint16_t& x : *out) x = FloatToHalf(normal(random));
  };
  text.q.resize(text.layers), text.k.resize(text.layers), text.v.resize(text.layers);
  for (int layer = 0; layer < text.layers; ++layer) {
    fill(text.q_row(), &text.q[layer]);
    fill(text.kv_row(), &text.k[layer]);
    fill(text.kv_row(), &text.v[layer]);
  }
  return text;
}

void WriteArtifact(const Text& text, std::vector<std::string> specs, const std::string& directory,
                   const std::string& name) {
  const CalibrationModel model = {kModel, "", text.layers, text.kv_heads, text.query_heads, text.head_dim};
  const auto made = SyntheticCalibration(model, 1, std::move(specs));
  const std::string bytes = SerializeCalibration(made->model(), made->tensors(), made->metadata());
  std::ofstream(absl::StrCat(directory, "/", name, ".safetensors"), std::ios::binary)
      .write(bytes.data(), std::streamsize(bytes.size()));
}

client::CacheOptions OptionsFor(const Text& text, const std::string& codec, int device, const std::string& tenant) {
  client::CacheOptions options;
  options.model = kModel;
  options.tenant = tenant;
  options.layers = text.layers;
  options.kv_heads = text.kv_heads;
  options.query_heads = text.query_heads;
  options.head_dim = text.head_dim;
  options.codec = codec;
  options.lag_pages = 1;
  options.device = device;
  return options;
}

std::vector<BlockName> NamesOf(const client::Cache& cache, uint64_t tokens, uint32_t salt) {
  std::vector<uint32_t> ids(tokens);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = uint32_t(i) * 7 + salt;
  std::vector<BlockName> names;
  NameBlocks(cache.description().digest, ids, kPage, &names);
  return names;
}

void Difference::Add(const std::vector<uint16_t>& got, const std::vector<uint16_t>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = HalfToFloat(got[i]), e = HalfToFloat(expected[i]);
    error += (g - e) * (g - e);
    norm += e * e;
  }
}

namespace {

std::vector<uint16_t> RowsOf(const std::vector<uint16_t>& of, size_t row, const std::vector<Part>& parts) {
  std::vector<uint16_t> rows;
  for (const Part& part : parts) {
    const auto from = of.begin() + ptrdiff_t((part.first + part.shift) * row);
    rows.insert(rows.end(), from, from + ptrdiff_t(size_t(part.tokens) * row));
  }
  return rows;
}

std::vector<StepEntry> EntriesOf(const std::vector<Part>& parts) {
  std::vector<StepEntry> entries;
  for (const Part& part : parts) entries.push_back({part.sequence, part.first, part.tokens});
  return entries;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Codec>> CodecOf(const client::Cache& cache, const std::string& artifacts) {
  const std::unique_ptr<CalibrationSource> source = MakeCalibrationDirectory(artifacts);
  CodecRegistry registry;
  registry.SetCalibrations(source.get());
  RegisterBuiltinCodecs(registry);
  const client::CacheOptions& options = cache.description().options;
  CodecContext context;
  context.layout.kv_heads = uint16_t(options.kv_heads);
  context.layout.head_dim = uint16_t(options.head_dim);
  context.layout.page_tokens = uint16_t(options.page_tokens);
  context.layout.dtype = options.dtype;
  context.layers = options.layers;
  context.model = options.model;
  context.query_heads = options.query_heads;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry.Create(options.codec, context));
  return std::shared_ptr<const Codec>(std::move(codec));
}

absl::StatusOr<std::unique_ptr<Engine>> HostEngine::Make(Client* client, const client::CacheOptions& options) {
  auto engine = std::make_unique<HostEngine>();
  KV_ASSIGN_OR_RETURN(engine->cache_, client->OpenCache(options));
  return std::unique_ptr<Engine>(std::move(engine));
}

absl::Status HostEngine::RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                                 int first_layer) {
  const std::vector<StepEntry> entries = EntriesOf(parts);
  out->resize(text.layers);
  for (int layer = first_layer; layer < text.layers; ++layer) {
    failed_layer_ = layer;
    const auto k = RowsOf(text.k[layer], text.kv_row(), parts), v = RowsOf(text.v[layer], text.kv_row(), parts);
    const auto q = RowsOf(text.q[layer], text.q_row(), parts);
    (*out)[layer].resize(q.size());
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = entries;
    if (append) {
      batch.k = TensorView::Inline(k.data(), k.size() * 2);
      batch.v = TensorView::Inline(v.data(), v.size() * 2);
    }
    batch.q = TensorView::Inline(q.data(), q.size() * 2);
    batch.out = TensorView::Inline((*out)[layer].data(), q.size() * 2);
    batch.q_dtype = DType::kFloat16;
    KV_RETURN_IF_ERROR(cache_->Step(batch).status());
  }
  return absl::OkStatus();
}

GpuEngine::~GpuEngine() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  arena_.reset();
  if (owned_stream_ != nullptr) cudaStreamDestroy(owned_stream_);
  if (staging_ != nullptr) cudaFreeHost(staging_);
}

absl::Status GpuEngine::Init(Client* client, DeviceClient* device, const client::CacheOptions& options,
                             cudaStream_t stream) {
  device_ = device, stream_ = stream;
  KV_ASSIGN_OR_RETURN(cache_, client->OpenCache(options));
  KV_ASSIGN_OR_RETURN(arena_, device->CreateArena(kArenaBytes));
  KV_RETURN_IF_ERROR(CudaStatus(cudaMallocHost(reinterpret_cast<void**>(&staging_), kArenaBytes), "cudaMallocHost"));
  if (stream_ != nullptr) return absl::OkStatus();
  KV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&owned_stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
  stream_ = owned_stream_;
  return absl::OkStatus();
}

absl::StatusOr<TensorView> GpuEngine::Put(const std::vector<uint16_t>& rows) {
  KV_ASSIGN_OR_RETURN(const TensorView view, Room(rows.size() * 2));
  std::memcpy(Staged(view), rows.data(), view.bytes);
  KV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(view.data, Staged(view), view.bytes, cudaMemcpyHostToDevice, stream_),
                                "cudaMemcpyAsync"));
  return view;
}

absl::StatusOr<TensorView> GpuEngine::Room(size_t bytes) {
  const size_t at = (used_ + 255) / 256 * 256;
  if (at + bytes > kArenaBytes) return absl::InternalError("the test's arena is too small");
  used_ = at + bytes;
  return arena_->View(at, bytes);
}

absl::Status GpuEngine::SubmitInDaemon(const Text& text, const std::vector<Part>& parts, bool append, int first_layer,
                                       std::vector<TensorView>* outs) {
  const std::vector<StepEntry> entries = EntriesOf(parts);
  for (int layer = first_layer; layer < text.layers; ++layer) {
    failed_layer_ = layer;
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = entries;
    if (append) {
      KV_ASSIGN_OR_RETURN(batch.k, Put(RowsOf(text.k[layer], text.kv_row(), parts)));
      KV_ASSIGN_OR_RETURN(batch.v, Put(RowsOf(text.v[layer], text.kv_row(), parts)));
    }
    KV_ASSIGN_OR_RETURN(batch.q, Put(RowsOf(text.q[layer], text.q_row(), parts)));
    KV_ASSIGN_OR_RETURN(batch.out, Room(batch.q.bytes));
    batch.q_dtype = DType::kFloat16;
    batch.ready = ++ready_;
    KV_RETURN_IF_ERROR(device_->EnqueueReady(stream_, ready_));
    KV_ASSIGN_OR_RETURN(const client::StepResult result, cache_->Step(batch));
    KV_RETURN_IF_ERROR(device_->EnqueueWaitDone(stream_, result.done));
    outs->push_back(batch.out);
  }
  return absl::OkStatus();
}

absl::Status GpuEngine::Collect(const std::vector<TensorView>& outs, LayerRows* out) {
  for (const TensorView& view : outs) {
    KV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(Staged(view), view.data, view.bytes, cudaMemcpyDeviceToHost, stream_),
                                  "cudaMemcpyAsync"));
  }
  KV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"));
  out->resize(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    (*out)[i].resize(outs[i].bytes / 2);
    std::memcpy((*out)[i].data(), Staged(outs[i]), outs[i].bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Engine>> DaemonEngine::Make(Client* client, DeviceClient* device,
                                                           const client::CacheOptions& options) {
  auto engine = std::make_unique<DaemonEngine>();
  KV_RETURN_IF_ERROR(engine->Init(client, device, options));
  return std::unique_ptr<Engine>(std::move(engine));
}

absl::Status DaemonEngine::RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                                   int first_layer) {
  Restart();
  std::vector<TensorView> outs;
  const absl::Status status = SubmitInDaemon(text, parts, append, first_layer, &outs);
  LayerRows rows;
  KV_RETURN_IF_ERROR(Collect(outs, &rows));
  out->resize(text.layers);
  for (size_t i = 0; i < rows.size(); ++i) (*out)[size_t(first_layer) + i] = std::move(rows[i]);
  return status;
}

absl::StatusOr<std::unique_ptr<OwnEngine>> OwnEngine::Make(Client* client, DeviceClient* device,
                                                           const client::CacheOptions& options, bool encode_here,
                                                           const std::string& artifacts, cudaStream_t stream) {
  auto engine = std::make_unique<OwnEngine>();
  KV_RETURN_IF_ERROR(engine->Init(client, device, options, stream));
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, CodecOf(*engine->cache_, artifacts));
  InProcess::Options run;
  run.stream = engine->stream_;
  run.encode_here = encode_here;
  run.sequences_max = 1024;
  KV_ASSIGN_OR_RETURN(engine->run_, InProcess::Create(device, engine->cache_.get(), std::move(codec), run));
  return engine;
}

OwnEngine::~OwnEngine() { run_.reset(); }

absl::Status OwnEngine::AppendRows(const Text& text, int layer, const std::vector<Part>& parts) {
  KV_ASSIGN_OR_RETURN(const auto k, Put(RowsOf(text.k[layer], text.kv_row(), parts)));
  KV_ASSIGN_OR_RETURN(const auto v, Put(RowsOf(text.v[layer], text.kv_row(), parts)));
  return run_->Append(layer, k.data, v.data);
}

absl::Status OwnEngine::Submit(const Text& text, const std::vector<Part>& parts, bool append,
                               std::vector<TensorView>* outs) {
  failed_layer_ = 0;
  // Queries of one step must not read encoded what it fills itself, nor by an index that is made of it: then it is
  // appended first.
  const bool has_index = absl::StartsWith(cache_->description().options.codec, "pq");
  bool first = false;
  for (const Part& part : parts) {
    const uint64_t together = (part.first / kPage + uint64_t(cache_->description().options.lag_pages) + 1) * kPage;
    first |= append && (part.first + uint64_t(part.tokens) > together || (has_index && part.tokens > 1));
  }
  if (first) {
    KV_RETURN_IF_ERROR(run_->Begin(EntriesOf(parts), true, false));
    for (int layer = 0; layer < text.layers; ++layer) KV_RETURN_IF_ERROR(AppendRows(text, layer, parts));
    KV_RETURN_IF_ERROR(run_->End());
    failed_layer_ = text.layers;
  }
  append &= !first;
  KV_RETURN_IF_ERROR(run_->Begin(EntriesOf(parts), append, true));
  for (int layer = 0; layer < text.layers; ++layer) {
    if (append) KV_RETURN_IF_ERROR(AppendRows(text, layer, parts));
    KV_ASSIGN_OR_RETURN(const auto q, Put(RowsOf(text.q[layer], text.q_row(), parts)));
    KV_ASSIGN_OR_RETURN(const auto o, Room(q.bytes));
    KV_RETURN_IF_ERROR(run_->Attend(layer, q.data, o.data, nullptr));
    outs->push_back(o);
  }
  return run_->End();
}

absl::Status OwnEngine::BeginStep(const Text& text, const std::vector<Part>& parts) {
  Restart();
  rows_.clear();
  for (int layer = 0; layer < text.layers; ++layer) {
    StepRows& rows = rows_.emplace_back();
    KV_ASSIGN_OR_RETURN(rows.k, Put(RowsOf(text.k[layer], text.kv_row(), parts)));
    KV_ASSIGN_OR_RETURN(rows.v, Put(RowsOf(text.v[layer], text.kv_row(), parts)));
    KV_ASSIGN_OR_RETURN(rows.q, Put(RowsOf(text.q[layer], text.q_row(), parts)));
    KV_ASSIGN_OR_RETURN(rows.out, Room(rows.q.bytes));
  }
  return run_->Begin(EntriesOf(parts), true, true);
}

absl::Status OwnEngine::LaunchStep() {
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    const StepRows& rows = rows_[layer];
    KV_RETURN_IF_ERROR(run_->Append(int(layer), rows.k.data, rows.v.data));
    KV_RETURN_IF_ERROR(run_->Attend(int(layer), rows.q.data, rows.out.data, nullptr));
  }
  return absl::OkStatus();
}

absl::Status OwnEngine::EndStep(LayerRows* out) {
  KV_RETURN_IF_ERROR(run_->End());
  std::vector<TensorView> outs;
  for (const StepRows& rows : rows_) outs.push_back(rows.out);
  return Collect(outs, out);
}

absl::Status OwnEngine::RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                                int first_layer) {
  KV_CHECK(first_layer == 0);
  Restart();
  std::vector<TensorView> outs;
  KV_RETURN_IF_ERROR(Submit(text, parts, append, &outs));
  return Collect(outs, out);
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(Way way, Client* client, DeviceClient* device,
                                                   const client::CacheOptions& options, const std::string& artifacts) {
  if (way == Way::kDaemon) return DaemonEngine::Make(client, device, options);
  return OwnEngine::Make(client, device, options, way == Way::kOwn, artifacts);
}

absl::Status Counterparts::Step(const Text& text,
                                const std::vector<std::pair<client::Sequence*, client::Sequence*>>& sequences,
                                const std::vector<uint64_t>& firsts, const std::vector<int>& tokens, bool append) {
  std::vector<Part> gpu_parts, cpu_parts;
  for (size_t i = 0; i < sequences.size(); ++i) {
    gpu_parts.push_back({sequences[i].first->id(), firsts[i], tokens[i]});
    cpu_parts.push_back({sequences[i].second->id(), firsts[i], tokens[i]});
  }
  LayerRows got, expected;
  KV_RETURN_IF_ERROR(gpu->Step(text, gpu_parts, append, &got));
  KV_RETURN_IF_ERROR(cpu->Step(text, cpu_parts, append, &expected));
  difference.Add(text, gpu_parts, got, expected);
  return absl::OkStatus();
}

void StepDifference::Add(const Text& text, const std::vector<Part>& parts, const LayerRows& got,
                         const LayerRows& expected) {
  same_of_layer.resize(std::max(same_of_layer.size(), got.size()));
  for (size_t layer = 0; layer < got.size(); ++layer) {
    ASSERT_EQ(got[layer].size(), expected[layer].size());
    auto g = got[layer].begin(), e = expected[layer].begin();
    for (const Part& part : parts) {
      const ptrdiff_t rows = ptrdiff_t(size_t(part.tokens) * text.q_row());
      ASSERT_GE(got[layer].end() - g, rows);
      Difference of_part;
      of_part.Add({g, g + rows}, {e, e + rows});
      (part.tokens < kDecodedTokens ? same : decoded).Add(of_part);
      if (part.tokens < kDecodedTokens) same_of_layer[layer].Add(of_part);
      g += rows, e += rows;
    }
  }
}

void StepDifference::Add(const StepDifference& other) {
  same.Add(other.same), decoded.Add(other.decoded);
  same_of_layer.resize(std::max(same_of_layer.size(), other.same_of_layer.size()));
  for (size_t layer = 0; layer < other.same_of_layer.size(); ++layer) {
    same_of_layer[layer].Add(other.same_of_layer[layer]);
  }
}

}  // namespace kvmanager::testing
