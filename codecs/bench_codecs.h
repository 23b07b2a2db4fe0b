// The codecs of a benchmark's run: the built-in ones, with artifacts from files or made up for the shape at hand.
//
// One thread makes codecs; what it makes is as any codec.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "codecs/registry.h"

namespace kvmanager {

class BenchCodecs {
 public:
  BenchCodecs();
  ~BenchCodecs();

  CodecRegistry& registry() { return registry_; }
  /// Loads the codecs of every "--codec-plugin=FILE.so" and takes these out of the arguments. Errors:
  /// LoadCodecPlugin's.
  absl::Status LoadPlugins(int* argc, char** argv);
  /// A codec for `layers` layers of this shape. Where the spec says calibration=synthetic, the artifact is random and
  /// of the right shape: good for speed, meaningless for quality.
  absl::StatusOr<std::unique_ptr<Codec>> Make(const std::string& spec, const PageLayout& layout, int query_heads,
                                              int layers = 1);
  /// The shape that the artifact named in `spec` is for; nullptr: it names none, or a synthetic one.
  absl::StatusOr<std::shared_ptr<const Calibration>> ArtifactOf(const std::string& spec);

 private:
  class Source;
  std::unique_ptr<Source> source_;
  CodecRegistry registry_;
};

/// Takes every "--NAME=VALUE" out of the arguments, for flags that Google Benchmark does not know; their values.
std::vector<std::string> TakeFlags(absl::string_view name, int* argc, char** argv);

/// The specs that benchmarks show unless told otherwise, by the name of their rows.
struct BenchSpec {
  const char* name;
  const char* spec;
};
const std::vector<BenchSpec>& BenchSpecs();

}  // namespace kvmanager
