#include "codecs/abi/plugin_codec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/abi/local_entries.h"
#include "codecs/abi/passed_context.h"
#include "codecs/decoded_attention.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kItemsAtOnce = 32;
constexpr char kParameterSeparator = ',';

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// A page may be larger than its raw form, by headers, not by much.
size_t EncodedBytesMax(const PageLayout& layout) { return 2 * layout.raw_bytes() + 4096; }

/// A codec of the plug-in, and who to tell of its errors.
class Handle {
 public:
  Handle(std::shared_ptr<const CodecSource> source, std::unique_ptr<CodecEntries> entries, CodecEvents* events)
      : source_(std::move(source)), entries_(std::move(entries)), events_(events) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const CodecSource& source() const { return *source_; }
  const CodecEntries& entries() const { return *entries_; }

  /// Whether an entry succeeded; tells of it if not.
  bool Succeeded(const absl::Status& status, CodecEvents::Entry entry) const {
    if (__builtin_expect(status.ok(), 1)) return true;
    const bool first = !told_[static_cast<int>(entry)].exchange(true, std::memory_order_relaxed);
    if (events_ != nullptr) events_->OnError(entry, status, first);
    return false;
  }
  /// The result of the call that failed so is NaN.
  void CountSpoilt(const absl::Status& status) const {
    if (!entries_->was_answered(status)) unanswered_.fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t unanswered() const { return unanswered_.load(std::memory_order_relaxed); }
  void CountDecoded(size_t pages) const {
    if (events_ != nullptr) events_->OnDecodedPages(pages);
  }

 private:
  const std::shared_ptr<const CodecSource> source_;  // shared with the registry and other codecs
  const std::unique_ptr<CodecEntries> entries_;
  CodecEvents* const events_;
  mutable std::array<std::atomic<bool>, CodecEvents::kEntries> told_ = {};
  mutable std::atomic<uint64_t> unanswered_{0};
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
    auto batch = SizedStruct<kvmc_decode_batch>();
    batch.items = items;
    batch.item_count = count;
    batch.item_bytes = sizeof *items;
    batch.workspace = workspace.data();
    batch.workspace_bytes = workspace.size();
    const absl::Status status = handle_.entries().DecodeBatch(batch);
    if (handle_.Succeeded(status, CodecEvents::Entry::kDecode)) return true;
    handle_.CountSpoilt(status);
    return false;
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
    auto batch = SizedStruct<kvmc_attend_batch>();
    batch.items = &item;
    batch.item_count = 1;
    batch.item_bytes = sizeof item;
    batch.workspace = workspace.data();
    batch.workspace_bytes = attend_bytes_[rows];
    const absl::Status status = handle_.entries().AttendBatch(batch, task.announced);
    if (handle_.Succeeded(status, CodecEvents::Entry::kAttend)) return;
    if (maps(task.layer)) {  // raw pages know nothing of a codec's own space
      handle_.CountSpoilt(status);
      return SpoilSoftmax(task.rows, head_dim_, state);
    }
    std::copy_n(copy, rows, state.max);
    std::copy_n(copy + rows, rows, state.sum);
    std::copy_n(copy + 2 * rows, elements, state.acc);
    decoded_->Attend(task, state, workspace.first(scratch_bytes));
  }

  bool maps(int layer) const override { return (layer_flags_[layer] & KVMC_MAPS) != 0; }
  bool folds_output(int layer) const override { return (layer_flags_[layer] & KVMC_FOLDS) != 0; }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    Map(CodecEntries::Map::kMapQueries, layer, kv_head, rows, q, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Map(CodecEntries::Map::kExpandOutput, layer, kv_head, rows, acc, out);
  }
  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    Map(CodecEntries::Map::kProjectOutput, layer, kv_head, rows, acc, out);
  }

 private:
  size_t StateFloats(size_t rows) const { return rows * (2 + head_dim_); }
  size_t ScratchBytes(int rows) const {
    return AlignUp(std::max(attend_bytes_[rows], decoded_->workspace_bytes(rows)));
  }

  void Map(CodecEntries::Map map, int layer, int kv_head, int rows, const float* from, float* to) const {
    auto item = SizedStruct<kvmc_map_item>();
    item.from = from;
    item.to = to;
    item.rows = rows;
    item.layer = layer;
    item.kv_head = kv_head;
    const absl::Status status = handle_.entries().MapRows(map, item);
    if (handle_.Succeeded(status, CodecEvents::Entry::kAttend)) return;
    handle_.CountSpoilt(status);
    std::fill_n(to, size_t(rows) * head_dim_, std::numeric_limits<float>::quiet_NaN());
  }

  const Handle& handle_;
  const bool attends_;
  const size_t head_dim_;
  const std::vector<uint32_t> layer_flags_;
  const std::array<size_t, PageAttentionTask::kRowsMax + 1> attend_bytes_;
  const PluginHeadDecoder decoder_;
  const std::unique_ptr<PageAttention> decoded_;
};

