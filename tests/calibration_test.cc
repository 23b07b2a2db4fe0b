// Calibration artifacts through whole daemons: found by name and by digest, refused when they are bad or foreign, and
// followed by a hand-off; and pages that a peer made up.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "kvmanager/handoff/manifest.h"
#include "monitoring/metrics.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport_metrics.h"
#include "xxhash.h"

namespace kvmanager::testing {
namespace {

namespace fs = std::filesystem;

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

std::string ZackSpec(const std::string& calibration, const std::string& more = "") {
  return absl::StrCat("zack:mode=joint,rate=0.3", more, ",calibration=", calibration);
}

CalibrationModel ModelOf(const CacheOptions& options) {
  return {options.model, options.revision, options.layers, options.kv_heads, options.query_heads, options.head_dim};
}

/// The bytes of an artifact's file.
std::string ArtifactFile(const CalibrationModel& model, uint32_t seed, std::string* digest) {
  const auto made = SyntheticCalibration(model, seed, {});
  *digest = made->digest();
  return SerializeCalibration(made->model(), made->tensors(), made->metadata());
}

void WriteBytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

/// A daemon with a directory of artifacts of its own.
struct Host {
  TempDir directory;
  std::unique_ptr<DaemonProcess> daemon;
  std::unique_ptr<Client> client;

  void Start() {
    DaemonOptions options;
    options.more_flags = {"--threads", "2", "--calibration-dir", directory.path()};
    ASSERT_OK_AND_ASSIGN(daemon, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client, Client::Connect(daemon->listen(), {}));
  }
  fs::path file(const std::string& name) const { return fs::path(directory.path()) / name; }
};

class CalibrationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    good_ = ArtifactFile(ModelOf(SmallCache("raw")), 1, &digest_);
    WriteBytes(host_.file("good.safetensors"), good_);
    ASSERT_NO_FATAL_FAILURE(host_.Start());
    // Another cache, which goes on whatever happens.
    ASSERT_OK_AND_ASSIGN(other_, host_.client->OpenCache(SmallCache("hack")));
    ASSERT_OK_AND_ASSIGN(other_sequence_, other_->CreateSequence());
  }
  void TearDown() override {
    ASSERT_NO_FATAL_FAILURE(OthersGoOn());
    other_sequence_.sequence.reset();
    other_.reset();
    host_.client.reset();
  }
  void OthersGoOn() {
    ASSERT_TRUE(host_.daemon->process().running());
    ASSERT_OK(Feed(*other_, other_sequence_.sequence->id(), Source{5, Kind::kNormal, SmallCache("hack")}, fed_, 70, 70)
                  .status());
    fed_ += 70;
  }
  absl::Status Open(const std::string& codec, const std::string& calibration_digest = "") {
    CacheOptions options = SmallCache(codec);
    options.calibration_digest = calibration_digest;
    return host_.client->OpenCache(options).status();
  }

  Host host_;
  std::string good_, digest_;
  std::unique_ptr<Cache> other_;
  CreatedSequence other_sequence_;
  uint64_t fed_ = 0;
};

TEST_F(CalibrationTest, IsFoundByNameAndByDigest) {
  ASSERT_OK_AND_ASSIGN(auto by_name, host_.client->OpenCache(SmallCache(ZackSpec("good"))));
  ASSERT_OK_AND_ASSIGN(auto by_file, host_.client->OpenCache(SmallCache(ZackSpec("good.safetensors"))));
  CacheOptions options = SmallCache(ZackSpec(digest_));
  options.calibration_digest = digest_;
  ASSERT_OK_AND_ASSIGN(auto by_digest, host_.client->OpenCache(options));
  EXPECT_EQ(by_name->description().id, by_file->description().id);
  EXPECT_EQ(by_name->description().id, by_digest->description().id);
  const CacheOptions& opened = by_name->description().options;
  EXPECT_EQ(opened.calibration_digest, digest_);
  EXPECT_TRUE(absl::EndsWith(opened.codec, absl::StrCat("calibration=", digest_, ";sinks=64"))) << opened.codec;

  // It serves, and a policy's raw layer beside it.
  ASSERT_OK_AND_ASSIGN(auto policy,
                       host_.client->OpenCache(SmallCache(absl::StrCat(ZackSpec("good"), ";0=raw;sinks=64"))));
  EXPECT_EQ(policy->description().options.calibration_digest, digest_);
  for (Cache* const cache : {by_name.get(), policy.get()}) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    const CacheOptions& shape = cache->description().options;
    client::StepResult counts;
    ASSERT_OK(Feed(*cache, made.sequence->id(), Source{1, Kind::kNormal, shape}, 0, 64 * 6, 64, &counts).status());
    EXPECT_GT(counts.encoded_pairs, 0u);
  }
}

