// One data connection of a hand-off that is being sent. It joins the hand-off; then workers write frame after frame of
// pages, straight from the pages' slots. On a Unix socket, and with UCX, it sends only where the pages are.
// Owned by Outgoing and by the handlers of its pending operations. The transport's thread only.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/dial.h"
#include "transport/tcp/frame_link.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/socket_job.h"
#include "transport/tcp/wire.h"
#include "transport/tcp/zero_copy.h"

namespace kvmanager::tcp {

class OutgoingDataConnection : public std::enable_shared_from_this<OutgoingDataConnection> {
 public:
  static constexpr int64_t kRateWaitMs = 2;

  OutgoingDataConnection(Loop& loop, Outgoing& session, uint32_t index);
  void Start();
  /// There may be something to send.
  void Pump();
  void Close();

 private:
  void Join(Dial::Connection connection);
  void OnJoined(Frame frame);
  void WatchForEnd();
  /// Whether the frame's pages lie in memory that the receiver may copy or read: then head_ says where, and is all
  /// there is to write.
  bool MakeLocal();
  bool MakeRemote();
  /// Which of `count` memories `page` lies in, and where; `count` if in none. They are in order of address.
  template <typename MemoryAt>
  static std::pair<size_t, uint64_t> FindMemory(absl::Span<const uint8_t> page, size_t count, MemoryAt memory_at);
  void MakeDeviceLocal();
  /// A region's frame, and the descriptor that goes with it.
  std::pair<std::string, int> RegionOf(uint32_t index) const;
  void WriteRegions();
  void Write();
  /// A frame that only says where pages are.
  void WriteHead();
  void WaitToWrite(uint64_t granted);
  void StartWriting(uint64_t granted);
  void OnWritten();
  void Count(uint64_t bytes);
  /// What the worker has written, which has ended or was stopped.
  uint64_t CountJob();
  /// Pages are not written, only where they are.
  bool by_place() const { return frame_bytes_ == head_.size(); }
  void Break(absl::Status why);

  Loop& loop_;
  Outgoing* session_;  // nullptr once closed
  const uint32_t index_;
  std::shared_ptr<Dial> dial_;
  std::shared_ptr<FrameLink> link_;  // until joined
  Socket socket_;
  Timer rate_timer_;
  bool ready_ = false;
  bool busy_ = false;     // a write, or the wait for one, is under way
  bool writing_ = false;  // a worker has write_
  uint8_t unexpected_ = 0;

  std::vector<SendPage> pages_;  // of the frame being written
  std::vector<uint8_t> head_;
  bool local_ = false;                    // a Unix socket
  std::vector<uint32_t> to_pass_;         // regions that the frame names first
  const bool by_ucx_;                     // when it was made
  std::vector<bool> passed_;              // of options.memory, or of UCX's
  std::vector<const DeviceSlab*> slabs_;  // of GPUs' pages: by region number on this connection
  size_t region_written_ = 0;             // bytes of the REGION of to_pass_.back()
  uint64_t frame_bytes_ = 0;
  uint64_t written_ = 0;              // of it
  std::shared_ptr<SocketJob> write_;  // head and pages, once joined
  ZeroCopy zero_copy_;                // of pages: the head is written anew while the kernel may still send it
};

}  // namespace kvmanager::tcp
