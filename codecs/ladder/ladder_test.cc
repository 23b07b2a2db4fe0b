#include "codecs/ladder/ladder.h"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/waiting_codec.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kLayers = 3;
const PageLayout kLayout{DType::kFloat16, 2, 64, 64};

// "a" and "b": two artifacts for the same model.
class Artifacts final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override {
    for (const auto& artifact : artifacts_) {
      if (artifact->digest() == name) return artifact;
    }
    return artifacts_[name == "a" ? 0 : 1];
  }
  const std::string& digest(int i) const { return artifacts_[i]->digest(); }

 private:
  static std::shared_ptr<const Calibration> Make(uint32_t seed) {
    return SyntheticCalibration({"model", "", kLayers, kLayout.kv_heads, 4, kLayout.head_dim}, seed, {});
  }
  const std::vector<std::shared_ptr<const Calibration>> artifacts_ = {Make(1), Make(2)};
};

// Keeps a page's first bytes, says what is wanted of its text and its process, and folds.
class OddCodec final : public Codec, public WaitingCodec {
 public:
  OddCodec(const PageLayout& layout, size_t bytes, std::string spec, WorkerPool* workers, bool folds)
      : layout_(layout), workers_(workers), attention_(folds) {
    info_.name = "odd";
    info_.spec = std::move(spec);
    info_.version = 7;
    info_.encoded_bytes = info_.payload_bytes = bytes;
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 64; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    for (EncodeItem& item : items) std::memcpy(item.encoded, item.raw, info_.encoded_bytes);
  }
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return attention_; }
  WorkerPool* workers() const override { return workers_; }
  uint64_t unanswered() const override { return 3; }

 private:
  class Attention final : public PageAttention {
   public:
    explicit Attention(bool folds) : folds_(folds) {}
    size_t workspace_bytes(int) const override { return 0; }
    void Attend(const PageAttentionTask&, const SoftmaxRows&, absl::Span<uint8_t>) const override {}
    bool maps(int) const override { return folds_; }
    bool folds_output(int layer) const override { return folds_ && layer == 2; }

   private:
    const bool folds_;
  };
  const PageLayout layout_;
  WorkerPool* const workers_;
  CodecInfo info_;
  const Attention attention_;
};

class LadderTest : public ::testing::Test {
 protected:
  LadderTest() {
    RegisterBuiltinCodecs(registry_);
    registry_.SetCalibrations(&artifacts_);
    const auto add = [&](const char* name, size_t bytes, std::string spec, bool waits, bool folds) {
      registry_.Register(
          name, "of this test",
          [=, this](const CodecContext& context, const CodecParameters&) -> absl::StatusOr<std::unique_ptr<Codec>> {
            return std::make_unique<OddCodec>(context.layout, bytes, spec, waits ? &workers_ : nullptr, folds);
          });
    };
    add("waiting", 1024, "waiting", true, false);
    add("waiting_less", 512, "waiting_less", true, false);
    add("folding", 1024, "folding", false, true);
    add("odd", 1024, "odd:text=a>b", false, false);
    context_.layout = kLayout;
    context_.layers = kLayers;
    context_.query_heads = 4;
  }
  std::unique_ptr<Codec> Make(const std::string& text, bool for_cache = false) {
    auto codec = for_cache ? registry_.CreateForCache(text, context_) : registry_.Create(text, context_);
    EXPECT_TRUE(codec.ok()) << text << ": " << codec.status();
    return codec.ok() ? *std::move(codec) : nullptr;
  }
  std::string Canonical(const std::string& text, bool for_cache = false) { return Make(text, for_cache)->info().spec; }

  WorkerPool workers_{1};
  Artifacts artifacts_;
  CodecRegistry registry_;
  CodecContext context_;
};

constexpr char kFine[] = "hack:k_bits=4,v_bits=3";
constexpr char kCoarse[] = "hack:k_bits=2,v_bits=1";