TEST_F(CalibrationTest, AnotherDigestThanTheClientsIsRefused) {
  const std::string wrong(64, '0');
  const absl::Status status = Open(ZackSpec("good"), wrong);
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kFailedPrecondition, "calibration_digest"));
  EXPECT_EQ(DetailOf(status).value, wrong);
  EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, digest_)) << status;
  EXPECT_TRUE(NamesField(Open("hack", wrong), absl::StatusCode::kFailedPrecondition, "calibration_digest"));
}

TEST_F(CalibrationTest, BadArtifactsAreRefused) {
  // Truncated: to nothing, inside the header, inside the data.
  for (const size_t bytes : {size_t{0}, size_t{5}, size_t{100}, good_.size() / 2, good_.size() - 1}) {
    WriteBytes(host_.file("short.safetensors"), good_.substr(0, bytes));
    const absl::Status status = Open(ZackSpec("short"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bytes << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "short")) << status;
    ASSERT_NO_FATAL_FAILURE(OthersGoOn());
  }
  // One bit, anywhere in the data.
  for (const size_t at : {good_.size() - 1, good_.size() - 1000, good_.size() / 2}) {
    std::string flipped = good_;
    flipped[at] ^= 0x10;
    WriteBytes(host_.file("flipped.safetensors"), flipped);
    const absl::Status status = Open(ZackSpec("flipped"));
    EXPECT_TRUE(NamesField(status, absl::StatusCode::kInvalidArgument, "digest")) << at;
    ASSERT_NO_FATAL_FAILURE(OthersGoOn());
  }
  // The good one is as good as before; a cache that is open does not notice that its file went bad.
  ASSERT_OK_AND_ASSIGN(auto cache, host_.client->OpenCache(SmallCache(ZackSpec("good"))));
  WriteBytes(host_.file("good.safetensors"), good_.substr(0, good_.size() / 3));
  EXPECT_FALSE(Open(ZackSpec("good")).ok());
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(
      Feed(*cache, made.sequence->id(), Source{1, Kind::kNormal, cache->description().options}, 0, 300, 64).status());
}

TEST_F(CalibrationTest, ADamagedCopyDoesNotHideAGoodOne) {
  std::string damaged = good_;
  damaged.back() ^= 1;
  WriteBytes(host_.file("a-copy.safetensors"), damaged);
  EXPECT_OK(Open(ZackSpec(digest_)));
}

TEST_F(CalibrationTest, CodecsWithoutAUseForItRefuseIt) {
  for (const char* codec : {"raw", "hack", "hack:k_bits=4", "pq:m=2,bits=6"}) {
    const std::string spec = absl::StrCat(codec, absl::StrContains(codec, ":") ? "," : ":", "calibration=good");
    const absl::Status status = Open(spec);
    EXPECT_TRUE(NamesField(status, absl::StatusCode::kInvalidArgument, "codec parameter calibration")) << spec;
    EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, "absent")) << status;
    EXPECT_FALSE(Open(absl::StrCat(ZackSpec("good"), ";1=", spec)).ok()) << spec;
  }
}

TEST_F(CalibrationTest, TheDefaultIsNotHackInSilence) {
  EXPECT_OK(Open("default"));
  EXPECT_OK(Open("default:calibration=good"));
  const auto made = SyntheticCalibration(ModelOf(SmallCache("raw")), 3, {});
  TensorMap tensors;
  for (const auto& [name, tensor] : made->tensors()) {
    if (!absl::StartsWith(name, "zack_hack.")) tensors[name] = tensor;
  }
  WriteBytes(host_.file("zack.safetensors"), SerializeCalibration(made->model(), tensors, {}));
  const absl::Status status = Open("default:calibration=zack");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "kvctl calibrate --codec zack+hack")) << status;
}

TEST_F(CalibrationTest, ARenamedArtifactIsNotFoundUnderItsOldName) {
  fs::rename(host_.file("good.safetensors"), host_.file("better.safetensors"));
  const absl::Status status = Open(ZackSpec("good"));
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kNotFound, "calibration"));
  EXPECT_TRUE(absl::StrContains(status.message(), "better.safetensors")) << status;
  EXPECT_OK(Open(ZackSpec("better")));
  EXPECT_OK(Open(ZackSpec(digest_)));
  for (const std::string name : {"../good", ".", "/etc/passwd", "good/../better"}) {
    EXPECT_TRUE(NamesField(Open(ZackSpec(name)), absl::StatusCode::kInvalidArgument, "calibration")) << name;
  }
}

