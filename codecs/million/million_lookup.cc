#include "codecs/million/million_lookup.h"

#include <cstring>

#include "codecs/million/million_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::million {
namespace {

struct Indices {
  uint16_t at[kStripTokens];  // in the order of TokenAt
};

Indices Unpack(const SideLayout& side, const uint8_t* strip, int subspace) {
  uint16_t tokens[kStripTokens];
  UnpackIndices(side, strip, subspace, tokens);
  Indices indices;
  for (int n = 0; n < kStripTokens; ++n) indices.at[n] = tokens[TokenAt(n)];
  return indices;
}

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Word k of the result: byte k of a, b, c and d.
void Transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t* out) {
  constexpr uint32_t kEven = 0x00ff00ff, kOdd = 0xff00ff00;
  const uint32_t ab02 = (a & kEven) | (b & kEven) << 8, ab13 = (a & kOdd) >> 8 | (b & kOdd);
  const uint32_t cd02 = (c & kEven) | (d & kEven) << 8, cd13 = (c & kOdd) >> 8 | (d & kOdd);
  out[0] = (ab02 & 0xffff) | cd02 << 16;
  out[1] = (ab13 & 0xffff) | cd13 << 16;
  out[2] = ab02 >> 16 | (cd02 & 0xffff0000);
  out[3] = ab13 >> 16 | (cd13 & 0xffff0000);
}

void LookUpK(const SideLayout& side, const SideTable& table, const uint8_t* strip, uint32_t* words) {
  const int width = side.width;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(words);
  for (int m = 0; m < side.subspaces; ++m) {
    const Indices indices = Unpack(side, strip, m);
    const uint8_t* codes = table.by_index + size_t(m) * side.centroids * width;
    if (width % 4 == 0) {
      for (int k = 0; k < width; k += 4) {
        uint32_t* out = words + size_t(m * width + k) / 4 * kStripTokens;
        for (int n = 0; n < kStripTokens; ++n) out[n] = Load<uint32_t>(codes + size_t(indices.at[n]) * width + k);
      }
    } else if (width == 2) {
      uint8_t* out = bytes + size_t(m) / 2 * 4 * kStripTokens + m % 2 * 2;
      for (int n = 0; n < kStripTokens; ++n) {
        const uint16_t pair = Load<uint16_t>(codes + size_t(indices.at[n]) * 2);
        std::memcpy(out + 4 * n, &pair, 2);
      }
    } else {
      for (int k = 0; k < width; ++k) {
        const int c = m * width + k;
        uint8_t* out = bytes + size_t(c) / 4 * 4 * kStripTokens + c % 4;
        for (int n = 0; n < kStripTokens; ++n) out[4 * n] = codes[size_t(indices.at[n]) * width + k];
      }
    }
  }
}

void LookUpV(const SideLayout& side, const SideTable& table, const uint8_t* strip, uint32_t* words) {
  const int width = side.width;
  for (int m = 0; m < side.subspaces; ++m) {
    const Indices indices = Unpack(side, strip, m);
    const uint8_t* codes = table.by_index + size_t(m) * side.centroids * width;
    for (int j = 0; j < kStripTokens / 4; ++j) {
      const uint8_t* of[4];
      for (int i = 0; i < 4; ++i) of[i] = codes + size_t(indices.at[4 * j + i]) * width;
      const auto at = [&](int k) {
        const size_t channel = size_t(m) * width + k;
        return words + channel / 4 * kStripTokens + 4 * j + channel % 4;
      };
      int k = 0;
      for (; width % 4 == 0 && k < width; k += 4) {
        Transpose(Load<uint32_t>(of[0] + k), Load<uint32_t>(of[1] + k), Load<uint32_t>(of[2] + k),
                  Load<uint32_t>(of[3] + k), at(k));
      }
      for (; width % 2 == 0 && k < width; k += 2) {
        uint32_t pair[4];
        Transpose(Load<uint16_t>(of[0] + k), Load<uint16_t>(of[1] + k), Load<uint16_t>(of[2] + k),
                  Load<uint16_t>(of[3] + k), pair);
        std::memcpy(at(k), pair, 2 * sizeof(uint32_t));
      }
      for (; k < width; ++k) {
        *at(k) = uint32_t(of[0][k]) | uint32_t(of[1][k]) << 8 | uint32_t(of[2][k]) << 16 | uint32_t(of[3][k]) << 24;
      }
    }
  }
}

}  // namespace

void LookUpKByAddress(const SideLayout& side, const SideTable& table, int first, int channels,
                      const uint8_t* const* strips, int count, uint32_t* words) {
  KV_CHECK(first == 0 && channels == side.subspaces * side.width);
  for (int i = 0; i < count; ++i) LookUpK(side, table, strips[i], words + StripWords(channels) * i);
}

void LookUpVByAddress(const SideLayout& side, const SideTable& table, int first, int channels,
                      const uint8_t* const* strips, int count, uint32_t* words) {
  KV_CHECK(first == 0 && channels == side.subspaces * side.width);
  for (int i = 0; i < count; ++i) LookUpV(side, table, strips[i], words + StripWords(channels) * i);
}

bool PermutesServe(int bits) {
#if defined(__x86_64__)
  return bits <= kPermuteBitsMax && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

#if !defined(__x86_64__)
LookUpFunction LookUpKByPermute(const SideLayout&) { return nullptr; }
LookUpFunction LookUpVByPermute(const SideLayout&) { return nullptr; }
#endif

}  // namespace kvmanager::million
