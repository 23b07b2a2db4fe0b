#include "codecs/abi/conformance_subject.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::conformance {
namespace {

constexpr size_t kMoreBytes = 24;   // behind each element of an array
constexpr uint8_t kUnknown = 0xee;  // what a newer core's fields hold

/// A struct, or an element of an array, with bytes behind it that this version does not know.
template <typename T>
struct Padded {
  T value = {};
  uint8_t more[kMoreBytes];
  Padded() { std::memset(more, kUnknown, sizeof more); }
};
template <typename T>
Padded<T> Sized() {
  Padded<T> t;
  t.value.struct_size = sizeof t;
  return t;
}

/// Sums of bfloat16's largest would overflow the fp32 of any attention.
float Huge(DType dtype) { return dtype == DType::kFloat16 ? 65504.f : 1e30f; }

}  // namespace

const char* KindName(Kind kind) {
  constexpr const char* kNames[] = {"normal values",    "zeros",      "constant channels", "equal tokens",
                                    "outlier channels", "subnormals", "huge values",       "alternating extremes"};
  return kNames[static_cast<int>(kind)];
}

void FillPage(const PageLayout& layout, Kind kind, uint32_t seed, uint8_t* raw) {
  std::mt19937 random(seed * 977 + static_cast<int>(kind));
  std::normal_distribution<float> normal;
  const int d = layout.head_dim;
  std::vector<float> channels(2 * size_t{layout.kv_heads} * d);
  for (float& x : channels) x = normal(random);
  const float huge = Huge(layout.dtype);
  size_t i = 0;
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      for (int t = 0; t < layout.page_tokens; ++t) {
        for (int c = 0; c < d; ++c, ++i) {
          float x = normal(random);
          const float channel = channels[(size_t(side) * layout.kv_heads + head) * d + c];
          switch (kind) {
            case Kind::kNormal:
              break;
            case Kind::kZero:
              x = 0;
              break;
            case Kind::kConstant:
              x = 1.5f;
              break;
            case Kind::kRepeated:
              if (side == 0) x = channel;
              break;
            case Kind::kOutliers:
              if (side == 0 && c % 16 == 3) x += c % 32 == 3 ? 12 : -12;
              break;
            case Kind::kTiny:
              x *= layout.dtype == DType::kFloat16 ? 1e-6f : 1e-39f;
              break;
            case Kind::kHuge:
              if ((t + c) % 7 == 0) x = x > 0 ? huge : -huge;
              break;
            case Kind::kAlternating:
              x = ((t + c) % 2 == 0 ? 1 : -1) * (side == 0 ? 30.f : huge);
              break;
          }
          StoreElement(raw, layout.dtype, i, x);
        }
      }
    }
  }
}

float PlainScale(const PageLayout& layout) { return 1 / std::sqrt(float(layout.head_dim)); }

Context::Context(const Case& c, const CodecParameters& parameters) : parameters_(parameters) {
  std::memset(&padded_, kUnknown, sizeof padded_);
  kvmc_context& context = padded_.context;
  context = {};
  context.struct_size = sizeof padded_;
  context.dtype = c.layout.dtype == DType::kFloat16 ? KVMC_FLOAT16 : KVMC_BFLOAT16;
  context.kv_heads = c.layout.kv_heads;
  context.head_dim = c.layout.head_dim;
  context.page_tokens = c.layout.page_tokens;
  context.layers = c.layers;
  context.query_heads = c.query_heads;
  constexpr size_t kStep = sizeof(kvmc_parameter) + kMoreBytes;
  list_.assign(std::max<size_t>(parameters_.size(), 1) * kStep, kUnknown);
  size_t i = 0;
  for (const auto& [key, value] : parameters_) {
    const kvmc_parameter parameter = {key.c_str(), value.c_str()};
    std::memcpy(list_.data() + i++ * kStep, &parameter, sizeof parameter);
  }
  context.parameters = reinterpret_cast<const kvmc_parameter*>(list_.data());
  context.parameter_count = parameters_.size();
  context.parameter_item_bytes = kStep;
  if (c.calibration.empty()) return;
  calibration_ = std::make_unique<GuardedBuffer>("calibration", c.calibration.size());
  std::memcpy(calibration_->data(), c.calibration.data(), c.calibration.size());
  calibration_->SetReadOnly(true);
  context.calibration = calibration_->data();
  context.calibration_bytes = c.calibration.size();
}

