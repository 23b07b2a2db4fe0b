#include "codecs/abi/plugin_codec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/decoded_attention.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kWorkspaceBytesMax = size_t{256} << 20;
constexpr size_t kItemsAtOnce = 32;
constexpr char kParameterSeparator = ',';

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// A page may be larger than its raw form, by headers, not by much.
size_t EncodedBytesMax(const PageLayout& layout) { return 2 * layout.raw_bytes() + 4096; }

template <typename T>
T Sized() {
  T t = {};
  t.struct_size = sizeof t;
  return t;
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Scratch = std::unique_ptr<uint8_t[], Free>;
Scratch Allocate(size_t bytes) {
  Scratch p(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(AlignUp(bytes), 64))));
  KV_CHECK(p != nullptr);
  return p;
}

/// A codec of the plug-in, and who to tell of its errors.
class Handle {
 public:
  Handle(std::shared_ptr<const CodecPlugin> plugin, kvmc_codec* codec, CodecEvents* events)
      : plugin_(std::move(plugin)), codec_(codec), events_(events) {}
  ~Handle() { plugin_->api().destroy(codec_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const CodecPlugin& plugin() const { return *plugin_; }
  const kvmc_codec_api& api() const { return plugin_->api(); }
  const kvmc_codec* codec() const { return codec_; }

  /// Whether an entry succeeded; tells of it if not.
  bool Succeeded(kvmc_status status, CodecEvents::Entry entry, absl::string_view name) const {
    if (__builtin_expect(status == KVMC_OK, 1)) return true;
    const bool first = !told_[static_cast<int>(entry)].exchange(true, std::memory_order_relaxed);
    if (events_ != nullptr) events_->OnError(entry, plugin_->StatusOf(status, name), first);
    return false;
  }
  void CountDecoded(size_t pages) const {
    if (events_ != nullptr) events_->OnDecodedPages(pages);
  }

 private:
  const std::shared_ptr<const CodecPlugin> plugin_;  // outlived by nothing that was made of it
  kvmc_codec* const codec_;
  CodecEvents* const events_;
  mutable std::array<std::atomic<bool>, CodecEvents::kEntries> told_ = {};
};

class PluginHeadDecoder final : public HeadDecoder {
 public:
  PluginHeadDecoder(const Handle& handle, size_t workspace_bytes)
      : handle_(handle), workspace_bytes_(workspace_bytes) {}

  size_t decode_workspace_bytes() const override { return workspace_bytes_; }
  bool DecodeHead(int layer, int kv_head, const uint8_t* encoded, uint8_t* raw,
                  absl::Span<uint8_t> workspace) const override {
    const kvmc_decode_item item = {encoded, raw, uint32_t(layer), uint32_t(kv_head), 1};
    return Decode(&item, 1, workspace);
  }
  void OnDecoded(size_t pages) const override { handle_.CountDecoded(pages); }

  bool Decode(const kvmc_decode_item* items, size_t count, absl::Span<uint8_t> workspace) const {
    auto batch = Sized<kvmc_decode_batch>();
    batch.items = items;
    batch.item_count = count;
    batch.item_bytes = sizeof *items;
    batch.workspace = workspace.data();
    batch.workspace_bytes = workspace.size();
    return handle_.Succeeded(handle_.api().decode_batch(handle_.codec(), &batch), CodecEvents::Entry::kDecode,
                             "decode_batch");
  }

 private:
  const Handle& handle_;
  const size_t workspace_bytes_;
};

/// What the plug-in says, checked.
struct Description {
  CodecInfo info;
  bool attends = false;
  std::vector<uint32_t> layer_flags;
  size_t encode_bytes = 0, decode_bytes = 0;                           // of workspace
  std::array<size_t, PageAttentionTask::kRowsMax + 1> attend_bytes{};  // by rows
};

class PluginAttention final : public PageAttention {
 public:
  PluginAttention(const Handle& handle, const Description& description, const PageLayout& layout)
      : handle_(handle),
        attends_(description.attends),
        head_dim_(layout.head_dim),
        layer_flags_(description.layer_flags),
        attend_bytes_(description.attend_bytes),
        decoder_(handle, description.decode_bytes),
        decoded_(MakeDecodedAttention(layout, &decoder_)) {}

  const PluginHeadDecoder& decoder() const { return decoder_; }

  // [the plug-in's or decoded attention's scratch][a copy of the state, to begin again from].
  size_t workspace_bytes(int rows) const override {
    return attends_ ? ScratchBytes(rows) + StateFloats(rows) * sizeof(float) : decoded_->workspace_bytes(rows);
  }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    if (!attends_) return decoded_->Attend(task, state, workspace);
    KV_CHECK(task.visible == nullptr);
    KV_CHECK(workspace.size() >= workspace_bytes(task.rows));
    const size_t scratch_bytes = ScratchBytes(task.rows), rows = task.rows, elements = rows * head_dim_;
    float* const copy = reinterpret_cast<float*>(workspace.data() + scratch_bytes);
    std::copy_n(state.max, rows, copy);
    std::copy_n(state.sum, rows, copy + rows);
    std::copy_n(state.acc, elements, copy + 2 * rows);
    kvmc_attend_item item = {};
    item.q = task.q;
    item.rows = rows;
    item.layer = task.layer;
    item.kv_head = task.kv_head;
    item.scale = task.scale;
    item.pages = task.pages.data();
    item.page_count = task.pages.size();
    item.max = state.max;
    item.sum = state.sum;
    item.acc = state.acc;
    item.next_pages = task.next_pages.data();
    item.next_page_count = task.next_pages.size();
    item.next_kv_head = task.next_kv_head;
    auto batch = Sized<kvmc_attend_batch>();
    batch.items = &item;
    batch.item_count = 1;
    batch.item_bytes = sizeof item;
    batch.workspace = workspace.data();
    batch.workspace_bytes = attend_bytes_[rows];
    if (handle_.Succeeded(handle_.api().attend_batch(handle_.codec(), &batch), CodecEvents::Entry::kAttend,
                          "attend_batch")) {
      return;
    }
    // Raw pages know nothing of a codec's own space.
    if (maps(task.layer)) return SpoilSoftmax(task.rows, head_dim_, state);
    std::copy_n(copy, rows, state.max);
    std::copy_n(copy + rows, rows, state.sum);
    std::copy_n(copy + 2 * rows, elements, state.acc);
    decoded_->Attend(task, state, workspace.first(scratch_bytes));
  }

  bool maps(int layer) const override { return (layer_flags_[layer] & KVMC_MAPS) != 0; }
  bool folds_output(int layer) const override { return (layer_flags_[layer] & KVMC_FOLDS) != 0; }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    Map(handle_.api().map_queries, "map_queries", layer, kv_head, rows, q, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Map(handle_.api().expand_output, "expand_output", layer, kv_head, rows, acc, out);
  }
  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Map(handle_.api().project_output, "project_output", layer, kv_head, rows, acc, out);
  }

