#include "codecs/policy/policy.h"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/hack/hack.h"
#include "codecs/raw/raw.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/sha256.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kLayers = 6;
constexpr char kFine[] = "hack:k_bits=8,v_bits=8";
constexpr char kCoarse[] = "hack:k_bits=2,v_bits=2";

// Its factor is the layer, its artifact's digest a digit repeated.
class FoldingCodec final : public Codec {
 public:
  FoldingCodec(const PageLayout& layout, const std::string& digit) : layout_(layout) {
    info_.name = "folding";
    info_.spec = absl::StrCat("folding:digit=", digit);
    info_.calibration_digest = std::string(64, digit[0]);
    info_.version = 7;
    info_.encoded_bytes = info_.payload_bytes = 1024;
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 123456; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    for (EncodeItem& item : items) std::memset(item.encoded, int(items.size()), info_.encoded_bytes);
  }
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int layer, absl::Span<const uint8_t>) const override {
    return absl::DataLossError(absl::StrCat("layer ", layer));
  }
  const PageAttention& attention() const override { return attention_; }
  bool OutputFactor(int layer, int, absl::Span<float> factor) const override {
    factor[0] = float(layer);
    return true;
  }

 private:
  class Attention final : public PageAttention {
   public:
    size_t workspace_bytes(int rows) const override { return 999999 + rows; }
    void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t>) const override {
      state.max[0] = 1000.0f + float(task.layer);
    }
    bool maps(int) const override { return true; }
    bool folds_output(int layer) const override { return layer != 3; }
    size_t head_bytes(int layer, int kv_head) const override { return 100 * layer + kv_head; }
    int visit_pages_min(int layer) const override { return 30 + layer; }
    void MapQueries(int layer, int, int, const float*, float* mapped) const override { *mapped = float(layer); }
    void ExpandOutput(int layer, int, int, const float*, float* out) const override { *out = float(10 + layer); }
    void ProjectOutput(int layer, int, int, const float*, float* out) const override { *out = float(20 + layer); }
  };
  const PageLayout layout_;
  CodecInfo info_;
  Attention attention_;
};

