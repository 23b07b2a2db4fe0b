#include "tests/harness.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

constexpr int kPollMs = 2;

bool WaitReadable(int fd, int64_t until_ms) {
  for (;;) {
    const int64_t left = until_ms - NowMs();
    if (left <= 0) return false;
    pollfd p{fd, POLLIN, 0};
    const int n = poll(&p, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

}  // namespace

std::string DataPath(absl::string_view path) {
  const char* root = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (root != nullptr && workspace != nullptr) return absl::StrCat(root, "/", workspace, "/", path);
  return std::string(path);
}

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool Eventually(const std::function<bool()>& condition, int64_t deadline_ms) {
  const int64_t until = NowMs() + deadline_ms * kSlowdown;
  for (;;) {
    if (condition()) return true;
    if (NowMs() >= until) return false;
    poll(nullptr, 0, kPollMs);
  }
}

TempDir::TempDir() {
  char path[] = "/tmp/kvm-XXXXXX";
  KV_CHECK(mkdtemp(path) != nullptr);
  path_ = path;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const std::vector<std::string>& argv) {
  int ends[2];
  KV_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  std::vector<char*> args;
  for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  KV_CHECK(pid >= 0);
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    dup2(ends[1], STDOUT_FILENO);
    execv(args[0], args.data());
    _exit(127);
  }
  close(ends[1]);
  const int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  KV_CHECK(pid_fd >= 0);
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, pid_fd, ends[0]));
}

ChildProcess::~ChildProcess() {
  if (!reaped_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(pid_fd_);
  close(output_);
}

absl::StatusOr<std::string> ChildProcess::ReadLine(int64_t deadline_ms) {
  const int64_t until = NowMs() + deadline_ms * kSlowdown;
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    if (!WaitReadable(output_, until)) return absl::DeadlineExceededError("no line");
    char bytes[4096];
    const ssize_t n = read(output_, bytes, sizeof bytes);
    if (n <= 0) return absl::UnavailableError(absl::StrCat("output ended after \"", buffer_, "\""));
    buffer_.append(bytes, n);
  }
}

std::string ChildProcess::ReadAll(int64_t deadline_ms) {
  const int64_t until = NowMs() + deadline_ms * kSlowdown;
  while (WaitReadable(output_, until)) {
    char bytes[4096];
    const ssize_t n = read(output_, bytes, sizeof bytes);
    if (n <= 0) break;
    buffer_.append(bytes, n);
  }
  return std::move(buffer_);
}

void ChildProcess::Signal(int number) {
  if (!reaped_) kill(pid_, number);
}

bool ChildProcess::running() {
  pollfd p{pid_fd_, POLLIN, 0};
  return !reaped_ && poll(&p, 1, 0) == 0;
}

absl::StatusOr<int> ChildProcess::Wait(int64_t deadline_ms) {
  if (reaped_) return result_;
  if (!WaitReadable(pid_fd_, NowMs() + deadline_ms * kSlowdown)) return absl::DeadlineExceededError("still running");
  int status = 0;
  KV_CHECK(waitpid(pid_, &status, 0) == pid_);
  reaped_ = true;
  result_ = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
  return result_;
}

absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv, int64_t deadline_ms) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child, ChildProcess::Start(argv));
  CommandResult result;
  result.output = child->ReadAll(deadline_ms);
  KV_ASSIGN_OR_RETURN(result.status, child->Wait(deadline_ms));
  return result;
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const DaemonOptions& options) {
  auto daemon = std::make_unique<DaemonProcess>();
  daemon->directory_ = std::make_unique<TempDir>();
  const std::string listen =
      options.listen.empty() ? absl::StrCat("unix:", daemon->directory_->path(), "/kv.sock") : options.listen;
  const std::string program = options.program.empty() ? DataPath("kvmanager/daemon/kvmanagerd") : options.program;
  std::vector<std::string> argv = {
      program,      "--listen", listen, "--host-pool-bytes", absl::StrCat(options.host_pool_bytes), "--metrics-listen",
      "127.0.0.1:0"};
  // An earlier version's program does not know the flag.
  if (listen.rfind("unix:", 0) != 0 && options.program.empty()) {
    argv.insert(argv.end(), {"--admin-listen", absl::StrCat("unix:", daemon->directory_->path(), "/admin.sock")});
  }
  if (options.peers) argv.insert(argv.end(), {"--peer-listen", "127.0.0.1:0"});
  if (!options.hand_off_peers.empty()) argv.insert(argv.end(), {"--hand-off-peers", options.hand_off_peers});
  argv.insert(argv.end(), options.more_flags.begin(), options.more_flags.end());
  KV_ASSIGN_OR_RETURN(daemon->process_, ChildProcess::Start(argv));
  for (;;) {
    absl::StatusOr<std::string> line = daemon->process_->ReadLine(30000);
    if (!line.ok()) {
      daemon->Kill();
      return line.status();
    }
    absl::string_view rest = *line;
    if (!absl::ConsumePrefix(&rest, "kvmanagerd ready")) continue;
    for (absl::string_view word : absl::StrSplit(rest, ' ', absl::SkipEmpty())) {
      if (absl::ConsumePrefix(&word, "listen=")) daemon->listen_ = std::string(word);
      if (absl::ConsumePrefix(&word, "peer=")) daemon->peer_ = std::string(word);
      if (absl::ConsumePrefix(&word, "metrics=")) daemon->metrics_ = std::string(word);
      if (absl::ConsumePrefix(&word, "http=")) daemon->http_ = std::string(word);
      if (absl::ConsumePrefix(&word, "admin=")) daemon->admin_ = std::string(word);
    }
    return daemon;
  }
}

