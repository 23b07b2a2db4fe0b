// A codec that is built outside this repository, from its one source against the one header: tried by the conformance
// program, then loaded by a daemon that serves attention with it.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "codecs/abi/plugin_codec.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/daemon/server.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

constexpr int kTokens = 400, kPageTokens = 64, kLagPages = 1;

std::string BadPath(const std::string& variant) { return DataPath(absl::StrCat("codecs/abi/bad/", variant, ".so")); }

/// README.md's line: the header copied to a folder of its own, one call of the compiler. The object's path.
const std::string& Int8() {
  static const auto* const directory = new TempDir;  // for the process's life: objects stay loaded
  static const std::string path = [] {
    const std::string folder = directory->path(), object = absl::StrCat(folder, "/libint8.so");
    std::filesystem::copy_file(DataPath("codecs/abi/kvmanager_codec.h"), absl::StrCat(folder, "/kvmanager_codec.h"));
    const std::string source = DataPath("tests/out_of_tree_codec/int8_codec.c");
    const auto built = RunCommand({"/usr/bin/env", "gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O3",
                                   "-ffp-contract=off", "-fPIC", "-shared", "-I", folder, source, "-lm", "-o", object},
                                  60000 * kSlowdown);
    EXPECT_TRUE(built.ok() && built->status == 0) << built.status();
    return object;
  }();
  return path;
}

/// A daemon in this process.
class Daemon {
 public:
  static std::unique_ptr<Daemon> Start(const std::vector<std::string>& plugins) {
    auto daemon = std::make_unique<Daemon>();
    Options options;
    options.listen = {absl::StrCat("unix:", daemon->directory_.path(), "/socket")};
    options.host_pool_bytes = 64 << 20;
    options.threads = 2;
    options.codec_plugins = plugins;
    auto server = Server::Create(options);
    EXPECT_TRUE(server.ok()) << server.status();
    if (!server.ok()) return nullptr;
    daemon->server_ = std::move(*server);
    daemon->thread_ = std::thread([server = daemon->server_.get()] { server->Run(); });
    return daemon;
  }
  ~Daemon() {
    if (server_ == nullptr) return;
    server_->Stop();
    thread_.join();
  }
  std::string address() const { return server_->listen_address(); }
  double Metric(absl::string_view name, const std::vector<std::string>& labels = {}) const {
    return ParseMetrics(server_->MetricsText()).Sum(name, labels);
  }

 private:
  TempDir directory_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
};

/// What a codec makes of a token's rows: source's K and V of full pages, encoded and decoded in this process.
class DecodedSource {
 public:
  static std::unique_ptr<DecodedSource> Make(const std::string& path, const Source& source,
                                             const CodecParameters& parameters) {
    auto made = std::make_unique<DecodedSource>();
    const CacheOptions& shape = source.shape;
    made->d_ = shape.head_dim;
    CodecContext context;
    context.layout = {shape.dtype, uint16_t(shape.kv_heads), uint16_t(shape.head_dim), uint16_t(shape.page_tokens)};
    context.layers = shape.layers;
    context.query_heads = shape.query_heads;
    auto plugin = CodecPlugin::Load(path);
    EXPECT_TRUE(plugin.ok()) << plugin.status();
    auto codec = MakePluginCodec(*plugin, context, parameters, nullptr);
    EXPECT_TRUE(codec.ok()) << codec.status();
    if (!codec.ok()) return nullptr;
    const size_t encoded_bytes = (*codec)->info().encoded_bytes, raw_bytes = context.layout.raw_bytes();
    made->raw_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, raw_bytes)));
    std::unique_ptr<uint8_t, Free> encoded(static_cast<uint8_t*>(std::aligned_alloc(64, encoded_bytes)));
    std::unique_ptr<uint8_t, Free> workspace(
        static_cast<uint8_t*>(std::aligned_alloc(64, (*codec)->encode_workspace_bytes() + 64)));
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int page = 0; page < kTokens / kPageTokens; ++page) {
        const std::vector<uint8_t> rows[2] = {source.K(layer, page * kPageTokens, kPageTokens),
                                              source.V(layer, page * kPageTokens, kPageTokens)};
        for (int side = 0; side < 2; ++side) {
          for (int head = 0; head < shape.kv_heads; ++head) {
            for (int t = 0; t < kPageTokens; ++t) {
              std::memcpy(made->raw_.get() + context.layout.raw_offset(side, head, t),
                          rows[side].data() + (size_t(t) * shape.kv_heads + head) * shape.head_dim * 2,
                          shape.head_dim * 2);
            }
          }
        }
        EncodeItem item = {made->raw_.get(), encoded.get(), uint32_t(layer), uint64_t(page) * kPageTokens, false};
        (*codec)->Encode(absl::MakeSpan(&item, 1), {workspace.get(), (*codec)->encode_workspace_bytes()});
        EXPECT_FALSE(item.declined);
        const DecodeItem decode = {encoded.get(), made->raw_.get(), uint32_t(layer)};
        (*codec)->Decode(absl::MakeConstSpan(&decode, 1));
        std::vector<float> values(raw_bytes / 2);
        for (size_t i = 0; i < values.size(); ++i) values[i] = LoadElement(made->raw_.get(), shape.dtype, i);
        made->pages_.push_back(std::move(values));
      }
    }
    made->layout_ = context.layout;
    return made;
  }
  const float* Row(int layer, int side, int head, int position) const {
    const std::vector<float>& page = pages_[layer * (kTokens / kPageTokens) + position / kPageTokens];
    return page.data() + layout_.raw_offset(side, head, position % kPageTokens) / 2;
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  int d_ = 0;
  PageLayout layout_;
  std::unique_ptr<uint8_t, Free> raw_;
  std::vector<std::vector<float>> pages_;  // [layer][page]: raw page as floats
};

