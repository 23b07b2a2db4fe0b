#include "transport/ucx/ucx_process_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status Gone() { return absl::UnavailableError("this daemon's UCX process has ended"); }

std::chrono::steady_clock::time_point Now() { return std::chrono::steady_clock::now(); }

}  // namespace

class UcxProcessClient::RemoteSource final : public Source {
 public:
  RemoteSource(std::shared_ptr<UcxProcessClient> client, uint64_t start, uint64_t source, uint64_t bytes)
      : start(start), source(source), client_(std::move(client)), bytes_(bytes) {}
  ~RemoteSource() override { client_->Release(start, source); }
  uint64_t bytes() const override { return bytes_; }
  const uint64_t start, source;

 private:
  const std::shared_ptr<UcxProcessClient> client_;
  const uint64_t bytes_;
};

class UcxProcessClient::StagedPiece final : public Piece {
 public:
  StagedPiece(std::shared_ptr<UcxProcessClient> client, uint64_t place, uint64_t bytes)
      : client_(std::move(client)), place_(place), bytes_(bytes) {}
  ~StagedPiece() override { client_->GiveBack(place_, bytes_); }
  absl::Span<const uint8_t> bytes() const override { return {client_->staging_->data() + place_, bytes_}; }

 private:
  const std::shared_ptr<UcxProcessClient> client_;
  const uint64_t place_, bytes_;
};

UcxProcessClient::UcxProcessClient(Options options, std::unique_ptr<Region> staging)
    : options_(std::move(options)), staging_(std::move(staging)), free_staging_(staging_->bytes()) {
  for (const Memory& memory : options_.memory) spans_.emplace_back(memory.data, memory.bytes);
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

UcxProcessClient::~UcxProcessClient() {
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

absl::Status UcxProcessClient::Start() {
  if (wake_fd_ < 0) return absl::ResourceExhaustedError("no descriptor is left for UCX");
  thread_ = std::thread([this] { Run(); });
  MutexLock lock(mutex_);
  while (!started_) lock.Wait(changed_);
  return first_start_;
}

void UcxProcessClient::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  Wake();
  if (thread_.joinable()) thread_.join();
}

void UcxProcessClient::Wake() {
  const uint64_t one = 1;
  // Full only where it is readable anyway.
  if (::write(wake_fd_, &one, sizeof(one)) < 0) return;
}

std::string UcxProcessClient::Describe(size_t index, Context context) const {
  ucx::Description here;
  {
    MutexLock lock(mutex_);
    here = here_;
  }
  if (here.address.empty()) return "";
  here.memory = static_cast<uint32_t>(index);
  here.bytes = spans_[index].size();
  return ucx::Seal(here, context, key());
}

std::string UcxProcessClient::version() const {
  MutexLock lock(mutex_);
  return absl::StrCat(here_.major, ".", here_.minor);
}

pid_t UcxProcessClient::process() const {
  MutexLock lock(mutex_);
  return pid_;
}

bool UcxProcessClient::idle() const {
  MutexLock lock(mutex_);
  return waiting_.empty() && asked_.empty() && free_staging_.all_free();
}

absl::StatusOr<std::shared_ptr<RemoteMemory::Source>> UcxProcessClient::Open(absl::Span<const uint8_t> description,
                                                                             Context context) {
  KV_ASSIGN_OR_RETURN(ucx::Description said, ucx::Unseal(description, context, key()));
  ucx::Packet open{{.type = ucx::PacketType::kOpen, .memory = said.memory}, std::move(said.address)};
  std::copy(said.ticket.begin(), said.ticket.end(), open.head.ticket);
  uint64_t start = 0;
  {
    MutexLock lock(mutex_);
    if (here_.address.empty()) return Gone();
    if (said.major != here_.major || said.minor != here_.minor) {
      return FieldError(absl::StatusCode::kUnavailable, "the peer's UCX", absl::StrCat(said.major, ".", said.minor),
                        absl::StrCat(here_.major, ".", here_.minor));
    }
    start = start_;
    open.head.source = ++newest_;
    to_send_.push_back(ucx::EncodePacket(open));
  }
  Wake();
  return std::shared_ptr<Source>(
      std::make_shared<RemoteSource>(shared_from_this(), start, open.head.source, said.bytes));
}

void UcxProcessClient::Release(uint64_t start, uint64_t source) {
  std::vector<Failed> failed;
  {
    MutexLock lock(mutex_);
    if (start != start_ || stopping_) return;
    for (auto read = waiting_.begin(); read != waiting_.end();) {
      const bool of_it = read->start == start && read->source == source;
      if (of_it) failed.push_back({std::move(read->done), absl::UnavailableError("nobody wants it any more")});
      read = of_it ? waiting_.erase(read) : std::next(read);
    }
    to_send_.push_back(ucx::EncodePacket({{.type = ucx::PacketType::kRelease, .source = source}, ""}));
  }
  for (Failed& read : failed) read.done(std::move(read.why));
  Wake();
}

void UcxProcessClient::Read(const std::shared_ptr<Source>& from, uint64_t offset, uint64_t bytes, Done done) {
  const auto& source = static_cast<const RemoteSource&>(*from);
  KV_CHECK(bytes > 0 && offset <= source.bytes() && bytes <= source.bytes() - offset);
  if (bytes > staging_->bytes()) {
    return done(FieldError(absl::StatusCode::kUnavailable, "bytes of a read", absl::StrCat(bytes),
                           absl::StrCat("at most ", staging_->bytes())));
  }
  {
    MutexLock lock(mutex_);
    if (source.start == start_ && !here_.address.empty() && !stopping_) {
      waiting_.push_back({source.start, source.source, offset, bytes, 0, std::exchange(done, nullptr), {}});
      SendWaiting();
    }
  }
  if (done) return done(Gone());
  Wake();
}

void UcxProcessClient::SendWaiting() {
  while (!waiting_.empty()) {
    const absl::optional<uint64_t> place = free_staging_.Take(waiting_.front().bytes);
    if (!place.has_value()) return;
    Asked read = std::move(waiting_.front());
    waiting_.pop_front();
    read.place = *place;
    read.since = Now();
    const uint64_t number = ++newest_;
    to_send_.push_back(ucx::EncodePacket({{.type = ucx::PacketType::kRead,
                                           .source = read.source,
                                           .read = number,
                                           .offset = read.offset,
                                           .bytes = read.bytes,
                                           .place = read.place},
                                          ""}));
    asked_.emplace(number, std::move(read));
  }
}

void UcxProcessClient::GiveBack(uint64_t place, uint64_t bytes) {
  {
    MutexLock lock(mutex_);
    free_staging_.GiveBack(place, bytes);
    if (waiting_.empty() || stopping_) return;
    SendWaiting();
  }
  Wake();
}

void UcxProcessClient::Run() {
  for (;;) {
    absl::Status status = StartProcess();
    {
      MutexLock lock(mutex_);
      if (!started_) {
        started_ = true;
        first_start_ = status;
        stopping_ = stopping_ || !status.ok();
        changed_.notify_all();
      }
    }
    if (status.ok()) Serve();
    EndProcess();
    if (!Pause()) return;
  }
}

bool UcxProcessClient::Pause() {
  const Time end = Now() + std::chrono::milliseconds(UcxMemory::kRestartMs);
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return false;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Now()).count();
    if (left <= 0) return true;
    pollfd event = {wake_fd_, POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(left));
    uint64_t ignored;
    if (::read(wake_fd_, &ignored, sizeof(ignored)) < 0) continue;
  }
}

