// The sequences that clients hold, and which connection holds each. The loop's thread.
#pragma once

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class Session;

class HeldSequences {
 public:
  explicit HeldSequences(Metrics* metrics) : gauge_(metrics->Gauge("held_sequences", "Sequences that clients hold")) {}
  HeldSequences(const HeldSequences&) = delete;
  HeldSequences& operator=(const HeldSequences&) = delete;

  void Hold(SequenceId sequence, const Session* holder) {
    holders_.emplace(sequence, holder);
    gauge_.Set(double(count()));
  }
  void Release(SequenceId sequence) {
    holders_.erase(sequence);
    gauge_.Set(double(count()));
  }
  uint64_t count() const { return holders_.size(); }
  /// nullptr: no client holds it.
  const Session* HolderOf(SequenceId sequence) const {
    const auto found = holders_.find(sequence);
    return found == holders_.end() ? nullptr : found->second;
  }

 private:
  absl::flat_hash_map<SequenceId, const Session*> holders_;
  prometheus::Gauge& gauge_;
};

}  // namespace kvmanager
