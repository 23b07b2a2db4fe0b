// What other programs tell the daemon in structs: a codec plug-in of itself, the process of UCX, peers of their UCX
// memory.
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codecs/abi/codec_plugin.h"
#include "codecs/abi/plugin_codec.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"
#include "transport/ucx/description.h"
#include "transport/ucx/process_wire.h"

namespace kvmanager::fuzz {
namespace {

using std::string_literals::operator""s;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;
Bytes Aligned(size_t bytes) {
  Bytes made(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>((bytes + 63) / 64 * 64, 64))));
  std::memset(made.get(), 0, bytes);
  return made;
}

/// What the plug-in of this run says, in the order of an input. Texts follow: name, help, parameters and error, each
/// ended by 0 or by the input.
struct Said {
  uint32_t struct_size, abi_version;
  uint32_t missing;  // a bit for each entry of the table that is NULL
  int32_t status;    // of every entry that `failing` has a bit for
  uint32_t failing;
  uint32_t version, flags;
  uint64_t payload_bytes;
  uint32_t bytes_of_layer[2], layer_flags[2];
  uint64_t workspace_bytes;
};

struct Plugin {
  Said said;
  std::string texts[4];
  enum Entry { kProbe, kDescribe, kCreate, kEncode, kDecode, kValidate, kAttend, kMap };
  kvmc_status Status(Entry entry) const { return (said.failing >> entry & 1) != 0 ? said.status : KVMC_OK; }
};
Plugin plugin;  // entries have no argument for it

kvmc_status Probe() { return plugin.Status(Plugin::kProbe); }
kvmc_status Describe(const kvmc_context* context, kvmc_description* to) {
  KV_CHECK(context->layers == 2);
  to->version = plugin.said.version;
  to->flags = plugin.said.flags;
  to->payload_bytes = plugin.said.payload_bytes;
  std::copy_n(plugin.said.bytes_of_layer, 2, to->bytes_of_layer);
  std::copy_n(plugin.said.layer_flags, 2, to->layer_flags);
  const std::string& parameters = plugin.texts[2];
  std::memcpy(to->parameters, parameters.data(), std::min<size_t>(parameters.size(), KVMC_PARAMETERS_BYTES_MAX));
  return plugin.Status(Plugin::kDescribe);
}
kvmc_status Create(const kvmc_context*, kvmc_codec** codec) {
  *codec = reinterpret_cast<kvmc_codec*>(&plugin);
  return plugin.Status(Plugin::kCreate);
}
void Destroy(kvmc_codec*) {}
size_t WorkspaceBytes(const kvmc_codec*, uint32_t, uint32_t) { return plugin.said.workspace_bytes; }
kvmc_status Encode(const kvmc_codec*, const kvmc_encode_batch* batch) {
  KV_CHECK(batch->workspace_bytes >= plugin.said.workspace_bytes);
  for (size_t i = 0; i < batch->item_count; ++i) {
    std::memset(batch->items[i].encoded, 1, plugin.said.bytes_of_layer[batch->items[i].layer]);
  }
  return plugin.Status(Plugin::kEncode);
}
kvmc_status Decode(const kvmc_codec*, const kvmc_decode_batch* batch) {
  KV_CHECK(batch->workspace_bytes >= plugin.said.workspace_bytes);
  return plugin.Status(Plugin::kDecode);
}
kvmc_status Validate(const kvmc_codec*, uint32_t, const uint8_t*, size_t) { return plugin.Status(Plugin::kValidate); }
void LastError(char* text, size_t text_bytes) {
  // A plug-in may forget the 0 at the end.
  std::memcpy(text, plugin.texts[3].data(), std::min(text_bytes, plugin.texts[3].size()));
}
kvmc_status Attend(const kvmc_codec*, const kvmc_attend_batch*) { return plugin.Status(Plugin::kAttend); }
kvmc_status Map(const kvmc_codec*, const kvmc_map_item*) { return plugin.Status(Plugin::kMap); }
kvmc_status OutputFactor(const kvmc_codec*, uint32_t, uint32_t, float*) { return plugin.Status(Plugin::kMap); }

class PluginTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    Said said = {
        sizeof(kvmc_codec_api), KVMC_ABI_VERSION, 0, KVMC_INTERNAL, 0, 1, KVMC_ATTENDS, 512, {512, 512}, {0, 0}, 4096};
    std::vector<std::string> seeds;
    const auto add = [&] {
      seeds.push_back(std::string(reinterpret_cast<const char*>(&said), sizeof said) +
                      "name+2\0help\0bits=4,range=max\0error"s);
    };
    add();
    said.layer_flags[0] = KVMC_MAPS | KVMC_FOLDS;
    said.layer_flags[1] = KVMC_MAPS;
    add();
    said.failing = 1 << Plugin::kAttend | 1 << Plugin::kDecode | 1 << Plugin::kEncode;
    add();
    said.failing = 1 << Plugin::kDescribe;
    add();
    said.flags = said.layer_flags[0] = said.layer_flags[1] = said.failing = 0;
    said.missing = 0x1f << 11;  // what is optional
    said.bytes_of_layer[1] = 1024;
    add();
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.size() < sizeof(Said)) return;
    std::memcpy(&plugin.said, input.data(), sizeof(Said));
    absl::string_view rest = TextOf(input.subspan(sizeof(Said)));
    for (std::string& text : plugin.texts) {
      const size_t end = std::min(rest.find('\0'), rest.size());
      text = std::string(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    kvmc_codec_api table = {plugin.said.struct_size,
                            plugin.said.abi_version,
                            0,
                            plugin.texts[0].c_str(),
                            plugin.texts[1].c_str(),
                            Probe,
                            Describe,
                            Create,
                            Destroy,
                            WorkspaceBytes,
                            Encode,
                            Decode,
                            Validate,
                            LastError,
                            Attend,
                            Map,
                            Map,
                            Map,
                            OutputFactor};
    // From `name` on every entry is a pointer.
    char* const entries = reinterpret_cast<char*>(&table) + offsetof(kvmc_codec_api, name);
    for (int i = 0; i < kEntries; ++i) {
      if ((plugin.said.missing >> i & 1) != 0) std::memset(entries + i * sizeof(void*), 0, sizeof(void*));
    }
    const auto loaded = CodecPlugin::Adopt(&table, "fuzz.so");
    MustExplain(loaded.status());
    if (!loaded.ok()) return;
    CodecContext context;
    context.layout = {DType::kFloat16, 2, 16, 16};
    context.layers = 2;
    context.query_heads = 4;
    const auto codec = MakePluginCodec(*loaded, context, {{"key", "value"}}, nullptr);
    MustExplain(codec.status());
    if (codec.ok() && plugin.said.workspace_bytes <= 1 << 20) Use(**codec);
  }

 private:
  static constexpr int kEntries = (sizeof(kvmc_codec_api) - offsetof(kvmc_codec_api, name)) / sizeof(void*);

  static void Use(const Codec& codec) {
    const PageLayout& layout = codec.layout();
    constexpr int kRows = 3;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const size_t page_bytes = codec.info().page_bytes(int(layer));
      KV_CHECK(page_bytes == plugin.said.bytes_of_layer[layer] && page_bytes <= codec.info().encoded_bytes);
      Bytes raw = Aligned(layout.raw_bytes()), encoded = Aligned(page_bytes);
      Bytes scratch = Aligned(codec.encode_workspace_bytes());
      EncodeItem item{raw.get(), encoded.get(), layer, 0};
      codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(scratch.get(), codec.encode_workspace_bytes()));
      MustExplain(codec.Validate(int(layer), absl::MakeConstSpan(encoded.get(), page_bytes)));
      const DecodeItem decode{encoded.get(), raw.get(), layer};
      codec.Decode(absl::MakeConstSpan(&decode, 1));
      const PageAttention& attention = codec.attention();
      Bytes q = Aligned(kRows * layout.head_dim * 4), acc = Aligned(kRows * layout.head_dim * 4);
      float max[kRows] = {-INFINITY, -INFINITY, -INFINITY}, sum[kRows] = {};
      const uint8_t* const pages[1] = {encoded.get()};
      PageAttentionTask task;
      task.q = reinterpret_cast<const float*>(q.get());
      task.rows = kRows;
      task.scale = 1;
      task.layer = int(layer);
      task.pages = pages;
      Bytes workspace = Aligned(attention.workspace_bytes(kRows));
      attention.Attend(task, {max, sum, reinterpret_cast<float*>(acc.get())},
                       absl::MakeSpan(workspace.get(), attention.workspace_bytes(kRows)));
      Bytes factor = Aligned(size_t{layout.head_dim} * layout.head_dim * 4);
      (void)codec.OutputFactor(
          int(layer), 0,
          absl::MakeSpan(reinterpret_cast<float*>(factor.get()), size_t{layout.head_dim} * layout.head_dim));
    }
  }
};

/// A packet of the UCX process; and the description of a peer's memory, as it came and sealed with the right key.
class UcxTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    ucx::Description description;
    description.major = 1;
    description.bytes = 1 << 20;
    description.address = "address";
    const std::string sealed = ucx::Seal(description, BytesOf(kContext), BytesOf(kKey));
    return {ucx::EncodePacket({{.type = ucx::PacketType::kReady, .major = 1}, "address"}),
            ucx::EncodePacket({{.type = ucx::PacketType::kDone, .read = 7}, ""}), sealed,
            sealed.substr(0, sealed.size() - ucx::kSealBytes)};
  }
  void Run(absl::Span<const uint8_t> input) override {
    const absl::string_view text = TextOf(input);
    if (const auto packet = ucx::ParsePacket({text.data(), text.size()})) {
      KV_CHECK(packet->payload.size() <= ucx::kPayloadBytesMax && ucx::EncodePacket(*packet) == text);
    }
    Unseal(text);
    Unseal(absl::StrCat(text, SealOf(text)));
  }

 private:
  static constexpr absl::string_view kContext = "context", kKey = "0123456789abcdef";

  static void Unseal(absl::string_view sealed) {
    const auto description = ucx::Unseal(BytesOf(sealed), BytesOf(kContext), BytesOf(kKey));
    MustExplain(description.status());
    if (!description.ok()) return;
    KV_CHECK(!description->address.empty() && description->address.size() <= ucx::kAddressBytesMax);
    KV_CHECK(description->memory < ucx::kMemoriesMax && description->bytes - 1 < ucx::kMemoryBytesMax);
    KV_CHECK(ucx::Seal(*description, BytesOf(kContext), BytesOf(kKey)) == sealed);
  }
  /// As description.h says.
  static std::string SealOf(absl::string_view body) {
    std::string all = "kvmanager ucx memory 1\0"s;
    for (size_t i = 0; i < 8; ++i) all.push_back(static_cast<char>(uint64_t{kContext.size()} >> (8 * i)));
    absl::StrAppend(&all, kContext, body);
    std::string seal(ucx::kSealBytes, '\0');
    KV_CHECK(HMAC(EVP_sha256(), kKey.data(), int(kKey.size()), BytesOf(all).data(), all.size(),
                  reinterpret_cast<uint8_t*>(seal.data()), nullptr) != nullptr);
    return seal;
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakePluginTarget() { return std::make_unique<PluginTarget>(); }
std::unique_ptr<FuzzTarget> MakeUcxTarget() { return std::make_unique<UcxTarget>(); }

}  // namespace kvmanager::fuzz
