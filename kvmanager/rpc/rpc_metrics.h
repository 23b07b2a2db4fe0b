// Metrics of connections and calls: references to series, made once at start. Any thread may touch them.
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
  kRead,
  kReadBlocks,
  kWriteBlocks,
  kRetain,
  kPrefetch,  // Cache, Admin
  kReleaseBlocks,
  kMapBlocks,  // BlocksLease
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
  kMetricsText,
  kLimits,
  kExplain,
  kUpgrade,  // Admin
};
constexpr int kMethods = static_cast<int>(Method::kUpgrade) + 1;
const char* MethodName(Method method);

/// Why a connection ended; label `reason`.
enum class EndReason : int { kClosed, kFraming, kProcessDied, kUnread, kUnfinished, kNoHello, kTls, kShutdown };
constexpr int kEndReasons = static_cast<int>(EndReason::kShutdown) + 1;
const char* EndReasonName(EndReason reason);

struct ConnectionMetrics {
  explicit ConnectionMetrics(Metrics* metrics);

  prometheus::Counter& ended(EndReason reason) { return *ended_by_reason[static_cast<int>(reason)]; }

  std::array<prometheus::Counter*, kEndReasons> ended_by_reason;
  prometheus::Gauge& open;
  prometheus::Counter& accepted_unix;
  prometheus::Counter& accepted_tcp;
  prometheus::Counter& refused;
};

/// Of steps, in host memory and on GPUs.
struct AttendMetrics {
  explicit AttendMetrics(Metrics* metrics);

  prometheus::Counter& encoded_pairs;
  prometheus::Counter& raw_pairs;
  prometheus::Histogram& loop_seconds;
  prometheus::Histogram& worker_seconds;
  prometheus::Counter& tokens;
};

/// Of K and V that are read back.
struct ReadMetrics {
  explicit ReadMetrics(Metrics* metrics);

  prometheus::Histogram& seconds;
  prometheus::Counter& encoded_tokens;
  prometheus::Counter& raw_tokens;
};

/// Of calls of match, from the request until all was looked for.
struct MatchMetrics {
  explicit MatchMetrics(Metrics* metrics);

  prometheus::Histogram& seconds;
};

/// Of whole blocks that engines read or write in stored form.
struct BlockCallMetrics {
  explicit BlockCallMetrics(Metrics* metrics);

  prometheus::Histogram &read_seconds, &write_seconds;
  prometheus::Counter &read_bytes, &written_bytes;
};

}  // namespace kvmanager
