// A step in the daemon of a cache on a GPU.
//
// A step whose attention takes long is submitted in several launches, between turns of the loop: first what it appends,
// then its queries, in their order. Each launch attends as if the client had asked for so many queries. Made by
// DeviceCalls::Step, which gives it to device_calls::Run.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/gpu/device_work.h"
#include "kvmanager/rpc/device_call.h"

namespace kvmanager {

struct DeviceStepCall final : device_calls::Call {
  using Call::Call;
  using Entries = device_calls::Entries;
  std::shared_ptr<DeviceWork> work;
  StepTurns::Turn turn;  // while an earlier step, or this one, is submitted in launches
  int layer = 0;
  uint64_t tokens = 0;
  DeviceTensors tensors;  // those of `rest`
  Entries rest;           // what has yet to be attended to

  absl::Status Reserve();
  bool MayFitSoon(const absl::Status& status) const { return Call::MayFitSoon(status) || !MayGo() || !work->HasRoom(); }
  /// A step before this one is still being submitted, which has its own deadline.
  bool IsBehind() const { return !MayGo(); }
  /// The append is reserved, or there is none. Resolved at once, but for pages that are still to be encoded and queries
  /// of several launches.
  kj::Promise<absl::Status> Proceed(const std::shared_ptr<DeviceStepCall>& self);
  void WriteReply(StepContext& context);

 private:
  /// What the rest of the step waits for.
  enum class Next { kNothing, kLease, kLaunch };

  bool MayGo() const { return !turn.taken() || turn.first(); }
  absl::StatusOr<Next> SubmitSome();
  kj::Promise<absl::Status> Later(const std::shared_ptr<DeviceStepCall>& self);
  /// What is reserved, alone.
  absl::Status Append();
  /// Whether the queries were attended to.
  absl::StatusOr<bool> Submit(const Entries& of, absl::Span<const EntryReading> readings, const DeviceTensors& what);
  /// Takes the first entries, or first tokens of the last of them, from `rest`. False: nothing is left.
  bool Drop(const Entries& attended);

  bool cut_ = false;  // some launches of it are submitted
  ReadForm pages_ = ReadForm::kEncoded;
  uint64_t done_ = 0;
  AttentionCounts counts_;
  int64_t next_until_ns_ = 0;  // until when the next launch waits for room
};

}  // namespace kvmanager
