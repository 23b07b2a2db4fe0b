// hack_encode_gpu_bench: how fast HACK pages are encoded and decoded on a GPU, in bytes of raw pages, beside how fast
// the same GPU reads and copies memory in the same run.
//
// Random pages, all distinct, more than the second-level cache holds; each launch takes all of them; medians. An
// argument chooses the codecs whose names contain it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "codecs/hack/hack_encode_cuda.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/test_array.h"

namespace kvmanager::hack {
namespace {

constexpr size_t kRawBytes = size_t{1} << 30;
constexpr int kWarmUps = 3;
constexpr int kRepeats = 21;
constexpr uint32_t kFewPages = 32;  // one sealed page of each layer of a small model

__global__ void __launch_bounds__(512) ReadKernel(const uint4* from, size_t n, uint4* out) {
  uint4 sum = {0, 0, 0, 0};
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum.x ^= v[k].x, sum.y ^= v[k].y, sum.z ^= v[k].z, sum.w ^= v[k].w;
  }
  if ((sum.x & sum.y & sum.z & sum.w) == 0xffffffffu) *out = sum;
}

/// Cycles of a multiprocessor over nanoseconds.
__global__ void ClockKernel(uint64_t* out) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  const long long cycles = clock64();
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < 2'000'000);
  out[0] = uint64_t(clock64() - cycles), out[1] = now - begin;
}

double MedianSeconds(const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> ms(kRepeats);
  for (int i = -kWarmUps; i < kRepeats; ++i) {
    CHECK_CUDA(cudaEventRecord(begin));
    launch();
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    if (i >= 0) CHECK_CUDA(cudaEventElapsedTime(&ms[i], begin, end));
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  std::nth_element(ms.begin(), ms.begin() + kRepeats / 2, ms.end());
  return ms[kRepeats / 2] * 1e-3;
}

double ClockGhz() {
  TestArray<uint64_t> out(2);
  ClockKernel<<<1, 1>>>(out.data());
  const std::vector<uint64_t> two = out.Read();
  return double(two[0]) / double(two[1]);
}

struct Row {
  const char* spec;
  PageLayout layout;
};

/// elements normal, of `dtype`.
void Fill(DType dtype, TestArray<uint8_t>& raw) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> table(1 << 16);
  for (uint16_t& t : table) StoreElement(&t, dtype, 0, normal(random));
  std::vector<uint8_t> bytes(raw.size());
  uint16_t* const to = reinterpret_cast<uint16_t*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / 2; i += 4) {
    const uint64_t four = random();
    for (int k = 0; k < 4; ++k) to[i + k] = table[four >> (16 * k) & 0xffff];
  }
  raw.Write(bytes);
}

