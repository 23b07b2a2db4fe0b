// 64 clients of several tenants work at one daemon at once, in every way that a WorkingClient knows, hand sequences to
// two others and take them back, while strangers say what nobody understands and the daemon reads its files again. In
// the end everybody goes, and the books of all three balance: nothing is held, nothing waits, SIGTERM ends them well.
//
// KVMANAGER_SOAK_SECONDS says how long they work, KVMANAGER_SOAK_SEED how. Meant for the sanitizers:
//
//   bazel test --config=tsan //tests:many_clients_test --test_env=KVMANAGER_SOAK_SECONDS=600 --test_timeout=1800
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/tls_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/strangers.h"
#include "tests/working_client.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;

constexpr int kClients = 64, kStrangers = 2, kDaemons = 3;
constexpr int kSoakSeconds = 10;  // unless the environment says otherwise
constexpr int64_t kDeadlineMs = 60000 * (kSanitized ? 4 : 1), kHandOffMs = 20000 * (kSanitized ? 4 : 1);
constexpr int64_t kLeaseMs = 4000;     // of a sequence that nobody claims
constexpr int64_t kBalanceMs = 20000;  // until nothing is held
constexpr char kToken[] = "a token that team green alone has";
constexpr char kCalibration[] = "small";

uint64_t Environment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::stoull(text);
}

std::string Slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// What processes that start while it lives write to standard error goes to a file.
class ErrorsTo {
 public:
  explicit ErrorsTo(const std::string& path) : before_(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    KV_CHECK(file >= 0 && before_ >= 0 && dup2(file, STDERR_FILENO) >= 0);
    close(file);
  }
  ~ErrorsTo() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }

 private:
  const int before_;
};

/// Nobody's, as all have gone.
struct Books {
  uint64_t leases = 0, used_bytes = 0, published = 0, waiting = 0;
  double connections = 0, leased_pages = 0, sequences = 0, offers = 0, message_bytes = 0, messages_waiting = 0,
         arena_bytes = 0, tenants_bytes = 0;
  bool drained = false;
  friend bool operator==(const Books&, const Books&) = default;
  std::string Text() const {
    return absl::StrCat(leases, " leases, ", used_bytes, " bytes of pages, ", published, " published blocks, ", waiting,
                        " hand-offs not claimed, ", offers, " not begun, ", connections, " connections, ", leased_pages,
                        " leases of pages, ", sequences, " sequences, ", message_bytes, " bytes of messages, ",
                        messages_waiting, " waiting, ", arena_bytes, " bytes of arenas, ", tenants_bytes,
                        " bytes of tenants' slabs", drained ? ", drained" : "");
  }
};

