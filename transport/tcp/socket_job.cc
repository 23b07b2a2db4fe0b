#include "transport/tcp/socket_job.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/failpoints.h"

namespace kvmanager::tcp {

void SocketJob::Clear() {
  pieces_.clear();
  checksums_.clear();
  next_ = offset_ = 0;
}

void SocketJob::Start(const std::shared_ptr<SocketJob>& job, WorkerPool& workers, uint64_t bytes_max,
                      absl::AnyInvocable<void()> moved) {
  job->moved_ = std::move(moved);
  job->bytes_max_ = bytes_max;
  job->bytes_ = 0;
  job->error_ = 0;
  job->zero_copied_.clear();
  job->zero_copy_refused_bytes_ = 0;
  workers.Post(WorkerPool::Priority::kEncode, [job] { job->Work(); });
}

void SocketJob::Work() {
  {
    MutexLock lock(mutex_);
    if (abandoned_) return;
    working_ = true;
  }
  while (Step()) {
  }
  absl::AnyInvocable<void()> moved;
  {
    MutexLock lock(mutex_);
    working_ = false;
    if (!abandoned_) moved = std::move(moved_);
    idle_.notify_all();
  }
  if (moved) moved();
}

bool SocketJob::Step() {
  std::array<iovec, kStepPieces> some;
  size_t count = 0, offered = 0;
  size_t skip = offset_;
  // What is written in another way than the pieces behind it goes in a call of its own.
  const bool alone = zero_copies_allowed_ > 0 && next_ < lasting_;
  const size_t end = alone ? lasting_ : pieces_.size();
  for (size_t at = next_; at < end && count < kStepPieces; ++at) {
    const size_t bytes = std::min({pieces_[at].iov_len - skip, kStepBytes - offered, bytes_max_ - bytes_ - offered});
    if (bytes == 0) break;
    some[count++] = {static_cast<uint8_t*>(pieces_[at].iov_base) + skip, bytes};
    offered += bytes;
    skip = 0;
  }
  if (count == 0 || abandoned_) return false;
  msghdr message = {};
  message.msg_iov = some.data();
  message.msg_iovlen = count;
  const bool zero_copy = zero_copies_allowed_ > 0 && !alone && offered >= count * piece_bytes_min_;
  const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (zero_copy ? MSG_ZEROCOPY : 0) | (alone ? MSG_MORE : 0);
  if (Fails(way_ == Way::kRead ? Failpoint::kPeerReceive : Failpoint::kPeerSend)) {
    error_ = ECONNRESET;
    return false;
  }
  const ssize_t n = way_ == Way::kRead ? ::recvmsg(fd_, &message, MSG_DONTWAIT) : ::sendmsg(fd_, &message, flags);
  if (n < 0) {
    if (errno == EINTR) return true;
    if (errno == ENOBUFS && zero_copy) {  // a limit of pinned memory, or of what the socket keeps of such writes
      zero_copies_allowed_ = 0;
      zero_copy_refused_bytes_ += offered;
      return true;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) error_ = errno;
    return false;
  }
  if (n == 0) {
    error_ = kEnd;
    return false;
  }
  bytes_ += n;
  if (zero_copy) {
    zero_copied_.push_back(static_cast<uint32_t>(n));
    --zero_copies_allowed_;
  }
  for (size_t left = n; left > 0;) {
    const iovec& piece = pieces_[next_];
    const size_t taken = std::min(left, piece.iov_len - offset_);
    left -= taken;
    offset_ += taken;
    if (offset_ < piece.iov_len) break;
    if (way_ == Way::kRead) checksums_.push_back(Checksum(static_cast<const uint8_t*>(piece.iov_base), piece.iov_len));
    ++next_;
    offset_ = 0;
  }
  return true;
}

void SocketJob::Abandon() {
  MutexLock lock(mutex_);
  abandoned_ = true;
  moved_ = nullptr;
  while (working_) lock.Wait(idle_);
}

}  // namespace kvmanager::tcp
