// kvmanagerd: parses the command line, takes the signals, runs one Server.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codecs/abi/plugin_host.h"
#include "kvmanager/base/blas_core.h"
#include "kvmanager/base/core_slice.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/journal.h"
#include "kvmanager/daemon/limit_table.h"
#include "kvmanager/daemon/log.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/daemon/server.h"
#include "kvmanager/daemon/supervisor.h"
#include "kvmanager/daemon/upgrade.h"
#include "kvmanager/disk/rocksdb_tsan.h"
#include "kvmanager/keep/keeper.h"
#include "kvmanager/memory/device.h"
#include "transport/ucx/ucx_process.h"

namespace {

constexpr int kExitUsage = 2, kExitFailed = 1;

constexpr char kUpgradeHelp[] =
    "`kvctl upgrade` lets the program that is installed at this one's path go on in its place; see "
    "docs/operating.md.\n"
    "kvmanagerd --check FLAG... says whether these flags would be taken, and does no more.\n";

// Blocks SIGHUP. One that comes before it is known what it means waits, and ends no daemon that would read files again.
void HoldHangUp() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

// Blocks SIGTERM and SIGINT in this thread and all that it starts; they are read from the descriptor instead. SIGHUP
// too where it means to read files again; else it ends a daemon whose terminal is gone, by one that was held as well.
int TakeSignals(bool hang_up) {
  signal(SIGIO, SIG_IGN);  // a lease on a file of the pool that somebody opens meanwhile (Region::HasReaders)
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a log that is redirected to a file may reach a limit
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigset_t held;
  sigemptyset(&held);
  sigaddset(hang_up ? &set : &held, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  pthread_sigmask(SIG_UNBLOCK, &held, nullptr);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

// A pool keeps one descriptor per slab, a connection up to three: more than the usual soft limit, which is low only for
// the sake of programs that use select().
void RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) spdlog::warn("cannot raise the limit of open files to its hard limit");
}

// The kernel doubles a process's table of descriptors when it is full; where there are several threads this takes
// opening one some 10 ms, which the event loop would wait. So the table has its size before they begin.
void GrowDescriptorTable() {
  constexpr rlim_t kDescriptors = 32768;  // of limits::kConnectionsMax connections, peers and slabs
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const int last = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, static_cast<int>(std::min(limit.rlim_cur, kDescriptors)) - 1);
  if (last >= 0) close(last);
}

// Of the threads that are made from now on. Longer than others ask for by themselves: an engine's thread that comes
// back from a wait goes before workers, as does the event loop, which asks for a short one.
constexpr std::chrono::microseconds kWorkersSlice{10000};

// malloc then puts together what small pieces leave as they are freed. Else the next large one that is freed does it
// for all of them: some milliseconds, in which the event loop stands, after a client has given back much. Of the memory
// of large messages some is kept for the next: the kernel takes a millisecond to find a new MiB. What is larger goes
// back to the system as it is freed: without thresholds that are set, malloc raises its own to the largest piece that
// was ever freed. The heap grows in large steps: each may have to wait for whoever touches memory.
void SetUpMalloc() {
  mallopt(M_MXFAST, 0);
  mallopt(M_MMAP_THRESHOLD, 8 << 20);
  mallopt(M_TRIM_THRESHOLD, 24 << 20);
  mallopt(M_TOP_PAD, 2 << 20);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], kvmanager::kUcxProcessFlag) == 0) return kvmanager::RunUcxProcess();
  if (argc == 2 && std::strcmp(argv[1], kvmanager::kPluginHostFlag) == 0) return kvmanager::RunPluginHost();
  if (argc >= 2 && std::strcmp(argv[1], kvmanager::kKeeperFlag) == 0) {
    return kvmanager::RunKeeper(argc, argv, [] { (void)kvmanager::NotifySupervisor("READY=1"); });
  }
  if (argc >= 2 && std::strcmp(argv[1], kvmanager::kCheckFlag) == 0) return kvmanager::RunCheck(argc, argv);
  HoldHangUp();
  const std::vector<kvmanager::HandedSocket> sockets = kvmanager::TakeHandedSockets();
  const std::string help_end = kUpgradeHelp + kvmanager::LimitsHelp(kvmanager::ListLimits({}, nullptr));
  auto line = kvmanager::ParseCommandLine(argc, argv, help_end);
  if (!line.ok()) {
    std::fprintf(stderr, "%skvmanagerd: %s\nTry kvmanagerd --help.\n", kvmanager::ErrorPrefix(),
                 std::string(line.status().message()).c_str());
    return kExitUsage;
  }
  if (!line->run) {
    std::fputs(line->text.c_str(), stdout);
    return 0;
  }
  line->options.command.assign(argv, argv + argc);
  line->options.command[0] = kvmanager::ProgramPath(argv[0]);
  line->options.sockets = sockets;
  const char* const failpoints = std::getenv(kvmanager::kFailpointsVariable);
  if (const absl::Status set = kvmanager::SetFailpoints(failpoints == nullptr ? "" : failpoints); !set.ok()) {
    std::fprintf(stderr, "%skvmanagerd: %s\n", kvmanager::ErrorPrefix(), std::string(set.message()).c_str());
    return kExitUsage;
  }
  kvmanager::SetBlasCore();  // for projections that clients register
  const int signal_fd = TakeSignals(!line->options.tenants.empty() || !line->options.tls_cert.empty());
  kvmanager::Log log(line->options.log_level);
  if (kvmanager::failpoints::on) {
    spdlog::warn("{}={}: this daemon fails on purpose; for tests alone", kvmanager::kFailpointsVariable, failpoints);
  }

  RaiseDescriptorLimit();
  GrowDescriptorTable();
  SetUpMalloc();
  kvmanager::AskForSlice(kWorkersSlice);
  if (line->options.device_pool_bytes > 0) kvmanager::AllowManyStreams();
  auto server = kvmanager::Server::Create(line->options);
  if (!server.ok()) {
    spdlog::error("cannot start: {}", std::string(server.status().message()));
    // A successor is started again: systemd takes a usage error for one that will stay.
    const bool is_usage = server.status().code() == absl::StatusCode::kInvalidArgument && sockets.empty();
    return log.End(is_usage ? kExitUsage : kExitFailed);
  }
  std::vector<std::string> listens = line->options.listen;
  listens.push_back((*server)->admin_address());
  kvmanager::CloseHandedSockets(sockets, listens);
  std::printf("kvmanagerd ready listen=%s peer=%s metrics=%s http=%s admin=%s\n", (*server)->listen_address().c_str(),
              (*server)->peer_address().c_str(), (*server)->metrics_address().c_str(),
              (*server)->http_address().c_str(), (*server)->admin_address().c_str());
  std::fflush(stdout);
  if (const absl::Status told = kvmanager::NotifySupervisor("READY=1"); !told.ok()) {
    spdlog::warn("cannot say that it is ready: {}", std::string(told.message()));
  }
  (*server)->Run(signal_fd);
  const kvmanager::Successor successor = (*server)->TakeSuccessor();
  // A successor does not wait until gigabytes are unmapped and millions of blocks taken apart. What a GPU has must go.
  const bool leaves = !successor.program.empty() && line->options.device_pool_bytes == 0;
  if (leaves) static_cast<void>(server->release());
  if (!leaves) server->reset();
  close(signal_fd);
  if (!successor.program.empty()) {
    spdlog::info("{} goes on", successor.program);
    log.End(0);
    return kvmanager::RunSuccessor(successor, line->options, leaves);
  }
  spdlog::info("stopped");
  return log.End(0);
}
