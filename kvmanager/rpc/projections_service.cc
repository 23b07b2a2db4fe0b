// Projections: weights that clients register, for pages that are recomputed.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/rpc/step_check.h"

namespace kvmanager {
namespace {

class ProjectionsService final : public api::Projections::Server {
 public:
  ProjectionsService(std::shared_ptr<Session> session, Recomputer* recomputer, std::shared_ptr<ProjectionSet> set,
                     const CacheConfig& config)
      : session_(std::move(session)), recomputer_(recomputer), set_(std::move(set)), config_(config) {}

  kj::Promise<void> setLayer(SetLayerContext context) override {
    return Serve(*session_, Method::kSetProjections, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(LayerRegistration registration, Read(context.getParams().getLayer()));
      context.releaseParams();
      auto pair = kj::newPromiseAndFulfiller<absl::Status>();
      recomputer_->Register(
          set_, std::move(registration),
          [fulfiller = kj::mv(pair.fulfiller)](absl::Status status) mutable { fulfiller->fulfill(kj::mv(status)); });
      return pair.promise
          .then([this, context](absl::Status status) mutable {
            if (status.ok()) return;
            ServeError(*session_, Method::kSetProjections, status, context);
          })
          .attach(thisCap());
    });
  }

 private:
  // Bytes that stay as long as the registration does: an arena's, or a copy of the message's.
  absl::StatusOr<absl::Span<const uint8_t>> Take(absl::string_view field, api::Tensor::Reader in, uint64_t bytes,
                                                 LayerRegistration* out) {
    KV_ASSIGN_OR_RETURN(const StepTensor tensor,
                        CheckTensor(field, in, bytes, [this](uint32_t arena) { return session_->ArenaBytes(arena); }));
    switch (tensor.where) {
      case StepTensor::Where::kNone:
        return absl::Span<const uint8_t>();
      case StepTensor::Where::kArena:
        out->keep.push_back(session_->FindArena(tensor.arena));
        return absl::Span<const uint8_t>(tensor.bytes);
      case StepTensor::Where::kInline: {
        auto copy = std::make_shared<const std::vector<uint8_t>>(tensor.bytes.begin(), tensor.bytes.end());
        out->keep.push_back(copy);
        out->copied_bytes += copy->size();
        return absl::MakeConstSpan(*copy);
      }
    }
    return absl::Span<const uint8_t>();
  }

  absl::StatusOr<LayerRegistration> Read(api::LayerProjections::Reader in) {
    LayerRegistration out;
    if (in.getLayer() >= static_cast<uint32_t>(config_.layers)) {
      return InvalidField("layer", in.getLayer(), absl::StrCat("0..", config_.layers - 1));
    }
    out.layer = static_cast<int>(in.getLayer());
    KV_ASSIGN_OR_RETURN(out.weights.dtype, ReadDType("dtype", in.getDtype()));
    const uint64_t width = uint64_t{config_.layout.kv_heads} * config_.layout.head_dim;
    const uint64_t row_bytes = width * DTypeBytes(out.weights.dtype);
    KV_ASSIGN_OR_RETURN(out.weights.k, Take("k", in.getK(), row_bytes * config_.hidden, &out));
    KV_ASSIGN_OR_RETURN(out.weights.v, Take("v", in.getV(), row_bytes * config_.hidden, &out));
    KV_ASSIGN_OR_RETURN(out.weights.k_bias, Take("kBias", in.getKBias(), row_bytes, &out));
    KV_ASSIGN_OR_RETURN(out.weights.v_bias, Take("vBias", in.getVBias(), row_bytes, &out));
    const auto proof = in.getProof();
    const uint32_t tokens = proof.getTokens();
    if (tokens < 1 || tokens > config_.layout.page_tokens) {
      return InvalidField("proof.tokens", tokens, absl::StrCat("1..", config_.layout.page_tokens));
    }
    out.tokens = static_cast<int>(tokens);
    if (proof.getPosition() > static_cast<uint64_t>(recompute::RopeFacts::kPositionMax)) {
      return InvalidField("proof.position", proof.getPosition(),
                          absl::StrCat("at most ", recompute::RopeFacts::kPositionMax));
    }
    out.position = static_cast<int64_t>(proof.getPosition());
    const uint64_t value_bytes = DTypeBytes(config_.layout.dtype);
    KV_ASSIGN_OR_RETURN(out.x, Take("proof.x", proof.getX(), tokens * config_.hidden * value_bytes, &out));
    KV_ASSIGN_OR_RETURN(out.k, Take("proof.k", proof.getK(), tokens * width * value_bytes, &out));
    KV_ASSIGN_OR_RETURN(out.v, Take("proof.v", proof.getV(), tokens * width * value_bytes, &out));
    const std::pair<const char*, const absl::Span<const uint8_t>*> wanted[] = {
        {"k", &out.weights.k}, {"v", &out.weights.v}, {"proof.x", &out.x}, {"proof.k", &out.k}, {"proof.v", &out.v}};
    for (const auto& [field, bytes] : wanted) {
      if (bytes->empty()) return InvalidField(field, "none", "given");
    }
    return out;
  }

  const std::shared_ptr<Session> session_;
  Recomputer* const recomputer_;
  const std::shared_ptr<ProjectionSet> set_;
  const CacheConfig config_;
};

}  // namespace

absl::StatusOr<recompute::ProjectionModel> ReadProjectionModel(api::ProjectionFacts::Reader facts,
                                                               const CacheConfig& config) {
  recompute::ProjectionModel model;
  model.layout = config.layout;
  model.layers = config.layers;
  model.hidden = config.hidden;
  if (facts.getRotaryDims() > config.layout.head_dim) {
    return InvalidField("rotaryDims", facts.getRotaryDims(), absl::StrCat("at most ", config.layout.head_dim));
  }
  model.rope.rotary_dims = static_cast<int>(facts.getRotaryDims());
  model.rope.theta = facts.getTheta();
  using Rope = recompute::RopeFacts;
  model.rope.pairs = facts.getInterleaved() ? Rope::Pairs::kInterleaved : Rope::Pairs::kHalfSplit;
  model.rope.angles = facts.getDoubleAngles() ? Rope::Angles::kDouble : Rope::Angles::kFloat32;
  return model;
}

api::Projections::Client MakeProjectionsService(std::shared_ptr<Session> session, Recomputer* recomputer,
                                                std::shared_ptr<ProjectionSet> set, const CacheConfig& config) {
  return kj::heap<ProjectionsService>(std::move(session), recomputer, std::move(set), config);
}

}  // namespace kvmanager
