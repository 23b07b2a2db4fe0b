// Checksums and open pages' copies, made by a GPU, against the CPU's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>
#include <vector>

#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_testing.h"
#include "kvmanager/memory/open_page_copy.h"
#include "kvmanager/memory/page_hash.h"

namespace kvmanager {
namespace {

TEST_F(GpuTest, PagesHaveTheLibrarysChecksums) {
  const auto device = Device::Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE((*device)->Use().ok());
  std::mt19937_64 random(1);
  std::vector<uint8_t> bytes(64 << 20);
  for (size_t i = 0; i < bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, 8);
  }
  DeviceBytes memory(bytes.size()), hashes(1 << 20);
  ASSERT_NO_FATAL_FAILURE(memory.Fill(bytes.data(), bytes.size()));
  auto* const data = memory.as<uint8_t>();
  auto* const out = hashes.as<uint64_t>();
  std::vector<PageBytes> pages;
  for (uint32_t size = kPageHashBytesMin; size < 2600; ++size) pages.push_back({data + random() % 100000 * 16, size});
  for (const uint32_t size : {48640u, 65536u, 65537u, 262144u, 262145u, 263168u, 1u << 20, (4u << 20) + 77}) {
    for (int i = 0; i < 300; ++i) pages.push_back({data + random() % ((bytes.size() - size) / 16) * 16, size});
  }
  const absl::Status status = EnqueuePageHashes(pages, out, (*device)->service_stream());
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_CUDA(cudaStreamSynchronize((*device)->service_stream()));
  std::vector<uint64_t> got(pages.size());
  ASSERT_CUDA(cudaMemcpy(got.data(), out, got.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < pages.size(); ++i) {
    ASSERT_EQ(got[i], XXH3_64bits(&bytes[pages[i].data - data], pages[i].bytes)) << pages[i].bytes << " bytes";
  }
  const PageBytes wrong[] = {{data, kPageHashBytesMin - 1}, {data + 8, 1000}, {nullptr, 1000}};
  for (const PageBytes& page : wrong) {
    EXPECT_EQ(EnqueuePageHashes({&page, 1}, out, (*device)->service_stream()).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(GpuTest, OpenPagesAreCopiedWithZerosBehind) {
  const auto device = Device::Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE((*device)->Use().ok());
  const OpenPageShape shape = {16, 64 * 256, 37 * 256};
  const size_t page_bytes = size_t{shape.rows} * shape.row_bytes, pages = 2100;
  std::vector<uint8_t> from(page_bytes), got(page_bytes);
  std::mt19937_64 random(1);
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
  DeviceBytes source_memory(page_bytes), target_memory(page_bytes * pages);
  ASSERT_NO_FATAL_FAILURE(source_memory.Fill(from.data(), page_bytes));
  ASSERT_NO_FATAL_FAILURE(target_memory.Set(0xee));
  auto* const source = source_memory.as<uint8_t>();
  auto* const targets = target_memory.as<uint8_t>();
  std::vector<OpenPageCopy> copies;
  for (size_t i = 0; i < pages; ++i) copies.push_back({source, targets + i * page_bytes});
  const absl::Status status = EnqueueOpenPageCopies(copies, shape, (*device)->service_stream());
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_CUDA(cudaStreamSynchronize((*device)->service_stream()));
  for (size_t i = 0; i < page_bytes; ++i) {
    if (i % shape.row_bytes >= shape.kept_bytes) from[i] = 0;
  }
  for (const size_t page : {size_t{0}, size_t{1}, pages - 1}) {
    ASSERT_CUDA(cudaMemcpy(got.data(), targets + page * page_bytes, page_bytes, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(got == from) << page;
  }
}

}  // namespace
}  // namespace kvmanager
