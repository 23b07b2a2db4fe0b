// Hand-offs between two daemons over a link that is held to a rate, with nothing recomputed, and with K and V
// recomputed by the receiver on its CPU and on its GPU (KVPR).
//
//   bazel run --config=opt //bench/recompute:hand_off_bench -- [--ways copy,cpu,gpu] [--links 1,10] ...
//
// One process drives both daemons, on one host; the link is the sender's --peer-rate-bytes over loopback TCP. Each way
// has a receiver of its own, which sees the link once, by a copy, before anything counts. Times are the sender's, from
// the offer to the receiver's word that everything is there, recomputed pages included: medians. K and V of the sent
// sequence are what the weights make of X, so that what was recomputed can be compared: the largest difference of one
// layer, in units of fp16 at the value's size.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"
#include "tests/harness.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/runtime.h"

namespace kvmanager::recompute {
namespace {

using client::Client;
using testing::DaemonOptions;
using testing::DaemonProcess;

struct Arguments {
  int tokens = 4096, layers = 4, hidden = 4096, kv_heads = 32, query_heads = 32, head_dim = 128, repeats = 5,
      threads = 0;
  std::vector<double> links = {1, 10};  // Gbit/s
  std::vector<std::string> ways = {"copy", "cpu", "gpu"};
};

constexpr int kPageTokens = 64, kProofTokens = 16, kProofPosition = 4000, kStepTokens = 512, kDistinctLayers = 1;

// One layer, which all are alike: rows of X, K and V, and the weights.
struct Layer {
  std::vector<uint16_t> w_k, w_v, x, k, v;
};

std::vector<uint16_t> Random(size_t count, float scale, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<uint16_t> some(std::min<size_t>(count, 1 << 20)), all(count);
  for (uint16_t& value : some) value = FloatToHalf(normal(random));
  for (size_t at = 0; at < count; at += some.size()) {
    // Rotated, so that no two rows are alike.
    std::rotate(some.begin(), some.begin() + 7919 % some.size(), some.end());
    std::copy_n(some.begin(), std::min(some.size(), count - at), all.begin() + at);
  }
  return all;
}

template <typename T>
absl::Span<const uint8_t> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

absl::StatusOr<Layer> MakeLayer(const Arguments& a, const ProjectionModel& model) {
  const size_t width = model.width();
  Layer layer;
  const float scale = 1 / std::sqrt(float(a.hidden));
  layer.w_k = Random(width * a.hidden, scale, 1);
  layer.w_v = Random(width * a.hidden, scale, 2);
  layer.x = Random(size_t(a.tokens) * a.hidden, 1, 3);
  const SteadyClock clock;
  WorkerPool workers(a.threads > 0 ? a.threads : int(std::thread::hardware_concurrency()));
  MemoryLink link;
  KV_ASSIGN_OR_RETURN(const auto executor, MakeCpuExecutor(model, {}, &link, &workers, &clock));
  KV_RETURN_IF_ERROR(executor->RegisterWeights(0, {DType::kFloat16, Bytes(layer.w_k), Bytes(layer.w_v), {}, {}}));
  const size_t pages = a.tokens / kPageTokens, page_bytes = model.layout.raw_bytes();
  std::vector<std::vector<uint8_t>> made(pages, std::vector<uint8_t>(page_bytes));
  std::vector<const uint8_t*> from;
  std::vector<uint8_t*> to;
  for (size_t p = 0; p < pages; ++p) {
    from.push_back(Bytes(layer.x).data() + p * model.activation_page_bytes());
    to.push_back(made[p].data());
  }
  ReloadSequence sequence;
  sequence.tokens = sequence.split_tokens = a.tokens;
  sequence.activations = from;
  sequence.pages = to;
  ReloadRuntime runtime(executor.get(), &clock, nullptr);
  KV_RETURN_IF_ERROR(
      runtime.Run({.layer = 0, .kv_page_bytes = page_bytes, .sequences = absl::MakeConstSpan(&sequence, 1)}).status());
  for (int side = 0; side < 2; ++side) {
    std::vector<uint16_t>& rows = side == 0 ? layer.k : layer.v;
    rows.resize(size_t(a.tokens) * width);
    for (int t = 0; t < a.tokens; ++t) {
      for (int head = 0; head < a.kv_heads; ++head) {
        std::memcpy(&rows[(size_t(t) * a.kv_heads + head) * a.head_dim],
                    made[t / kPageTokens].data() + model.layout.raw_offset(side, head, t % kPageTokens),
                    size_t(a.head_dim) * 2);
      }
    }
  }
  return layer;
}

client::TensorView Rows(const std::vector<uint16_t>& rows, size_t row, int first, int tokens) {
  return client::TensorView::Inline(rows.data() + first * row, tokens * row * 2);
}

absl::Status Load(client::Cache& cache, uint64_t sequence, const Arguments& a, const Layer& layer) {
  const size_t width = size_t(a.kv_heads) * a.head_dim;
  for (int l = 0; l < a.layers; ++l) {
    for (int first = 0; first < a.tokens; first += kStepTokens) {
      const client::StepEntry entry{sequence, uint64_t(first), std::min(kStepTokens, a.tokens - first)};
      client::StepBatch batch;
      batch.layer = l;
      batch.entries = {&entry, 1};
      batch.k = Rows(layer.k, width, first, entry.tokens);
      batch.v = Rows(layer.v, width, first, entry.tokens);
      batch.x = Rows(layer.x, a.hidden, first, entry.tokens);
      KV_RETURN_IF_ERROR(cache.Step(batch).status());
    }
  }
  return absl::OkStatus();
}

absl::Status Register(Client& client, client::Projections& projections, const Arguments& a, const Layer& layer) {
  const size_t width = size_t(a.kv_heads) * a.head_dim, weight_bytes = width * a.hidden * 2;
  KV_ASSIGN_OR_RETURN(const auto arena, client.CreateArena(2 * weight_bytes));
  std::memcpy(arena->data().data(), layer.w_k.data(), weight_bytes);
  std::memcpy(arena->data().data() + weight_bytes, layer.w_v.data(), weight_bytes);
  const int position = std::min(kProofPosition, a.tokens - kProofTokens);
  for (int l = 0; l < a.layers; ++l) {
    client::LayerProjections wire;
    wire.layer = l;
    wire.dtype = DType::kFloat16;
    wire.k = arena->View(0, weight_bytes);
    wire.v = arena->View(weight_bytes, weight_bytes);
    wire.proof.position = position;
    wire.proof.tokens = kProofTokens;
    wire.proof.x = Rows(layer.x, a.hidden, position, kProofTokens);
    wire.proof.k = Rows(layer.k, width, position, kProofTokens);
    wire.proof.v = Rows(layer.v, width, position, kProofTokens);
    KV_RETURN_IF_ERROR(projections.SetLayer(wire));
  }
  return absl::OkStatus();
}

// Of the last layer: how far apart, in units of fp16, and how many values differ.
absl::Status Compare(client::Cache& cache, uint64_t sequence, const Arguments& a, const Layer& layer, double* units,
                     double* different) {
  const size_t width = size_t(a.kv_heads) * a.head_dim;
  std::vector<uint16_t> k(kStepTokens * width), v(k);
  uint64_t count = 0;
  *units = *different = 0;
  for (int first = 0; first < a.tokens; first += kStepTokens) {
    const client::StepEntry entry{sequence, uint64_t(first), std::min(kStepTokens, a.tokens - first)};
    client::ReadBatch batch;
    batch.layer = a.layers - 1;
    batch.entries = {&entry, 1};
    batch.k = Rows(k, width, 0, entry.tokens);
    batch.v = Rows(v, width, 0, entry.tokens);
    KV_RETURN_IF_ERROR(cache.Read(batch).status());
    for (const auto& [got, want] : {std::pair(&k, &layer.k), std::pair(&v, &layer.v)}) {
      for (size_t i = 0; i < entry.tokens * width; ++i, ++count) {
        const uint16_t b = (*want)[first * width + i];
        if ((*got)[i] == b) continue;
        ++*different;
        const double value = HalfToFloat(b), unit = std::ldexp(1.0, std::max(std::ilogb(value), -5) - 10);
        *units = std::max(*units, std::abs(HalfToFloat((*got)[i]) - value) / unit);
      }
    }
  }
  *different /= double(count);
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Metric(const DaemonProcess& daemon, absl::string_view name, const std::vector<std::string>& labels = {}) {
  const auto page = testing::Scrape(daemon);
  return page.ok() ? page->Sum(name, labels) : 0;
}

absl::Status RunWay(const Arguments& a, const std::string& way, double gbit, client::Sequence& sent, const Layer& layer,
                    const client::CacheOptions& shape, const client::ProjectionFacts& facts) {
  const uint64_t bytes = uint64_t(a.tokens) * a.layers * (2 * size_t(a.kv_heads) * a.head_dim + a.hidden) * 2;
  DaemonOptions options;
  options.host_pool_bytes = (3 * bytes / (1 << 21) + 64) << 21;
  options.more_flags = {"--threads", absl::StrCat(a.threads)};
  if (way == "gpu") {
    for (const char* flag : {"--device-pool-bytes", "512MiB", "--recompute-device-bytes", "8GiB"}) {
      options.more_flags.push_back(flag);
    }
  }
  KV_ASSIGN_OR_RETURN(const auto daemon, DaemonProcess::Start(options));
  KV_ASSIGN_OR_RETURN(const auto client, Client::Connect(daemon->listen(), {.deadline_ms = 600000}));
  KV_ASSIGN_OR_RETURN(const auto cache, client->OpenCache(shape));
  std::unique_ptr<client::Projections> projections;
  double tflops = 0;
  if (way != "copy") {
    KV_ASSIGN_OR_RETURN(projections, cache->OpenProjections(facts));
    KV_RETURN_IF_ERROR(Register(*client, *projections, a, layer));
  }
  if (way == "gpu" &&
      !testing::Eventually(
          [&] { return Metric(*daemon, "kvmanager_pool_pinned_bytes") >= double(options.host_pool_bytes); }, 120000)) {
    return absl::UnavailableError("the receiver's pool was not pinned within two minutes");
  }
  const auto recomputed = [&] { return Metric(*daemon, "kvmanager_recompute_tokens_total", {"how=\"recomputed\""}); };
  std::vector<double> seconds, sent_bytes, tokens, busy;
  double units = 0, different = 0;
  for (int i = -1; i < a.repeats; ++i) {
    const double before = recomputed(), busy_before = Metric(*daemon, "kvmanager_recompute_seconds_sum");
    KV_ASSIGN_OR_RETURN(const auto outcome, sent.HandOff(daemon->peer(), "", 600000));
    KV_ASSIGN_OR_RETURN(const auto claimed, cache->Claim(outcome.ticket));
    if (i < 0) continue;
    seconds.push_back(outcome.seconds);
    sent_bytes.push_back(double(outcome.bytes_sent));
    tokens.push_back((recomputed() - before) / (double(a.tokens) * a.layers));
    busy.push_back(Metric(*daemon, "kvmanager_recompute_seconds_sum") - busy_before);
    if (i + 1 == a.repeats) {
      KV_RETURN_IF_ERROR(Compare(*cache, claimed.sequence->id(), a, layer, &units, &different));
    }
  }
  if (way != "copy") {
    KV_ASSIGN_OR_RETURN(const auto now, client->Recompute());
    if (!now.sets.empty()) tflops = now.sets[0].flops.per_second * 1e-12;
  }
  std::printf("| %g | %s | %.1f | %.1f..%.1f | %.1f | %.1f%% | %.1f | %.3g | %.2f, %.2g%% |\n", gbit, way.c_str(),
              Median(seconds) * 1e3, *std::min_element(seconds.begin(), seconds.end()) * 1e3,
              *std::max_element(seconds.begin(), seconds.end()) * 1e3, Median(sent_bytes) / (1 << 20),
              Median(tokens) * 100, Median(busy) * 1e3, tflops, units, different * 100);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Run(const Arguments& a) {
  client::ProjectionFacts facts;
  facts.rotary_dims = a.head_dim;
  facts.theta = 10000;
  ProjectionModel model;
  model.layout.dtype = DType::kFloat16;
  model.layout.kv_heads = uint16_t(a.kv_heads);
  model.layout.head_dim = uint16_t(a.head_dim);
  model.layout.page_tokens = kPageTokens;
  model.layers = kDistinctLayers;
  model.hidden = a.hidden;
  model.rope.rotary_dims = a.head_dim;
  model.rope.theta = facts.theta;
  KV_RETURN_IF_ERROR(CheckModel(model));
  KV_ASSIGN_OR_RETURN(const Layer layer, MakeLayer(a, model));
  client::CacheOptions shape;
  shape.model = "hand-off";
  shape.layers = a.layers;
  shape.kv_heads = a.kv_heads;
  shape.query_heads = a.query_heads;
  shape.head_dim = a.head_dim;
  shape.hidden_size = a.hidden;
  shape.lag_pages = 0;
  std::printf(
      "%d tokens, %d layers, h %d, %d KV heads of %d, raw pages; medians of %d\n\n"
      "| link, Gbit/s | way | hand-off, ms | from..to | sent, MiB | recomputed | recomputing, ms | TFLOP/s | off by, "
      "values |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
      a.tokens, a.layers, a.hidden, a.kv_heads, a.head_dim, a.repeats);
  for (const double gbit : a.links) {
    DaemonOptions options;
    const uint64_t bytes = uint64_t(a.tokens) * a.layers * (2 * size_t(a.kv_heads) * a.head_dim + a.hidden) * 2;
    options.host_pool_bytes = (bytes / (1 << 21) + 64) << 21;
    options.more_flags = {"--threads", absl::StrCat(a.threads), "--peer-local-copy",
                          "off",       "--peer-rate-bytes",     absl::StrCat(uint64_t(gbit * 1e9 / 8))};
    KV_ASSIGN_OR_RETURN(const auto daemon, DaemonProcess::Start(options));
    KV_ASSIGN_OR_RETURN(const auto client, Client::Connect(daemon->listen(), {.deadline_ms = 600000}));
    KV_ASSIGN_OR_RETURN(const auto cache, client->OpenCache(shape));
    KV_ASSIGN_OR_RETURN(const auto made, cache->CreateSequence());
    KV_RETURN_IF_ERROR(Load(*cache, made.sequence->id(), a, layer));
    for (const std::string& way : a.ways) {
      KV_RETURN_IF_ERROR(RunWay(a, way, gbit, *made.sequence, layer, shape, facts));
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::recompute

int main(int argc, char** argv) {
  kvmanager::recompute::Arguments a;
  CLI::App app("Hand-offs over an emulated link: copied, and recomputed by the receiver on CPU and GPU");
  app.add_option("--tokens", a.tokens, "whole pages of 64")
      ->check(CLI::Range(kvmanager::recompute::kPageTokens, 1 << 20));
  app.add_option("--layers", a.layers)->check(CLI::Range(1, 128));
  app.add_option("--hidden", a.hidden)->check(CLI::Range(16, 1 << 15));
  app.add_option("--kv-heads", a.kv_heads)->check(CLI::Range(1, 256));
  app.add_option("--query-heads", a.query_heads, "a multiple of them")->check(CLI::Range(1, 1024));
  app.add_option("--head-dim", a.head_dim)->check(CLI::Range(16, 256));
  app.add_option("--repeats", a.repeats)->check(CLI::Range(1, 100));
  app.add_option("--threads", a.threads, "of each daemon; 0: one per CPU")->check(CLI::Range(0, 1024));
  app.add_option("--links", a.links, "Gbit/s")->delimiter(',')->check(CLI::Range(0.01, 1000.0));
  app.add_option("--ways", a.ways, "copy, cpu, gpu")->delimiter(',')->check(CLI::IsMember({"copy", "cpu", "gpu"}));
  CLI11_PARSE(app, argc, argv);
  if (a.tokens % kvmanager::recompute::kPageTokens != 0) {
    std::fprintf(stderr, "--tokens is %d, must be a multiple of %d\n", a.tokens, kvmanager::recompute::kPageTokens);
    return 2;
  }
  const absl::Status status = kvmanager::recompute::Run(a);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
