#include "codecs/abi/plugin_host.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "codecs/abi/codec_plugin.h"
#include "codecs/abi/confinement.h"
#include "codecs/abi/local_entries.h"
#include "codecs/abi/passed_context.h"
#include "codecs/abi/plugin_wire.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using plugin::Answer;
using plugin::Call;
using plugin::CallType;

/// A codec that was made, and the scratch that its calls need.
struct HostCodec {
  ~HostCodec() { plugin->api().destroy(codec); }
  std::shared_ptr<const CodecPlugin> plugin;
  kvmc_codec* codec = nullptr;
  RawDescription description;
  size_t head_dim = 0;
  size_t encode_bytes = 0, decode_bytes = 0;
  std::array<size_t, KVMC_ROWS_MAX + 1> attend_bytes{};
};

/// What all lanes share.
struct Host {
  std::atomic<const CodecPlugin*> plugin{nullptr};  // set before the first call
  std::shared_ptr<const CodecPlugin> owner;
  Mutex mutex;
  std::map<uint64_t, std::shared_ptr<const HostCodec>> codecs ABSL_GUARDED_BY(mutex);

  std::shared_ptr<const HostCodec> Find(uint64_t codec) {
    MutexLock lock(mutex);
    const auto found = codecs.find(codec);
    return found == codecs.end() ? nullptr : found->second;
  }
};

/// One lane: its socket and memory, and a thread's scratch.
class HostLane {
 public:
  HostLane(Host* host, int socket, uint8_t* memory) : host_(host), socket_(socket), memory_(memory) {}

  void Serve() {
    for (;;) {
      Call call;
      int fd = -1;
      if (!Receive(&call, &fd)) ::_exit(0);
      const absl::Status status = Do(call, fd);
      if (fd >= 0) ::close(fd);
      Reply(call, status);
    }
  }

