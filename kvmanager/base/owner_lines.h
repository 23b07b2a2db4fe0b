// What waits, in a line for each owner. Owners take turns: who has much waiting waits for itself, another for at most
// one turn of each owner. One thread, or a lock of whoever has it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

/// An owner of whom nothing waits takes no memory, but for the one who was served last. T can be moved.
template <typename Owner, typename T>
class OwnerLines {
 public:
  /// Behind what waits of this owner.
  void Push(const Owner& owner, T item) {
    Line& line = lines_[owner];
    if (line.empty() && owner != served_) round_.push_back(owner);
    line.push_back(std::move(item));
  }
  bool empty() const { return lines_.empty(); }

  /// A turn: the first in the line of who is next. REQUIRES: it is not empty.
  T Take() {
    return std::move(TakeTogether(1, [](const T&, const T&) { return false; }).front());
  }
  /// A turn: the first in the line of who is next, and those behind it in that line, at most `count_max` in all, for
  /// which together(first, item). In their order. REQUIRES: it is not empty, and count_max is not 0.
  template <typename Together>
  std::vector<T> TakeTogether(size_t count_max, Together together) {
    KV_CHECK(!empty() && count_max > 0);
    // Who was served last goes behind all who came meanwhile.
    if (served_.has_value() && lines_.contains(*served_)) round_.push_back(*std::move(served_));
    served_ = std::move(round_.front());
    round_.pop_front();
    const auto found = lines_.find(*served_);
    Line& line = found->second;
    std::vector<T> taken;
    taken.push_back(std::move(line.front()));
    line.pop_front();
    if (count_max > 1) {
      std::erase_if(line, [&](T& item) {
        if (taken.size() >= count_max || !together(std::as_const(taken.front()), std::as_const(item))) return false;
        taken.push_back(std::move(item));
        return true;
      });
    }
    if (line.empty()) lines_.erase(found);
    return taken;
  }

  /// All that waits, in no order of owners.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [owner, line] : lines_) {
      for (const T& item : line) visit(item);
    }
  }

 private:
  using Line = std::deque<T>;

  absl::flat_hash_map<Owner, Line> lines_;  // none is empty
  std::deque<Owner> round_;                 // each that has a line once, but for served_, in the order of their turns
  std::optional<Owner> served_;             // last
};

}  // namespace kvmanager
