// What is remembered of each peer and direction: at most kPeersMax entries, the least recently used dropped first.
// Owned by the transport; any thread.
#pragma once

#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/mutex.h"
#include "transport/transport.h"

namespace kvmanager::tcp {

class PeerBook {
 public:
  static constexpr size_t kPeersMax = 256;
  static constexpr double kNewestWeight = 0.3;  // of a transfer's bandwidth in the average

  /// A transfer with `peer` began.
  void Begin(const std::string& peer, bool incoming);
  /// It ended: `status`, after `bytes` of pages, copied_bytes of them as PeerInfo says. seconds: during which it had
  /// some to send, or was receiving.
  void End(const std::string& peer, bool incoming, const absl::Status& status, uint64_t bytes, uint64_t copied_bytes,
           double seconds);
  /// Most recently used first.
  std::vector<PeerInfo> List() const;

 private:
  using Key = std::pair<std::string, bool>;
  PeerInfo& Touch(const std::string& peer, bool incoming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::list<PeerInfo> recent_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::list<PeerInfo>::iterator> index_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmanager::tcp