TEST_F(CalibrationTest, AnotherModelsArtifactIsRefused) {
  const CalibrationModel right = ModelOf(SmallCache("raw"));
  struct {
    CalibrationModel model;
    const char* field;
  } cases[] = {{right, "model"},    {right, "revision"}, {right, "layers"},
               {right, "kv_heads"}, {right, "head_dim"}, {right, "query_heads"}};
  cases[0].model.model = "another";
  cases[1].model.revision = "2";
  cases[2].model.layers = 3;
  cases[3].model.kv_heads = 1;
  cases[4].model.head_dim = 32;
  cases[5].model.query_heads = 8;
  for (const auto& c : cases) {
    std::string digest;
    WriteBytes(host_.file("foreign.safetensors"), ArtifactFile(c.model, 2, &digest));
    const absl::Status status = Open(ZackSpec("foreign"));
    EXPECT_TRUE(NamesField(status, absl::StatusCode::kFailedPrecondition, c.field));
    EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, "the cache's")) << status;
  }
}

TEST_F(CalibrationTest, WithoutADirectoryTheFlagIsNamed) {
  DaemonOptions options;
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const absl::Status status = client->OpenCache(SmallCache(ZackSpec("good"))).status();
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kInvalidArgument, "calibration"));
  EXPECT_TRUE(absl::StrContains(status.message(), "--calibration-dir")) << status;
}

TEST_F(CalibrationTest, OutputFactorsAreThoseOfFoldingLayers) {
  ASSERT_OK_AND_ASSIGN(auto plain, host_.client->OpenCache(SmallCache(ZackSpec("good"))));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> none, plain->OutputFactors(0));
  EXPECT_TRUE(none.empty());
  ASSERT_OK_AND_ASSIGN(auto folding,
                       host_.client->OpenCache(SmallCache(absl::StrCat("hack;1=", ZackSpec("good", ",fold=1")))));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> hack, folding->OutputFactors(0));
  EXPECT_TRUE(hack.empty());
  ASSERT_OK_AND_ASSIGN(const std::vector<float> factors, folding->OutputFactors(1));
  ASSERT_EQ(factors.size(), 2u * 64 * 64);
  // In mode joint the kept columns are orthonormal; the others are zero.
  for (int head = 0; head < 2; ++head) {
    int kept = 0;
    for (int c = 0; c < 64; ++c) {
      double norm = 0;
      for (int r = 0; r < 64; ++r)
        norm += double(factors[(head * 64 + r) * 64 + c]) * factors[(head * 64 + r) * 64 + c];
      if (norm != 0) {
        EXPECT_NEAR(norm, 1, 1e-4) << head << " " << c;
      }
      kept += norm != 0;
    }
    EXPECT_GE(kept, 16);
    EXPECT_EQ(kept % 16, 0);
  }
  EXPECT_TRUE(NamesField(folding->OutputFactors(2).status(), absl::StatusCode::kInvalidArgument, "layer"));
}

TEST_F(CalibrationTest, AHandOffFindsTheArtifactByItsDigest) {
  Host peer;
  WriteBytes(peer.file("of-another-name.safetensors"), good_);
  ASSERT_NO_FATAL_FAILURE(peer.Start());
  const CacheOptions options = SmallCache(absl::StrCat(ZackSpec("good"), ";sinks=64"), 1);
  const Source source{9, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, host_.client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 64 * 6 + 9, 64));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 6)));
  ASSERT_OK_AND_ASSIGN(const auto sent, made.sequence->HandOff(peer.daemon->peer(), "blob"));
  CacheOptions there = options;
  there.codec = absl::StrCat(ZackSpec("of-another-name"), ";sinks=64");
  ASSERT_OK_AND_ASSIGN(auto other_cache, peer.client->OpenCache(there));
  EXPECT_EQ(other_cache->description().options.codec, cache->description().options.codec);
  ASSERT_OK_AND_ASSIGN(auto claimed, other_cache->Claim(sent.ticket));
  for (const uint64_t at : {uint64_t{64 * 6 + 8}, uint64_t{64 * 5 + 3}}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Ask(*cache, made.sequence->id(), source, at));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> went, Ask(*other_cache, claimed.sequence->id(), source, at));
    EXPECT_EQ(stayed, went);
  }
}

