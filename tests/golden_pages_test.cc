// Encoded bytes of every codec are those of tests/golden/pages.txt: pages that an earlier release stored or sent are
// read by this one, and the other way round.
//
// The bytes do not depend on the instruction set (codecs/codec.h; the codecs' own tests compare the kernels of all
// sets), so the file is the same for every machine. A policy's pages are those of its codecs, sinks and raw layers left
// out. Of identity codecs (raw, pq) a page is what was appended, and only the size is in the file.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "tests/golden.h"
#include "xxhash.h"

namespace kvmanager::testing {
namespace {

constexpr int kLayers = 2, kKvHeads = 2, kQueryHeads = 4;

struct Shape {
  DType dtype;
  int head_dim, page_tokens;
};
constexpr Shape kShapes[] = {{DType::kFloat16, 64, 64},
                             {DType::kBFloat16, 64, 64},
                             {DType::kFloat16, 128, 64},
                             {DType::kBFloat16, 128, 64},
                             {DType::kFloat16, 64, 256}};

const char* const kMillion = "million:m=32,bits=8";
const char* const kMillionSides = "million:k_m=16,k_bits=6,v_m=32,v_bits=4";
const char* const kZackMillion = "zack+million:m=32,bits=8";

std::vector<std::string> Codecs() {
  return {"raw",
          "pq",
          "default",
          "hack:k_bits=4,v_bits=4",
          "hack:k_bits=4,v_bits=3",
          "hack:k_bits=3,v_bits=2",
          "hack:k_bits=2,v_bits=2",
          "hack:k_bits=2,v_bits=1",
          "hack:k_bits=8,v_bits=8",
          "hack:k_axis=token,k_bits=2,v_bits=2",
          "default:calibration=synthetic",
          "zack:rate=0.5,calibration=synthetic",
          "zack:mode=joint,rate=0.25,calibration=synthetic",
          "zack+hack:bytes=48,calibration=synthetic",
          "zack+hack:fold=1,calibration=synthetic",
          absl::StrCat(kMillion, ",calibration=synthetic"),
          absl::StrCat(kMillionSides, ",calibration=synthetic"),
          absl::StrCat(kZackMillion, ",calibration=synthetic"),
          "hack:k_bits=2,v_bits=2;0=raw;sinks=128",
          absl::StrCat("hack:k_bits=3,v_bits=2;1=", kMillion, ",calibration=synthetic")};
}

/// Serves one artifact by any name.
class OneArtifact final : public CalibrationSource {
 public:
  explicit OneArtifact(std::shared_ptr<const Calibration> artifact) : artifact_(std::move(artifact)) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return artifact_; }

 private:
  const std::shared_ptr<const Calibration> artifact_;
};

using Buffer = std::unique_ptr<uint8_t, decltype(&std::free)>;
Buffer NewBuffer(size_t bytes) {
  return Buffer(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)), std::free);
}

/// SplitMix64's function of one number.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/// About normal: the sum of four uniforms of 16 bits, exact in fp32, with a variance of 1.33.
float Value(uint64_t key) {
  const uint64_t h = Mix(key);
  int sum = 0;
  for (int i = 0; i < 4; ++i) sum += int(h >> 16 * i & 0xffff) - 32768;
  return float(sum) / 32768.0f;
}

/// What pages hold; every value is a whole number times a power of two, so no machine rounds it differently.
enum class Content {
  kOutliers,  // a few key channels around +-12, as real keys have
  kFlat,      // K: every channel constant over tokens; V: subnormal in fp16
  kHuge,      // V near the dtype's largest values in a few places, which some codecs decline
};

void Fill(const PageLayout& layout, int layer, uint64_t first_token, Content content, uint8_t* raw) {
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      for (int token = 0; token < layout.page_tokens; ++token) {
        for (int c = 0; c < layout.head_dim; ++c) {
          const uint64_t position = content == Content::kFlat && side == 0 ? 0 : first_token + token;
          float x = Value((((position * 2 + side) * 16 + layer) * 16 + head) * 1024 + c);
          if (content == Content::kOutliers && side == 0 && c % 16 == 3) x += c % 32 == 3 ? 12.0f : -12.0f;
          if (content == Content::kFlat && side == 1) x *= 0x1p-20f;
          if (content == Content::kHuge && side == 1 && (token + c) % 97 == 0) x = x > 0 ? 60000.0f : -60000.0f;
          StoreElement(raw + layout.raw_offset(side, head, token), layout.dtype, c, x);
        }
      }
    }
  }
}

