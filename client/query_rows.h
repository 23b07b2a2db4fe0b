// Which rows of an engine's queries its daemon gets, to say how good encoded pages are: one of one layer now and then,
// in turn, copied behind that layer's attention into pinned memory, and sent with a later step once it is there.
//
// Books alone; who uses it copies. One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace kvmanager::client {

class QueryRows {
 public:
  /// Rows under way, which are all sent at once (limits::kQueryRowsMax).
  static constexpr int kPlaces = 8;
  /// Query tokens between two rows, of any layers, and what a step counts as at least: decode steps copy one row in
  /// four, a prompt's one or more.
  static constexpr uint64_t kTokensPerRow = 256;
  static constexpr uint64_t kStepTokensMin = 64;

  explicit QueryRows(int layers) : layers_(layers) {}

  void BeginStep(uint64_t tokens);
  /// Whether a row of this layer is due and has a place: then Take says where.
  bool IsDue(int layer) const;
  int Take();
  /// Of the step's plan: what was taken is there when this is released.
  void EndStep(uint64_t epoch);

  struct Row {
    int place = 0;
    int layer = 0;
  };
  /// Rows that are there; their places are free again.
  std::vector<Row> Arrived(uint64_t released);

 private:
  struct UnderWay {
    Row row;
    std::optional<uint64_t> epoch;  // none: of the step that has not ended
  };
  const int layers_;
  uint64_t tokens_ = kTokensPerRow;  // that were not spent on rows
  int next_layer_ = 0;
  std::deque<UnderWay> rows_;  // oldest first
  uint32_t taken_ = 0;         // bits of places
};

}  // namespace kvmanager::client
