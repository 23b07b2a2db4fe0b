// Pieces of work that the loop does outside of calls, watched as calls are (turn_watch.h).
#pragma once

#include <functional>

#include "absl/functional/function_ref.h"
#include "kvmanager/rpc/turn_watch.h"

namespace kvmanager {

/// Does what it is given, in a turn of `call`, which lives for ever. watch: outlives it. The loop's thread.
inline std::function<void(absl::FunctionRef<void()>)> Watched(TurnWatch* watch, const char* call) {
  return [watch, call](absl::FunctionRef<void()> piece) {
    const LoopTurn turn(watch, call);
    piece();
  };
}

}  // namespace kvmanager
