// A hand-off that a peer offers, until it is answered.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/store/page_store.h"
#include "transport/transport.h"

namespace kvmanager {

/// Shared by the messages and the work that carry it on, one after the other.
struct Offered {
  std::string peer, payer;
  HandOffHeader first;
  GpuName gpu = {};  // whose pages they are
  GpuLanding landing;
  absl::StatusOr<std::shared_ptr<const Codec>> codec = std::shared_ptr<const Codec>();
  int64_t room_ms = 0;
  HandOffReceiver::OfferReply reply;
  bool gone() const { return reply.gone != nullptr && *reply.gone; }
  int64_t verified_ns = 0;               // when what it shares with this daemon was compared; INT64_MAX: it is now
  bool waits = false;                    // for room
  absl::Status full;                     // why there is none
  kj::Promise<void> deadline = nullptr;  // while it waits
};

}  // namespace kvmanager