 private:
  bool Receive(Call* call, int* fd) const {
    const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(call), sizeof *call);
    return ReceiveWithDescriptor(socket_, bytes, fd, /*flags=*/0) == static_cast<ssize_t>(sizeof *call);
  }

  void Reply(const Call& call, const absl::Status& status) const {
    char bytes[sizeof(Answer) + plugin::kTextBytesMax];
    const Answer answer = {call.number, StatusCode(status)};
    const size_t text = std::min(status.message().size(), plugin::kTextBytesMax);
    std::memcpy(bytes, &answer, sizeof answer);
    if (text > 0) std::memcpy(bytes + sizeof answer, status.message().data(), text);
    if (::send(socket_, bytes, sizeof answer + text, MSG_NOSIGNAL) < 0) ::_exit(1);
  }
  static kvmc_status StatusCode(const absl::Status& status) {
    switch (status.code()) {
      case absl::StatusCode::kOk:
        return KVMC_OK;
      case absl::StatusCode::kInvalidArgument:
        return KVMC_INVALID_ARGUMENT;
      case absl::StatusCode::kFailedPrecondition:
        return KVMC_FAILED_PRECONDITION;
      case absl::StatusCode::kDataLoss:
        return KVMC_DATA_LOSS;
      case absl::StatusCode::kUnavailable:
        return KVMC_UNAVAILABLE;
      default:
        return KVMC_INTERNAL;
    }
  }

  /// An error's message is the plug-in's text alone.
  absl::Status Do(const Call& call, int fd) {
    const CodecPlugin& plugin = *host_->plugin.load(std::memory_order_acquire);
    if (call.type == CallType::kMake) return Make(plugin, call, fd);
    if (call.type == CallType::kDrop) {
      std::shared_ptr<const HostCodec> dropped;  // destroyed outside the lock
      MutexLock lock(host_->mutex);
      if (const auto found = host_->codecs.find(call.codec); found != host_->codecs.end()) {
        dropped = std::move(found->second);
        host_->codecs.erase(found);
      }
      return absl::OkStatus();
    }
    if (codec_ == nullptr || codec_number_ != call.codec) {
      codec_ = host_->Find(call.codec);
      codec_number_ = call.codec;
    }
    if (codec_ == nullptr) return absl::InternalError("the process has no such codec");
    const kvmc_status status = Run(plugin.api(), *codec_, call);
    return status == KVMC_OK ? absl::OkStatus() : Said(plugin, status);
  }

  static absl::Status Said(const CodecPlugin& plugin, kvmc_status status) {
    const std::string text = plugin.LastError();
    return absl::Status(PluginStatus(status, "", "", "", "").code(),
                        text.empty() ? absl::StrCat("error ", status) : text);
  }

  /// Scratch of at least so many bytes.
  uint8_t* Scratch(size_t bytes) {
    if (scratch_.size() < std::max<size_t>(bytes, 1)) scratch_ = AlignedBuffer(std::max<size_t>(bytes, 1));
    return scratch_.data();
  }

  kvmc_status Run(const kvmc_codec_api& api, const HostCodec& made, const Call& call) {
    switch (call.type) {
      case CallType::kEncode:
        return Encode(api, made, call);
      case CallType::kDecode:
        return Decode(api, made);
      case CallType::kAttend:
        return Attend(api, made, call);
      case CallType::kMapQueries:
        return Map(api.map_queries, made, call);
      case CallType::kExpandOutput:
        return Map(api.expand_output, made, call);
      case CallType::kProjectOutput:
        return Map(api.project_output, made, call);
      case CallType::kOutputFactor:
        return api.output_factor(made.codec, call.layer, call.kv_head, reinterpret_cast<float*>(memory_));
      case CallType::kValidate:
        return api.validate(made.codec, call.layer, memory_, call.bytes);
      case CallType::kMake:
      case CallType::kDrop:
        break;
    }
    return KVMC_INTERNAL;
  }

  kvmc_status Encode(const kvmc_codec_api& api, const HostCodec& made, const Call& call) {
    std::array<kvmc_encode_item, plugin::kEncodeSlotsMax> items;
    auto* const slots = reinterpret_cast<plugin::EncodeSlot*>(memory_);
    for (uint32_t i = 0; i < call.count; ++i) {
      items[i] = {memory_ + slots[i].raw_at, memory_ + slots[i].encoded_at, slots[i].layer, 0, slots[i].first_token};
    }
    auto batch = SizedStruct<kvmc_encode_batch>();
    batch.items = items.data();
    batch.item_count = call.count;
    batch.item_bytes = sizeof items[0];
    batch.workspace = Scratch(made.encode_bytes);
    batch.workspace_bytes = made.encode_bytes;
    const kvmc_status status = api.encode_batch(made.codec, &batch);
    for (uint32_t i = 0; i < call.count; ++i) slots[i].declined = items[i].declined;
    return status;
  }

  kvmc_status Decode(const kvmc_codec_api& api, const HostCodec& made) {
    plugin::DecodeSlot slot;
    std::memcpy(&slot, memory_, sizeof slot);
    const kvmc_decode_item item = {memory_ + slot.encoded_at, memory_ + slot.raw_at, slot.layer, slot.first_head,
                                   slot.head_count};
    auto batch = SizedStruct<kvmc_decode_batch>();
    batch.items = &item;
    batch.item_count = 1;
    batch.item_bytes = sizeof item;
    batch.workspace = Scratch(made.decode_bytes);
    batch.workspace_bytes = made.decode_bytes;
    return api.decode_batch(made.codec, &batch);
  }

  kvmc_status Attend(const kvmc_codec_api& api, const HostCodec& made, const Call& call) {
    const plugin::AttendPlaces places(made.head_dim);
    pages_.clear();
    for (uint32_t i = 0; i < call.count; ++i) pages_.push_back(memory_ + places.pages_at + i * call.stride);
    const auto floats = [&](size_t at) { return reinterpret_cast<float*>(memory_ + at); };
    kvmc_attend_item item = {};
    item.q = floats(places.q_at);
    item.rows = call.rows;
    item.layer = call.layer;
    item.kv_head = call.kv_head;
    item.scale = call.scale;
    item.pages = pages_.data();
    item.page_count = pages_.size();
    item.max = floats(places.max_at);
    item.sum = floats(places.sum_at);
    item.acc = floats(places.acc_at);
    auto batch = SizedStruct<kvmc_attend_batch>();
    batch.items = &item;
    batch.item_count = 1;
    batch.item_bytes = sizeof item;
    batch.workspace = Scratch(made.attend_bytes[call.rows]);
    batch.workspace_bytes = made.attend_bytes[call.rows];
    return api.attend_batch(made.codec, &batch);
  }

  kvmc_status Map(kvmc_status (*map)(const kvmc_codec*, const kvmc_map_item*), const HostCodec& made,
                  const Call& call) const {
    auto item = SizedStruct<kvmc_map_item>();
    item.from = reinterpret_cast<const float*>(memory_);
    item.to = reinterpret_cast<float*>(memory_ + plugin::MapToAt(made.head_dim));
    item.rows = call.rows;
    item.layer = call.layer;
    item.kv_head = call.kv_head;
    return map(made.codec, &item);
  }

  absl::Status Make(const CodecPlugin& plugin, const Call& call, int fd) {
    std::shared_ptr<const HostCodec> made = host_->Find(call.codec);
    if (made == nullptr) {
      KV_ASSIGN_OR_RETURN(made, MakeNew(plugin, call, fd));
      MutexLock lock(host_->mutex);
      made = host_->codecs.emplace(call.codec, std::move(made)).first->second;  // another lane may have been faster
    }
    const RawDescription& said = made->description;
    plugin::DescriptionHead head;
    head.version = said.version;
    head.flags = said.flags;
    head.payload_bytes = said.payload_bytes;
    std::copy(said.parameters.begin(), said.parameters.end(), head.parameters);
    const size_t layer_bytes = said.bytes_of_layer.size() * sizeof(uint32_t);
    std::memcpy(memory_, &head, sizeof head);
    std::memcpy(memory_ + sizeof head, said.bytes_of_layer.data(), layer_bytes);
    std::memcpy(memory_ + sizeof head + layer_bytes, said.layer_flags.data(), layer_bytes);
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const HostCodec>> MakeNew(const CodecPlugin& plugin, const Call& call, int fd) {
    plugin::MakeHead head;
    std::memcpy(&head, memory_, sizeof head);
    std::vector<std::string> texts;
    for (const char* at = reinterpret_cast<const char*>(memory_ + sizeof head); texts.size() < 2 * head.parameters;
         at += texts.back().size() + 1) {
      texts.emplace_back(at);
    }
    std::vector<kvmc_parameter> parameters;
    for (size_t i = 0; i < head.parameters; ++i) parameters.push_back({texts[2 * i].c_str(), texts[2 * i + 1].c_str()});
    auto context = SizedStruct<kvmc_context>();
    context.dtype = head.dtype;
    context.kv_heads = head.kv_heads;
    context.head_dim = head.head_dim;
    context.page_tokens = head.page_tokens;
    context.layers = head.layers;
    context.query_heads = head.query_heads;
    context.parameters = parameters.data();
    context.parameter_count = parameters.size();
    context.parameter_item_bytes = sizeof(kvmc_parameter);
    if (call.bytes == 0) return MakeOf(plugin, context);
    void* const artifact = ::mmap(nullptr, call.bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (artifact == MAP_FAILED) return absl::InternalError("no address space is left for the artifact");
    context.calibration = static_cast<const uint8_t*>(artifact);
    context.calibration_bytes = call.bytes;
    auto made = MakeOf(plugin, context);
    ::munmap(artifact, call.bytes);
    return made;
  }

  static absl::StatusOr<std::shared_ptr<const HostCodec>> MakeOf(const CodecPlugin& plugin,
                                                                 const kvmc_context& context) {
    RawDescription description;
    const auto texted = [&](const absl::Status& status) {
      const std::string text = plugin.LastError();
      return text.empty() ? status : absl::Status(status.code(), text);
    };
    if (const absl::Status status = DescribeCodec(plugin, context, &description); !status.ok()) return texted(status);
    kvmc_codec* codec = nullptr;
    if (const kvmc_status status = plugin.api().create(&context, &codec); status != KVMC_OK) {
      return Said(plugin, status);
    }
    auto made = std::make_shared<HostCodec>();
    made->plugin = std::shared_ptr<const CodecPlugin>(std::shared_ptr<void>(), &plugin);  // never unloaded
    made->codec = codec;
    made->description = std::move(description);
    made->head_dim = context.head_dim;
    const auto ask = [&](uint32_t purpose, uint32_t rows, size_t* bytes) {
      *bytes = plugin.api().workspace_bytes(codec, purpose, rows);
      if (*bytes <= CodecEntries::kWorkspaceBytesMax) return absl::OkStatus();
      return InvalidField(absl::StrCat("workspace_bytes(", purpose, ", ", rows, ")"), *bytes,
                          absl::StrCat("at most ", CodecEntries::kWorkspaceBytesMax));
    };
    KV_RETURN_IF_ERROR(ask(KVMC_FOR_ENCODE, 0, &made->encode_bytes));
    KV_RETURN_IF_ERROR(ask(KVMC_FOR_DECODE, 0, &made->decode_bytes));
    if ((made->description.flags & KVMC_ATTENDS) == 0) return made;
    for (uint32_t rows = 1; rows <= KVMC_ROWS_MAX; ++rows) {
      KV_RETURN_IF_ERROR(ask(KVMC_FOR_ATTEND, rows, &made->attend_bytes[rows]));
      made->attend_bytes[rows] = std::max(made->attend_bytes[rows], made->attend_bytes[rows - 1]);
    }
    return made;
  }

  Host* const host_;
  const int socket_;
  uint8_t* const memory_;
  AlignedBuffer scratch_;
  std::vector<const uint8_t*> pages_;
  uint64_t codec_number_ = 0;
  std::shared_ptr<const HostCodec> codec_;  // of the last call: shared with host_, which may drop it
};

bool StartThread(HostLane* lane, size_t stack_bytes) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, stack_bytes);
  pthread_t thread;
  const auto serve = [](void* of) -> void* {
    static_cast<HostLane*>(of)->Serve();
    return nullptr;
  };
  const bool started = pthread_create(&thread, &attributes, serve, lane) == 0;
  pthread_attr_destroy(&attributes);
  return started;
}