TEST_F(LadderTest, CanonicalTextNamesAllRungsAndSinksLast) {
  const std::string fine = Canonical(kFine), coarse = Canonical(kCoarse);
  const std::string both = absl::StrCat("ladder=", kFine, ">", kCoarse),
                    all = absl::StrCat("ladder=", fine, ">", coarse);
  EXPECT_EQ(Canonical(both), all);
  EXPECT_EQ(Canonical(both, true), all + ";sinks=64");
  EXPECT_EQ(Canonical(both + ";sinks=65"), all + ";sinks=128");
  EXPECT_EQ(Canonical(both + ";sinks=0", true), all + ";sinks=0");
  EXPECT_EQ(Canonical(absl::StrCat("ladder=", kFine, ";sinks=65>", kCoarse)), all + ";sinks=128");
  EXPECT_EQ(Canonical(absl::StrCat("ladder=", kFine, ";sinks=0>", kCoarse), true), all + ";sinks=0");
}

TEST_F(LadderTest, CanonicalTextsMakeTheSameCodecOnceMore) {
  const char* const kTexts[] = {
      "ladder=hack:k_bits=4,v_bits=3>hack:k_bits=2,v_bits=1",
      "ladder=hack:k_bits=8,v_bits=8>hack:k_bits=4,v_bits=4>hack:k_bits=3,v_bits=2>hack:k_bits=2,v_bits=1;sinks=100",
      "ladder=zack+hack:bytes=28,calibration=a>zack+hack:bytes=16,calibration=a",
      "ladder=zack+hack:bytes=28,calibration=a;sinks=0>zack+hack:bytes=16,calibration=b",
      "ladder=hack:k_bits=8,v_bits=8;0=raw>zack+hack:bytes=28,calibration=b;0=raw;sinks=64",
      "ladder=hack:k_bits=4,v_bits=3;1..2=hack:k_bits=8,v_bits=8>hack:k_bits=2,v_bits=1;1=hack:k_bits=8,v_bits=8",
      "ladder=default>hack:k_bits=2,v_bits=1",
  };
  for (const char* text : kTexts) {
    for (const bool for_cache : {false, true}) {
      const auto codec = Make(text, for_cache);
      ASSERT_NE(codec, nullptr);
      const CodecInfo& info = codec->info();
      for (const bool again : {false, true}) {
        if (again && !absl::StrContains(info.spec, ";sinks=")) continue;
        const auto same = Make(info.spec, again);
        EXPECT_EQ(same->info().spec, info.spec);
        EXPECT_EQ(same->info().version, info.version);
        EXPECT_EQ(same->info().sink_tokens, info.sink_tokens);
        EXPECT_EQ(same->info().calibration_digest, info.calibration_digest);
      }
      EXPECT_EQ(info.name, "ladder");
      EXPECT_FALSE(info.identity);
    }
  }
}

