// Recomputing K and V at a receiver whose GPU multiplies: of hand-offs to caches in host memory and on the GPU, over a
// link that is slower than any processor; what is recomputed beside what the sender has, and what becomes of failures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/device.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/projected_source.h"

namespace kvmanager::testing {
namespace {

using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;
using client::Projections;

constexpr uint64_t kHostBytes = 64 << 20;

double Metric(const DaemonProcess& daemon, absl::string_view name, const std::vector<std::string>& labels = {}) {
  const absl::StatusOr<MetricsPage> page = Scrape(daemon);
  EXPECT_OK(page);
  return page.ok() ? page->Sum(name, labels) : -1;
}

class DeviceRecomputeTest : public GpuTest {
 protected:
  // A sender without a GPU and with a slow link; a receiver whose GPU projects. device: where the receiver's cache
  // lies.
  void Start(int device, const std::string& codec = "raw", int lag_pages = 0,
             const std::string& recompute_bytes = "256MiB") {
    source_.shape = ProjectedCache(codec, lag_pages);
    source_.shape.head_dim = 128;
    source_.shape.hidden_size = 256;
    source_.facts.rotary_dims = 128;
    source_.facts.double_angles = true;
    source_.weights = DType::kFloat16;
    DaemonOptions options;
    options.host_pool_bytes = kHostBytes;
    options.more_flags = {"--threads", "2", "--peer-local-copy", "off", "--peer-rate-bytes", "2MiB"};
    ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(options));
    options.more_flags = {"--threads",    "2", "--device-pool-bytes", "512MiB", "--recompute-device-bytes",
                          recompute_bytes};
    ASSERT_OK_AND_ASSIGN(receiver_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(there_, Client::Connect(receiver_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(source_.shape));
    client::CacheOptions shape = source_.shape;
    shape.device = device;
    if (device >= 0) {
      ASSERT_OK_AND_ASSIGN(gpu_, client::DeviceClient::Open(there_.get(), device));
    }
    ASSERT_OK_AND_ASSIGN(other_, there_->OpenCache(shape));
    ASSERT_TRUE(
        Eventually([&] { return Metric(*receiver_, "kvmanager_pool_pinned_bytes") >= double(kHostBytes); }, 60000));
  }
  // Registers, and lets the receiver see the link once, by another sequence.
  void Prepare() {
    ASSERT_OK_AND_ASSIGN(projections_, RegisterAll(*other_, source_));
    ASSERT_OK_AND_ASSIGN(const client::RecomputeDescription known, there_->Recompute());
    ASSERT_EQ(known.sets.size(), 1u);
    EXPECT_EQ(known.sets[0].device, 0);
    EXPECT_EQ(known.sets[0].layers_ready, 2u);
    EXPECT_GT(known.sets[0].flops.samples, 0u);
    ASSERT_EQ(known.devices.size(), 1u);
    EXPECT_GE(known.devices[0].weight_bytes, 2 * 2 * 256 * 256 * 2u);
    EXPECT_EQ(double(known.devices[0].weight_bytes),
              Metric(*receiver_, "kvmanager_recompute_device_bytes", {"device=\"0\""}));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(99, kTokens));
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
    ASSERT_OK(other_->Claim(sent.ticket));
    EXPECT_EQ(Recomputed(), 0);
  }
  absl::StatusOr<CreatedSequence> Loaded(uint64_t seed, int tokens) {
    ProjectedSource source = source_;
    source.seed = seed;
    KV_ASSIGN_OR_RETURN(CreatedSequence made, cache_->CreateSequence());
    KV_RETURN_IF_ERROR(LoadProjected(*cache_, made.sequence->id(), source, 0, tokens));
    return made;
  }
  double Recomputed() { return Metric(*receiver_, "kvmanager_recompute_tokens_total", {"how=\"recomputed\""}); }
  // K and V of every layer: values of fp16.
  static absl::StatusOr<std::vector<uint16_t>> ReadAll(client::Cache& cache, uint64_t sequence, int tokens) {
    const client::CacheOptions& shape = cache.description().options;
    const size_t values = size_t(tokens) * shape.kv_heads * shape.head_dim;
    std::vector<uint16_t> all;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const client::StepEntry entry{sequence, 0, tokens};
      std::vector<uint16_t> rows(2 * values);
      client::ReadBatch batch;
      batch.layer = layer;
      batch.entries = {&entry, 1};
      batch.k = client::TensorView::Inline(rows.data(), values * 2);
      batch.v = client::TensorView::Inline(rows.data() + values, values * 2);
      KV_RETURN_IF_ERROR(cache.Read(batch).status());
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }
  // Within one unit of fp16, and what an fp32 sum may be off. Returns how many differ at all.
  static int ExpectClose(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want) {
    EXPECT_EQ(got.size(), want.size());
    int different = 0;
    for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
      const double a = HalfToFloat(got[i]), b = HalfToFloat(want[i]);
      different += got[i] != want[i];
      EXPECT_NEAR(a, b, std::max(std::abs(b) * 0x1p-10, 2e-5)) << "value " << i;
      if (HasFailure()) break;
    }
    return different;
  }
  static bool Empty(Client& client) {
    return Eventually([&] {
      if (!client.Purge(Client::kAllCaches).ok()) return false;
      const auto status = client.Status();
      return status.ok() && std::all_of(status->pools.begin(), status->pools.end(),
                                        [](const auto& pool) { return pool.used_bytes == 0; });
    });
  }

