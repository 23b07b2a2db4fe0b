#include "codecs/abi/local_entries.h"

#include <utility>

#include "codecs/abi/passed_context.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class LocalEntries final : public CodecEntries {
 public:
  LocalEntries(std::shared_ptr<const CodecPlugin> plugin, kvmc_codec* codec)
      : plugin_(std::move(plugin)), codec_(codec) {}
  ~LocalEntries() override { api().destroy(codec_); }
  LocalEntries(const LocalEntries&) = delete;
  LocalEntries& operator=(const LocalEntries&) = delete;

  size_t workspace_bytes(uint32_t purpose, uint32_t rows) const override {
    return api().workspace_bytes(codec_, purpose, rows);
  }
  absl::Status EncodeBatch(const kvmc_encode_batch& batch) const override {
    return plugin_->StatusOf(api().encode_batch(codec_, &batch), "encode_batch");
  }
  absl::Status DecodeBatch(const kvmc_decode_batch& batch) const override {
    return plugin_->StatusOf(api().decode_batch(codec_, &batch), "decode_batch");
  }
  absl::Status AttendBatch(const kvmc_attend_batch& batch, bool) const override {
    return plugin_->StatusOf(api().attend_batch(codec_, &batch), "attend_batch");
  }
  absl::Status MapRows(Map map, const kvmc_map_item& item) const override {
    switch (map) {
      case Map::kMapQueries:
        return plugin_->StatusOf(api().map_queries(codec_, &item), "map_queries");
      case Map::kExpandOutput:
        return plugin_->StatusOf(api().expand_output(codec_, &item), "expand_output");
      case Map::kProjectOutput:
        return plugin_->StatusOf(api().project_output(codec_, &item), "project_output");
    }
    return absl::OkStatus();
  }
  absl::Status OutputFactor(uint32_t layer, uint32_t kv_head, float* factor) const override {
    return plugin_->StatusOf(api().output_factor(codec_, layer, kv_head, factor), "output_factor");
  }
  absl::Status Validate(uint32_t layer, absl::Span<const uint8_t> encoded) const override {
    return plugin_->StatusOf(api().validate(codec_, layer, encoded.data(), encoded.size()), "validate");
  }
  bool was_answered(const absl::Status&) const override { return true; }

 private:
  const kvmc_codec_api& api() const { return plugin_->api(); }

  const std::shared_ptr<const CodecPlugin> plugin_;  // outlived by nothing that was made of it
  kvmc_codec* const codec_;
};

class LocalSource final : public CodecSource {
 public:
  explicit LocalSource(std::shared_ptr<const CodecPlugin> plugin) : plugin_(std::move(plugin)) {}

  const std::string& path() const override { return plugin_->path(); }
  const std::string& name() const override { return plugin_->name(); }
  const std::string& help() const override { return plugin_->help(); }
  OptionalEntries optional_entries() const override { return plugin_->optional_entries(); }
  WorkerPool* workers() const override { return nullptr; }

  absl::StatusOr<Made> Make(const CodecContext& context, const CodecParameters& parameters) const override {
    const PassedContext passed(context, parameters);
    Made made;
    KV_RETURN_IF_ERROR(DescribeCodec(*plugin_, passed.passed, &made.description));
    kvmc_codec* codec = nullptr;
    KV_RETURN_IF_ERROR(plugin_->StatusOf(plugin_->api().create(&passed.passed, &codec), "create"));
    made.entries = std::make_unique<LocalEntries>(plugin_, codec);
    return made;
  }

 private:
  const std::shared_ptr<const CodecPlugin> plugin_;  // shared with the entries it makes
};

}  // namespace

absl::Status DescribeCodec(const CodecPlugin& plugin, const kvmc_context& context, RawDescription* description) {
  description->bytes_of_layer.assign(context.layers, 0);
  description->layer_flags.assign(context.layers, 0);
  description->parameters = {};
  auto described = SizedStruct<kvmc_description>();
  described.bytes_of_layer = description->bytes_of_layer.data();
  described.layer_flags = description->layer_flags.data();
  described.parameters = description->parameters.data();
  KV_RETURN_IF_ERROR(plugin.StatusOf(plugin.api().describe(&context, &described), "describe"));
  description->version = described.version;
  description->flags = described.flags;
  description->payload_bytes = described.payload_bytes;
  return absl::OkStatus();
}

std::shared_ptr<const CodecSource> MakeLocalSource(std::shared_ptr<const CodecPlugin> plugin) {
  return std::make_shared<LocalSource>(std::move(plugin));
}

}  // namespace kvmanager
