// One connection from a sender of pages. Owned by Loop::incoming and the handlers of its pending operations; the
// transport's thread alone.
//
//   state        means                                                 next, and on what
//   kHello       ours is being written, theirs read                    kOffer: theirs is good
//   kOffer       OFFER being read, its memory growing as bytes arrive  kOffered: it is good, the receiver is asked
//   kOffered     the receiver's answer awaited                         kReceiving: a hand-off with targets of the right
//   sizes kReceiving   ANSWER being written, PAGEs and END read              kCompleting: all pages matched, END agrees
//   kCompleting  the receiver's ticket awaited                         kClosing: DONE queued
//   any of these an error, no progress, a broken connection, CANCEL    kClosing: ERROR queued; kClosed: the peer is
//   gone kClosing     the last frame is written; what still comes is read and thrown away, so that closing does not
//   destroy that frame on
//                its way (a reset would)                               kClosed: the peer closed, or kLingerMs passed
//
// Invariants: 1. End makes every transition out of the first five states that is not progress, and hands the hand-off
// to Abort there if it still holds one. 2. A read into targets is pending in kReceiving alone; End cancels it before
// Abort, and on one thread a cancelled read writes nothing more. 3. Targets get bytes of the length announced and no
// others: the place of every byte is known before it is read. 4. The connection is in loop.incoming until kClosed.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class Incoming : public std::enable_shared_from_this<Incoming> {
 public:
  static constexpr size_t kPagesPerReadMax =
      32;  // a header and a payload each: the 64 buffers that Asio gives to one recvmsg
  static constexpr size_t kOfferStepBytes = 256 << 10;
  static constexpr size_t kDrainBytes = 16 << 10;
  static constexpr int64_t kLingerMs = 1000;

  Incoming(Loop& loop, uint64_t id, Socket socket);
  /// REQUIRES: this is in loop.incoming. With an error, the peer hears that and nothing else.
  void Start(absl::Status refusal);
  /// Ends it with `why`, at once: what is not yet written to the peer is lost.
  void Stop(absl::Status why);

  void OnOfferReply(absl::StatusOr<std::unique_ptr<IncomingHandOff>> reply);
  void OnCompleteReply(absl::StatusOr<std::string> ticket);

 private:
  enum class State { kHello, kOffer, kOffered, kReceiving, kCompleting, kClosing, kClosed };

  void Queue(std::string frame);
  void ContinueWriting();
  void ReadHello();
  void ReadOfferHeader();
  void ReadOfferBody();
  absl::Status GrowOffer();
  void OnOffer(absl::StatusOr<Frame> frame);
  absl::Status TakeTargets();
  void ReadPages();
  absl::Status OnPageBytes(size_t bytes);
  absl::Status CheckPageHeader(absl::Span<const uint8_t> header, uint32_t page);
  void ReadEnd();
  void OnEnd();
  void Drain();
  void Touch();
  void ArmTimer();
  /// Ends what is under way; `tell`: the peer still listens. `why` is moved to the receiver, not shared with it:
  /// ThreadSanitizer does not see the reference count in Debian's absl::Status.
  void End(absl::Status why, bool tell);
  void EndProtocol(absl::Status why);
  void EndBroken(absl::string_view what, const ErrorCode& error);
  void Leave(const absl::Status& status);
  void Close();

  Loop& loop_;
  const uint64_t id_;
  State state_ = State::kHello;
  Socket socket_;
  Timer timer_;
  SteadyTime deadline_;
  std::string peer_;  // "HOST:PORT"
  std::string host_;  // of peer_: what the peer book knows it by

  std::string out_;        // being written
  std::string out_queue_;  // after it
  size_t out_sent_ = 0;
  bool writing_ = false;
  bool peer_closed_ = false;  // in kClosing: it sends no more, and the last frame is still being written

  std::vector<uint8_t> in_;      // HELLO, OFFER or END being read; in kClosing what is thrown away
  size_t in_bytes_ = 0;          // of in_, those read
  uint64_t frame_bytes_ = 0;     // of the OFFER being read
  uint64_t buffer_counted_ = 0;  // in loop.offer_buffer_bytes

  bool transfer_ = false;  // an OFFER was good: in the active gauge and the peer book
  SteadyTime started_;
  std::unique_ptr<IncomingHandOff> hand_off_;
  std::vector<uint64_t> page_bytes_, page_checksums_;
  std::vector<absl::Span<uint8_t>> targets_;  // of order_, not of all pages
  std::vector<uint32_t> order_;               // wanted pages, ascending
  size_t next_ = 0;                           // of order_: the page being received
  size_t offset_ = 0;                         // bytes of its frame, header included, that have arrived
  uint64_t payload_bytes_ = 0;
  std::array<std::array<uint8_t, kHeaderBytes>, kPagesPerReadMax> headers_;  // [0] is of order_[next_]
  std::array<asio::mutable_buffer, 2 * kPagesPerReadMax> buffers_;
};

}  // namespace kvmanager::tcp
