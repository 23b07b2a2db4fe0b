#include "kvmanager/gpu/device_stream.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int64_t kPauseMsMin = 1, kPauseMsMax = 50;

// Of each stream, in pinned memory: two counters, and the non-finite table on pages of its own.
constexpr size_t kPageBytes = 4096;
constexpr size_t kSlotBytes = kPageBytes + SharedSemaphores::kNonFiniteWords * sizeof(uint64_t);

// `released` also says which plans of the engine's are over: it is left alone where nothing waits for it.
void AbandonWaits(SharedSemaphores& words, uint64_t released_wanted) {
  words.Abandon(SharedSemaphores::Word::kReady);
  if (words.Load(SharedSemaphores::Word::kReleased) < released_wanted) words.Abandon(SharedSemaphores::Word::kReleased);
}

}  // namespace

struct DeviceStream::Slot {
  CUstream_st* stream = nullptr;
  ReleaseCounter* passed = nullptr;  // the stream writes
  ReleaseCounter* plans = nullptr;
  uint64_t* non_finite = nullptr;
  uint64_t submitted = 0;
};

struct DeviceStreams::Draining {
  Slot* slot;
  std::shared_ptr<SharedSemaphores> words;
  uint64_t released_wanted = 0;
  std::deque<DeviceStream::Kept> kept;
};

DeviceStream::~DeviceStream() { Close(); }

const Device& DeviceStream::device() const { return *streams_->device_; }
CUstream_st* DeviceStream::stream() const { return slot_->stream; }
ReleaseCounter* DeviceStream::plans() const { return slot_->plans; }
uint64_t* DeviceStream::non_finite() const { return slot_->non_finite; }
uint64_t DeviceStream::submitted() const { return slot_->submitted; }
uint64_t DeviceStream::passed() const { return slot_->passed->released.load(std::memory_order_acquire); }

absl::Status DeviceStream::Begin(uint64_t ready) {
  if (closed()) return absl::FailedPreconditionError("this connection's stream is closed");
  if (submitted() - passed() >= kSubmissionsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "submissions under way in this stream",
                      absl::StrCat(kSubmissionsMax + 1),
                      absl::StrCat("at most ", kSubmissionsMax, "; let the engine's stream come nearer"));
  }
  if (ready == 0) return absl::OkStatus();
  return device().EnqueueWait(slot_->stream, words_->Address(SharedSemaphores::Word::kReady), ready);
}

absl::Status DeviceStream::WaitReleased(uint64_t value) {
  released_wanted_ = std::max(released_wanted_, value);
  return device().EnqueueWait(slot_->stream, words_->Address(SharedSemaphores::Word::kReleased), value);
}

absl::StatusOr<uint64_t> DeviceStream::End() {
  KV_CHECK(!closed());
  absl::Status status = device().EnqueueWrite(slot_->stream, words_->Address(SharedSemaphores::Word::kDone), ++done_);
  status.Update(device().EnqueueWrite(slot_->stream, slot_->passed, ++slot_->submitted));
  KV_RETURN_IF_ERROR(status);
  return done_;
}

void DeviceStream::Keep(std::shared_ptr<const void> object) {
  KV_CHECK(!closed());
  if (passed() == submitted()) return;
  kept_.push_back(Kept{submitted(), std::move(object)});
  streams_->Watch();
}

void DeviceStream::Close() {
  if (closed()) return;
  streams_->TakeOver(this);
}

DeviceStreams::DeviceStreams(const Device* device, DeviceMetrics* metrics) : device_(device), metrics_(metrics) {}

absl::StatusOr<std::unique_ptr<DeviceStreams>> DeviceStreams::Create(const Device* device, DeviceMetrics* metrics) {
  std::unique_ptr<DeviceStreams> streams(new DeviceStreams(device, metrics));
  KV_ASSIGN_OR_RETURN(streams->counters_, PinnedRegion::Make(device, kStreamsMax * kSlotBytes));
  return streams;
}

DeviceStreams::~DeviceStreams() {
  if (!open_.empty() || Collect()) {
    new auto(std::move(retired_));
    new std::vector<Draining>(std::move(draining_));
    (void)counters_.release();
    return;
  }
  for (const auto& slot : slots_) device_->DestroyStream(slot->stream);
}

void DeviceStreams::SetLoop(EventLoop* loop) {
  later_ = nullptr;
  watching_ = false;
  loop_ = loop;
  if (loop_ != nullptr) Watch();
}

