// What one client takes of the daemon's memory and connections: the daemon stays within its bounds, others are served,
// and the client gets its answers, or an honest end.
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <kj/timer.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <iostream>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/rpc/limits.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/raw_rpc.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::Client;
using client::CreatedSequence;

constexpr int kContext = 16384;  // its K and V take 8 MiB
constexpr int kEntries = 3;      // of one read, which is 24 MiB
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kRoom = 128 * kMiB;  // half of it for replies
// Besides what is counted: the messages' tables, stacks of workers, the allocator's.
constexpr uint64_t kSlack = (kSlowdown > 1 ? 512 : 48) * kMiB;

/// Memory of a process that is its own: of the daemon without its pool.
uint64_t PrivateBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoull(line.substr(8)) << 10;
  }
  return 0;
}

/// A client with a sequence of kContext tokens that asks for all of them many times, on a thread of its own. It takes
/// answers while it is told to.
class Reader {
 public:
  Reader(const std::string& address, int reads) : thread_([=, this] { Run(address, reads); }) { asked_.wait(); }
  ~Reader() {
    Resume();
    thread_.join();
  }
  void Resume() {
    if (!resumed_.exchange(true)) resume_.count_down();
  }
  /// Reads that were answered with all bytes, once it has resumed and none is left.
  int Answered() {
    Resume();
    ended_.wait();
    return answered_;
  }

 private:
  void Run(const std::string& address, int reads) {
    RawRpc raw;
    auto connection = raw.Connect(address);
    auto open = connection->daemon.openCacheRequest();
    FillConfig(SmallCache("raw"), open.initConfig());
    auto cache = open.send().wait(raw.wait()).getCache();
    auto create = cache.createSequencesRequest();
    create.initRequests(1);
    auto created = create.send().wait(raw.wait());
    const auto reply = created.getReplies()[0];
    const uint64_t id = reply.getSequenceId();
    const std::vector<uint8_t> rows(kContext * 256, 0);
    auto step = cache.stepRequest();
    auto request = step.initRequest();
    request.setLayer(0);
    auto entry = request.initEntries(1)[0];
    entry.setSequenceId(id);
    entry.setTokens(kContext);
    request.initK().setInline(kj::arrayPtr(rows.data(), rows.size()));
    request.initV().setInline(kj::arrayPtr(rows.data(), rows.size()));
    EXPECT_EQ(step.send().wait(raw.wait()).getReply().getStatus().getCode(), 0);
    std::vector<kj::Promise<void>> waiting;
    for (int i = 0; i < reads; ++i) {
      auto read = cache.readRequest();
      auto of = read.initRequest();
      of.setLayer(0);
      auto entries = of.initEntries(kEntries);
      for (auto each : entries) {
        each.setSequenceId(id);
        each.setTokens(kContext);
      }
      waiting.push_back(read.send().then(
          [this](capnp::Response<api::Cache::ReadResults>&& response) {
            const auto got = response.getReply();
            answered_ += got.getStatus().getCode() == 0 && got.getK().size() == kEntries * kContext * 256 &&
                         got.getV().size() == kEntries * kContext * 256;
          },
          [](kj::Exception&& exception) { std::cerr << exception.getDescription().cStr() << std::endl; }));
    }
    raw.wait().poll();  // they are sent
    asked_.count_down();
    resume_.wait();
    for (auto& each : waiting) each.wait(raw.wait());
    ended_.count_down();
  }

  std::latch asked_{1}, resume_{1}, ended_{1};
  std::atomic<bool> resumed_{false};
  std::atomic<int> answered_{0};
  std::thread thread_;
};

/// Bytes of the messages of a client that says hello.
std::string Hello() {
  std::string bytes;
  const auto append = [&](capnp::MallocMessageBuilder& message) {
    const auto words = capnp::messageToFlatArray(message);
    const auto chars = words.asChars();
    bytes.append(chars.begin(), chars.size());
  };
  capnp::MallocMessageBuilder bootstrap, call;
  bootstrap.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  append(bootstrap);
  auto hello = call.initRoot<capnp::rpc::Message>().initCall();
  hello.setQuestionId(1);
  hello.initTarget().initPromisedAnswer().setQuestionId(0);
  hello.setInterfaceId(capnp::typeId<api::Daemon>());
  hello.setMethodId(0);
  hello.initParams().getContent().initAs<api::Daemon::HelloParams>().initRequest().setApiMajor(api::API_MAJOR);
  append(call);
  return bytes;
}

