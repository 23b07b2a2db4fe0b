#include "kvmanager/rpc/session_gpus.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

void SessionGpus::Forget(SequenceId sequence) {
  for (const auto& [ordinal, work] : works_) work->Forget(sequence);
  for (const auto& [ordinal, process] : process_steps_) process->Forget(sequence);
}

void SessionGpus::RemoveArena(uint32_t id) {
  const auto found = arenas_.find(id);
  if (found == arenas_.end()) return;
  std::shared_ptr<DeviceArena> arena = std::move(found->second);
  arenas_.erase(found);
  if (const auto stream = StreamOf(arena->ordinal()); stream != nullptr) stream->Keep(std::move(arena));
}

std::shared_ptr<DeviceStream> SessionGpus::StreamOf(int ordinal) const {
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) return nullptr;
  std::shared_ptr<DeviceStream> stream = found->second.stream.lock();
  return stream == nullptr || stream->closed() ? nullptr : stream;
}

void SessionGpus::SetStream(Gpu* gpu, const std::shared_ptr<DeviceStream>& stream) {
  devices_[gpu->ordinal()] = {gpu, stream};
}

void SessionGpus::CloseStream(DeviceStream* stream) {
  if (stream->closed()) return;
  const int ordinal = stream->ordinal();
  for (const auto& [id, arena] : arenas_) {
    if (arena->ordinal() == ordinal) stream->Keep(arena);
  }
  if (const auto process = process_steps_.find(ordinal); process != process_steps_.end()) {
    process->second->Close();
    process_steps_.erase(process);
  }
  if (const auto work = works_.find(ordinal); work != works_.end()) {
    stream->Keep(std::move(work->second));
    works_.erase(work);
  }
  stream->Close();
}

absl::StatusOr<std::shared_ptr<DeviceWork>> SessionGpus::WorkOf(int ordinal) {
  if (const auto found = works_.find(ordinal); found != works_.end()) return found->second;
  std::shared_ptr<DeviceStream> stream = StreamOf(ordinal);
  if (stream == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(ordinal),
                      "a GPU that this connection opened (openDevice)");
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<DeviceWork> work,
                      DeviceWork::Create(parts_.work, devices_.at(ordinal).gpu, std::move(stream)));
  works_[ordinal] = work;
  return work;
}

std::shared_ptr<ProcessSteps> SessionGpus::FindProcessSteps(int ordinal) const {
  const auto found = process_steps_.find(ordinal);
  return found == process_steps_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<ProcessSteps>> SessionGpus::ProcessStepsOf(int ordinal) {
  if (auto found = FindProcessSteps(ordinal); found != nullptr) return found;
  const std::shared_ptr<DeviceStream> stream = StreamOf(ordinal);
  if (stream == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(ordinal),
                      "a GPU that this connection opened (openDevice)");
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<ProcessSteps> process,
                      ProcessSteps::Create(parts_.process, devices_.at(ordinal).gpu, stream->shared_words(), pid_));
  process_steps_[ordinal] = process;
  return process;
}

}  // namespace kvmanager
