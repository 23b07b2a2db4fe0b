// How good encoded pages are, of caches on a GPU: the daemon compares a page's two forms there as it does in host
// memory, with queries of steps that it runs itself and of engines whose own kernels attend.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/device_engines.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

constexpr int kOpenTokens = 30;  // of steps that fill no page
constexpr int kPages = 8;
constexpr int kDigestBytes = 6;  // of a cache's, in a series' label
constexpr char kArtifact[] = "made";
constexpr char kMillion[] = "million:m=64,bits=8,calibration=made";
/// Of the error of a page as a GPU encodes it against that as a CPU does: where rounding differs, a code does.
constexpr double kSameError = 1e-2;

struct Case {
  const char* name;
  std::string codec;
  Way way;
};

/// Every token has its layer's queries, so that it does not matter whose row a page is compared with.
Text TextWithOneQuery() {
  Text text = RandomText(11);
  for (std::vector<uint16_t>& q : text.q) {
    for (uint64_t token = 1; token < text.tokens; ++token) {
      std::copy_n(q.begin(), text.q_row(), q.begin() + std::ptrdiff_t(token * text.q_row()));
    }
  }
  return text;
}

class DeviceQualityTest : public DeviceDaemonTest {
 protected:
  void StartSampling(const std::string& one_in) { Start("1GiB", {"--quality-sample", one_in}); }
  /// Of the histogram of one layer of a cache, or of all there are.
  double Errors(const std::string& part, const client::Cache* cache = nullptr, int layer = 0) {
    const auto page = Scrape(*daemon_);
    if (!page.ok()) return -1;
    std::vector<std::string> labels;
    if (cache != nullptr) {
      labels = {absl::StrCat("cache=\"", cache->description().digest.ToHex(kDigestBytes), "\""),
                absl::StrCat("layer=\"", layer, "\"")};
    }
    return page->Sum("kvmanager_codec_relative_error_" + part, labels);
  }
};

class DeviceQualityWaysTest : public DeviceQualityTest, public ::testing::WithParamInterface<Case> {};

