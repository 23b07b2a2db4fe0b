// Clients and their arenas.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/c/describe.h"
#include "client/c/object.h"

namespace kvmanager::client::c {
namespace {

// DLPack's structs (dmlc/dlpack, dlpack.h, versions 0.x and 1.0), whose layout is an ABI of its own.
struct DlTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t dimensions;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};
struct DlManagedVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};
constexpr int32_t kDlCpu = 1, kDlCuda = 2;
constexpr int32_t kDimensionsMax = 8;

/// A tensor that others hold: it keeps its memory. Deleted by whoever holds it last, on any thread.
template <typename Managed>
struct Exported {
  Managed managed{};
  int64_t shape[kDimensionsMax], strides[kDimensionsMax];
  Mapping* mapping = nullptr;

  static void Delete(Managed* managed) {
    auto* exported = static_cast<Exported*>(managed->context);
    exported->mapping->Unref();
    delete exported;
  }
};

template <typename Managed>
Managed* Export(Mapping* mapping, uint64_t offset, const int64_t* shape, int32_t dimensions, uint8_t code,
                uint8_t bits) {
  auto* exported = new Exported<Managed>;
  mapping->Ref();
  exported->mapping = mapping;
  int64_t stride = 1;
  for (int32_t i = dimensions; i-- > 0;) {
    exported->shape[i] = shape[i];
    exported->strides[i] = stride;
    stride *= shape[i];
  }
  Managed& managed = exported->managed;
  managed.context = exported;
  managed.deleter = &Exported<Managed>::Delete;
  DlTensor& tensor = managed.tensor;
  tensor.data = mapping->data() + offset;
  tensor.device.type = mapping->on_device() ? kDlCuda : kDlCpu;
  tensor.device.id = mapping->on_device() ? mapping->ordinal() : 0;
  tensor.dimensions = dimensions;
  tensor.dtype.code = code;
  tensor.dtype.bits = bits;
  tensor.dtype.lanes = 1;
  tensor.shape = exported->shape;
  tensor.strides = exported->strides;
  return &managed;
}

absl::Status CheckShape(const Mapping& mapping, uint64_t offset, const int64_t* shape, int32_t dimensions,
                        uint8_t bits) {
  if (dimensions < 0 || dimensions > kDimensionsMax) {
    return InvalidField("dimensions", dimensions, absl::StrCat("0..", kDimensionsMax));
  }
  if (bits == 0 || bits % 8 != 0) return InvalidField("bits", int(bits), "a multiple of 8");
  uint64_t bytes = bits / 8;
  for (int32_t i = 0; i < dimensions; ++i) {
    if (shape[i] < 0) return InvalidField("shape", shape[i], "at least 0");
    if (__builtin_mul_overflow(bytes, uint64_t(shape[i]), &bytes)) bytes = UINT64_MAX;
    if (bytes == UINT64_MAX) break;
  }
  if (offset > mapping.bytes() || bytes > mapping.bytes() - offset) {
    return InvalidField("shape", absl::StrCat(bytes, " bytes at offset ", offset),
                        absl::StrCat("inside the arena's ", mapping.bytes(), " bytes"));
  }
  return absl::OkStatus();
}

// Python's capsules: named by what they hold until somebody has taken it.
int (*capsule_is_valid)(void*, const char*) = nullptr;
void* (*capsule_get_pointer)(void*, const char*) = nullptr;

void DestroyCapsule(void* capsule) {
  if (capsule_is_valid(capsule, "dltensor")) {
    auto* managed = static_cast<DlManaged*>(capsule_get_pointer(capsule, "dltensor"));
    managed->deleter(managed);
  } else if (capsule_is_valid(capsule, "dltensor_versioned")) {
    auto* managed = static_cast<DlManagedVersioned*>(capsule_get_pointer(capsule, "dltensor_versioned"));
    managed->deleter(managed);
  }
}

int LeaveHello(const Client& client) {
  return Leave(Text({{"boot_epoch", client.boot_epoch()}, {"peer_address", client.peer_address()}}));
}

template <typename F>
int Ask(kvm_object* client, F f) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(ClientObject * object, Use<ClientObject>(client));
    return f(*object->handle);
  });
}

absl::Status CheckCacheId(int64_t cache_id) {
  if (cache_id >= 0 && cache_id <= UINT32_MAX) return absl::OkStatus();
  return kvmanager::InvalidField("cache_id", cache_id, absl::StrCat("0..", UINT32_MAX));
}

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager::client;     // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_connect(const char* address, size_t address_bytes, const char* options, size_t options_bytes,
                kvm_object** client) {
  *client = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(const Client::Options parsed, ParseClientOptions({options, options_bytes}));
    const auto session = std::make_shared<Session>();  // shared by what is made through this client
    session->owner = Owner::OfThisThread();
    KV_RETURN_IF_ERROR(session->owner->Enter());
    KV_ASSIGN_OR_RETURN(auto made, Client::Connect({address, address_bytes}, parsed));
    KV_RETURN_IF_ERROR(session->owner->Hold());
    LeaveHello(*made);
    *client = new ClientObject(session, std::move(made));
    return absl::OkStatus();
  });
}

int kvm_reconnect(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_RETURN_IF_ERROR(handle.Reconnect());
    LeaveHello(handle);
    return absl::OkStatus();
  });
}

int kvm_connected(kvm_object* client, int* connected) {
  *connected = 0;
  return Ask(client, [&](Client& handle) {
    *connected = handle.connected();
    return absl::OkStatus();
  });
}

int kvm_ping(kvm_object* client) {
  return Ask(client, [](Client& handle) { return handle.Ping(); });
}

