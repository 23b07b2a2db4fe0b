// What kernels read of a layer beside its pages: plain structs, the same for host and device.
#pragma once

#include <cstdint>

namespace kvmanager::zack_hack {

// Widths of a head's side: 4 bits for each segment in stored order, 0..4, of K also 8. Attention has code without
// branches for those that allocation by heads gives most heads at 56 and 48 bytes, with V's norms and without (real
// keys and values, and made-up ones), and made-up ones at 76; other widths take a path that asks for each segment's.
// clang-format off
#define KVMANAGER_ZACK_HACK_KEYS(X) \
  X(0x00013444) X(0x00122344) X(0x00023344) X(0x00113344) X(0x00123334) X(0x01122334) \
  X(0x01222234) X(0x11222233) X(0x11122234) X(0x00022444) X(0x01222333) X(0x01112344) \
  X(0x00001344) X(0x00012234) X(0x00002334) X(0x00011334) X(0x01112223) X(0x00111234) \
  X(0x00012333) X(0x00112224) X(0x00122223) X(0x00022344) X(0x00012444) X(0x00013344) \
  X(0x00122334) X(0x00112344) X(0x00113334) X(0x01122234) X(0x01122333) X(0x01222233) \
  X(0x11122233) X(0x01233444) X(0x00234444)
#define KVMANAGER_ZACK_HACK_VALUES(X) X(0x00000134) X(0x00001223) X(0x00000233) X(0x00001133) X(0x00000224) \
  X(0x00000124) X(0x00001123) X(0x00000133) X(0x00000223) X(0x00000034) X(0x00001344) X(0x00012234)
// clang-format on

// What kernels know: 0..kDeviceWidthMax, and of K kDeviceWideWidth.
inline constexpr int kDeviceWidthMax = 4, kDeviceWideWidth = 8;

/// One head of a layer's pages: hack_format.h's record with 64 tokens, 8-bit metadata and k_axis=channel.
struct alignas(16) ZackHackHead {
  uint32_t offset;     // of the record in the page
  uint32_t bytes;      // of it, a multiple of 64
  uint32_t widths[2];  // of K, of V
};

/// Of all segments together.
constexpr uint32_t SumOfWidths(uint32_t widths) {
  uint32_t sum = 0;
  for (; widths != 0; widths >>= 4) sum += widths & 15;
  return sum;
}

}  // namespace kvmanager::zack_hack
