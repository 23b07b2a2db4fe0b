// What clients that work at random write, and what they must read: K, V and queries by seed, as they are written and as
// a codec gives them back, and what attention gave when it was first asked.
//
// Any thread. Rows are made when they are first needed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"
#include "tests/model.h"

namespace kvmanager::testing {

class KnownRows {
 public:
  static constexpr int kSeeds = 12, kLayers = 2, kTokens = 640, kBlocks = kTokens / 64;  // seeds: 1..kSeeds
  static constexpr size_t kRowBytes = 256;        // of a token of one layer and side
  static constexpr size_t kQueryValues = 4 * 64;  // of a token's queries

  /// What a read of a full page may give.
  enum class Form {
    kWritten,  // what was written
    kDecoded,  // that, or what the codec gives back
    kUnknown,  // a codec that needs an artifact: not compared
  };

  struct Rows {
    std::vector<uint8_t> k[kLayers], v[kLayers], decoded_k[kLayers], decoded_v[kLayers];
    std::vector<float> q[kLayers];
  };

  /// codec: of Form::kDecoded.
  explicit KnownRows(std::string codec) : codec_(std::move(codec)) {}

  const Rows& Of(uint64_t seed);
  Source SourceOf(uint64_t seed) const { return {seed, Kind::kNormal, SmallCache(codec_, 1)}; }
  /// The pages among tokens first .. first + tokens - 1 that are not as they must be, or "". k, v: what was read.
  std::string Differs(uint64_t seed, Form form, int layer, uint64_t first, uint64_t tokens, const uint8_t* k,
                      const uint8_t* v);
  /// Whether a token's output over raw pages is near what it was when it was first asked for.
  bool SameOutput(uint64_t seed, int layer, uint64_t token, absl::Span<const float> out);

 private:
  struct Seed {
    std::once_flag once;
    Rows rows;
  };
  const std::string codec_;
  std::array<Seed, kSeeds + 1> seeds_;
  Mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<float>> outputs_ ABSL_GUARDED_BY(mutex_);  // seed, place
};

}  // namespace kvmanager::testing
