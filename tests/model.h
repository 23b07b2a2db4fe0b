// Keys, values and queries made from seeds, and attention as plain loops in double precision: what answers are compared
// with.
//
// Values are pure functions of (seed, layer, side, position, head, channel), so any chunking of a sequence gives the
// same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "codecs/registry.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::testing {

/// How values are distributed.
enum class Kind {
  kNormal,    // standard normal
  kOutliers,  // a few key channels around +-12, as real keys have
  kConstant,  // every channel constant over tokens (steps of zero)
  kTiny,      // subnormal in fp16
  kHuge,      // near the dtype's largest finite values in a few places
  kRepeated,  // all tokens equal: diffuse attention
};

struct Source {
  uint64_t seed = 1;
  Kind kind = Kind::kNormal;
  client::CacheOptions shape;

  /// K and V of tokens first .. first + tokens - 1: [tokens][kv_heads][head_dim] of shape.dtype.
  std::vector<uint8_t> K(int layer, uint64_t first, int tokens) const { return Rows(layer, 0, first, tokens); }
  std::vector<uint8_t> V(int layer, uint64_t first, int tokens) const { return Rows(layer, 1, first, tokens); }
  /// [tokens][query_heads][head_dim].
  std::vector<float> Q(int layer, uint64_t first, int tokens) const;
  /// Token ids that stand for these tokens: equal iff seeds and positions are.
  std::vector<uint32_t> TokenIds(uint64_t first, uint64_t tokens) const;

 private:
  std::vector<uint8_t> Rows(int layer, int side, uint64_t first, int tokens) const;
};

/// A cache of 2 layers, 2 KV heads and 4 query heads that is opened by `codec`.
client::CacheOptions SmallCache(const std::string& codec, int lag_pages = 2, int page_tokens = 64, int head_dim = 64);

/// A registry with every codec of this repository.
const CodecRegistry& AllCodecs();

/// What a sequence of a cache holds, and what attention over it gives. Pages that a query reads encoded are replaced by
/// what the codec's Decode gives for them; everything else is plain.
class ModelSequence {
 public:
  explicit ModelSequence(const client::CacheOptions& shape) : ModelSequence(shape, AllCodecs()) {}
  ModelSequence(const client::CacheOptions& shape, const CodecRegistry& registry);

  uint64_t tokens(int layer) const;
  /// k, v as in Source. Pages more than the lag before the first new token age (docs/design.md section 1, rule 3).
  void Append(int layer, const std::vector<uint8_t>& k, const std::vector<uint8_t>& v);
  void Crop(uint64_t tokens);
  /// The end of the last page that is read encoded in some layer, whatever the query.
  uint64_t encoded_tokens() const;
  /// A crop below it must be at a page's boundary: the end of the last page that has aged by the newest token in some
  /// layer.
  uint64_t crop_limit_tokens() const;
  /// Tokens 0 .. tokens - 1 came by a prefix hit: they are read encoded whatever the distance.
  void MarkShared(uint64_t tokens);

  struct Output {
    std::vector<double> out;  // [tokens][query_heads][head_dim]
    std::vector<double> lse;  // [tokens][query_heads]
    uint64_t encoded_pairs = 0, raw_pairs = 0;
  };
  /// Causal attention of queries at position .. position + tokens - 1.
  Output Attend(int layer, uint64_t position, int tokens, const std::vector<float>& q) const;

  struct Rows {
    std::vector<uint8_t> k, v;  // [tokens][kv_heads][head_dim] of the dtype
    uint64_t encoded_tokens = 0;
  };
  /// What Cache::Read gives of these tokens.
  Rows Read(int layer, uint64_t position, int tokens) const;

 private:
  struct Layer {
    std::vector<float> k, v;                  // [token][kv_heads][head_dim], as stored in the dtype
    std::vector<float> decoded_k, decoded_v;  // the same for full pages, as Decode gives
    std::vector<bool> declined;               // by full page
    uint64_t aged_pages = 0;
  };
  void DecodeFullPages(int layer);
  uint64_t AgedByNewest(int layer) const;  // pages

  client::CacheOptions shape_;
  PageLayout layout_;
  std::shared_ptr<Codec> codec_;
  std::vector<Layer> layers_;
  uint64_t shared_pages_ = 0;
};

/// Root mean square of a - b over that of b (1e-30 added).
double RelativeError(absl::Span<const float> a, absl::Span<const double> b);
double LargestDifference(absl::Span<const float> a, absl::Span<const float> b);

/// Appends and attends tokens first .. first + tokens - 1 of `source` to a sequence, all layers, at most `chunk` tokens
/// a call. Returns the output, [layer][token][query_heads][head_dim].
absl::StatusOr<std::vector<float>> Feed(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t first,
                                        int tokens, int chunk, client::StepResult* counts = nullptr);
/// The same on a model.
std::vector<double> FeedModel(ModelSequence& model, const Source& source, uint64_t first, int tokens, int chunk,
                              client::StepResult* counts = nullptr);
/// Appends only.
absl::Status Load(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t first, int tokens, int chunk);
void LoadModel(ModelSequence& model, const Source& source, uint64_t first, int tokens, int chunk);
/// Attention only, of queries at position .. position + tokens - 1 of every layer.
absl::StatusOr<std::vector<float>> Ask(client::Cache& cache, uint64_t sequence, const Source& source, uint64_t position,
                                       int tokens = 1);
std::vector<double> AskModel(const ModelSequence& model, const Source& source, uint64_t position, int tokens = 1);

/// Load of one layer alone, in one call.
absl::Status LoadLayer(client::Cache& cache, uint64_t sequence, const Source& source, int layer, uint64_t first,
                       int tokens);
/// The output of one query at `position` of one layer.
absl::StatusOr<std::vector<float>> AskLayer(client::Cache& cache, uint64_t sequence, const Source& source, int layer,
                                            uint64_t position);

/// Names of the first `blocks` blocks of source's token ids.
std::vector<BlockName> Names(const client::Cache& cache, const Source& source, int blocks);

}  // namespace kvmanager::testing