/// The header of a message of one segment of so many bytes.
std::string HeaderOf(uint32_t bytes) {
  const uint32_t header[2] = {0, bytes / 8};
  return std::string(reinterpret_cast<const char*>(header), sizeof header);
}

class BoundedTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> more_flags = {}, std::string program = "") {
    DaemonOptions options;
    options.program = std::move(program);
    options.host_pool_bytes = 128 * kMiB;
    options.more_flags = {absl::StrCat("--memory-beyond-pool-bytes=", kRoom)};
    options.more_flags.insert(options.more_flags.end(), more_flags.begin(), more_flags.end());
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(unix_address(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(SmallCache("raw")));
    ASSERT_OK_AND_ASSIGN(sequence_, cache_->CreateSequence());
    ASSERT_OK(LoadLayer(*cache_, sequence_.sequence->id(), source_, 0, 0, 2048));
    Decode();
    idle_bytes_ = PrivateBytes(daemon_->pid());
  }
  std::string unix_address() const { return daemon_->listen().substr(0, daemon_->listen().find(',')); }
  /// Milliseconds that a small step takes.
  int64_t Decode() {
    const int64_t begun = NowMs();
    EXPECT_OK(AskLayer(*cache_, sequence_.sequence->id(), source_, 0, 2047));
    return NowMs() - begun;
  }
  /// Of so many milliseconds the most memory that the daemon had beyond its idle one, while this client decodes.
  uint64_t MostBytes(int64_t ms) {
    uint64_t most = 0;
    for (const int64_t begun = NowMs(); NowMs() - begun < ms;) {
      most = std::max(most, PrivateBytes(daemon_->pid()));
      EXPECT_LE(Decode(), 500 * kSlowdown);
      usleep(5000);
    }
    return most - std::min(most, idle_bytes_);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  CreatedSequence sequence_;
  const Source source_{3, Kind::kNormal, SmallCache("raw")};
  uint64_t idle_bytes_ = 0;
};

TEST_F(BoundedTest, RepliesWaitForMemory) {
  Start();
  Reader reader(daemon_->listen(), 100);
  EXPECT_LE(MostBytes(2000), kRoom / 2 + kSlack) << "100 replies are 2400 MiB";
  EXPECT_EQ(reader.Answered(), 100);
  EXPECT_LE(MostBytes(500), kRoom / 2 + kSlack);
}

TEST_F(BoundedTest, WhoTakesNoReplyMakesRoomForOthers) {
  Start();
  Reader hostile(daemon_->listen(), 20);
  EXPECT_LE(MostBytes(500), kRoom / 2 + kSlack);
  const int64_t begun = NowMs();
  Reader honest(daemon_->listen(), 3);
  EXPECT_EQ(honest.Answered(), 3);
  EXPECT_LE(NowMs() - begun, 15000 * kSlowdown);
  EXPECT_LT(hostile.Answered(), 20);
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon_));
  EXPECT_EQ(page.Sum("kvmanager_connections_ended_total", {"reason=\"unread\""}), 1);
}

