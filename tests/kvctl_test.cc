// kvctl against a daemon: every command, --json, and its exit status.
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/projected_source.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

class KvctlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start({}));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }
  void TearDown() override { client_.reset(); }
  CommandResult Run(const std::vector<std::string>& words) {
    std::vector<std::string> argv = {DataPath("client/cli/kvctl"), "--connect", daemon_->listen()};
    argv.insert(argv.end(), words.begin(), words.end());
    absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? *result : CommandResult{-1, ""};
  }
  // What it prints to either.
  CommandResult RunWithErrors(const std::vector<std::string>& words) {
    std::vector<std::string> argv = {"/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", DataPath("client/cli/kvctl")};
    argv.insert(argv.end(), words.begin(), words.end());
    absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? *result : CommandResult{-1, ""};
  }
  nlohmann::json Ask(std::vector<std::string> words) {
    words.push_back("--json");
    const CommandResult result = Run(words);
    EXPECT_EQ(result.status, 0) << result.output;
    nlohmann::json answer = nlohmann::json::parse(result.output, nullptr, false);
    EXPECT_FALSE(answer.is_discarded()) << result.output;
    return answer;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(KvctlTest, ListsDrainsAndPurges) {
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{71, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 130, 130));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 2)));
  for (const char* const word : {"status", "caches", "sequences", "peers"}) {
    Ask({word});
    const CommandResult text = Run({word});
    EXPECT_EQ(text.status, 0) << word;
    EXPECT_TRUE(std::string(word) == "peers" || !text.output.empty()) << word;
  }
  EXPECT_NE(Ask({"caches"}).dump().find("test-model"), std::string::npos);
  const nlohmann::json held = Ask({"sequences"})["sequences"][0];
  EXPECT_EQ(held["tokens"], 130);
  EXPECT_EQ(held["client"], "client");  // Client::Options::name
  EXPECT_EQ(held["pid"], getpid());
  ASSERT_OK_AND_ASSIGN(const client::SequenceDescription info, made.sequence->Info());
  EXPECT_EQ(info.pid, uint32_t(getpid()));
  EXPECT_EQ(info.client, "client");

  const nlohmann::json peers = Ask({"peers", "127.0.0.1:1", "127.0.0.1:2"})["peers"];
  ASSERT_EQ(peers.size(), 2u);
  EXPECT_EQ(peers[1]["peer"], "127.0.0.1:2");
  EXPECT_TRUE(peers[1].contains("load_error")) << peers;

  Ask({"drain"});
  ASSERT_OK_AND_ASSIGN(client::DaemonDescription status, client_->Status());
  EXPECT_TRUE(status.draining);
  ASSERT_OK(client_->Drain(false));
  made.sequence.reset();
  Ask({"purge", "--all"});
  ASSERT_OK_AND_ASSIGN(status, client_->Status());
  EXPECT_EQ(status.published_blocks, 0u);
}

TEST_F(KvctlTest, LimitsShowWhatIsUsed) {
  constexpr uint64_t kArena = 1 << 20;
  ASSERT_OK_AND_ASSIGN(auto arena, client_->CreateArena(kArena));
  const CacheOptions options = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  std::vector<CreatedSequence> held;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    held.push_back(std::move(made));
  }
  ASSERT_OK_AND_ASSIGN(auto other, Client::Connect(daemon_->listen(), {}));
  ASSERT_OK(Load(*cache, held[0].sequence->id(), Source{73, Kind::kNormal, options}, 0, 10, 10));
  const nlohmann::json list = Ask({"limits"})["limits"];
  const auto find = [&](const char* name) {
    for (const nlohmann::json& limit : list) {
      if (limit["name"] == name) return limit;
    }
    ADD_FAILURE() << name << " is not listed";
    return nlohmann::json::object();
  };
  EXPECT_EQ(find("arena_bytes")["used"], kArena);
  EXPECT_EQ(find("arena_bytes")["flag"], "--arena-bytes");
  EXPECT_EQ(find("connection_arena_bytes")["used"], kArena);
  EXPECT_EQ(find("connection_arenas")["used"], 1);
  EXPECT_EQ(find("connection_sequences")["used"], 3);
  EXPECT_EQ(find("sequences")["used"], 3);
  EXPECT_EQ(find("tenant_sequences")["used"], 3);
  EXPECT_EQ(find("caches")["used"], 1);
  EXPECT_EQ(find("connections")["used"], 2);
  EXPECT_EQ(find("process_connections")["used"], 2) << "of this process";
  EXPECT_EQ(find("tcp_connections")["used"], 0);
  EXPECT_GE(find("admin_connections")["used"], 1) << "kvctl's own, and one that has just ended";
  EXPECT_GT(find("host_pool_bytes")["used"], 0);
  EXPECT_GE(find("tenant_pool_bytes")["used"], find("host_pool_bytes")["used"]);
  EXPECT_EQ(find("lease_pages")["used"], 0);
  EXPECT_EQ(find("waiting_hand_offs")["used"], 0);
  EXPECT_TRUE(find("hello_ms")["used"].is_null());
  EXPECT_EQ(find("hello_ms")["limit"], 10000);
  for (const nlohmann::json& limit : list) {
    if (limit["used"].is_null()) continue;
    EXPECT_LE(limit["used"], limit["limit"]) << limit;
  }
  const CommandResult text = Run({"limits"});
  EXPECT_EQ(text.status, 0);
  for (const char* const shown : {"NAME", "connection_arenas", "1.0 MiB", "--arena-bytes", "fixed", "10000 ms"}) {
    EXPECT_NE(text.output.find(shown), std::string::npos) << shown << "\n" << text.output;
  }
  held.clear();
  arena.reset();
  EXPECT_TRUE(Eventually([&] {
    const auto limits = client_->Limits();
    if (!limits.ok()) return false;
    for (const client::LimitDescription& limit : *limits) {
      if ((limit.name == "sequences" || limit.name == "connection_arena_bytes") && limit.used != 0u) return false;
    }
    return true;
  }));
}

