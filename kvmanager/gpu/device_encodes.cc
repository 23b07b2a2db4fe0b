#include "kvmanager/gpu/device_encodes.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <string>

#include "kvmanager/base/status.h"
#include "kvmanager/gpu/launch_cuts.h"

namespace kvmanager {

using Word = SharedSemaphores::Word;

void DeviceEncodeQueue::Run(std::vector<absl::AnyInvocable<void()>>, absl::AnyInvocable<void()>) {
  KV_CHECK(false && "what runs on a GPU's pages is encoding or training");
}

absl::StatusOr<std::unique_ptr<DeviceEncodes>> DeviceEncodes::Create(const Device* device, PollList* polls,
                                                                     prometheus::Counter* encoded_pages) {
  std::unique_ptr<DeviceEncodes> encodes(new DeviceEncodes(device, polls, encoded_pages));
  KV_RETURN_IF_ERROR(device->Use());
  KV_ASSIGN_OR_RETURN(encodes->words_, SharedSemaphores::Create());
  KV_RETURN_IF_ERROR(encodes->words_->Pin(device));
  KV_ASSIGN_OR_RETURN(encodes->encoder_, DeviceEncoder::Create(device->encode_stream(), 2 * kItemsMax));
  return encodes;
}

void DeviceEncodes::Post(std::shared_ptr<const DeviceCodec> codec, uint64_t raw_bytes, DeviceEncodeJob job) {
  KV_CHECK(!job.items.empty() && job.items.size() <= kJobItemsMax);
  for (EncodeItem& item : job.items) item.is_sink = codec->keeps_raw(int(item.layer), item.first_token);
  auto batch = std::make_shared<Batch>();
  batch->codec = std::move(codec);
  batch->launch_pages = EncodeLaunchPages(raw_bytes);
  const WorkerPool::Owner owner = job.owner;
  batch->job = std::move(job);
  auto line = std::find_if(waiting_.begin(), waiting_.end(), [&](const Line& of) { return of.owner == owner; });
  if (line == waiting_.end()) line = waiting_.insert(waiting_.end(), Line{owner, {}});
  line->batches.push_back(std::move(batch));
  SubmitWaiting();
  if (polling_ || (submitted_.empty() && waiting_.empty())) return;
  polling_ = true;
  polls_->Add([this] { return Poll(); });
}

absl::Status DeviceEncodes::Enqueue(const std::shared_ptr<Batch>& batch, uint32_t at, size_t count) {
  std::vector<DeviceEncodeItem> items;
  items.reserve(count);
  for (const EncodeItem& item : absl::MakeConstSpan(batch->job.items).subspan(batch->enqueued, count)) {
    items.push_back({item.raw, item.encoded, item.first_token, item.layer});
  }
  KV_RETURN_IF_ERROR(device_->Use());
  KV_RETURN_IF_ERROR(encoder_->Encode(*batch->codec, items, words_->declined() + at));
  KV_RETURN_IF_ERROR(device_->EnqueueWrite(device_->encode_stream(), words_->Address(Word::kEncoded), last_ + 1));
  if (submitted_.empty()) burst_ns_ = clock_.NowNs(), burst_launches_ = 0;
  ++burst_launches_;
  submitted_.push_back({batch, batch->enqueued, count, at, ++last_});
  batch->enqueued += count;
  ++batch->launches;
  return absl::OkStatus();
}

void DeviceEncodes::SubmitWaiting() {
  while (!waiting_.empty() && submitted_.size() < kLaunchesMax) {
    const std::shared_ptr<Batch> batch = waiting_.front().batches.front();
    std::vector<EncodeItem>& items = batch->job.items;
    if (scaled_ != batch->codec.get()) scaled_ = batch->codec.get(), scale_ = 1;
    const size_t count = std::min<size_t>(batch->launch_pages * scale_, items.size() - batch->enqueued);
    const std::optional<uint32_t> at = flags_.Take(static_cast<uint32_t>(count));
    if (!at.has_value()) return;
    const absl::Status status = Enqueue(batch, *at, count);
    if (!status.ok()) {
      // The pages stay raw: nothing that reads them is wrong. The GPU has failed, so the flags need not come back.
      spdlog::error("encoding {} pages on GPU {}: {}", items.size() - batch->enqueued, device_->info().ordinal,
                    std::string(status.message()));
      for (size_t i = batch->enqueued; i < items.size(); ++i) items[i].declined = true;
      batch->enqueued = items.size();
    }
    // The next owner's turn.
    Line line = std::move(waiting_.front());
    waiting_.pop_front();
    if (batch->enqueued == items.size()) line.batches.pop_front();
    if (!line.batches.empty()) waiting_.push_back(std::move(line));
    if (!status.ok() && batch->launches == 0) batch->job.done(items);
  }
}

void DeviceEncodes::Rescale() {
  const int64_t took_ns = clock_.NowNs() - burst_ns_;
  if (took_ns > kSlowNs) {
    scale_ = 1;
  } else if (submitted_.empty() && burst_launches_ == kLaunchesMax && took_ns <= kFastNs) {
    scale_ = std::min(2 * scale_, kScaleMax);
  }
}

bool DeviceEncodes::Poll() {
  const uint64_t encoded = words_->Load(Word::kEncoded);
  const bool passed = !submitted_.empty() && submitted_.front().number <= encoded;
  while (!submitted_.empty() && submitted_.front().number <= encoded) {
    const Launch launch = std::move(submitted_.front());
    submitted_.pop_front();
    std::vector<EncodeItem>& items = launch.batch->job.items;
    for (size_t i = 0; i < launch.count; ++i) {
      EncodeItem& item = items[launch.first + i];
      item.declined = words_->declined()[launch.at + i] != 0 || item.is_sink;
      if (!item.is_sink) encoded_pages_->Increment();
    }
    flags_.Release();
    if (--launch.batch->launches == 0 && launch.batch->enqueued == items.size()) launch.batch->job.done(items);
  }
  if (passed) Rescale();
  SubmitWaiting();
  polling_ = !submitted_.empty() || !waiting_.empty();
  return !polling_;
}

}  // namespace kvmanager
