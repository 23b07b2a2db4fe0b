// The other client: decodes at a steady rate and makes calls of its own, and says how long each of them took.
//
// Steps begin when they are due, whatever became of the one before, and their time counts from then: a daemon that
// stands still for a second is late for all steps of that second.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "tests/model.h"

namespace kvmanager::testing {

/// Milliseconds, sorted.
struct Times {
  std::vector<double> ms;
  /// The value that a part `q` of them does not exceed; 0 of none.
  double At(double q) const;
};

struct Decoded {
  Times steps;
  absl::Status failed;  // the first step that was not served
};

class Victim {
 public:
  static constexpr int kContext = 4096;  // tokens
  static constexpr int kPeriodUs = 4000;
  static constexpr int kStepsOfFork = 64;  // then another fork of the context

  /// A context in a cache of codec hack, whose first blocks are published.
  static absl::StatusOr<std::unique_ptr<Victim>> Make(const std::string& address, int64_t deadline_ms);
  /// Steps for so long: append and attend of one token, in both layers.
  Decoded Decode(int64_t ms);
  /// What the context's last token reads: the same bits whatever happened since.
  absl::StatusOr<std::vector<float>> Look();
  client::Client& client() { return *client_; }

 private:
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Cache> cache_;
  client::CreatedSequence context_;
  Source source_;
  std::vector<uint8_t> k_, v_;
  std::vector<float> q_;
};

/// Calls of every other kind, one after the other, until `stop`. On a thread of its own, with its own connection.
struct OwnCalls {
  Times times;
  uint64_t refused = 0;  // RESOURCE_EXHAUSTED
  absl::Status failed;   // the first other error
  void Run(const std::string& address, int64_t deadline_ms, const std::atomic<bool>& stop);
};

}  // namespace kvmanager::testing