 private:
  size_t StateFloats(size_t rows) const { return rows * (2 + head_dim_); }
  size_t ScratchBytes(int rows) const {
    return AlignUp(std::max(attend_bytes_[rows], decoded_->workspace_bytes(rows)));
  }

  void Map(kvmc_status (*map)(const kvmc_codec*, const kvmc_map_item*), absl::string_view name, int layer, int kv_head,
           int rows, const float* from, float* to) const {
    auto item = Sized<kvmc_map_item>();
    item.from = from;
    item.to = to;
    item.rows = rows;
    item.layer = layer;
    item.kv_head = kv_head;
    if (!handle_.Succeeded(map(handle_.codec(), &item), CodecEvents::Entry::kAttend, name)) {
      std::fill_n(to, size_t(rows) * head_dim_, std::numeric_limits<float>::quiet_NaN());
    }
  }

  const Handle& handle_;
  const bool attends_;
  const size_t head_dim_;
  const std::vector<uint32_t> layer_flags_;
  const std::array<size_t, PageAttentionTask::kRowsMax + 1> attend_bytes_;
  const PluginHeadDecoder decoder_;
  const std::unique_ptr<PageAttention> decoded_;
};

class PluginCodec final : public Codec {
 public:
  PluginCodec(std::unique_ptr<Handle> handle, Description description, const PageLayout& layout)
      : layout_(layout),
        handle_(std::move(handle)),
        info_(std::move(description.info)),
        encode_workspace_bytes_(description.encode_bytes),
        attention_(*handle_, description, layout) {}

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return encode_workspace_bytes_; }
  const PageAttention& attention() const override { return attention_; }

  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    KV_CHECK(workspace.size() >= encode_workspace_bytes_);
    std::array<kvmc_encode_item, kItemsAtOnce> passed;
    for (; !items.empty(); items.remove_prefix(std::min(items.size(), kItemsAtOnce))) {
      const absl::Span<EncodeItem> part = items.first(std::min(items.size(), kItemsAtOnce));
      for (size_t i = 0; i < part.size(); ++i) {
        passed[i] = {part[i].raw, part[i].encoded, part[i].layer, 0, part[i].first_token};
      }
      auto batch = Sized<kvmc_encode_batch>();
      batch.items = passed.data();
      batch.item_count = part.size();
      batch.item_bytes = sizeof passed[0];
      batch.workspace = workspace.data();
      batch.workspace_bytes = encode_workspace_bytes_;
      const bool encoded = handle_->Succeeded(handle_->api().encode_batch(handle_->codec(), &batch),
                                              CodecEvents::Entry::kEncode, "encode_batch");
      for (size_t i = 0; i < part.size(); ++i) part[i].declined = !encoded || passed[i].declined != 0;
    }
  }

  void Decode(absl::Span<const DecodeItem> items) const override {
    const size_t bytes = attention_.decoder().decode_workspace_bytes();
    const Scratch workspace = Allocate(bytes);
    for (const DecodeItem& item : items) {
      const kvmc_decode_item passed = {item.encoded, item.raw, item.layer, 0, layout_.kv_heads};
      if (!attention_.decoder().Decode(&passed, 1, {workspace.get(), bytes})) {
        std::memset(item.raw, 0xff, layout_.raw_bytes());  // NaN in either type
      }
    }
  }

  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    if (encoded.size() != info_.page_bytes(layer)) {
      return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                        absl::StrCat(info_.page_bytes(layer)));
    }
    const kvmc_status status = handle_->api().validate(handle_->codec(), layer, encoded.data(), encoded.size());
    if (status == KVMC_OK) return absl::OkStatus();
    return absl::DataLossError(handle_->plugin().StatusOf(status, "validate").message());
  }

  bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const override {
    if (!attention_.folds_output(layer)) return false;
    KV_CHECK(factor.size() >= size_t{layout_.head_dim} * layout_.head_dim);
    return handle_->Succeeded(handle_->api().output_factor(handle_->codec(), layer, kv_head, factor.data()),
                              CodecEvents::Entry::kAttend, "output_factor");
  }

 private:
  const PageLayout layout_;
  const std::unique_ptr<Handle> handle_;  // outlives attention_
  const CodecInfo info_;
  const size_t encode_workspace_bytes_;
  const PluginAttention attention_;
};

