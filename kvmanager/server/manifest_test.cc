#include "kvmanager/server/manifest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kvmanager/base/status.h"
#include "kvmanager/server/limits.h"

namespace kvmanager {
namespace {

HandOffContent SomeContent(int blocks, int layers) {
  HandOffContent content;
  content.config.model = "model";
  content.config.revision = "r1";
  content.config.tenant = "tenant";
  content.config.rope = "default:theta=500000";
  content.config.layers = layers;
  content.config.query_heads = 8;
  content.config.layout = {DType::kBFloat16, 2, 128, 64};
  content.config.codec = "hack:k_bits=3";
  content.config.lag_pages = 1;
  content.codec_version = 7;
  content.tokens = uint64_t(blocks) * 64 + 5;
  content.blocks.resize(blocks);
  for (int i = 0; i < blocks; i += 2) {
    content.blocks[i].named = true;
    content.blocks[i].name.key.bytes.fill(uint8_t(i + 1));
    content.blocks[i].name.tokens.bytes.fill(uint8_t(i + 101));
  }
  for (uint32_t layer = 0; layer < uint32_t(layers); ++layer) {
    for (uint32_t block = 0; block <= uint32_t(blocks); ++block) {
      const bool raw = block + 1 >= uint32_t(blocks);
      content.pages.push_back({block, layer, raw ? PageForm::kRaw : PageForm::kEncoded, raw ? 65536u : 13312u,
                               uint64_t{0x9e3779b97f4a7c15} * (layer * 1000 + block + 1)});
    }
  }
  return content;
}

struct Offer {
  std::string manifest;
  std::vector<uint64_t> bytes, checksums;
};

Offer MakeOffer(const HandOffContent& content, absl::string_view blob) {
  Offer offer;
  offer.manifest = WriteManifest(content, blob);
  for (const HandOffPage& page : content.pages) {
    offer.bytes.push_back(page.bytes);
    offer.checksums.push_back(page.checksum);
  }
  return offer;
}

absl::StatusOr<Manifest> Parse(const Offer& offer) {
  return ParseManifest(offer.manifest, offer.bytes, offer.checksums);
}

TEST(ManifestTest, RoundTrip) {
  for (const int blocks : {0, 1, 9}) {
    const HandOffContent content = SomeContent(blocks, 3);
    const std::string blob("any\0bytes", 9);
    auto manifest = Parse(MakeOffer(content, blob));
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(manifest->blob, blob);
    const HandOffContent& got = manifest->content;
    EXPECT_EQ(DigestOf(got.config, got.codec_version), DigestOf(content.config, content.codec_version));
    EXPECT_EQ(got.codec_version, content.codec_version);
    EXPECT_EQ(got.tokens, content.tokens);
    ASSERT_EQ(got.blocks.size(), content.blocks.size());
    for (size_t i = 0; i < got.blocks.size(); ++i) {
      EXPECT_EQ(got.blocks[i].named, content.blocks[i].named);
      EXPECT_EQ(got.blocks[i].name.key, content.blocks[i].name.key);
      EXPECT_EQ(got.blocks[i].name.tokens, content.blocks[i].name.tokens);
    }
    ASSERT_EQ(got.pages.size(), content.pages.size());
    for (size_t i = 0; i < got.pages.size(); ++i) {
      EXPECT_EQ(got.pages[i].block, content.pages[i].block);
      EXPECT_EQ(got.pages[i].layer, content.pages[i].layer);
      EXPECT_EQ(got.pages[i].form, content.pages[i].form);
      EXPECT_EQ(got.pages[i].bytes, content.pages[i].bytes);
      EXPECT_EQ(got.pages[i].checksum, content.pages[i].checksum);
    }
  }
}

std::string FieldOf(const absl::Status& status) { return DetailOf(status).field; }

TEST(ManifestTest, ContradictionsAreNamed) {
  HandOffContent content = SomeContent(4, 2);
  content.tokens = 5 * 64;
  EXPECT_EQ(FieldOf(Parse(MakeOffer(content, "")).status()), "manifest.tokens");
  content = SomeContent(4, 2);
  content.pages[3].block = 5;
  EXPECT_EQ(FieldOf(Parse(MakeOffer(content, "")).status()), "manifest.pages[3].block");
  content = SomeContent(4, 2);
  content.pages[3].layer = 2;
  EXPECT_EQ(FieldOf(Parse(MakeOffer(content, "")).status()), "manifest.pages[3].layer");
  content = SomeContent(4, 2);
  content.config.layers = 5000;
  EXPECT_EQ(FieldOf(Parse(MakeOffer(content, "")).status()), "layers");
  content = SomeContent(4, 2);
  EXPECT_EQ(FieldOf(Parse(MakeOffer(content, std::string(limits::kBlobBytesMax + 1, 'x'))).status()), "manifest.blob");
  Offer offer = MakeOffer(content, "");
  offer.bytes.pop_back();
  EXPECT_EQ(FieldOf(Parse(offer).status()), "manifest.pages");
  offer = MakeOffer(content, "");
  offer.checksums.push_back(0);
  EXPECT_EQ(FieldOf(Parse(offer).status()), "manifest.pages");
}

TEST(ManifestTest, TruncationsAreErrors) {
  const Offer offer = MakeOffer(SomeContent(5, 3), "blob");
  for (size_t bytes = 0; bytes < offer.manifest.size(); ++bytes) {
    Offer cut = offer;
    cut.manifest.resize(bytes);
    auto manifest = Parse(cut);
    ASSERT_FALSE(manifest.ok()) << bytes;
    EXPECT_EQ(FieldOf(manifest.status()), "manifest") << bytes << manifest.status();
  }
}

// Whatever is accepted keeps its promises: the pages name blocks and layers that are there.
TEST(ManifestTest, MutationsNeverBreakWhatParseChecks) {
  std::mt19937_64 random(1);
  const Offer offer = MakeOffer(SomeContent(5, 3), "blob");
  int accepted = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    Offer changed = offer;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      char& byte = changed.manifest[random() % changed.manifest.size()];
      byte = random() % 2 ? char(random()) : char(byte ^ (1 << random() % 8));
    }
    auto manifest = Parse(changed);
    if (!manifest.ok()) {
      ++refused;
      EXPECT_FALSE(FieldOf(manifest.status()).empty()) << manifest.status();
      continue;
    }
    ++accepted;
    const HandOffContent& content = manifest->content;
    ASSERT_TRUE(ValidateCacheConfig(content.config).ok());
    ASSERT_EQ(content.pages.size(), offer.bytes.size());
    ASSERT_EQ(content.blocks.size(), content.tokens / content.config.layout.page_tokens);
    for (const HandOffPage& page : content.pages) {
      ASSERT_LE(page.block, content.blocks.size());
      ASSERT_LT(page.layer, uint32_t(content.config.layers));
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 1000);
}

TEST(ManifestTest, RandomBytesAreRefused) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(8 * (1 + random() % 64), '\0');
    for (char& byte : bytes) byte = char(random());
    EXPECT_FALSE(ParseManifest(bytes, {}, {}).ok());
  }
}

}  // namespace
}  // namespace kvmanager