TEST_F(LadderTest, SaysAndDoesWhatItsFirstRungDoes) {
  const auto codec = Make(absl::StrCat("ladder=", kFine, ";1=raw>", kCoarse, ";1=raw;sinks=64"));
  const auto first = Make(absl::StrCat(kFine, ";1=raw;sinks=64")),
             second = Make(absl::StrCat(kCoarse, ";1=raw;sinks=64"));
  ASSERT_EQ(codec->rungs(), 2);
  EXPECT_EQ(codec->rung(0).info().spec, first->info().spec);
  EXPECT_EQ(codec->rung(1).info().spec, second->info().spec);
  EXPECT_EQ(first->rungs(), 1);
  EXPECT_EQ(&first->rung(0), first.get());
  EXPECT_EQ(&codec->attention(), &codec->rung(0).attention());
  EXPECT_EQ(codec->layout(), kLayout);
  const LayerGroups groups = codec->groups(kLayers), firsts = codec->rung(0).groups(kLayers);
  ASSERT_EQ(groups.all().size(), 2u);
  for (int layer = 0; layer < kLayers; ++layer) EXPECT_EQ(groups.of(layer).codec, firsts.of(layer).codec);
  EXPECT_EQ(groups.of(1).codec->info().spec, "raw");
  EXPECT_EQ(codec->NewDeviceCodec(), nullptr);
  EXPECT_EQ(codec->encode_workspace_bytes(), first->encode_workspace_bytes());
  EXPECT_EQ(codec->info().payload_bytes, first->info().payload_bytes);
  EXPECT_EQ(codec->info().encoded_bytes, first->info().encoded_bytes);
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(codec->info().page_bytes(layer), first->info().page_bytes(layer));
    EXPECT_LE(codec->rung(1).info().page_bytes(layer), codec->info().page_bytes(layer));
    for (const uint64_t token : {0, 64, 640}) {
      EXPECT_EQ(codec->info().keeps_raw(layer, token), layer == 1 || token == 0);
      EXPECT_EQ(codec->rung(1).info().keeps_raw(layer, token), layer == 1 || token == 0);
    }
  }
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  alignas(64) static uint8_t raw[2 * 2 * 64 * 64 * 2], encoded[2][sizeof raw], decoded[2][sizeof raw];
  ASSERT_EQ(sizeof raw, kLayout.raw_bytes());
  for (size_t i = 0; i < sizeof raw / 2; ++i) StoreElement(raw, kLayout.dtype, i, normal(random));
  std::vector<uint8_t> workspace(codec->encode_workspace_bytes() + 64);
  for (const uint32_t layer : {0, 2}) {
    for (int i = 0; i < 2; ++i) {
      const Codec& by = i == 0 ? *codec : *first;
      std::memset(encoded[i], 0xff, sizeof raw);
      EncodeItem item{raw, encoded[i], layer, 64};
      uint8_t* const at = workspace.data() + 64 - uintptr_t(workspace.data()) % 64;
      by.Encode(absl::MakeSpan(&item, 1), {at, by.encode_workspace_bytes()});
      ASSERT_FALSE(item.declined);
      by.Decode({DecodeItem{encoded[i], decoded[i], layer}});
    }
    EXPECT_EQ(std::memcmp(encoded[0], encoded[1], sizeof raw), 0);
    EXPECT_EQ(std::memcmp(decoded[0], decoded[1], sizeof raw), 0);
    EXPECT_TRUE(codec->Validate(int(layer), {encoded[0], codec->info().page_bytes(int(layer))}).ok());
    EXPECT_FALSE(codec->Validate(int(layer), {encoded[0], second->info().page_bytes(int(layer))}).ok());
  }
}

TEST_F(LadderTest, VersionAndDigestAreOfAllRungs) {
  const auto of = [&](const std::string& text) { return Make(text)->info(); };
  const std::string a = "zack+hack:bytes=32,calibration=a", b = "zack+hack:bytes=16,calibration=b";
  EXPECT_EQ(of(absl::StrCat("ladder=", kFine, ">", kCoarse)).calibration_digest, "");
  EXPECT_EQ(of(absl::StrCat("ladder=", a, ">", kCoarse)).calibration_digest, artifacts_.digest(0));
  EXPECT_EQ(of("ladder=zack+hack:bytes=28,calibration=b>" + b).calibration_digest, artifacts_.digest(1));
  EXPECT_EQ(of("ladder=" + a + ">" + b).calibration_digest,
            DigestOfArtifacts({artifacts_.digest(0), artifacts_.digest(1)}));
  const uint32_t version = of(absl::StrCat("ladder=", kFine, ">", kCoarse)).version;
  EXPECT_EQ(of(absl::StrCat("ladder=", kFine, ">hack:k_bits=1,v_bits=1")).version, version);
  EXPECT_NE(of(absl::StrCat("ladder=", kFine, ">waiting_less")).version, version);
  EXPECT_NE(of(kFine).version, version);
}

