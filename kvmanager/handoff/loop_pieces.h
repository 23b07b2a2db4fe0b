// Pieces of what a hand-off does on the loop's thread: one in a message, so that between two of them others are served.
#pragma once

#include <chrono>
#include <functional>

#include "absl/functional/function_ref.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

struct LoopPieces {
  /// How long one may take.
  static constexpr std::chrono::microseconds kLength{150};

  MessageQueue* queue = nullptr;
  /// Does a piece, and looks how long it holds the loop; empty: nobody looks.
  std::function<void(absl::FunctionRef<void()> piece)> watch;

  void Run(absl::FunctionRef<void()> piece) const { watch ? watch(piece) : piece(); }
};

}  // namespace kvmanager
