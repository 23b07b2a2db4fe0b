// One data connection of a hand-off that is being received. It reads PAGES; a worker reads each page's bytes straight
// into the page's target, several pages with one scattered read. On a Unix socket it also copies pages out of the
// sender's memory; for a hand-off into a GPU it does only that. With UCX it also reads pages of a described memory and
// copies what came. Owned by Incoming and by the handlers of its pending operations. The transport's thread only.
//
// Invariant: every page of the frames being read or copied is kComing in Incoming and belongs to this connection alone.
// Close waits for the workers' reads and copies that are under way, leaves a GPU's copies to Incoming, and drops the
// other pages that have not arrived.
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

class IncomingDataConnection : public std::enable_shared_from_this<IncomingDataConnection> {
 public:
  static constexpr size_t kJobsMax = 8;  // frames that are copied at once

  IncomingDataConnection(Loop& loop, Incoming& session, uint32_t index, Socket socket);
  ~IncomingDataConnection();
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