TEST_F(BoundedTest, RequestsThatDoNotEndMakeRoomForOthers) {
  Start();
  constexpr int kSockets = 10;
  constexpr size_t kBytes = 30 * kMiB;
  std::vector<int> sockets;
  for (int i = 0; i < kSockets; ++i) {
    sockets.push_back(ConnectSocket(daemon_->listen()));
    ASSERT_TRUE(WriteAll(sockets.back(), Hello() + HeaderOf(kBytes)));
    fcntl(sockets.back(), F_SETFL, O_NONBLOCK);
  }
  const std::string some(kMiB, '\0');
  std::vector<size_t> sent(kSockets);
  for (const int64_t begun = NowMs(); NowMs() - begun < 1000;) {
    for (int i = 0; i < kSockets; ++i) {
      const size_t want = std::min(some.size(), kBytes - kMiB - sent[i]);
      const ssize_t n = want == 0 ? 0 : send(sockets[i], some.data(), want, MSG_NOSIGNAL);
      if (n > 0) sent[i] += n;
    }
  }
  EXPECT_LE(MostBytes(500), kRoom / 2 + kSlack);
  const int64_t begun = NowMs();
  Reader honest(daemon_->listen(), 1);  // its append is a request of 8 MiB
  EXPECT_EQ(honest.Answered(), 1);
  EXPECT_LE(NowMs() - begun, 15000 * kSlowdown);
  EXPECT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_connections_ended_total", {"reason=\"unfinished\""}) >= 1;
  }));
  for (const int fd : sockets) close(fd);
}

TEST_F(BoundedTest, NobodyIsHeardBeforeHello) {
  Start();
  const int large = ConnectSocket(daemon_->listen());
  ASSERT_TRUE(WriteAll(large, HeaderOf(30 * kMiB)));
  EXPECT_TRUE(ClosedByPeer(large, 3000 * kSlowdown));
  close(large);
  const int silent = ConnectSocket(daemon_->listen());
  EXPECT_TRUE(ClosedByPeer(silent, limits::kHelloMs + 3000 * kSlowdown));
  close(silent);
  Decode();
}

TEST_F(BoundedTest, OneProcessDoesNotTakeAllConnections) {
  Start();
  std::vector<int> sockets;
  for (size_t i = 0; i < limits::kConnectionsOfProcessMax + 100; ++i) {
    sockets.push_back(ConnectSocket(daemon_->listen()));
    ASSERT_GE(sockets.back(), 0) << i;
  }
  EXPECT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_connections_refused_total") >= 100;
  }));
  ASSERT_OK_AND_ASSIGN(const CommandResult status,
                       RunCommand({DataPath("client/cli/kvctl"), "--connect", unix_address(), "status"}));
  EXPECT_EQ(status.status, 0);
  Decode();
  for (const int fd : sockets) close(fd);
}

/// A connection from 127.0.0.`host` that says hello; whether it is answered.
bool SaysHelloFrom(int host, const std::string& daemon, std::vector<int>* sockets) {
  const size_t colon = daemon.rfind(':');
  sockaddr_in from{}, to{};
  from.sin_family = to.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<uint32_t>(host));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(daemon.substr(colon + 1))));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockets->push_back(fd);
  if (bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof from) != 0) return false;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) return false;
  if (!WriteAll(fd, Hello())) return false;
  const timeval wait{20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  char byte;
  return recv(fd, &byte, 1, 0) == 1;
}

TEST_F(BoundedTest, OneHostDoesNotTakeAllConnections) {
  Start({"--listen=tcp:127.0.0.1:0"});
  const std::string tcp = daemon_->listen().substr(daemon_->listen().find("tcp:"));
  std::vector<int> sockets;
  for (size_t i = 0; i < limits::kConnectionsOfHostMax; ++i) ASSERT_TRUE(SaysHelloFrom(2, tcp, &sockets)) << i;
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(SaysHelloFrom(2, tcp, &sockets));
  EXPECT_TRUE(SaysHelloFrom(3, tcp, &sockets));
  EXPECT_EQ(Scrape(*daemon_)->Sum("kvmanager_connections_refused_total"), 20);
  Decode();
  // One that goes makes room.
  close(sockets[0]);
  EXPECT_TRUE(Eventually([&] { return SaysHelloFrom(2, tcp, &sockets); }));
  for (size_t i = 1; i < sockets.size(); ++i) close(sockets[i]);
}

