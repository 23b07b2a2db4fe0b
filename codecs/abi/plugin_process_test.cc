#include "codecs/abi/plugin_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "codecs/abi/plugin_codec.h"
#include "codecs/abi/process_entries.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 2, 64, 64};
constexpr int kRows = 4;
constexpr int64_t kShortMs = 500;  // of calls that never answer

std::string DataFile(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/", name);
}
std::string BadPath(const std::string& variant) { return DataFile(absl::StrCat("bad/", variant, ".so")); }

/// What was told; any thread.
class Told final : public CodecEvents {
 public:
  void OnDecodedPages(size_t pages) override { decoded_pages += pages; }
  void OnError(Entry, const absl::Status& error, bool) override {
    MutexLock lock(mutex_);
    error_ = error;
  }
  void OnProcess(absl::string_view codec) override { ++processes; }
  void OnUnanswered(absl::string_view codec) override { ++unanswered; }
  void OnProcessEnded(absl::string_view codec, const absl::Status& why, int64_t) override {
    {
      MutexLock lock(mutex_);
      why_ = std::string(why.message());
    }
    ++ends;
  }
  absl::Status error() {
    MutexLock lock(mutex_);
    return error_;
  }
  std::string why() {
    MutexLock lock(mutex_);
    return why_;
  }
  std::atomic<size_t> decoded_pages{0}, unanswered{0}, processes{0}, ends{0};

 private:
  Mutex mutex_;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::string why_ ABSL_GUARDED_BY(mutex_);
};

bool Eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

/// A plug-in in a process, and a codec of it.
struct InProcess {
  static InProcess Start(const std::string& path, int64_t call_ms = PluginProcess::kCallMsMax, int lanes = 1) {
    InProcess made;
    made.told = std::make_unique<Told>();
    PluginProcess::Options options;
    options.program = {DataFile("plugin_host_main")};
    options.path = path;
    options.lanes = lanes;
    options.events = made.told.get();
    options.call_ms = call_ms;
    auto process = PluginProcess::Start(std::move(options));
    EXPECT_TRUE(process.ok()) << process.status();
    if (!process.ok()) std::abort();
    made.process = *std::move(process);
    return made;
  }
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecParameters& parameters = {}) const {
    return MakePluginCodec(MakeProcessSource(process), Context(), parameters, told.get());
  }
  static CodecContext Context() {
    CodecContext context;
    context.layout = kLayout;
    context.layers = 2;
    context.query_heads = 8;
    return context;
  }
  bool IsUp() const {
    return Eventually([this] { return process->pid() != 0; });
  }

  std::unique_ptr<Told> told;  // outlives the process
  std::shared_ptr<PluginProcess> process;
};

AlignedBuffer NormalPage(uint32_t seed) {
  AlignedBuffer raw(kLayout.raw_bytes());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) StoreElement(raw.data(), kLayout.dtype, i, normal(random));
  return raw;
}

AlignedBuffer EncodePage(const Codec& codec, const AlignedBuffer& raw, bool* declined) {
  AlignedBuffer encoded(codec.info().encoded_bytes + 64), workspace(codec.encode_workspace_bytes() + 64);
  std::memset(encoded.data(), 0x5a, encoded.size());
  EncodeItem item = {raw.data(), encoded.data(), 0, 0, false};
  codec.Encode(absl::MakeSpan(&item, 1), workspace.span());
  *declined = item.declined;
  return encoded;
}

struct State {
  State() : acc(kRows * kLayout.head_dim * 4) {
    std::fill_n(max, kRows, -std::numeric_limits<float>::infinity());
    std::memset(acc.data(), 0, acc.size());
  }
  SoftmaxRows rows() { return {max, sum, reinterpret_cast<float*>(acc.data())}; }
  friend bool operator==(const State& a, const State& b) {
    return std::memcmp(a.max, b.max, sizeof a.max) == 0 && std::memcmp(a.sum, b.sum, sizeof a.sum) == 0 &&
           std::memcmp(a.acc.data(), b.acc.data(), a.acc.size()) == 0;
  }
  bool has_nan() const { return std::isnan(reinterpret_cast<const float*>(acc.data())[0]); }
  float max[kRows], sum[kRows] = {};
  AlignedBuffer acc;
};