TEST_F(KvctlTest, TopShowsWhatHappensNow) {
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{72, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 130, 130));
  EXPECT_FALSE(made.sequence->Crop(10000).ok());
  const CommandResult once = Run({"top", "--once", "--interval", "0.1"});
  EXPECT_EQ(once.status, 0);
  EXPECT_EQ(once.output.find('\x1b'), std::string::npos);  // plain where it is no terminal
  for (const char* const shown : {"kvmanagerd ", "host ", "test-model", "client ", "crop  INVALID_ARGUMENT"}) {
    EXPECT_NE(once.output.find(shown), std::string::npos) << shown << "\n" << once.output;
  }
  const nlohmann::json seen = Ask({"top", "--once", "--interval", "0.1"});
  EXPECT_EQ(seen["tiers"][0]["tier"], "host");
  EXPECT_GT(seen["tiers"][0]["used_bytes"], 0);
  EXPECT_EQ(seen["errors"][0]["method"], "crop");
  EXPECT_EQ(seen["sequences"][0]["tokens"], 130);
  EXPECT_GT(seen["calls_per_second"], 0);  // kvctl's own
  for (const std::string& interval : {std::string("0"), std::string("3601"), std::string("x")}) {
    EXPECT_EQ(Run({"top", "--once", "--interval", interval}).status, 2);
  }
  // Watched, and the watcher goes away.
  ASSERT_OK_AND_ASSIGN(auto watching, ChildProcess::Start({DataPath("client/cli/kvctl"), "--connect", daemon_->listen(),
                                                           "top", "--interval", "0.1"}));
  for (int pictures = 0; pictures < 2;) {
    ASSERT_OK_AND_ASSIGN(const std::string line, watching->ReadLine());
    if (line.rfind("kvmanagerd ", 0) == 0) ++pictures;
  }
}

TEST_F(KvctlTest, TopShowsADiskWhereThereIsOne) {
  const std::vector<std::string> top = {"top", "--once", "--interval", "0.1"};
  EXPECT_EQ(Run(top).output.find("\ndisk "), std::string::npos);
  EXPECT_TRUE(Ask(top)["disk"].is_null());
  client_.reset();
  TempDir directory;
  DaemonOptions with_disk;
  with_disk.more_flags = {"--disk-path", directory.path() + "/disk", "--disk-bytes", "64MiB"};
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(with_disk));
  ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  {
    const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2");
    const Source source{73, Kind::kNormal, options};
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 130, 130));
    ASSERT_OK(made.sequence->Publish(Names(*cache, source, 2)));
  }
  EXPECT_TRUE(Eventually([&] { return Ask(top)["disk"]["blocks"] == 2; }));
  const nlohmann::json seen = Ask(top);
  EXPECT_GT(seen["disk"]["used_bytes"], 0);
  EXPECT_EQ(seen["disk"]["unwritten_blocks"], 0);
  EXPECT_EQ(seen["hit_blocks_by_tier"]["disk"], 0);
  const std::string text = Run(top).output;
  for (const char* const shown :
       {"\ndisk ", ", 2 blocks\n", "0 unwritten, 0 errors\n", "from host 0, GPU 0, disk 0\n"}) {
    EXPECT_NE(text.find(shown), std::string::npos) << shown << "\n" << text;
  }
  client_.reset();
  daemon_.reset();  // before its folder goes
}

