#include "kvmanager/api/socket_stream.h"

#include <capnp/serialize.h>
#include <errno.h>
#include <kj/debug.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>

namespace kvmanager {
namespace {

constexpr int kPiecesPerSend = 64;

kj::Exception Broken(const char* what, int error) {
  const bool gone = error == EPIPE || error == ECONNRESET || error == ETIMEDOUT || error == ENOTCONN || error == EBADF;
  return kj::Exception(gone ? kj::Exception::Type::DISCONNECTED : kj::Exception::Type::FAILED, __FILE__, __LINE__,
                       kj::str(what, ": ", strerror(error)));
}

/// The segment table in front of a message: segment count less one, sizes in words, padded to a word.
void AppendTable(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments, std::vector<kj::byte>* out) {
  const auto put = [out](uint32_t v) {
    for (int shift = 0; shift < 32; shift += 8) out->push_back(kj::byte(v >> shift));
  };
  put(uint32_t(segments.size() - 1));
  for (const auto& segment : segments) put(uint32_t(segment.size()));
  if (segments.size() % 2 == 0) put(0);
}

size_t SegmentBytes(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  size_t bytes = 0;
  for (const auto& segment : segments) bytes += segment.asBytes().size();
  return bytes;
}

kj::Exception Broken(const TlsLink& tls) {
  const absl::Status& why = tls.failure();
  const bool gone = why.code() != absl::StatusCode::kDataLoss;
  return kj::Exception(gone ? kj::Exception::Type::DISCONNECTED : kj::Exception::Type::FAILED, __FILE__, __LINE__,
                       kj::heapString(why.message().data(), why.message().size()));
}

// Of the bytes that a connection begins with: the header of a record of TLS, which no message's segment table can be.
bool IsTlsRecord(const kj::byte* at) { return at[0] >= 20 && at[0] <= 23 && at[1] == 3 && at[2] <= 4 && at[2] > 0; }

uint32_t Get32(const kj::byte* at) {
  return uint32_t(at[0]) | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
}

}  // namespace

// A message's memory, for as long as its reader lives, or who keeps it. The loop's thread destroys it.
struct SocketStream::Body {
  Body(kj::Array<capnp::word> w, std::shared_ptr<MessageMemory> m) : words(kj::mv(w)), memory(std::move(m)) {}
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;
  ~Body() {
    const size_t bytes = words.asBytes().size();
    words = nullptr;
    if (memory != nullptr) memory->GiveBack(bytes);
  }
  kj::Array<capnp::word> words;
  std::shared_ptr<MessageMemory> memory;  // nullptr: reserved nowhere
};

struct SocketStream::Rest {
  std::vector<kj::byte> head;  // what was held back, and the segment table; the first piece
  std::vector<iovec> pieces;
  size_t next = 0;
  std::vector<int> fds;  // go with the first byte

