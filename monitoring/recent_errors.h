// The last errors that clients were answered with, for people who look: equal ones are one entry with a count.
//
// Owned by the Server. Record is the event loop's, List any thread's; both take a lock for as long as kEntriesMax
// entries take to look through. Calls without an error do not come here.
//
// Invariants: 1. No two entries have the same code, method and field. 2. Entries are ordered by their last time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager {

struct RecentError {
  std::string code;     // "INVALID_ARGUMENT"
  std::string method;   // of the schema
  std::string field;    // what the error is about; empty if it says nothing of it
  std::string message;  // of the last one, cut to kTextBytesMax, bytes that are no printable ASCII replaced
  uint64_t count = 0;
  int64_t last_ns = 0;  // of the clock that Record was told
};

class RecentErrors {
 public:
  static constexpr size_t kEntriesMax = 32;     // the oldest goes
  static constexpr size_t kTextBytesMax = 240;  // of a message or a field

  void Record(absl::string_view method, const absl::Status& status, int64_t now_ns);
  /// Newest first.
  std::vector<RecentError> List() const;

 private:
  mutable Mutex mutex_;
  std::vector<RecentError> entries_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace kvmanager
