#include "codecs/abi/plugin_process.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "codecs/abi/codec_plugin.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using plugin::Answer;
using plugin::Call;
using Time = std::chrono::steady_clock::time_point;

constexpr char kHasEnded[] = "has ended";               // or takes no calls
constexpr char kUnanswered[] = "kvmanager/unanswered";  // the payload that says so
constexpr uint32_t kThreadBytes = 8 << 20;              // of stack

Time Now() { return std::chrono::steady_clock::now(); }
int64_t MsUntil(Time end) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(end - Now() + std::chrono::microseconds(999)).count();
}

void Close(int& fd) {
  if (fd >= 0) ::close(std::exchange(fd, -1));
}

/// Why a process ended, of its wait status; empty: somebody killed it.
std::string Death(int status) {
  if (WIFEXITED(status)) return absl::StrCat("it exited with status ", WEXITSTATUS(status));
  if (!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL) return "";
  return absl::StrCat("it was ended by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
}

/// Waits until the socket can be read; false: not until `end`.
bool WaitForAnswer(int socket, Time end) {
  for (;;) {
    const int64_t ms = std::max<int64_t>(MsUntil(end), 0);
    pollfd event = {socket, POLLIN, 0};
    const int n = ::poll(&event, 1, static_cast<int>(ms));
    if (n > 0) return true;
    if (n == 0 && ms == 0) return false;
    if (n < 0 && errno != EINTR) return true;  // receiving says what is wrong
  }
}

absl::Status SendCall(int socket, const Call& call, int fd) {
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(&call), sizeof call);
  const ssize_t sent = SendWithDescriptor(socket, bytes, fd, MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(sizeof call)) return absl::OkStatus();
  return absl::UnavailableError("does not take calls");
}

}  // namespace

absl::StatusOr<std::shared_ptr<PluginProcess>> PluginProcess::Start(Options options) {
  KV_CHECK(options.lanes >= 1 && options.lanes <= kLanesMax);
  if (options.path.size() > plugin::kPathBytesMax) {
    return InvalidField("codec plug-in", options.path, absl::StrCat("at most ", plugin::kPathBytesMax, " bytes"));
  }
  Region::Options region;
  region.name = "kvmanager-plugin";
  region.bytes = options.lanes * kLaneBytes;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> memory, Region::Create(region));
  std::shared_ptr<PluginProcess> process(new PluginProcess(std::move(options), std::move(memory)));
  if (process->wake_fd_ < 0) return absl::ResourceExhaustedError("no descriptor is left for a codec plug-in");
  process->thread_ = std::thread([self = process.get()] { self->Run(); });
  {
    MutexLock lock(process->mutex_);
    while (!process->started_) lock.Wait(process->changed_);
    if (!process->first_start_.ok()) return process->first_start_;
  }
  process->workers_ = std::make_unique<WorkerPool>(process->options_.lanes);
  if (process->options_.events != nullptr) process->options_.events->OnProcess(process->name_);
  return process;
}

PluginProcess::PluginProcess(Options options, std::unique_ptr<Region> memory)
    : options_(std::move(options)), memory_(std::move(memory)), lanes_(options_.lanes) {
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].memory = memory_->data() + i * kLaneBytes;
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

PluginProcess::~PluginProcess() {
  Stop();
  Close(wake_fd_);
}

void PluginProcess::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  if (workers_ != nullptr) workers_->Stop();
}

void PluginProcess::Wake() {
  const uint64_t one = 1;
  // Full only where it is readable anyway.
  if (::write(wake_fd_, &one, sizeof one) < 0) return;
}

pid_t PluginProcess::pid() const {
  MutexLock lock(mutex_);
  return pid_;
}

uint64_t PluginProcess::NewCodec() {
  MutexLock lock(mutex_);
  return ++newest_codec_;
}

void PluginProcess::Drop(uint64_t codec) {
  MutexLock lock(mutex_);
  if (pid_ != 0) dropped_.push_back(codec);
}

