#include "codecs/abi/confinement.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvmanager {
namespace {

constexpr rlim_t kDescriptorsMax = 128;

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "name the architecture of linux/audit.h here"
#endif

/// A program for the kernel: rules in order, the first that fits decides.
class Filter {
 public:
  Filter() {
    Add(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch));
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0));
    Return(SECCOMP_RET_KILL_PROCESS);
    LoadNumber();
  }

  void Allow(std::initializer_list<long> calls) {
    for (const long call : calls) {
      filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
      Return(SECCOMP_RET_ALLOW);
    }
  }
  void Fail(long call, int error) {
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    Return(SECCOMP_RET_ERRNO | static_cast<uint32_t>(error));
  }
  /// Allows the call if of its argument's lower half no bit of `bits` differs from `value`; else it fails.
  void AllowIf(long call, int argument, uint32_t bits, uint32_t value) {
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 5));
    Add(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * argument));
    Add(BPF_ALU | BPF_AND | BPF_K, bits);
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1));
    Return(SECCOMP_RET_ALLOW);
    Return(SECCOMP_RET_ERRNO | EPERM);
  }
  /// Allows the call if its argument is 0, all 64 bits.
  void AllowIfNull(long call, int argument) {
    const auto at = static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * argument);
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 6));
    Add(BPF_LD | BPF_W | BPF_ABS, at);
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3));
    Add(BPF_LD | BPF_W | BPF_ABS, at + 4);
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1));
    Return(SECCOMP_RET_ALLOW);
    Return(SECCOMP_RET_ERRNO | EPERM);
  }

  /// Other calls fail. For all threads.
  absl::Status Install() {
    Return(SECCOMP_RET_ERRNO | EPERM);
    const sock_fprog program = {static_cast<unsigned short>(filter_.size()), filter_.data()};
    if (::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(absl::StrCat(
        "the kernel takes no seccomp filter (", std::strerror(errno),
        "), without which a codec plug-in is not confined: leave out --codec-plugin-process only if you trust it"));
  }

 private:
  void Add(int code, uint32_t value) { filter_.push_back(BPF_STMT(static_cast<unsigned short>(code), value)); }
  void Return(uint32_t action) { Add(BPF_RET | BPF_K, action); }
  void LoadNumber() { Add(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)); }

  std::vector<sock_filter> filter_;
};

/// What a computation needs of the kernel. What reaches other processes is left out: fcntl and ioctl can have a signal
/// sent to the daemon, sendmsg can send it descriptors.
void AllowComputing(Filter& filter) {
  // Most frequent first.
  filter.Allow({SYS_recvmsg,
                SYS_sendto,
                SYS_recvfrom,
                SYS_futex,
                SYS_madvise,
                SYS_mmap,
                SYS_munmap,
                SYS_mprotect,
                SYS_mremap,
                SYS_brk,
                SYS_read,
                SYS_write,
                SYS_readv,
                SYS_writev,
                SYS_close,
                SYS_lseek,
                SYS_fstat,
                SYS_ppoll,
                SYS_clock_gettime,
                SYS_clock_getres,
                SYS_clock_nanosleep,
                SYS_nanosleep,
                SYS_gettimeofday,
                SYS_sched_yield,
                SYS_sched_getaffinity,
                SYS_getcpu,
                SYS_getpid,
                SYS_gettid,
                SYS_getuid,
                SYS_geteuid,
                SYS_getgid,
                SYS_getegid,
                SYS_getrusage,
                SYS_getrandom,
                SYS_uname,
                SYS_sysinfo,
                SYS_times,
                SYS_rt_sigaction,
                SYS_rt_sigprocmask,
                SYS_rt_sigreturn,
                SYS_sigaltstack,
                SYS_restart_syscall,
                SYS_set_robust_list,
                SYS_rseq,
                SYS_membarrier,
                SYS_exit,
                SYS_exit_group});
#if defined(__x86_64__)
  filter.Allow({SYS_poll, SYS_time, SYS_arch_prctl});
#endif
  // abort() sends a signal to itself, and to nobody else.
  filter.AllowIf(SYS_tgkill, 0, UINT32_MAX, static_cast<uint32_t>(::getpid()));
  filter.AllowIfNull(SYS_prlimit64, 2);  // reads limits, sets none
  filter.Fail(SYS_clone3, ENOSYS);       // the C library then tries clone
}

/// Files, for reading. Flags that make or cut one are refused.
void AllowReading(Filter& filter) {
  filter.Allow({SYS_pread64, SYS_newfstatat, SYS_statx, SYS_readlinkat, SYS_faccessat, SYS_faccessat2, SYS_getcwd,
                SYS_getdents64});
  constexpr uint32_t kWriting = O_ACCMODE | O_CREAT | O_TRUNC | O_TMPFILE;
  constexpr uint32_t kReading = O_RDONLY;
  // O_TMPFILE has O_DIRECTORY's bit, which is harmless alone.
  filter.AllowIf(SYS_openat, 2, kWriting & ~uint32_t{O_DIRECTORY}, kReading);
#if defined(__x86_64__)
  filter.Allow({SYS_stat, SYS_lstat, SYS_access, SYS_readlink});
  filter.AllowIf(SYS_open, 1, kWriting & ~uint32_t{O_DIRECTORY}, kReading);
#endif
  // For ConfineToComputing.
  filter.Allow({SYS_seccomp});
}

void Limit(__rlimit_resource resource, rlim_t most) {
  rlimit limit;
  if (::getrlimit(resource, &limit) != 0) return;
  limit.rlim_max = limit.rlim_max == RLIM_INFINITY ? most : std::min(limit.rlim_max, most);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(resource, &limit);
}

}  // namespace

void LimitProcess(uint64_t address_bytes) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  ::prctl(PR_SET_NAME, "kvmanager-codec");
  // Open before the limits, which do not count it.
  if (const int score = ::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); score >= 0) {
    constexpr char kFirst[] = "1000";
    if (::write(score, kFirst, sizeof kFirst - 1) < 0) errno = 0;  // then it is as likely as the daemon
    ::close(score);
  }
  Limit(RLIMIT_CORE, 0);
  Limit(RLIMIT_NOFILE, kDescriptorsMax);
#ifndef KVMANAGER_SANITIZED  // whose reports go to standard error, and whose shadow is terabytes of address space
  if (const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC); null >= 0) {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, stream);
    ::close(null);
  }
  Limit(RLIMIT_FSIZE, 0);
  if (address_bytes != 0) Limit(RLIMIT_AS, address_bytes);
#endif
}

absl::Status ConfineToReading() {
  Filter filter;
  AllowComputing(filter);
  AllowReading(filter);
  return filter.Install();
}

absl::Status ConfineToComputing() {
  Filter filter;
  AllowComputing(filter);
  return filter.Install();
}

}  // namespace kvmanager
