// A bound for log lines of one kind: kLinesMax in each kNs, and one behind them that says how many more there were.
//
// Counts alone: whoever has it writes the lines. One thread, or a lock of whoever has it.
#pragma once

#include <cstdint>
#include <utility>

namespace kvmanager {

class LogLimit {
 public:
  static constexpr int kLinesMax = 10;
  static constexpr int64_t kNs = int64_t{60} * 1000000000;

  /// Whether a line may be written now; false: it is left out, and counted.
  bool Take(int64_t now_ns) {
    if (now_ns - begun_ns_ >= kNs) {
      begun_ns_ = now_ns;
      lines_ = 0;
    }
    if (lines_ < kLinesMax) {
      ++lines_;
      return true;
    }
    ++left_out_;
    return false;
  }
  /// Lines that were left out, once their time has ended: to be said, and counted no more. 0: there are none, or it
  /// goes on. To be called now and then.
  uint64_t TakeLeftOut(int64_t now_ns) { return now_ns - begun_ns_ < kNs ? 0 : std::exchange(left_out_, 0); }
  /// Whether lines were left out that are still to be said.
  bool has_left_out() const { return left_out_ > 0; }

 private:
  int64_t begun_ns_ = -kNs;
  int lines_ = 0;  // since
  uint64_t left_out_ = 0;
};

}  // namespace kvmanager
