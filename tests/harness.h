// What tests that span modules share: kvmanagerd processes, their metrics pages, a proxy that cuts and corrupts
// streams.
//
// Objects belong to the test that made them; one thread each, unless said otherwise. Nothing here sleeps to
// synchronise: waiting is for a line, a descriptor, a child's end, or for a condition with a deadline (Eventually).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::testing {

#ifdef KVMANAGER_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
/// What a time limit is multiplied by where every instruction is instrumented.
inline constexpr int kSlowdown = kSanitized ? 8 : 1;

/// Path of a file of this repository, or of a built program, among the test's data.
std::string DataPath(absl::string_view path);

/// Milliseconds of the steady clock.
int64_t NowMs();

/// True as soon as `condition` holds; false if it does not within `deadline_ms` (times kSlowdown).
bool Eventually(const std::function<bool()>& condition, int64_t deadline_ms = 10000);

/// A directory of its own below /tmp (paths of Unix sockets are short), removed at the end.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A child process with its standard output on a pipe. Killed at the end if it still runs, and when this process dies.
class ChildProcess {
 public:
  /// argv[0] is the program's path.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  /// The next line of its output without the newline. Errors: DEADLINE_EXCEEDED; UNAVAILABLE at the end of the output.
  absl::StatusOr<std::string> ReadLine(int64_t deadline_ms = 20000);
  /// Everything until the end of its output.
  std::string ReadAll(int64_t deadline_ms = 20000);
  void Signal(int number);
  bool running();
  /// Exit status (0..255), or 256 + the signal that ended it. Errors: DEADLINE_EXCEEDED.
  absl::StatusOr<int> Wait(int64_t deadline_ms = 20000);

 private:
  ChildProcess(pid_t pid, int pid_fd, int output) : pid_(pid), pid_fd_(pid_fd), output_(output) {}
  pid_t pid_;
  int pid_fd_;
  int output_;
  std::string buffer_;
  bool reaped_ = false;
  int result_ = 0;
};

/// Result of a program run to its end: exit status and standard output.
struct CommandResult {
  int status = 0;
  std::string output;
};
absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv, int64_t deadline_ms = 30000);

struct DaemonOptions {
  std::string listen;  // empty: a Unix socket in a directory of its own
  uint64_t host_pool_bytes = 64 << 20;
  bool peers = true;                   // --peer-listen 127.0.0.1:0
  std::string hand_off_peers = "any";  // --hand-off-peers; empty: without
  std::string program;                 // another kvmanagerd than the test's own
  std::vector<std::string> more_flags;
};

/// A kvmanagerd of its own. The destructor stops it with SIGINT and SIGTERM, which together wait for no lease, and
/// expects exit status 0, unless it was killed.
class DaemonProcess {
 public:
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonOptions& options = {});
  ~DaemonProcess();

  const std::string& listen() const { return listen_; }    // "unix:PATH" or "tcp:HOST:PORT"
  const std::string& admin() const { return admin_; }      // "unix:PATH"; empty: of an earlier version
  const std::string& peer() const { return peer_; }        // "HOST:PORT"
  const std::string& metrics() const { return metrics_; }  // "HOST:PORT"
  const std::string& http() const { return http_; }        // "HOST:PORT"; empty without --http-listen
  pid_t pid() const { return process_->pid(); }
  ChildProcess& process() { return *process_; }
  /// kill -9, and waits for its end.
  void Kill();
  /// SIGTERM; its exit status as ChildProcess::Wait gives it.
  absl::StatusOr<int> Terminate(int64_t deadline_ms = 20000);

 private:
  std::unique_ptr<TempDir> directory_;
  std::unique_ptr<ChildProcess> process_;
  std::string listen_, admin_, peer_, metrics_, http_;
  bool ended_ = false;
};

/// One scrape of a metrics page in Prometheus' text form.
struct MetricsPage {
  struct Family {
    std::string help, type;
    std::map<std::string, double> samples;  // 'name{label="value",...}' -> value
  };
  std::map<std::string, Family> families;

  /// The sum of the samples of `family` whose labels contain each of `labels` ('tier="host"'); histograms: name a
  /// sample family such as "..._count". 0 if there is none.
  double Sum(absl::string_view name, const std::vector<std::string>& labels = {}) const;
};

/// GET http://`address``path`. Returns the body of a 200 answer.
absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path);
MetricsPage ParseMetrics(absl::string_view text);
absl::StatusOr<MetricsPage> Scrape(const DaemonProcess& daemon);

/// Connects a stream socket to "unix:PATH", "tcp:HOST:PORT" or "HOST:PORT". Returns the descriptor, or -1.
int ConnectSocket(const std::string& address);
/// Writes all of it; false when the other side has closed.
bool WriteAll(int fd, absl::string_view bytes);
/// True when the other side closes (or resets) within the deadline; what it sends before is dropped.
bool ClosedByPeer(int fd, int64_t deadline_ms = 10000);

/// Passes connections from a port of its own to `upstream`, and can stall them, cut them, change a byte, or add bytes
/// to the first. Its methods may be called from any thread.
class Proxy {
 public:
  explicit Proxy(std::string upstream);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  std::string address() const;  // "127.0.0.1:PORT"
  /// Stop passing bytes upstream once so many have gone since there was no connection; UINT64_MAX: never.
  void StallAfter(uint64_t bytes);
  /// True once the stream upstream stands still because of StallAfter.
  bool WaitStalled(int64_t deadline_ms = 20000);
  /// Adds bytes to the stream that goes upstream, at the next message-free moment (the client is idle).
  void Inject(std::string bytes);
  /// Ends the connections in both directions.
  void Cut();
  enum class Fault { kNone, kCut, kFlip };
  /// Once so many bytes more have gone upstream: ends the connections in both directions, or changes one bit of the
  /// next byte; then no more. Takes the place of one that has not come.
  void Spoil(Fault fault, uint64_t after_bytes);
  /// How many came.
  int faults() const { return faults_.load(); }
  /// Whether new connections are closed at once.
  void Refuse(bool on);
  uint64_t forwarded() const { return forwarded_.load(); }
  /// Everything that went upstream from now on is kept, until Recorded() takes it.
  void Record();
  std::string Recorded();

 private:
  struct Pair {
    int down, up;
  };
  void Serve();
  void Accept(std::vector<Pair>* pairs);
  /// What is there to be passed; false: one side has closed.
  bool Pass(const Pair& pair, short down_events, short up_events, bool stall);

  const std::string upstream_;
  int listener_ = -1;
  int wake_ = -1;  // eventfd
  int port_ = 0;
  std::atomic<uint64_t> forwarded_{0};
  std::atomic<uint64_t> stall_after_{UINT64_MAX};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> refuse_{false};
  std::atomic<int> faults_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stalled_ = false;
  bool cut_ = false;
  Fault fault_ = Fault::kNone;
  uint64_t fault_in_ = 0;  // bytes
  bool recording_ = false;
  std::string recorded_;
  std::string injected_;
  bool cut_all_ = false;  // the thread's own: a cut came in Pass
  std::thread thread_;
};

}  // namespace kvmanager::testing