Described Describe(const kvmc_codec_api& api, const Case& c, const CodecParameters& parameters) {
  const Context context(c, parameters);
  Described result;
  GuardedBuffer bytes("bytes_of_layer", c.layers * sizeof(uint32_t), GuardedBuffer::Place::kAgainstEnd, 4);
  GuardedBuffer flags("layer_flags", c.layers * sizeof(uint32_t), GuardedBuffer::Place::kAgainstEnd, 4);
  GuardedBuffer text("description's parameters", KVMC_PARAMETERS_BYTES_MAX);
  auto d = Sized<kvmc_description>();
  d.value.bytes_of_layer = reinterpret_cast<uint32_t*>(bytes.data());
  d.value.layer_flags = reinterpret_cast<uint32_t*>(flags.data());
  d.value.parameters = reinterpret_cast<char*>(text.data());
  result.status = api.describe(context.get(), &d.value);
  result.version = d.value.version;
  result.flags = d.value.flags;
  result.payload_bytes = d.value.payload_bytes;
  result.bytes_of_layer.assign(d.value.bytes_of_layer, d.value.bytes_of_layer + c.layers);
  result.layer_flags.assign(d.value.layer_flags, d.value.layer_flags + c.layers);
  result.parameters.assign(d.value.parameters, strnlen(d.value.parameters, KVMC_PARAMETERS_BYTES_MAX));
  return result;
}

absl::StatusOr<std::unique_ptr<Subject>> Subject::Open(const Case& c) {
  std::unique_ptr<Subject> subject(new Subject);
  subject->case_ = c;
  KV_ASSIGN_OR_RETURN(subject->plugin_, CodecPlugin::Load(c.options->path));
  const CodecParameters& parameters = c.options->parameters;
  subject->described_ = Describe(subject->api(), c, parameters);
  if (subject->described_.status != KVMC_OK) return subject->ErrorOf(subject->described_.status, "describe");
  const Context context(c, parameters);
  const kvmc_status status = subject->api().create(context.get(), &subject->codec_);
  if (status != KVMC_OK) return subject->ErrorOf(status, "create");
  return subject;
}

Subject::~Subject() {
  if (codec_ != nullptr) api().destroy(codec_);
}

std::vector<int> Subject::layers() const {
  return case_.layers == 1 ? std::vector<int>{0} : std::vector<int>{0, case_.layers - 1};
}

absl::Status Subject::ErrorOf(kvmc_status status, const char* entry) const {
  char text[256] = "";
  api().last_error(text, sizeof text);
  if (text[0] == '\0') return absl::InternalError(absl::StrCat(entry, " returned ", status, " without a text"));
  return absl::InternalError(absl::StrCat(entry, " returned ", status, ": ", text));
}

GuardedBuffer Subject::Workspace(uint32_t purpose, int rows) const {
  GuardedBuffer workspace("workspace", api().workspace_bytes(codec_, purpose, rows));
  workspace.Fill(kUnknown);
  return workspace;
}

GuardedBuffer Subject::Page(Kind kind, uint32_t seed, GuardedBuffer::Place place) const {
  GuardedBuffer raw("raw page", layout().raw_bytes(), place);
  FillPage(layout(), kind, seed, raw.data());
  raw.SetReadOnly(true);
  return raw;
}

absl::Status Subject::Encode(const GuardedBuffer& raw, int layer, uint64_t first_token, const GuardedBuffer& encoded,
                             bool* declined) const {
  const GuardedBuffer workspace = Workspace(KVMC_FOR_ENCODE, 0);
  Padded<kvmc_encode_item> item;
  item.value = {raw.data(), encoded.data(), uint32_t(layer), 0, first_token};
  auto batch = Sized<kvmc_encode_batch>();
  batch.value.items = &item.value;
  batch.value.item_count = 1;
  batch.value.item_bytes = sizeof item;
  batch.value.workspace = workspace.data();
  batch.value.workspace_bytes = workspace.size();
  if (const kvmc_status s = api().encode_batch(codec_, &batch.value); s != KVMC_OK) return ErrorOf(s, "encode_batch");
  for (const GuardedBuffer* buffer : {&raw, &encoded, &workspace}) {
    if (const std::string damage = buffer->Damage(); !damage.empty()) return absl::InternalError(damage);
  }
  if (item.value.declined > 1) {
    return absl::InternalError(absl::StrCat("declined is ", item.value.declined, ", must be 0 or 1"));
  }
  if (declined != nullptr) *declined = item.value.declined != 0;
  if (declined == nullptr && item.value.declined != 0)
    return absl::InternalError("it declined a page of normal values");
  return absl::OkStatus();
}

absl::StatusOr<GuardedBuffer> Subject::Encoded(Kind kind, uint32_t seed, int layer) const {
  GuardedBuffer encoded("encoded page", bytes(layer));
  KV_RETURN_IF_ERROR(Encode(Page(kind, seed), layer, 0, encoded));
  encoded.SetReadOnly(true);
  return encoded;
}

absl::Status Subject::Decode(const GuardedBuffer& encoded, int layer, int first_head, int heads,
                             const GuardedBuffer& raw) const {
  const GuardedBuffer workspace = Workspace(KVMC_FOR_DECODE, 0);
  Padded<kvmc_decode_item> item;
  item.value = {encoded.data(), raw.data(), uint32_t(layer), uint32_t(first_head), uint32_t(heads)};
  auto batch = Sized<kvmc_decode_batch>();
  batch.value.items = &item.value;
  batch.value.item_count = 1;
  batch.value.item_bytes = sizeof item;
  batch.value.workspace = workspace.data();
  batch.value.workspace_bytes = workspace.size();
  if (const kvmc_status s = api().decode_batch(codec_, &batch.value); s != KVMC_OK) return ErrorOf(s, "decode_batch");
  for (const GuardedBuffer* buffer : {&encoded, &raw, &workspace}) {
    if (const std::string damage = buffer->Damage(); !damage.empty()) return absl::InternalError(damage);
  }
  return absl::OkStatus();
}

