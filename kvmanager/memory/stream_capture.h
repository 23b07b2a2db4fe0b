// Whether work on a stream becomes part of a CUDA graph instead of being run.
#pragma once

struct CUstream_st;

namespace kvmanager {

/// What is enqueued on `stream` now would be captured, or it cannot be said. Any thread whose device is the stream's;
/// the capture goes on.
bool IsCapturing(CUstream_st* stream);

}  // namespace kvmanager
