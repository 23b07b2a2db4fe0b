// Bytes that may be taken up to a bound, and are given back with what they were taken for. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class ByteBudget {
 public:
  /// Given back when destroyed; its budget outlives it.
  class Charge {
   public:
    Charge() = default;
    Charge(ByteBudget* of, uint64_t bytes) : of_(of), bytes_(bytes) {}
    ~Charge() {
      if (bytes_ > 0) of_->GiveBack(bytes_);
    }
    Charge(Charge&& other) noexcept : of_(other.of_), bytes_(std::exchange(other.bytes_, 0)) {}
    Charge& operator=(Charge&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }

   private:
    ByteBudget* of_ = nullptr;
    uint64_t bytes_ = 0;
  };

  /// Called by the thread that takes or gives back: by how much the use has changed.
  using OnChange = absl::AnyInvocable<void(double bytes) const>;

  /// option: names the bound in errors. on_change: may be called by any threads at once.
  ByteBudget(std::string option, uint64_t max, OnChange on_change)
      : option_(std::move(option)), max_(max), on_change_(std::move(on_change)) {}

  /// Errors: RESOURCE_EXHAUSTED naming the option, what is used and wanted, and the bound.
  absl::StatusOr<Charge> Take(absl::string_view what, uint64_t bytes) {
    uint64_t used = used_.load();
    do {
      if (bytes > max_ || used > max_ - bytes) {
        return FieldError(absl::StatusCode::kResourceExhausted, option_,
                          absl::StrCat(used, " used, and ", bytes, " wanted for ", what),
                          absl::StrCat("at most ", max_));
      }
    } while (!used_.compare_exchange_weak(used, used + bytes));
    on_change_(double(bytes));
    return Charge(this, bytes);
  }
  uint64_t used() const { return used_.load(); }
  uint64_t max() const { return max_; }

 private:
  void GiveBack(uint64_t bytes) {
    on_change_(-double(bytes));
    used_.fetch_sub(bytes);
  }

  const std::string option_;
  const uint64_t max_;
  const OnChange on_change_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace kvmanager