/// Attention of every token of the source over itself: pages before the lag as `decoded`, others as they are.
std::vector<double> Expected(const Source& source, const DecodedSource& decoded) {
  const CacheOptions& shape = source.shape;
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
  std::vector<double> out(size_t(shape.layers) * kTokens * shape.query_heads * d, 0);
  for (int layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> q = source.Q(layer, 0, kTokens);
    const std::vector<uint8_t> rows[2] = {source.K(layer, 0, kTokens), source.V(layer, 0, kTokens)};
    std::vector<float> plain[2];
    for (int side = 0; side < 2; ++side) {
      for (size_t i = 0; i < rows[side].size() / 2; ++i) {
        plain[side].push_back(LoadElement(rows[side].data(), shape.dtype, i));
      }
    }
    for (int token = 0; token < kTokens; ++token) {
      const int encoded_end = std::max(0, token / kPageTokens - kLagPages) * kPageTokens;
      const auto row = [&](int side, int head, int t) {
        return t < encoded_end ? decoded.Row(layer, side, head, t)
                               : plain[side].data() + (size_t(t) * shape.kv_heads + head) * d;
      };
      for (int h = 0; h < shape.query_heads; ++h) {
        const float* const query = &q[(size_t(token) * shape.query_heads + h) * d];
        double* const to = &out[((size_t(layer) * kTokens + token) * shape.query_heads + h) * d];
        double sum = 0;
        for (int t = 0; t <= token; ++t) {
          double score = 0;
          for (int c = 0; c < d; ++c) score += double(query[c]) * row(0, h / group, t)[c];
          const double p = std::exp(score / std::sqrt(double(d)));
          sum += p;
          for (int c = 0; c < d; ++c) to[c] += p * row(1, h / group, t)[c];
        }
        for (int c = 0; c < d; ++c) to[c] /= sum;
      }
    }
  }
  return out;
}

TEST(CodecPluginTest, TheOutOfTreeCodecConforms) {
  for (const std::string parameters : {"bits=8", "bits=4"}) {
    const auto run =
        RunCommand({DataPath("codecs/abi/codec_conformance"), Int8(), "--parameters", parameters}, 60000 * kSlowdown);
    ASSERT_OK(run);
    EXPECT_EQ(run->status, 0) << run->output;
    EXPECT_TRUE(absl::EndsWith(run->output, " passed, 0 failed\n")) << run->output;
  }
}

TEST(CodecPluginTest, ADaemonServesAttentionWithTheOutOfTreeCodec) {
  const auto daemon = Daemon::Start({Int8()});
  ASSERT_NE(daemon, nullptr);
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->address(), {}));
  // A plug-in's codec keeps sinks as any other; without them every page is the plug-in's.
  ASSERT_OK_AND_ASSIGN(auto with_sinks, client->OpenCache(SmallCache("int8:bits=8", kLagPages)));
  EXPECT_EQ(with_sinks->description().options.codec, "int8:bits=8;sinks=64");
  EXPECT_EQ(with_sinks->description().sink_tokens, 64u);
  const CacheOptions options = SmallCache("int8:bits=8;sinks=0", kLagPages);
  const Source source{1, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  EXPECT_EQ(cache->description().options.codec, "int8:bits=8;sinks=0");
  EXPECT_EQ(cache->description().sink_tokens, 0u);
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  client::StepResult counts;
  ASSERT_OK_AND_ASSIGN(const std::vector<float> got,
                       Feed(*cache, made.sequence->id(), source, 0, kTokens, 50, &counts));
  const auto decoded = DecodedSource::Make(Int8(), source, {{"bits", "8"}});
  ASSERT_NE(decoded, nullptr);
  EXPECT_GT(counts.encoded_pairs, 0);
  EXPECT_LT(RelativeError(got, Expected(source, *decoded)), 2e-3);
  EXPECT_EQ(daemon->Metric("kvmanager_attend_decoded_pages_total"), 0);
  EXPECT_EQ(daemon->Metric("kvmanager_codec_plugin_errors_total"), 0);
  // Found by name, and still read encoded.
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 6)));
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 6)));
  EXPECT_EQ(hit.match.hit_blocks, 6);
}