  /// So many bytes of the pieces are sent.
  void Skip(size_t sent) {
    while (sent > 0) {
      iovec& piece = pieces[next];
      const size_t step = std::min(sent, piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + step;
      piece.iov_len -= step;
      sent -= step;
      if (piece.iov_len == 0) ++next;
    }
  }
};

SocketStream::SocketStream(kj::UnixEventPort& port, int fd, int write_fd, std::shared_ptr<MessageMemory> memory,
                           TlsLink* tls, size_t write_turn_bytes)
    : port_(port),
      fd_(fd),
      write_fd_(write_fd),
      tls_(tls),
      write_turn_bytes_(write_turn_bytes),
      observer_(port, fd, kj::UnixEventPort::FdObserver::OBSERVE_READ),
      buffer_(kj::heapArray<kj::byte>(kReadAheadBytes)),
      memory_(std::move(memory)) {
  out_.reserve(kWriteLateBytesMax + 256);
}

SocketStream::~SocketStream() {
  if (memory_ != nullptr && words_ != nullptr) memory_->GiveBack(words_.asBytes().size());
}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> SocketStream::tryReadMessage(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                                                capnp::ReaderOptions options,
                                                                                kj::ArrayPtr<capnp::word>) {
  return kj::evalNow([&] { return Read(fd_space, options); });
}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> SocketStream::Read(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                                      capnp::ReaderOptions options) {
  for (;;) {
    if (Assemble(options)) {
      auto body = std::make_shared<Body>(kj::mv(words_), memory_);
      words_ = nullptr;
      filled_bytes_ = 0;
      if (receiving_) memory_->NoteReceived(/*whole=*/true);
      receiving_ = false;
      const auto bytes = body->words.asBytes();
      if (memory_ != nullptr && bytes.size() >= MessageMemory::kKeptBytesMin) memory_->NoteWhole(bytes, body);
      auto fds = TakeFds(fd_space);
      auto reader = kj::heap<capnp::FlatArrayMessageReader>(body->words, options);
      return kj::Maybe<capnp::MessageReaderAndFds>(
          capnp::MessageReaderAndFds{kj::Own<capnp::MessageReader>(reader.attach(kj::mv(body))), fds});
    }
    if (wanted_bytes_ != 0) {
      return memory_->Take(wanted_bytes_).then([this, fd_space, options] {
        wanted_bytes_ = 0;
        reserved_ = true;
        return Read(fd_space, options);
      });
    }
    KJ_IF_MAYBE (readable, readable_) {
      auto wait = kj::mv(*readable);
      readable_ = nullptr;
      return wait.then([this, fd_space, options] { return Read(fd_space, options); });
    }
    ssize_t n;
    if (words_ != nullptr) {
      auto rest = words_.asBytes().slice(filled_bytes_, words_.asBytes().size());
      n = Receive(rest.begin(), rest.size(), fd_space.size() > 0);
      if (n > 0) filled_bytes_ += size_t(n);
    } else {
      if (begin_ > 0) {  // less than a segment table is left
        memmove(buffer_.begin(), buffer_.begin() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
      }
      n = Receive(buffer_.begin() + end_, buffer_.size() - end_, fd_space.size() > 0);
      if (n > 0) end_ += size_t(n);
    }
    if (n == 0) {
      if (words_ == nullptr && begin_ == end_) return kj::Maybe<capnp::MessageReaderAndFds>(nullptr);
      kj::throwFatalException(kj::Exception(kj::Exception::Type::DISCONNECTED, __FILE__, __LINE__,
                                            kj::str("the connection ended inside a message")));
    }
  }
}

bool SocketStream::Assemble(const capnp::ReaderOptions& options) {
  if (words_ == nullptr) {
    const size_t have = end_ - begin_;
    if (have < 4) return false;
    const kj::byte* at = buffer_.begin() + begin_;
    const uint64_t segments = uint64_t{Get32(at)} + 1;
    if (segments > kSegmentsMax && IsTlsRecord(at)) {
      other_speaks_tls_ = true;
      KJ_FAIL_REQUIRE("the other side speaks TLS, and this one does not");
    }
    KJ_REQUIRE(segments <= kSegmentsMax, "a message has too many segments", segments);
    const size_t table_words = segments / 2 + 1;
    if (have < table_words * sizeof(capnp::word)) return false;
    uint64_t words = table_words;
    for (uint64_t i = 0; i < segments; ++i) words += Get32(at + 4 + 4 * i);
    KJ_REQUIRE(words - table_words <= options.traversalLimitInWords, "a message is larger than this side accepts",
               words);
    const uint64_t bytes = words * sizeof(capnp::word);
    KJ_REQUIRE(memory_ == nullptr || bytes <= memory_->bytes_max(), "a message is larger than this side accepts now",
               bytes);
    if (memory_ != nullptr && !reserved_ && !memory_->TryTake(bytes)) {
      wanted_bytes_ = bytes;
      return false;
    }
    reserved_ = false;
    words_ = kj::heapArray<capnp::word>(words);
    message_start_ = received_ - have;
    filled_bytes_ = std::min<size_t>(have, words * sizeof(capnp::word));
    memcpy(words_.asBytes().begin(), at, filled_bytes_);
    begin_ += filled_bytes_;
    if (begin_ == end_) begin_ = end_ = 0;
  }
  if (filled_bytes_ == words_.asBytes().size()) return true;
  receiving_ = memory_ != nullptr;
  if (receiving_) memory_->NoteReceived(/*whole=*/false);
  return false;
}

void SocketStream::Wait() {
  ++waits_;
  readable_ = observer_.whenBecomesReadable();
}

ssize_t SocketStream::Receive(kj::byte* to, size_t bytes_max, bool want_fds) {
  if (turn_bytes_ >= kTurnBytes) {  // a timer, since the loop looks at sockets before it comes back
    turn_bytes_ = 0;
    readable_ = port_.getTimer().afterDelay(0 * kj::NANOSECONDS);
    return -1;
  }
  bytes_max = std::min(bytes_max, kTurnBytes - turn_bytes_);
  const ssize_t n = tls_ != nullptr ? ReceiveTls(to, bytes_max) : ReceivePlain(to, bytes_max, want_fds);
  // What was waited for comes in a turn of its own.
  turn_bytes_ = readable_ != nullptr ? 0 : turn_bytes_ + size_t(std::max<ssize_t>(n, 0));
  return n;
}

ssize_t SocketStream::ReceiveTls(kj::byte* to, size_t bytes_max) {
  const int64_t n = tls_->Read(to, bytes_max);
  if (n == -2) kj::throwFatalException(Broken(*tls_));
  if (n > 0) received_ += uint64_t(n);
  if (n == -1) Wait();
  return ssize_t(n);
}

ssize_t SocketStream::ReceivePlain(kj::byte* to, size_t bytes_max, bool want_fds) {
  iovec piece{to, bytes_max};
  alignas(cmsghdr) char control[CMSG_SPACE(kFdsPerReadMax * sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (want_fds) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  ssize_t n;
  do {
    n = ::recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) kj::throwFatalException(Broken("reading from the socket", errno));
    Wait();
    return -1;
  }
  HeldFds held{received_, received_ + uint64_t(n), {}};
  received_ += uint64_t(n);
  if (want_fds) {
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        held.fds.emplace_back(fd);
      }
    }
  }
  // Nothing is left after a short read, unless it stopped at descriptors or the end is already known to follow: an edge
  // that was seen will not come again.
  bool ended = true;
  KJ_IF_MAYBE (hint, observer_.atEndHint()) {
    ended = *hint;
  }
  if (n > 0 && size_t(n) < bytes_max && held.fds.empty() && !ended) Wait();
  if (!held.fds.empty()) held_.push_back(kj::mv(held));
  return n;
}

kj::ArrayPtr<kj::AutoCloseFd> SocketStream::TakeFds(kj::ArrayPtr<kj::AutoCloseFd> fd_space) {
  size_t taken = 0;
  // The message that was put together ends where the unread bytes begin.
  const uint64_t message_end = received_ - (end_ - begin_);
  while (!held_.empty() && held_.front().from <= message_start_ && held_.front().to <= message_end) {
    for (auto& fd : held_.front().fds) {
      if (taken < fd_space.size()) fd_space[taken++] = kj::mv(fd);
    }
    held_.pop_front();
  }
  return fd_space.slice(0, taken);
}

kj::Promise<void> SocketStream::writeMessage(kj::ArrayPtr<const int> fds,
                                             kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  KJ_IF_MAYBE (failure, failure_) {
    return kj::Exception(*failure);
  }
  const size_t bytes = (segments.size() / 2 + 1) * sizeof(capnp::word) + SegmentBytes(segments);
  const bool small = fds.size() == 0 && out_.size() + bytes <= kWriteLateBytesMax;
  if (!small && busy_) {
    return blocked_.addBranch().then([this, fds, segments] { return writeMessage(fds, segments); });
  }
  AppendTable(segments, &out_);
  if (small) {
    for (const auto& segment : segments) out_.insert(out_.end(), segment.asBytes().begin(), segment.asBytes().end());
    FlushLater();
    return kj::READY_NOW;
  }
  auto rest = kj::heap<Rest>();
  // What was held back must not carry the descriptors, or they would belong to an earlier message.
  if (fds.size() > 0) {
    const size_t table_bytes = (segments.size() / 2 + 1) * sizeof(capnp::word);
    std::vector<kj::byte> table(out_.end() - table_bytes, out_.end());
    out_.resize(out_.size() - table_bytes);
    Flush();
    if (busy_) return blocked_.addBranch().then([this, fds, segments] { return writeMessage(fds, segments); });
    KJ_IF_MAYBE (failure, failure_) {
      return kj::Exception(*failure);
    }
    rest->head = std::move(table);
    rest->fds.assign(fds.begin(), fds.end());
  } else {
    rest->head.swap(out_);
  }
  rest->pieces.push_back({rest->head.data(), rest->head.size()});
  for (const auto& segment : segments) {
    if (segment.size() > 0) {
      rest->pieces.push_back({const_cast<capnp::word*>(segment.begin()), segment.asBytes().size()});
    }
  }
  return kj::evalNow([&]() -> kj::Promise<void> {
    if (Send(*rest)) return kj::READY_NOW;
    Block(kj::mv(rest));
    return blocked_.addBranch();
  });
}

kj::Promise<void> SocketStream::writeMessages(
    kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) {
  kj::Promise<void> all = kj::READY_NOW;
  for (auto& message : messages) {
    all = all.then([this, message] { return writeMessage(nullptr, message); });
  }
  return all;
}

kj::Maybe<int> SocketStream::getSendBufferSize() {
  int bytes = 0;
  socklen_t length = sizeof(bytes);
  if (::getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &bytes, &length) != 0) return nullptr;
  return bytes;
}

kj::Promise<void> SocketStream::end() {
  if (!busy_) {
    Flush();
    if (!busy_) {
      if (tls_ != nullptr) tls_->EndWriting();
      ::shutdown(fd_, SHUT_WR);
      return kj::READY_NOW;
    }
  }
  return blocked_.addBranch().then([this] { return end(); });
}

void SocketStream::FlushLater() {
  if (flush_due_ || busy_) return;  // a blocked send looks at out_ when it is done
  flush_due_ = true;
  flush_ = kj::evalLast([this] {
             flush_due_ = false;
             if (busy_) return;
             sent_bytes_ = 0;  // the loop looks at others behind this
             Flush();
           }).eagerlyEvaluate([this](kj::Exception&& e) { failure_ = kj::mv(e); });
}

void SocketStream::Flush() {
  if (out_.empty()) return;
  Rest rest;
  rest.pieces.push_back({out_.data(), out_.size()});
  try {
    if (Send(rest)) {
      out_.clear();
      return;
    }
  } catch (const kj::Exception& e) {
    failure_ = kj::cp(e);
    out_.clear();
    return;
  }
  const auto left = rest.pieces[0];
  auto blocked = kj::heap<Rest>();
  const auto* bytes = static_cast<const kj::byte*>(left.iov_base);
  blocked->head.assign(bytes, bytes + left.iov_len);
  blocked->pieces.push_back({blocked->head.data(), blocked->head.size()});
  out_.clear();
  Block(kj::mv(blocked));
}

/// True if all of it is sent, false if the socket takes no more now, or others come first. Throws if the connection is
/// gone.
bool SocketStream::Send(Rest& rest) {
  if (tls_ != nullptr) return SendTls(rest);
  while (rest.next < rest.pieces.size()) {
    if (sent_bytes_ >= write_turn_bytes_) return false;
    std::array<iovec, kPiecesPerSend> pieces;
    size_t count = 0;
    for (size_t left = write_turn_bytes_ - sent_bytes_; left > 0 && count < pieces.size(); ++count) {
      if (rest.next + count == rest.pieces.size()) break;
      pieces[count] = rest.pieces[rest.next + count];
      pieces[count].iov_len = std::min(pieces[count].iov_len, left);
      left -= pieces[count].iov_len;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    std::vector<char> control;
    if (!rest.fds.empty()) {
      control.resize(CMSG_SPACE(rest.fds.size() * sizeof(int)));
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(rest.fds.size() * sizeof(int));
      memcpy(CMSG_DATA(c), rest.fds.data(), rest.fds.size() * sizeof(int));
    }
    ssize_t n = ::sendmsg(write_fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      kj::throwFatalException(Broken("writing to the socket", errno));
    }
    rest.fds.clear();
    rest.Skip(size_t(n));
    sent_bytes_ += size_t(n);
  }
  return true;
}

bool SocketStream::SendTls(Rest& rest) {
  KJ_REQUIRE(rest.fds.empty(), "no descriptor goes through TLS");
  std::array<kj::byte, TlsLink::kRecordBytes> record;
  while (rest.next < rest.pieces.size()) {
    if (sent_bytes_ >= write_turn_bytes_) return false;
    // A record each for small pieces would cost more than the copy. What is tried again has the same bytes, as it must.
    const iovec& first = rest.pieces[rest.next];
    const void* from = first.iov_base;
    size_t bytes = first.iov_len;
    if (bytes < record.size() && rest.next + 1 < rest.pieces.size()) {
      bytes = 0;
      for (size_t at = rest.next; at < rest.pieces.size() && bytes < record.size(); ++at) {
        const size_t step = std::min(rest.pieces[at].iov_len, record.size() - bytes);
        memcpy(record.data() + bytes, rest.pieces[at].iov_base, step);
        bytes += step;
      }
      from = record.data();
    }
    const int64_t n = tls_->Write(from, bytes);
    if (n == -2) kj::throwFatalException(Broken(*tls_));
    if (n == -1) return false;
    rest.Skip(size_t(n));
    sent_bytes_ += size_t(n);
  }
  return true;
}

void SocketStream::Block(kj::Own<Rest> rest) {
  busy_ = true;
  blocked_ = SendRest(kj::mv(rest))
                 .then(
                     [this] {
                       busy_ = false;
                       if (!out_.empty()) FlushLater();
                     },
                     [this](kj::Exception&& e) {
                       busy_ = false;
                       failure_ = kj::cp(e);
                       kj::throwFatalException(kj::mv(e));
                     })
                 .fork();
}

kj::Promise<void> SocketStream::SendRest(kj::Own<Rest> rest) {
  // Watched only while blocked: see the header, 3.
  auto observer =
      kj::heap<kj::UnixEventPort::FdObserver>(port_, write_fd_, kj::UnixEventPort::FdObserver::OBSERVE_WRITE);
  auto writable = observer->whenBecomesWritable();
  return writable.attach(kj::mv(observer)).then([this, rest = kj::mv(rest)]() mutable -> kj::Promise<void> {
    sent_bytes_ = 0;
    if (Send(*rest)) return kj::READY_NOW;
    return SendRest(kj::mv(rest));
  });
}

}  // namespace kvmanager
