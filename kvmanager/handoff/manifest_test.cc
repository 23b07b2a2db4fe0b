#include "kvmanager/handoff/manifest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {
namespace {

std::vector<HandOffBlock> SomeBlocks(int blocks, int first) {
  std::vector<HandOffBlock> made(blocks);
  for (int i = first; i < blocks; i += 2) {
    made[i].named = true;
    made[i].name.key.bytes.fill(uint8_t(i + 1));
    made[i].name.tokens.bytes.fill(uint8_t(i + 101));
  }
  return made;
}

HandOffHeader SomeFirst(int blocks, int layers) {
  HandOffHeader first;
  first.config.model = "model";
  first.config.revision = "r1";
  first.config.tenant = "tenant";
  first.config.rope = "default:theta=500000";
  first.config.layers = layers;
  first.config.query_heads = 8;
  first.config.layout = {DType::kBFloat16, 2, 128, 64};
  first.config.codec = "hack:k_bits=3";
  first.config.lag_pages = 1;
  first.codec_version = 7;
  first.tokens = uint64_t(blocks) * 64 + 5;
  first.blocks = SomeBlocks(blocks, 0);
  for (uint32_t layer = 0; layer < uint32_t(layers); ++layer) {
    first.aged.push_back(layer + 1);
    for (uint32_t block = 0; block + 1 < uint32_t(blocks); ++block) first.pages.push_back({block, layer, 13312u});
  }
  return first;
}

HandOffTrailer SomeLast(int blocks, int layers) {
  HandOffTrailer last;
  last.blocks = SomeBlocks(blocks, 1);
  last.withdrawn = {3, 7};
  last.index = {12345, 6};
  for (uint32_t layer = 0; layer < uint32_t(layers); ++layer) last.pages.push_back({uint32_t(blocks), layer, 65536u});
  return last;
}

PageSizes BytesOf(const std::vector<HandOffPage>& pages) {
  PageSizes bytes;
  for (const HandOffPage& page : pages) bytes.push_back(page.bytes);
  return bytes;
}

absl::StatusOr<HandOffHeader> Parse(const HandOffHeader& first) {
  return ParseFirstManifest(WriteFirstManifest(first), BytesOf(first.pages));
}

void ExpectEqual(const std::vector<HandOffBlock>& got, const std::vector<HandOffBlock>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].named, expected[i].named);
    EXPECT_EQ(got[i].name.key, expected[i].name.key);
    EXPECT_EQ(got[i].name.tokens, expected[i].name.tokens);
  }
}

void ExpectEqual(const std::vector<HandOffPage>& got, const std::vector<HandOffPage>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].block, expected[i].block);
    EXPECT_EQ(got[i].layer, expected[i].layer);
    EXPECT_EQ(got[i].bytes, expected[i].bytes);
  }
}

TEST(ManifestTest, RoundTrip) {
  for (const int blocks : {0, 1, 9}) {
    const HandOffHeader first = SomeFirst(blocks, 3);
    const auto got = Parse(first);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(DigestOf(got->config, got->codec_version), DigestOf(first.config, first.codec_version));
    EXPECT_EQ(got->codec_version, first.codec_version);
    EXPECT_EQ(got->tokens, first.tokens);
    EXPECT_EQ(got->aged, first.aged);
    ExpectEqual(got->blocks, first.blocks);
    ExpectEqual(got->pages, first.pages);

    const HandOffTrailer last = SomeLast(blocks, 3);
    const std::string blob("any\0bytes", 9);
    const auto got_last = ParseLastManifest(WriteLastManifest(last, blob), BytesOf(last.pages), last.withdrawn);
    ASSERT_TRUE(got_last.ok()) << got_last.status();
    EXPECT_EQ(got_last->blob, blob);
    EXPECT_EQ(got_last->last.withdrawn, last.withdrawn);
    EXPECT_EQ(got_last->last.index.prompt_tokens, 12345u);
    EXPECT_EQ(got_last->last.index.iterations, 6u);
    ExpectEqual(got_last->last.blocks, last.blocks);
    ExpectEqual(got_last->last.pages, last.pages);
  }
}

std::string FieldOf(const absl::Status& status) { return DetailOf(status).field; }