/// Sets the process up and loads the object.
absl::StatusOr<std::shared_ptr<const CodecPlugin>> Load(const plugin::SetUp& set_up, const std::string& path,
                                                        Host* host) {
  void* const memory =
      ::mmap(nullptr, set_up.lanes * set_up.lane_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, plugin::kMemoryFd, 0);
  if (memory == MAP_FAILED) return absl::UnavailableError("its process cannot map the memory of its lanes");
  for (uint32_t i = 0; i < set_up.lanes; ++i) {
    // For the process's life, as what they refer to.
    auto* const lane = new HostLane(host, plugin::kLaneFd + static_cast<int>(i),
                                    static_cast<uint8_t*>(memory) + i * set_up.lane_bytes);
    if (!StartThread(lane, set_up.thread_bytes)) return absl::UnavailableError("its process cannot start its threads");
  }
  KV_RETURN_IF_ERROR(ConfineToReading());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(path));
  KV_RETURN_IF_ERROR(ConfineToComputing());
  return plugin;
}

}  // namespace

int RunPluginHost() {
  plugin::SetUp set_up;
  char bytes[sizeof set_up + plugin::kPathBytesMax];
  const ssize_t n = ::recv(plugin::kControlFd, bytes, sizeof bytes, 0);
  if (n < static_cast<ssize_t>(sizeof set_up)) return 1;
  std::memcpy(&set_up, bytes, sizeof set_up);
  const std::string path(bytes + sizeof set_up, static_cast<size_t>(n) - sizeof set_up);
  LimitProcess(set_up.address_bytes);
  auto* const host = new Host;  // lanes refer to it until the process ends
  const absl::StatusOr<std::shared_ptr<const CodecPlugin>> loaded = Load(set_up, path, host);
  plugin::Ready ready;
  std::string text(loaded.status().message());
  ready.code = static_cast<uint32_t>(loaded.status().code());
  if (loaded.ok()) {
    host->owner = *loaded;
    host->plugin.store(host->owner.get(), std::memory_order_release);
    ready.status = KVMC_OK;
    const CodecPlugin& plugin = **loaded;
    std::memcpy(ready.name, plugin.name().data(), std::min(plugin.name().size(), sizeof ready.name - 1));
    const OptionalEntries has = plugin.optional_entries();
    ready.attend_batch = has.attend_batch;
    ready.map_queries = has.map_queries;
    ready.expand_output = has.expand_output;
    ready.project_output = has.project_output;
    ready.output_factor = has.output_factor;
    text = plugin.help();
  }
  std::string said(reinterpret_cast<const char*>(&ready), sizeof ready);
  said += text.substr(0, plugin::kTextBytesMax);
  if (::send(plugin::kControlFd, said.data(), said.size(), MSG_NOSIGNAL) < 0 || !loaded.ok()) ::_exit(1);
  while (::recv(plugin::kControlFd, bytes, sizeof bytes, 0) < 0 && errno == EINTR) {
  }
  ::_exit(0);
}

}  // namespace kvmanager
