#include "kvmanager/rpc/session.h"

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

Session::~Session() { KV_CHECK(sequences_.empty()); }

absl::Status Session::CheckNewSequence() const {
  if (parts_.drain->on()) return absl::UnavailableError("this daemon is draining: it accepts no new sequences");
  return CheckRoomForSequence();
}

absl::Status Session::CheckRoomForSequence() const {
  if (sequences_.size() < limits::kSequencesMax) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "sequences of this connection",
                    absl::StrCat(sequences_.size()), absl::StrCat("below ", limits::kSequencesMax));
}

void Session::Hold(SequenceId sequence, CacheId cache) {
  sequences_.emplace(sequence, cache);
  parts_.held->Hold(sequence, this);
}

void Session::Release(SequenceId sequence) {
  KV_CHECK(sequences_.erase(sequence) == 1);
  parts_.held->Release(sequence);
  for (const auto& [ordinal, work] : device_works_) work->Forget(sequence);
  for (const auto& [ordinal, process] : process_steps_) process->Forget(sequence);
  parts_.store->Drop(sequence);
}

absl::Status Session::ReserveArena(uint64_t bytes) {
  if (bytes == 0 || bytes % limits::kArenaBytesStep != 0 || bytes > limits::kArenaBytesMax) {
    return InvalidField("bytes", bytes,
                        absl::StrCat("a multiple of ", limits::kArenaBytesStep, ", at most ", limits::kArenaBytesMax));
  }
  if (arenas_reserved_ >= limits::kArenasMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arenas of this connection", absl::StrCat(arenas_reserved_),
                      absl::StrCat("below ", limits::kArenasMax));
  }
  if (arena_bytes_ + bytes > limits::kArenaBytesTotalMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of this connection",
                      absl::StrCat(arena_bytes_ + bytes), absl::StrCat("at most ", limits::kArenaBytesTotalMax));
  }
  KV_RETURN_IF_ERROR(parts_.arenas->Reserve(bytes));
  ++arenas_reserved_;
  arena_bytes_ += bytes;
  return absl::OkStatus();
}

void Session::UnreserveArena(uint64_t bytes) {
  --arenas_reserved_;
  arena_bytes_ -= bytes;
  parts_.arenas->GiveBack(bytes);
}

uint32_t Session::AddArena(std::shared_ptr<Region> region) {
  const uint32_t id = next_arena_++;
  arenas_.emplace(id, std::move(region));
  return id;
}

void Session::RemoveArena(uint32_t id) { arenas_.erase(id); }

uint32_t Session::AddDeviceArena(std::shared_ptr<DeviceArena> arena) {
  const uint32_t id = next_arena_++;
  device_arenas_.emplace(id, std::move(arena));
  return id;
}

void Session::RemoveDeviceArena(uint32_t id) {
  const auto found = device_arenas_.find(id);
  if (found == device_arenas_.end()) return;
  std::shared_ptr<DeviceArena> arena = std::move(found->second);
  device_arenas_.erase(found);
  if (const auto stream = DeviceStreamOf(arena->ordinal()); stream != nullptr) stream->Keep(std::move(arena));
}

std::shared_ptr<DeviceStream> Session::DeviceStreamOf(int ordinal) const {
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) return nullptr;
  std::shared_ptr<DeviceStream> stream = found->second.stream.lock();
  return stream == nullptr || stream->closed() ? nullptr : stream;
}

void Session::SetDeviceStream(Gpu* gpu, const std::shared_ptr<DeviceStream>& stream) {
  devices_[gpu->ordinal()] = {gpu, stream};
}

void Session::CloseDeviceStream(DeviceStream* stream) {
  if (stream->closed()) return;
  const int ordinal = stream->ordinal();
  for (const auto& [id, arena] : device_arenas_) {
    if (arena->ordinal() == ordinal) stream->Keep(arena);
  }
  if (const auto process = process_steps_.find(ordinal); process != process_steps_.end()) {
    process->second->Close();
    process_steps_.erase(process);
  }
  if (const auto work = device_works_.find(ordinal); work != device_works_.end()) {
    stream->Keep(std::move(work->second));
    device_works_.erase(work);
  }
  stream->Close();
}

absl::StatusOr<std::shared_ptr<DeviceWork>> Session::DeviceWorkOf(int ordinal) {
  if (const auto found = device_works_.find(ordinal); found != device_works_.end()) return found->second;
  std::shared_ptr<DeviceStream> stream = DeviceStreamOf(ordinal);
  if (stream == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(ordinal),
                      "a GPU that this connection opened (openDevice)");
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<DeviceWork> work,
                      DeviceWork::Create(parts_.device_work, devices_.at(ordinal).gpu, std::move(stream)));
  device_works_[ordinal] = work;
  return work;
}

std::shared_ptr<ProcessSteps> Session::FindProcessSteps(int ordinal) const {
  const auto found = process_steps_.find(ordinal);
  return found == process_steps_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<ProcessSteps>> Session::ProcessStepsOf(int ordinal) {
  if (auto found = FindProcessSteps(ordinal); found != nullptr) return found;
  const std::shared_ptr<DeviceStream> stream = DeviceStreamOf(ordinal);
  if (stream == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(ordinal),
                      "a GPU that this connection opened (openDevice)");
  }
  KV_ASSIGN_OR_RETURN(
      std::shared_ptr<ProcessSteps> process,
      ProcessSteps::Create(parts_.process_steps, devices_.at(ordinal).gpu, stream->shared_words(), pid_));
  process_steps_[ordinal] = process;
  return process;
}

std::shared_ptr<const BoundCache> Session::Bind(std::shared_ptr<const BoundCache> cache) {
  const CacheId id = cache->cache.id;
  absl::erase_if(bound_, [](const auto& entry) { return entry.second.expired(); });
  const auto [entry, first] = bound_.emplace(id, cache);
  return first ? cache : entry->second.lock();
}

void WriteHeldSequence(const HeldSequences& held, const SequenceInfo& info, api::SequenceInfo::Builder out) {
  WriteSequenceInfo(info, out);
  const Session* const holder = held.HolderOf(info.sequence);
  if (holder == nullptr) return;  // a received one that waits for its claim
  out.setClient(TextOf(holder->name()));
  out.setPid(holder->pid());
}

}  // namespace kvmanager