absl::Status UcxProcessClient::StartProcess() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return absl::UnavailableError("no descriptor is left for UCX's process");
  }
  socket_ = pair[0];
  std::vector<int> fds = {pair[1], staging_->fd()};
  ucx::Packet set_up{{.type = ucx::PacketType::kSetUp,
                      .memory = static_cast<uint32_t>(options_.memory.size()),
                      .offset = options_.answer_bytes,
                      .bytes = staging_->bytes()},
                     ""};
  for (const Memory& memory : options_.memory) {
    fds.push_back(memory.fd);
    set_up.payload.append(reinterpret_cast<const char*>(&memory.bytes), sizeof(memory.bytes));
  }
  for (const auto& [name, value] : options_.settings) absl::StrAppend(&set_up.payload, name, "=", value, "\n");
  absl::StatusOr<ChildProcess> child = ChildProcess::Start(options_.program, fds);
  ::close(pair[1]);
  KV_RETURN_IF_ERROR(child.status());
  child_ = *std::move(child);
  const std::string bytes = ucx::EncodePacket(set_up);
  if (::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) return Gone();
  KV_ASSIGN_OR_RETURN(const ucx::Packet ready, WaitUntilReady());
  MutexLock lock(mutex_);
  ++start_;
  pid_ = child_.pid();
  here_.major = static_cast<uint16_t>(ready.head.major);
  here_.minor = static_cast<uint16_t>(ready.head.minor);
  std::copy_n(ready.head.ticket, here_.ticket.size(), here_.ticket.begin());
  here_.address = ready.payload;
  return absl::OkStatus();
}

