// SocketStream: Cap'n Proto messages over one connected socket, with as few system calls as a round trip allows.
//
// What it does that kj's own stream does not, and why (each saves a system call or a wake-up of a call's round trip):
//  1. It reads ahead: one recvmsg takes a whole message, where kj reads a word, then the rest.
//  2. It writes late: small messages of one turn of the event loop leave in one sendmsg, just before the loop waits.
//     The Finish of the last call thus rides with the next one.
//  3. It watches for readability alone. kj also watches for writability, and the peer's reads then wake a waiting
//     thread.
//  4. After a short read it waits instead of reading again to see EAGAIN.
//  5. It reads kTurnBytes, and writes so many as its owner says, at most before the loop looks at other sockets: a peer
//     on another core may send, or take, without a pause.
//
// Descriptors. A recvmsg never reaches past the first byte run that carries descriptors, but bytes sent earlier may
// precede that run. So descriptors belong to the last message that starts within the bytes they came with. Surplus ones
// are closed.
//
// TLS. With a TlsLink the same messages go through it instead; descriptors cannot, and 4 does not hold: OpenSSL may
// keep bytes that the socket has given, so only its word that there is nothing more counts. Without one a null check is
// all.
//
// Owner and thread: one connection, on the thread of its event loop. The descriptors stay the caller's.
#pragma once

#include <capnp/serialize-async.h>
#include <kj/async-unix.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kvmanager/base/tls.h"

namespace kvmanager {

/// Where the memory of a message is reserved before it is taken. The stream's thread.
class MessageMemory {
 public:
  virtual ~MessageMemory() = default;
  /// The most that a message that begins now may have.
  virtual uint64_t bytes_max() const = 0;
  /// Whether so many bytes are reserved now.
  virtual bool TryTake(uint64_t bytes) = 0;
  /// Resolves once they are. What is reserved when the promise is dropped stays so.
  virtual kj::Promise<void> Take(uint64_t bytes) = 0;
  virtual void GiveBack(uint64_t bytes) = 0;
  /// More of a message has arrived: whether all of it has.
  virtual void NoteReceived(bool whole) = 0;
  /// A message of kKeptBytesMin and more is whole. Its memory, and what is reserved for it, may be kept for longer than
  /// its reader.
  virtual void NoteWhole(kj::ArrayPtr<const kj::byte> bytes, const std::shared_ptr<const void>& memory) = 0;
  static constexpr size_t kKeptBytesMin = 1 << 20;
};

class SocketStream final : public capnp::MessageStream {
 public:
  static constexpr size_t kReadAheadBytes = 64 << 10;  // larger messages are read straight into their own memory
  static constexpr size_t kWriteLateBytesMax = 16
                                               << 10;  // larger messages are not copied; nor more than this held back
  static constexpr uint32_t kSegmentsMax = 512;
  static constexpr size_t kTurnBytes = 256 << 10;  // that are read before the loop looks at others
  static constexpr size_t kFdsPerReadMax = 4;      // what the kernel may hand over at once; more are closed by it

  /// `fd` and `write_fd`: one non-blocking stream socket, twice (dup), because an event port watches a descriptor once.
  /// Both must outlive the stream. The port must belong to this thread. memory: where messages that are read reserve
  /// their bytes until they are destroyed; nullptr: nowhere. tls: of `fd`, after its handshake; outlives the stream;
  /// nullptr: plain. write_turn_bytes: that are written before the loop looks at others.
  SocketStream(kj::UnixEventPort& port, int fd, int write_fd, std::shared_ptr<MessageMemory> memory = nullptr,
               TlsLink* tls = nullptr, size_t write_turn_bytes = kTurnBytes);

  ~SocketStream();

  /// The next message, or nothing at the end of the stream. Throws on malformed framing, and on a message of more words
  /// than options.traversalLimitInWords.
  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                                    capnp::ReaderOptions options,
                                                                    kj::ArrayPtr<capnp::word> scratch) override;
  kj::Promise<void> writeMessage(kj::ArrayPtr<const int> fds,
                                 kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override;
  kj::Promise<void> writeMessages(kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override;
  kj::Maybe<int> getSendBufferSize() override;
  kj::Promise<void> end() override;
  /// How often the socket had nothing to read.
  uint64_t waits() const { return waits_; }

  /// What came was a record of TLS, and this stream is plain.
  bool other_speaks_tls() const { return other_speaks_tls_; }

 private:
  struct HeldFds {
    uint64_t from = 0, to = 0;  // stream offsets of the bytes they came with
    std::vector<kj::AutoCloseFd> fds;
  };
  struct Body;
  struct Rest;  // what of a message is still to be sent

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> Read(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                          capnp::ReaderOptions options);
  /// True once a whole message is in `words_`.
  bool Assemble(const capnp::ReaderOptions& options);
  /// Bytes read into `to`; 0 at the end of the stream; -1 if there is nothing to read now, and `readable_` is then set.
  ssize_t Receive(kj::byte* to, size_t bytes_max, bool want_fds);
  ssize_t ReceivePlain(kj::byte* to, size_t bytes_max, bool want_fds);
  ssize_t ReceiveTls(kj::byte* to, size_t bytes_max);
  void Wait();  // for the socket to have something
  kj::ArrayPtr<kj::AutoCloseFd> TakeFds(kj::ArrayPtr<kj::AutoCloseFd> fd_space);

  void FlushLater();
  void Flush();
  bool Send(Rest& rest);
  bool SendTls(Rest& rest);
  void Block(kj::Own<Rest> rest);
  kj::Promise<void> SendRest(kj::Own<Rest> rest);

  kj::UnixEventPort& port_;
  const int fd_, write_fd_;
  TlsLink* const tls_;
  const size_t write_turn_bytes_;
  kj::UnixEventPort::FdObserver observer_;

  // Reading: buffer_[begin_, end_) is not yet part of a message; words_ is the message being put together.
  kj::Array<kj::byte> buffer_;
  size_t begin_ = 0, end_ = 0;
  uint64_t waits_ = 0;
  uint64_t received_ = 0;       // stream offset of the next byte from the socket
  uint64_t message_start_ = 0;  // stream offset of the message being put together
  kj::Array<capnp::word> words_;
  uint64_t wanted_bytes_ = 0;  // of a message that waits for memory; it is reserved once `reserved_`
  bool reserved_ = false;
  bool other_speaks_tls_ = false;
  size_t turn_bytes_ = 0;   // that were read since the loop looked at others
  bool receiving_ = false;  // part of a message, as memory_ was told
  const std::shared_ptr<MessageMemory> memory_;
  size_t filled_bytes_ = 0;
  std::deque<HeldFds> held_;
  kj::Maybe<kj::Promise<void>> readable_;

  // Writing: out_ holds messages that leave before the loop waits; while `busy_`, blocked_ is sending something older.
  std::vector<kj::byte> out_;
  bool flush_due_ = false;
  bool busy_ = false;
  size_t sent_bytes_ = 0;  // since the loop looked at others, but for messages that were held back
  kj::Maybe<kj::Exception> failure_;
  kj::Promise<void> flush_ = nullptr;
  kj::ForkedPromise<void> blocked_ = nullptr;
};

}  // namespace kvmanager
