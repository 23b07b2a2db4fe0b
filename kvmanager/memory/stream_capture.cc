#include "kvmanager/memory/stream_capture.h"

#include <cuda_runtime_api.h>

namespace kvmanager {

bool IsCapturing(CUstream_st* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace kvmanager
