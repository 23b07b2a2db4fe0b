// A sampler of pages for a walk on caches of a GPU (device_walk.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "gtest/gtest.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager::device_walk {

/// Keeps some of the pages that were encoded for a while, whose bytes must stay meanwhile.
class HoldingSampler final : public PageSampler {
 public:
  static constexpr size_t kHeldMax = 16;
  bool Wants(CacheId, uint32_t) override { return held_.size() < kHeldMax && ++asked_ % 2 == 0; }
  void Compare(const PageSample& page, absl::AnyInvocable<void()> done) override {
    const uint8_t* const raw_end = page.raw + page.codec->layout().raw_bytes();
    const uint8_t* const encoded_end = page.encoded + page.codec->info().page_bytes(int(page.layer));
    held_.push_back({page, {page.raw, raw_end}, {page.encoded, encoded_end}, std::move(done)});
  }
  size_t held() const { return held_.size(); }
  uint64_t compared() const { return compared_; }
  void FinishOne(size_t index) {
    Held held = std::move(held_[index]);
    held_.erase(held_.begin() + index);
    ++compared_;
    EXPECT_EQ(held.page.device, TestDevice::kOrdinal);
    EXPECT_TRUE(std::equal(held.raw.begin(), held.raw.end(), held.page.raw));
    EXPECT_TRUE(std::equal(held.encoded.begin(), held.encoded.end(), held.page.encoded));
    held.done();
  }

 private:
  struct Held {
    PageSample page;
    std::vector<uint8_t> raw, encoded;  // as they were
    absl::AnyInvocable<void()> done;
  };
  std::vector<Held> held_;
  uint64_t asked_ = 0, compared_ = 0;
};

}  // namespace kvmanager::device_walk
