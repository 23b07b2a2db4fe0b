#include "kvmanager/rpc/session.h"

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/gpu/device_work.h"
#include "kvmanager/gpu/process_steps.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

Session::~Session() { KV_CHECK(sequences_.empty()); }

absl::Status Session::CheckNewSequence() const {
  if (daemon_.draining) return absl::UnavailableError("this daemon is draining: it accepts no new sequences");
  return CheckRoomForSequence();
}

absl::Status Session::CheckRoomForSequence() const {
  if (sequences_.size() < limits::kSequencesMax) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "sequences of this connection",
                    absl::StrCat(sequences_.size()), absl::StrCat("below ", limits::kSequencesMax));
}

void Session::Hold(SequenceId sequence, CacheId cache) {
  sequences_.emplace(sequence, cache);
  daemon_.holders.emplace(sequence, this);
  daemon_.metrics->held_sequences.Set(double(++daemon_.held_sequences));
}

void Session::Release(SequenceId sequence) {
  KV_CHECK(sequences_.erase(sequence) == 1);
  daemon_.holders.erase(sequence);
  daemon_.metrics->held_sequences.Set(double(--daemon_.held_sequences));
  for (const auto& [ordinal, work] : device_works_) work->Forget(sequence);
  for (const auto& [ordinal, process] : in_processes_) process->Forget(sequence);
  daemon_.store->Drop(sequence);
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
  const uint64_t all_max = daemon_.options->arena_bytes;
  if (bytes > all_max || daemon_.arena_bytes > all_max - bytes) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of all connections",
                      absl::StrCat(daemon_.arena_bytes + bytes), absl::StrCat("at most ", all_max, " (--arena-bytes)"));
  }
  ++arenas_reserved_;
  arena_bytes_ += bytes;
  daemon_.arena_bytes += bytes;
  daemon_.metrics->arena_bytes.Increment(double(bytes));
  return absl::OkStatus();
}

void Session::UnreserveArena(uint64_t bytes) {
  --arenas_reserved_;
  arena_bytes_ -= bytes;
  daemon_.arena_bytes -= bytes;
  daemon_.metrics->arena_bytes.Decrement(double(bytes));
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
  const auto found = device_streams_.find(ordinal);
  if (found == device_streams_.end()) return nullptr;
  std::shared_ptr<DeviceStream> stream = found->second.lock();
  return stream == nullptr || stream->closed() ? nullptr : stream;
}

void Session::SetDeviceStream(const std::shared_ptr<DeviceStream>& stream) {
  device_streams_[stream->context().ordinal] = stream;
}

void Session::CloseDeviceStream(DeviceStream* stream) {
  if (stream->closed()) return;
  for (const auto& [id, arena] : device_arenas_) {
    if (arena->ordinal() == stream->context().ordinal) stream->Keep(arena);
  }
  const int ordinal = stream->context().ordinal;
  if (const auto process = in_processes_.find(ordinal); process != in_processes_.end()) {
    process->second->Close();
    in_processes_.erase(process);
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
  KV_ASSIGN_OR_RETURN(std::shared_ptr<DeviceWork> work, DeviceWork::Create(&daemon_, std::move(stream)));
  device_works_[ordinal] = work;
  return work;
}

std::shared_ptr<InProcess> Session::FindInProcess(int ordinal) const {
  const auto found = in_processes_.find(ordinal);
  return found == in_processes_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<InProcess>> Session::InProcessOf(int ordinal) {
  if (auto found = FindInProcess(ordinal); found != nullptr) return found;
  const std::shared_ptr<DeviceStream> stream = DeviceStreamOf(ordinal);
  if (stream == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(ordinal),
                      "a GPU that this connection opened (openDevice)");
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<InProcess> process,
                      InProcess::Create(&daemon_, stream->context(), stream->shared_words(), pid_));
  in_processes_[ordinal] = process;
  return process;
}

void WriteHeldSequence(const DaemonContext& daemon, const SequenceInfo& info, api::SequenceInfo::Builder out) {
  WriteSequenceInfo(info, out);
  const auto holder = daemon.holders.find(info.sequence);
  if (holder == daemon.holders.end()) return;  // a received one that waits for its claim
  out.setClient(TextOf(holder->second->name()));
  out.setPid(holder->second->pid());
}

}  // namespace kvmanager
