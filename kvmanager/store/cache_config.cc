#include "kvmanager/store/cache_config.h"

#include <cctype>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status CheckText(absl::string_view field, const std::string& text, size_t bytes_min, size_t bytes_max) {
  if (text.size() < bytes_min || text.size() > bytes_max) {
    return FieldError(absl::StatusCode::kInvalidArgument, field, absl::StrCat(text.size(), " bytes"),
                      absl::StrCat(bytes_min, "..", bytes_max, " bytes"));
  }
  for (unsigned char c : text) {
    // Lines of the digest would become ambiguous.
    if (c < 0x20 || c == 0x7f)
      return InvalidField(field, absl::StrCat("text with byte ", int{c}), "free of control characters");
  }
  return absl::OkStatus();
}

absl::Status CheckRange(absl::string_view field, int value, int min, int max, int multiple = 1) {
  if (value >= min && value <= max && value % multiple == 0) return absl::OkStatus();
  return InvalidField(field, value,
                      absl::StrCat(min, "..", max, multiple > 1 ? absl::StrCat(", a multiple of ", multiple) : ""));
}

}  // namespace

absl::Status ValidateCacheConfig(const CacheConfig& config) {
  const PageLayout& layout = config.layout;
  KV_RETURN_IF_ERROR(CheckText("model", config.model, 1, CacheConfig::kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckText("revision", config.revision, 0, CacheConfig::kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckText("tenant", config.tenant, 0, CacheConfig::kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckText("rope", config.rope, 0, CacheConfig::kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckText("calibration_digest", config.calibration_digest, 0, CacheConfig::kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckText("codec", config.codec, 1, CacheConfig::kCodecBytesMax));
  for (unsigned char c : config.calibration_digest) {
    if (!std::isxdigit(c)) return InvalidField("calibration_digest", config.calibration_digest, "hexadecimal");
  }
  KV_RETURN_IF_ERROR(CheckRange("layers", config.layers, 1, CacheConfig::kLayersMax));
  if (layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16) {
    return InvalidField("dtype", static_cast<int>(layout.dtype), "float16 (0) or bfloat16 (1)");
  }
  KV_RETURN_IF_ERROR(CheckRange("kv_heads", layout.kv_heads, 1, PageLayout::kKvHeadsMax));
  KV_RETURN_IF_ERROR(CheckRange("head_dim", layout.head_dim, PageLayout::kHeadDimMin, PageLayout::kHeadDimMax, 16));
  KV_RETURN_IF_ERROR(
      CheckRange("page_tokens", layout.page_tokens, PageLayout::kPageTokensMin, PageLayout::kPageTokensMax, 16));
  KV_RETURN_IF_ERROR(CheckRange("query_heads", config.query_heads, layout.kv_heads,
                                layout.kv_heads * CacheConfig::kGroupMax, layout.kv_heads));
  KV_RETURN_IF_ERROR(CheckRange("lag_pages", config.lag_pages, 0, CacheConfig::kLagPagesMax));
  KV_RETURN_IF_ERROR(CheckRange("hidden", config.hidden, 0, CacheConfig::kHiddenMax));
  KV_RETURN_IF_ERROR(CheckRange("device", config.device, CacheConfig::kHost, CacheConfig::kDeviceMax));
  KV_RETURN_IF_ERROR(CheckRange("tensor_parallel_size", config.tensor_parallel_size, 1, 1024));
  return CheckRange("tensor_parallel_rank", config.tensor_parallel_rank, 0, config.tensor_parallel_size - 1);
}

CacheDigest DigestOf(const CacheConfig& config, uint32_t codec_version) {
  const PageLayout& layout = config.layout;
  const std::string text = absl::StrCat(
      "model=", config.model, "\nrevision=", config.revision, "\ntenant=", config.tenant, "\nrope=", config.rope,
      "\ncalibration_digest=", config.calibration_digest, "\nlayers=", config.layers,
      "\nquery_heads=", config.query_heads, "\ntensor_parallel_rank=", config.tensor_parallel_rank,
      "\ntensor_parallel_size=", config.tensor_parallel_size, "\ndtype=", static_cast<int>(layout.dtype),
      "\nkv_heads=", layout.kv_heads, "\nhead_dim=", layout.head_dim, "\npage_tokens=", layout.page_tokens,
      "\ncodec=", config.codec, "\ncodec_version=", codec_version, "\nlag_pages=", config.lag_pages, "\n",
      config.hidden > 0 ? absl::StrCat("hidden=", config.hidden, "\n") : "");
  return Sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

std::vector<const char*> DifferingFields(const CacheConfig& a, const CacheConfig& b) {
  std::vector<const char*> fields;
  const auto compare = [&](const char* field, const auto& of_a, const auto& of_b) {
    if (of_a != of_b) fields.push_back(field);
  };
  compare("tenant", a.tenant, b.tenant);
  compare("model", a.model, b.model);
  compare("revision", a.revision, b.revision);
  compare("rope", a.rope, b.rope);
  compare("codec", a.codec, b.codec);
  compare("calibrationDigest", a.calibration_digest, b.calibration_digest);
  compare("dtype", a.layout.dtype, b.layout.dtype);
  compare("layers", a.layers, b.layers);
  compare("kvHeads", a.layout.kv_heads, b.layout.kv_heads);
  compare("queryHeads", a.query_heads, b.query_heads);
  compare("headDim", a.layout.head_dim, b.layout.head_dim);
  compare("pageTokens", a.layout.page_tokens, b.layout.page_tokens);
  compare("tensorParallelRank", a.tensor_parallel_rank, b.tensor_parallel_rank);
  compare("tensorParallelSize", a.tensor_parallel_size, b.tensor_parallel_size);
  compare("lagPages", a.lag_pages, b.lag_pages);
  compare("hiddenSize", a.hidden, b.hidden);
  return fields;
}

}  // namespace kvmanager