TEST(CodecPluginTest, WithoutAttentionOfItsOwnPagesAreDecodedAndAMetricSaysSo) {
  const auto daemon = Daemon::Start({BadPath("good"), Int8()});
  ASSERT_NE(daemon, nullptr);
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->address(), {}));
  const CacheOptions options = SmallCache("copy", kLagPages);
  const Source source{2, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(const std::vector<float> got, Feed(*cache, made.sequence->id(), source, 0, kTokens, 50));
  const auto decoded = DecodedSource::Make(BadPath("good"), source, {});
  ASSERT_NE(decoded, nullptr);
  EXPECT_LT(RelativeError(got, Expected(source, *decoded)), 1e-4);
  EXPECT_GT(daemon->Metric("kvmanager_attend_decoded_pages_total"), 0);
}

TEST(CodecPluginTest, AFailingPluginLosesNothing) {
  const auto daemon = Daemon::Start({BadPath("bad_encode_error")});
  ASSERT_NE(daemon, nullptr);
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->address(), {}));
  CacheOptions options = SmallCache("copy", kLagPages);
  const Source source{3, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  client::StepResult counts;
  ASSERT_OK_AND_ASSIGN(const std::vector<float> got,
                       Feed(*cache, made.sequence->id(), source, 0, kTokens, 50, &counts));
  const auto decoded = DecodedSource::Make(BadPath("good"), source, {});  // pages as they are
  ASSERT_NE(decoded, nullptr);
  EXPECT_LT(RelativeError(got, Expected(source, *decoded)), 1e-4);
  EXPECT_EQ(counts.encoded_pairs, 0);
  EXPECT_GT(daemon->Metric("kvmanager_codec_plugin_errors_total", {"entry=\"encode\""}), 0);
  EXPECT_TRUE(
      Eventually([&] { return daemon->Metric("kvmanager_declined_pages_total") == 2 * (kTokens / kPageTokens - 1); }));
  // The first page of both layers: the plug-in is not asked for it.
  EXPECT_EQ(daemon->Metric("kvmanager_sink_pages_total"), 2);
  // A wrong parameter is the client's error, with the plug-in's words where it has some.
  options.codec = "copy:level=9";
  const absl::Status refused = client->OpenCache(options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "it takes no parameters")) << refused;
}

// What cannot be decoded is not given back as NaN.
TEST(CodecPluginTest, ReadingWhatAPluginCannotDecodeIsDataLoss) {
  const auto daemon = Daemon::Start({BadPath("bad_decode_error")});
  ASSERT_NE(daemon, nullptr);
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->address(), {}));
  const CacheOptions options = SmallCache("copy", kLagPages);
  const Source source{3, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, kTokens, kPageTokens));
  const auto read = [&](uint64_t position, int tokens, std::vector<uint8_t>* k) {
    const client::StepEntry entry{made.sequence->id(), position, tokens};
    k->resize(size_t(tokens) * options.kv_heads * options.head_dim * 2);
    std::vector<uint8_t> v(k->size());
    client::ReadBatch batch;
    batch.entries = {&entry, 1};
    batch.k = client::TensorView::Inline(k->data(), k->size());
    batch.v = client::TensorView::Inline(v.data(), v.size());
    return cache->Read(batch);
  };
  std::vector<uint8_t> k;
  const absl::Status status = read(70, kTokens - 70, &k).status();
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kDataLoss, "entries[0]"));
  EXPECT_TRUE(absl::StrContains(DetailOf(status).value, "page 1 of sequence")) << status;
  EXPECT_GT(daemon->Metric("kvmanager_codec_plugin_errors_total", {"entry=\"decode\""}), 0);
  // Pages that are raw yet are given back.
  ASSERT_OK_AND_ASSIGN(const client::ReadResult raw, read(kTokens - kPageTokens, kPageTokens, &k));
  EXPECT_EQ(raw.raw_tokens, uint64_t(kPageTokens));
  EXPECT_EQ(k, source.K(0, kTokens - kPageTokens, kPageTokens));
}

TEST(CodecPluginTest, ABadPluginStopsTheStartWithASentence) {
  Options options;
  options.listen = {"tcp:127.0.0.1:0"};
  options.host_pool_bytes = 4 << 20;
  options.codec_plugins = {BadPath("bad_null_entry")};
  const absl::Status status = Server::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "bad_null_entry.so table entry decode_batch is NULL")) << status;
  options.codec_plugins = {BadPath("good"), BadPath("good")};
  EXPECT_EQ(Server::Create(options).status().code(), absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace kvmanager::testing