absl::Status PluginProcess::Unanswered(absl::string_view why) const {
  absl::Status status =
      absl::UnavailableError(absl::StrCat("codec ", name_, " (", options_.path, "): its process ", why));
  status.SetPayload(kUnanswered, absl::Cord());
  return status;
}

bool PluginProcess::IsUnanswered(const absl::Status& error) { return error.GetPayload(kUnanswered).has_value(); }

absl::StatusOr<PluginProcess::LaneUse> PluginProcess::Take() {
  const std::thread::id self = std::this_thread::get_id();
  {
    MutexLock lock(mutex_);
    while (pid_ != 0 && why_end_.empty() && !stopping_) {
      Lane* free = nullptr;
      for (Lane& lane : lanes_) {
        if (lane.taken) continue;
        free = &lane;
        if (lane.last == self) break;  // its memory may have what this thread goes on with
      }
      if (free != nullptr) {
        free->taken = true;
        const bool own = std::exchange(free->last, self) == self;
        return LaneUse(this, free, start_, own, std::exchange(dropped_, {}));
      }
      lock.Wait(changed_);
    }
  }
  if (options_.events != nullptr) options_.events->OnUnanswered(name_);
  return Unanswered("has ended, and is started again");
}

void PluginProcess::GiveBack(Lane& lane) {
  {
    MutexLock lock(mutex_);
    lane.taken = false;
  }
  changed_.notify_all();
}

void PluginProcess::EndProcess(uint64_t start, absl::string_view why) {
  {
    MutexLock lock(mutex_);
    if (start != start_ || pid_ == 0 || !why_end_.empty()) return;
    why_end_ = std::string(why);
  }
  Wake();
}

void PluginProcess::Run() {
  int64_t pause_ms = kRestartMsMin;
  for (;;) {
    const Time begun = Now();
    absl::StatusOr<Started> started = StartProcess();
    std::string why;
    if (started.ok()) {
      MutexLock lock(mutex_);
      if (!started_) {
        name_ = std::move(started->name);
        help_ = std::move(started->help);
        entries_ = started->entries;
      } else if (started->name != name_ || started->entries != entries_) {
        why =
            absl::StrCat("it is codec ", started->name, " now, or has other entries; the daemon must be started anew");
      }
      if (why.empty()) {
        ++start_;
        pid_ = child_.pid();
      }
    } else {
      why = std::string(started.status().message());
    }
    {
      MutexLock lock(mutex_);
      if (!started_) {
        started_ = true;
        first_start_ = started.status();
        stopping_ = stopping_ || !started.ok();
      }
    }
    changed_.notify_all();
    if (why.empty()) Watch();
    const std::string death = End();
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    if (why.empty()) why = death;
    if (Now() - begun >= std::chrono::milliseconds(kSettledMs)) pause_ms = kRestartMsMin;
    if (options_.events != nullptr)
      options_.events->OnProcessEnded(name_, Unanswered(absl::StrCat("ended: ", why)), pause_ms);
    if (!Pause(pause_ms)) return;
    pause_ms = std::min(2 * pause_ms, kRestartMsMax);
  }
}

