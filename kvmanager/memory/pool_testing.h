// Small pools of host memory, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kvmanager/memory/page_pool.h"

namespace kvmanager::testing {

inline constexpr uint64_t kMiB = 1 << 20;

inline std::unique_ptr<PagePool> MakePool(uint64_t bytes, bool huge_pages = false, const Clock* clock = nullptr) {
  PagePool::Options options;
  options.pool_bytes = bytes;
  options.slab_bytes = 2 * kMiB;
  options.huge_pages = huge_pages;
  options.clock = clock;
  auto pool = PagePool::Create(options);
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

inline bool IsFilledWith(const uint8_t* data, size_t bytes, uint8_t value) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != value) return false;
  }
  return true;
}

}  // namespace kvmanager::testing
