// The log's lines on connections that the daemon ends: one for each, LogLimit's in a minute, and then how many more
// there were.
//
// On the loop's thread.
#pragma once

#include <kj/async.h>
#include <kj/timer.h>
#include <spdlog/spdlog.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/log_limit.h"
#include "kvmanager/rpc/rpc_metrics.h"

namespace kvmanager {

class ConnectionEndLog {
 public:
  /// timer: outlives it, and is of the thread's event loop.
  explicit ConnectionEndLog(kj::Timer* timer) : timer_(timer) {}

  /// name: as its hello said it, empty before that. peer: DescribePeer's. why: what it did, for a person.
  void Note(uint64_t id, absl::string_view name, absl::string_view peer, EndReason reason, absl::string_view why) {
    NoteLeftOut();
    if (!limit_.Take(NowNs())) return NoteLater();
    const std::string who = name.empty()
                                ? std::string(peer)
                                : absl::StrCat("\"", absl::StrReplaceAll(name, {{"\"", "'"}}), "\" (", peer, ")");
    spdlog::warn("connection {} of {} ends: {}{}{}", id, who, EndReasonName(reason), why.empty() ? "" : ": ",
                 std::string(why));
  }

 private:
  int64_t NowNs() const { return (timer_->now() - kj::origin<kj::TimePoint>()) / kj::NANOSECONDS; }
  void NoteLeftOut() {
    const uint64_t left_out = limit_.TakeLeftOut(NowNs());
    if (left_out == 0) return;
    spdlog::warn("{} more connections were ended: kvmanager_connections_ended_total counts them by reason", left_out);
  }
  void NoteLater() {
    if (looks_later_) return;
    looks_later_ = true;
    later_ = Look().eagerlyEvaluate(nullptr);
  }
  kj::Promise<void> Look() {
    return timer_->afterDelay(LogLimit::kNs * kj::NANOSECONDS).then([this]() -> kj::Promise<void> {
      NoteLeftOut();
      if (limit_.has_left_out()) return Look();  // of the next minute, which goes on
      looks_later_ = false;
      return kj::READY_NOW;
    });
  }

  kj::Timer* const timer_;
  LogLimit limit_;
  bool looks_later_ = false;
  kj::Promise<void> later_ = nullptr;
};

}  // namespace kvmanager