/// The context as a plug-in sees it, with what it points to.
struct PassedContext {
  PassedContext(const CodecContext& context, const CodecParameters& given) {
    for (const auto& [key, value] : given) parameters.push_back({key.c_str(), value.c_str()});
    passed = Sized<kvmc_context>();
    passed.dtype = context.layout.dtype == DType::kBFloat16 ? KVMC_BFLOAT16 : KVMC_FLOAT16;
    passed.kv_heads = context.layout.kv_heads;
    passed.head_dim = context.layout.head_dim;
    passed.page_tokens = context.layout.page_tokens;
    passed.layers = context.layers;
    passed.query_heads = context.query_heads;
    passed.parameters = parameters.data();
    passed.parameter_count = parameters.size();
    passed.parameter_item_bytes = sizeof(kvmc_parameter);
    if (context.calibration == nullptr) return;
    const Calibration& from = *context.calibration;
    const std::string file = SerializeCalibration(from.model(), from.tensors(), from.metadata());
    calibration = Allocate(file.size());
    std::memcpy(calibration.get(), file.data(), file.size());
    passed.calibration = calibration.get();
    passed.calibration_bytes = file.size();
  }

  std::vector<kvmc_parameter> parameters;
  Scratch calibration;
  kvmc_context passed;
};

/// What a plug-in said of itself, and what it may say.
absl::Status Implausible(const CodecPlugin& plugin, absl::string_view what, absl::string_view value,
                         absl::string_view bound) {
  return InvalidField(absl::StrCat("codec ", plugin.name(), " (", plugin.path(), ") ", what), value, bound);
}

