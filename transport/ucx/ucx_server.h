// The process of UcxMemory: reads out of peers' memory into the daemon's staging memory, and answers peers that read
// this daemon's memory. To read a peer's memory it asks the peer's process, which checks the request and sends a copy:
// no memory of a daemon is registered with a network card, and no remote key to it exists. One thread.
//
// Invariants:
// 1. Every READ is answered by one DONE, after which UCX writes no more to the read's range of staging memory. If the
//    DONE never comes, the daemon ends this process.
// 2. An answer's bytes and header stay until UCX has sent them.
// 3. A connection is closed by force once nobody reads through it or it has failed; what waits for it is then DONE with
//    an error.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/range_allocator.h"
#include "kvmanager/memory/region.h"
#include "transport/ucx/description.h"
#include "transport/ucx/process_wire.h"
#include "transport/ucx/ucx_library.h"

namespace kvmanager::ucx {

class Server {
 public:
  /// While something is under way it looks this often, should UCX know no event of it.
  static constexpr int kLookMs = 1;
  /// Behind an address, whose length UCX is not told.
  static constexpr size_t kPaddingBytes = 1 << 10;

  explicit Server(Library library) : ucx_(library) {}
  /// From a SET_UP; says READY. Errors are to be said to the daemon.
  absl::Status Start(const Packet& set_up);
  /// Until the daemon ends.
  void Run();

 private:
  enum Message : unsigned { kAsk = 0, kTell = 1 };
  struct AskHeader {
    uint64_t read, offset, bytes;
    uint32_t memory, zero;
    Ticket ticket;
  };
  struct TellHeader {
    uint64_t read, refused;
  };
  struct Peer : std::enable_shared_from_this<Peer> {
    Server* server = nullptr;
    std::string address;
    ucp_ep_h connection = nullptr;
    size_t users = 0;    // sources
    std::string failed;  // why
  };
  struct Source {
    std::shared_ptr<Peer> peer;  // nullptr: it could not be connected
    std::string failed;
    uint32_t memory = 0;
    Ticket ticket = {};
  };
  struct Read {
    std::shared_ptr<Peer> peer;
    uint64_t place = 0, bytes = 0;
    bool arriving = false;  // UCX has its place, and ends it
  };
  struct Answer {
    Server* server = nullptr;
    uint64_t place = 0, bytes = 0;  // of answers_
    TellHeader header = {};
    std::list<Answer>::iterator self;
  };

  absl::Status MapMemory(const Packet& set_up);
  absl::Status StartUcx();
  absl::Status Failed(const char* what, ucs_status_t status) const;
  ucs_status_t SetHandler(Message message, ucp_am_recv_callback_t handler);
  void Say(const Packet& packet);

  bool TakePackets();
  void OnPacket(const Packet& packet);
  void Open(const Packet& packet);
  absl::StatusOr<std::shared_ptr<Peer>> Connect(const std::string& address);
  void Begin(const Packet& packet);
  void End(uint64_t read, const std::string& why);
  void Release(uint64_t source);
  void Close(const std::shared_ptr<Peer>& peer, const std::string& why);

  ucs_status_t OnAsk(const void* header, size_t header_bytes, size_t bytes, const ucp_am_recv_param_t* param);
  void SendAnswer(ucp_ep_h to, Answer& answer);
  void Forget(Answer& answer);
  ucs_status_t OnTell(const void* header, size_t header_bytes, void* data, size_t bytes,
                      const ucp_am_recv_param_t* param);

  const Library ucx_;
  std::unique_ptr<Region> staging_, answers_;
  std::unique_ptr<RangeAllocator> free_answers_;
  std::vector<std::unique_ptr<Region>> memory_;
  Ticket ticket_ = {};
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;

  std::map<std::string, std::shared_ptr<Peer>> peers_;  // by address; none that has failed
  std::vector<std::shared_ptr<Peer>> failed_;           // to be closed
  std::list<std::shared_ptr<Peer>> closing_;
  std::map<uint64_t, Source> sources_;
  std::map<uint64_t, Read> reads_;
  std::list<Answer> sent_;  // of which UCX still has the bytes
};

}  // namespace kvmanager::ucx
