#include "monitoring/recent_errors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

std::string Cut(absl::string_view text) {
  std::string shown(text.substr(0, RecentErrors::kTextBytesMax));
  for (char& c : shown) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  if (text.size() > RecentErrors::kTextBytesMax) shown += "...";
  return shown;
}

}  // namespace

void RecentErrors::Record(absl::string_view method, const absl::Status& status, int64_t now_ns) {
  RecentError error;
  error.code = absl::StatusCodeToString(status.code());
  error.method = std::string(method);
  error.field = Cut(DetailOf(status).field);
  error.message = Cut(status.message());
  error.count = 1;
  error.last_ns = now_ns;
  MutexLock lock(mutex_);
  const auto same = std::find_if(entries_.begin(), entries_.end(), [&](const RecentError& other) {
    return other.code == error.code && other.method == error.method && other.field == error.field;
  });
  if (same != entries_.end()) {
    error.count += same->count;
    entries_.erase(same);
  } else if (entries_.size() == kEntriesMax) {
    entries_.erase(entries_.begin());
  }
  entries_.push_back(std::move(error));
}

std::vector<RecentError> RecentErrors::List() const {
  MutexLock lock(mutex_);
  return {entries_.rbegin(), entries_.rend()};
}

}  // namespace kvmanager
