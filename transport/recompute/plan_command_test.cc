#include "transport/recompute/plan_command.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr char kExample[] =
    "--tokens 4096 --batch 32 --hidden 8192 --kv-heads 64 --query-heads 64 --link-gbps 440 --tflops 700";

PlanArguments Parse(const std::string& words) {
  PlanArguments arguments;
  CLI::App app;
  AddPlanOptions(app, arguments);
  app.parse(words);
  return arguments;
}

PlanExplanation Explained(const std::string& words) {
  const auto explanation = Explain(Parse(words));
  EXPECT_TRUE(explanation.ok()) << explanation.status();
  return *explanation;
}

TEST(PlanCommand, PrintsTheTimesItWeighed) {
  EXPECT_EQ(FormatPlan(Explained(std::string(kExample) + " --chunk-tokens 64 --split-multiple 64")),
            "one layer, 32 sequences of 4096 tokens, 1 query heads per KV head\n"
            "per token: X 9.533 us, K and V 19.07 us on the link, projections 12.27 us\n"
            "\n"
            "SCHEDULE      ALL-COPY  ALL-RECOMPUTE        BEST SPLIT          TIME  OF ALL-COPY\n"
            "row           78.09 ms       50.26 ms      2496 (60.9%)      30.63 ms        0.392\n"
            "column        78.09 ms       89.31 ms      2496 (60.9%)      54.42 ms        0.697\n"
            "shared        78.09 ms       50.87 ms      3520 (85.9%)      44.54 ms        0.570\n"
            "\n"
            "recompute the first 3520 tokens, copy the other 576\n");
}

TEST(PlanCommand, SaysWhyItCopies) {
  const std::string text = FormatPlan(Explained(
      "--tokens 1000 --hidden 4096 --kv-heads 4 --query-heads 32 --head-dim 128 --link-gbps 100 --tflops 100"));
  EXPECT_NE(text.find("8 query heads per KV head"), std::string::npos) << text;
  EXPECT_NE(text.find("copy everything"), std::string::npos) << text;
  EXPECT_NE(text.find("no less of it than K and V"), std::string::npos) << text;
  EXPECT_NE(text.find("0 (all-copy)"), std::string::npos) << text;
}

TEST(PlanCommand, SaysHowFarActivationsReach) {
  const PlanExplanation all = Explained(
      "--tokens 640 --hidden 1024 --kv-heads 8 --query-heads 8 --link-gbps 1 --tflops 100 --split-multiple 64");
  EXPECT_NE(FormatPlan(all).find("recompute everything"), std::string::npos) << FormatPlan(all);
  const PlanExplanation part =
      Explained("--tokens 640 --hidden 1024 --kv-heads 8 --query-heads 8 --link-gbps 1 --tflops 100 --x-tokens 320");
  EXPECT_NE(FormatPlan(part).find("ALL X"), std::string::npos) << FormatPlan(part);
  EXPECT_NE(FormatPlan(part).find("recompute the first 320 tokens, copy the other 320"), std::string::npos);
}

TEST(PlanCommand, JsonHasSecondsAndEverySchedule) {
  const nlohmann::json json = PlanToJson(Explained(kExample));
  EXPECT_NEAR(json["kv_seconds_per_token"].get<double>(), 19.07e-6, 0.01e-6);
  EXPECT_EQ(json["schedules"].size(), 3);
  EXPECT_EQ(json["split_tokens"], json["schedules"]["shared"]["split_tokens"]);
  EXPECT_NEAR(json["schedules"]["shared"]["seconds"].get<double>() /
                  json["schedules"]["shared"]["all_copy_seconds"].get<double>(),
              0.563, 0.01);
  EXPECT_EQ(nlohmann::json::parse(json.dump()), json);
}

TEST(PlanCommand, WrongNumbersAreNamedAsTheyWereGiven) {
  const auto field = [](const std::string& words) { return DetailOf(Explain(Parse(words)).status()).field; };
  const std::string shape = "--tokens 10 --hidden 64 --kv-heads 2 --query-heads 2 ";
  EXPECT_EQ(field(shape + "--link-gbps 0 --tflops 1"), "--link-gbps");
  EXPECT_EQ(field(shape + "--link-gbps nan --tflops 1"), "--link-gbps");
  EXPECT_EQ(field(shape + "--link-gbps 1e30 --tflops 1"), "--link-gbps");
  EXPECT_EQ(field(shape + "--link-gbps 1 --tflops 1e30"), "--tflops");
  EXPECT_EQ(field(shape + "--link-gbps 1 --tflops 1 --link-latency-us 1e18"), "--link-latency-us");
  EXPECT_EQ(field("--tokens 0 --hidden 64 --kv-heads 2 --query-heads 2 --link-gbps 1 --tflops 1"), "tokens");
  // What may come from a daemon is missed where it is needed, the rest at once.
  EXPECT_EQ(field("--tokens 10"), "--link-gbps");
  EXPECT_EQ(field("--tokens 10 --link-gbps 1 --tflops 1 --kv-heads 2 --query-heads 2"), "hidden");
  EXPECT_THROW(Parse("--hidden 64"), CLI::ParseError);
}

TEST(PlanCommand, HelpTeachesWithAnExampleThatRuns) {
  PlanArguments arguments;
  CLI::App app;
  AddPlanOptions(app, arguments);
  const std::string help = app.help();
  for (const char* const word : {"row", "column", "shared", "--kv-bytes-per-token", "kvctl recompute-plan --tokens"}) {
    EXPECT_NE(help.find(word), std::string::npos) << word;
  }
  // Its first example, as it stands there.
  const std::string name = "kvctl recompute-plan ";
  const size_t begin = help.find(name) + name.size();
  std::string example = help.substr(begin, help.find("tflops 700", begin) + 10 - begin);
  example.erase(example.find('\\'), 1);
  example.erase(example.find('\n'), 1);
  EXPECT_EQ(Explained(example).shape.hidden, 8192);
}

}  // namespace
}  // namespace kvmanager::recompute