int kvm_status(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const DaemonDescription status, handle.Status());
    Leave(Text(Describe(status)));
    return absl::OkStatus();
  });
}

int kvm_caches(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto caches, handle.Caches());
    Leave(Text(DescribeAll(caches)));
    return absl::OkStatus();
  });
}

int kvm_sequences(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto sequences, handle.Sequences());
    Leave(Text(DescribeAll(sequences)));
    return absl::OkStatus();
  });
}

int kvm_peers(kvm_object* client, const char* peers, size_t peers_bytes) {
  return Ask(client, [&](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto named, ParseStrings("peers", {peers, peers_bytes}));
    KV_ASSIGN_OR_RETURN(const auto found, handle.Peers(named));
    Leave(Text(DescribeAll(found)));
    return absl::OkStatus();
  });
}

int kvm_recompute(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto recompute, handle.Recompute());
    Leave(Text(Describe(recompute)));
    return absl::OkStatus();
  });
}

int kvm_limits(kvm_object* client) {
  return Ask(client, [](Client& handle) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto limits, handle.Limits());
    Leave(Text(DescribeAll(limits)));
    return absl::OkStatus();
  });
}

int kvm_explain(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks) {
  return Ask(client, [&](Client& handle) -> absl::Status {
    if (cache_id < 0 || cache_id > UINT32_MAX) {
      return kvmanager::InvalidField("cache_id", cache_id, absl::StrCat("0..", UINT32_MAX));
    }
    KV_ASSIGN_OR_RETURN(const auto explanation,
                        handle.Explain(static_cast<uint32_t>(cache_id),
                                       {reinterpret_cast<const kvmanager::BlockName*>(names), blocks}));
    Leave(Text(Describe(explanation)));
    return absl::OkStatus();
  });
}

int kvm_prefetch_in_cache(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks,
                          kvm_match_result* result) {
  return Ask(client, [&](Client& handle) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckCacheId(cache_id));
    KV_ASSIGN_OR_RETURN(const auto match,
                        handle.Prefetch(static_cast<uint32_t>(cache_id),
                                        {reinterpret_cast<const kvmanager::BlockName*>(names), blocks}));
    *result = ResultOf(match);
    return absl::OkStatus();
  });
}

int kvm_retain_in_cache(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks, int32_t priority,
                        int64_t ttl_ms, uint64_t* values) {
  return Ask(client, [&](Client& handle) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckCacheId(cache_id));
    KV_ASSIGN_OR_RETURN(
        const auto outcome,
        handle.Retain(static_cast<uint32_t>(cache_id), {reinterpret_cast<const kvmanager::BlockName*>(names), blocks},
                      {.priority = priority, .ttl_ms = ttl_ms}));
    values[0] = outcome.blocks;
    values[1] = outcome.bytes;
    values[2] = 0;
    return absl::OkStatus();
  });
}

int kvm_drain(kvm_object* client, int on) {
  return Ask(client, [on](Client& handle) { return handle.Drain(on != 0); });
}

int kvm_purge(kvm_object* client, int64_t cache_id, uint64_t* blocks) {
  *blocks = 0;
  return Ask(client, [&](Client& handle) -> absl::Status {
    constexpr int64_t kIdMax = int64_t{Client::kAllCaches} - 1;
    if (cache_id < -1 || cache_id > kIdMax) {
      return kvmanager::InvalidField("cache_id", cache_id, absl::StrCat("0..", kIdMax, ", or -1 for all"));
    }
    KV_ASSIGN_OR_RETURN(*blocks, handle.Purge(cache_id < 0 ? Client::kAllCaches : uint32_t(cache_id)));
    return absl::OkStatus();
  });
}

int kvm_wait_for_news(kvm_object* client) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(ClientObject * object, Use<ClientObject>(client));
    return object->session->owner->WaitForNews();
  });
}

void kvm_wake(kvm_object* client) { client->session->owner->Wake(); }

int kvm_create_arena(kvm_object* client, uint64_t bytes, kvm_object** arena, void** data, uint64_t* arena_bytes) {
  *arena = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(ClientObject * object, Use<ClientObject>(client));
    KV_ASSIGN_OR_RETURN(auto made, object->handle->CreateArena(bytes));
    KV_ASSIGN_OR_RETURN(Mapping* const mapping, Mapping::Of(made->data()));
    *data = mapping->data();
    *arena_bytes = mapping->bytes();
    *arena = new ArenaObject(object->session, std::move(made), mapping);
    return absl::OkStatus();
  });
}

int kvm_dlpack(kvm_object* arena, uint64_t offset, const int64_t* shape, int32_t dimensions, uint8_t code, uint8_t bits,
               int versioned, void** managed) {
  *managed = nullptr;
  return Guard([&]() -> absl::Status {
    if (arena == nullptr || arena->kind != Kind::kArena) return kvmanager::InvalidField("object", "another", "arena");
    Mapping* const mapping = static_cast<ArenaObject*>(arena)->mapping;
    KV_RETURN_IF_ERROR(CheckShape(*mapping, offset, shape, dimensions, bits));
    if (versioned) {
      auto* made = Export<DlManagedVersioned>(mapping, offset, shape, dimensions, code, bits);
      made->major = 1;
      *managed = made;
    } else {
      *managed = Export<DlManaged>(mapping, offset, shape, dimensions, code, bits);
    }
    return absl::OkStatus();
  });
}

void* kvm_capsule_destructor(void* is_valid, void* get_pointer) {
  capsule_is_valid = reinterpret_cast<int (*)(void*, const char*)>(is_valid);
  capsule_get_pointer = reinterpret_cast<void* (*)(void*, const char*)>(get_pointer);
  return reinterpret_cast<void*>(&DestroyCapsule);
}

}  // extern "C"