TEST_F(KvctlTest, PlansByWhatTheDaemonMeasured) {
  const ProjectedSource source;
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(source.shape));
  const std::string id = std::to_string(cache->description().id);
  const std::vector<std::string> plan = {"recompute-plan", "--tokens", "640", "--cache", id, "--link-gbps", "0.002"};
  EXPECT_EQ(Run(plan).status, 1);  // nobody registered projections
  ASSERT_OK_AND_ASSIGN(auto projections, RegisterAll(*cache, source));
  const CommandResult told = Run(plan);
  EXPECT_EQ(told.status, 0);
  EXPECT_NE(told.output.find("projections: "), std::string::npos) << told.output;
  const nlohmann::json answer = Ask(plan);
  EXPECT_EQ(answer["link_bytes_per_second"], 250000);
  EXPECT_GT(answer["compute_flops_per_second"], 0);
  EXPECT_EQ(answer["split_tokens"], 640);  // X is half of K and V, and no processor is slower than this link
  EXPECT_EQ(Run({"recompute-plan", "--tokens", "640", "--cache", id}).status, 1);  // no pages came from anywhere
  EXPECT_EQ(Run({"recompute-plan", "--tokens", "640", "--cache", "77"}).status, 1);
  EXPECT_EQ(Run({"recompute-plan", "--tokens", "640", "--cache", "x"}).status, 2);
  EXPECT_EQ(Run({"recompute-plan", "--tokens", "640"}).status, 2);
}

