// The ways of misbehaving: what one client or stranger does to a daemon while another decodes.
#pragma once

#include "absl/types/span.h"
#include "tests/misbehaviour/offender.h"

namespace kvmanager::testing {

/// What the daemon of the test is given, so that the ways mean something.
inline constexpr uint64_t kPoolBytes = 128 << 20;
inline constexpr uint64_t kRoomBytes = 128 << 20;   // --memory-beyond-pool-bytes
inline constexpr uint64_t kArenaBytes = 256 << 20;  // --arena-bytes
inline constexpr uint64_t kDiskBytes = 512 << 20;   // --disk-bytes
inline constexpr char kArtifact[] = "a";            // in --calibration-dir: of SmallCache's model
inline constexpr char kLargeArtifact[] = "large";   // of LargeHeads()

/// One layer of 8 KV heads of 128.
client::CacheOptions LargeHeads();

struct Way {
  const char* name;
  const char* what;
  /// Misbehaves once or for ever. When it returns or throws it is called again, with a connection of its own.
  void (*act)(Offence& offence);
};

/// Of calls, of what is held, and of sockets.
absl::Span<const Way> WaysOfCalls();
absl::Span<const Way> WaysOfHolding();
absl::Span<const Way> WaysOfSockets();

/// Every way, those of calls first.
std::vector<Way> AllWays();

/// Runs `act` in a child, which ends by SIGKILL after `ms`. Throws nothing. The child ends with its parent.
void InChild(Offence& offence, int64_t ms, void (*act)(Offence&));

/// A cache of the offender's tenant: one layer, two KV heads of 64.
client::CacheOptions OneLayer(const std::string& codec = "raw");
/// `count` names that begin at `first`; equal numbers make equal names.
void FillNames(capnp::List<api::BlockName>::Builder to, uint64_t first);

}  // namespace kvmanager::testing
