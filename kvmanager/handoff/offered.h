// A hand-off that a peer offers, until it is answered.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/projection_set.h"
#include "kvmanager/store/page_store.h"
#include "transport/transport.h"

namespace kvmanager {

/// Of "HOST:PORT".
inline std::string HostOf(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

/// Shared by the messages and the work that carry it on, one after the other.
struct Offered {
  std::string peer, payer;
  std::shared_ptr<HandOffHeader> header;  // unchanged once it is being imported, and shared with that
  GpuName gpu = {};                       // whose pages they are
  GpuLanding landing;
  absl::StatusOr<std::shared_ptr<const Codec>> codec = std::shared_ptr<const Codec>();
  uint64_t bytes_at_least = 0;  // of memory here, once there is a codec
  int64_t room_ms = 0;
  HandOffReceiver::OfferReply reply;
  bool answered = false;
  bool gone() const { return reply.gone != nullptr && *reply.gone; }
  std::unique_ptr<Importing> importing;        // while room is made for it
  std::shared_ptr<ProjectionSet> projections;  // as registered when that began; or nullptr
  bool waits = false;                          // for room
  absl::Status full;                           // why there is none
  kj::Promise<void> deadline = nullptr;        // while it waits
};

}  // namespace kvmanager
