// Moves pages between one GPU and the host's pool, for the store: on a stream of its own, behind attention. The loop's
// thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/stream_words.h"
#include "kvmanager/server/poll_list.h"

namespace kvmanager {

class DeviceMover final : public PageMover {
 public:
  /// Everything given outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceMover>> Create(const Device* device, PollList* polls);
  /// Nothing is on its way (Drain).
  ~DeviceMover() override;

  /// Of the host's pool; nothing moves before it is done.
  void SetPinner(const HostPinner* pinner) { pinner_ = pinner; }

  bool ready() const override;
  absl::Status status() const override;
  void Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) override;
  /// Waits, blocking, until the GPU touches no page for this any more; nobody is told. false: it still does after
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  struct Waiting {
    uint64_t number = 0;  // what the stream stores behind it; 0: it was not enqueued
    absl::AnyInvocable<void(bool)> done;
  };

  DeviceMover(const Device* device, PollList* polls) : device_(device), polls_(polls) {}
  absl::Status Enqueue(PageDirection direction, absl::Span<const PageCopy> copies);
  /// The stream touches no page any more, now or ever: it is idle, or the GPU is lost.
  bool Quiet() const;
  bool Poll();  // true: nothing is on its way

  const Device* const device_;
  PollList* const polls_;
  const HostPinner* pinner_ = nullptr;
  CUstream_st* stream_ = nullptr;
  std::unique_ptr<StreamWords> words_;  // this process's alone: `done`
  std::deque<Waiting> waiting_;
  uint64_t last_ = 0;
  bool failed_ = false;  // nothing is enqueued any more
  bool polling_ = false;
};

}  // namespace kvmanager
