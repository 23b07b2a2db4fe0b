#include "codecs/abi/process_entries.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/abi/codec_plugin.h"
#include "codecs/abi/passed_context.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using plugin::Call;
using plugin::CallType;
using LaneUse = PluginProcess::LaneUse;

constexpr uint64_t kLaneBytes = PluginProcess::kLaneBytes;

/// Element i of an array whose elements are item_bytes apart.
template <typename T>
T& At(T* items, size_t item_bytes, size_t i) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return *reinterpret_cast<T*>(reinterpret_cast<Byte*>(items) + i * item_bytes);
}

bool IsFinite(const float* values, size_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

/// One codec. It is made in each process that it meets: the first call there makes it.
class ProcessEntries final : public CodecEntries {
 public:
  ProcessEntries(std::shared_ptr<PluginProcess> process, const CodecContext& context, CodecParameters parameters)
      : process_(std::move(process)),
        context_(context),
        parameters_(std::move(parameters)),
        raw_bytes_(context.layout.raw_bytes()),
        head_dim_(context.layout.head_dim),
        codec_(process_->NewCodec()) {}
  ~ProcessEntries() override { process_->Drop(codec_); }
  ProcessEntries(const ProcessEntries&) = delete;
  ProcessEntries& operator=(const ProcessEntries&) = delete;

  /// Makes it for the first time. Called once, before the other entries.
  absl::Status Make() {
    KV_ASSIGN_OR_RETURN(LaneUse lane, process_->Take());
    DropOthers(lane);
    KV_ASSIGN_OR_RETURN(description_, MakeIn(lane));
    made_in_.store(lane.start(), std::memory_order_release);
    const size_t page_bytes = *std::max_element(description_.bytes_of_layer.begin(), description_.bytes_of_layer.end());
    const size_t at_least =
        std::max(plugin::kEncodePagesAt + plugin::AlignUp(raw_bytes_), plugin::AttendPlaces(head_dim_).pages_at) +
        plugin::AlignUp(page_bytes);
    if (at_least <= kLaneBytes) return absl::OkStatus();
    return InvalidField(
        absl::StrCat("codec ", process_->name(), " (", process_->path(), ") bytes of a page's two forms"), at_least,
        absl::StrCat("at most ", kLaneBytes, ", which its process shares with the daemon"));
  }
  const RawDescription& description() const { return description_; }

  // The process has scratch of its own.
  size_t workspace_bytes(uint32_t, uint32_t) const override { return 0; }
  bool was_answered(const absl::Status& error) const override { return !PluginProcess::IsUnanswered(error); }

  absl::Status EncodeBatch(const kvmc_encode_batch& batch) const override {
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    for (size_t begin = 0; begin < batch.item_count;) {
      // [slots][raw, encoded of each].
      size_t end = begin, bytes = plugin::kEncodePagesAt;
      for (; end < std::min(batch.item_count, begin + plugin::kEncodeSlotsMax); ++end) {
        const kvmc_encode_item& item = At(batch.items, batch.item_bytes, end);
        const size_t next = bytes + plugin::AlignUp(raw_bytes_) + plugin::AlignUp(PageBytes(item.layer));
        if (end > begin && next > kLaneBytes) break;
        plugin::EncodeSlot slot;
        slot.first_token = item.first_token;
        slot.raw_at = bytes;
        slot.encoded_at = bytes + plugin::AlignUp(raw_bytes_);
        slot.layer = item.layer;
        PutSlot(lane, end - begin, slot);
        std::memcpy(lane.memory() + slot.raw_at, item.raw, raw_bytes_);
        bytes = next;
      }
      Call call = CallOf(CallType::kEncode);
      call.count = static_cast<uint32_t>(end - begin);
      KV_RETURN_IF_ERROR(lane.Ask(call, "encode_batch"));
      bytes = plugin::kEncodePagesAt;
      for (size_t i = begin; i < end; ++i) {
        kvmc_encode_item& item = At(batch.items, batch.item_bytes, i);
        plugin::EncodeSlot slot;
        std::memcpy(&slot, lane.memory() + (i - begin) * sizeof slot, sizeof slot);
        item.declined = slot.declined != 0;
        bytes += plugin::AlignUp(raw_bytes_);
        if (item.declined == 0) std::memcpy(item.encoded, lane.memory() + bytes, PageBytes(item.layer));
        bytes += plugin::AlignUp(PageBytes(item.layer));
      }
      begin = end;
    }
    return absl::OkStatus();
  }

  absl::Status DecodeBatch(const kvmc_decode_batch& batch) const override {
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    for (size_t i = 0; i < batch.item_count; ++i) {
      const kvmc_decode_item& item = At(batch.items, batch.item_bytes, i);
      const size_t raw_bytes = 2 * item.head_count * context_.layout.raw_head_bytes();
      plugin::DecodeSlot slot;
      slot.encoded_at = plugin::AlignUp(sizeof slot);
      slot.raw_at = slot.encoded_at + plugin::AlignUp(PageBytes(item.layer));
      slot.layer = item.layer;
      slot.first_head = item.first_head;
      slot.head_count = item.head_count;
      PutSlot(lane, 0, slot);
      std::memcpy(lane.memory() + slot.encoded_at, item.encoded, PageBytes(item.layer));
      Call call = CallOf(CallType::kDecode);
      call.count = 1;
      KV_RETURN_IF_ERROR(lane.Ask(call, "decode_batch"));
      std::memcpy(item.raw, lane.memory() + slot.raw_at, raw_bytes);
    }
    return absl::OkStatus();
  }

  absl::Status AttendBatch(const kvmc_attend_batch& batch, bool announced) const override {
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    for (size_t i = 0; i < batch.item_count; ++i) {
      KV_RETURN_IF_ERROR(AttendItem(lane, At(batch.items, batch.item_bytes, i), announced && i == 0));
    }
    return absl::OkStatus();
  }

  absl::Status MapRows(Map map, const kvmc_map_item& item) const override {
    constexpr struct {
      CallType type;
      const char* name;
    } kMaps[] = {{CallType::kMapQueries, "map_queries"},
                 {CallType::kExpandOutput, "expand_output"},
                 {CallType::kProjectOutput, "project_output"}};
    const auto& [type, name] = kMaps[static_cast<int>(map)];
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    const size_t bytes = item.rows * head_dim_ * sizeof(float);
    std::memcpy(lane.memory(), item.from, bytes);
    Call call = CallOf(type);
    call.layer = item.layer;
    call.kv_head = item.kv_head;
    call.rows = item.rows;
    KV_RETURN_IF_ERROR(lane.Ask(call, name));
    std::memcpy(item.to, lane.memory() + plugin::MapToAt(head_dim_), bytes);
    return absl::OkStatus();
  }

  absl::Status OutputFactor(uint32_t layer, uint32_t kv_head, float* factor) const override {
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    Call call = CallOf(CallType::kOutputFactor);
    call.layer = layer;
    call.kv_head = kv_head;
    KV_RETURN_IF_ERROR(lane.Ask(call, "output_factor"));
    std::memcpy(factor, lane.memory(), head_dim_ * head_dim_ * sizeof(float));
    return IsFinite(factor, head_dim_ * head_dim_) ? absl::OkStatus() : NotFinite("output_factor");
  }

  absl::Status Validate(uint32_t layer, absl::Span<const uint8_t> encoded) const override {
    KV_ASSIGN_OR_RETURN(LaneUse lane, Use());
    KV_CHECK(encoded.size() <= kLaneBytes);
    std::memcpy(lane.memory(), encoded.data(), encoded.size());
    Call call = CallOf(CallType::kValidate);
    call.layer = layer;
    call.bytes = encoded.size();
    return lane.Ask(call, "validate");
  }

 private:
  size_t PageBytes(uint32_t layer) const { return description_.bytes_of_layer[layer]; }
  Call CallOf(CallType type) const {
    Call call;
    call.type = type;
    call.codec = codec_;
    return call;
  }
  template <typename Slot>
  static void PutSlot(LaneUse& lane, size_t i, const Slot& slot) {
    std::memcpy(lane.memory() + i * sizeof slot, &slot, sizeof slot);
  }
  absl::Status NotFinite(absl::string_view entry) const {
    return PluginStatus(KVMC_INTERNAL, process_->name(), process_->path(), entry,
                        "answered values that are not finite");
  }

  /// A lane whose process has this codec.
  absl::StatusOr<LaneUse> Use() const {
    KV_ASSIGN_OR_RETURN(LaneUse lane, process_->Take());
    DropOthers(lane);
    if (made_in_.load(std::memory_order_acquire) == lane.start()) return lane;
    // Several threads may find it missing: the process makes it once.
    const absl::StatusOr<RawDescription> made = MakeIn(lane);
    if (!made.ok()) {
      if (PluginProcess::IsUnanswered(made.status())) return made.status();
      return process_->Unanswered(absl::StrCat("cannot make the codec again: ", made.status().message()));
    }
    if (*made != description_) {
      return process_->Unanswered(
          "describes the codec otherwise than when its cache was opened: the daemon must be started anew");
    }
    made_in_.store(lane.start(), std::memory_order_release);
    return lane;
  }

  /// What goes wrong ends the process, which is what drops them, too.
  static void DropOthers(LaneUse& lane) {
    for (const uint64_t codec : lane.TakeDropped()) {
      Call call;
      call.type = CallType::kDrop;
      call.codec = codec;
      if (!lane.Ask(call, "destroy").ok()) return;
    }
  }

  absl::StatusOr<RawDescription> MakeIn(LaneUse& lane) const {
    const std::string artifact = CalibrationFile(context_);
    std::unique_ptr<Region> shared;
    if (!artifact.empty()) {
      Region::Options options;
      options.name = "kvmanager-artifact";
      options.bytes = artifact.size();
      options.sharing = Region::Sharing::kReadOnly;
      KV_ASSIGN_OR_RETURN(shared, Region::Create(options));
      std::memcpy(shared->data(), artifact.data(), artifact.size());
    }
    const PageLayout& layout = context_.layout;
    plugin::MakeHead head;
    head.dtype = layout.dtype == DType::kBFloat16 ? KVMC_BFLOAT16 : KVMC_FLOAT16;
    head.kv_heads = layout.kv_heads;
    head.head_dim = layout.head_dim;
    head.page_tokens = layout.page_tokens;
    head.layers = static_cast<uint32_t>(context_.layers);
    head.query_heads = static_cast<uint32_t>(context_.query_heads);
    head.parameters = static_cast<uint32_t>(parameters_.size());
    std::string texts;
    for (const auto& [key, value] : parameters_) texts.append(key).append(1, '\0').append(value).append(1, '\0');
    const size_t layer_bytes = head.layers * sizeof(uint32_t);
    KV_CHECK(sizeof head + texts.size() <= kLaneBytes &&
             sizeof(plugin::DescriptionHead) + 2 * layer_bytes <= kLaneBytes);
    std::memcpy(lane.memory(), &head, sizeof head);
    std::memcpy(lane.memory() + sizeof head, texts.data(), texts.size());
    Call call = CallOf(CallType::kMake);
    call.bytes = artifact.size();
    KV_RETURN_IF_ERROR(lane.Ask(call, "create", shared == nullptr ? -1 : shared->fd()));
    plugin::DescriptionHead said;
    std::memcpy(&said, lane.memory(), sizeof said);
    RawDescription description;
    description.version = said.version;
    description.flags = said.flags;
    description.payload_bytes = said.payload_bytes;
    std::copy(std::begin(said.parameters), std::end(said.parameters), description.parameters.begin());
    description.bytes_of_layer.resize(head.layers);
    description.layer_flags.resize(head.layers);
    std::memcpy(description.bytes_of_layer.data(), lane.memory() + sizeof said, layer_bytes);
    std::memcpy(description.layer_flags.data(), lane.memory() + sizeof said + layer_bytes, layer_bytes);
    return description;
  }

  /// Pages go some at a time; the rows stay in the lane meanwhile.
  absl::Status AttendItem(LaneUse& lane, const kvmc_attend_item& item, bool announced) const {
    const plugin::AttendPlaces places(head_dim_);
    uint8_t* const memory = lane.memory();
    const size_t row_bytes = item.rows * sizeof(float), rows_bytes = row_bytes * head_dim_;
    std::memcpy(memory + places.q_at, item.q, rows_bytes);
    std::memcpy(memory + places.acc_at, item.acc, rows_bytes);
    std::memcpy(memory + places.max_at, item.max, row_bytes);
    std::memcpy(memory + places.sum_at, item.sum, row_bytes);
    const size_t page_bytes = PageBytes(item.layer), stride = plugin::AlignUp(page_bytes);
    const size_t room = std::min<size_t>(std::max(kAttendBytesAtOnce, stride), kLaneBytes - places.pages_at) / stride;
    absl::Span<const uint8_t* const> left(item.pages, item.page_count);
    while (!left.empty()) {
      const absl::Span<const uint8_t* const> pages = left.first(std::min(left.size(), room));
      left.remove_prefix(pages.size());
      // Heads of the same pages come one after another.
      if (!announced || !lane.HasPages(codec_, item.layer, pages)) {
        for (size_t i = 0; i < pages.size(); ++i) {
          std::memcpy(memory + places.pages_at + i * stride, pages[i], page_bytes);
        }
        lane.NotePages(codec_, item.layer, pages);
      }
      Call call = CallOf(CallType::kAttend);
      call.layer = item.layer;
      call.kv_head = item.kv_head;
      call.rows = item.rows;
      call.scale = item.scale;
      call.count = static_cast<uint32_t>(pages.size());
      call.stride = stride;
      KV_RETURN_IF_ERROR(lane.Ask(call, "attend_batch"));
    }
    std::memcpy(item.acc, memory + places.acc_at, rows_bytes);
    std::memcpy(item.max, memory + places.max_at, row_bytes);
    std::memcpy(item.sum, memory + places.sum_at, row_bytes);
    if (IsFinite(item.acc, item.rows * head_dim_) && IsFinite(item.sum, item.rows)) return absl::OkStatus();
    return NotFinite("attend_batch");
  }

  const std::shared_ptr<PluginProcess> process_;  // shared with the source and other codecs
  const CodecContext context_;
  const CodecParameters parameters_;
  const size_t raw_bytes_, head_dim_;
  const uint64_t codec_;
  RawDescription description_;
  mutable std::atomic<uint64_t> made_in_{0};  // PluginProcess::LaneUse::start()
};

class ProcessSource final : public CodecSource {
 public:
  explicit ProcessSource(std::shared_ptr<PluginProcess> process) : process_(std::move(process)) {}

  const std::string& path() const override { return process_->path(); }
  const std::string& name() const override { return process_->name(); }
  const std::string& help() const override { return process_->help(); }
  OptionalEntries optional_entries() const override { return process_->optional_entries(); }
  WorkerPool* workers() const override { return process_->workers(); }

  absl::StatusOr<Made> Make(const CodecContext& context, const CodecParameters& parameters) const override {
    auto entries = std::make_unique<ProcessEntries>(process_, context, parameters);
    KV_RETURN_IF_ERROR(entries->Make());
    Made made;
    made.description = entries->description();
    made.entries = std::move(entries);
    return made;
  }

 private:
  const std::shared_ptr<PluginProcess> process_;  // shared with the codecs
};

}  // namespace

std::shared_ptr<const CodecSource> MakeProcessSource(std::shared_ptr<PluginProcess> process) {
  return std::make_shared<ProcessSource>(std::move(process));
}

}  // namespace kvmanager