TEST_P(DeviceQualityWaysTest, TheErrorIsThatOfTheCpu) {
  ASSERT_NO_FATAL_FAILURE(StartSampling("1"));
  EXPECT_TRUE(device_->description().samples_queries);
  const Text text = TextWithOneQuery();
  WriteArtifact(text, {kMillion}, artifacts_.path(), kArtifact);
  const std::string& codec = GetParam().codec;
  ASSERT_OK_AND_ASSIGN(auto gpu, MakeEngine(GetParam().way, client_.get(), device_.get(), OptionsFor(text, codec, 0),
                                            artifacts_.path()));
  ASSERT_OK_AND_ASSIGN(auto cpu, HostEngine::Make(client_.get(), OptionsFor(text, codec, -1, "host")));
  ASSERT_OK_AND_ASSIGN(auto on_gpu, gpu->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto on_cpu, cpu->cache().CreateSequence());
  const auto step = [&](uint64_t first, int tokens) -> absl::Status {
    LayerRows rows;
    KV_RETURN_IF_ERROR(gpu->Step(text, {{on_gpu.sequence->id(), first, tokens}}, true, &rows));
    return cpu->Step(text, {{on_cpu.sequence->id(), first, tokens}}, true, &rows);
  };
  // Queries of both layers come first, also where an engine's own kernels attend.
  uint64_t tokens = 0;
  for (; tokens < kOpenTokens; ++tokens) ASSERT_OK(step(tokens, 1));
  EXPECT_EQ(Errors("count"), 0);
  // The first page is a sink. Then a page of each layer after the other, so that none comes while too many are
  // compared.
  for (int page = 0; page <= kPages; ++page, tokens += kPage) {
    ASSERT_OK(step(tokens, kPage));
    for (Engine* const engine : {gpu.get(), cpu.get()}) {
      for (int layer = 0; layer < text.layers; ++layer) {
        const client::Cache& cache = engine->cache();
        ASSERT_TRUE(Eventually([&] { return Errors("count", &cache, layer) == page; }))
            << (engine == gpu.get() ? "GPU" : "CPU") << ", layer " << layer << ", page " << page << ": "
            << Errors("count", &cache, layer);
      }
    }
  }
  for (int layer = 0; layer < text.layers; ++layer) {
    const double error = Errors("sum", &gpu->cache(), layer) / kPages;
    const double expected = Errors("sum", &cpu->cache(), layer) / kPages;
    std::printf("%s, layer %d: error %.6f, on the CPU %.6f\n", GetParam().name, layer, error, expected);
    EXPECT_GT(expected, 1e-3);
    EXPECT_NEAR(error, expected, kSameError * expected);
  }
  gpu->Forget(*on_gpu.sequence);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, DeviceQualityWaysTest,
    ::testing::Values(Case{"k2v2_daemon", "hack:k_bits=2,v_bits=2", Way::kDaemon},
                      Case{"k2v2_own", "hack:k_bits=2,v_bits=2", Way::kOwn},
                      Case{"k4v3_own_but_encoding", "hack:k_bits=4,v_bits=3", Way::kOwnButEncoding},
                      Case{"million_daemon", kMillion, Way::kDaemon}, Case{"million_own", kMillion, Way::kOwn},
                      Case{"zack_own", "zack:mode=balanced,rate=0.5,calibration=made", Way::kOwn}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(DeviceQualityTest, NothingIsCopiedForADaemonThatDoesNotSample) {
  ASSERT_NO_FATAL_FAILURE(StartSampling("0"));
  EXPECT_FALSE(device_->description().samples_queries);
  const Text text = RandomText(12);
  for (const Way way : {Way::kDaemon, Way::kOwn}) {
    ASSERT_OK_AND_ASSIGN(auto engine,
                         MakeEngine(way, client_.get(), device_.get(), OptionsFor(text, "hack:k_bits=2,v_bits=2", 0)));
    ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
    LayerRows rows;
    for (uint64_t tokens = 0; tokens < 4 * kPage; tokens += kPage / 2) {
      ASSERT_OK(engine->Step(text, {{made.sequence->id(), tokens, kPage / 2}}, true, &rows));
    }
    engine->Forget(*made.sequence);
  }
  EXPECT_EQ(Errors("count"), 0);
}

TEST_F(DeviceQualityTest, AGraphCopiesNoQueries) {
  ASSERT_NO_FATAL_FAILURE(StartSampling("1"));
  const Text text = RandomText(13);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_OK_AND_ASSIGN(
      auto engine, OwnEngine::Make(client_.get(), device_.get(), OptionsFor(text, "hack:k_bits=2,v_bits=2", 0), true,
                                   artifacts_.path(), stream));
  ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
  cudaGraphExec_t graph = nullptr;
  LayerRows rows;
  const auto step = [&](uint64_t at) {
    ASSERT_OK(engine->BeginStep(text, {{made.sequence->id(), at, 1}}));
    if (graph == nullptr) {
      cudaGraph_t captured = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      ASSERT_OK(engine->LaunchStep());
      ASSERT_CUDA(cudaStreamEndCapture(stream, &captured));
      ASSERT_CUDA(cudaGraphInstantiate(&graph, captured, 0));
      ASSERT_CUDA(cudaGraphDestroy(captured));
    }
    ASSERT_CUDA(cudaGraphLaunch(graph, stream));
    ASSERT_OK(engine->EndStep(&rows));
  };
  uint64_t at = 0;
  for (; at < 3 * kPage; ++at) ASSERT_NO_FATAL_FAILURE(step(at));
  EXPECT_EQ(Errors("count"), 0) << "there are no queries";
  // Steps that are launched bring them, and pages that graphs fill are compared then.
  for (; at < 3 * kPage + 8; ++at) {
    ASSERT_OK(engine->Step(text, {{made.sequence->id(), at, 1}}, true, &rows));
  }
  for (; at <= 5 * kPage; ++at) ASSERT_NO_FATAL_FAILURE(step(at));
  for (int layer = 0; layer < text.layers; ++layer) {
    EXPECT_TRUE(Eventually([&] { return Errors("count", &engine->cache(), layer) == 2; })) << layer;
  }
  engine->Forget(*made.sequence);
  made.sequence.reset();
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
  engine.reset();
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace kvmanager::testing
