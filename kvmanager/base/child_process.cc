#include "kvmanager/base/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

extern char** environ;

namespace kvmanager {
namespace {

constexpr int kFirstFd = 3;

bool IsLean(const char* variable) {
  const std::string name(variable, std::strcspn(variable, "="));
  constexpr char kSanitizer[] = "SAN_OPTIONS";
  return name == "LD_LIBRARY_PATH" ||
         (name.size() > sizeof kSanitizer - 1 &&
          name.compare(name.size() - (sizeof kSanitizer - 1), std::string::npos, kSanitizer) == 0);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& program, absl::Span<const int> fds,
                                                 Environment environment, int output) {
  KV_CHECK(!program.empty());
  const int above = kFirstFd + static_cast<int>(fds.size());
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  KV_CHECK(posix_spawn_file_actions_init(&actions) == 0 && posix_spawnattr_init(&attributes) == 0);
  // Copies above all numbers that the child will have, so that none is replaced before it has been taken.
  std::vector<int> copies;
  int error = 0;
  for (size_t i = 0; i < fds.size() && error == 0; ++i) {
    copies.push_back(::fcntl(fds[i], F_DUPFD_CLOEXEC, above));
    error = copies.back() < 0 ? errno : 0;
    if (error == 0) error = posix_spawn_file_actions_adddup2(&actions, copies.back(), kFirstFd + static_cast<int>(i));
  }
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO}) {
    if (error == 0 && output >= 0) error = posix_spawn_file_actions_adddup2(&actions, output, standard);
  }
  if (error == 0) error = posix_spawn_file_actions_addclosefrom_np(&actions, above);
  // The daemon takes its signals through a descriptor; the child ends by them.
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  if (error == 0) error = posix_spawnattr_setsigmask(&attributes, &none);
  if (error == 0) error = posix_spawnattr_setsigdefault(&attributes, &all);
  if (error == 0) error = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> arguments;
  arguments.reserve(program.size() + 1);
  for (const std::string& text : program) arguments.push_back(const_cast<char*>(text.c_str()));
  arguments.push_back(nullptr);
  std::vector<char*> lean;
  for (char** variable = environ; environment == Environment::kLean && *variable != nullptr; ++variable) {
    if (IsLean(*variable)) lean.push_back(*variable);
  }
  lean.push_back(nullptr);
  char** const variables = environment == Environment::kLean ? lean.data() : environ;
  ChildProcess child;
  if (error == 0) error = ::posix_spawn(&child.pid_, arguments[0], &actions, &attributes, arguments.data(), variables);
  for (const int copy : copies) {
    if (copy >= 0) ::close(copy);
  }
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error == 0) return child;
  child.pid_ = 0;
  return absl::UnavailableError(absl::StrCat("starting ", program[0], ": ", std::strerror(error)));
}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  End();
  pid_ = std::exchange(other.pid_, 0);
  return *this;
}

int ChildProcess::End() {
  if (pid_ == 0) return 0;
  int status = 0;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = 0;
  return status;
}

int ChildProcess::EndWithin(int ms) {
  const int pidfd = pid_ == 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  if (pidfd >= 0) {
    pollfd ended{pidfd, POLLIN, 0};
    while (::poll(&ended, 1, ms) < 0 && errno == EINTR) {
    }
    ::close(pidfd);
  }
  return End();
}

}  // namespace kvmanager