class PolicyTest : public ::testing::Test {
 protected:
  PolicyTest() {
    RegisterRaw(registry_);
    RegisterHack(registry_);
    RegisterPolicy(registry_);
    registry_.Register(
        "folding", "of this test",
        [](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
          return std::make_unique<FoldingCodec>(context.layout, parameters.at("digit"));
        });
    context_.layout = PageLayout{DType::kFloat16, 2, 32, 64};
    context_.layers = kLayers;
    context_.query_heads = 4;
  }
  std::unique_ptr<Codec> Make(const std::string& text) {
    auto codec = registry_.Create(text, context_);
    EXPECT_TRUE(codec.ok()) << text << ": " << codec.status();
    return codec.ok() ? *std::move(codec) : nullptr;
  }
  std::string Canonical(const std::string& text) { return Make(text)->info().spec; }
  std::unique_ptr<Codec> MakeForCache(const std::string& text) {
    auto codec = registry_.CreateForCache(text, context_);
    EXPECT_TRUE(codec.ok()) << text << ": " << codec.status();
    return codec.ok() ? *std::move(codec) : nullptr;
  }
  CodecRegistry registry_;
  CodecContext context_;
};

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;
Bytes Allocate(size_t bytes) {
  Bytes memory(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
  std::memset(memory.get(), 0, bytes);
  return memory;
}

TEST_F(PolicyTest, CanonicalTextNamesLayersOnce) {
  const std::string fine = Canonical(kFine), coarse = Canonical(kCoarse);
  const std::string all = absl::StrCat(coarse, ";0..1,5..5=", fine, ";3..3=raw;sinks=64");
  EXPECT_EQ(Canonical(absl::StrCat(kCoarse, ";0..1,5=", kFine, ";3=raw;sinks=1")), all);
  EXPECT_EQ(
      Canonical(absl::StrCat(kCoarse, ";sinks=64;3=raw;5..5=", kFine, ";1=", kFine, ";0=", kFine, ";2=", kCoarse)),
      all);
  EXPECT_EQ(Canonical(all), all);
  EXPECT_EQ(Make(all)->info().name, "policy");
}

TEST_F(PolicyTest, AClauseThatSaysNothingIsDropped) {
  EXPECT_EQ(Canonical(absl::StrCat(kFine, ";0..5=", kFine)), Canonical(kFine));
  EXPECT_EQ(Canonical(absl::StrCat("raw;0..5=", kFine)), Canonical(kFine));
  EXPECT_EQ(Canonical(absl::StrCat(kFine, ";0..5=raw;sinks=128")), "raw");
  EXPECT_TRUE(Make("raw;sinks=64")->info().identity);
  EXPECT_EQ(Canonical(absl::StrCat(kFine, ";0..3=raw;4..5=", kCoarse)), absl::StrCat("raw;4..5=", Canonical(kCoarse)));
}

TEST_F(PolicyTest, ACacheKeepsTheFirstPageRawUnlessToldOtherwise) {
  const std::string fine = Canonical(kFine), coarse = Canonical(kCoarse);
  const std::string mixed = absl::StrCat(kCoarse, ";0=", kFine), mixed_canonical = absl::StrCat(coarse, ";0..0=", fine);
  const struct {
    std::string text, canonical;
    uint64_t sinks;
  } kCases[] = {{kFine, fine + ";sinks=64", 64},
                {absl::StrCat(kFine, ";sinks=0"), fine + ";sinks=0", 0},
                {absl::StrCat(kFine, ";sinks=65"), fine + ";sinks=128", 128},
                {absl::StrCat("raw;0..5=", kFine), fine + ";sinks=64", 64},
                {mixed, mixed_canonical + ";sinks=64", 64},
                {mixed + ";sinks=0", mixed_canonical + ";sinks=0", 0},
                {absl::StrCat("raw;5=", kFine), absl::StrCat("raw;5..5=", fine, ";sinks=64"), 64},
                {"raw", "raw", 0},
                {"raw;sinks=0", "raw", 0}};
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.text);
    const auto codec = MakeForCache(c.text);
    EXPECT_EQ(codec->info().spec, c.canonical);
    EXPECT_EQ(codec->info().sink_tokens, c.sinks);
    // Read as it is, the canonical text is the same codec.
    for (const auto& again : {Make(c.canonical), MakeForCache(c.canonical)}) {
      EXPECT_EQ(again->info().spec, c.canonical);
      EXPECT_EQ(again->info().sink_tokens, c.sinks);
      EXPECT_EQ(again->info().version, codec->info().version);
    }
  }
  // A page is as many tokens as the cache says.
  context_.layout.page_tokens = 128;
  EXPECT_EQ(MakeForCache(kFine)->info().sink_tokens, 128u);
}

TEST_F(PolicyTest, OneCodecWithSinksIsThatCodecElsewhere) {
  const std::string folding = "folding:digit=a";
  const auto plain = Make(folding), kept = MakeForCache(folding), off = MakeForCache(folding + ";sinks=0");
  for (const Codec* codec : {kept.get(), off.get()}) {
    const CodecInfo &of = plain->info(), &info = codec->info();
    EXPECT_EQ(info.name, of.name);
    EXPECT_EQ(info.version, of.version);
    EXPECT_EQ(info.calibration_digest, of.calibration_digest);
    EXPECT_EQ(info.encoded_bytes, of.encoded_bytes);
    EXPECT_EQ(info.payload_bytes, of.payload_bytes);
    EXPECT_EQ(info.layer_bytes, of.layer_bytes);
    EXPECT_EQ(codec->encode_workspace_bytes(), plain->encode_workspace_bytes());
    for (int layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(codec->attention().maps(layer), true);
      EXPECT_EQ(codec->attention().head_bytes(layer, 1), size_t(100 * layer + 1));
      EXPECT_EQ(codec->attention().visit_pages_min(layer), 30 + layer);
    }
    // All pages behind the sinks go to the codec at once: it writes how many there are.
    std::vector<Bytes> to;
    std::vector<EncodeItem> items(5);
    for (size_t i = 0; i < items.size(); ++i) {
      to.push_back(Allocate(of.encoded_bytes));
      items[i].encoded = to.back().get();
      items[i].layer = uint32_t(i % 2);
      items[i].first_token = 64 * (i / 2);
    }
    codec->Encode(absl::MakeSpan(items), {});
    for (const EncodeItem& item : items) {
      EXPECT_EQ(item.is_sink, item.first_token < info.sink_tokens);
      EXPECT_EQ(item.is_sink, info.keeps_raw(int(item.layer), item.first_token));
      EXPECT_EQ(item.declined, item.is_sink);
      if (item.is_sink) continue;
      EXPECT_EQ(item.encoded[0], codec == off.get() ? 5 : 3);
    }
  }
}

