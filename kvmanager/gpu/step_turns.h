// The order of a connection's steps on a GPU: a step that is submitted in pieces has the stream for itself until its
// last piece, and later steps wait behind it, in the order of their calls. Owned by a DeviceWork. The loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

namespace kvmanager {

class StepTurns {
 public:
  /// A place in the order; given back when it goes. Does not outlive the StepTurns.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)), number_(other.number_) {}
    Turn& operator=(Turn&& other) noexcept {
      End();
      turns_ = std::exchange(other.turns_, nullptr);
      number_ = other.number_;
      return *this;
    }
    ~Turn() { End(); }
    bool taken() const { return turns_ != nullptr; }
    /// Nobody is before it. REQUIRES: taken().
    bool first() const { return turns_->order_.front() == number_; }
    void End() {
      if (turns_ == nullptr) return;
      auto& order = std::exchange(turns_, nullptr)->order_;
      order.erase(std::find(order.begin(), order.end(), number_));
    }

   private:
    friend class StepTurns;
    Turn(StepTurns* turns, uint64_t number) : turns_(turns), number_(number) {}
    StepTurns* turns_ = nullptr;
    uint64_t number_ = 0;
  };

  StepTurns() = default;
  StepTurns(const StepTurns&) = delete;
  StepTurns& operator=(const StepTurns&) = delete;

  /// No step has a turn: none is submitted in pieces.
  bool none() const { return order_.empty(); }
  /// Behind all others.
  Turn Take() {
    order_.push_back(++last_);
    return Turn(this, last_);
  }
  /// Before all others: of a step that had its turn and turns out to have several pieces.
  Turn TakeFirst() {
    order_.push_front(++last_);
    return Turn(this, last_);
  }

 private:
  std::deque<uint64_t> order_;
  uint64_t last_ = 0;
};

}  // namespace kvmanager