absl::StatusOr<ucx::Packet> UcxProcessClient::WaitUntilReady() {
  const Time end = Now() + std::chrono::milliseconds(UcxMemory::kStartMs);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Now()).count();
    if (left <= 0)
      return absl::UnavailableError(absl::StrCat("UCX's process was not ready in ", UcxMemory::kStartMs, " ms"));
    pollfd events[] = {{socket_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    ::poll(events, 2, static_cast<int>(left));
    uint64_t ignored;
    if (::read(wake_fd_, &ignored, sizeof(ignored)) > 0) {
      MutexLock lock(mutex_);
      if (stopping_) return absl::CancelledError("UCX is being stopped");
    }
    char bytes[sizeof(ucx::PacketHead) + ucx::kPayloadBytesMax + 1];
    const ssize_t n = ::recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return absl::UnavailableError("UCX's process ended while it started; its log is on stderr");
    absl::optional<ucx::Packet> packet = ucx::ParsePacket({bytes, static_cast<size_t>(n)});
    if (packet.has_value() && packet->head.type == ucx::PacketType::kFailed) {
      return absl::UnavailableError(packet->payload);
    }
    if (!packet.has_value() || packet->head.type != ucx::PacketType::kReady || packet->payload.empty() ||
        packet->payload.size() > ucx::kAddressBytesMax) {
      return absl::UnavailableError("UCX's process said what it may not");
    }
    return *std::move(packet);
  }
}

void UcxProcessClient::Serve() {
  for (;;) {
    uint64_t ignored;
    while (::read(wake_fd_, &ignored, sizeof(ignored)) > 0) {
    }
    bool more = false, reads = false;
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      for (const auto& [number, read] : asked_) {
        if (Now() - read.since >= std::chrono::milliseconds(UcxMemory::kReadMsMax)) return;
        break;  // numbers, and times, ascend
      }
      reads = !asked_.empty();
    }
    if (!Write()) return;
    {
      MutexLock lock(mutex_);
      more = !to_send_.empty();
    }
    pollfd events[] = {{socket_, static_cast<int16_t>(more ? POLLIN | POLLOUT : POLLIN), 0}, {wake_fd_, POLLIN, 0}};
    ::poll(events, 2, reads ? static_cast<int>(kLookMs) : -1);
    if (!TakeAnswers()) return;
  }
}

bool UcxProcessClient::Write() {
  for (;;) {
    std::string next;
    {
      MutexLock lock(mutex_);
      if (to_send_.empty()) return true;
      next = std::move(to_send_.front());
      to_send_.pop_front();
    }
    const ssize_t n = ::send(socket_, next.data(), next.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n == static_cast<ssize_t>(next.size())) continue;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      MutexLock lock(mutex_);
      to_send_.push_front(std::move(next));
      return true;
    }
    return false;
  }
}

bool UcxProcessClient::TakeAnswers() {
  for (;;) {
    char bytes[sizeof(ucx::PacketHead) + ucx::kPayloadBytesMax + 1];
    const ssize_t n = ::recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) return false;
    const absl::optional<ucx::Packet> packet = ucx::ParsePacket({bytes, static_cast<size_t>(n)});
    if (!packet.has_value() || packet->head.type != ucx::PacketType::kDone) return false;
    Asked read;
    {
      MutexLock lock(mutex_);
      const auto found = asked_.find(packet->head.read);
      if (found == asked_.end()) return false;
      read = std::move(found->second);
      asked_.erase(found);
    }
    auto piece = std::make_unique<StagedPiece>(shared_from_this(), read.place, read.bytes);
    if (packet->payload.empty()) {
      read.done(std::unique_ptr<Piece>(std::move(piece)));
    } else {
      piece.reset();
      read.done(absl::UnavailableError(packet->payload));
    }
  }
}

void UcxProcessClient::EndProcess() {
  child_.End();  // from here on nobody writes to staging
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  std::vector<Done> failed;
  bool answered = true;
  {
    MutexLock lock(mutex_);
    pid_ = 0;
    ++start_;  // what is said for this process from here on is for none
    here_.address.clear();
    to_send_.clear();
    for (auto& [number, read] : asked_) {
      free_staging_.GiveBack(read.place, read.bytes);
      failed.push_back(std::move(read.done));
    }
    asked_.clear();
    for (Asked& read : waiting_) failed.push_back(std::move(read.done));
    waiting_.clear();
    answered = !stopping_;
  }
  for (size_t i = 0; answered && i < failed.size(); ++i) failed[i](Gone());
}

}  // namespace kvmanager