absl::StatusOr<PluginProcess::Started> PluginProcess::StartProcess() {
  // One pair for control, then one for each lane.
  std::vector<int> fds;
  const auto pair = [&](int& ours, size_t place) {
    int both[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, both) != 0) return false;
    ours = both[0];
    fds.insert(fds.begin() + static_cast<ptrdiff_t>(place), both[1]);
    return true;
  };
  bool paired = pair(control_, 0);
  fds.push_back(memory_->fd());
  for (Lane& lane : lanes_) {
    paired = paired && pair(lane.socket, fds.size());
    lane.number = 0;
    lane.pages_codec = 0;
  }
  absl::StatusOr<ChildProcess> child = absl::UnavailableError("no descriptor is left for a codec plug-in's process");
  if (paired) child = ChildProcess::Start(options_.program, fds, ChildProcess::Environment::kLean);
  for (const int fd : fds) {
    if (fd != memory_->fd()) ::close(fd);
  }
  KV_RETURN_IF_ERROR(child.status());
  child_ = *std::move(child);
  pid_fd_ = static_cast<int>(::syscall(SYS_pidfd_open, child_.pid(), 0));
  plugin::SetUp set_up;
  set_up.lanes = static_cast<uint32_t>(lanes_.size());
  set_up.thread_bytes = kThreadBytes;
  set_up.lane_bytes = kLaneBytes;
  set_up.address_bytes = kAddressBytesMax + lanes_.size() * (kLaneBytes + kThreadBytes);
  std::string packet(reinterpret_cast<const char*>(&set_up), sizeof set_up);
  packet += options_.path;
  if (::send(control_, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    return absl::UnavailableError("the process of a codec plug-in ended at once");
  }
  return WaitUntilReady();
}

