#include "examples/engine/daemon_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvmanager::engine {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kStartMax = std::chrono::seconds(30), kStopMax = std::chrono::seconds(10);

bool Accepts(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const bool accepted = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return accepted;
}

}  // namespace

absl::StatusOr<std::string> FindDaemon(const std::string& given) {
  namespace fs = std::filesystem;
  std::vector<std::string> places;
  const char* variable = std::getenv("KVMANAGERD");
  if (!given.empty()) {
    places.push_back(given);
  } else if (variable != nullptr && *variable != '\0') {
    places.push_back(variable);
  } else {
    std::error_code error;
    const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
    places.push_back((here / "kvmanagerd").string());
    places.push_back((here.parent_path().parent_path() / "kvmanager/daemon/kvmanagerd").string());
    const char* runfiles = std::getenv("RUNFILES_DIR");
    if (runfiles != nullptr) places.push_back(absl::StrCat(runfiles, "/kvmanager/kvmanager/daemon/kvmanagerd"));
  }
  for (const std::string& place : places) {
    if (access(place.c_str(), X_OK) == 0) return place;
  }
  return absl::NotFoundError(absl::StrCat("no executable kvmanagerd at ", absl::StrJoin(places, ", "),
                                          ": give --daemon PATH or --connect ADDRESS"));
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const std::string& program, uint64_t pool_bytes,
                                                                    const std::vector<std::string>& more_flags,
                                                                    int network) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess);
  std::string directory = (std::filesystem::temp_directory_path() / "kvmanager-XXXXXX").string();
  if (mkdtemp(directory.data()) == nullptr)
    return absl::UnavailableError(absl::StrCat("cannot make ", directory, ": ", std::strerror(errno)));
  daemon->directory_ = directory;

  const std::string pool = absl::StrCat(pool_bytes), listen = daemon->address();
  std::vector<const char*> argv = {program.c_str(),     "--listen",    listen.c_str(),
                                   "--host-pool-bytes", pool.c_str(),  "--metrics-listen",
                                   "127.0.0.1:0",       "--log-level", "warn"};
  for (const std::string& flag : more_flags) argv.push_back(flag.c_str());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  daemon->pid_ = fork();
  if (daemon->pid_ < 0) return absl::UnavailableError(absl::StrCat("cannot fork: ", std::strerror(errno)));
  if (daemon->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int null = open("/dev/null", O_WRONLY);  // stdout is this program's result
    if (null >= 0) dup2(null, STDOUT_FILENO);
    if (network >= 0 && setns(network, CLONE_NEWNET) != 0) _exit(126);
    if (getppid() == parent) execv(program.c_str(), const_cast<char* const*>(argv.data()));
    _exit(127);
  }
  const auto end = std::chrono::steady_clock::now() + kStartMax;
  while (!Accepts(directory + "/socket")) {
    int status = 0;
    if (waitpid(daemon->pid_, &status, WNOHANG) == daemon->pid_) {
      daemon->pid_ = -1;
      return absl::UnavailableError(absl::StrCat(program, " ended before it listened, ",
                                                 WIFEXITED(status) ? absl::StrCat("exit status ", WEXITSTATUS(status))
                                                                   : absl::StrCat("signal ", WTERMSIG(status))));
    }
    if (std::chrono::steady_clock::now() > end)
      return absl::DeadlineExceededError(absl::StrCat(program, " did not listen in time"));
    std::this_thread::sleep_for(kPoll);
  }
  return daemon;
}

void DaemonProcess::HideSocket() {
  std::error_code error;
  std::filesystem::remove_all(directory_, error);
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    const auto end = std::chrono::steady_clock::now() + kStopMax;
    bool killed = false;
    while (waitpid(pid_, nullptr, WNOHANG) == 0) {
      if (!killed && std::chrono::steady_clock::now() > end) {
        kill(pid_, SIGKILL);
        killed = true;
      }
      std::this_thread::sleep_for(kPoll);
    }
  }
  std::error_code error;
  if (!directory_.empty()) std::filesystem::remove_all(directory_, error);
}

}  // namespace kvmanager::engine
