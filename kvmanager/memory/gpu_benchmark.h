// What benchmarks of kernels share: the time of calls in a CUDA graph, beside what tests have too. An error of CUDA
// ends the program.
#pragma once

#include <cuda_runtime_api.h>
#include <errno.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "kvmanager/memory/test_array.h"

namespace kvmanager {

inline double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/// Microseconds of one call, the median of `repetitions` replays of a graph that holds `calls` of them.
/// call(i, stream) enqueues the i-th and returns a cudaError_t or an int that is one.
template <typename Call>
double GraphUs(int calls, int warm_ups, int repetitions, Call call) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) CHECK_CUDA(call(i, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&ready, graph, 0));
  std::vector<double> us;
  for (int r = -warm_ups; r < repetitions; ++r) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(ready, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (r >= 0) us.push_back(ms * 1e3 / calls);
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return Median(std::move(us));
}

/// Ends the program where there is no GPU.
inline void NeedGpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  std::fprintf(stderr, "%s: no GPU here: %s\n", program_invocation_short_name, cudaGetErrorString(error));
  std::exit(1);
}

}  // namespace kvmanager