TEST_F(PolicyTest, RefusesWithFieldValueAndBound) {
  const struct {
    const char* clause;
    const char* field;
    const char* in_bound;
  } kBad[] = {
      {"0..6=raw", "codec policy layers", "in 0..5"},
      {"7=raw", "codec policy layers", "in 0..5"},
      {"3..2=raw", "codec policy layers", "FIRST at most LAST"},
      {"0..1,1..2=raw", "codec policy layers", "1 is named twice"},
      {"0..3=raw;3=raw", "codec policy layers", "3 is named twice"},
      {"0..=raw", "codec policy layers", "FIRST..LAST"},
      {"1..2,=raw", "codec policy layers", "FIRST..LAST"},
      {"1..99999999999=raw", "codec policy layers", "FIRST..LAST"},
      {"-1..2=raw", "codec policy clause", "sinks=N"},
      {"raw", "codec policy clause", "sinks=N"},
      {"", "codec policy clause", "sinks=N"},
      {"sinks=-1", "codec policy sinks", "0..1048576"},
      {"sinks=1048577", "codec policy sinks", "0..1048576"},
      {"sinks=", "codec policy sinks", "0..1048576"},
      {"sinks=64;sinks=64", "codec policy sinks", "once"},
      {"0=", "codec", "NAME"},
      {"0=zip", "codec", "one of"},
      {"0=hack:k_bits=5", "codec parameter k_bits", ""},
  };
  for (const auto& bad : kBad) {
    const absl::Status status = registry_.Create(absl::StrCat(kFine, ";", bad.clause), context_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.clause;
    const ErrorDetail detail = DetailOf(status);
    EXPECT_TRUE(absl::StrContains(detail.field, bad.field)) << bad.clause << ": " << status;
    EXPECT_FALSE(detail.value.empty()) << bad.clause;
    EXPECT_TRUE(absl::StrContains(detail.bound, bad.in_bound)) << bad.clause << ": " << status;
  }
  EXPECT_FALSE(registry_.Create(";0=raw", context_).ok());
  EXPECT_FALSE(registry_.Create(absl::StrCat("raw;", std::string(5000, ';')), context_).ok());
}

TEST_F(PolicyTest, ACanonicalTextFitsACacheOrIsRefused) {
  context_.layers = 1024;
  std::string text = kFine;
  for (int i = 0; i < 500; ++i) absl::StrAppend(&text, i == 0 ? ";" : ",", 2 * i);
  const absl::Status status = registry_.Create(absl::StrCat(text, "=raw"), context_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, "4096")) << status;
}

TEST_F(PolicyTest, InfoIsThatOfTheLayers) {
  const auto fine = Make(kFine), coarse = Make(kCoarse);
  const auto codec = Make(absl::StrCat(kCoarse, ";0..1=", kFine, ";5=raw"));
  const CodecInfo& info = codec->info();
  EXPECT_FALSE(info.identity);
  const size_t raw = context_.layout.raw_bytes();
  const size_t f = fine->info().encoded_bytes, c = coarse->info().encoded_bytes;
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(info.page_bytes(layer), layer < 2 ? f : layer == 5 ? raw : c) << layer;
  }
  EXPECT_EQ(info.encoded_bytes, raw);
  EXPECT_EQ(info.mean_page_bytes(), (2 * f + 3 * c + raw + kLayers - 1) / kLayers);
  EXPECT_EQ(fine->info().mean_page_bytes(), f);
  const double payload = (2.0 * fine->info().payload_bytes + 3.0 * coarse->info().payload_bytes + raw) / kLayers;
  EXPECT_NEAR(double(info.payload_bytes), payload, 1);
  EXPECT_TRUE(info.calibration_digest.empty());
}

