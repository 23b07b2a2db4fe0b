// The RPC service's metrics: references to series, made once at start. Any thread may touch them.
#pragma once

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Methods of the schema, for the label `method`.
enum class Method : int {
  kHello,
  kOpenCache,
  kCreateArena,
  kOpenDevice,
  kCreateDeviceArena,
  kAdmin,
  kPing,  // Daemon
  kCacheInfo,
  kMatch,
  kCreateSequences,
  kStep,
  kClaim,
  kOutputFactors,
  kExtend,
  kOpenProjections,
  kRead,  // Cache
  kSetProjections,
  kFork,
  kCrop,
  kPublish,
  kHandOff,
  kBeginHandOff,
  kFinishHandOff,
  kSequenceInfo,  // Sequence, HandOff
  kDeviceCopy,
  kMapSlab,  // DeviceStream
  kStatus,
  kCaches,
  kSequences,
  kPeers,
  kDrain,
  kUndrain,
  kPurge,
  kRecomputeStatus,
  kMetricsText,  // Admin
};
constexpr int kMethods = static_cast<int>(Method::kMetricsText) + 1;
const char* MethodName(Method method);

/// Why a connection ended; label `reason`.
enum class EndReason : int { kClosed, kFraming, kProcessDied, kUnread, kShutdown };
constexpr int kEndReasons = static_cast<int>(EndReason::kShutdown) + 1;
const char* EndReasonName(EndReason reason);

struct ServerMetrics {
  explicit ServerMetrics(Metrics* metrics);

  prometheus::Counter& calls(Method method) { return *calls_by_method[static_cast<int>(method)]; }
  prometheus::Counter& ended(EndReason reason) { return *connections_ended[static_cast<int>(reason)]; }
  /// Makes the series on first use: the loop's thread only.
  void CountError(Method method, absl::StatusCode code);

  std::array<prometheus::Counter*, kMethods> calls_by_method;
  std::array<prometheus::Counter*, kEndReasons> connections_ended;
  prometheus::Gauge& connections;
  prometheus::Counter& connections_unix;
  prometheus::Counter& connections_tcp;
  prometheus::Counter& connections_refused;
  prometheus::Counter& framing_errors;
  prometheus::Gauge& held_sequences;
  prometheus::Gauge& arena_bytes;
  prometheus::Gauge& draining;
  prometheus::Counter& attend_encoded_pairs;
  prometheus::Counter& attend_raw_pairs;
  prometheus::Histogram& attend_loop_seconds;
  prometheus::Histogram& attend_worker_seconds;
  prometheus::Counter& attend_tokens;
  prometheus::Histogram& read_seconds;
  prometheus::Counter& read_encoded_tokens;
  prometheus::Counter& read_raw_tokens;
  prometheus::Histogram& encode_seconds;
  prometheus::Counter& encode_input_bytes;
  prometheus::Gauge& pool_pinned_bytes;
  prometheus::Counter& device_encoded_pages;
  prometheus::Counter& hand_offs_sent;
  prometheus::Counter& hand_offs_send_failed;
  prometheus::Counter& hand_offs_received;
  prometheus::Counter& hand_offs_between_gpus;
  prometheus::Counter& hand_offs_refused;
  prometheus::Counter& hand_offs_aborted;
  prometheus::Counter& hand_offs_claimed;
  prometheus::Counter& hand_offs_expired;
  prometheus::Gauge& tickets;
  prometheus::Gauge& hand_offs_waiting;

 private:
  Metrics* const metrics_;
};

}  // namespace kvmanager
