// When a daemon has done: it is stopped, has drained, or another program goes on in its process.
//
// The loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/daemon/server_memory.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/outgoing_hand_offs.h"
#include "kvmanager/rpc/call_records.h"
#include "kvmanager/rpc/held_sequences.h"
#include "kvmanager/rpc/message_room.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class ServerEnd {
 public:
  /// Of calls under way and pages that are encoded, which an upgrade waits for.
  static constexpr int64_t kSettleMs = 1000;

  /// Everything outlives this.
  ServerEnd(const Options* options, DrainSwitch* drain, const HeldSequences* held, const CallRecords* calls)
      : options_(*options), drain_(drain), held_(held), calls_(calls) {}

  /// What there is while the loop runs.
  struct Running {
    EventLoop* loop = nullptr;
    WorkerPool* background = nullptr;
    MessageQueue* queue = nullptr;
    PageStore* store = nullptr;
    IncomingHandOffs* incoming = nullptr;
    const OutgoingHandOffs* outgoing = nullptr;
    MessageRoom *requests = nullptr, *replies = nullptr;
    ServerMemory* memory = nullptr;
    const BlockDisk* disk = nullptr;  // nullptr: there is none
  };
  /// {}: the loop has ended.
  void SetRunning(const Running& running);

  void Stop();
  /// Drains; the second call stops.
  void Terminate();
  /// Admin.upgrade.
  kj::Promise<absl::Status> Upgrade(const std::string& program, bool cold);
  bool Over() const;
  /// The program that goes on, once it is over; empty: none.
  const std::string& successor() const { return successor_; }

 private:
  absl::Status CheckUpgrade(bool cold) const;
  void BeginUpgrade(const std::string& program, bool cold);
  /// Whether blocks wait for the disk, and it takes some by `until_ns`.
  bool AwaitsDisk(int64_t until_ns) const;
  /// Ends the loop once nothing of it is under way, or at `until_ns`.
  kj::Promise<void> Settle(int64_t until_ns, bool writes, bool was_quiet);

  const Options& options_;
  DrainSwitch* const drain_;
  const HeldSequences* const held_;
  const CallRecords* const calls_;
  Running running_;
  bool stop_ = false, terminating_ = false;
  int64_t until_ns_ = 0;  // terminating_: when it stops at the latest
  std::string successor_;
  kj::Promise<void> deadline_ = nullptr;
};

}  // namespace kvmanager