TEST_F(PolicyTest, LayersOfOneTextAreAGroup) {
  // As many names for one codec as there are: the two fine clauses, and the default among the coarse.
  const auto codec = Make(absl::StrCat(kCoarse, ";0=", kFine, ";2=", kCoarse, ";3=raw;5..5=", Canonical(kFine)));
  const LayerGroups groups = codec->groups(kLayers);
  ASSERT_EQ(groups.all().size(), 3u);
  const struct {
    std::vector<int> layers;
    std::string spec;
  } kGroups[] = {{{1, 2, 4}, Canonical(kCoarse)}, {{0, 5}, Canonical(kFine)}, {{3}, "raw"}};
  for (size_t i = 0; i < 3; ++i) {
    const LayerGroup& group = groups.all()[i];
    EXPECT_EQ(group.layers, kGroups[i].layers);
    EXPECT_EQ(group.codec->info().spec, kGroups[i].spec);
    EXPECT_EQ(group.layout, context_.layout);
    for (int layer : group.layers) EXPECT_EQ(codec->info().page_bytes(layer), group.codec->info().page_bytes(layer));
  }
  // Sinks are the policy's, not of the codec in its group.
  const auto kept = MakeForCache(kFine);
  const LayerGroups all = kept->groups(kLayers);
  ASSERT_EQ(all.all().size(), 1u);
  EXPECT_EQ(all.all()[0].codec->info().spec, Canonical(kFine));
  EXPECT_EQ(all.all()[0].codec->info().sink_tokens, 0u);
}

TEST_F(PolicyTest, CodecsAreToldWhichLayersTheyServe) {
  std::vector<std::vector<int>> told;  // by the last codec made of each digit
  registry_.Register(
      "told", "of this test",
      [&](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
        const std::string& digit = parameters.at("digit");
        told[digit[0] - '0'] = context.served_layers;
        return std::make_unique<FoldingCodec>(context.layout, digit);
      });
  const auto serve = [&](const std::string& text) {
    told.assign(3, {-1});
    EXPECT_NE(Make(text), nullptr);
    return told;
  };
  using Layers = std::vector<int>;
  EXPECT_EQ(serve("told:digit=0;0..1,5=raw")[0], (Layers{2, 3, 4}));
  EXPECT_EQ(serve("told:digit=0;4=told:digit=1;2=told:digit=2"), (std::vector<Layers>{{0, 1, 3, 5}, {4}, {2}}));
  // Clauses of one codec share its budget, wherever they are written.
  EXPECT_EQ(serve("raw;0=told:digit=1;3..4=told:digit=1")[1], (Layers{0, 3, 4}));
  EXPECT_EQ(serve("told:digit=1;0..3=raw;5=told:digit=1")[1], (Layers{4, 5}));
  EXPECT_EQ(serve("told:digit=1;sinks=64")[1], Layers{});
}