  static constexpr int kTokens = 64 * 6 + 5;
  ProjectedSource source_;
  std::unique_ptr<DaemonProcess> sender_, receiver_;
  std::unique_ptr<Client> here_, there_;
  std::unique_ptr<client::DeviceClient> gpu_;
  std::unique_ptr<client::Cache> cache_, other_;
  std::unique_ptr<Projections> projections_;
};

TEST_F(DeviceRecomputeTest, KeysAndValuesAreTheSenders) {
  ASSERT_NO_FATAL_FAILURE(Start(-1));
  ASSERT_NO_FATAL_FAILURE(Prepare());
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_GE(Recomputed(), 2 * 64 * 4);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
  ASSERT_OK_AND_ASSIGN(const auto stayed, ReadAll(*cache_, made.sequence->id(), kTokens));
  ASSERT_OK_AND_ASSIGN(const auto went, ReadAll(*other_, claimed.sequence->id(), kTokens));
  const int different = ExpectClose(went, stayed);
  std::printf("%g of %d tokens recomputed on the GPU; %d of %zu values are another fp16 than the sender's\n",
              Recomputed(), 2 * kTokens, different, stayed.size());
  claimed.sequence.reset();
  made.sequence.reset();
  EXPECT_TRUE(Empty(*there_));
  EXPECT_TRUE(Empty(*here_));
}

// The sequence is fetched to the GPU, and handed back from there.
TEST_F(DeviceRecomputeTest, ACacheOnTheGpuClaimsWhatWasRecomputed) {
  ASSERT_NO_FATAL_FAILURE(Start(0));
  ASSERT_NO_FATAL_FAILURE(Prepare());
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_GE(Recomputed(), 2 * 64 * 4);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
  EXPECT_GT(Metric(*receiver_, "kvmanager_pages", {"tier=\"gpu0\""}), 0);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome back, claimed.sequence->HandOff(sender_->peer(), ""));
  ASSERT_OK_AND_ASSIGN(ClaimedSequence returned, cache_->Claim(back.ticket));
  ASSERT_OK_AND_ASSIGN(const auto stayed, ReadAll(*cache_, made.sequence->id(), kTokens));
  ASSERT_OK_AND_ASSIGN(const auto came, ReadAll(*cache_, returned.sequence->id(), kTokens));
  ExpectClose(came, stayed);
  claimed.sequence.reset();
  EXPECT_TRUE(Empty(*there_));
}