TEST_F(KvctlTest, FindsTheAdminSocketOrIsTold) {
  const std::string program = DataPath("client/cli/kvctl");
  for (const std::vector<std::string>& flags : std::vector<std::vector<std::string>>{
           {"--connect", daemon_->listen()},
           {"--connect", daemon_->admin()},
           {"--connect", "unix:/nowhere", "--admin", daemon_->admin()},
           {"--connect", "tcp:127.0.0.1:1", "--admin", daemon_->admin()},
       }) {
    std::vector<std::string> argv = {program, "status"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    ASSERT_OK_AND_ASSIGN(const CommandResult result, RunCommand(argv));
    EXPECT_EQ(result.status, 0) << flags[1];
  }
  EXPECT_EQ(Run({"--admin", "unix:/nowhere", "status"}).status, 1);
  EXPECT_EQ(Run({"--token-file", "/nowhere", "status"}).status, 1);
}

TEST_F(KvctlTest, SaysWhatIsWrong) {
  EXPECT_NE(Run({"no-such-command"}).status, 0);
  EXPECT_NE(Run({}).status, 0);
  EXPECT_EQ(Run({"--help"}).status, 0);
  const absl::StatusOr<CommandResult> nowhere =
      RunCommand({DataPath("client/cli/kvctl"), "--connect", "unix:/nonexistent/kv.sock", "--json", "status"});
  ASSERT_OK(nowhere);
  EXPECT_NE(nowhere->status, 0);
}

TEST_F(KvctlTest, SimulatesEviction) {
  TempDir directory;
  const std::string trace = directory.path() + "/trace.jsonl", svg = directory.path() + "/hits.svg";
  std::ofstream(trace) << "{\"timestamp\": 0, \"input_length\": 1536, \"output_length\": 1, \"hash_ids\": [0, 1, 2]}\n"
                       << "{\"timestamp\": 9, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [3]}\n"
                       << "{\"timestamp\": 9, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [4]}\n"
                       << "{\"timestamp\": 9, \"input_length\": 1536, \"output_length\": 1, \"hash_ids\": [0, 1, 2]}\n";
  const nlohmann::json answer = Ask({"simulate", "--trace", trace, "--tier", "host=4", "--tier", "disk=8", "--policy",
                                     "lru,optimum", "--block-bytes", "1", "--svg", svg, "--quiet"});
  ASSERT_EQ(answer["runs"].size(), 2u);
  EXPECT_EQ(answer["runs"][0]["policy"], "lru");
  EXPECT_EQ(answer["runs"][0]["hit_ratio"], 3.0 / 8);
  EXPECT_EQ(answer["runs"][0]["tiers"][0]["hit_blocks"], 2);
  EXPECT_EQ(answer["runs"][0]["tiers"][1]["hit_blocks"], 1);  // what the host evicted
  EXPECT_EQ(answer["runs"][1]["tiers"][0]["hit_blocks"], 3);
  std::ifstream plot(svg);
  EXPECT_NE(std::string(std::istreambuf_iterator<char>(plot), {}).find("<polyline"), std::string::npos);
  // A block of hack K3 V2: 512 tokens of 32 layers and 8 heads, at 90 bytes.
  EXPECT_EQ(Ask({"simulate", "--trace", trace, "--codec", "hack:k_bits=3,v_bits=2", "--quiet"})["block_bytes"],
            512 * 32 * 8 * 90);
  const nlohmann::json ladder = Ask({"simulate", "--trace", trace, "--tier", "host=1GiB", "--quiet", "--codec",
                                     "ladder=hack:k_bits=4,v_bits=4>hack:k_bits=3,v_bits=2"});
  EXPECT_EQ(ladder["rung_bytes"], nlohmann::json({512 * 32 * 8 * 138, 512 * 32 * 8 * 90}));
  EXPECT_EQ(ladder["runs"].size(), 2u);  // lru and cost: the optimum's blocks have one size
  EXPECT_EQ(ladder["runs"][0]["rungs"].size(), 2u);
  EXPECT_EQ(Ask({"simulate", "--trace", trace, "--tier", "host=4", "--rung-bytes", "2,1", "--quiet"})["rung_bytes"],
            nlohmann::json({2, 1}));
  EXPECT_NE(Run({"simulate", "--trace", trace, "--quiet"}).output.find("optimum"), std::string::npos);
  EXPECT_NE(Run({"simulate", "--help"}).output.find("hash_ids"), std::string::npos);
  EXPECT_EQ(Run({"simulate", "--trace", "/nowhere"}).status, 1);
  EXPECT_EQ(Run({"simulate", "--trace", trace, "--tier", "host"}).status, 2);
  EXPECT_EQ(Run({"simulate", "--trace", trace, "--rung-bytes", "1,2"}).status, 2);
  EXPECT_EQ(Run({"simulate", "--trace", trace, "--rung-bytes", "2,1", "--block-bytes", "2"}).status, 2);
  EXPECT_EQ(Run({"simulate"}).status, 2);
}

TEST_F(KvctlTest, SimulateRefusesATraceThatCannotBe) {
  TempDir directory;
  const std::string trace = directory.path() + "/trace.jsonl";
  const auto refuses = [&](const std::string& second_line, const std::string& words) {
    std::ofstream(trace) << "{\"timestamp\": 5, \"input_length\": 700, \"hash_ids\": [0, 1]}\n" << second_line << "\n";
    const CommandResult result = RunWithErrors({"simulate", "--trace", trace, "--quiet"});
    EXPECT_EQ(result.status, 1) << result.output;
    EXPECT_NE(result.output.find(trace + ", line 2: " + words), std::string::npos) << words << "\n" << result.output;
  };
  refuses("{\"timestamp\": 5, \"input_length\": 2000, \"hash_ids\": [0, 1]}",
          "input_length is 2000, must be 513..1535");
  refuses("{\"timestamp\": 4, \"input_length\": 700, \"hash_ids\": [0, 1]}", "timestamp is 4, must be 5 or more");
  refuses("{\"session_id\": 1, \"input_length\": 700, \"hash_ids\": [0, 1]}", "session_id is 1, must be absent");
  const CommandResult one_tier = RunWithErrors({"simulate", "--trace", trace, "--write-named"});
  EXPECT_EQ(one_tier.status, 2);
  EXPECT_NE(one_tier.output.find("--write-named is given with one tier, must be given with a second --tier"),
            std::string::npos)
      << one_tier.output;
}

// 2: by itself, so there is no daemon, and no file is read. 1: something else did not do it.
TEST_F(KvctlTest, ExitCodesSayWhatWasWrong) {
  TempDir directory;
  const std::string key(64, '0'), out = directory.path() + "/x.safetensors", nowhere = "unix:/nonexistent/kv.sock";
  const auto run_at = [](const std::string& address, const std::vector<std::string>& words) {
    std::vector<std::string> argv = {DataPath("client/cli/kvctl"), "--connect", address};
    argv.insert(argv.end(), words.begin(), words.end());
    const absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? result->status : -1;
  };
  const auto line = [](const std::vector<std::string>& words) {
    std::string all;
    for (const std::string& word : words) all += " " + word;
    return all;
  };
  EXPECT_NE(RunWithErrors({"statu"}).output.find("there is no command statu"), std::string::npos);
  EXPECT_EQ(run_at("nonsense", {"status"}), 2);
  EXPECT_EQ(run_at("tcp:127.0.0.1:1", {"status", "--tls-ca", "/nowhere"}), 2);
  EXPECT_EQ(run_at("tls:127.0.0.1:1", {"status", "--tls-cert", "/nowhere"}), 2);
  EXPECT_EQ(run_at("tls:127.0.0.1:1", {"status", "--tls-ca", "/nowhere"}), 1) << "a file";
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {},
           {"no-such-command"},
           {"status", "--no-such-flag"},
           {"status", "--deadline-ms", "0"},
           {"top", "--interval", "0"},
           {"explain"},
           {"explain", "--keys", "12"},
           {"retain", "--cache", "1", "--keys", key, "--priority", "50", "--ttl-s", "nan"},
           {"retain", "--cache", "1", "--keys", key, "--priority", "50", "--blocks", "3"},
           {"retain", "--cache", "1", "--keys", "12", "--priority", "50"},
           {"retain", "--cache", "1", "--priority", "50"},
           {"upgrade", "--wait-s", "0"},
           {"purge"},
           {"purge", "--cache", "x"},
           {"recompute-plan", "--tokens", "640"},
           {"recompute-plan", "--tokens", "640", "--cache", "x"},
           {"simulate"},
           {"simulate", "--trace", "/nowhere", "--tier", "host"},
           {"simulate", "--trace", "/nowhere", "--policy", "fifo"},
           {"simulate", "--trace", "/nowhere", "--codec", "no-such-codec"},
           {"simulate", "--trace", "/nowhere", "--least-chance", "0.1"},
           {"calibrate", "--out", out},
           {"calibrate", "--model", "/nowhere", "--text", "/nowhere", "--out", out},
           {"calibrate", "--model", "/nowhere", "--text", "/nowhere", "--codec", "zack", "--out", "x.txt"},
           {"calibrate", "--model", "/nowhere", "--text", "/nowhere", "--codec", "zack", "--out", out, "--window", "1"},
           {"capture", "--model", "/nowhere", "--text", "/nowhere", "--tokens", "3", "--out", out},
           {"tune", "--model", "/nowhere", "--text", "/nowhere", "--max-loss", "x"}}) {
    EXPECT_EQ(run_at(nowhere, words), 2) << line(words);
  }
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"status"},
                                             {"top", "--once"},
                                             {"caches"},
                                             {"sequences"},
                                             {"peers"},
                                             {"limits"},
                                             {"explain", "--keys", key},
                                             {"retain", "--cache", "1", "--keys", key, "--priority", "50"},
                                             {"drain"},
                                             {"undrain"},
                                             {"upgrade"},
                                             {"purge", "--all"},
                                             {"recompute-plan", "--tokens", "640", "--cache", "1"}}) {
    EXPECT_EQ(run_at(nowhere, words), 1) << line(words);
  }
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"explain", "--cache", "99", "--tokens", "/nowhere"},
           {"retain", "--cache", "99", "--keys", key, "--priority", "50"},
           {"purge", "--cache", "99"},
           {"upgrade"},  // it has no --state-dir
           {"simulate", "--trace", "/nowhere"},
           {"simulate", "--trace", directory.path()},
           {"calibrate", "--model", "/nowhere", "--text", "/nowhere", "--codec", "zack", "--out", out},
           {"capture", "--model", "/nowhere", "--text", "/nowhere", "--tokens", "640", "--out", out},
           {"tune", "--model", "/nowhere", "--text", "/nowhere"}}) {
    EXPECT_EQ(run_at(daemon_->listen(), words), 1) << line(words);
  }
  const std::string help = Run({"--help"}).output;
  for (const char* const words : {"Exit code of every command", "0  done", "1  not done", "2  the command line"}) {
    EXPECT_NE(help.find(words), std::string::npos) << words;
  }
}

TEST_F(KvctlTest, SaysThatNobodyGotItsOutput) {
  TempDir directory;
  const std::string trace = directory.path() + "/trace.jsonl";
  std::ofstream(trace) << "{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [0]}\n";
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"status"}, {"caches"}, {"simulate", "--quiet", "--trace", trace}}) {
    std::vector<std::string> argv = {
        "/bin/sh",        "-c", "exec \"$@\" > /dev/full 2> /dev/null", "sh", DataPath("client/cli/kvctl"), "--connect",
        daemon_->listen()};
    argv.insert(argv.end(), words.begin(), words.end());
    ASSERT_OK_AND_ASSIGN(const CommandResult result, RunCommand(argv));
    EXPECT_EQ(result.status, 1) << words[0];
  }
}

}  // namespace
}  // namespace kvmanager::testing
