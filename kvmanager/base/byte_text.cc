#include "kvmanager/base/byte_text.h"

#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<uint64_t> ParseBytes(absl::string_view field, absl::string_view text) {
  constexpr absl::string_view kBound = "a number of bytes such as 4096, 64KiB, 512MiB, 8GiB or 1TiB";
  absl::string_view number = text;
  int shift = 0;
  for (const auto& [suffix, bits] :
       {std::pair<absl::string_view, int>{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    if (absl::ConsumeSuffix(&number, suffix)) {
      shift = bits;
      break;
    }
  }
  uint64_t whole;
  if (absl::SimpleAtoi(number, &whole) && !absl::StartsWith(number, "-")) {
    if (whole > (UINT64_MAX >> shift)) return InvalidField(field, text, kBound);
    return whole << shift;
  }
  double real;
  if (shift == 0 || !absl::SimpleAtod(number, &real) || !(real >= 0) || real > 1e6)
    return InvalidField(field, text, kBound);
  return static_cast<uint64_t>(std::ldexp(real, shift));
}

}  // namespace kvmanager