// X is finite, what the weights make of it is not a float16: that hand-off ends, the next is copied, and whoever
// registers anew has the next recomputed.
TEST_F(DeviceRecomputeTest, WhatIsNotFiniteEndsItsHandOff) {
  ASSERT_NO_FATAL_FAILURE(Start(-1));
  ASSERT_NO_FATAL_FAILURE(Prepare());
  ASSERT_OK_AND_ASSIGN(CreatedSequence bad, cache_->CreateSequence());
  for (int layer = 0; layer < 2; ++layer) {
    ProjectedSource::Rows rows = source_.Tokens(layer, 0, kTokens);
    for (int i = 0; i < 256; ++i) rows.x[size_t(70) * 256 + i] = FloatToHalf(i % 2 == 0 ? 65000 : -65000);
    const client::StepEntry entry{bad.sequence->id(), 0, kTokens};
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = InlineView(rows.k);
    batch.v = InlineView(rows.v);
    batch.x = InlineView(rows.x);
    ASSERT_OK(cache_->Step(batch));
  }
  const absl::Status ended = bad.sequence->HandOff(receiver_->peer(), "").status();
  EXPECT_FALSE(ended.ok());
  ASSERT_OK_AND_ASSIGN(client::RecomputeDescription now, there_->Recompute());
  EXPECT_NE(now.sets[0].failed.find("position 70"), std::string::npos) << now.sets[0].failed;
  EXPECT_GT(Metric(*receiver_, "kvmanager_recompute_failed_pages_total"), 0);
  const double before = Recomputed();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  ASSERT_OK_AND_ASSIGN(HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_EQ(Recomputed(), before);
  ASSERT_OK(other_->Claim(sent.ticket));
  const double bytes = Metric(*receiver_, "kvmanager_recompute_device_bytes");
  ASSERT_OK(projections_->SetLayer(Registration(source_, 0).wire));
  EXPECT_EQ(Metric(*receiver_, "kvmanager_recompute_device_bytes"), bytes);
  ASSERT_OK_AND_ASSIGN(CreatedSequence next, Loaded(2, kTokens));
  ASSERT_OK_AND_ASSIGN(sent, next.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_GT(Recomputed(), before);
  ASSERT_OK(other_->Claim(sent.ticket));
}

TEST_F(DeviceRecomputeTest, ASenderThatDiesLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(-1));
  ASSERT_NO_FATAL_FAILURE(Prepare());
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, 64 * 40));
  auto pending = made.sequence->HandOffAsync(receiver_->peer(), "", 60000);
  ASSERT_TRUE(Eventually([&] { return Recomputed() > 0; }, 60000));
  sender_->Kill();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_tickets") == 0; }));
  EXPECT_TRUE(Empty(*there_));
  // The weights are there still, and go with their lease.
  EXPECT_OK(projections_->SetLayer(Registration(source_, 0).wire));
  projections_.reset();
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_recompute_device_bytes") == 0; }));
}

TEST_F(DeviceRecomputeTest, MemoryIsBoundedAndWeightsAreOfOneType) {
  ASSERT_NO_FATAL_FAILURE(Start(-1, "raw", 0, "17MiB"));
  // Three quarters are this tenant's: 10 MiB of buffers; a layer has 256 KiB of weights.
  source_.shape.layers = 20;
  ASSERT_OK_AND_ASSIGN(auto deep, there_->OpenCache(source_.shape));
  ASSERT_OK_AND_ASSIGN(auto projections, deep->OpenProjections(source_.facts));
  int layer = 0;
  absl::Status status;
  while (layer < 20 && (status = projections->SetLayer(Registration(source_, layer).wire)).ok()) ++layer;
  EXPECT_GT(layer, 0);
  const std::string field = "--recompute-device-bytes of this tenant";
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kResourceExhausted, field)) << status;
  const absl::Status full = other_->OpenProjections(source_.facts).status();
  EXPECT_TRUE(NamesField(full, absl::StatusCode::kResourceExhausted, field)) << full;
  // Where the set is it stays; another type at first has it on the CPU.
  projections.reset();
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_recompute_device_bytes") == 0; }));
  ProjectedSource wide = source_;
  wide.weights = DType::kFloat32;
  ASSERT_OK_AND_ASSIGN(projections, deep->OpenProjections(source_.facts));
  ASSERT_OK(projections->SetLayer(Registration(source_, 0).wire));
  const absl::Status other = projections->SetLayer(Registration(wide, 1).wire);
  EXPECT_TRUE(NamesField(other, absl::StatusCode::kInvalidArgument, "weights.dtype")) << other;
  projections.reset();
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_recompute_device_bytes") == 0; }));
  ASSERT_OK_AND_ASSIGN(projections, deep->OpenProjections(source_.facts));
  ASSERT_OK(projections->SetLayer(Registration(wide, 0).wire));
  ASSERT_OK_AND_ASSIGN(const client::RecomputeDescription now, there_->Recompute());
  ASSERT_EQ(now.sets.size(), 1u);
  EXPECT_EQ(now.sets[0].device, -1);
  EXPECT_EQ(now.devices[0].weight_bytes, 0u);
}

}  // namespace
}  // namespace kvmanager::testing
