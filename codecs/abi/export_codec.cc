#include "codecs/abi/export_codec.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"

// What the C side calls a codec.
struct kvmc_codec {
  std::unique_ptr<kvmanager::Codec> codec;
  int layers = 0;
};

namespace kvmanager {
namespace {

constexpr char kGiven[] = "given";  // what the artifact in the context is called

const char* exported_name = nullptr;  // constants once the table was asked for
void (*exported_add)(CodecRegistry&) = nullptr;
thread_local char last_error_text[1024] = "";

kvmc_status Fail(kvmc_status status, absl::string_view text) {
  const size_t bytes = std::min(text.size(), sizeof last_error_text - 1);
  std::memcpy(last_error_text, text.data(), bytes);
  last_error_text[bytes] = '\0';
  return status;
}

kvmc_status Fail(const absl::Status& error) {
  switch (error.code()) {
    case absl::StatusCode::kInvalidArgument:
      return Fail(KVMC_INVALID_ARGUMENT, error.message());
    case absl::StatusCode::kFailedPrecondition:
      return Fail(KVMC_FAILED_PRECONDITION, error.message());
    case absl::StatusCode::kDataLoss:
      return Fail(KVMC_DATA_LOSS, error.message());
    default:
      return Fail(KVMC_INTERNAL, error.message());
  }
}

/// Runs `body`, which returns a kvmc_status; no exception crosses.
template <typename Body>
kvmc_status Guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return Fail(KVMC_INTERNAL, error.what());
  }
}

/// The artifact of one context.
class GivenCalibration final : public CalibrationSource {
 public:
  explicit GivenCalibration(std::shared_ptr<const Calibration> calibration) : calibration_(std::move(calibration)) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return calibration_; }

 private:
  const std::shared_ptr<const Calibration> calibration_;  // shared with the codec that it makes
};

absl::StatusOr<std::unique_ptr<Codec>> Make(const kvmc_context& passed) {
  CodecContext context;
  if (passed.dtype != KVMC_FLOAT16 && passed.dtype != KVMC_BFLOAT16) {
    return InvalidField("dtype", passed.dtype, "KVMC_FLOAT16 or KVMC_BFLOAT16");
  }
  context.layout.dtype = passed.dtype == KVMC_FLOAT16 ? DType::kFloat16 : DType::kBFloat16;
  const auto in = [](const char* field, uint32_t value, int low, int high, int step) {
    if (int64_t{value} >= low && int64_t{value} <= high && value % step == 0) return absl::OkStatus();
    return InvalidField(field, value, absl::StrCat(low, "..", high, step > 1 ? ", a multiple of 16" : ""));
  };
  KV_RETURN_IF_ERROR(in("kv_heads", passed.kv_heads, 1, PageLayout::kKvHeadsMax, 1));
  KV_RETURN_IF_ERROR(in("head_dim", passed.head_dim, PageLayout::kHeadDimMin, PageLayout::kHeadDimMax, 16));
  KV_RETURN_IF_ERROR(in("page_tokens", passed.page_tokens, PageLayout::kPageTokensMin, PageLayout::kPageTokensMax, 16));
  constexpr int kLayersMax = 1 << 16;
  KV_RETURN_IF_ERROR(in("layers", passed.layers, 1, kLayersMax, 1));
  context.layout.kv_heads = uint16_t(passed.kv_heads);
  context.layout.head_dim = uint16_t(passed.head_dim);
  context.layout.page_tokens = uint16_t(passed.page_tokens);
  context.layers = int(passed.layers);
  context.query_heads = int(passed.query_heads);
  std::vector<std::string> parameters;
  for (size_t i = 0; i < passed.parameter_count; ++i) {
    kvmc_parameter parameter;
    std::memcpy(&parameter, reinterpret_cast<const char*>(passed.parameters) + i * passed.parameter_item_bytes,
                sizeof parameter);
    parameters.push_back(absl::StrCat(parameter.key, "=", parameter.value));
  }
  std::shared_ptr<const Calibration> calibration;
  if (passed.calibration != nullptr) {
    KV_ASSIGN_OR_RETURN(calibration, Calibration::Parse(std::string(reinterpret_cast<const char*>(passed.calibration),
                                                                    passed.calibration_bytes),
                                                        kGiven));
    parameters.push_back(absl::StrCat("calibration=", kGiven));
  }
  GivenCalibration source(std::move(calibration));
  CodecRegistry registry;
  exported_add(registry);
  registry.SetCalibrations(&source);
  return registry.Create(
      parameters.empty() ? exported_name : absl::StrCat(exported_name, ":", absl::StrJoin(parameters, ",")), context);
}

kvmc_status Probe() { return KVMC_OK; }

