#include "kvmanager/base/byte_text.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// What a text says. beyond: 2^64 or more.
struct Read {
  uint64_t bytes = 0;
  bool beyond = false;
};

// Nothing: it is no number.
std::optional<Read> ReadBytes(absl::string_view number) {
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
    const bool beyond = whole > (UINT64_MAX >> shift);
    return Read{beyond ? 0 : whole << shift, beyond};
  }
  const bool digits = !number.empty() && std::all_of(number.begin(), number.end(), absl::ascii_isdigit);
  if (digits) return Read{.beyond = true};
  double real;
  if (shift == 0 || !absl::SimpleAtod(number, &real) || !(real >= 0)) return std::nullopt;
  const double bytes = std::ldexp(real, shift);
  if (bytes >= 0x1p64) return Read{.beyond = true};
  return Read{static_cast<uint64_t>(bytes), false};
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view field, absl::string_view text, uint64_t low, uint64_t high) {
  const std::optional<Read> read = ReadBytes(text);
  const std::string range = absl::StrCat(low, "..", high, " bytes");
  if (!read.has_value()) {
    return InvalidField(field, text,
                        absl::StrCat("a number of bytes such as 4096, 64KiB, 512MiB, 8GiB or 1TiB, of ", range));
  }
  if (read->beyond || read->bytes < low || read->bytes > high) return InvalidField(field, text, range);
  return read->bytes;
}

}  // namespace kvmanager