DaemonProcess::~DaemonProcess() {
  if (ended_ || process_ == nullptr) return;
  process_->Signal(SIGINT);  // with the SIGTERM that follows: end now, whatever is held
  const absl::StatusOr<int> status = Terminate();
  EXPECT_TRUE(status.ok()) << "kvmanagerd did not end after SIGTERM: " << status.status();
  if (status.ok()) {
    EXPECT_EQ(*status, 0) << "exit status of kvmanagerd (256 + signal)";
  }
}

void DaemonProcess::Kill() {
  process_->Signal(SIGKILL);
  (void)process_->Wait();
  ended_ = true;
}

absl::StatusOr<int> DaemonProcess::Terminate(int64_t deadline_ms) {
  process_->Signal(SIGTERM);
  ended_ = true;
  return process_->Wait(deadline_ms);
}

double MetricsPage::Sum(absl::string_view name, const std::vector<std::string>& labels) const {
  double sum = 0;
  for (const auto& [family_name, family] : families) {
    for (const auto& [sample, value] : family.samples) {
      const size_t brace = sample.find('{');
      if (absl::string_view(sample).substr(0, brace) != name) continue;
      bool all = true;
      for (const std::string& label : labels) all = all && sample.find(label) != std::string::npos;
      if (all) sum += value;
    }
  }
  return sum;
}

absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path) {
  const int fd = ConnectSocket(address);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("cannot connect to ", address));
  WriteAll(fd, absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: localhost\r\n\r\n"));
  std::string answer;
  const int64_t until = NowMs() + 10000 * kSlowdown;
  while (WaitReadable(fd, until)) {
    char bytes[16384];
    const ssize_t n = read(fd, bytes, sizeof bytes);
    if (n <= 0) break;
    answer.append(bytes, n);
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || answer.find(" 200 ") > answer.find("\r\n")) {
    return absl::InternalError(absl::StrCat("answer of ", address, path, ": ", answer.substr(0, 200)));
  }
  return answer.substr(body + 4);
}

MetricsPage ParseMetrics(absl::string_view text) {
  MetricsPage page;
  std::string family;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    line = absl::StripSuffix(line, "\r");
    if (absl::ConsumePrefix(&line, "# HELP ")) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
      page.families[std::string(parts.first)].help = std::string(parts.second);
    } else if (absl::ConsumePrefix(&line, "# TYPE ")) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
      family = std::string(parts.first);
      page.families[family].type = std::string(parts.second);
    } else if (!line.empty() && line[0] != '#') {
      const size_t space = line.rfind(' ');
      double value = 0;
      if (space == absl::string_view::npos || !absl::SimpleAtod(line.substr(space + 1), &value)) continue;
      page.families[family].samples[std::string(line.substr(0, space))] = value;
    }
  }
  return page;
}

absl::StatusOr<MetricsPage> Scrape(const DaemonProcess& daemon) {
  KV_ASSIGN_OR_RETURN(const std::string text, HttpGet(daemon.metrics(), "/metrics"));
  return ParseMetrics(text);
}

int ConnectSocket(const std::string& address) {
  absl::string_view rest = address;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    if (rest.size() >= sizeof to.sun_path) return -1;
    std::memcpy(to.sun_path, rest.data(), rest.size());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) return fd;
    close(fd);
    return -1;
  }
  absl::ConsumePrefix(&rest, "tcp:");
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos) return -1;
  int port = 0;
  if (!absl::SimpleAtoi(rest.substr(colon + 1), &port)) return -1;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, std::string(rest.substr(0, colon)).c_str(), &to.sin_addr) != 1) return -1;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) return fd;
  close(fd);
  return -1;
}

bool WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(n);
  }
  return true;
}

bool ClosedByPeer(int fd, int64_t deadline_ms) {
  const int64_t until = NowMs() + deadline_ms * kSlowdown;
  while (WaitReadable(fd, until)) {
    char bytes[4096];
    if (read(fd, bytes, sizeof bytes) <= 0) return true;
  }
  return false;
}

Proxy::Proxy(std::string upstream) : upstream_(std::move(upstream)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  KV_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  KV_CHECK(listen(listener_, 8) == 0);
  socklen_t size = sizeof at;
  KV_CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) == 0);
  port_ = ntohs(at.sin_port);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  thread_ = std::thread([this] { Serve(); });
}

