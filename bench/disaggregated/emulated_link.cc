#include "bench/disaggregated/emulated_link.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager::bench {
namespace {

constexpr char kNear[] = "kvlink0", kFar[] = "kvlink1";
constexpr char kRights[] =
    "run it as root, or, where user namespaces are allowed, as `unshare --user --map-root-user --net COMMAND`";
constexpr int kNoProgram = 127;

absl::Status Refused(const char* what, int error) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error), "; ");
  if (error == EPERM || error == EACCES) return absl::PermissionDeniedError(absl::StrCat(message, kRights));
  return absl::UnavailableError(absl::StrCat(message, "the kernel needs CONFIG_NET_NS"));
}

/// Runs a program to its end, in another network namespace if `network` is one: what it wrote.
absl::StatusOr<std::string> Run(const std::vector<std::string>& words, int network = -1) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::vector<std::string> places;  // made here: between fork and exec nothing is allocated
  for (const char* folder : {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"}) places.push_back(folder + words[0]);
  const pid_t child = ::fork();
  if (child < 0) return absl::UnavailableError(absl::StrCat("fork: ", std::strerror(errno)));
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    if (network >= 0 && ::setns(network, CLONE_NEWNET) != 0) ::_exit(126);
    for (const std::string& place : places) ::execv(place.c_str(), argv.data());
    ::_exit(kNoProgram);
  }
  ::close(ends[1]);
  std::string said;
  char bytes[4096];
  for (ssize_t n; (n = ::read(ends[0], bytes, sizeof(bytes))) > 0 || (n < 0 && errno == EINTR);) {
    if (n > 0) said.append(bytes, n);
  }
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return said;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNoProgram) {
    return absl::NotFoundError(absl::StrCat("no program `", words[0], "`: install the package iproute2 (tools/setup)"));
  }
  const std::string message = absl::StrCat("`", absl::StrJoin(words, " "), "`: ", absl::StripSuffix(said, "\n"), "; ");
  if (said.find("not permitted") != std::string::npos) return absl::PermissionDeniedError(message + kRights);
  return absl::UnavailableError(message + "the kernel needs veth and sch_tbf");
}

}  // namespace

absl::StatusOr<std::unique_ptr<EmulatedLink>> EmulatedLink::Create() {
  std::unique_ptr<EmulatedLink> link(new EmulatedLink);
  KV_RETURN_IF_ERROR(link->Build());
  return link;
}

absl::Status EmulatedLink::Build() {
  if (::unshare(CLONE_NEWNET) != 0) return Refused("making a network namespace", errno);
  int ready[2];
  if (::pipe2(ready, O_CLOEXEC) != 0) return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  const pid_t parent = ::getpid();
  holder_ = ::fork();
  if (holder_ < 0) return absl::UnavailableError(absl::StrCat("fork: ", std::strerror(errno)));
  if (holder_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int error = ::unshare(CLONE_NEWNET) == 0 ? 0 : errno;
    if (::getppid() != parent || ::write(ready[1], &error, sizeof(error)) != sizeof(error) || error != 0) ::_exit(1);
    while (true) ::pause();
  }
  ::close(ready[1]);
  int error = EIO;
  if (::read(ready[0], &error, sizeof(error)) != sizeof(error)) error = EIO;
  ::close(ready[0]);
  if (error != 0) return Refused("making a second network namespace", error);
  far_network_ = ::open(absl::StrCat("/proc/", holder_, "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
  if (far_network_ < 0) return Refused("opening the far network namespace", errno);

  KV_RETURN_IF_ERROR(Run({"ip", "link", "set", "lo", "up"}).status());
  KV_RETURN_IF_ERROR(Run({"ip", "link", "set", "lo", "up"}, far_network_).status());
  KV_RETURN_IF_ERROR(
      Run({"ip", "link", "add", kNear, "type", "veth", "peer", "name", kFar, "netns", absl::StrCat(holder_)}).status());
  KV_RETURN_IF_ERROR(Run({"ip", "address", "add", near_address() + "/30", "dev", kNear}).status());
  KV_RETURN_IF_ERROR(Run({"ip", "address", "add", far_address() + "/30", "dev", kFar}, far_network_).status());
  KV_RETURN_IF_ERROR(Run({"ip", "link", "set", kNear, "up"}).status());
  return Run({"ip", "link", "set", kFar, "up"}, far_network_).status();
}

EmulatedLink::~EmulatedLink() {
  if (far_network_ >= 0) ::close(far_network_);
  if (holder_ <= 0) return;
  ::kill(holder_, SIGKILL);
  ::waitpid(holder_, nullptr, 0);
}

absl::Status EmulatedLink::SetRate(double bits_per_s) {
  const uint64_t burst = std::max<uint64_t>(kBurstBytesMin, uint64_t(bits_per_s / 8 * kBurstSeconds));
  for (const auto& [device, network] : {std::pair{kNear, -1}, std::pair{kFar, far_network_}}) {
    std::vector<std::string> words = {"tc", "qdisc", "replace", "dev", device, "root"};
    if (bits_per_s <= 0) {
      words.push_back("noqueue");
    } else {
      for (const std::string& word :
           {std::string("tbf"), std::string("rate"), absl::StrFormat("%.0fbit", bits_per_s), std::string("burst"),
            absl::StrCat(burst), std::string("latency"), absl::StrCat(kQueueMs, "ms")}) {
        words.push_back(word);
      }
    }
    KV_RETURN_IF_ERROR(Run(words, network).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<LinkCounters> EmulatedLink::Counters() const {
  // /proc/net/dev: NAME: received bytes and seven more, sent bytes packets errors dropped ...
  std::ifstream file("/proc/thread-self/net/dev");
  LinkCounters counters;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || absl::StripAsciiWhitespace(line.substr(0, colon)) != kNear) continue;
    std::istringstream numbers(line.substr(colon + 1));
    std::vector<uint64_t> values;
    for (uint64_t value; numbers >> value;) values.push_back(value);
    if (values.size() < 12) break;
    counters.received_bytes = values[0];
    counters.sent_bytes = values[8];
    KV_ASSIGN_OR_RETURN(const std::string said, Run({"tc", "-s", "qdisc", "show", "dev", kNear}));
    const size_t at = said.find("(dropped ");
    uint64_t dropped = 0;
    if (at != std::string::npos && absl::SimpleAtoi(said.substr(at + 9, said.find(',', at) - at - 9), &dropped)) {
      counters.dropped = dropped;
    }
    return counters;
  }
  return absl::UnavailableError(absl::StrCat("no interface ", kNear, " in /proc/net/dev"));
}

}  // namespace kvmanager::bench
