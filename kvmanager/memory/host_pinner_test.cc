#include "kvmanager/memory/host_pinner.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <vector>

namespace kvmanager {
namespace {

std::vector<absl::Span<uint8_t>> Spans(std::vector<uint8_t>* memory, size_t count) {
  memory->resize(count * 4096);
  std::vector<absl::Span<uint8_t>> spans;
  for (size_t i = 0; i < count; ++i) spans.push_back({memory->data() + i * 4096, 4096});
  return spans;
}

TEST(HostPinner, ProgressIsSeenWhilePinningGoesOnAndAllIsGivenBack) {
  std::vector<uint8_t> memory;
  const auto spans = Spans(&memory, 4);
  std::promise<void> third_asked, go_on;
  std::vector<uint8_t*> pinned, unpinned;
  HostPinner::Calls calls;
  calls.pin = [&](uint8_t* data, size_t bytes) {
    EXPECT_EQ(bytes, 4096u);
    if (pinned.size() == 2) {
      third_asked.set_value();
      go_on.get_future().wait();
    }
    pinned.push_back(data);
    return absl::OkStatus();
  };
  calls.unpin = [&](uint8_t* data) { unpinned.push_back(data); };
  auto pinner = std::make_unique<HostPinner>(spans, calls);
  EXPECT_EQ(pinner->total_bytes(), 4u * 4096);
  third_asked.get_future().wait();
  EXPECT_EQ(pinner->ready_spans(), 2u);
  EXPECT_EQ(pinner->ready_bytes(), 2u * 4096);
  EXPECT_FALSE(pinner->done());
  go_on.set_value();
  pinner->Wait();
  EXPECT_TRUE(pinner->done());
  EXPECT_TRUE(pinner->status().ok());
  EXPECT_EQ(pinner->ready_bytes(), pinner->total_bytes());
  EXPECT_EQ(pinner->EndOfSpan(spans[1].data()), spans[1].data() + 4096);
  EXPECT_EQ(pinner->EndOfSpan(spans[3].data() + 4095), spans[3].data() + 4096);
  pinner.reset();
  EXPECT_EQ(pinned.size(), 4u);
  EXPECT_EQ(unpinned, (std::vector<uint8_t*>{pinned[3], pinned[2], pinned[1], pinned[0]}));
}

TEST(HostPinner, WhatCannotBePinnedIsSaid) {
  std::vector<uint8_t> memory;
  const auto spans = Spans(&memory, 3);
  int unpinned = 0;
  {
    HostPinner::Calls calls;
    calls.pin = [&](uint8_t* data, size_t) {
      return data == spans[1].data() ? absl::ResourceExhaustedError("locked memory") : absl::OkStatus();
    };
    calls.unpin = [&](uint8_t*) { ++unpinned; };
    HostPinner pinner(spans, calls);
    pinner.Wait();
    EXPECT_EQ(pinner.ready_spans(), 1u);
    EXPECT_EQ(pinner.status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(unpinned, 1);
}

TEST(HostPinner, StopsBetweenTwoSpans) {
  std::vector<uint8_t> memory;
  const auto spans = Spans(&memory, 1000);
  std::promise<void> asked, go_on;
  int pinned = 0, unpinned = 0;
  HostPinner::Calls calls;
  calls.pin = [&](uint8_t*, size_t) {
    if (++pinned == 1) {
      asked.set_value();
      go_on.get_future().wait();
    }
    return absl::OkStatus();
  };
  calls.unpin = [&](uint8_t*) { ++unpinned; };
  auto pinner = std::make_unique<HostPinner>(spans, calls);
  asked.get_future().wait();
  std::thread destroyer([&] { pinner.reset(); });
  go_on.set_value();
  destroyer.join();
  EXPECT_EQ(pinned, unpinned);
}

}  // namespace
}  // namespace kvmanager
