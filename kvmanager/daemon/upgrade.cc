#include "kvmanager/daemon/upgrade.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/child_process.h"
#include "kvmanager/base/journal.h"
#include "kvmanager/base/locked_folder.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/server_access.h"
#include "kvmanager/keep/keeper_wire.h"
#include "kvmanager/keep/kept_manifest.h"

namespace kvmanager {
namespace {

constexpr int kExitUsage = 2, kExitFailed = 1;
constexpr size_t kOutputBytesMax = 64 << 10, kSaidBytesMax = 1024;
constexpr char kProgramLine[] = "kvmanagerd ", kMemoryLine[] = "memory: ";

// Programs that say the same go on in one another's memory.
std::string MemoryText(const Options& options) {
  if (options.state_dir.empty()) return "goes with the daemon";
  return absl::StrCat("--state-dir ", options.state_dir, ", --host-pool-bytes ", options.host_pool_bytes,
                      ", --slab-bytes ", options.slab_bytes, ", format ", KeptManifest::kFormat);
}

absl::Status CheckFile(const std::string& program) {
  const auto wrong = [&](absl::string_view what, absl::string_view bound) {
    return InvalidField("program", absl::StrCat(program, what), bound);
  };
  if (!absl::StartsWith(program, "/")) return wrong("", "an absolute path");
  struct stat file;
  if (stat(program.c_str(), &file) != 0) return wrong(absl::StrCat(", ", std::strerror(errno)), "a program");
  if (!S_ISREG(file.st_mode)) return wrong(", no regular file", "a program");
  if (file.st_uid != 0 && file.st_uid != geteuid()) {
    return wrong(absl::StrCat(", of user ", file.st_uid), "root's or the daemon's user's");
  }
  if ((file.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return wrong(", which others may write", absl::StrCat("its owner's alone to write: chmod go-w ", program));
  }
  if (access(program.c_str(), X_OK) != 0) return wrong(absl::StrCat(", ", std::strerror(errno)), "executable");
  return absl::OkStatus();
}

struct Ended {
  int status = 0;        // as waitpid() gives it
  bool is_late = false;  // it was ended
  std::string output;    // its first kOutputBytesMax bytes
};

absl::StatusOr<Ended> RunToTheEnd(const std::vector<std::string>& command) {
  using std::chrono::milliseconds, std::chrono::steady_clock, std::chrono::duration_cast;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  auto child = ChildProcess::Start(command, {}, ChildProcess::Environment::kSame, ends[1]);
  close(ends[1]);
  Ended result;
  const auto until = steady_clock::now() + milliseconds(kCheckMs);
  const auto left_ms = [&] {
    return std::max(0, static_cast<int>(duration_cast<milliseconds>(until - steady_clock::now()).count()));
  };
  bool more = child.ok();
  while (more) {
    char bytes[4096];
    pollfd readable{ends[0], POLLIN, 0};
    if (poll(&readable, 1, left_ms()) < 0 && errno == EINTR) continue;
    const ssize_t got = readable.revents == 0 ? 0 : read(ends[0], bytes, sizeof bytes);
    more = got > 0 && result.output.size() < kOutputBytesMax;
    if (got > 0) result.output.append(bytes, size_t(got));
  }
  close(ends[0]);
  if (!child.ok()) return child.status();
  result.status = child->EndWithin(left_ms());
  result.is_late = left_ms() == 0;
  return result;
}

// Of LeaveMemory's processes: calls of the kernel alone.
struct Leaving {
  int read = -1;
  alignas(16) char first[16 << 10], second[16 << 10];  // stacks
};

// Ends when the daemon has become another program, and with it the last user of the memory.
int WaitAndEnd(void* argument) {
  constexpr int kFd = 3;
  const int read = static_cast<Leaving*>(argument)->read;
  // It has nothing else open: no socket, and not the end that is waited for.
  const bool alone =
      (read == kFd || syscall(SYS_dup3, read, kFd, 0) == kFd) && syscall(SYS_close_range, kFd + 1U, ~0U, 0U) == 0;
  char byte;
  while (alone && syscall(SYS_read, kFd, &byte, sizeof byte) < 0 && errno == EINTR) {
  }
  syscall(SYS_exit_group, 0);
  return 0;
}

int Leave(void* argument) {
  Leaving* const leaving = static_cast<Leaving*>(argument);
  clone(WaitAndEnd, leaving->second + sizeof leaving->second, CLONE_VM | SIGCHLD, argument);
  syscall(SYS_exit_group, 0);
  return 0;
}

void LeaveMemory() {
  int ends[2], alone[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  if (pipe2(alone, O_CLOEXEC) != 0) return static_cast<void>((close(ends[0]), close(ends[1])));
  // Both run in this memory, on stacks of their own. The first one ends at once, so that nobody has to reap the second.
  static Leaving leaving;
  leaving.read = ends[0];
  const pid_t pid = clone(Leave, leaving.first + sizeof leaving.first, CLONE_VM | SIGCHLD, &leaving);
  while (pid > 0 && waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  // Until the second one has closed what it has of this process's: locks of folders, sockets.
  close(alone[1]);
  char byte;
  while (read(alone[0], &byte, sizeof byte) < 0 && errno == EINTR) {
  }
  close(alone[0]);
  close(ends[0]);
  // The other end stays open until exec().
}

absl::Status CheckPlaces(const Options& options) {
  if (!options.disk_path.empty()) KV_RETURN_IF_ERROR(LockedFolder::CheckPlace("--disk-path", options.disk_path));
  if (options.state_dir.empty()) return absl::OkStatus();
  KV_RETURN_IF_ERROR(KeeperPath(options.state_dir).status());
  return LockedFolder::CheckPlace("--state-dir", options.state_dir);
}

std::string LineBehind(const std::string& output, absl::string_view begin) {
  for (absl::string_view line : absl::StrSplit(output, '\n')) {
    if (absl::ConsumePrefix(&line, begin)) return std::string(line);
  }
  return "";
}

}  // namespace

int RunCheck(int argc, char** argv) {
  std::vector<const char*> flags = {argv[0]};
  flags.insert(flags.end(), argv + 2, argv + argc);
  absl::Status status;
  const auto line = ParseCommandLine(static_cast<int>(flags.size()), flags.data());
  status = line.status();
  if (status.ok() && !line->run)
    status = absl::InvalidArgumentError("--check: --help and --version are no flags to check");
  if (status.ok()) {
    ServerAccess access(&line->options);
    status = access.ReadPeerKey().status();
    if (status.ok()) status = access.ReadFiles();
    if (status.ok()) status = CheckPlaces(line->options);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return kExitUsage;
  }
  std::printf("%s%s\n%s%s\n", kProgramLine, std::string(kVersion).c_str(), kMemoryLine,
              MemoryText(line->options).c_str());
  return 0;
}

std::string ProgramPath(const std::string& argv0) {
  std::error_code error;
  // A link that the next version moves is not followed.
  if (absl::StrContains(argv0, '/')) return std::filesystem::absolute(argv0, error).lexically_normal().string();
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

absl::StatusOr<CheckedSuccessor> CheckSuccessor(const Options& options, const std::string& program, bool cold) {
  KV_CHECK(!options.command.empty());
  std::vector<std::string> command = options.command;
  if (!program.empty()) command[0] = program;
  KV_RETURN_IF_ERROR(CheckFile(command[0]));
  CheckedSuccessor successor{.program = command[0]};
  command.insert(command.begin() + 1, kCheckFlag);
  KV_ASSIGN_OR_RETURN(const Ended ended, RunToTheEnd(command));
  successor.version = LineBehind(ended.output, kProgramLine);
  const std::string memory = LineBehind(ended.output, kMemoryLine);
  if (ended.status != 0 || successor.version.empty() || memory.empty()) {
    std::string said(absl::StripAsciiWhitespace(ended.output.substr(0, kSaidBytesMax)));
    if (said.empty()) said = "it says nothing";
    const std::string how = ended.is_late               ? absl::StrCat("it had not ended after ", kCheckMs / 1000, " s")
                            : WIFSIGNALED(ended.status) ? absl::StrCat("signal ", WTERMSIG(ended.status))
                                                        : absl::StrCat("exit status ", WEXITSTATUS(ended.status));
    return InvalidField(
        "program", command[0],
        absl::StrCat("a kvmanagerd that takes this one's flags; with ", kCheckFlag, " before them: ", how, ": ", said));
  }
  if (const std::string here = MemoryText(options); !cold && memory != here) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "program",
                      absl::StrCat(command[0], ", whose memory is: ", memory),
                      absl::StrCat("one that goes on in this one's: ", here,
                                   "; else what is in memory is lost, which `cold` allows"));
  }
  return successor;
}

void RunSuccessorAtTheLatest(const Successor& successor, const Options& options) {
  std::thread([successor, options] {
    std::this_thread::sleep_for(std::chrono::milliseconds(kEndMs));
    std::fprintf(stderr, "%skvmanagerd: it has not ended after %d ms, and is left as it is\n", ErrorPrefix(), kEndMs);
    _exit(RunSuccessor(successor, options, /*leaves=*/options.device_pool_bytes == 0));
  }).detach();
}

int RunSuccessor(const Successor& successor, const Options& options, bool leaves) {
  static std::atomic_flag begun;
  while (begun.test_and_set()) pause();  // another thread is at it, and ends this one
  if (leaves) LeaveMemory();
  std::vector<char*> arguments;
  for (const std::string& word : options.command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  PassHandedSockets(successor.sockets);
  const absl::Status checked = CheckFile(successor.program);  // again: it may be another file by now
  if (checked.ok()) {
    std::vector<char*> of_successor = arguments;
    of_successor[0] = const_cast<char*>(successor.program.c_str());
    execv(of_successor[0], of_successor.data());
  }
  std::fprintf(stderr, "%skvmanagerd: %s cannot be run: %s; this program goes on\n", ErrorPrefix(),
               successor.program.c_str(), checked.ok() ? std::strerror(errno) : std::string(checked.message()).c_str());
  execv("/proc/self/exe", arguments.data());
  std::fprintf(stderr, "%skvmanagerd: nor can this one: %s\n", ErrorPrefix(), std::strerror(errno));
  return kExitFailed;
}

}  // namespace kvmanager