absl::Status CheckLayers(const CodecPlugin& plugin, const PageLayout& layout, const std::vector<uint32_t>& bytes,
                         Description* out) {
  const kvmc_codec_api& api = plugin.api();
  const size_t bytes_max = EncodedBytesMax(layout);
  double total = 0;
  for (size_t layer = 0; layer < bytes.size(); ++layer) {
    const std::string at = absl::StrCat("[", layer, "]");
    if (bytes[layer] == 0 || bytes[layer] % KVMC_ALIGNMENT_BYTES != 0 || bytes[layer] > bytes_max) {
      return Implausible(plugin, absl::StrCat("bytes_of_layer", at), absl::StrCat(bytes[layer]),
                         absl::StrCat("a multiple of ", KVMC_ALIGNMENT_BYTES, " in 1..", bytes_max));
    }
    out->info.encoded_bytes = std::max<size_t>(out->info.encoded_bytes, bytes[layer]);
    total += bytes[layer];
    const uint32_t flags = out->layer_flags[layer];
    const auto refuse = [&](absl::string_view bound) {
      return Implausible(plugin, absl::StrCat("layer_flags", at), absl::StrCat(flags), bound);
    };
    if ((flags & ~(KVMC_MAPS | KVMC_FOLDS)) != 0) return refuse("made of KVMC_MAPS and KVMC_FOLDS");
    if ((flags & KVMC_FOLDS) != 0 && (flags & KVMC_MAPS) == 0) return refuse("with KVMC_MAPS, for KVMC_FOLDS needs it");
    if ((flags & KVMC_MAPS) != 0 && (!out->attends || api.map_queries == nullptr || api.expand_output == nullptr)) {
      return refuse("without KVMC_MAPS, which needs attend_batch, map_queries and expand_output");
    }
    if ((flags & KVMC_FOLDS) != 0 && (api.project_output == nullptr || api.output_factor == nullptr)) {
      return refuse("without KVMC_FOLDS, which needs project_output and output_factor");
    }
  }
  if (std::any_of(bytes.begin(), bytes.end(), [&](uint32_t b) { return b != bytes[0]; })) out->info.layer_bytes = bytes;
  if (out->info.payload_bytes == 0 || double(out->info.payload_bytes) > total / bytes.size()) {
    return Implausible(plugin, "payload_bytes", absl::StrCat(out->info.payload_bytes),
                       absl::StrCat("1..", total / bytes.size(), ", the mean bytes of a layer's page"));
  }
  return absl::OkStatus();
}