kvmc_status Subject::Validate(const GuardedBuffer& encoded, int layer, size_t bytes) const {
  return api().validate(codec_, uint32_t(layer), encoded.data(), bytes);
}

absl::StatusOr<std::vector<float>> Subject::Map(kvmc_status (*map)(const kvmc_codec*, const kvmc_map_item*), int layer,
                                                int kv_head, const std::vector<float>& from) const {
  GuardedBuffer in("rows to map", from.size() * sizeof(float)), out("mapped rows", in.size());
  std::memcpy(in.data(), from.data(), in.size());
  in.SetReadOnly(true);
  auto item = Sized<kvmc_map_item>();
  item.value.from = in.floats();
  item.value.to = out.floats();
  item.value.rows = from.size() / layout().head_dim;
  item.value.layer = layer;
  item.value.kv_head = kv_head;
  if (const kvmc_status s = map(codec_, &item.value); s != KVMC_OK) return ErrorOf(s, "a map");
  if (const std::string damage = out.Damage(); !damage.empty()) return absl::InternalError(damage);
  return std::vector<float>(out.floats(), out.floats() + from.size());
}

absl::StatusOr<AttendResult> Subject::Attend(const std::vector<const uint8_t*>& pages, int layer, int kv_head,
                                             const AttendQueries& queries, const AttendResult* from) const {
  const size_t elements = queries.q.size(), rows = elements / layout().head_dim;
  std::vector<float> asked = queries.q;
  if (maps(layer)) {
    KV_ASSIGN_OR_RETURN(asked, Map(api().map_queries, layer, kv_head, queries.q));
  }
  constexpr auto kEnd = GuardedBuffer::Place::kAgainstEnd;
  GuardedBuffer query("query", elements * sizeof(float)), acc("acc", elements * sizeof(float)),
      max("max", rows * sizeof(float), kEnd, 4), sum("sum", rows * sizeof(float), kEnd, 4),
      table("list of pages", pages.size() * sizeof(uint8_t*), kEnd, 8);
  std::memcpy(query.data(), asked.data(), query.size());
  std::memcpy(table.data(), pages.data(), table.size());
  query.SetReadOnly(true);
  table.SetReadOnly(true);
  std::fill_n(max.floats(), rows, -std::numeric_limits<float>::infinity());
  if (from != nullptr) {
    std::copy(from->max.begin(), from->max.end(), max.floats());
    std::copy(from->sum.begin(), from->sum.end(), sum.floats());
    std::copy(from->acc.begin(), from->acc.end(), acc.floats());
  }
  GuardedBuffer workspace = Workspace(KVMC_FOR_ATTEND, rows);
  Padded<kvmc_attend_item> item;
  item.value.q = query.floats();
  item.value.rows = rows;
  item.value.layer = layer;
  item.value.kv_head = kv_head;
  item.value.scale = queries.scale;
  item.value.pages = reinterpret_cast<const uint8_t* const*>(table.data());
  item.value.page_count = pages.size();
  item.value.max = max.floats();
  item.value.sum = sum.floats();
  item.value.acc = acc.floats();
  auto batch = Sized<kvmc_attend_batch>();
  batch.value.items = &item.value;
  batch.value.item_count = 1;
  batch.value.item_bytes = sizeof item;
  batch.value.workspace = workspace.data();
  batch.value.workspace_bytes = workspace.size();
  if (const kvmc_status s = api().attend_batch(codec_, &batch.value); s != KVMC_OK) return ErrorOf(s, "attend_batch");
  for (GuardedBuffer* buffer : {&acc, &max, &sum, &workspace}) {
    if (const std::string damage = buffer->Damage(); !damage.empty()) return absl::InternalError(damage);
  }
  return AttendResult{{max.floats(), max.floats() + rows},
                      {sum.floats(), sum.floats() + rows},
                      {acc.floats(), acc.floats() + elements}};
}

absl::StatusOr<std::vector<double>> Subject::Output(const AttendResult& state, int layer, int kv_head) const {
  std::vector<float> acc = state.acc;
  if (maps(layer)) {
    KV_ASSIGN_OR_RETURN(acc, Map(api().expand_output, layer, kv_head, state.acc));
  }
  std::vector<double> out(acc.begin(), acc.end());
  for (size_t i = 0; i < out.size(); ++i) out[i] /= state.sum[i / layout().head_dim];
  return out;
}

std::vector<double> Values(const PageLayout& layout, const uint8_t* raw, size_t count) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = LoadElement(raw, layout.dtype, i);
  return values;
}

}  // namespace kvmanager::conformance