kvmc_status Describe(const kvmc_context* context, kvmc_description* out) {
  return Guarded([&] {
    const absl::StatusOr<std::unique_ptr<Codec>> codec = Make(*context);
    if (!codec.ok()) return Fail(codec.status());
    const CodecInfo& info = (*codec)->info();
    out->version = info.version;
    out->flags = KVMC_ATTENDS;
    out->payload_bytes = info.payload_bytes;
    const PageAttention& attention = (*codec)->attention();
    for (uint32_t layer = 0; layer < context->layers; ++layer) {
      out->bytes_of_layer[layer] = uint32_t(info.page_bytes(int(layer)));
      out->layer_flags[layer] =
          (attention.maps(int(layer)) ? KVMC_MAPS : 0u) | (attention.folds_output(int(layer)) ? KVMC_FOLDS : 0u);
    }
    // The core adds the artifact itself.
    std::vector<std::string> parameters;
    const size_t colon = info.spec.find(':');
    if (colon != std::string::npos) parameters = absl::StrSplit(info.spec.substr(colon + 1), ',');
    parameters.erase(std::remove_if(parameters.begin(), parameters.end(),
                                    [](const std::string& p) { return absl::StartsWith(p, "calibration="); }),
                     parameters.end());
    const std::string text = absl::StrJoin(parameters, ",");
    if (text.size() >= KVMC_PARAMETERS_BYTES_MAX) return Fail(KVMC_INTERNAL, "the parameters' text is too long");
    std::memcpy(out->parameters, text.c_str(), text.size() + 1);
    return KVMC_OK;
  });
}

kvmc_status Create(const kvmc_context* context, kvmc_codec** out) {
  return Guarded([&] {
    absl::StatusOr<std::unique_ptr<Codec>> codec = Make(*context);
    if (!codec.ok()) return Fail(codec.status());
    *out = new kvmc_codec{*std::move(codec), int(context->layers)};
    return KVMC_OK;
  });
}

void Destroy(kvmc_codec* codec) { delete codec; }

size_t WorkspaceBytes(const kvmc_codec* c, uint32_t purpose, uint32_t rows) {
  switch (purpose) {
    case KVMC_FOR_ENCODE:
      return c->codec->encode_workspace_bytes();
    case KVMC_FOR_DECODE:
      return c->codec->layout().raw_bytes();
    case KVMC_FOR_ATTEND:
      return c->codec->attention().workspace_bytes(int(rows));
    default:
      return 0;
  }
}

/// Element i of an array whose elements are item_bytes apart.
template <typename T>
T* At(T* items, size_t item_bytes, size_t i) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(items) + i * item_bytes);
}

kvmc_status CheckPlace(const kvmc_codec* c, uint32_t layer, uint32_t head, uint32_t heads) {
  if (layer >= uint32_t(c->layers)) {
    return Fail(InvalidField("layer", layer, absl::StrCat("below ", c->layers)));
  }
  const uint32_t kv_heads = c->codec->layout().kv_heads;
  if (heads == 0 || head >= kv_heads || heads > kv_heads - head) {
    return Fail(InvalidField("heads", absl::StrCat(head, "+", heads), absl::StrCat("1 or more, within ", kv_heads)));
  }
  return KVMC_OK;
}

kvmc_status EncodeBatch(const kvmc_codec* c, const kvmc_encode_batch* batch) {
  const PageLayout& layout = c->codec->layout();
  for (size_t i = 0; i < batch->item_count; ++i) {
    kvmc_encode_item& item = *At(batch->items, batch->item_bytes, i);
    if (const kvmc_status status = CheckPlace(c, item.layer, 0, 1); status != KVMC_OK) return status;
    // Codecs here are promised finite values.
    const size_t elements = layout.raw_bytes() / DTypeBytes(layout.dtype);
    if (FindNonFinite(layout.dtype, item.raw, elements) != elements) {
      item.declined = 1;
      continue;
    }
    EncodeItem one = {item.raw, item.encoded, item.layer, item.first_token, false};
    c->codec->Encode(absl::MakeSpan(&one, 1), {batch->workspace, batch->workspace_bytes});
    item.declined = one.declined ? 1 : 0;
  }
  return KVMC_OK;
}

kvmc_status DecodeBatch(const kvmc_codec* c, const kvmc_decode_batch* batch) {
  const PageLayout& layout = c->codec->layout();
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_decode_item& item = *At(batch->items, batch->item_bytes, i);
    if (const kvmc_status s = CheckPlace(c, item.layer, item.first_head, item.head_count); s != KVMC_OK) return s;
    const bool whole = item.head_count == layout.kv_heads;
    const DecodeItem one = {item.encoded, whole ? item.raw : batch->workspace, item.layer};
    c->codec->Decode(absl::MakeConstSpan(&one, 1));
    if (whole) continue;
    const size_t bytes = item.head_count * layout.raw_head_bytes();
    for (int side = 0; side < 2; ++side) {
      std::memcpy(item.raw + side * bytes, batch->workspace + layout.raw_offset(side, int(item.first_head), 0), bytes);
    }
  }
  return KVMC_OK;
}

