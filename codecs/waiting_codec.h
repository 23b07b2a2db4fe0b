// Interface of a codec whose calls may wait for a process of its own, as a plug-in's may (abi/plugin_process.h), and
// who runs them. A codec that has it implements it beside Codec; a policy or a ladder passes on what its codecs have.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "codecs/codec.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

class WaitingCodec {
 public:
  virtual ~WaitingCodec() = default;
  /// The threads on which all calls of the codec belong, and never an event loop; they outlive the last call. nullptr:
  /// it never waits.
  virtual WorkerPool* workers() const = 0;
  /// How many results of attention and Decode are NaN because the process did not answer. A request during which it
  /// grew has no result.
  virtual uint64_t unanswered() const = 0;
};

/// Those of `codec`; nullptr: it never waits, and any thread may call it.
inline WorkerPool* WaitingWorkers(const Codec& codec) {
  const auto* const waiting = dynamic_cast<const WaitingCodec*>(&codec);
  return waiting == nullptr ? nullptr : waiting->workers();
}
inline uint64_t UnansweredBy(const Codec& codec) {
  const auto* const waiting = dynamic_cast<const WaitingCodec*>(&codec);
  return waiting == nullptr ? 0 : waiting->unanswered();
}
/// Where `codec` is called: `others` unless it waits.
inline WorkerPool* WorkersOf(const Codec& codec, WorkerPool* others) {
  WorkerPool* const own = WaitingWorkers(codec);
  return own == nullptr ? others : own;
}

/// Where codecs that wait are made, by their names: making one waits, too. Filled before other threads read it.
class CodecWorkers {
 public:
  void Add(std::string name, WorkerPool* workers) { workers_.emplace(std::move(name), workers); }
  /// Of the codec that `text`, a spec, a policy or a ladder, names; of several the first named. `others` if it names
  /// none.
  WorkerPool* For(absl::string_view text, WorkerPool* others) const {
    if (workers_.empty()) return others;
    // A codec's name ends a clause, or stands before its parameters. A value that reads like one does no harm.
    for (const absl::string_view word : absl::StrSplit(text, absl::ByAnyChar(";:=,>"))) {
      if (const auto found = workers_.find(word); found != workers_.end()) return found->second;
    }
    return others;
  }

 private:
  std::map<std::string, WorkerPool*, std::less<>> workers_;
};

/// The same of what may not be there.
inline WorkerPool* MakingWorkers(const CodecWorkers* workers, absl::string_view text, WorkerPool* others) {
  return workers == nullptr ? others : workers->For(text, others);
}

}  // namespace kvmanager