class ManyClientsTest : public ::testing::Test {
 protected:
  std::string PathOf(absl::string_view name) const { return absl::StrCat(directory_.path(), "/", name); }
  void Write(const std::string& name, const std::string& text) {
    WriteSecret(PathOf(name + ".next"), text);
    ASSERT_EQ(rename(PathOf(name + ".next").c_str(), PathOf(name).c_str()), 0);
  }
  void WriteTenants(int green_mib) {
    const std::string digest = Sha256({reinterpret_cast<const uint8_t*>(kToken), sizeof kToken - 1}).ToHex();
    Write("tenants.json", absl::StrCat(R"({"tenants": [{"name": "red", "uids": [)", getuid(), R"(]},
{"name": "green", "token_sha256": [")",
                                       digest, R"("], "host_bytes": {"most": ")", green_mib, R"(MiB"}},
{"name": "blue", "certificates": ["blue.example"], "host_bytes": {"guaranteed": "16MiB", "most": "64MiB"}}]})"));
  }
  void WriteDaemonsCertificate() {
    const PemPair pair = authority_.Daemon();
    Write("daemon.crt", pair.certificate);
    Write("daemon.key", pair.key);
  }

  void SetUp() override {
    std::printf("KVMANAGER_SOAK_SEED=%llu KVMANAGER_SOAK_SECONDS=%llu\n", (unsigned long long)seed_,
                (unsigned long long)seconds_);
    std::fflush(stdout);
    Write("ca.crt", authority_.certificate());
    const PemPair blue = authority_.Client("blue.example");
    Write("blue.crt", blue.certificate);
    Write("blue.key", blue.key);
    ASSERT_NO_FATAL_FAILURE(WriteDaemonsCertificate());
    ASSERT_NO_FATAL_FAILURE(WriteTenants(24));
    const CacheOptions of = SmallCache("raw");
    const CalibrationModel model{of.model, of.revision, of.layers, of.kv_heads, of.query_heads, of.head_dim};
    const auto artifact = SyntheticCalibration(model, 1, {});
    std::ofstream(PathOf(absl::StrCat(kCalibration, ".safetensors")), std::ios::binary)
        << SerializeCalibration(artifact->model(), artifact->tensors(), artifact->metadata());
    // Failures that cost a call, not the process.
    setenv("KVMANAGER_FAILPOINTS",
           absl::StrCat("accept=1/300,read.allocate=1/1000,step.allocate=1/1000,arena.map=1/50,append.reserve=1/1000,"
                        "encode.decline=1/100,encode.slow=1/200,peer.connect=1/50,peer.send=1/2000,peer.receive=1/2000,"
                        "disk.write=1/500,disk.read=1/200,disk.sync=1/100,"
                        "seed=",
                        seed_ % 1000000)
               .c_str(),
           1);
    for (int i = 0; i < kDaemons; ++i) {
      DaemonOptions options;
      options.listen = absl::StrCat("unix:", PathOf(absl::StrCat("kv", i)));
      options.host_pool_bytes = uint64_t{i == 0 ? 192u : 128u} << 20;
      options.more_flags = {"--listen",
                            "tcp:127.0.0.1:0",
                            "--tls-cert",
                            PathOf("daemon.crt"),
                            "--tls-key",
                            PathOf("daemon.key"),
                            "--tls-ca",
                            PathOf("ca.crt"),
                            "--tenants",
                            PathOf("tenants.json"),
                            "--calibration-dir",
                            directory_.path(),
                            "--disk-path",
                            PathOf(absl::StrCat("disk", i)),
                            "--disk-bytes",
                            "256MiB",
                            "--state-dir",
                            PathOf(absl::StrCat("state", i)),
                            "--state-keep-s",
                            "1",
                            "--memory-beyond-pool-bytes",
                            "128MiB",
                            "--arena-bytes",
                            "32MiB",
                            "--hand-off-lease-ms",
                            absl::StrCat(kLeaseMs * (kSanitized ? 4 : 1)),
                            "--http-listen",
                            "127.0.0.1:0",
                            "--threads",
                            "3",
                            "--quality-sample",
                            "4",
                            "--log-level",
                            "error"};
      // From the first to the second pages are copied, to the third they go over TLS.
      if (i == 2) options.more_flags.insert(options.more_flags.end(), {"--peer-local-copy", "off"});
      const ErrorsTo errors(PathOf(absl::StrCat("errors", i)));
      ASSERT_OK_AND_ASSIGN(daemons_[i], DaemonProcess::Start(options));
    }
    unsetenv("KVMANAGER_FAILPOINTS");
  }

  std::string TlsOf(int daemon) const {
    const std::vector<std::string> listens = absl::StrSplit(daemons_[daemon]->listen(), ',');
    return absl::StrCat("tls:", listens.at(1).substr(4));
  }
  std::string UnixOf(int daemon) const { return absl::StrCat("unix:", PathOf(absl::StrCat("kv", daemon))); }

  // Who a client is goes by its number: 0 and 1 are of one user's tenant, and so on.
  WorkingClientOptions OptionsOf(int number) {
    static constexpr const char* kTenants[8] = {"red", "red", "green", "green", "blue", "blue", "free", "free"};
    const int kind = number % 8;
    const bool tls = kind >= 3 && kind <= 6, proxied = kind == 5 || kind == 7;
    WorkingClientOptions options;
    for (int i = 0; i < kDaemons; ++i) {
      WorkingClientOptions::At at;
      at.address = tls ? TlsOf(i) : UnixOf(i);
      at.peer = daemons_[i]->peer();
      at.client.name = absl::StrCat("client ", number);
      at.client.deadline_ms = kDeadlineMs;
      at.client.connect_ms = kDeadlineMs;
      if (tls) at.client.tls_ca = PathOf("ca.crt");
      if (kTenants[kind] == std::string("green")) at.client.token = kToken;
      if (kTenants[kind] == std::string("blue")) {
        at.client.tls_cert = PathOf("blue.crt");
        at.client.tls_key = PathOf("blue.key");
      }
      if (i == 0 && proxied) {
        proxies_.push_back(std::make_unique<Proxy>(tls ? TlsOf(0).substr(4) : UnixOf(0)));
        Proxy* const proxy = proxies_.back().get();
        at.address = absl::StrCat(tls ? "tls:" : "tcp:", proxy->address());
        options.cut = [proxy] { proxy->Cut(); };
      }
      if (i == 0) {
        options.here = at;
      } else {
        options.there.push_back(at);
      }
    }
    using Form = KnownRows::Form;
    const std::pair<std::string, Form> codecs[] = {
        {"raw", Form::kWritten},
        {"hack", Form::kDecoded},
        {absl::StrCat("zack+hack:calibration=", kCalibration), Form::kUnknown},
        {"pq:m=4,bits=4,ratio=0.2,sinks=8,iterations=3", Form::kWritten}};
    for (const auto& [codec, form] : codecs) {
      CacheOptions cache = SmallCache(codec, 1);
      cache.tenant = kTenants[kind];
      options.caches.push_back({cache, form, codec == "raw"});
    }
    options.seed = seed_ * 1000 + static_cast<uint64_t>(number);
    options.works = {Work::kCreate,  Work::kCreate,  Work::kCreate,         Work::kCreate,  Work::kAppend,
                     Work::kAppend,  Work::kStep,    Work::kStep,           Work::kStep,    Work::kAttend,
                     Work::kRead,    Work::kRead,    Work::kMatch,          Work::kPublish, Work::kFork,
                     Work::kCrop,    Work::kHandOff, Work::kHandOffAsGrows, Work::kCancel,  Work::kMistake,
                     Work::kMistake, Work::kList,    Work::kLeave};
    if (proxied) options.works.push_back(Work::kCut);
    if (!tls && !proxied) options.works.push_back(Work::kArena);
    if (number % 4 == 2) options.works.push_back(Work::kHoard);
    options.grace_ms = 5000 * kSlowdown;
    options.hand_off_ms = kHandOffMs;
    options.administers = kind == 0;
    options.now_ms = NowMs;
    options.shout = [this, number](const char* what, const std::string& text) {
      const MutexLock lock(mutex_);
      if (shouts_.size() < 100) shouts_.push_back(absl::StrCat("client ", number, ": ", what, " ", text));
    };
    return options;
  }

  // A session that touches most calls, of a tenant that nobody else is of.
  std::string RecordSession() {
    Proxy proxy(UnixOf(0));
    proxy.Record();
    const auto say = [&]() -> absl::Status {
      KV_ASSIGN_OR_RETURN(const auto client, Client::Connect(absl::StrCat("tcp:", proxy.address()), {}));
      CacheOptions options = SmallCache("raw", 1);
      options.tenant = "strangers";
      KV_ASSIGN_OR_RETURN(const auto cache, client->OpenCache(options));
      const Source source{3, Kind::kNormal, options};
      KV_ASSIGN_OR_RETURN(const client::CreatedSequence made, cache->CreateSequence(Names(*cache, source, 4)));
      KV_RETURN_IF_ERROR(Feed(*cache, made.sequence->id(), source, 0, 70, 35).status());
      KV_RETURN_IF_ERROR(made.sequence->Publish(Names(*cache, source, 1)).status());
      KV_ASSIGN_OR_RETURN(const auto fork, made.sequence->Fork());
      KV_RETURN_IF_ERROR(fork->Crop(10));
      std::vector<uint8_t> rows(64 * KnownRows::kRowBytes);
      const client::StepEntry entry{made.sequence->id(), 0, 64};
      const auto view = client::TensorView::Inline(rows.data(), rows.size());
      KV_RETURN_IF_ERROR(cache->Read({.layer = 0, .entries = {&entry, 1}, .k = view, .v = view}).status());
      KV_RETURN_IF_ERROR(made.sequence->HandOff(daemons_[1]->peer(), "blob").status());
      return client->Ping();
    };
    EXPECT_TRUE(Eventually([&] { return say().ok(); }));  // a failpoint may spoil one
    return proxy.Recorded();
  }

  absl::StatusOr<Books> TakeBooks(int daemon) {
    Books books;
    KV_ASSIGN_OR_RETURN(const auto client, Client::Connect(daemons_[daemon]->admin(), {}));
    KV_RETURN_IF_ERROR(client->Purge(Client::kAllCaches).status());
    KV_ASSIGN_OR_RETURN(const client::DaemonDescription status, client->Status());
    KV_ASSIGN_OR_RETURN(const MetricsPage page, Scrape(*daemons_[daemon]));
    books.leases = status.leases;
    for (const auto& pool : status.pools) books.used_bytes += pool.used_bytes;
    books.published = status.published_blocks;
    books.waiting = status.waiting_hand_offs;
    books.drained = status.draining;
    books.connections = page.Sum("kvmanager_connections");
    books.leased_pages = page.Sum("kvmanager_leases");
    books.sequences = page.Sum("kvmanager_sequences");
    books.offers = page.Sum("kvmanager_hand_offs_waiting");
    books.message_bytes = page.Sum("kvmanager_message_bytes");
    books.messages_waiting = page.Sum("kvmanager_messages_waiting");
    books.arena_bytes = page.Sum("kvmanager_arena_bytes");
    books.tenants_bytes = page.Sum("kvmanager_tenant_pool_bytes", {"of=\"used\""});
    return books;
  }

  bool AllRun() {
    return std::all_of(std::begin(daemons_), std::end(daemons_),
                       [](const auto& daemon) { return daemon->process().running(); });
  }

  const uint64_t seed_ = Environment("KVMANAGER_SOAK_SEED", std::random_device()());
  const uint64_t seconds_ = Environment("KVMANAGER_SOAK_SECONDS", kSoakSeconds);
  TestAuthority authority_;
  const TempDir directory_;
  std::unique_ptr<DaemonProcess> daemons_[kDaemons];
  std::vector<std::unique_ptr<Proxy>> proxies_;
  Mutex mutex_;
  std::vector<std::string> shouts_ ABSL_GUARDED_BY(mutex_);
};

