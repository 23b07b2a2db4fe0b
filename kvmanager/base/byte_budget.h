// Bytes that may be taken up to a bound, by one payer up to three quarters of it, and are given back with what they
// were taken for. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class ByteBudget {
 public:
  /// Given back when destroyed, with no lock held; its budget outlives it.
  class Charge {
   public:
    Charge() = default;
    Charge(ByteBudget* of, absl::string_view payer, uint64_t bytes) : of_(of), payer_(payer), bytes_(bytes) {}
    ~Charge() {
      if (bytes_ > 0) of_->GiveBack(payer_, bytes_);
    }
    Charge(Charge&& other) noexcept
        : of_(other.of_), payer_(std::move(other.payer_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Charge& operator=(Charge&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(payer_, other.payer_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }

   private:
    ByteBudget* of_ = nullptr;
    std::string payer_;
    uint64_t bytes_ = 0;
  };

  /// Called by the thread that takes or gives back: by how much the use has changed.
  using OnChange = absl::AnyInvocable<void(double bytes) const>;

  /// option: names the bound in errors. on_change: may be called by any threads at once.
  ByteBudget(std::string option, uint64_t max, OnChange on_change)
      : option_(std::move(option)), max_(max), on_change_(std::move(on_change)) {}

  /// Of a bound of `max` bytes, what one payer may have, so that another finds room.
  static constexpr uint64_t OfPayerMax(uint64_t max) { return max / 4 * 3; }

  /// payer: whose bytes they are, PayerName of the tenant. Errors: RESOURCE_EXHAUSTED naming the option, of this tenant
  /// where its own part is full, with what is used and wanted, and the bound.
  absl::StatusOr<Charge> Take(absl::string_view payer, absl::string_view what, uint64_t bytes) {
    KV_RETURN_IF_ERROR(Add(payer, what, bytes));
    on_change_(double(bytes));
    return Charge(this, payer, bytes);
  }
  uint64_t used() const {
    MutexLock lock(mutex_);
    return taken_.all();
  }
  /// Of the payer who has most.
  uint64_t most_of_payer() const {
    MutexLock lock(mutex_);
    return taken_.most();
  }
  uint64_t max() const { return max_; }

 private:
  absl::Status Add(absl::string_view payer, absl::string_view what, uint64_t bytes) {
    MutexLock lock(mutex_);
    const struct {
      const char* whose;
      uint64_t used, max;
      std::string why;
    } bounds[] = {{kOfTenant, taken_.Of(payer), OfPayerMax(max_),
                   absl::StrCat(", three quarters of ", option_, "; so others find room")},
                  {"", taken_.all(), max_, ""}};
    for (const auto& [whose, used, max, why] : bounds) {
      if (bytes <= max && used <= max - bytes) continue;
      return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat(option_, whose),
                        absl::StrCat(used, " used, and ", bytes, " wanted for ", what),
                        absl::StrCat("at most ", max, why));
    }
    taken_.Add(payer, bytes);
    return absl::OkStatus();
  }
  void GiveBack(absl::string_view payer, uint64_t bytes) {
    on_change_(-double(bytes));
    MutexLock lock(mutex_);
    taken_.Remove(payer, bytes);
  }

  const std::string option_;
  const uint64_t max_;
  const OnChange on_change_;
  mutable Mutex mutex_;
  OwnerCounts<std::string> taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmanager
