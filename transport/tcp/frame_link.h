// A connection that carries frames, one after the other, both ways: control connections, and any connection before it
// is known what it carries. Owned by whoever it serves, and shared with the handlers of its pending operations; the
// transport's thread alone.
//
// A frame's memory grows as its bytes arrive, within the transport's limit for all of them: a header alone claims none.
// After Close, Release or `broken` no event is called.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class FrameLink : public std::enable_shared_from_this<FrameLink> {
 public:
  static constexpr size_t kBodyStepBytes = 256 << 10;
  static constexpr size_t kQueuedBytesMax = 64 << 20;  // a peer that does not read what it is told is let go
  static constexpr size_t kDrainBytes = 16 << 10;
  static constexpr int64_t kLingerMs = 1000;

  struct Events {
    absl::AnyInvocable<void(Frame)> frame;
    /// Once, last. UNAVAILABLE: the connection broke or the peer closed it; DATA_LOSS: a frame's check failed;
    /// INVALID_ARGUMENT, RESOURCE_EXHAUSTED: a frame that nobody may send, or that is too much.
    absl::AnyInvocable<void(absl::Status why)> broken;
  };

  FrameLink(Loop& loop, Socket socket) : loop_(loop), socket_(std::move(socket)), linger_(loop.io) {}

  /// From now on frames of the types in `accepts` go to `events`; others break the link.
  void Listen(std::initializer_list<FrameType> accepts, Events events);
  void Send(const std::string& frame);
  /// Ends it, at once or, lingering, once everything sent has been written: what still comes is read and thrown away
  /// meanwhile, so that closing does not destroy what is on its way (a reset would).
  void Close(bool lingering = false);
  /// The connection, to be used otherwise. REQUIRES: called from `frame`, nothing sent that is not written.
  Socket Release();

  SteadyTime heard() const { return heard_; }  // the newest byte
  SteadyTime sent() const { return sent_; }    // the newest call of Send
  bool idle() const { return !writing_; }

 private:
  enum class State { kOpen, kLingering, kClosed };

  void ContinueWriting();
  void ReadHeader();
  void OnHeader();
  void ReadBody();
  absl::Status Grow();
  void Drain();
  void OnDrained(const ErrorCode& error);
  void Break(absl::Status why);
  void BreakSocket(const char* what, const ErrorCode& error);
  void CloseNow();

  Loop& loop_;
  State state_ = State::kOpen;
  Socket socket_;
  Timer linger_;
  Events events_;
  uint64_t generation_ = 0;  // of events_
  uint32_t accepts_ = 0;     // bits by FrameType
  bool reading_ = false;
  bool peer_closed_ = false;
  SteadyTime heard_ = Now();
  SteadyTime sent_ = Now();

  std::string out_;        // being written
  std::string out_queue_;  // after it
  size_t out_sent_ = 0;
  bool writing_ = false;

  std::vector<uint8_t> in_;      // the frame being read; lingering: what is thrown away
  size_t in_bytes_ = 0;          // of in_, those read
  uint64_t frame_bytes_ = 0;     // of the frame being read
  uint64_t buffer_counted_ = 0;  // in loop.frame_buffer_bytes
};

}  // namespace kvmanager::tcp