std::string TextOf(const WorkCounts& counts) {
  std::string text = absl::StrFormat(
      "%d calls, %d MiB compared, %d blocks found, %d handed off, %d of them came back, %d refused, %d of them over "
      "their share, %d unavailable, %d late, %d unexpected, %d wrong\n   ",
      counts.calls, counts.checked_bytes >> 20, counts.hits, counts.handed_off, counts.passed_back, counts.refused,
      counts.over_share, counts.unavailable, counts.late, counts.unexpected, counts.wrong);
  for (const auto& [call, codes] : counts.by_call) {
    absl::StrAppend(&text, " ", call);
    for (const auto& [code, count] : codes) {
      absl::StrAppend(
          &text, code == absl::StatusCode::kOk ? " " : absl::StrCat(" ", absl::StatusCodeToString(code), " "), count);
    }
    absl::StrAppend(&text, ",");
  }
  return text;
}

TEST_F(ManyClientsTest, TheBooksBalance) {
  const std::string recorded = RecordSession();
  ASSERT_GT(recorded.size(), 1000u);
  KnownRows known("hack");
  std::vector<std::unique_ptr<WorkingClient>> clients;
  for (int i = 0; i < kClients; ++i) clients.push_back(std::make_unique<WorkingClient>(known, OptionsOf(i)));
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    strangers.push_back(std::make_unique<Stranger>(*daemons_[0], recorded, seed_ + static_cast<uint64_t>(i)));
  }

  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  threads.reserve(kClients + kStrangers);
  for (auto& client : clients) {
    threads.emplace_back([&client, &stop] {
      while (!stop) client->Turn();
      client->Rest();
    });
  }
  for (auto& stranger : strangers) {
    threads.emplace_back([&stranger, &stop] {
      while (!stop) {
        stranger->Turn();
        usleep(10000);
      }
    });
  }
  const auto all = [&] {
    WorkCounts counts;
    for (const auto& client : clients) counts.Add(client->counts());
    return counts;
  };
  const int64_t begun = NowMs(), until = begun + static_cast<int64_t>(seconds_) * 1000;
  for (int64_t tick = 1; NowMs() < until && AllRun(); ++tick) {
    usleep(1000 * 1000);
    // Files are read again: what is written is right.
    if (tick % 2 == 0) WriteTenants(tick % 4 == 0 ? 24 : 12);
    if (tick % 3 == 0) WriteDaemonsCertificate();
    if (tick % 2 == 0) {
      for (const auto& daemon : daemons_) daemon->process().Signal(SIGHUP);
    }
    if (tick % 10 == 0) {
      std::printf("%d s: %s\n", int((NowMs() - begun) / 1000), TextOf(all()).c_str());
      std::fflush(stdout);
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const WorkCounts counts = all();
  uint64_t said = 0;
  for (const auto& stranger : strangers) said += stranger->said();
  std::printf("in all: %s\n%d connections of strangers\n", TextOf(counts).c_str(), int(said));
  for (const auto& [which, message] : counts.first_said) {
    std::printf("    %s %s: %s\n", which.first.c_str(), absl::StatusCodeToString(which.second).c_str(),
                message.c_str());
  }
  std::fflush(stdout);

  {
    const MutexLock lock(mutex_);
    for (const std::string& shout : shouts_) ADD_FAILURE() << shout;
  }
  EXPECT_EQ(counts.wrong + counts.late + counts.unexpected, 0u);
  EXPECT_GT(counts.checked_bytes, 0u);
  EXPECT_GT(counts.hits, 0u) << "no prefix was found";
  EXPECT_GT(counts.over_share, 0u) << "nobody was over a quota";
  EXPECT_GT(counts.passed_back, 0u) << "no sequence came back";
  EXPECT_GT(said, 0u);
  for (const char* const call :
       {"append", "attend", "cancel", "claim", "createArena", "createSequence", "crop", "cut", "finishHandOff", "fork",
        "handOff", "hoard", "info", "leave", "match", "publish", "read", "step"}) {
    const auto found = counts.by_call.find(call);
    EXPECT_TRUE(found != counts.by_call.end() && found->second.count(absl::StatusCode::kOk) > 0)
        << call << " was never served";
  }

  for (int i = 0; i < kDaemons; ++i) {
    SCOPED_TRACE(absl::StrCat("daemon ", i));
    absl::StatusOr<Books> books = absl::UnknownError("not asked");
    const bool balanced = daemons_[i]->process().running() && Eventually(
                                                                  [&] {
                                                                    books = TakeBooks(i);
                                                                    return books.ok() && *books == Books{};
                                                                  },
                                                                  kBalanceMs);
    EXPECT_TRUE(balanced) << (books.ok() ? books->Text() : books.status().ToString());
    if (const absl::StatusOr<MetricsPage> page = Scrape(*daemons_[i]); i == 0 && page.ok()) {
      const double written = page->Sum("kvmanager_disk_written_blocks_total");
      std::printf("%.0f blocks written to its disk, %.0f read, %.0f errors\n", written,
                  page->Sum("kvmanager_disk_read_blocks_total"), page->Sum("kvmanager_disk_errors_total"));
      EXPECT_GT(written, 0);
    }
    const absl::StatusOr<int> status = daemons_[i]->Terminate();
    EXPECT_OK(status);
    EXPECT_EQ(status.value_or(-1), 0);
    const std::string errors = Slurp(PathOf(absl::StrCat("errors", i)));
    for (const char* const report : {"Sanitizer", "runtime error", "KV_CHECK"}) {
      EXPECT_FALSE(absl::StrContains(errors, report)) << errors;
    }
    if (::testing::Test::HasFailure()) std::fprintf(stderr, "daemon %d:\n%s\n", i, errors.substr(0, 20000).c_str());
  }
}

}  // namespace
}  // namespace kvmanager::testing
