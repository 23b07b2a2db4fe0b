// The clock that multiprocessors run at, as benchmarks note it beside times: a GPU lowers it by itself for a while.
#pragma once

#include <cstdint>

struct CUstream_st;  // a stream of CUDA's runtime

namespace kvmanager {

struct SmClockSample {
  uint64_t cycles = 0, ns = 0;
  double mhz() const { return ns == 0 ? 0 : double(cycles) * 1e3 / double(ns); }
};

/// Fills `sample`, in memory that the device writes, in the order of `stream`; takes one multiprocessor some 10 us.
/// Returns a cudaError_t.
int SampleSmClock(SmClockSample* sample, CUstream_st* stream);

}  // namespace kvmanager
