// One lane of a hand-off that is being received: reads PAGES, each page's bytes straight into its target, several pages
// by one scattered read. Owned by Incoming and the handlers of its pending operations; the transport's thread alone.
//
// Invariant: every page of the frame being read is kComing in Incoming, and this lane's alone; Close gives back those
// that have not all arrived.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class InLane : public std::enable_shared_from_this<InLane> {
 public:
  InLane(Loop& loop, Incoming& session, uint32_t index, Socket socket)
      : loop_(loop), session_(&session), index_(index), socket_(std::move(socket)) {}
  void Start() { ReadHeader(); }
  void Close();

 private:
  void ReadHeader();
  void ReadRecords(size_t bytes);
  void OnRecords();
  void ReadPayload();
  void OnPayload(size_t bytes);
  void Break(absl::Status why, bool bad_page = false);
  void BreakSocket(const ErrorCode& error);

  Loop& loop_;
  Incoming* session_;  // nullptr once closed
  const uint32_t index_;
  Socket socket_;
  std::vector<uint8_t> head_;                 // header and records
  std::vector<PageRecord> pages_;             // of the frame being read
  std::vector<absl::Span<uint8_t>> targets_;  // as many
  size_t next_ = 0;                           // of pages_: the one being read
  size_t offset_ = 0;                         // of its bytes, those that have arrived
  std::array<asio::mutable_buffer, kPagesPerFrameMax> buffers_;
};

}  // namespace kvmanager::tcp