std::string KeyOf(const std::string& spec, const Shape& shape, uint32_t version) {
  return absl::StrFormat("%s version=%d %s head_dim=%d page_tokens=%d", spec, version,
                         shape.dtype == DType::kFloat16 ? "fp16" : "bf16", shape.head_dim, shape.page_tokens);
}

/// Sizes of a page by layer, then for each page XXH3-64 by layer.
std::string Digests(const Codec& codec) {
  const CodecInfo& info = codec.info();
  std::string line = "bytes";
  for (int layer = 0; layer < kLayers; ++layer) absl::StrAppend(&line, layer == 0 ? "=" : "/", info.page_bytes(layer));
  if (info.identity) return line;
  const Buffer raw = NewBuffer(codec.layout().raw_bytes()), encoded = NewBuffer(info.encoded_bytes);
  const Buffer workspace = NewBuffer(codec.encode_workspace_bytes());
  // The first page is a sink.
  uint64_t page = 0;
  for (const Content content : {Content::kOutliers, Content::kOutliers, Content::kFlat, Content::kHuge}) {
    const uint64_t first_token = page * codec.layout().page_tokens;
    for (int layer = 0; layer < kLayers; ++layer) {
      Fill(codec.layout(), layer, first_token, content, raw.get());
      std::memset(encoded.get(), 0xee, info.encoded_bytes);  // every byte is written
      EncodeItem item{raw.get(), encoded.get(), uint32_t(layer), first_token};
      codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec.encode_workspace_bytes()));
      absl::StrAppend(&line, layer == 0 ? " " : "/");
      if (item.declined) {
        absl::StrAppend(&line, item.is_sink ? "kept-raw" : "declined");
      } else {
        absl::StrAppend(&line, absl::Hex(XXH3_64bits(encoded.get(), info.page_bytes(layer)), absl::kZeroPad16));
      }
    }
    ++page;
  }
  return line;
}

TEST(GoldenPages, EncodedBytesAreTheSame) {
  std::vector<GoldenLine> artifacts, pages;
  for (const Shape& shape : kShapes) {
    PageLayout layout;
    layout.dtype = shape.dtype;
    layout.kv_heads = kKvHeads;
    layout.head_dim = uint16_t(shape.head_dim);
    layout.page_tokens = uint16_t(shape.page_tokens);
    OneArtifact source(SyntheticCalibration({"golden", "1", kLayers, kKvHeads, kQueryHeads, shape.head_dim}, 9,
                                            {kMillion, kMillionSides, kZackMillion}));
    const GoldenLine artifact = {absl::StrCat("artifact head_dim=", shape.head_dim), (*source.Get(""))->digest()};
    if (std::none_of(artifacts.begin(), artifacts.end(), [&](const auto& line) { return line.key == artifact.key; })) {
      artifacts.push_back(artifact);
    }
    CodecRegistry registry;
    RegisterBuiltinCodecs(registry);
    registry.SetCalibrations(&source);
    for (const std::string& spec : Codecs()) {
      SCOPED_TRACE(spec);
      CodecContext context;
      context.layout = layout;
      context.layers = kLayers;
      context.query_heads = kQueryHeads;
      absl::StatusOr<std::unique_ptr<Codec>> codec = registry.CreateForCache(spec, context);
      ASSERT_TRUE(codec.ok()) << codec.status();
      pages.push_back({KeyOf(spec, shape, (*codec)->info().version), Digests(**codec)});
    }
  }
  GoldenFile file;
  file.name = "pages";
  file.about =
      "Encoded pages: codec as a user writes it, its page version, dtype and geometry; then the bytes of a page by\n"
      "layer, and XXH3-64 of four pages (tokens 0, page_tokens, ...) by layer. The same on every instruction set.\n"
      "A value here never changes. A codec whose bytes must change gets a new page version (CodecInfo::version), so\n"
      "that stored pages and pages of peers are misses and not misread; then, and for a new codec, write the file:\n"
      "  bazel run --config=opt //tests:golden_pages_test -- --write_golden\n"
      "Artifacts are made by codecs/calibrate/synthetic.h from a seed. If only their digests differ, that generator\n"
      "has changed, and the lines with calibration=synthetic say nothing.";
  file.advice =
      "A page version's bytes never change: mend the codec, or give it a new version (CodecInfo::version) and write "
      "the file. If an \"artifact\" line differs, codecs/calibrate/synthetic.cc has changed, not a codec: restore it.";
  artifacts.insert(artifacts.end(), pages.begin(), pages.end());
  ExpectGolden(file, artifacts);
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::GoldenMain(argc, argv); }
