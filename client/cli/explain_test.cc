#include "client/cli/explain.h"

#include <gtest/gtest.h>

namespace kvmanager::client::cli {
namespace {

BlockExplanation There(BlockPlace place, const char* tier) { return {.place = place, .tier = tier, .cache_id = 3}; }
BlockExplanation Gone(BlockLoss loss, const char* tier, double seconds_ago) {
  return {.loss = loss, .tier = tier, .cache_id = 3, .seconds_ago = seconds_ago};
}

ExplainedPrompt Prompt(std::vector<BlockExplanation> blocks) {
  ExplainedPrompt prompt{.page_tokens = 64};
  for (size_t i = 0; i < blocks.size(); ++i) {
    prompt.names.emplace_back();
    prompt.names.back().key.bytes.fill(static_cast<uint8_t>(0xa0 + i));
  }
  prompt.explanation = {
      .blocks = std::move(blocks), .remembered = 12, .remembered_max = 65536, .remembered_seconds = 245};
  return prompt;
}

TEST(Explain, TableFoldsNeighboursAndSaysWhy) {
  BlockExplanation evicted = Gone(BlockLoss::kEvicted, "host", 5);
  evicted.owner = "aaaaaaaa";
  evicted.taker = "bbbbbbbb";
  BlockExplanation earlier = evicted;
  earlier.seconds_ago = 65;
  BlockExplanation elsewhere{.same_tokens_cache_id = 7};
  ExplainedPrompt prompt = Prompt({There(BlockPlace::kMemory, "host"), There(BlockPlace::kMemory, "host"),
                                   There(BlockPlace::kArriving, "host"), There(BlockPlace::kDisk, "disk"), evicted,
                                   earlier, elsewhere, Gone(BlockLoss::kPurged, "disk", 1)});
  prompt.explanation.others.push_back({7, "cccccccc", "device:0", {"tenant", "codec"}});
  prompt.explanation.blocks[0].priority = prompt.explanation.blocks[1].priority = 100;
  prompt.explanation.blocks[3].priority = 80;
  prompt.explanation.blocks[3].retained_ms = 59000;
  prompt.unnamed_tokens = 9;
  EXPECT_EQ(FormatExplained(prompt),
            "4 of 8 blocks are there, 4 before the first miss\n"
            "the last 9 tokens fill no block and have no name\n"
            "\n"
            "BLOCK  BLOCKS  TOKEN  KEY           WHERE         RETAINED  WENT AGO  WHY NOT\n"
            "    0       2      0  a0a0a0a0a0a0  host               100  -         -\n"
            "    2       1    128  a2a2a2a2a2a2  to host  -              -         -\n"
            "    3       1    192  a3a3a3a3a3a3  disk     80 for 59.0 s  -         -\n"
            "    4       2    256  a4a4a4a4a4a4  -        -                 5.0 s  evicted from host for tenant "
            "bbbbbbbb; it was of tenant "
            "aaaaaaaa\n"
            "    6       1    384  a6a6a6a6a6a6  -        -              -         never stored, as far as the daemon "
            "remembers; cache 7 "
            "(device:0, tenant cccccccc) has these tokens: it differs in tenant, codec\n"
            "    7       1    448  a7a7a7a7a7a7  -        -                 1.0 s  purged by an operator, from disk\n"
            "\n"
            "The daemon remembers how 12 blocks went, of at most 65536, and goes back 4 m 05 s. What it kept over a "
            "restart it finds once an engine has opened the cache again.\n");
}

TEST(Explain, OtherReasons) {
  BlockExplanation mismatch = There(BlockPlace::kMemory, "host");
  mismatch.other_tokens = true;
  BlockExplanation behind{.same_tokens_cache_id = 3};
  ExplainedPrompt prompt = Prompt(
      {Gone(BlockLoss::kChecksum, "device:1", 2), Gone(BlockLoss::kDiskRecord, "disk", 3), mismatch, behind, {}});
  prompt.explanation.others.push_back({3, "none", "host", {}});
  prompt.other_pages.push_back({32, {.blocks = {behind, {}}, .others = {{9, "none", "host", {"pageTokens"}}}}});
  const std::string text = FormatExplained(prompt);
  for (const char* const shown :
       {"0 of 5 blocks are there, 0 before the first miss\n", "dropped from device:1: its bytes had changed\n",
        "dropped from the disk: its record was wrong, or could not be read\n",
        "its name was given to other tokens: a client names blocks wrongly\n",
        "never stored, as far as the daemon remembers; cache 3 (host, tenant none) has these tokens behind others\n",
        "in pages of 32 tokens 1 of 2 blocks' tokens are there:\n"
        "  cache 9 (host, tenant none) has these tokens: it differs in pageTokens\n"}) {
    EXPECT_NE(text.find(shown), std::string::npos) << shown << "\n" << text;
  }
}

TEST(Explain, Json) {
  ExplainedPrompt prompt = Prompt({There(BlockPlace::kDisk, "disk"), Gone(BlockLoss::kEvicted, "host", 5)});
  prompt.explanation.blocks[1].owner = "\xff";  // whatever a daemon says
  const nlohmann::json json = ToJson(prompt);
  EXPECT_EQ(json["blocks"][0]["place"], "disk");
  EXPECT_EQ(json["blocks"][0]["priority"], 50);
  EXPECT_EQ(json["blocks"][0]["retained_seconds"], 0);
  EXPECT_TRUE(json["blocks"][0]["loss"].is_null());
  EXPECT_EQ(json["blocks"][1]["place"], "nowhere");
  EXPECT_EQ(json["blocks"][1]["loss"], "evicted");
  EXPECT_EQ(json["blocks"][1]["seconds_ago"], 5);
  EXPECT_EQ(json["blocks"][0]["key"], prompt.names[0].key.ToHex());
  EXPECT_EQ(json["remembered_max"], 65536);
  EXPECT_FALSE(json.dump().empty());
}

TEST(Explain, TokenIds) {
  const auto ids = ParseTokenIds(" [1, 4294967295,0]\n", "p.json");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(*ids, (std::vector<uint32_t>{1, 4294967295, 0}));
  EXPECT_TRUE(ParseTokenIds("[]", "p.json")->empty());
  EXPECT_FALSE(ParseTokenIds(std::string(1 << 20, '['), "p.json").ok());
}

TEST(Explain, SaysWhatAFileOfTokenIdsHasInstead) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "which is empty"},
      {" \n", "which is empty"},
      {"1", "begins with 1 and not with a list"},
      {"1 2 3", "begins with 1 and not with a list"},
      {"\"Once\"", "begins with \"Once\" and not with a list"},
      {"null", "begins with null and not with a list"},
      {"Once upon a time", "no JSON from byte 1 on (\"Once upon a time\")"},
      {"[1, 2] [3]", "no JSON from byte 8 on (\"[3]\")"},
      {"[1 234]", "no JSON from byte 4 on (\"234]\")"},
      {"[1", "which ends before the list does"},
      {"{}", "which is a JSON object,"},
      {"{\"n\": {\"ids\": [1]}, \"s\": \"x\"}", "which is a JSON object,"},
      {"{\"model\": \"m\", \"input_ids\": [1]}", "a JSON object with a list in \"input_ids\""},
      {"{\"input_ids\": [1]}", "`jq .input_ids` takes that out"},
      {"[-1]", "whose entry 1 is -1"},
      {"[1, 1.5]", "whose entry 2 is 1.5"},
      {"[1, 2, 4294967296]", "whose entry 3 is 4294967296"},
      {"[99999999999999999999]", "whose entry 1 is 99999999999999999999"},
      {"[\"1\"]", "whose entry 1 is \"1\""},
      {"[[1]]", "whose entry 1 is a list"},
      {"[[1]]", "of several prompts give one"},
      {"[1, {\"a\": 2}]", "whose entry 2 is an object"},
      {"\x93NUMPY\x01\x00v", "which is binary"},
  };
  for (const auto& [text, found] : cases) {
    const absl::Status status = ParseTokenIds(text, "p.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    for (const char* const words : {"--tokens is p.json, ", found, "a list in JSON", "[1, 15043, 3186]"}) {
      EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << words << " is not in: " << status;
    }
  }
}

TEST(Explain, Keys) {
  const std::string key = std::string(62, '0') + "Af";
  const auto names = ParseKeys({key, std::string(64, '1')});
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_EQ((*names)[0].key.bytes[31], 0xaf);
  EXPECT_EQ((*names)[0].tokens, TokenDigest());
  for (const std::string& wrong : {std::string("12"), std::string(64, 'g'), std::string(65, '0')}) {
    EXPECT_EQ(ParseKeys({wrong}).status().code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace kvmanager::client::cli
