#include "attention/machine_limits.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "attention/machine_limits_kernels.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kReadBytes = size_t{128} << 20;  // per thread
constexpr int kRepeats = 9;
constexpr uint64_t kRounds = 4'000'000;

/// The median time, in seconds, in which all threads ran `work(thread)`: as the results beside it are medians.
template <typename Work>
double MedianSeconds(int threads, const Work& work) {
  std::vector<double> seconds;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) {
      others.emplace_back([&, t] {
        ready.fetch_add(1);
        while (!go.load()) std::this_thread::yield();
        work(t);
      });
    }
    while (ready.load() + 1 < threads) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    go.store(true);
    work(0);
    for (std::thread& other : others) other.join();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRepeats / 2, seconds.end());
  return seconds[kRepeats / 2];
}

MachineLimits Measure(int threads) {
  uint8_t* data = static_cast<uint8_t*>(AllocateHuge(kReadBytes * threads));
  KV_CHECK(data != nullptr);
  std::memset(data, 1, kReadBytes * threads);
  std::vector<uint64_t> sums(threads * 8);
  std::vector<float> sinks(threads * 16, 0.25f);
  MachineLimits limits;
  limits.read_bytes_per_second = double(kReadBytes) * threads / MedianSeconds(threads, [&](int t) {
                                   sums[t * 8] += StreamRead(data + t * kReadBytes, kReadBytes);
                                 });
  const auto rate = [&](uint64_t (*run)(uint64_t, float*)) {
    std::atomic<uint64_t> done{0};
    const double seconds = MedianSeconds(threads, [&](int t) { done += run(kRounds, &sinks[t * 16]); });
    return double(done.load()) / kRepeats / seconds;
  };
  limits.fma_per_second = rate(MultiplyAdds);
  limits.byte_fma_per_second = rate(ByteMultiplyAdds);
  limits.look_ups_per_second = rate(LookUps);
  std::free(data);
  return limits;
}

}  // namespace

const MachineLimits& MeasuredLimits(int threads) {
  static std::map<int, MachineLimits> limits;
  const auto [at, added] = limits.try_emplace(threads);
  if (added) at->second = Measure(threads);
  return at->second;
}

void* AllocateHuge(size_t bytes) {
  const size_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* data = std::aligned_alloc(kHugePageBytes, rounded);
  if (data != nullptr) madvise(data, rounded, MADV_HUGEPAGE);  // advice: small pages do as well
  return data;
}

}  // namespace kvmanager