absl::StatusOr<std::shared_ptr<DeviceStream>> DeviceStreams::Open(uint32_t user) {
  Collect();
  const auto own =
      std::count_if(open_.begin(), open_.end(), [user](const DeviceStream* each) { return each->user_ == user; });
  if (own >= kUserStreamsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted,
                      absl::StrCat("streams of this user on GPU ", device_->info().ordinal), absl::StrCat(own + 1),
                      absl::StrCat("at most ", kUserStreamsMax));
  }
  if (free_.empty() && slots_.size() == kStreamsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("streams of GPU ", device_->info().ordinal),
                      absl::StrCat(kStreamsMax + 1),
                      absl::StrCat("at most ", kStreamsMax, ", of which ", draining_.size(), " end soon"));
  }
  if (retired_.size() >= kRetiredMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "what ended connections leave to be freed",
                      absl::StrCat(retired_.size()),
                      absl::StrCat("below ", kRetiredMax, "; it goes as soon as no stream has work"));
  }
  KV_ASSIGN_OR_RETURN(std::shared_ptr<SharedSemaphores> words, SharedSemaphores::Create());
  KV_RETURN_IF_ERROR(words->Pin(device_));
  if (free_.empty()) {
    auto slot = std::make_unique<Slot>();
    auto stream = device_->NewStream();
    if (!stream.ok()) {
      retired_.push_back(std::move(words));
      return stream.status();
    }
    slot->stream = *stream;
    uint8_t* const memory = counters_->data() + slots_.size() * kSlotBytes;
    slot->passed = reinterpret_cast<ReleaseCounter*>(memory);
    slot->plans = slot->passed + 1;
    slot->non_finite = reinterpret_cast<uint64_t*>(memory + kPageBytes);
    free_.push_back(slot.get());
    slots_.push_back(std::move(slot));
  }
  Slot* const slot = free_.back();
  free_.pop_back();
  slot->plans->released.store(0, std::memory_order_release);
  // Shared by the capability and the calls that use it.
  std::shared_ptr<DeviceStream> stream(new DeviceStream(this, next_id_++, user, slot, std::move(words)));
  open_.push_back(stream.get());
  ShowCounts();
  return stream;
}

void DeviceStreams::TakeOver(DeviceStream* stream) {
  open_.erase(std::find(open_.begin(), open_.end(), stream));
  AbandonWaits(*stream->words_, stream->released_wanted_);
  draining_.push_back(
      Draining{stream->slot_, std::move(stream->words_), stream->released_wanted_, std::move(stream->kept_)});
  stream->kept_.clear();
  ShowCounts();
  Watch();
}

void DeviceStreams::Retire(std::shared_ptr<const void> object) {
  retired_.push_back(std::move(object));
  Watch();
}

bool DeviceStreams::Passed(const Slot& slot, uint64_t submitted) {
  if (slot.passed->released.load(std::memory_order_acquire) >= submitted) return true;
  if (failed_) return true;
  const auto idle = device_->IsIdle(slot.stream);
  if (idle.ok()) return false;
  failed_ = true;
  spdlog::error("GPU {} has failed, and with it all work on it: {}", device_->info().ordinal,
                std::string(idle.status().message()));
  return true;
}

bool DeviceStreams::Quiet() {
  return std::all_of(slots_.begin(), slots_.end(), [this](const auto& slot) { return Passed(*slot, slot->submitted); });
}

bool DeviceStreams::Collect() {
  bool kept = false;
  std::vector<DeviceStream::Kept> gone;  // their destructors come last: they may close streams
  for (DeviceStream* const stream : open_) {
    auto& objects = stream->kept_;
    while (!objects.empty() && Passed(*stream->slot_, objects.front().submitted)) {
      gone.push_back(std::move(objects.front()));
      objects.pop_front();
    }
    kept |= !objects.empty();
  }
  for (size_t i = 0; i < draining_.size();) {
    Draining& draining = draining_[i];
    if (!Passed(*draining.slot, draining.slot->submitted)) {
      AbandonWaits(*draining.words, draining.released_wanted);
      ++i;
      continue;
    }
    draining.words->Abandon(SharedSemaphores::Word::kDone);
    retired_.push_back(std::move(draining.words));
    free_.push_back(draining.slot);
    std::move(draining.kept.begin(), draining.kept.end(), std::back_inserter(gone));
    draining_.erase(draining_.begin() + static_cast<ptrdiff_t>(i));
  }
  if (!retired_.empty() && Quiet()) retired_.pop_back();
  ShowCounts();
  gone.clear();
  return kept || !draining_.empty() || !retired_.empty();
}

void DeviceStreams::Watch() {
  pause_ms_ = kPauseMsMin;
  if (watching_ || loop_ == nullptr) return;
  watching_ = true;
  later_ = CollectLater().eagerlyEvaluate(
      [](kj::Exception&& exception) { spdlog::error("streams: {}", exception.getDescription().cStr()); });
}

kj::Promise<void> DeviceStreams::CollectLater() {
  return loop_->timer().afterDelay(pause_ms_ * kj::MILLISECONDS).then([this]() -> kj::Promise<void> {
    pause_ms_ = std::min(2 * pause_ms_, kPauseMsMax);
    if (Collect()) return CollectLater();
    watching_ = false;
    return kj::READY_NOW;
  });
}

bool DeviceStreams::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!open_.empty() || Collect()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMsMin));
  }
  return true;
}

void DeviceStreams::ShowCounts() {
  metrics_->streams.Set(double(open_.size()));
  metrics_->draining_streams.Set(double(draining_.size()));
}

}  // namespace kvmanager