TEST_F(LadderTest, WaitsAsItsRungsDo) {
  const auto quick = Make(absl::StrCat("ladder=", kFine, ">", kCoarse)), slow = Make("ladder=waiting>waiting_less"),
             mixed = Make(absl::StrCat("ladder=", kFine, ">waiting_less"));
  EXPECT_EQ(WaitingWorkers(*quick), nullptr);
  EXPECT_EQ(UnansweredBy(*quick), 0u);
  EXPECT_EQ(WaitingWorkers(*slow), &workers_);
  EXPECT_EQ(UnansweredBy(*slow), 6u);
  EXPECT_EQ(WaitingWorkers(*mixed), &workers_);
  EXPECT_EQ(UnansweredBy(*mixed), 3u);
  CodecWorkers named;
  named.Add("waiting_less", &workers_);
  EXPECT_EQ(named.For("ladder=hack>waiting_less;sinks=64", nullptr), &workers_);
  EXPECT_EQ(named.For("ladder=waiting_less>hack", nullptr), &workers_);
  EXPECT_EQ(named.For("ladder=hack>hack", nullptr), nullptr);
}

TEST_F(LadderTest, RefusesWithFieldValueAndBound) {
  const struct {
    const char* text;
    const char* field;
    const char* in_value;
    const char* in_bound;
  } kBad[] = {
      {"ladder=", "codec ladder rungs", "1", "2..4"},
      {"ladder=hack", "codec ladder rungs", "1", "2..4"},
      {"ladder=hack;sinks=64", "codec ladder rungs", "1", "2..4"},
      {"ladder=hack>hack>hack>hack>hack", "codec ladder rungs", "5", "2..4"},
      {"ladder=hack>", "codec", "\"\"", "NAME"},
      {"ladder=>hack", "codec", "\"\"", "NAME"},
      {"ladder=hack>zip", "codec", "zip", "one of"},
      {"ladder=hack:k_bits=5>hack", "codec parameter k_bits", "5", ""},
      {"ladder=raw>hack", "codec ladder rung 0", "raw", "encodes pages"},
      {"ladder=hack>raw", "codec ladder rung 1", "raw", "encodes pages"},
      {"ladder=pq:m=4>hack", "codec ladder rung 0", "pq:m=4", "encodes pages"},
      {"ladder=raw;0..2=raw>hack", "codec ladder rung 0", "raw", "encodes pages"},
      {"ladder=hack>ladder=hack", "codec ladder rung 1", "ladder=hack", "not a ladder"},
      {"ladder=ladder=hack:k_bits=8>hack:k_bits=2", "codec ladder rung 0", "ladder=", "not a ladder"},
      {"ladder=hack;0=ladder=hack>hack", "codec ladder rungs", "1", "2..4"},
      {"ladder=hack>hack", "codec ladder rung 1 page bytes of all layers", "", "below"},
      {"ladder=hack:k_bits=2>hack:k_bits=3", "codec ladder rung 1 page bytes of layer 0", "", "at most"},
      {"ladder=hack:k_bits=4;2=hack:k_bits=2>hack:k_bits=3", "codec ladder rung 1 page bytes of layer 2", "",
       "those of rung 0"},
      {"ladder=hack:k_bits=8>hack:k_bits=4>hack:k_bits=8", "codec ladder rung 2 page bytes of layer 0", "",
       "those of rung 1"},
      {"ladder=hack:k_bits=4;1=raw>hack:k_bits=2", "codec ladder rung 1 layer 1", "encoded", "raw, as on rung 0"},
      {"ladder=hack:k_bits=4>hack:k_bits=2;1=raw", "codec ladder rung 1 layer 1", "raw", "encoded, as on rung 0"},
      {"ladder=folding>waiting_less", "codec ladder rung 0", "folding", "fold=0"},
      {"ladder=zack+hack:bytes=28,calibration=a>zack+hack:bytes=16,fold=1,calibration=a", "codec ladder rung 1",
       "fold=1", "fold=0"},
      {"ladder=odd>waiting_less", "codec ladder rung 0", "a>b", "no '>'"},
      {"ladder=hack:k_bits=4;sinks=64>hack:k_bits=2;sinks=64", "codec ladder sinks", "twice", "once"},
      {"ladder=hack:k_bits=4>hack:k_bits=2;sinks=64;sinks=64", "codec ladder sinks", "twice", "once"},
      {"ladder=hack:k_bits=8>hack:k_bits=4;sinks=64>hack:k_bits=2", "codec ladder sinks", "rung 1", "rung 0 or behind"},
      {"ladder=hack:k_bits=4>hack:k_bits=2;sinks=-1", "codec policy sinks", "-1", "0..1048576"},
      {"ladder=hack:k_bits=4;9=raw>hack:k_bits=2", "codec policy layers", "9", "in 0..2"},
  };
  for (const auto& bad : kBad) {
    for (const bool for_cache : {false, true}) {
      const absl::Status status = for_cache ? registry_.CreateForCache(bad.text, context_).status()
                                            : registry_.Create(bad.text, context_).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.text << ": " << status;
      const ErrorDetail detail = DetailOf(status);
      EXPECT_EQ(detail.field.find(bad.field), 0u) << bad.text << ": " << status;
      EXPECT_TRUE(absl::StrContains(detail.value, bad.in_value)) << bad.text << ": " << status;
      EXPECT_FALSE(detail.value.empty()) << bad.text;
      EXPECT_TRUE(absl::StrContains(detail.bound, bad.in_bound)) << bad.text << ": " << status;
    }
  }
  // No policy's clause is a ladder, nor is a codec without the prefix.
  EXPECT_FALSE(registry_.Create("hack;0=ladder=hack>hack", context_).ok());
  EXPECT_FALSE(registry_.Create("hack>hack", context_).ok());
}

