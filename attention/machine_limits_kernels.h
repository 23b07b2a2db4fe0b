// The inner loops of machine_limits.cc, in the widest instruction set that the processor runs.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager {

/// Reads `bytes` (a multiple of 1024) once, in order; the result depends on all of them.
uint64_t StreamRead(const uint8_t* data, size_t bytes);
/// Runs `rounds` rounds of independent multiply-adds; returns how many fp32 multiply-adds those were.
uint64_t MultiplyAdds(uint64_t rounds, float* sink);
/// Runs `rounds` rounds of independent dot products of bytes; returns how many multiply-adds of 8 bits those were.
uint64_t ByteMultiplyAdds(uint64_t rounds, float* sink);
/// Runs `rounds` rounds of independent look-ups of bytes in tables of 256; returns how many look-ups those were.
uint64_t LookUps(uint64_t rounds, float* sink);

}  // namespace kvmanager
