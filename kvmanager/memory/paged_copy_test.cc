// Copies between paged caches and raw pages, made by a GPU, against plain loops: random shapes, strides and blocks.
#include "kvmanager/memory/paged_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_testing.h"
#include "kvmanager/memory/test_array.h"

namespace kvmanager {
namespace {

using Bytes = std::vector<uint8_t>;

// A cache of layers, K and V of each in memory of its own.
struct Caches {
  PagedShape shape;
  uint32_t blocks = 0, groups = 0;
  std::vector<uint64_t> group_of;                        // [layers]
  std::vector<std::vector<TestArray<uint8_t>*>> arrays;  // [layers][2]
  std::vector<std::unique_ptr<TestArray<uint8_t>>> owned;

  int64_t RowAt(int64_t block, uint32_t token, uint32_t head) const {
    return block * shape.block_stride + token / shape.piece_tokens * shape.piece_stride +
           token % shape.piece_tokens * shape.token_stride + head * shape.head_stride;
  }
};

// The order in which blocks, pieces, tokens of a piece and heads lie is random.
Caches MakeCaches(std::mt19937& random) {
  Caches made;
  PagedShape& shape = made.shape;
  shape.layers = 1 + random() % 4;
  shape.heads = 1 + random() % 5;
  shape.piece_tokens = 1u << random() % 5;
  shape.tokens = shape.piece_tokens << random() % 3;
  shape.row_bytes = 16 * (1 + random() % 20);
  made.blocks = 3 + random() % 9;
  made.groups = 1 + random() % 3;
  const uint32_t sizes[] = {made.blocks, shape.tokens / shape.piece_tokens, shape.piece_tokens, shape.heads};
  int64_t* const strides[] = {&shape.block_stride, &shape.piece_stride, &shape.token_stride, &shape.head_stride};
  int order[] = {0, 1, 2, 3};
  std::shuffle(order, order + 4, random);
  int64_t stride = shape.row_bytes * (1 + random() % 2);  // V of a token may lie behind its K
  for (const int axis : order) {
    *strides[axis] = stride;
    stride *= sizes[axis];
  }
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    made.group_of.push_back(random() % made.groups);
    made.arrays.emplace_back();
    for (int side = 0; side < 2; ++side) {
      Bytes bytes(stride);
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
      made.owned.push_back(std::make_unique<TestArray<uint8_t>>(bytes));
      made.arrays.back().push_back(made.owned.back().get());
    }
  }
  return made;
}

TEST_F(GpuTest, BlocksOfAllLayersAreCopiedEitherWay) {
  const auto device = Device::Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE((*device)->Use().ok());
  CUstream_st* const stream = (*device)->service_stream();
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    const Caches caches = MakeCaches(random);
    const PagedShape& shape = caches.shape;
    std::vector<PagedLayer> layers(shape.layers);
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      layers[layer].group = caches.group_of[layer];
      for (int side = 0; side < 2; ++side) layers[layer].side[side] = caches.arrays[layer][side]->data();
    }
    const TestArray<PagedLayer> table(layers);
    // Blocks of a group, each once; some are not wanted.
    const uint32_t count = 1 + random() % (caches.blocks - 1), stride = count + random() % 3;
    std::vector<int64_t> ids(size_t{caches.groups} * stride);
    for (uint32_t group = 0; group < caches.groups; ++group) {
      std::vector<int64_t> all(caches.blocks - 1);
      std::iota(all.begin(), all.end(), 1);
      std::shuffle(all.begin(), all.end(), random);
      for (uint32_t i = 0; i < count; ++i) ids[group * stride + i] = random() % 4 == 0 ? 0 : all[i];
    }
    const TestArray<int64_t> ids_there(ids);
    const size_t head_bytes = size_t{shape.tokens} * shape.row_bytes;
    Bytes raw(count * shape.layers * 2 * shape.heads * head_bytes);
    for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random());
    TestArray<uint8_t> raw_there(raw);
    const PagedBlocks blocks{raw_there.data(), ids_there.data(), stride, count};
    const bool into_cache = round % 2 == 0;
    std::vector<std::vector<Bytes>> expected(shape.layers);
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (int side = 0; side < 2; ++side) expected[layer].push_back(caches.arrays[layer][side]->Read());
    }
    for (uint32_t block = 0; block < count; ++block) {
      for (uint32_t layer = 0; layer < shape.layers; ++layer) {
        const int64_t id = ids[caches.group_of[layer] * stride + block];
        for (uint32_t i = 0; id != 0 && i < 2 * shape.heads * shape.tokens; ++i) {
          const uint32_t token = i % shape.tokens, head = i / shape.tokens % shape.heads,
                         side = i / shape.tokens / shape.heads;
          const size_t in_raw =
              ((size_t{block} * shape.layers + layer) * 2 * shape.heads * shape.tokens + i) * shape.row_bytes;
          const auto row = expected[layer][side].begin() + caches.RowAt(id, token, head);
          if (into_cache) {
            std::copy_n(raw.begin() + in_raw, shape.row_bytes, row);
          } else {
            std::copy_n(row, shape.row_bytes, raw.begin() + in_raw);
          }
        }
      }
    }
    const absl::Status status = EnqueuePagedCopy(shape, table.data(), blocks, into_cache, stream);
    ASSERT_TRUE(status.ok()) << status;
    CHECK_CUDA(cudaStreamSynchronize(stream));
    EXPECT_TRUE(raw_there.Read() == raw) << round;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (int side = 0; side < 2; ++side) {
        EXPECT_TRUE(caches.arrays[layer][side]->Read() == expected[layer][side])
            << round << " " << layer << " " << side;
      }
    }
    PagedShape wrong = shape;
    wrong.token_stride += 8;
    EXPECT_EQ(EnqueuePagedCopy(wrong, table.data(), blocks, into_cache, stream).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace kvmanager