// Of five processes, each within the bound of one.
TEST_F(BoundedTest, OneUserDoesNotTakeAllConnections) {
  Start({"--listen=tcp:127.0.0.1:0"});
  const std::string all = daemon_->listen(), path = all.substr(0, all.find(','));
  const std::string tcp = all.substr(all.find("tcp:")), hello = Hello();
  constexpr size_t kProcesses = 5, kEach = 600;
  static_assert(kEach <= limits::kConnectionsOfProcessMax && kProcesses * kEach > limits::kConnectionsOfUserMax);
  std::vector<pid_t> children;
  for (size_t p = 0; p < kProcesses; ++p) {
    children.push_back(fork());
    ASSERT_GE(children.back(), 0);
    if (children.back() > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (size_t i = 0; i < kEach; ++i) WriteAll(ConnectSocket(path), hello);
    for (;;) pause();
  }
  const auto sum = [&](const char* name) { return Scrape(*daemon_)->Sum(name); };
  // One whose hello has not been read yet may make room for the next.
  EXPECT_TRUE(Eventually([&] {
    return sum("kvmanager_connections_refused_total") + sum("kvmanager_connections_ended_total") >=
           kProcesses * kEach - limits::kConnectionsOfUserMax;
  }));
  EXPECT_EQ(sum("kvmanager_connections"), limits::kConnectionsOfUserMax);
  std::vector<int> sockets;
  EXPECT_TRUE(SaysHelloFrom(1, tcp, &sockets));  // of another: a host
  Decode();
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  EXPECT_TRUE(Eventually([&] { return sum("kvmanager_connections") <= 3; }));
  EXPECT_OK(Client::Connect(path, {}));
  for (const int fd : sockets) close(fd);
}

TEST_F(BoundedTest, WhoNeverFinishesItsCallsIsCutOff) {
  Start();
  const int socket = ConnectSocket(daemon_->listen());
  ASSERT_GE(socket, 0);
  // Bootstraps: each is answered, and its answer kept until it is finished. Nobody reads what comes.
  bool open = true;
  for (uint32_t i = 0; open && i < 4 * limits::kUnfinishedCallsMax; ++i) {
    capnp::MallocMessageBuilder message;
    message.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(i);
    const kj::Array<capnp::word> words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    open = WriteAll(socket, std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size()));
  }
  EXPECT_TRUE(Eventually([&] {
    const auto page = Scrape(*daemon_);
    return page.ok() && page->Sum("kvmanager_connections_ended_total", {"reason=\"unread\""}) >= 1;
  }));
  close(socket);
  Decode();
}

TEST_F(BoundedTest, ConnectionsThatSayNothingMakeRoom) {
  Start({"--listen=tcp:127.0.0.1:0"});
  const std::string tcp = daemon_->listen().substr(daemon_->listen().find("tcp:"));
  ASSERT_OK_AND_ASSIGN(const auto before, Client::Connect(tcp, {}));
  std::vector<int> sockets;
  for (size_t i = 0; i < limits::kTcpConnectionsMax + 200; ++i) {
    sockets.push_back(ConnectSocket(tcp));
    ASSERT_GE(sockets.back(), 0) << i;
  }
  Decode();
  ASSERT_OK_AND_ASSIGN(const auto other, Client::Connect(tcp, {}));
  EXPECT_OK(before->OpenCache(SmallCache("raw")));
  for (const int fd : sockets) close(fd);
}

TEST_F(BoundedTest, NobodyReadsTheLog) {
  const TempDir directory;
  const std::string program = absl::StrCat(directory.path(), "/kvmanagerd");
  std::ofstream(program) << "#!/bin/bash\nexec " << DataPath("kvmanager/daemon/kvmanagerd")
                         << " \"$@\" 2> >(exec sleep 60)\n";
  ASSERT_EQ(chmod(program.c_str(), 0700), 0);
  Start({}, program);
  for (int i = 0; i < 2000; ++i) {  // each is a line, and a pipe holds some 600 of them
    const int fd = ConnectSocket(daemon_->listen());
    ASSERT_TRUE(WriteAll(fd, std::string(64, '\xff')));
    if (i % 100 == 0) EXPECT_TRUE(ClosedByPeer(fd, 3000 * kSlowdown)) << i;
    close(fd);
  }
  EXPECT_LE(Decode(), 500 * kSlowdown);
  sequence_ = {};
  cache_.reset();
  client_.reset();
  ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate(5000 * kSlowdown));
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kvmanager::testing