void Attend(const PageAttention& attention, absl::Span<const uint8_t* const> pages, int head, bool announced,
            State& state) {
  AlignedBuffer q(kRows * kLayout.head_dim * 4), workspace(attention.workspace_bytes(kRows) + 64);
  for (int i = 0; i < kRows * kLayout.head_dim; ++i) reinterpret_cast<float*>(q.data())[i] = float(i % 7) * 0.1f;
  PageAttentionTask task;
  task.q = reinterpret_cast<const float*>(q.data());
  task.rows = kRows;
  task.scale = 0.125f;
  task.kv_head = head;
  task.pages = pages;
  task.announced = announced;
  attention.Attend(task, state.rows(), workspace.span());
}

TEST(PluginProcessTest, BytesAndResultsAreThoseOfThePluginInThisProcess) {
  const InProcess there = InProcess::Start(DataFile("hack.so"));
  const auto plugin = CodecPlugin::Load(DataFile("hack.so"));
  ASSERT_TRUE(plugin.ok()) << plugin.status();
  for (const CodecParameters& parameters : {CodecParameters{}, CodecParameters{{"k_bits", "2"}, {"v_bits", "2"}}}) {
    const auto codec = there.Make(parameters);
    ASSERT_TRUE(codec.ok()) << codec.status();
    const auto here = MakePluginCodec(*plugin, InProcess::Context(), parameters, nullptr);
    ASSERT_TRUE(here.ok()) << here.status();
    EXPECT_EQ((*codec)->info().spec, (*here)->info().spec);
    EXPECT_EQ((*codec)->info().encoded_bytes, (*here)->info().encoded_bytes);
    EXPECT_EQ(WaitingWorkers(**codec), there.process->workers());
    EXPECT_EQ(WaitingWorkers(**here), nullptr);
    // More pages than go at once.
    std::vector<AlignedBuffer> encoded;
    std::vector<const uint8_t*> pages;
    const size_t page_bytes = (*codec)->info().encoded_bytes;
    for (uint32_t seed = 0; seed < 70; ++seed) {
      const AlignedBuffer raw = NormalPage(seed);
      bool declined = false, declined_here = false;
      encoded.push_back(EncodePage(**codec, raw, &declined));
      const AlignedBuffer expected = EncodePage(**here, raw, &declined_here);
      EXPECT_FALSE(declined || declined_here);
      ASSERT_EQ(std::memcmp(encoded.back().data(), expected.data(), page_bytes + 64), 0) << seed;
      pages.push_back(encoded.back().data());
    }
    AlignedBuffer decoded(kLayout.raw_bytes()), decoded_here(kLayout.raw_bytes());
    const DecodeItem there_item = {pages[3], decoded.data(), 1}, here_item = {pages[3], decoded_here.data(), 1};
    (*codec)->Decode({&there_item, 1});
    (*here)->Decode({&here_item, 1});
    EXPECT_EQ(std::memcmp(decoded.data(), decoded_here.data(), decoded.size()), 0);
    // The second head finds the pages in the lane; other pages at the same number of pages do not.
    for (const size_t first : {0u, 30u}) {
      const auto some = absl::MakeConstSpan(pages).subspan(first, 5);
      for (int head = 0; head < 2; ++head) {
        State got, expected;
        Attend((*codec)->attention(), some, head, head > 0, got);
        Attend((*here)->attention(), some, head, head > 0, expected);
        EXPECT_TRUE(got == expected) << first << " " << head;
      }
    }
    State got, expected;
    Attend((*codec)->attention(), pages, 1, true, got);
    Attend((*here)->attention(), pages, 1, true, expected);
    EXPECT_NEAR(got.sum[0], expected.sum[0], 1e-4 * expected.sum[0]);
    EXPECT_TRUE((*codec)->Validate(1, {pages[0], page_bytes}).ok());
    AlignedBuffer wrong(page_bytes);
    std::memset(wrong.data(), 0xff, page_bytes);
    const absl::Status refused = (*codec)->Validate(0, wrong.span());
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
    EXPECT_EQ(refused, (*here)->Validate(0, wrong.span()));
  }
  const absl::Status refused = there.Make({{"k_bits", "99"}}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("k_bits"), absl::string_view::npos) << refused;
  EXPECT_EQ(there.told->ends, 0u);
}