class PluginCodec final : public Codec, public WaitingCodec {
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
      auto batch = SizedStruct<kvmc_encode_batch>();
      batch.items = passed.data();
      batch.item_count = part.size();
      batch.item_bytes = sizeof passed[0];
      batch.workspace = workspace.data();
      batch.workspace_bytes = encode_workspace_bytes_;
      const bool encoded = handle_->Succeeded(handle_->entries().EncodeBatch(batch), CodecEvents::Entry::kEncode);
      for (size_t i = 0; i < part.size(); ++i) part[i].declined = !encoded || passed[i].declined != 0;
    }
  }

  void Decode(absl::Span<const DecodeItem> items) const override {
    const size_t bytes = attention_.decoder().decode_workspace_bytes();
    const AlignedBuffer workspace(std::max<size_t>(bytes, 1));
    for (const DecodeItem& item : items) {
      const kvmc_decode_item passed = {item.encoded, item.raw, item.layer, 0, layout_.kv_heads};
      if (!attention_.decoder().Decode(&passed, 1, {workspace.data(), bytes})) {
        std::memset(item.raw, 0xff, layout_.raw_bytes());  // NaN in either type
      }
    }
  }

  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    if (encoded.size() != info_.page_bytes(layer)) {
      return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                        absl::StrCat(info_.page_bytes(layer)));
    }
    absl::Status status = handle_->entries().Validate(static_cast<uint32_t>(layer), encoded);
    if (status.ok() || !handle_->entries().was_answered(status)) return status;
    return absl::DataLossError(status.message());
  }

  bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const override {
    if (!attention_.folds_output(layer)) return false;
    KV_CHECK(factor.size() >= size_t{layout_.head_dim} * layout_.head_dim);
    return handle_->Succeeded(
        handle_->entries().OutputFactor(static_cast<uint32_t>(layer), static_cast<uint32_t>(kv_head), factor.data()),
        CodecEvents::Entry::kAttend);
  }

  WorkerPool* workers() const override { return handle_->source().workers(); }
  uint64_t unanswered() const override { return handle_->unanswered(); }

 private:
  const PageLayout layout_;
  const std::unique_ptr<Handle> handle_;  // outlives attention_
  const CodecInfo info_;
  const size_t encode_workspace_bytes_;
  const PluginAttention attention_;
};

/// What a plug-in said of itself, and what it may say.
absl::Status Implausible(const CodecSource& source, absl::string_view what, absl::string_view value,
                         absl::string_view bound) {
  return InvalidField(absl::StrCat("codec ", source.name(), " (", source.path(), ") ", what), value, bound);
}

absl::Status CheckLayers(const CodecSource& source, const PageLayout& layout, const std::vector<uint32_t>& bytes,
                         Description* out) {
  const OptionalEntries has = source.optional_entries();
  const size_t bytes_max = EncodedBytesMax(layout);
  double total = 0;
  for (size_t layer = 0; layer < bytes.size(); ++layer) {
    const std::string at = absl::StrCat("[", layer, "]");
    if (bytes[layer] == 0 || bytes[layer] % KVMC_ALIGNMENT_BYTES != 0 || bytes[layer] > bytes_max) {
      return Implausible(source, absl::StrCat("bytes_of_layer", at), absl::StrCat(bytes[layer]),
                         absl::StrCat("a multiple of ", KVMC_ALIGNMENT_BYTES, " in 1..", bytes_max));
    }
    out->info.encoded_bytes = std::max<size_t>(out->info.encoded_bytes, bytes[layer]);
    total += bytes[layer];
    const uint32_t flags = out->layer_flags[layer];
    const auto refuse = [&](absl::string_view bound) {
      return Implausible(source, absl::StrCat("layer_flags", at), absl::StrCat(flags), bound);
    };
    if ((flags & ~(KVMC_MAPS | KVMC_FOLDS)) != 0) return refuse("made of KVMC_MAPS and KVMC_FOLDS");
    if ((flags & KVMC_FOLDS) != 0 && (flags & KVMC_MAPS) == 0) return refuse("with KVMC_MAPS, for KVMC_FOLDS needs it");
    if ((flags & KVMC_MAPS) != 0 && (!out->attends || !has.map_queries || !has.expand_output)) {
      return refuse("without KVMC_MAPS, which needs attend_batch, map_queries and expand_output");
    }
    if ((flags & KVMC_FOLDS) != 0 && (!has.project_output || !has.output_factor)) {
      return refuse("without KVMC_FOLDS, which needs project_output and output_factor");
    }
  }
  if (std::any_of(bytes.begin(), bytes.end(), [&](uint32_t b) { return b != bytes[0]; })) out->info.layer_bytes = bytes;
  if (out->info.payload_bytes == 0 || double(out->info.payload_bytes) > total / bytes.size()) {
    return Implausible(source, "payload_bytes", absl::StrCat(out->info.payload_bytes),
                       absl::StrCat("1..", total / bytes.size(), ", the mean bytes of a layer's page"));
  }
  return absl::OkStatus();
}