TEST(ManifestTest, ContradictionsAreNamed) {
  HandOffHeader first = SomeFirst(4, 2);
  first.tokens = 5 * 64;
  EXPECT_EQ(FieldOf(Parse(first).status()), "manifest.tokens");
  first = SomeFirst(4, 2);
  first.aged.pop_back();
  EXPECT_EQ(FieldOf(Parse(first).status()), "manifest.aged");
  first = SomeFirst(4, 2);
  first.config.layers = 5000;
  EXPECT_EQ(FieldOf(Parse(first).status()), "layers");
  first = SomeFirst(4, 2);
  std::vector<HandOffPage> fewer = first.pages;
  fewer.pop_back();
  PageSizes bytes = BytesOf(fewer);
  EXPECT_EQ(FieldOf(ParseFirstManifest(WriteFirstManifest(first), bytes).status()), "manifest.pages");
  const HandOffTrailer last = SomeLast(4, 2);
  bytes = BytesOf(last.pages);
  const std::string large(limits::kBlobBytesMax + 1, 'x');
  EXPECT_EQ(FieldOf(ParseLastManifest(WriteLastManifest(last, large), bytes, {}).status()), "manifest.blob");
  bytes.push_back(64);
  EXPECT_EQ(FieldOf(ParseLastManifest(WriteLastManifest(last, ""), bytes, {}).status()), "manifest.pages");
}

TEST(ManifestTest, TruncationsAreErrors) {
  const HandOffHeader first = SomeFirst(5, 3);
  const HandOffTrailer last = SomeLast(5, 3);
  const std::string whole = WriteFirstManifest(first), whole_last = WriteLastManifest(last, "blob");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto got = ParseFirstManifest(absl::string_view(whole).substr(0, bytes), BytesOf(first.pages));
    ASSERT_FALSE(got.ok()) << bytes;
    EXPECT_EQ(FieldOf(got.status()), "manifest") << bytes << got.status();
  }
  for (size_t bytes = 0; bytes < whole_last.size(); ++bytes) {
    const auto got = ParseLastManifest(absl::string_view(whole_last).substr(0, bytes), BytesOf(last.pages), {});
    ASSERT_FALSE(got.ok()) << bytes;
    EXPECT_EQ(FieldOf(got.status()), "manifest") << bytes << got.status();
  }
}

// Whatever is accepted keeps its promises: as many pages as the transport has, blocks as the token count says.
TEST(ManifestTest, MutationsNeverBreakWhatParseChecks) {
  std::mt19937_64 random(1);
  const HandOffHeader first = SomeFirst(5, 3);
  const HandOffTrailer last = SomeLast(5, 3);
  const std::string whole = WriteFirstManifest(first), whole_last = WriteLastManifest(last, "blob");
  int accepted = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string changed = round % 2 ? whole : whole_last;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      char& byte = changed[random() % changed.size()];
      byte = random() % 2 ? char(random()) : char(byte ^ (1 << random() % 8));
    }
    absl::Status status;
    if (round % 2) {
      const auto got = ParseFirstManifest(changed, BytesOf(first.pages));
      status = got.status();
      if (got.ok()) {
        ASSERT_TRUE(ValidateCacheConfig(got->config).ok());
        ASSERT_EQ(got->pages.size(), first.pages.size());
        ASSERT_EQ(got->aged.size(), size_t(got->config.layers));
        ASSERT_EQ(got->blocks.size(), got->tokens / got->config.layout.page_tokens);
      }
    } else {
      const auto got = ParseLastManifest(changed, BytesOf(last.pages), last.withdrawn);
      status = got.status();
      if (got.ok()) {
        ASSERT_EQ(got->last.pages.size(), last.pages.size());
        ASSERT_LE(got->last.blocks.size(), limits::kHandOffBlocksMax);
      }
    }
    EXPECT_TRUE(status.ok() || !FieldOf(status).empty()) << status;
    ++(status.ok() ? accepted : refused);
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 1000);
}

TEST(ManifestTest, RandomBytesAreRefused) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(8 * (1 + random() % 64), '\0');
    for (char& byte : bytes) byte = char(random());
    EXPECT_FALSE(ParseFirstManifest(bytes, {}).ok());
    EXPECT_FALSE(ParseLastManifest(bytes, {7}, {}).ok());
  }
}

}  // namespace
}  // namespace kvmanager