TEST(PluginProcessTest, ErrorsOfTheStartAreThePlugins) {
  const auto start = [](const std::string& path) {
    PluginProcess::Options options;
    options.program = {DataFile("plugin_host_main")};
    options.path = path;
    return PluginProcess::Start(std::move(options)).status();
  };
  EXPECT_EQ(start("/nonexistent/codec.so").code(), absl::StatusCode::kNotFound);
  const absl::Status refused = start(BadPath("bad_null_entry"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("table entry decode_batch is NULL"), absl::string_view::npos) << refused;
  PluginProcess::Options options;
  options.program = {"/nonexistent/program"};
  EXPECT_EQ(PluginProcess::Start(std::move(options)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(InProcess::Start(BadPath("bad_create")).Make().status().message().find("the moon is in the wrong phase"),
            absl::string_view::npos);
  const absl::Status huge = InProcess::Start(BadPath("bad_size_huge")).Make().status();
  EXPECT_EQ(huge.code(), absl::StatusCode::kInvalidArgument) << huge;
}

TEST(PluginProcessTest, ACrashDeclinesThePageAndThePluginServesAgain) {
#ifdef KVMANAGER_SANITIZED  // LeakSanitizer cannot look for leaks there, and changes the status
  constexpr char kExited[] = "exited with status";
#else
  constexpr char kExited[] = "exited with status 0";
#endif
  const std::pair<const char*, const char*> kCases[] = {{"bad_crashes", "signal 6"}, {"bad_exits", kExited}};
  for (const auto& [variant, says] : kCases) {
    const InProcess there = InProcess::Start(BadPath(variant));
    const auto codec = there.Make();
    ASSERT_TRUE(codec.ok()) << codec.status();
    const AlignedBuffer raw = NormalPage(1);
    for (size_t end = 1; end <= 2; ++end) {
      bool declined = false;
      EncodePage(**codec, raw, &declined);
      EXPECT_TRUE(declined);
      ASSERT_TRUE(Eventually([&] { return there.told->ends == end; }));
      EXPECT_NE(there.told->why().find(says), std::string::npos) << there.told->why();
      EXPECT_EQ(there.told->error().code(), absl::StatusCode::kUnavailable);
      ASSERT_TRUE(there.IsUp());
      // The codec is made again there.
      EXPECT_TRUE((*codec)->Validate(0, raw.span()).ok());
    }
  }
}

TEST(PluginProcessTest, ALoopIsEndedAndCountedAsNoAnswer) {
  const InProcess there = InProcess::Start(BadPath("bad_attend_loops"), kShortMs);
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  const AlignedBuffer raw = NormalPage(2);
  const uint8_t* const page = raw.data();
  State state;
  EXPECT_EQ(UnansweredBy(**codec), 0u);
  Attend((*codec)->attention(), {&page, 1}, 0, false, state);
  // Decoding instead finds no process, or the next one.
  EXPECT_EQ(state.has_nan(), UnansweredBy(**codec) == 1);
  ASSERT_TRUE(Eventually([&] { return there.told->ends == 1; }));
  EXPECT_NE(there.told->why().find("did not answer within 500 ms (attend_batch)"), std::string::npos)
      << there.told->why();
  ASSERT_TRUE(there.IsUp());
  EXPECT_TRUE((*codec)->Validate(0, raw.span()).ok());
}

TEST(PluginProcessTest, WhatAPluginWritesBeyondItsPageReachesNoMemoryOfTheDaemon) {
  const InProcess there = InProcess::Start(BadPath("bad_writes_past"));
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  const AlignedBuffer raw = NormalPage(3);
  bool declined = true;
  const AlignedBuffer encoded = EncodePage(**codec, raw, &declined);
  EXPECT_FALSE(declined);
  EXPECT_EQ(std::memcmp(encoded.data(), raw.data(), raw.size()), 0);
  EXPECT_EQ(encoded.data()[raw.size()], 0x5a);
}

TEST(PluginProcessTest, AGarbledAnswerEndsTheProcess) {
  const InProcess there = InProcess::Start(BadPath("bad_answers"));
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  const AlignedBuffer raw = NormalPage(4);
  bool declined = false;
  EncodePage(**codec, raw, &declined);
  EXPECT_TRUE(declined);
  ASSERT_TRUE(Eventually([&] { return there.told->ends == 1; }));
  EXPECT_NE(there.told->why().find("answered 7 bytes"), std::string::npos) << there.told->why();
}

TEST(PluginProcessTest, ValuesThatAreNotFiniteAreAnErrorAndThePageIsDecodedInstead) {
  const InProcess there = InProcess::Start(BadPath("bad_attend_nan"));
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  const AlignedBuffer raw = NormalPage(5);
  const uint8_t* const page = raw.data();
  State got, expected;
  Attend((*codec)->attention(), {&page, 1}, 1, false, got);
  Attend(*MakeRawAttention(kLayout), {&page, 1}, 1, false, expected);
  EXPECT_TRUE(got == expected);
  EXPECT_NE(there.told->error().message().find("not finite"), absl::string_view::npos) << there.told->error();
  EXPECT_EQ(there.told->decoded_pages, 1u);
  EXPECT_EQ(UnansweredBy(**codec), 0u);
}

TEST(PluginProcessTest, APluginReachesNothingOfTheSystem) {
  const InProcess there = InProcess::Start(BadPath("bad_escapes"));
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  bool declined = false;
  EncodePage(**codec, NormalPage(6), &declined);
  EXPECT_TRUE(declined);
  const std::string text(there.told->error().message());
  EXPECT_NE(text.find("encode_batch: nothing"), std::string::npos) << text;
}

TEST(PluginProcessTest, KillingTheProcessUnderLoadLosesNothingAndLeaksNothing) {
  const auto descriptors = [] {
    const auto all = std::filesystem::directory_iterator("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  {
    constexpr int kThreads = 3;
    const InProcess there = InProcess::Start(BadPath("good"), PluginProcess::kCallMsMax, kThreads);
    const auto codec = there.Make();
    ASSERT_TRUE(codec.ok()) << codec.status();
    std::atomic<bool> stop{false};
    std::atomic<size_t> encoded{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const AlignedBuffer raw = NormalPage(i);
        while (!stop) {
          bool declined = false;
          const AlignedBuffer page = EncodePage(**codec, raw, &declined);
          if (declined) continue;
          ASSERT_EQ(std::memcmp(page.data(), raw.data(), raw.size()), 0);
          ++encoded;
          // Codecs come and go, and only the end of the process refuses one.
          const absl::Status made = there.Make().status();
          ASSERT_TRUE(made.ok() || PluginProcess::IsUnanswered(made)) << made;
        }
      });
    }
    for (size_t end = 1; end <= 3; ++end) {
      const size_t then = encoded;
      ASSERT_TRUE(Eventually([&] { return encoded > then + 20; }));
      ASSERT_TRUE(there.IsUp());
      ASSERT_EQ(::kill(there.process->pid(), SIGKILL), 0);
      ASSERT_TRUE(Eventually([&] { return there.told->ends == end; }));
    }
    const size_t then = encoded;
    EXPECT_TRUE(Eventually([&] { return encoded > then + 20; }));
    stop = true;
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(descriptors(), before);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(PluginProcessTest, StoppingEndsCallsThatWait) {
  InProcess there = InProcess::Start(BadPath("bad_attend_loops"));
  const auto codec = there.Make();
  ASSERT_TRUE(codec.ok()) << codec.status();
  std::atomic<bool> begun{false}, done{false};
  there.process->workers()->Post(WorkerPool::Priority::kAttend, [&] {
    const AlignedBuffer raw = NormalPage(7);
    const uint8_t* const page = raw.data();
    State state;
    begun = true;
    Attend((*codec)->attention(), {&page, 1}, 0, false, state);
    EXPECT_TRUE(state.has_nan());
    done = true;
  });
  ASSERT_TRUE(Eventually([&] { return begun.load(); }));
  there.process->Stop();
  EXPECT_TRUE(done);
  EXPECT_EQ(UnansweredBy(**codec), 1u);
}

TEST(CodecWorkersTest, ASpecOrAPolicyIsMadeWhereItsPluginIs) {
  WorkerPool others(1), own(1);
  CodecWorkers workers;
  EXPECT_EQ(workers.For("copy", &others), &others);
  workers.Add("copy", &own);
  for (const char* text :
       {"copy", "copy:a=b", "hack;0..1=copy", "copy;sinks=0", "hack:k_bits=2;3..4=copy:x=y;sinks=64"}) {
    EXPECT_EQ(workers.For(text, &others), &own) << text;
  }
  for (const char* text : {"", "hack", "copy2", "hack:k_bits=2;sinks=0"}) {
    EXPECT_EQ(workers.For(text, &others), &others) << text;
  }
}

}  // namespace
}  // namespace kvmanager