absl::StatusOr<PluginProcess::Started> PluginProcess::WaitUntilReady() {
  const Time end = Now() + std::chrono::milliseconds(options_.make_ms);
  const auto refused = [&](absl::string_view why) {
    return absl::UnavailableError(
        absl::StrCat("codec plug-in ", options_.path, ": its process ", why, "; codec_conformance may say more"));
  };
  for (;;) {
    const int64_t left = MsUntil(end);
    if (left <= 0) return refused(absl::StrCat("was not ready in ", options_.make_ms, " ms"));
    pollfd events[] = {{control_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    ::poll(events, 2, static_cast<int>(left));
    uint64_t ignored;
    if (::read(wake_fd_, &ignored, sizeof ignored) > 0) {
      MutexLock lock(mutex_);
      if (stopping_) return absl::CancelledError("codec plug-ins are being stopped");
    }
    plugin::Ready ready;
    char bytes[sizeof ready + plugin::kTextBytesMax + 1];
    const ssize_t n = ::recv(control_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return refused("ended as it loaded the object");
    if (n < static_cast<ssize_t>(sizeof ready) || n == static_cast<ssize_t>(sizeof bytes)) {
      return refused("said what it may not");
    }
    std::memcpy(&ready, bytes, sizeof ready);
    bytes[n] = '\0';
    const std::string text = PrintablePluginText(bytes + sizeof ready, plugin::kTextBytesMax);
    if (ready.status != KVMC_OK) {
      const bool known = ready.code >= 1 && ready.code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
      return absl::Status(known ? static_cast<absl::StatusCode>(ready.code) : absl::StatusCode::kInternal, text);
    }
    Started started;
    ready.name[sizeof ready.name - 1] = '\0';
    started.name = ready.name;
    if (!IsPluginName(started.name)) return refused("said a name that it may not have");
    started.help = text;
    started.entries = {ready.attend_batch != 0, ready.map_queries != 0, ready.expand_output != 0,
                       ready.project_output != 0, ready.output_factor != 0};
    return started;
  }
}

void PluginProcess::Watch() {
  for (;;) {
    uint64_t ignored;
    while (::read(wake_fd_, &ignored, sizeof ignored) > 0) {
    }
    {
      MutexLock lock(mutex_);
      if (stopping_ || !why_end_.empty()) return;
    }
    // It says nothing more on the control socket.
    pollfd events[] = {{wake_fd_, POLLIN, 0}, {control_, POLLIN, 0}, {pid_fd_, POLLIN, 0}};
    if (::poll(events, 3, -1) > 0 && (events[1].revents != 0 || events[2].revents != 0)) return;
  }
}

std::string PluginProcess::End() {
  std::string why;
  {
    MutexLock lock(mutex_);
    pid_ = 0;
    dropped_.clear();
    why = std::exchange(why_end_, "");
    // Who waits for an answer waits no longer, whoever else has the other end.
    for (const Lane& lane : lanes_) {
      if (lane.socket >= 0) ::shutdown(lane.socket, SHUT_RDWR);
    }
  }
  changed_.notify_all();
  const std::string death = Death(child_.End());
  Close(control_);
  Close(pid_fd_);
  MutexLock lock(mutex_);
  for (Lane& lane : lanes_) {
    while (lane.taken) lock.Wait(changed_);
    Close(lane.socket);
  }
  const bool by_itself = why.empty() || absl::StartsWith(why, kHasEnded);
  if (!by_itself) return why;
  return death.empty() ? "it closed its connection, or was killed" : death;
}

bool PluginProcess::Pause(int64_t ms) {
  const Time end = Now() + std::chrono::milliseconds(ms);
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return false;
    }
    const int64_t left = MsUntil(end);
    if (left <= 0) return true;
    pollfd event = {wake_fd_, POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(left));
    uint64_t ignored;
    if (::read(wake_fd_, &ignored, sizeof ignored) < 0) continue;
  }
}

PluginProcess::LaneUse::LaneUse(LaneUse&& other) noexcept
    : process_(other.process_),
      lane_(std::exchange(other.lane_, nullptr)),
      start_(other.start_),
      own_(other.own_),
      dropped_(std::move(other.dropped_)) {}

PluginProcess::LaneUse::~LaneUse() {
  if (lane_ != nullptr) process_->GiveBack(*lane_);
}

absl::Status PluginProcess::LaneUse::Failed(absl::string_view entry, absl::string_view why) {
  const std::string what = absl::StrCat(why, " (", entry, ")");
  process_->EndProcess(start_, what);
  lane_->pages_codec = 0;
  if (process_->options_.events != nullptr) process_->options_.events->OnUnanswered(process_->name_);
  return process_->Unanswered(what);
}

absl::Status PluginProcess::LaneUse::Ask(Call call, absl::string_view entry, int fd) {
  if (call.type != plugin::CallType::kAttend) lane_->pages_codec = 0;
  call.number = ++lane_->number;
  if (!SendCall(lane_->socket, call, fd).ok()) return Failed(entry, kHasEnded);
  const int64_t ms = call.type == plugin::CallType::kMake ? process_->options_.make_ms : process_->options_.call_ms;
  if (!WaitForAnswer(lane_->socket, Now() + std::chrono::milliseconds(ms))) {
    return Failed(entry, absl::StrCat("did not answer within ", ms, " ms"));
  }
  Answer answer;
  char bytes[sizeof answer + plugin::kTextBytesMax + 1];
  ssize_t n;
  do {
    n = ::recv(lane_->socket, bytes, sizeof bytes, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) return Failed(entry, kHasEnded);
  if (n < static_cast<ssize_t>(sizeof answer) || n == static_cast<ssize_t>(sizeof bytes)) {
    return Failed(entry, absl::StrCat("answered ", n, " bytes"));
  }
  std::memcpy(&answer, bytes, sizeof answer);
  if (answer.number != call.number) return Failed(entry, "answered what it was not asked");
  if (answer.status == KVMC_OK) return absl::OkStatus();
  bytes[n] = '\0';
  lane_->pages_codec = 0;
  return PluginStatus(answer.status, process_->name(), process_->path(), entry,
                      PrintablePluginText(bytes + sizeof answer, plugin::kTextBytesMax));
}

bool PluginProcess::LaneUse::HasPages(uint64_t codec, uint32_t layer, absl::Span<const uint8_t* const> pages) const {
  return own_ && lane_->pages_codec == codec && lane_->pages_layer == layer &&
         absl::MakeConstSpan(lane_->pages) == pages;
}

void PluginProcess::LaneUse::NotePages(uint64_t codec, uint32_t layer, absl::Span<const uint8_t* const> pages) {
  lane_->pages_codec = codec;
  lane_->pages_layer = layer;
  lane_->pages.assign(pages.begin(), pages.end());
}

}  // namespace kvmanager