kvmc_status Validate(const kvmc_codec* c, uint32_t layer, const uint8_t* encoded, size_t encoded_bytes) {
  return Guarded([&] {
    if (const kvmc_status status = CheckPlace(c, layer, 0, 1); status != KVMC_OK) return status;
    const absl::Status status = c->codec->Validate(int(layer), {encoded, encoded_bytes});
    return status.ok() ? KVMC_OK : Fail(status);
  });
}

void LastError(char* text, size_t text_bytes) {
  const size_t bytes = std::min(std::strlen(last_error_text), text_bytes - 1);
  std::memcpy(text, last_error_text, bytes);
  text[bytes] = '\0';
}

kvmc_status AttendBatch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_attend_item& item = *At(batch->items, batch->item_bytes, i);
    if (const kvmc_status status = CheckPlace(c, item.layer, item.kv_head, 1); status != KVMC_OK) return status;
    PageAttentionTask task;
    task.q = item.q;
    task.rows = int(item.rows);
    task.scale = item.scale;
    task.layer = int(item.layer);
    task.kv_head = int(item.kv_head);
    task.pages = absl::MakeConstSpan(item.pages, item.page_count);
    task.next_pages = absl::MakeConstSpan(item.next_pages, item.next_page_count);
    task.next_kv_head = int(item.next_kv_head);
    c->codec->attention().Attend(task, {item.max, item.sum, item.acc}, {batch->workspace, batch->workspace_bytes});
  }
  return KVMC_OK;
}

/// One of the maps, if the layer has it.
kvmc_status Map(const kvmc_codec* c, const kvmc_map_item* item, bool (PageAttention::*has)(int) const,
                void (PageAttention::*map)(int, int, int, const float*, float*) const) {
  if (const kvmc_status status = CheckPlace(c, item->layer, item->kv_head, 1); status != KVMC_OK) return status;
  const PageAttention& attention = c->codec->attention();
  if (!(attention.*has)(int(item->layer))) return Fail(KVMC_INVALID_ARGUMENT, "this layer has no such map");
  (attention.*map)(int(item->layer), int(item->kv_head), int(item->rows), item->from, item->to);
  return KVMC_OK;
}

kvmc_status MapQueries(const kvmc_codec* c, const kvmc_map_item* item) {
  return Map(c, item, &PageAttention::maps, &PageAttention::MapQueries);
}
kvmc_status ExpandOutput(const kvmc_codec* c, const kvmc_map_item* item) {
  return Map(c, item, &PageAttention::maps, &PageAttention::ExpandOutput);
}
kvmc_status ProjectOutput(const kvmc_codec* c, const kvmc_map_item* item) {
  return Map(c, item, &PageAttention::folds_output, &PageAttention::ProjectOutput);
}

kvmc_status OutputFactor(const kvmc_codec* c, uint32_t layer, uint32_t kv_head, float* factor) {
  if (const kvmc_status status = CheckPlace(c, layer, kv_head, 1); status != KVMC_OK) return status;
  const size_t d = c->codec->layout().head_dim;
  if (!c->codec->OutputFactor(int(layer), int(kv_head), absl::MakeSpan(factor, d * d))) {
    return Fail(KVMC_INVALID_ARGUMENT, "this layer's outputs are not folded");
  }
  return KVMC_OK;
}

std::string HelpOf(const char* name, void (*add)(CodecRegistry&)) {
  CodecRegistry registry;
  add(registry);
  return registry.Names()[name];
}

}  // namespace

const kvmc_codec_api* ExportCodec(const char* name, void (*add)(CodecRegistry&)) {
  static const std::string help = HelpOf(name, add);
  static const kvmc_codec_api table = [&] {
    exported_name = name;
    exported_add = add;
    kvmc_codec_api t = {};
    t.struct_size = sizeof t;
    t.abi_version = KVMC_ABI_VERSION;
    t.name = name;
    t.help = help.c_str();
    t.probe = Probe;
    t.describe = Describe;
    t.create = Create;
    t.destroy = Destroy;
    t.workspace_bytes = WorkspaceBytes;
    t.encode_batch = EncodeBatch;
    t.decode_batch = DecodeBatch;
    t.validate = Validate;
    t.last_error = LastError;
    t.attend_batch = AttendBatch;
    t.map_queries = MapQueries;
    t.expand_output = ExpandOutput;
    t.project_output = ProjectOutput;
    t.output_factor = OutputFactor;
    return t;
  }();
  return &table;
}

}  // namespace kvmanager