TEST_F(CalibrationTest, AHandOffWithoutTheArtifactIsRefusedWithTheReason) {
  Host peer;
  std::string other_digest;
  WriteBytes(peer.file("good.safetensors"), ArtifactFile(ModelOf(SmallCache("raw")), 2, &other_digest));
  ASSERT_NO_FATAL_FAILURE(peer.Start());
  const CacheOptions options = SmallCache(ZackSpec("good"));
  const Source source{9, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, host_.client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 64 * 5, 64));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> before, Ask(*cache, made.sequence->id(), source, 64 * 5 - 1));
  const absl::Status status = made.sequence->HandOff(peer.daemon->peer(), "").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), digest_)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "good.safetensors")) << status;
  // The sender's sequence is as it was, and goes once the artifact is there.
  ASSERT_OK_AND_ASSIGN(const std::vector<float> after, Ask(*cache, made.sequence->id(), source, 64 * 5 - 1));
  EXPECT_EQ(before, after);
  WriteBytes(peer.file("more.safetensors"), good_);
  EXPECT_OK(made.sequence->HandOff(peer.daemon->peer(), "").status());
}

// Pages whose checksum is right and whose bytes no encoder makes.
TEST_F(CalibrationTest, MadeUpPagesAreRefused) {
  Metrics metrics;
  TransportMetrics transport_metrics(&metrics);
  TcpTransport::Options transport_options;
  transport_options.metrics = &transport_metrics;
  ASSERT_OK_AND_ASSIGN(auto transport, TcpTransport::Create(std::move(transport_options)));
  for (const std::string& codec : {ZackSpec("good"), std::string("hack:k_bits=3,v_bits=2"),
                                   absl::StrCat("hack;1=", ZackSpec("good"), ";sinks=64")}) {
    SCOPED_TRACE(codec);
    ASSERT_OK_AND_ASSIGN(auto cache, host_.client->OpenCache(SmallCache(codec)));
    const client::CacheDescription d = cache->description();
    HandOffHeader first;
    first.config.model = d.options.model;
    first.config.revision = d.options.revision;
    first.config.tenant = d.options.tenant;
    first.config.rope = d.options.rope;
    first.config.layers = d.options.layers;
    first.config.query_heads = d.options.query_heads;
    first.config.layout = {d.options.dtype, uint16_t(d.options.kv_heads), uint16_t(d.options.head_dim),
                           uint16_t(d.options.page_tokens)};
    first.config.codec = d.options.codec;
    first.config.calibration_digest = d.options.calibration_digest;
    first.config.lag_pages = d.options.lag_pages;
    // The codec as this process makes it says the sizes.
    const std::unique_ptr<CalibrationSource> files = MakeCalibrationDirectory(host_.directory.path());
    CodecRegistry registry;
    RegisterBuiltinCodecs(registry);
    registry.SetCalibrations(files.get());
    ASSERT_OK_AND_ASSIGN(const auto made, CacheDirectory::MakeCodec(registry, first.config));
    first.codec_version = made->info().version;
    first.tokens = 128;
    first.blocks.resize(2);
    first.aged = {2, 2};
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<SendPage> pages;
    SendRequest request;
    request.peer = host_.daemon->peer();
    // Of each layer a sink, whose raw bytes are good, and a page behind it whose encoded bytes are none.
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t block = 0; block < 2; ++block) {
        const bool raw = made->info().keeps_raw(int(layer), uint64_t{block} * 64);
        ASSERT_EQ(raw, block == 0);
        bytes.emplace_back(raw ? first.config.layout.raw_bytes() : made->info().page_bytes(int(layer)),
                           raw ? uint8_t{0} : uint8_t{0xff});
        const std::vector<uint8_t>& page = bytes.back();
        const auto number = static_cast<uint32_t>(first.pages.size());
        first.pages.push_back({block, layer, page.size()});
        request.header.page_bytes.push_back(page.size());
        pages.push_back({number, page, XXH3_64bits(page.data(), page.size())});
      }
    }
    request.header.manifest = WriteHandOffHeader(first);
    HandOffTrailer last;
    last.blocks.resize(2);
    HandOffPart trailer;
    trailer.manifest = WriteHandOffTrailer(last, "");
    std::promise<absl::StatusOr<SendResult>> done;
    SendEvents events;
    events.accepted = [](std::string) {};
    events.waiting = [](absl::Status) {};
    events.done = [&done](absl::StatusOr<SendResult> result) { done.set_value(std::move(result)); };
    const uint64_t transfer = transport->Begin(std::move(request), std::move(events));
    transport->Post(transfer, pages);
    transport->Finish(transfer, std::move(trailer));
    const absl::StatusOr<SendResult> result = done.get_future().get();
    EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
    EXPECT_TRUE(absl::StrContains(result.status().message(), "encoded page head 0")) << result.status();
    ASSERT_NO_FATAL_FAILURE(OthersGoOn());
  }
  // Nothing of them stays.
  ASSERT_OK_AND_ASSIGN(const auto sequences, host_.client->Sequences());
  EXPECT_EQ(sequences.size(), 1u);
}

}  // namespace
}  // namespace kvmanager::testing
