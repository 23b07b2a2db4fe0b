// Tracks which writes of a TCP data connection the kernel still sends straight from the pages (MSG_ZEROCOPY), and
// decides whether zero copy is worth continuing. Each such write that took a byte has the next number, modulo 2^32. The
// socket's error queue names, in any order, ranges of writes that the kernel has finished with, and says whether the
// kernel copied them anyway (over loopback, to a tap, where a device cannot gather). Such writes cost more than plain
// ones.
// Source: Linux, Documentation/networking/msg_zerocopy.rst.
//
//   state     means                           next, and on what
//   kOff      every write is plain            kTrying: Enable, and the kernel has it
//   kTrying   one write at a time             kOn: it was not copied; kOff: kCopiedMax in a row were
//   kOn       up to kOutstandingMax writes    kOff: kCopiedMax in a row were copied
//
// Owned by a data connection, then by the Drain that waits for the kernel. The transport's thread only.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "transport/transport_metrics.h"

namespace kvmanager::tcp {

/// How TCP data connections write pages.
enum class ZeroCopyUse {
  kNever,
  kWhereItPays,
  kAlways,  // also where the kernel copies: for tests
};

class ZeroCopy {
 public:
  static constexpr size_t kPieceBytesMin = 10 << 10;  // of a write's pieces, on average: smaller are cheaper to copy
  static constexpr size_t kOutstandingMax = 1024;     // writes that the kernel is not through with
  static constexpr int kCopiedMax = 3;

  /// A range of writes, from `first` to `last` upwards, modulo 2^32.
  struct Completion {
    uint32_t first = 0, last = 0;
    bool copied = false;
  };
  /// Of a message of an error queue; nothing if it is about something else.
  static absl::optional<Completion> ParseCompletion(const msghdr& message);

  /// first_write: the number of its first one, as the kernel counts on.
  ZeroCopy(ZeroCopyUse use, TransportMetrics::ZeroCopy& metrics, uint32_t first_write = 0)
      : use_(use), metrics_(metrics), first_(first_write) {}

  /// Asks the kernel for it. Refused, or kNever: writes stay plain.
  void Enable(int fd);
  /// How many of the next writes may go so.
  size_t allowed() const;
  /// Writes that went so, in order: the bytes of each. refused_bytes: that the kernel would not take so (ENOBUFS).
  void OnWritten(absl::Span<const uint32_t> bytes, uint64_t refused_bytes);
  /// A range that is not of writes on their way says nothing.
  void OnCompleted(const Completion& completion);
  /// Takes what the socket's error queue says. False: nothing.
  bool Read(int fd);
  /// The kernel reads no page any more.
  bool idle() const { return writes_.empty(); }
  /// Nobody waits for the rest.
  void GiveUp();

 private:
  enum class State { kOff, kTrying, kOn };
  struct Write {
    uint32_t bytes = 0;
    bool completed = false;
  };

  ZeroCopyUse use_;
  TransportMetrics::ZeroCopy& metrics_;
  State state_ = State::kOff;
  uint32_t first_;            // the number of writes_.front()
  std::deque<Write> writes_;  // from the first that is not completed
  int copied_ = 0;            // writes in a row
};

}  // namespace kvmanager::tcp
