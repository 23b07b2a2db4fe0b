#include "kvmanager/handoff/manifest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {
namespace {

std::vector<HandOffBlock> SomeBlocks(int blocks, int header) {
  std::vector<HandOffBlock> made(blocks);
  for (int i = header; i < blocks; i += 2) {
    made[i].named = true;
    made[i].name.key.bytes.fill(uint8_t(i + 1));
    made[i].name.tokens.bytes.fill(uint8_t(i + 101));
  }
  return made;
}

HandOffHeader SomeFirst(int blocks, int layers) {
  HandOffHeader header;
  header.config.model = "model";
  header.config.revision = "r1";
  header.config.tenant = "tenant";
  header.config.rope = "default:theta=500000";
  header.config.layers = layers;
  header.config.query_heads = 8;
  header.config.layout = {DType::kBFloat16, 2, 128, 64};
  header.config.codec = "hack:k_bits=3";
  header.config.lag_pages = 1;
  header.codec_version = 7;
  header.tokens = uint64_t(blocks) * 64 + 5;
  header.blocks = SomeBlocks(blocks, 0);
  for (uint32_t layer = 0; layer < uint32_t(layers); ++layer) {
    header.aged.push_back(layer + 1);
    for (uint32_t block = 0; block + 1 < uint32_t(blocks); ++block) header.pages.push_back({block, layer, 13312u});
  }
  return header;
}

HandOffTrailer SomeLast(int blocks, int layers) {
  HandOffTrailer trailer;
  trailer.blocks = SomeBlocks(blocks, 1);
  trailer.withdrawn = {3, 7};
  trailer.index = {12345, 6};
  for (uint32_t layer = 0; layer < uint32_t(layers); ++layer)
    trailer.pages.push_back({uint32_t(blocks), layer, 65536u});
  return trailer;
}

PageSizes BytesOf(const std::vector<HandOffPage>& pages) {
  PageSizes bytes;
  for (const HandOffPage& page : pages) bytes.push_back(page.bytes);
  return bytes;
}

absl::StatusOr<HandOffHeader> Parse(const HandOffHeader& header) {
  return ParseHandOffHeader(WriteHandOffHeader(header), BytesOf(header.pages));
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
    const HandOffHeader header = SomeFirst(blocks, 3);
    const auto got = Parse(header);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(DigestOf(got->config, got->codec_version), DigestOf(header.config, header.codec_version));
    EXPECT_EQ(got->codec_version, header.codec_version);
    EXPECT_EQ(got->tokens, header.tokens);
    EXPECT_EQ(got->aged, header.aged);
    ExpectEqual(got->blocks, header.blocks);
    ExpectEqual(got->pages, header.pages);

    const HandOffTrailer trailer = SomeLast(blocks, 3);
    const std::string blob("any\0bytes", 9);
    const auto got_last =
        ParseHandOffTrailer(WriteHandOffTrailer(trailer, blob), BytesOf(trailer.pages), trailer.withdrawn);
    ASSERT_TRUE(got_last.ok()) << got_last.status();
    EXPECT_EQ(got_last->blob, blob);
    EXPECT_EQ(got_last->trailer.withdrawn, trailer.withdrawn);
    EXPECT_EQ(got_last->trailer.index.prompt_tokens, 12345u);
    EXPECT_EQ(got_last->trailer.index.iterations, 6u);
    ExpectEqual(got_last->trailer.blocks, trailer.blocks);
    ExpectEqual(got_last->trailer.pages, trailer.pages);
  }
}

std::string FieldOf(const absl::Status& status) { return DetailOf(status).field; }

