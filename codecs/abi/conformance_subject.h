// A codec under test: a plug-in's table for one context, called with buffers that tell when it leaves them.
//
// Lives in the process of one check. Calls go to the C table itself, with structs and array elements larger than this
// version's, as a newer core would pass them.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/abi/codec_plugin.h"
#include "codecs/abi/conformance.h"
#include "codecs/abi/guarded_buffer.h"
#include "codecs/calibrate/capture.h"

namespace kvmanager::conformance {

/// What a check is about.
struct Case {
  const ConformanceOptions* options = nullptr;
  PageLayout layout;
  int layers = 2;
  int query_heads = 0;
  std::string calibration;                            // the file's bytes
  std::shared_ptr<const calibrate::Capture> capture;  // fits the layout and the layers; nullptr: none
};

/// How the values of a page are made.
enum class Kind { kNormal, kZero, kConstant, kRepeated, kOutliers, kTiny, kHuge, kAlternating };
inline constexpr Kind kKinds[] = {Kind::kNormal,   Kind::kZero, Kind::kConstant, Kind::kRepeated,
                                  Kind::kOutliers, Kind::kTiny, Kind::kHuge,     Kind::kAlternating};
const char* KindName(Kind kind);
void FillPage(const PageLayout& layout, Kind kind, uint32_t seed, uint8_t* raw);

/// A kvmc_context that a newer core might pass: more bytes than this version has, all set.
class Context {
 public:
  Context(const Case& c, const CodecParameters& parameters);
  const kvmc_context* get() const { return &padded_.context; }
  kvmc_context* get() { return &padded_.context; }

 private:
  struct {
    kvmc_context context;
    uint8_t more[64];
  } padded_;
  CodecParameters parameters_;
  std::vector<uint8_t> list_;  // elements farther apart than this version's
  std::unique_ptr<GuardedBuffer> calibration_;
};

struct Described {
  kvmc_status status = KVMC_INTERNAL;
  uint32_t version = 0, flags = 0;
  uint64_t payload_bytes = 0;
  std::vector<uint32_t> bytes_of_layer, layer_flags;
  std::string parameters;
  friend bool operator==(const Described&, const Described&) = default;
};
Described Describe(const kvmc_codec_api& api, const Case& c, const CodecParameters& parameters);

struct AttendQueries {
  std::vector<float> q;  // [rows][head_dim]
  float scale = 0;       // of their scores
};
/// 1 / sqrt(head_dim).
float PlainScale(const PageLayout& layout);
struct AttendResult {
  std::vector<float> max, sum, acc;
};

class Subject {
 public:
  /// Errors are a failed check's text, as everywhere here.
  static absl::StatusOr<std::unique_ptr<Subject>> Open(const Case& c);
  ~Subject();

  const kvmc_codec_api& api() const { return plugin_->api(); }
  const kvmc_codec* codec() const { return codec_; }
  const Described& described() const { return described_; }
  const PageLayout& layout() const { return case_.layout; }
  int group() const { return case_.query_heads / case_.layout.kv_heads; }
  /// First and last: where layers differ, these do.
  std::vector<int> layers() const;
  bool attends() const { return (described_.flags & KVMC_ATTENDS) != 0; }
  bool maps(int layer) const { return (described_.layer_flags[layer] & KVMC_MAPS) != 0; }
  size_t bytes(int layer) const { return described_.bytes_of_layer[layer]; }

  GuardedBuffer Page(Kind kind, uint32_t seed, GuardedBuffer::Place place = GuardedBuffer::Place::kAgainstEnd) const;
  /// Encodes one page. *declined may be nullptr: then declining is an error.
  absl::Status Encode(const GuardedBuffer& raw, int layer, uint64_t first_token, const GuardedBuffer& encoded,
                      bool* declined = nullptr) const;
  absl::StatusOr<GuardedBuffer> Encoded(Kind kind, uint32_t seed, int layer) const;
  absl::Status Decode(const GuardedBuffer& encoded, int layer, int first_head, int heads,
                      const GuardedBuffer& raw) const;
  kvmc_status Validate(const GuardedBuffer& encoded, int layer, size_t bytes) const;
  /// Adds pages to a state, which starts empty unless `from` is given. The queries are mapped here if the layer maps.
  absl::StatusOr<AttendResult> Attend(const std::vector<const uint8_t*>& pages, int layer, int kv_head,
                                      const AttendQueries& queries, const AttendResult* from = nullptr) const;
  /// Rows of acc / sum, out of the codec's own space.
  absl::StatusOr<std::vector<double>> Output(const AttendResult& state, int layer, int kv_head) const;
  /// `map` of the table on rows of floats.
  absl::StatusOr<std::vector<float>> Map(kvmc_status (*map)(const kvmc_codec*, const kvmc_map_item*), int layer,
                                         int kv_head, const std::vector<float>& from) const;
  /// An error with the plug-in's text, or one that says that it gave none.
  absl::Status ErrorOf(kvmc_status status, const char* entry) const;

 private:
  Subject() = default;
  GuardedBuffer Workspace(uint32_t purpose, int rows) const;

  Case case_;
  std::shared_ptr<const CodecPlugin> plugin_;  // as the loader shares it
  kvmc_codec* codec_ = nullptr;
  Described described_;
};

/// A page's values as doubles.
std::vector<double> Values(const PageLayout& layout, const uint8_t* raw, size_t count);

}  // namespace kvmanager::conformance
