#include "codecs/abi/plugin_codec.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "codecs/hack/hack.h"
#include "codecs/raw/raw.h"
#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 2, 64, 64};
constexpr int kRows = 4;

std::string BadPath(const std::string& variant) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/bad/", variant, ".so");
}
std::string ExportedPath(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/", name, ".so");
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t[], Free>;
Aligned Allocate(size_t bytes) {
  Aligned p(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
  std::memset(p.get(), 0, bytes);
  return p;
}

class Counts final : public CodecEvents {
 public:
  void OnDecodedPages(size_t pages) override { decoded_pages += pages; }
  void OnError(Entry entry, const absl::Status& error, bool first) override {
    ++errors[static_cast<int>(entry)];
    firsts += first ? 1 : 0;
    last = error;
  }
  void OnProcess(absl::string_view) override {}
  void OnUnanswered(absl::string_view) override {}
  void OnProcessEnded(absl::string_view, const absl::Status&, int64_t) override {}
  size_t decoded_pages = 0;
  int errors[kEntries] = {}, firsts = 0;
  absl::Status last;
};

absl::StatusOr<std::unique_ptr<Codec>> Make(const std::string& path, CodecEvents* events = nullptr,
                                            const CodecParameters& parameters = {}) {
  KV_ASSIGN_OR_RETURN(auto plugin, CodecPlugin::Load(path));
  CodecContext context;
  context.layout = kLayout;
  context.layers = 2;
  context.query_heads = 8;
  return MakePluginCodec(std::move(plugin), context, parameters, events);
}

Aligned NormalPage(uint32_t seed) {
  Aligned raw = Allocate(kLayout.raw_bytes());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) StoreElement(raw.get(), kLayout.dtype, i, normal(random));
  return raw;
}

Aligned EncodePage(const Codec& codec, const uint8_t* raw, bool* declined = nullptr) {
  Aligned encoded = Allocate(codec.info().encoded_bytes), workspace = Allocate(codec.encode_workspace_bytes());
  EncodeItem item = {raw, encoded.get(), 0, 0, false};
  codec.Encode(absl::MakeSpan(&item, 1), {workspace.get(), codec.encode_workspace_bytes()});
  if (declined != nullptr) *declined = item.declined;
  return encoded;
}

struct State {
  State() : acc(Allocate(kRows * kLayout.head_dim * 4)) {
    std::fill_n(max, kRows, -std::numeric_limits<float>::infinity());
  }
  SoftmaxRows rows() { return {max, sum, reinterpret_cast<float*>(acc.get())}; }
  float max[kRows], sum[kRows] = {};
  Aligned acc;
};

void Attend(const PageAttention& attention, const uint8_t* page, int head, State& state) {
  const Aligned q = Allocate(kRows * kLayout.head_dim * 4), workspace = Allocate(attention.workspace_bytes(kRows));
  for (int i = 0; i < kRows * kLayout.head_dim; ++i) reinterpret_cast<float*>(q.get())[i] = float(i % 7) * 0.1f;
  PageAttentionTask task;
  task.q = reinterpret_cast<const float*>(q.get());
  task.rows = kRows;
  task.scale = 0.125f;
  task.kv_head = head;
  task.pages = absl::MakeConstSpan(&page, 1);
  attention.Attend(task, state.rows(), {workspace.get(), attention.workspace_bytes(kRows)});
}

TEST(PluginCodecTest, ErrorsNameTheFileTheEntryAndWhatIsNeeded) {
  const struct {
    const char* variant;
    std::vector<const char*> says;
  } kCases[] = {
      {"bad_struct_size_small", {"table entry decode_batch is beyond struct_size", "it is required"}},
      {"bad_struct_size_zero", {"struct_size is 0", "sizeof(kvmc_codec_api)"}},
      {"bad_null_entry", {"table entry decode_batch is NULL", "it is required"}},
      {"bad_null_table", {"table is NULL"}},
      {"bad_version", {"abi_version is 7, must be 1"}},
      {"bad_symbol", {"kvmanager_codec_v1 is missing (it has kvmanager_codec_v2)", "KVMC_EXPORT"}},
      {"bad_name", {"name is \"No Name\"", "a-z"}},
      {"bad_probe", {"probe: this machine lacks the instruction FROBNICATE"}},
      {"bad_create", {"create: the moon is in the wrong phase"}},
      {"bad_size_not_aligned", {"bytes_of_layer[0] is 32767", "a multiple of 64"}},
      {"bad_size_huge", {"bytes_of_layer[0] is 4294967232", "a multiple of 64 in 1.."}},
      {"bad_parameters_without_end", {"parameters is without an end"}},
      {"bad_attends_without_entry", {"flags is KVMC_ATTENDS", "attend_batch being NULL"}},
      {"bad_unknown_flag", {"layer_flags[0] is 2147483648"}},
      {"bad_workspace_huge", {"workspace_bytes(0, 0) is 18446744073709551615", "at most"}},
  };
  for (const auto& [variant, says] : kCases) {
    const auto codec = Make(BadPath(variant));
    ASSERT_FALSE(codec.ok()) << variant;
    const std::string text(codec.status().message());
    EXPECT_NE(text.find(std::string(variant) + ".so"), std::string::npos) << text;
    for (const char* part : says) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
  }
}

TEST(PluginCodecTest, FilesThatAreNoObjectsAreRefused) {
  EXPECT_EQ(CodecPlugin::Load("/nonexistent/codec.so").status().code(), absl::StatusCode::kNotFound);
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/text.so");
  std::ofstream(path) << "int main() {}";
  const absl::Status status = CodecPlugin::Load(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("text.so"), absl::string_view::npos) << status;
}

TEST(PluginCodecTest, OlderAndNewerTablesServe) {
  for (const char* variant : {"good", "older_table", "newer_table"}) {
    Counts counts;
    const auto codec = Make(BadPath(variant), &counts);
    ASSERT_TRUE(codec.ok()) << codec.status();
    EXPECT_EQ((*codec)->info().spec, "copy");
    EXPECT_EQ((*codec)->info().version, 1);
    EXPECT_FALSE((*codec)->info().identity);
    const Aligned raw = NormalPage(1), encoded = EncodePage(**codec, raw.get());
    EXPECT_EQ(std::memcmp(raw.get(), encoded.get(), kLayout.raw_bytes()), 0);
    EXPECT_TRUE((*codec)->Validate(0, {encoded.get(), (*codec)->info().encoded_bytes}).ok());
    EXPECT_EQ((*codec)->Validate(0, {encoded.get(), 64}).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(PluginCodecTest, WithoutAttendPagesAreDecodedAndCounted) {
  Counts counts;
  const auto codec = Make(BadPath("older_table"), &counts);
  ASSERT_TRUE(codec.ok()) << codec.status();
  const Aligned raw = NormalPage(2), encoded = EncodePage(**codec, raw.get());
  const auto exact = MakeRawAttention(kLayout);
  for (int head = 0; head < 2; ++head) {
    State got, expected;
    Attend((*codec)->attention(), encoded.get(), head, got);
    Attend(*exact, raw.get(), head, expected);
    EXPECT_EQ(std::memcmp(got.acc.get(), expected.acc.get(), kRows * kLayout.head_dim * 4), 0);
    EXPECT_EQ(std::memcmp(got.sum, expected.sum, sizeof got.sum), 0);
  }
  EXPECT_EQ(counts.decoded_pages, 2);
  EXPECT_EQ(counts.firsts, 0);
}

TEST(PluginCodecTest, AnEncodingErrorDeclinesThePage) {
  Counts counts;
  const auto codec = Make(BadPath("bad_encode_error"), &counts);
  ASSERT_TRUE(codec.ok()) << codec.status();
  const Aligned raw = NormalPage(3);
  for (int i = 0; i < 3; ++i) {
    bool declined = false;
    EncodePage(**codec, raw.get(), &declined);
    EXPECT_TRUE(declined);
  }
  EXPECT_EQ(counts.errors[static_cast<int>(CodecEvents::Entry::kEncode)], 3);
  EXPECT_EQ(counts.firsts, 1);
  EXPECT_NE(counts.last.message().find("encode_batch: out of paper"), absl::string_view::npos) << counts.last;
}

TEST(PluginCodecTest, AFailedAttentionIsDoneOnTheDecodedPage) {
  Counts counts;
  const auto codec = Make(BadPath("bad_attend_error"), &counts);
  ASSERT_TRUE(codec.ok()) << codec.status();
  const Aligned raw = NormalPage(4), encoded = EncodePage(**codec, raw.get());
  State got, expected;
  const auto exact = MakeRawAttention(kLayout);
  for (int page = 0; page < 2; ++page) {
    Attend((*codec)->attention(), encoded.get(), 1, got);
    Attend(*exact, raw.get(), 1, expected);
  }
  EXPECT_EQ(std::memcmp(got.acc.get(), expected.acc.get(), kRows * kLayout.head_dim * 4), 0);
  EXPECT_EQ(counts.errors[static_cast<int>(CodecEvents::Entry::kAttend)], 2);
  EXPECT_EQ(counts.firsts, 1);
  EXPECT_EQ(counts.decoded_pages, 2);
}

TEST(PluginCodecTest, APageThatCannotBeDecodedIsNan) {
  Counts counts;
  const auto codec = Make(BadPath("bad_decode_error"), &counts);
  ASSERT_TRUE(codec.ok()) << codec.status();
  const Aligned raw = NormalPage(5), encoded = EncodePage(**codec, raw.get()), decoded = NormalPage(6);
  const DecodeItem item = {encoded.get(), decoded.get(), 0};
  (*codec)->Decode(absl::MakeConstSpan(&item, 1));
  for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) {
    ASSERT_TRUE(std::isnan(LoadElement(decoded.get(), kLayout.dtype, i)));
  }
  State state;
  Attend((*codec)->attention(), encoded.get(), 0, state);
  for (int i = 0; i < kRows * kLayout.head_dim; ++i) ASSERT_TRUE(std::isnan(state.rows().acc[i]));
  EXPECT_EQ(counts.errors[static_cast<int>(CodecEvents::Entry::kDecode)], 2);
  EXPECT_EQ(counts.decoded_pages, 0);
}

TEST(PluginCodecTest, AnExportedCodecIsTheCodec) {
  const CodecParameters parameters = {{"k_bits", "2"}, {"v_bits", "1"}};
  const auto plugin = Make(ExportedPath("hack"), nullptr, parameters);
  ASSERT_TRUE(plugin.ok()) << plugin.status();
  CodecRegistry registry;
  RegisterHack(registry);
  const auto codec = registry.Create("hack:k_bits=2,v_bits=1", kLayout);
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_EQ((*plugin)->info().spec, (*codec)->info().spec);
  EXPECT_EQ((*plugin)->info().encoded_bytes, (*codec)->info().encoded_bytes);
  EXPECT_EQ((*plugin)->info().payload_bytes, (*codec)->info().payload_bytes);
  const Aligned raw = NormalPage(7), a = EncodePage(**plugin, raw.get()), b = EncodePage(**codec, raw.get());
  EXPECT_EQ(std::memcmp(a.get(), b.get(), (*codec)->info().encoded_bytes), 0);
  State through, direct;
  Attend((*plugin)->attention(), a.get(), 1, through);
  Attend((*codec)->attention(), b.get(), 1, direct);
  EXPECT_EQ(std::memcmp(through.acc.get(), direct.acc.get(), kRows * kLayout.head_dim * 4), 0);
  const auto refused = Make(ExportedPath("hack"), nullptr, {{"k_bits", "7"}});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("k_bits"), absl::string_view::npos) << refused.status();
}

TEST(PluginCodecTest, ARegistryTakesEachNameOnce) {
  CodecRegistry registry;
  RegisterRaw(registry);
  EXPECT_EQ(LoadCodecPlugin(ExportedPath("raw"), registry, nullptr).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(LoadCodecPlugins({BadPath("good")}, registry, nullptr).ok());
  const absl::Status again = LoadCodecPlugins({BadPath("newer_table")}, registry, nullptr);
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(again.message().find("newer_table.so name is \"copy\""), absl::string_view::npos) << again;
  EXPECT_TRUE(registry.Create("copy", kLayout).ok());
  EXPECT_FALSE(registry.Create("copy:k=1", kLayout).ok());
}

}  // namespace
}  // namespace kvmanager