TEST_F(PolicyTest, EachPageIsItsLayersCodecs) {
  const auto codec = Make(absl::StrCat(kCoarse, ";0..1=", kFine, ";5=raw;sinks=100"));
  const auto fine = Make(kFine), coarse = Make(kCoarse);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Bytes> from, to;
  std::vector<EncodeItem> items;
  for (int i = 0; i < 40; ++i) {
    const uint32_t layer = i < 12 ? i % kLayers : random() % kLayers;
    from.push_back(Allocate(context_.layout.raw_bytes()));
    for (size_t e = 0; e < context_.layout.raw_bytes() / 2; ++e) {
      StoreElement(from.back().get(), DType::kFloat16, e, normal(random));
    }
    to.push_back(Allocate(codec->info().page_bytes(int(layer))));
    EncodeItem item;
    item.raw = from.back().get();
    item.encoded = to.back().get();
    item.layer = layer;
    item.first_token = (random() % 4) * 64;
    item.is_sink = true;  // what an earlier use left
    items.push_back(item);
  }
  const Bytes workspace = Allocate(codec->encode_workspace_bytes());
  codec->Encode(absl::MakeSpan(items), absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
  int sinks = 0;
  for (const EncodeItem& item : items) {
    // 100 tokens touch two pages; a raw layer's pages need no second form.
    ASSERT_EQ(item.is_sink, item.first_token < 128 || item.layer == 5);
    ASSERT_EQ(item.is_sink, codec->info().keeps_raw(int(item.layer), item.first_token));
    ASSERT_EQ(item.declined, item.is_sink);
    sinks += item.is_sink;
    if (item.is_sink) continue;
    const Codec& of = item.layer < 2 ? *fine : *coarse;
    const size_t bytes = of.info().encoded_bytes;
    const Bytes expected = Allocate(bytes);
    EncodeItem alone = item;
    alone.encoded = expected.get();
    of.Encode(absl::MakeSpan(&alone, 1), absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
    ASSERT_EQ(std::memcmp(expected.get(), item.encoded, bytes), 0) << "layer " << item.layer;
    EXPECT_TRUE(codec->Validate(int(item.layer), absl::MakeConstSpan(item.encoded, bytes)).ok());
    EXPECT_FALSE(codec->Validate(int(item.layer), absl::MakeConstSpan(item.encoded, bytes - 64)).ok());
    const Bytes decoded = Allocate(context_.layout.raw_bytes()), wanted = Allocate(context_.layout.raw_bytes());
    codec->Decode({DecodeItem{item.encoded, decoded.get(), item.layer}});
    of.Decode({DecodeItem{item.encoded, wanted.get(), item.layer}});
    ASSERT_EQ(std::memcmp(decoded.get(), wanted.get(), context_.layout.raw_bytes()), 0);
  }
  EXPECT_GT(sinks, 0);
  EXPECT_LT(sinks, 40);
}

TEST_F(PolicyTest, AttentionAndFactorsAreTheLayers) {
  const auto codec = Make("raw;2..4=folding:digit=a");
  EXPECT_EQ(codec->encode_workspace_bytes(), 123456u);
  const PageAttention& attention = codec->attention();
  EXPECT_EQ(attention.workspace_bytes(3), 1000002u);
  for (int layer = 0; layer < kLayers; ++layer) {
    const bool folding = layer >= 2 && layer <= 4;
    EXPECT_EQ(attention.maps(layer), folding);
    EXPECT_EQ(attention.folds_output(layer), folding && layer != 3);
    EXPECT_EQ(attention.head_bytes(layer, 1), folding ? 100 * layer + 1 : 0u);
    EXPECT_EQ(attention.visit_pages_min(layer), folding ? 30 + layer : 1);
    std::vector<float> factor(32 * 32, -1);
    EXPECT_EQ(codec->OutputFactor(layer, 0, absl::MakeSpan(factor)), folding);
    EXPECT_EQ(factor[0], folding ? float(layer) : -1);
    if (!folding) continue;
    float out = 0;
    attention.MapQueries(layer, 0, 1, nullptr, &out);
    EXPECT_EQ(out, layer);
    attention.ExpandOutput(layer, 0, 1, nullptr, &out);
    EXPECT_EQ(out, 10 + layer);
    attention.ProjectOutput(layer, 0, 1, nullptr, &out);
    EXPECT_EQ(out, 20 + layer);
    PageAttentionTask task;
    task.layer = layer;
    attention.Attend(task, {&out, nullptr, nullptr}, {});
    EXPECT_EQ(out, 1000 + layer);
    EXPECT_EQ(codec->Validate(layer, {}).message(), absl::StrCat("layer ", layer));
  }
}

TEST_F(PolicyTest, TheDigestIsOfAllArtifacts) {
  const std::string a(64, 'a'), b(64, 'b');
  EXPECT_EQ(Make("folding:digit=a;0=raw")->info().calibration_digest, a);
  EXPECT_EQ(Make("raw;0=folding:digit=a;1=folding:digit=a")->info().calibration_digest, a);
  const std::string text = absl::StrCat(a, "\n", b, "\n");
  const std::string both = Sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()}).ToHex(32);
  EXPECT_EQ(Make("raw;0=folding:digit=b;1=folding:digit=a")->info().calibration_digest, both);
  EXPECT_EQ(Make("folding:digit=a;1=folding:digit=b")->info().calibration_digest, both);
  // A codec without a layer has no say.
  EXPECT_EQ(Make("folding:digit=b;0..5=folding:digit=a;sinks=64")->info().calibration_digest, a);
  EXPECT_NE(Make("raw;0=folding:digit=a")->info().version, Make(absl::StrCat("raw;0=", kFine))->info().version);
}

}  // namespace
}  // namespace kvmanager
