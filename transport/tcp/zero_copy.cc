#include "transport/tcp/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvmanager::tcp {

absl::optional<ZeroCopy::Completion> ZeroCopy::ParseCompletion(const msghdr& message) {
  auto* const whole = const_cast<msghdr*>(&message);  // the macro's, which changes nothing
  for (cmsghdr* said = CMSG_FIRSTHDR(whole); said != nullptr; said = CMSG_NXTHDR(whole, said)) {
    const bool of_errors = (said->cmsg_level == SOL_IP && said->cmsg_type == IP_RECVERR) ||
                           (said->cmsg_level == SOL_IPV6 && said->cmsg_type == IPV6_RECVERR);
    sock_extended_err error;
    if (!of_errors || said->cmsg_len < CMSG_LEN(sizeof(error))) continue;
    std::memcpy(&error, CMSG_DATA(said), sizeof(error));
    if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY || error.ee_errno != 0) continue;
    return Completion{error.ee_info, error.ee_data, (error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0};
  }
  return absl::nullopt;
}

void ZeroCopy::Enable(int fd) {
  const int on = 1;
  if (use_ == ZeroCopyUse::kNever || ::setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)) != 0) return;
  state_ = use_ == ZeroCopyUse::kAlways ? State::kOn : State::kTrying;
}

size_t ZeroCopy::allowed() const {
  if (state_ == State::kOff) return 0;
  const size_t most = state_ == State::kTrying ? 1 : kOutstandingMax;
  return most - std::min(most, writes_.size());
}

void ZeroCopy::OnWritten(absl::Span<const uint32_t> bytes, uint64_t refused_bytes) {
  for (const uint32_t n : bytes) writes_.push_back({n});
  if (refused_bytes > 0) metrics_.refused.Increment(static_cast<double>(refused_bytes));
}

void ZeroCopy::OnCompleted(const Completion& completion) {
  // As distances, which do not wrap: far fewer than 2^31 are on their way.
  const uint32_t begin = completion.first - first_;
  const uint64_t end = uint64_t{begin} + (completion.last - completion.first) + 1;
  if (end > writes_.size()) return;
  for (uint64_t at = begin; at < end; ++at) {
    if (std::exchange(writes_[at].completed, true)) continue;
    (completion.copied ? metrics_.copied : metrics_.sent).Increment(writes_[at].bytes);
    copied_ = completion.copied ? copied_ + 1 : 0;
    if (state_ == State::kTrying && !completion.copied) state_ = State::kOn;
    if (copied_ >= kCopiedMax && use_ != ZeroCopyUse::kAlways) state_ = State::kOff;
  }
  while (!writes_.empty() && writes_.front().completed) {
    writes_.pop_front();
    ++first_;
  }
}

bool ZeroCopy::Read(int fd) {
  for (bool any = false;; any = true) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(sock_extended_err) + sizeof(sockaddr_in6))];
    msghdr message = {};
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    ssize_t n = 0;
    do {
      n = ::recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0) return any;
    if (const auto completion = ParseCompletion(message)) OnCompleted(*completion);
  }
}

void ZeroCopy::GiveUp() {
  for (const Write& write : writes_) {
    if (!write.completed) metrics_.unconfirmed.Increment(write.bytes);
  }
  first_ += static_cast<uint32_t>(writes_.size());
  writes_.clear();
}

}  // namespace kvmanager::tcp
