// Tensors in requests, and the lease of a cache's projections.
#include "absl/strings/str_cat.h"
#include "client/handles.h"

namespace kvmanager::client {
namespace {

class ProjectionsImpl final : public Projections {
 public:
  ProjectionsImpl(std::shared_ptr<Connection> connection, api::Projections::Client cap)
      : handle_(std::move(connection), std::move(cap)) {}

  absl::Status SetLayer(const LayerProjections& layer) override {
    KV_RETURN_IF_ERROR(handle_.Usable());
    if (layer.layer < 0) return InvalidField("layer", layer.layer, "at least 0");
    if (layer.proof.tokens < 0) return InvalidField("proof.tokens", layer.proof.tokens, "at least 0");
    const std::pair<const char*, const TensorView*> tensors[] = {{"k", &layer.k},
                                                                 {"v", &layer.v},
                                                                 {"k_bias", &layer.k_bias},
                                                                 {"v_bias", &layer.v_bias},
                                                                 {"proof.x", &layer.proof.x},
                                                                 {"proof.k", &layer.proof.k},
                                                                 {"proof.v", &layer.proof.v}};
    uint64_t bytes = kMessageOverheadBytes;
    for (const auto& [field, tensor] : tensors) {
      KV_RETURN_IF_ERROR(CheckTensor(field, *tensor, handle_.connection(), handle_.generation(), &bytes));
    }
    KV_RETURN_IF_ERROR(CheckMessageBytes("weights", bytes, handle_.connection().message_bytes_max()));
    auto call = handle_.cap().setLayerRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    auto wire = call.initLayer();
    wire.setLayer(uint32_t(layer.layer));
    wire.setDtype(ToWire(layer.dtype));
    WriteTensor(layer.k, wire.initK());
    WriteTensor(layer.v, wire.initV());
    WriteTensor(layer.k_bias, wire.initKBias());
    WriteTensor(layer.v_bias, wire.initVBias());
    auto proof = wire.initProof();
    proof.setPosition(layer.proof.position);
    proof.setTokens(uint32_t(layer.proof.tokens));
    WriteTensor(layer.proof.x, proof.initX());
    WriteTensor(layer.proof.k, proof.initK());
    WriteTensor(layer.proof.v, proof.initV());
    return handle_.connection().Call<absl::Status>(std::move(call),
                                                   [](auto& response) { return FromWire(response.getStatus()); });
  }

 private:
  Handle<api::Projections::Client> handle_;
};

}  // namespace

void WriteTensor(const TensorView& tensor, api::Tensor::Builder wire) {
  if (tensor.data == nullptr) return;  // none
  if (tensor.arena == nullptr) {
    wire.setInline(capnp::Data::Reader(static_cast<const kj::byte*>(tensor.data), tensor.bytes));
    return;
  }
  auto range = wire.initArena();
  range.setId(static_cast<const ArenaHandle*>(tensor.arena)->id());
  range.setOffset(uint64_t(static_cast<uint8_t*>(tensor.data) - tensor.arena->data().data()));
  range.setBytes(tensor.bytes);
}

absl::Status CheckTensor(absl::string_view field, const TensorView& tensor, const Connection& connection,
                         uint64_t generation, uint64_t* inline_bytes) {
  if (tensor.data == nullptr) return absl::OkStatus();
  if (tensor.arena == nullptr) {
    *inline_bytes += tensor.bytes + sizeof(capnp::word);
    return absl::OkStatus();
  }
  const auto* arena = static_cast<const ArenaHandle*>(tensor.arena);
  if (&arena->handle().connection() != &connection || arena->handle().generation() != generation) {
    return FieldError(absl::StatusCode::kFailedPrecondition, field, "in an arena of another connection",
                      "in an arena of the cache's own");
  }
  const auto data = arena->data();
  const auto* at = static_cast<const uint8_t*>(tensor.data);
  if (at < data.data() || at > data.data() + data.size() || tensor.bytes > size_t(data.data() + data.size() - at)) {
    return InvalidField(field, absl::StrCat(tensor.bytes, " bytes at offset ", at - data.data()),
                        absl::StrCat("inside the arena's ", data.size(), " bytes"));
  }
  return absl::OkStatus();
}

std::unique_ptr<Projections> MakeProjections(std::shared_ptr<Connection> connection, api::Projections::Client cap) {
  return std::make_unique<ProjectionsImpl>(std::move(connection), std::move(cap));
}

}  // namespace kvmanager::client
