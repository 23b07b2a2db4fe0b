// Failpoints: places at which a test makes this process fail as if memory, a descriptor, a socket or time had run out.
// For tests alone: tools/chaos starts daemons with them, and a daemon that has them says so in its log.
//
// Always compiled in. Off, a failpoint costs one relaxed load, at most once a call; a step of one token passes none.
// The state is the process's, set by main() before there is another thread: what a failpoint stands for (malloc,
// accept, a socket) is the process's as well. Fails() may be called from any thread.
//
// Whether the n-th pass of a failpoint fails is a function of the seed, its name and n: a seed gives the same failures
// wherever threads pass in the same order.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// The environment variable that main() reads.
inline constexpr char kFailpointsVariable[] = "KVMANAGER_FAILPOINTS";

enum class Failpoint : uint8_t {
  kAccept,         // "accept": accepting a client's connection, as if there were no descriptor left
  kReadAllocate,   // "read.allocate": memory for the rows of an inline reply
  kStepAllocate,   // "step.allocate": memory for the inline queries and outputs of a step that workers run
  kArenaMap,       // "arena.map": the memory of an arena
  kAppendReserve,  // "append.reserve": slots for pages that an append opens or fills
  kEncodeDecline,  // "encode.decline": the codec declines the page, which stays raw
  kEncodeSlow,     // "encode.slow": a worker takes kSlowMs longer before it encodes
  kPeerConnect,    // "peer.connect": connecting to a peer
  kPeerSend,       // "peer.send": sending on a data connection to a peer
  kPeerReceive,    // "peer.receive": receiving on one
  kDiskWrite,      // "disk.write": writing a piece of a record to a disk (EIO)
  kDiskRead,       // "disk.read": reading one (EIO)
  kDiskSync,       // "disk.sync": making a segment's records durable (EIO)
};
inline constexpr int kFailpoints = 13;
inline constexpr int kFailpointSlowMs = 20;

/// text: "NAME=N/M[,NAME=N/M...][,seed=S]": N of M passes fail, 0 <= N <= M, 1 <= M <= 10^9; seed: 1 if not given.
/// Empty: all are off. Errors: INVALID_ARGUMENT. Not while another thread may call Fails().
absl::Status SetFailpoints(absl::string_view text);

namespace failpoints {

inline std::atomic<bool> on{false};
bool Draw(Failpoint point);

}  // namespace failpoints

/// Whether this pass is to fail.
inline bool Fails(Failpoint point) {
  return __builtin_expect(failpoints::on.load(std::memory_order_relaxed), false) && failpoints::Draw(point);
}

/// Sleeps for kFailpointSlowMs if this pass is to fail.
void MaybeSlow(Failpoint point);

}  // namespace kvmanager
