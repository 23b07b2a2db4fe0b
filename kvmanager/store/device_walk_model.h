// What a walk of random operations (device_walk.h, backends_walk.h) knows of the caches of a GPU: clients with their
// streams, caches, sequences, and what is on its way. Values of one thread, the walk's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kvmanager/store/simulated_gpu.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager::device_walk {

using testing::SimulatedRows;
using testing::SimulatedStream;
using testing::TestDevice;
using testing::TestStore;
using testing::Text;
using Submission = testing::SimulatedSubmission;

inline constexpr int kClients = 4;
inline constexpr int kBlocksMax = 10;  // of a sequence
inline constexpr size_t kSequencesMax = 24;
inline constexpr size_t kQueuedMax = 24;   // submissions of a client
inline constexpr size_t kWaitingMax = 12;  // steps of all clients
inline constexpr size_t kSendingMax = 6;   // hand-offs

struct Client {
  Client(TestDevice* device, SimulatedStream::Counts* counts) : stream(device, counts) {}
  SimulatedStream stream;
  bool dead = false;
};

struct ModelCache {
  CacheConfig config;
  CacheId id = 0;
  std::shared_ptr<const Codec> codec;
  std::set<Digest> published;
};

struct ModelSequence {
  Client* client = nullptr;
  size_t cache = 0;
  Text text;
  std::vector<uint64_t> tokens;   // [layers]
  std::vector<uint32_t> aged;     // [layers]
  std::vector<uint32_t> waiting;  // [layers] steps that wait for encoding
  uint64_t written_by = 0;        // its client's submission after which all its tokens are there
  uint64_t TokensInEveryLayer() const { return *std::min_element(tokens.begin(), tokens.end()); }
  uint64_t TokensInSomeLayer() const { return *std::max_element(tokens.begin(), tokens.end()); }
  /// Tokens were appended to a layer.
  void Append(int layer, int count, const CacheConfig& config) {
    aged[layer] = AgedBy(layer, tokens[layer], config);
    tokens[layer] += count;
  }
  /// How many pages of a layer have aged once an append begins at `position`, by rule 2 of page_store.h.
  uint32_t AgedBy(int layer, uint64_t position, const CacheConfig& config) const {
    const int64_t aged_pages = static_cast<int64_t>(position / config.layout.page_tokens) - config.lag_pages;
    return aged_pages > aged[layer] ? static_cast<uint32_t>(aged_pages) : aged[layer];
  }
  /// The same of all layers, for a crop to `to` tokens: it ages by the newest token first.
  std::vector<uint32_t> AgedByCrop(uint64_t to, const CacheConfig& config) const {
    std::vector<uint32_t> by_newest = aged;
    for (size_t layer = 0; layer < aged.size(); ++layer) {
      if (tokens[layer] > to) by_newest[layer] = AgedBy(static_cast<int>(layer), tokens[layer] - 1, config);
    }
    return by_newest;
  }
  /// Such a crop would cut a page of which some layer has the encoded form alone, were the codec no identity.
  bool CropCutsAged(uint64_t to, const CacheConfig& config) const {
    const std::vector<uint32_t> by_newest = AgedByCrop(to, config);
    return to % config.layout.page_tokens != 0 && to < TokensInSomeLayer() &&
           to / config.layout.page_tokens < *std::max_element(by_newest.begin(), by_newest.end());
  }
  void Crop(uint64_t to, const CacheConfig& config) {
    const uint32_t pages = static_cast<uint32_t>(to / config.layout.page_tokens);
    if (to < TokensInSomeLayer()) aged = AgedByCrop(to, config);
    for (uint32_t& each : aged) each = std::min(each, pages);
    std::fill(tokens.begin(), tokens.end(), to);
    text.Truncate(to);
  }
  /// An entry has queries that see a part of a page that has aged in this layer: only its last token may ask it whole.
  bool SeesPartOfAged(int layer, const AttendEntry& entry, const CacheConfig& config) const {
    const uint64_t page_tokens = config.layout.page_tokens;
    const uint64_t position = (entry.position + 1) % page_tokens == 0 ? entry.position + 1 : entry.position;
    return position < entry.position + entry.tokens && position / page_tokens < aged[layer];
  }
  bool waits() const {
    return std::any_of(waiting.begin(), waiting.end(), [](uint32_t n) { return n > 0; });
  }
};

/// A step whose queries are submitted once the pages that they read are encoded.
struct Waiting {
  Client* client = nullptr;
  size_t cache = 0;
  int first_layer = 0, layers = 0;
  std::vector<AttendEntry> entries;
  std::unique_ptr<AttendLease> lease;
  std::shared_ptr<bool> called = std::make_shared<bool>(false);
};

/// A sequence on its way between the GPU and the host.
struct Arrival {
  size_t cache = 0;
  Text text;  // of a fetch
  std::unique_ptr<ArrivalLease> lease;
  std::optional<ModelSequence> copied;  // of a copy: as it was
  SequenceId on_host = 0;               // of a copy back: where it comes from
  std::shared_ptr<bool> called = std::make_shared<bool>(false);
};

/// A sequence that is sent while it grows.
struct Sending {
  const Client* client = nullptr;
  SequenceId id = 0;
  size_t cache = 0;
  bool by_host = false;
  uint64_t tokens = 0;
  std::unique_ptr<ExportLease> lease;
  Text text;                            // once it is finished, or dropped
  std::vector<testing::SentPage> sent;  // that were offered
};

/// What is to be told of a submission once it has run.
struct Write {
  const Client* client = nullptr;
  uint64_t number = 0;
  SequenceId id = 0;
  int first_layer = 0;
  std::vector<uint64_t> tokens;  // by layer
};

/// An encode job runs behind this submission of its client.
struct Job {
  const Client* client = nullptr;
  uint64_t after = 0;
};

}  // namespace kvmanager::device_walk
