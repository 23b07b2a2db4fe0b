// An engine's own hashes of blocks, and the blocks' names by them, which are made when they are needed: that takes
// about a microsecond of each, and a GPU or the daemon can be busy meanwhile.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/c/kvmanager.h"
#include "kvmanager/base/ids.h"

namespace kvmanager::client::c {

/// INVALID_ARGUMENT: a hash has a size that is none.
absl::Status CheckHashes(const kvm_hashes& hashes);

class NamedByHashes {
 public:
  /// `hashes` were checked.
  explicit NamedByHashes(const kvm_hashes& hashes);
  uint32_t count() const { return static_cast<uint32_t>(sizes_.size()); }
  /// Of count() blocks those from `at` on, `count` of them; each time of the same cache. Valid as long as this lives.
  absl::Span<const BlockName> Names(const CacheDigest& cache, uint32_t at, uint32_t count);

 private:
  const std::vector<uint32_t> sizes_;
  const std::vector<uint8_t> bytes_;
  size_t named_bytes_ = 0;
  std::vector<BlockName> names_;  // of the first blocks; it has room for all
};

}  // namespace kvmanager::client::c