TEST_F(LadderTest, TextsHaveABound) {
  const std::string filler(4096, ';');
  for (const std::string& text :
       {absl::StrCat("ladder=hack", filler, ">hack"), "ladder=hack" + std::string(4096, '>')}) {
    const absl::Status status = registry_.Create(text, context_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, "4096")) << status;
  }
  context_.layers = 1024;
  std::string clause;
  for (int i = 0; i < 280; ++i) absl::StrAppend(&clause, i == 0 ? ";" : ",", 2 * i);
  const std::string text =
      absl::StrCat("ladder=hack:k_bits=8", clause, "=hack:k_bits=4>hack:k_bits=4", clause, "=hack:k_bits=2");
  ASSERT_LT(text.size(), 4096u);
  const absl::Status status = registry_.Create(text, context_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(DetailOf(status).bound, "4096")) << status;
}

// Whatever the text: a codec whose canonical text makes it once more, or an error; and no crash.
TEST_F(LadderTest, RandomTexts) {
  const std::vector<std::string> kPieces = {"ladder=", ">",  ";",       "hack", "raw",  ":",   "k_bits=",      "8",
                                            "4",       "2",  ",",       "1",    "0..1", "=",   "sinks=",       "64",
                                            "v_bits=", "pq", "waiting", "0",    ">>",   "odd", "hack:k_bits=4"};
  std::mt19937 random(7);
  int good = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = random() % 4 == 0 ? "" : "ladder=hack:k_bits=8,v_bits=8";
    for (int j = random() % 12; j > 0; --j) absl::StrAppend(&text, kPieces[random() % kPieces.size()]);
    if (random() % 2 == 0) absl::StrAppend(&text, ">hack:k_bits=2,v_bits=1");
    const auto codec = registry_.CreateForCache(text, context_);
    if (!codec.ok()) continue;
    ++good;
    const std::string canonical = (*codec)->info().spec;
    EXPECT_EQ(Canonical(canonical), canonical) << text;
    EXPECT_EQ(Canonical(canonical, true), canonical) << text;
  }
  EXPECT_GT(good, 50);
}

}  // namespace
}  // namespace kvmanager
