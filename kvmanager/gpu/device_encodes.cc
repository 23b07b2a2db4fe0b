#include "kvmanager/gpu/device_encodes.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <string>

#include "kvmanager/base/status.h"

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

void DeviceEncodes::Post(std::shared_ptr<const DeviceCodec> codec, DeviceEncodeJob job) {
  KV_CHECK(job.items.size() <= kJobItemsMax);
  for (EncodeItem& item : job.items) item.is_sink = codec->keeps_raw(int(item.layer), item.first_token);
  waiting_.push_back({std::move(codec), std::move(job)});
  SubmitWaiting();
  if (polling_ || submitted_.empty()) return;
  polling_ = true;
  polls_->Add([this] { return Poll(); });
}

void DeviceEncodes::SubmitWaiting() {
  while (!waiting_.empty()) {
    Batch& batch = waiting_.front();
    const uint32_t count = static_cast<uint32_t>(batch.job.items.size());
    const std::optional<uint32_t> at = flags_.Take(count);
    if (!at.has_value()) return;
    std::vector<DeviceEncodeItem> items;
    items.reserve(count);
    for (const EncodeItem& item : batch.job.items)
      items.push_back({item.raw, item.encoded, item.first_token, item.layer});
    absl::Status status = device_->Use();
    if (status.ok()) status = encoder_->Encode(*batch.codec, items, words_->declined() + *at);
    if (status.ok()) {
      status = device_->EnqueueWrite(device_->encode_stream(), words_->Address(Word::kEncoded), last_ + 1);
    }
    if (!status.ok()) {
      // The pages stay raw: nothing that reads them is wrong. The GPU has failed, so the flags need not come back.
      spdlog::error("encoding {} pages on GPU {}: {}", count, device_->info().ordinal, std::string(status.message()));
      for (EncodeItem& item : batch.job.items) item.declined = true;
      DeviceEncodeJob job = std::move(batch.job);
      waiting_.pop_front();
      job.done(job.items);
      continue;
    }
    batch.at = *at;
    batch.number = ++last_;
    submitted_.push_back(std::move(batch));
    waiting_.pop_front();
  }
}

bool DeviceEncodes::Poll() {
  const uint64_t encoded = words_->Load(Word::kEncoded);
  while (!submitted_.empty() && submitted_.front().number <= encoded) {
    Batch batch = std::move(submitted_.front());
    submitted_.pop_front();
    flags_.Release();
    for (size_t i = 0; i < batch.job.items.size(); ++i) {
      EncodeItem& item = batch.job.items[i];
      item.declined = words_->declined()[batch.at + i] != 0 || item.is_sink;
    }
    encoded_pages_->Increment(static_cast<double>(std::count_if(batch.job.items.begin(), batch.job.items.end(),
                                                                [](const EncodeItem& item) { return !item.is_sink; })));
    batch.job.done(batch.job.items);
  }
  SubmitWaiting();
  polling_ = !submitted_.empty();
  return !polling_;
}

}  // namespace kvmanager