TEST(ManifestTest, ContradictionsAreNamed) {
  HandOffHeader header = SomeFirst(4, 2);
  header.tokens = 5 * 64;
  EXPECT_EQ(FieldOf(Parse(header).status()), "manifest.tokens");
  header = SomeFirst(4, 2);
  header.aged.pop_back();
  EXPECT_EQ(FieldOf(Parse(header).status()), "manifest.aged");
  header = SomeFirst(4, 2);
  header.config.layers = 5000;
  EXPECT_EQ(FieldOf(Parse(header).status()), "layers");
  header = SomeFirst(4, 2);
  std::vector<HandOffPage> fewer = header.pages;
  fewer.pop_back();
  PageSizes bytes = BytesOf(fewer);
  EXPECT_EQ(FieldOf(ParseHandOffHeader(WriteHandOffHeader(header), bytes).status()), "manifest.pages");
  const HandOffTrailer trailer = SomeLast(4, 2);
  bytes = BytesOf(trailer.pages);
  const std::string large(limits::kBlobBytesMax + 1, 'x');
  EXPECT_EQ(FieldOf(ParseHandOffTrailer(WriteHandOffTrailer(trailer, large), bytes, {}).status()), "manifest.blob");
  bytes.push_back(64);
  EXPECT_EQ(FieldOf(ParseHandOffTrailer(WriteHandOffTrailer(trailer, ""), bytes, {}).status()), "manifest.pages");
}

TEST(ManifestTest, TruncationsAreErrors) {
  const HandOffHeader header = SomeFirst(5, 3);
  const HandOffTrailer trailer = SomeLast(5, 3);
  const std::string whole = WriteHandOffHeader(header), whole_last = WriteHandOffTrailer(trailer, "blob");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto got = ParseHandOffHeader(absl::string_view(whole).substr(0, bytes), BytesOf(header.pages));
    ASSERT_FALSE(got.ok()) << bytes;
    EXPECT_EQ(FieldOf(got.status()), "manifest") << bytes << got.status();
  }
  for (size_t bytes = 0; bytes < whole_last.size(); ++bytes) {
    const auto got = ParseHandOffTrailer(absl::string_view(whole_last).substr(0, bytes), BytesOf(trailer.pages), {});
    ASSERT_FALSE(got.ok()) << bytes;
    EXPECT_EQ(FieldOf(got.status()), "manifest") << bytes << got.status();
  }
}

// Whatever is accepted keeps its promises: as many pages as the transport has, blocks as the token count says.
TEST(ManifestTest, MutationsNeverBreakWhatParseChecks) {
  std::mt19937_64 random(1);
  const HandOffHeader header = SomeFirst(5, 3);
  const HandOffTrailer trailer = SomeLast(5, 3);
  const std::string whole = WriteHandOffHeader(header), whole_last = WriteHandOffTrailer(trailer, "blob");
  int accepted = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string changed = round % 2 ? whole : whole_last;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      char& byte = changed[random() % changed.size()];
      byte = random() % 2 ? char(random()) : char(byte ^ (1 << random() % 8));
    }
    absl::Status status;
    if (round % 2) {
      const auto got = ParseHandOffHeader(changed, BytesOf(header.pages));
      status = got.status();
      if (got.ok()) {
        ASSERT_TRUE(ValidateCacheConfig(got->config).ok());
        ASSERT_EQ(got->pages.size(), header.pages.size());
        ASSERT_EQ(got->aged.size(), size_t(got->config.layers));
        ASSERT_EQ(got->blocks.size(), got->tokens / got->config.layout.page_tokens);
      }
    } else {
      const auto got = ParseHandOffTrailer(changed, BytesOf(trailer.pages), trailer.withdrawn);
      status = got.status();
      if (got.ok()) {
        ASSERT_EQ(got->trailer.pages.size(), trailer.pages.size());
        ASSERT_LE(got->trailer.blocks.size(), limits::kHandOffBlocksMax);
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
    EXPECT_FALSE(ParseHandOffHeader(bytes, {}).ok());
    EXPECT_FALSE(ParseHandOffTrailer(bytes, {7}, {}).ok());
  }
}

}  // namespace
}  // namespace kvmanager
