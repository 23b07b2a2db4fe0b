#include "kvmanager/handoff/config_wire.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<DType> ReadDType(absl::string_view field, api::DType dtype) {
  switch (dtype) {
    case api::DType::FLOAT16:
      return DType::kFloat16;
    case api::DType::BFLOAT16:
      return DType::kBFloat16;
    case api::DType::FLOAT32:
      return DType::kFloat32;
  }
  return InvalidField(field, static_cast<int>(dtype), "float16 (0), bfloat16 (1) or float32 (2)");
}

absl::StatusOr<CacheConfig> ReadCacheConfig(api::CacheConfig::Reader in) {
  // Narrower than the wire's UInt32: a value that would wrap is refused before it is stored.
  auto narrow = [](absl::string_view field, uint32_t value, uint32_t max) -> absl::Status {
    return value <= max ? absl::OkStatus() : InvalidField(field, value, absl::StrCat("at most ", max));
  };
  KV_RETURN_IF_ERROR(narrow("layers", in.getLayers(), CacheConfig::kLayersMax));
  KV_RETURN_IF_ERROR(narrow("kv_heads", in.getKvHeads(), PageLayout::kKvHeadsMax));
  KV_RETURN_IF_ERROR(narrow("query_heads", in.getQueryHeads(), PageLayout::kKvHeadsMax * CacheConfig::kGroupMax));
  KV_RETURN_IF_ERROR(narrow("head_dim", in.getHeadDim(), PageLayout::kHeadDimMax));
  KV_RETURN_IF_ERROR(narrow("page_tokens", in.getPageTokens(), PageLayout::kPageTokensMax));
  KV_RETURN_IF_ERROR(narrow("tensor_parallel_rank", in.getTensorParallelRank(), 1 << 20));
  KV_RETURN_IF_ERROR(narrow("tensor_parallel_size", in.getTensorParallelSize(), 1 << 20));
  KV_RETURN_IF_ERROR(narrow("hidden", in.getHiddenSize(), CacheConfig::kHiddenMax));
  KV_RETURN_IF_ERROR(narrow("lag_pages", in.getLagPages(), CacheConfig::kLagPagesMax));
  CacheConfig config;
  KV_ASSIGN_OR_RETURN(config.layout.dtype, ReadDType("dtype", in.getDtype()));
  config.model = std::string(ViewOf(in.getModel()));
  config.revision = std::string(ViewOf(in.getRevision()));
  config.tenant = std::string(ViewOf(in.getTenant()));
  config.rope = std::string(ViewOf(in.getRope()));
  config.calibration_digest = std::string(ViewOf(in.getCalibrationDigest()));
  config.layers = static_cast<int>(in.getLayers());
  config.layout.kv_heads = static_cast<uint16_t>(in.getKvHeads());
  config.query_heads = static_cast<int>(in.getQueryHeads());
  config.layout.head_dim = static_cast<uint16_t>(in.getHeadDim());
  config.layout.page_tokens = static_cast<uint16_t>(in.getPageTokens());
  config.tensor_parallel_rank = static_cast<int>(in.getTensorParallelRank());
  config.tensor_parallel_size = static_cast<int>(in.getTensorParallelSize());
  config.codec = std::string(ViewOf(in.getCodec()));
  config.lag_pages = static_cast<int>(in.getLagPages());
  config.device = in.getDevice();
  config.hidden = static_cast<int>(in.getHiddenSize());
  return config;
}

void WriteCacheConfig(const CacheConfig& config, api::CacheConfig::Builder out) {
  out.setModel(TextOf(config.model));
  out.setRevision(TextOf(config.revision));
  out.setTenant(TextOf(config.tenant));
  out.setRope(TextOf(config.rope));
  out.setCalibrationDigest(TextOf(config.calibration_digest));
  out.setLayers(config.layers);
  out.setKvHeads(config.layout.kv_heads);
  out.setQueryHeads(config.query_heads);
  out.setHeadDim(config.layout.head_dim);
  out.setPageTokens(config.layout.page_tokens);
  out.setDtype(static_cast<api::DType>(config.layout.dtype));
  out.setTensorParallelRank(config.tensor_parallel_rank);
  out.setTensorParallelSize(config.tensor_parallel_size);
  out.setCodec(TextOf(config.codec));
  out.setLagPages(config.lag_pages);
  out.setDevice(config.device);
  out.setHiddenSize(config.hidden);
}

absl::StatusOr<Digest> ReadDigest(absl::string_view field, capnp::Data::Reader data) {
  Digest digest;
  if (data.size() != digest.bytes.size()) {
    return InvalidField(field, absl::StrCat(data.size(), " bytes long"),
                        absl::StrCat(digest.bytes.size(), " bytes long"));
  }
  std::memcpy(digest.bytes.data(), data.begin(), digest.bytes.size());
  return digest;
}

}  // namespace kvmanager