absl::Status CheckSpec(const CodecPlugin& plugin, absl::Span<const char> text, CodecInfo* info) {
  const auto end = std::find(text.begin(), text.end(), '\0');
  if (end == text.end()) {
    return Implausible(plugin, "parameters", "without an end",
                       absl::StrCat("ended by 0 within ", KVMC_PARAMETERS_BYTES_MAX, " bytes"));
  }
  const std::string parameters(text.begin(), end);
  info->name = plugin.name();
  info->spec = parameters.empty() ? info->name : absl::StrCat(info->name, ":", parameters);
  const absl::StatusOr<CodecSpec> parsed = ParseCodecSpec(info->spec);
  if (!parsed.ok() || info->spec.find(';') != std::string::npos || parsed->parameters.count("calibration") != 0) {
    return Implausible(plugin, "parameters", absl::StrCat("\"", parameters, "\""),
                       absl::StrCat("key=value joined by '", std::string(1, kParameterSeparator),
                                    "', without ';' and without calibration"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Description> Describe(const CodecPlugin& plugin, const CodecContext& context,
                                     const PassedContext& passed) {
  const kvmc_codec_api& api = plugin.api();
  Description result;
  std::vector<uint32_t> bytes(context.layers);
  std::array<char, KVMC_PARAMETERS_BYTES_MAX> parameters = {};
  result.layer_flags.resize(context.layers);
  auto described = Sized<kvmc_description>();
  described.bytes_of_layer = bytes.data();
  described.layer_flags = result.layer_flags.data();
  described.parameters = parameters.data();
  KV_RETURN_IF_ERROR(plugin.StatusOf(api.describe(&passed.passed, &described), "describe"));
  if (described.version == 0) return Implausible(plugin, "version", "0", "1 or more");
  if ((described.flags & ~KVMC_ATTENDS) != 0) {
    return Implausible(plugin, "flags", absl::StrCat(described.flags), "made of KVMC_ATTENDS");
  }
  result.attends = (described.flags & KVMC_ATTENDS) != 0;
  if (result.attends && api.attend_batch == nullptr) {
    return Implausible(plugin, "flags", "KVMC_ATTENDS", "without it, attend_batch being NULL");
  }
  result.info.version = described.version;
  result.info.payload_bytes = described.payload_bytes;
  KV_RETURN_IF_ERROR(CheckLayers(plugin, context.layout, bytes, &result));
  KV_RETURN_IF_ERROR(CheckSpec(plugin, parameters, &result.info));
  result.info.spec = WithCalibration(std::move(result.info.spec), context.calibration);
  if (context.calibration != nullptr) result.info.calibration_digest = context.calibration->digest();
  return result;
}

absl::Status AskWorkspaces(const Handle& handle, Description* out) {
  const auto ask = [&](uint32_t purpose, int rows, size_t* bytes) {
    *bytes = handle.api().workspace_bytes(handle.codec(), purpose, rows);
    if (*bytes <= kWorkspaceBytesMax) return absl::OkStatus();
    return Implausible(handle.plugin(), absl::StrCat("workspace_bytes(", purpose, ", ", rows, ")"),
                       absl::StrCat(*bytes), absl::StrCat("at most ", kWorkspaceBytesMax));
  };
  KV_RETURN_IF_ERROR(ask(KVMC_FOR_ENCODE, 0, &out->encode_bytes));
  KV_RETURN_IF_ERROR(ask(KVMC_FOR_DECODE, 0, &out->decode_bytes));
  if (!out->attends) return absl::OkStatus();
  for (int rows = 1; rows <= PageAttentionTask::kRowsMax; ++rows) {
    KV_RETURN_IF_ERROR(ask(KVMC_FOR_ATTEND, rows, &out->attend_bytes[rows]));
    out->attend_bytes[rows] = std::max(out->attend_bytes[rows], out->attend_bytes[rows - 1]);
  }
  return absl::OkStatus();
}

}  // namespace

static_assert(KVMC_ROWS_MAX == PageAttentionTask::kRowsMax);
static_assert(KVMC_FLOAT16 == int(DType::kFloat16) && KVMC_BFLOAT16 == int(DType::kBFloat16));

const char* CodecEvents::EntryName(Entry entry) {
  constexpr const char* kNames[kEntries] = {"encode", "decode", "attend"};
  return kNames[static_cast<int>(entry)];
}

absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecPlugin> plugin,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events) {
  if (context.layers < 1) return InvalidField("layers", context.layers, "1 or more");
  if (context.layout.dtype == DType::kFloat32) return InvalidField("dtype", "float32", "float16 or bfloat16");
  const PassedContext passed(context, parameters);
  KV_ASSIGN_OR_RETURN(Description description, Describe(*plugin, context, passed));
  kvmc_codec* codec = nullptr;
  KV_RETURN_IF_ERROR(plugin->StatusOf(plugin->api().create(&passed.passed, &codec), "create"));
  auto handle = std::make_unique<Handle>(std::move(plugin), codec, events);
  KV_RETURN_IF_ERROR(AskWorkspaces(*handle, &description));
  return std::make_unique<PluginCodec>(std::move(handle), std::move(description), context.layout);
}

absl::Status LoadCodecPlugin(const std::string& path, CodecRegistry& registry, CodecEvents* events) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(path));
  if (registry.Names().count(plugin->name()) != 0) {
    return FieldError(absl::StatusCode::kAlreadyExists, absl::StrCat("codec plug-in ", path, " name"),
                      absl::StrCat("\"", plugin->name(), "\""), "one that no other codec has");
  }
  registry.Register(plugin->name(), absl::StrCat(plugin->help(), " (", path, ")"),
                    [plugin, events](const CodecContext& context, const CodecParameters& parameters) {
                      return MakePluginCodec(plugin, context, parameters, events);
                    });
  return absl::OkStatus();
}

absl::Status LoadCodecPlugins(const std::vector<std::string>& paths, CodecRegistry& registry, CodecEvents* events) {
  for (const std::string& path : paths) KV_RETURN_IF_ERROR(LoadCodecPlugin(path, registry, events));
  return absl::OkStatus();
}

}  // namespace kvmanager
