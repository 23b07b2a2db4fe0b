// XXH3-64's arithmetic for long inputs, with seed 0 and the default secret, in the pieces in which a GPU's threads do
// it (Collet, xxHash 0.8, doc/xxhash_spec.md, "XXH3 algorithm", long inputs). Plain functions, so that a test on the
// CPU runs what the kernel runs.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KV_HASH_FN __host__ __device__ __forceinline__
#else
#define KV_HASH_FN inline
#endif

namespace kvmanager::page_hash {

constexpr uint32_t kSecretBytes = 192;
constexpr uint32_t kStripeBytes = 64;
constexpr uint32_t kBlockStripes = (kSecretBytes - kStripeBytes) / 8;
constexpr uint32_t kBlockBytes = kBlockStripes * kStripeBytes;
constexpr uint32_t kScrambleAt = kSecretBytes - kStripeBytes;
constexpr uint32_t kLastStripeAt = kSecretBytes - kStripeBytes - 7;
constexpr uint32_t kMergeAt = 11;
constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;

/// The i-th of the eight accumulators, before anything.
KV_HASH_FN uint64_t Initial(uint32_t i) {
  const uint64_t values[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                              kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  return values[i];
}

/// What a stripe adds to an accumulator: its own word of the stripe, the neighbour's, and the secret's word.
KV_HASH_FN uint64_t Added(uint64_t own, uint64_t neighbour, uint64_t secret) {
  const uint64_t keyed = own ^ secret;
  return neighbour + (keyed & 0xffffffff) * (keyed >> 32);
}

KV_HASH_FN uint64_t Scrambled(uint64_t accumulator, uint64_t secret) {
  return ((accumulator ^ accumulator >> 47) ^ secret) * kPrime32_1;
}

/// Eight bytes at any address.
KV_HASH_FN uint64_t Load(const uint8_t* p) {
  uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | p[i];
  return word;
}

KV_HASH_FN uint64_t FoldedProduct(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return a * b ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

/// The hash, of all eight accumulators.
KV_HASH_FN uint64_t Merged(const uint64_t* accumulators, const uint8_t* secret, uint64_t bytes) {
  uint64_t hash = bytes * kPrime64_1;
  for (int i = 0; i < 4; ++i) {
    hash += FoldedProduct(accumulators[2 * i] ^ Load(secret + kMergeAt + 16 * i),
                          accumulators[2 * i + 1] ^ Load(secret + kMergeAt + 16 * i + 8));
  }
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

}  // namespace kvmanager::page_hash
