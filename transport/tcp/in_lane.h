// One lane of a hand-off that is being received: reads PAGES, has a worker read each page's bytes straight into its
// target, several pages by one scattered read; on a Unix socket also copies pages out of the sender's memory, and of a
// hand-off into a GPU nothing else; with UCX also reads pages of a described memory and copies what came. Owned by
// Incoming and the handlers of its pending operations; the transport's thread alone.
//
// Invariant: every page of the frames being read or copied is kComing in Incoming, and this lane's alone; Close waits
// for the reads and copies of workers that are under way, leaves those of a GPU to Incoming, and gives back what else
// has not arrived.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "kvmanager/memory/region.h"
#include "transport/tcp/copy_job.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/socket_job.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class InLane : public std::enable_shared_from_this<InLane> {
 public:
  static constexpr size_t kJobsMax = 8;  // frames that are copied at once

  InLane(Loop& loop, Incoming& session, uint32_t index, Socket socket);
  ~InLane();
  void Start() { ReadHeader(); }
  /// Breaks it if what it reads of remote memory has not come for too long. The sender then uses the connection itself.
  void CheckStall(int64_t stall_ms);
  void Close();

 private:
  void ReadHeader();
  void ReadHeaderLocally();
  void OnHeader();
  void ReadBody(FrameType type, size_t bytes);
  void OnPages(std::vector<PageRecord> pages);
  void OnRegion(const RegionFrame& region);
  void OnMemory(const MemoryFrame& memory);
  void OnLocal(const LocalFrame& local);
  void OnRemoteLocal(const LocalFrame& local);
  void OnDeviceLocal(const LocalFrame& local);
  void OnCopied();
  void ReadPayload();
  void StartReading();
  void OnRead();
  void BadPage(uint32_t page, uint64_t checksum, uint64_t announced);
  void Break(absl::Status why, bool bad_page = false);
  void BreakSocket(const ErrorCode& error);

  Loop& loop_;
  Incoming* session_;  // nullptr once closed
  const uint32_t index_;
  Socket socket_;
  const bool local_;           // a Unix socket
  std::vector<uint8_t> head_;  // header and records
  size_t head_bytes_ = 0;      // of it, those read, where that is not Asio's to know
  int descriptor_ = -1;        // that came with the header
  std::map<uint32_t, std::shared_ptr<const Region>> regions_;
  struct DeviceRegion {
    std::shared_ptr<DeviceCopier::Source> source;
    uint64_t bytes = 0;
  };
  std::map<uint32_t, DeviceRegion> device_regions_;  // of a hand-off into a GPU, which has no others
  std::map<uint32_t, std::shared_ptr<RemoteMemory::Source>> remote_regions_;  // of a TCP connection
  std::deque<std::shared_ptr<CopyJob>> jobs_;
  SteadyTime jobs_moved_ = Now();    // when one began that had none before it, or the first ended
  std::vector<PageRecord> pages_;    // of the frame being read
  size_t next_ = 0;                  // of pages_: the first that has not arrived
  std::shared_ptr<SocketJob> read_;  // their bytes
};

}  // namespace kvmanager::tcp