int Main(const std::string& filter) {
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors, L2 %.0f MB, %.0f MB of raw pages a launch\n", properties.name,
              properties.multiProcessorCount, properties.l2CacheSize * 1e-6, kRawBytes * 1e-6);
  TestArray<uint8_t> raw(kRawBytes), other(kRawBytes);
  Fill(DType::kFloat16, raw);
  const double read =
      kRawBytes / MedianSeconds([&] {
        ReadKernel<<<properties.multiProcessorCount * 4, 512>>>(reinterpret_cast<const uint4*>(raw.data()),
                                                                kRawBytes / 16, reinterpret_cast<uint4*>(other.data()));
      });
  const double copy = 2 * kRawBytes / MedianSeconds([&] {
                        CHECK_CUDA(cudaMemcpyAsync(other.data(), raw.data(), kRawBytes, cudaMemcpyDeviceToDevice));
                      });
  std::printf("read ceiling %.0f GB/s, copy %.0f GB/s (read and written), SM clock %.2f GHz\n", read * 1e-9,
              copy * 1e-9, ClockGhz());
  std::printf("%-44s %-5s %4s %4s %8s | %12s %7s %9s %12s | %12s %7s\n", "codec", "dtype", "d", "page", "B/token",
              "encode GB/s", "of read", "all GB/s", "32 pages, us", "decode GB/s", "of read");

  const PageLayout half{DType::kFloat16, 8, 128, 64}, bfloat{DType::kBFloat16, 8, 128, 64};
  const PageLayout half64{DType::kFloat16, 8, 64, 64}, half128{DType::kFloat16, 8, 128, 128};
  const Row rows[] = {{"hack:k_bits=3,v_bits=2", half},
                      {"hack:k_bits=2,v_bits=2", half},
                      {"hack:k_bits=4,v_bits=3", half},
                      {"hack:k_bits=2,v_bits=1", half},
                      {"hack:k_bits=8,v_bits=8", half},
                      {"hack:k_bits=3,v_bits=2,meta=16", half},
                      {"hack:k_bits=3,v_bits=2", half64},
                      {"hack:k_bits=2,v_bits=1", half64},
                      {"hack:k_bits=3,v_bits=2", bfloat},
                      {"hack:k_bits=2,v_bits=1", bfloat},
                      {"hack:k_bits=3,v_bits=2,rounding=stochastic", half},
                      {"hack:k_bits=3,v_bits=2,rotation=none", half},
                      {"hack:k_bits=3,v_bits=2,rotation=none,v_norm=0", half},
                      {"hack:k_bits=2,v_bits=1,rotation=none,v_norm=0", half},
                      {"hack:k_axis=token,q=asymmetric", half},
                      {"hack:k_bits=3,v_bits=2", half128}};
  DType filled = DType::kFloat16;
  for (const Row& row : rows) {
    if (std::string(row.spec).find(filter) == std::string::npos) continue;
    if (row.layout.dtype != filled) Fill(filled = row.layout.dtype, raw);
    const HackFormat format =
        MakeHackFormat(row.layout, *ParseHackParameters(ParseCodecSpec(row.spec)->parameters, row.layout));
    const HackDeviceFormat device = MakeHackDeviceFormat(format);
    const uint32_t pages = uint32_t(kRawBytes / row.layout.raw_bytes());
    TestArray<HackDeviceHead> heads(device.heads);
    TestArray<uint8_t> encoded(size_t(pages) * format.page_bytes);
    std::vector<uint32_t> order(pages);
    for (uint32_t i = 0; i < pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    std::vector<DeviceEncodeItem> encodes(pages);
    std::vector<DeviceDecodeItem> decodes(pages);
    for (uint32_t i = 0; i < pages; ++i) {
      uint8_t* const page = encoded.data() + size_t(order[pages - 1 - i]) * format.page_bytes;
      encodes[i] = {raw.data() + order[i] * row.layout.raw_bytes(), page, uint64_t(i) * 64, i % 32};
      decodes[i] = {page, other.data() + order[i] * row.layout.raw_bytes()};
    }
    TestArray<DeviceEncodeItem> encode_items(encodes);
    TestArray<DeviceDecodeItem> decode_items(decodes);
    TestArray<uint32_t> declined(pages);
    const double encode = MedianSeconds([&] {
      CHECK_CUDA(LaunchHackEncode(device.shape, heads.data(), encode_items.data(), pages, declined.data(), nullptr));
    });
    const double few = MedianSeconds([&] {
      CHECK_CUDA(
          LaunchHackEncode(device.shape, heads.data(), encode_items.data(), kFewPages, declined.data(), nullptr));
    });
    const double decode = MedianSeconds(
        [&] { CHECK_CUDA(LaunchHackDecode(device.shape, heads.data(), decode_items.data(), pages, nullptr)); });
    const double bytes = double(pages) * row.layout.raw_bytes();
    const double moved = bytes + double(pages) * format.page_bytes;
    std::printf("%-44s %-5s %4d %4d %8.1f | %12.0f %6.0f%% %9.0f %12.1f | %12.0f %6.0f%%\n", row.spec,
                row.layout.dtype == DType::kFloat16 ? "fp16" : "bf16", row.layout.head_dim, row.layout.page_tokens,
                double(format.payload_bytes) / row.layout.page_tokens / row.layout.kv_heads, bytes / encode * 1e-9,
                100 * bytes / encode / read, moved / encode * 1e-9, few * 1e6, bytes / decode * 1e-9,
                100 * bytes / decode / read);
  }
  std::printf("SM clock at the end %.2f GHz\n", ClockGhz());
  return 0;
}

}  // namespace
}  // namespace kvmanager::hack

int main(int argc, char** argv) { return kvmanager::hack::Main(argc > 1 ? argv[1] : ""); }
