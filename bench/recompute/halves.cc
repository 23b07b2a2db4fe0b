#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "bench/recompute/machine.h"
#include "kvmanager/base/half.h"

namespace kvmanager::recompute {

void FillWithHalves(uint8_t* bytes, size_t size, float scale) {
  std::mt19937 random(1);
  constexpr size_t kDistinct = 1 << 21;
  std::vector<uint16_t> some(2 * kDistinct);
  for (size_t i = 0; i < kDistinct; ++i) {
    some[i] = some[kDistinct + i] = FloatToHalf(scale * (float(random() % 2001) / 1000 - 1));
  }
  for (size_t begin = 0; begin < size; begin += 2 * kDistinct) {
    std::memcpy(bytes + begin, &some[random() % kDistinct], std::min(2 * kDistinct, size - begin));
  }
}

}  // namespace kvmanager::recompute
