#include "codecs/zack_hack/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/zack_hack/zack_hack.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack_hack {
namespace {

constexpr double kProbeBits[2] = {1, 0.5};
constexpr uint8_t kFineWidth = 8;

/// A codec of one layer: pages of the others stay raw.
class OneLayerCodec final : public Codec {
 public:
  OneLayerCodec(std::unique_ptr<Codec> codec, int layer) : codec_(std::move(codec)), layer_(uint32_t(layer)) {}

  const CodecInfo& info() const override { return codec_->info(); }
  const PageLayout& layout() const override { return codec_->layout(); }
  size_t encode_workspace_bytes() const override { return codec_->encode_workspace_bytes(); }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    for (EncodeItem& item : items) {
      if (item.layer == layer_) {
        codec_->Encode(absl::MakeSpan(&item, 1), workspace);
      } else {
        std::fill_n(item.encoded, info().page_bytes(int(item.layer)), uint8_t{0});
        item.declined = true;
      }
    }
  }
  void Decode(absl::Span<const DecodeItem> items) const override { codec_->Decode(items); }
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    return codec_->Validate(layer, encoded);
  }
  const PageAttention& attention() const override { return codec_->attention(); }

 private:
  const std::unique_ptr<Codec> codec_;
  const uint32_t layer_;
};

bool Covers(const Part& part, int head, int side) {
  return side == part.side && (part.kv_head == Part::kAllHeads || part.kv_head == head);
}

absl::Status Check(const CodecContext& context, const Part& part) {
  if (part.layer < 0 || part.layer >= context.layers) {
    return InvalidField("part's layer", part.layer, absl::StrCat("0..", context.layers - 1));
  }
  if (part.kv_head != Part::kAllHeads && (part.kv_head < 0 || part.kv_head >= context.layout.kv_heads)) {
    return InvalidField("part's kv_head", part.kv_head, absl::StrCat("0..", context.layout.kv_heads - 1));
  }
  if (part.side != 0 && part.side != 1) return InvalidField("part's side", part.side, "0 or 1");
  return absl::OkStatus();
}

struct ProbePlan {
  ZackHackParameters parameters;
  SegmentEnergies energies;
  LayerWidths widths;  // as if every part were probed
};

absl::StatusOr<ProbePlan> MakePlan(const CodecContext& context, absl::string_view mode, const Part& part) {
  KV_RETURN_IF_ERROR(Check(context, part));
  ProbePlan plan;
  KV_ASSIGN_OR_RETURN(plan.parameters, ParseParameters(context, {{"mode", std::string(mode)},
                                                                 {"k_bits", absl::StrCat(kProbeBits[0])},
                                                                 {"v_bits", absl::StrCat(kProbeBits[1])},
                                                                 {"allocation", "head"}}));
  KV_ASSIGN_OR_RETURN(plan.energies, ReadEnergies(context, mode, false));
  plan.widths = MakeWidths(plan.parameters, context.layout, plan.energies);
  return plan;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> MakeProbe(const CodecContext& context, absl::string_view mode,
                                                 const Part& part) {
  KV_ASSIGN_OR_RETURN(ProbePlan plan, MakePlan(context, mode, part));
  for (int head = 0; head < context.layout.kv_heads; ++head) {
    for (int side = 0; side < 2; ++side) {
      std::vector<uint8_t>& widths = plan.widths[part.layer][head][side];
      if (!Covers(part, head, side)) std::fill(widths.begin(), widths.end(), kFineWidth);
    }
  }
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, MakeCodec(context, plan.parameters, plan.widths));
  return std::make_unique<OneLayerCodec>(std::move(codec), part.layer);
}

absl::StatusOr<double> ProbeLoss(const CodecContext& context, absl::string_view mode, const Part& part) {
  KV_ASSIGN_OR_RETURN(const ProbePlan plan, MakePlan(context, mode, part));
  double lost = 0;
  for (int head = 0; head < context.layout.kv_heads; ++head) {
    if (!Covers(part, head, part.side)) continue;
    const size_t at = plan.energies.index(part.layer, head, part.side) * plan.energies.segments;
    for (int s = 0; s < plan.energies.segments; ++s) {
      lost += plan.energies.energy[at + s] * LossOf(kMeasuredLoss, plan.widths[part.layer][head][part.side][s]);
    }
  }
  return std::max(lost, double(std::numeric_limits<float>::min()));
}

double MeanDivergence(absl::Span<const float> raw, absl::Span<const float> coded, size_t vocabulary) {
  KV_CHECK(vocabulary > 0 && raw.size() == coded.size() && raw.size() % vocabulary == 0 && !raw.empty());
  double total = 0;
  for (size_t row = 0; row < raw.size(); row += vocabulary) {
    const float* a = raw.data() + row;
    const float* b = coded.data() + row;
    const double a_max = *std::max_element(a, a + vocabulary), b_max = *std::max_element(b, b + vocabulary);
    double a_sum = 0, b_sum = 0, weighted = 0;
    for (size_t i = 0; i < vocabulary; ++i) {
      const double p = std::exp(a[i] - a_max);
      a_sum += p;
      b_sum += std::exp(b[i] - b_max);
      weighted += p * ((a[i] - a_max) - (b[i] - b_max));
    }
    total += weighted / a_sum - std::log(a_sum) + std::log(b_sum);
  }
  return std::max(0.0, total / (double(raw.size()) / double(vocabulary)));
}

}  // namespace kvmanager::zack_hack