absl::Status CheckSpec(const CodecSource& source, absl::Span<const char> text, CodecInfo* info) {
  const auto end = std::find(text.begin(), text.end(), '\0');
  if (end == text.end()) {
    return Implausible(source, "parameters", "without an end",
                       absl::StrCat("ended by 0 within ", KVMC_PARAMETERS_BYTES_MAX, " bytes"));
  }
  const std::string parameters(text.begin(), end);
  info->name = source.name();
  info->spec = parameters.empty() ? info->name : absl::StrCat(info->name, ":", parameters);
  const absl::StatusOr<CodecSpec> parsed = ParseCodecSpec(info->spec);
  if (!parsed.ok() || info->spec.find(';') != std::string::npos || parsed->parameters.count("calibration") != 0) {
    return Implausible(source, "parameters", absl::StrCat("\"", parameters, "\""),
                       absl::StrCat("key=value joined by '", std::string(1, kParameterSeparator),
                                    "', without ';' and without calibration"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Description> Check(const CodecSource& source, const CodecContext& context,
                                  const RawDescription& described) {
  Description result;
  if (described.version == 0) return Implausible(source, "version", "0", "1 or more");
  if ((described.flags & ~KVMC_ATTENDS) != 0) {
    return Implausible(source, "flags", absl::StrCat(described.flags), "made of KVMC_ATTENDS");
  }
  result.attends = (described.flags & KVMC_ATTENDS) != 0;
  if (result.attends && !source.optional_entries().attend_batch) {
    return Implausible(source, "flags", "KVMC_ATTENDS", "without it, attend_batch being NULL");
  }
  result.info.version = described.version;
  result.info.payload_bytes = described.payload_bytes;
  result.layer_flags = described.layer_flags;
  KV_RETURN_IF_ERROR(CheckLayers(source, context.layout, described.bytes_of_layer, &result));
  KV_RETURN_IF_ERROR(CheckSpec(source, described.parameters, &result.info));
  result.info.spec = WithCalibration(std::move(result.info.spec), context.calibration);
  if (context.calibration != nullptr) result.info.calibration_digest = context.calibration->digest();
  return result;
}

absl::Status AskWorkspaces(const Handle& handle, Description* out) {
  const auto ask = [&](uint32_t purpose, int rows, size_t* bytes) {
    *bytes = handle.entries().workspace_bytes(purpose, rows);
    if (*bytes <= CodecEntries::kWorkspaceBytesMax) return absl::OkStatus();
    return Implausible(handle.source(), absl::StrCat("workspace_bytes(", purpose, ", ", rows, ")"),
                       absl::StrCat(*bytes), absl::StrCat("at most ", CodecEntries::kWorkspaceBytesMax));
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

absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecSource> source,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events) {
  if (context.layers < 1) return InvalidField("layers", context.layers, "1 or more");
  if (context.layout.dtype == DType::kFloat32) return InvalidField("dtype", "float32", "float16 or bfloat16");
  KV_ASSIGN_OR_RETURN(CodecSource::Made made, source->Make(context, parameters));
  KV_ASSIGN_OR_RETURN(Description description, Check(*source, context, made.description));
  auto handle = std::make_unique<Handle>(std::move(source), std::move(made.entries), events);
  KV_RETURN_IF_ERROR(AskWorkspaces(*handle, &description));
  return std::make_unique<PluginCodec>(std::move(handle), std::move(description), context.layout);
}

absl::StatusOr<std::unique_ptr<Codec>> MakePluginCodec(std::shared_ptr<const CodecPlugin> plugin,
                                                       const CodecContext& context, const CodecParameters& parameters,
                                                       CodecEvents* events) {
  return MakePluginCodec(MakeLocalSource(std::move(plugin)), context, parameters, events);
}

absl::Status RegisterPlugin(std::shared_ptr<const CodecSource> source, CodecRegistry& registry, CodecEvents* events) {
  if (registry.Names().count(source->name()) != 0) {
    return FieldError(absl::StatusCode::kAlreadyExists, absl::StrCat("codec plug-in ", source->path(), " name"),
                      absl::StrCat("\"", source->name(), "\""), "one that no other codec has");
  }
  std::string name = source->name(), help = absl::StrCat(source->help(), " (", source->path(), ")");
  registry.Register(
      std::move(name), std::move(help),
      [source = std::move(source), events](const CodecContext& context, const CodecParameters& parameters) {
        return MakePluginCodec(source, context, parameters, events);
      });
  return absl::OkStatus();
}

absl::Status LoadCodecPlugin(const std::string& path, CodecRegistry& registry, CodecEvents* events) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(path));
  return RegisterPlugin(MakeLocalSource(std::move(plugin)), registry, events);
}

absl::Status LoadCodecPlugins(const std::vector<std::string>& paths, CodecRegistry& registry, CodecEvents* events) {
  for (const std::string& path : paths) KV_RETURN_IF_ERROR(LoadCodecPlugin(path, registry, events));
  return absl::OkStatus();
}

}  // namespace kvmanager