Proxy::~Proxy() {
  stopping_ = true;
  const uint64_t one = 1;
  KV_CHECK(write(wake_, &one, sizeof one) == sizeof one);
  thread_.join();
  close(listener_);
  close(wake_);
}

std::string Proxy::address() const { return absl::StrCat("127.0.0.1:", port_); }

void Proxy::StallAfter(uint64_t bytes) { stall_after_ = bytes; }

bool Proxy::WaitStalled(int64_t deadline_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(deadline_ms * kSlowdown), [this] { return stalled_; });
}

void Proxy::Inject(std::string bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    injected_ += bytes;
  }
  const uint64_t one = 1;
  KV_CHECK(write(wake_, &one, sizeof one) == sizeof one);
}

void Proxy::Cut() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cut_ = true;
  }
  const uint64_t one = 1;
  KV_CHECK(write(wake_, &one, sizeof one) == sizeof one);
}

void Proxy::Spoil(Fault fault, uint64_t after_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  fault_ = fault;
  fault_in_ = after_bytes;
}

void Proxy::Record() {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = true;
}

std::string Proxy::Recorded() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::move(recorded_);
}

void Proxy::Refuse(bool on) { refuse_ = on; }

void Proxy::Serve() {
  std::vector<Pair> pairs;
  std::vector<pollfd> waits;
  while (!stopping_) {
    const bool stall = forwarded_ >= stall_after_;
    if (stall && !pairs.empty()) {
      std::lock_guard<std::mutex> lock(mutex_);
      stalled_ = true;
      changed_.notify_all();
    }
    waits = {{listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
    for (const Pair& pair : pairs) {
      // A stalled stream still sees its source close (POLLRDHUP), and then closes upstream, as a dead host's kernel
      // does.
      waits.push_back({pair.down, short(stall ? POLLRDHUP : POLLIN | POLLRDHUP), 0});
      waits.push_back({pair.up, POLLIN, 0});
    }
    if (poll(waits.data(), waits.size(), -1) <= 0) continue;
    bool cut = false;
    if (waits[1].revents != 0) {
      uint64_t count;
      (void)!read(wake_, &count, sizeof count);
      std::string add;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        cut = std::exchange(cut_, false);
        add.swap(injected_);
      }
      if (!add.empty() && !pairs.empty() && !WriteAll(pairs[0].up, add)) cut = true;
    }
    for (size_t i = pairs.size(); i-- > 0;) {
      if (!cut && Pass(pairs[i], waits[2 + 2 * i].revents, waits[3 + 2 * i].revents, stall)) continue;
      close(pairs[i].up);
      close(pairs[i].down);
      pairs.erase(pairs.begin() + i);
    }
    if (std::exchange(cut_all_, false)) {
      for (const Pair& pair : pairs) {
        close(pair.up);
        close(pair.down);
      }
      pairs.clear();
    }
    if (waits[0].revents != 0) Accept(&pairs);
  }
  for (const Pair& pair : pairs) {
    close(pair.up);
    close(pair.down);
  }
}

void Proxy::Accept(std::vector<Pair>* pairs) {
  const int down = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (down < 0) return;
  const int up = refuse_ ? -1 : ConnectSocket(upstream_);
  if (up < 0) {
    close(down);
    return;
  }
  if (pairs->empty()) {
    forwarded_ = 0;
    std::lock_guard<std::mutex> lock(mutex_);
    cut_ = false;
    stalled_ = false;
  }
  pairs->push_back({down, up});
}

bool Proxy::Pass(const Pair& pair, short down_events, short up_events, bool stall) {
  char bytes[64 << 10];
  if (up_events != 0) {
    const ssize_t n = read(pair.up, bytes, sizeof bytes);
    if (n <= 0 || !WriteAll(pair.down, absl::string_view(bytes, n))) return false;
  }
  if (stall) return (down_events & (POLLRDHUP | POLLHUP | POLLERR)) == 0;
  const uint64_t limit = stall_after_;
  if (down_events == 0 || forwarded_ >= limit) return true;
  ssize_t n = read(pair.down, bytes, std::min<uint64_t>(sizeof bytes, limit - forwarded_));
  if (n <= 0) return false;
  bool cut = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_ != Fault::kNone && fault_in_ >= uint64_t(n)) {
      fault_in_ -= n;
    } else if (fault_ != Fault::kNone) {
      cut = fault_ == Fault::kCut;
      if (cut) n = ssize_t(fault_in_);
      if (!cut) bytes[fault_in_] ^= 1 << fault_in_ % 8;
      fault_ = Fault::kNone;
      ++faults_;
    }
  }
  cut_all_ |= cut;
  if (!WriteAll(pair.up, absl::string_view(bytes, n)) || cut) return false;
  forwarded_ += n;
  std::lock_guard<std::mutex> lock(mutex_);
  if (recording_) recorded_.append(bytes, n);
  return true;
}

}  // namespace kvmanager::testing
