#include "attention/gpu_bench_codec.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/million/million.h"
#include "codecs/registry.h"
#include "codecs/zack_hack/zack_hack.h"
#include "codecs/zack_million/zack_million.h"

namespace kvmanager {
namespace {

class OneArtifact final : public CalibrationSource {
 public:
  explicit OneArtifact(std::shared_ptr<const Calibration> artifact) : artifact_(std::move(artifact)) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return artifact_; }

 private:
  const std::shared_ptr<const Calibration> artifact_;
};

}  // namespace

std::unique_ptr<Codec> MakeBenchCodec(const std::string& spec, const PageLayout& layout, int query_heads) {
  CodecContext context;
  context.layout = layout;
  context.query_heads = query_heads;
  OneArtifact source(
      SyntheticCalibration({"made up", "", context.layers, layout.kv_heads, query_heads, layout.head_dim}, 1, {spec}));
  CodecRegistry registry;
  registry.SetCalibrations(&source);
  RegisterMillion(registry);
  RegisterZackHack(registry);
  RegisterZackMillion(registry);
  auto made = registry.Create(absl::StrCat(spec, ",calibration=any"), context);
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(made);
}

}  // namespace kvmanager
