// GPUs of the daemon, and attention in this process.
#include "client/device.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/c/describe.h"
#include "client/c/object.h"
#include "client/in_process.h"

namespace kvmanager::client::c {
namespace {

/// A run, and what its codec was made from. Uses its device and its cache, which close it before they go.
struct RunObject final : kvm_object {
  static constexpr Kind kKind = Kind::kRun;
  RunObject(DeviceObject* of, CacheObject* on) : kvm_object(kKind, of->session), device(of), cache(on) {}
  void Drop() override { run.reset(); }

  DeviceObject* const device;
  CacheObject* const cache;
  std::optional<LocalCodecs> codecs;
  std::unique_ptr<InProcess> run;
};

template <typename Of, typename F>
int Ask(kvm_object* object, F f) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(Of * used, Use<Of>(object));
    return f(*used);
  });
}

CUstream_st* StreamOf(void* stream) { return static_cast<CUstream_st*>(stream); }

}  // namespace

void CloseRunsOf(const kvm_object& object) {
  std::vector<kvm_object*> runs;
  for (kvm_object* each : object.session->live) {
    if (each->kind != Kind::kRun) continue;
    const auto* run = static_cast<const RunObject*>(each);
    if (run->device == &object || run->cache == &object) runs.push_back(each);
  }
  for (kvm_object* run : runs) run->Close();
}

}  // namespace kvmanager::client::c

using namespace kvmanager::client;     // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_open_device(kvm_object* client, int32_t ordinal, kvm_object** device) {
  *device = nullptr;
  return Ask<ClientObject>(client, [&](ClientObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(auto made, DeviceClient::Open(object.handle.get(), ordinal));
    const DeviceDescription& description = made->description();
    const absl::string_view uuid(reinterpret_cast<const char*>(description.uuid.data()), description.uuid.size());
    Leave(Text({{"ordinal", description.ordinal},
                {"here", made->device().info().ordinal},
                {"uuid", Hex(uuid)},
                {"name", description.name},
                {"pool_bytes", description.pool_bytes},
                {"slab_bytes", description.slab_bytes},
                {"slabs", description.slabs}}));
    *device = new DeviceObject(object.session, std::move(made));
    return absl::OkStatus();
  });
}

int kvm_create_device_arena(kvm_object* device, uint64_t bytes, kvm_object** arena, void** data,
                            uint64_t* arena_bytes) {
  *arena = nullptr;
  return Ask<DeviceObject>(device, [&](DeviceObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(auto made, object.handle->CreateArena(bytes));
    Mapping* const mapping = Mapping::OfDevice(made->data(), object.handle->device().info().ordinal);
    *data = mapping->data();
    *arena_bytes = mapping->bytes();
    *arena = new ArenaObject(object.session, std::move(made), mapping);
    return absl::OkStatus();
  });
}

int kvm_enqueue_ready(kvm_object* device, void* stream, uint64_t value) {
  return Ask<DeviceObject>(device,
                           [&](DeviceObject& object) { return object.handle->EnqueueReady(StreamOf(stream), value); });
}

int kvm_enqueue_wait_done(kvm_object* device, void* stream, uint64_t value) {
  return Ask<DeviceObject>(
      device, [&](DeviceObject& object) { return object.handle->EnqueueWaitDone(StreamOf(stream), value); });
}

int kvm_device_lost(kvm_object* device, int* lost) {
  *lost = 0;
  return Ask<DeviceObject>(device, [&](DeviceObject& object) {
    *lost = object.handle->lost();
    return absl::OkStatus();
  });
}

int kvm_device_copy(kvm_object* device, const void* from, void* to, uint64_t bytes, uint64_t ready, uint64_t* done) {
  return Ask<DeviceObject>(device, [&](DeviceObject& object) -> absl::Status {
    const Session& session = *object.session;
    KV_ASSIGN_OR_RETURN(*done, object.handle->Copy(ViewOf(session, {const_cast<void*>(from), bytes}),
                                                   ViewOf(session, {to, bytes}), ready));
    return absl::OkStatus();
  });
}

void kvm_allow_many_streams(void) { kvmanager::AllowManyStreams(); }

int kvm_create_run(kvm_object* device, kvm_object* cache, const char* calibration_dir, size_t calibration_dir_bytes,
                   const kvm_run_options* options, kvm_object** run) {
  *run = nullptr;
  return Ask<DeviceObject>(device, [&](DeviceObject& of) -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * on, Use<CacheObject>(cache));
    if (of.session != on->session) {
      return kvmanager::FieldError(absl::StatusCode::kFailedPrecondition, "cache", "of another client",
                                   "of the device's own");
    }
    auto made = std::make_unique<RunObject>(&of, on);
    made->codecs.emplace(std::string(calibration_dir, calibration_dir_bytes));
    KV_ASSIGN_OR_RETURN(auto codec, made->codecs->Create(on->handle->description().options));
    InProcess::Options chosen;
    chosen.stream = StreamOf(options->stream);
    chosen.encode_here = options->encode_here != 0;
    chosen.sequences_max = options->sequences_max;
    chosen.tokens_max = options->tokens_max;
    chosen.pages_max = options->pages_max;
    KV_ASSIGN_OR_RETURN(made->run, InProcess::Create(of.handle.get(), on->handle.get(), std::move(codec), chosen));
    *run = made.release();
    return absl::OkStatus();
  });
}

int kvm_run_begin(kvm_object* run, const kvm_entry* entries, uint32_t entry_count, int append, int attend) {
  const int asked = kvm_run_ask(run, entries, entry_count, append, attend);
  return asked != 0 ? asked : kvm_run_start(run);
}

int kvm_run_ask(kvm_object* run, const kvm_entry* entries, uint32_t entry_count, int append, int attend) {
  return Ask<RunObject>(run, [&](RunObject& object) -> absl::Status {
    std::vector<StepEntry> read;
    KV_RETURN_IF_ERROR(ReadEntries(entries, entry_count, &read));
    return object.run->Ask(read, append != 0, attend != 0);
  });
}

int kvm_run_start(kvm_object* run) {
  return Ask<RunObject>(run, [](RunObject& object) { return object.run->Start(); });
}

int kvm_run_append(kvm_object* run, int32_t layer, const void* k, const void* v) {
  return Ask<RunObject>(run, [&](RunObject& object) { return object.run->Append(layer, k, v); });
}

int kvm_run_attend(kvm_object* run, int32_t layer, const void* q, void* out, void* lse) {
  return Ask<RunObject>(run,
                        [&](RunObject& object) { return object.run->Attend(layer, q, out, static_cast<float*>(lse)); });
}

int kvm_run_end(kvm_object* run) {
  return Ask<RunObject>(run, [](RunObject& object) { return object.run->End(); });
}

int kvm_run_launches(kvm_object* run, uint64_t* launches) {
  return Ask<RunObject>(run, [&](RunObject& object) {
    *launches = object.run->launches();
    return absl::OkStatus();
  });
}

int kvm_run_after(kvm_object* run, kvm_object* sequence) {
  return Ask<RunObject>(run, [&](RunObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(SequenceObject * of, Use<SequenceObject>(sequence));
    return object.run->After(*of->handle);
  });
}

int kvm_run_forget(kvm_object* run, uint64_t sequence) {
  return Ask<RunObject>(run, [&](RunObject& object) {
    object.run->Forget(sequence);
    return absl::OkStatus();
  });
}

}  // extern "C"
