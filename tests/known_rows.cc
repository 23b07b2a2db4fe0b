#include "tests/known_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvmanager::testing {

const KnownRows::Rows& KnownRows::Of(uint64_t seed) {
  Seed& known = seeds_.at(seed);
  std::call_once(known.once, [&] {
    const Source source = SourceOf(seed);
    ModelSequence model(source.shape);
    LoadModel(model, source, 0, kTokens, kTokens);
    model.MarkShared(kTokens);
    for (int layer = 0; layer < kLayers; ++layer) {
      known.rows.k[layer] = source.K(layer, 0, kTokens);
      known.rows.v[layer] = source.V(layer, 0, kTokens);
      ModelSequence::Rows decoded = model.Read(layer, 0, kTokens);
      known.rows.decoded_k[layer] = std::move(decoded.k);
      known.rows.decoded_v[layer] = std::move(decoded.v);
      known.rows.q[layer] = source.Q(layer, 0, kTokens);
    }
  });
  return known.rows;
}

std::string KnownRows::Differs(uint64_t seed, Form form, int layer, uint64_t first, uint64_t tokens, const uint8_t* k,
                               const uint8_t* v) {
  std::string text;
  if (form == Form::kUnknown) return text;
  const Rows& rows = Of(seed);
  // A page is as it was written, or as its codec gives it back; both sides alike.
  for (uint64_t at = first; at < first + tokens;) {
    const uint64_t end = std::min(first + tokens, (at / 64 + 1) * 64);
    const auto same = [&](const uint8_t* got, const std::vector<uint8_t>& want) {
      return std::memcmp(got + (at - first) * kRowBytes, want.data() + at * kRowBytes, (end - at) * kRowBytes) == 0;
    };
    const bool written = same(k, rows.k[layer]) && same(v, rows.v[layer]);
    const bool decoded = form == Form::kDecoded && same(k, rows.decoded_k[layer]) && same(v, rows.decoded_v[layer]);
    if (!written && !decoded) absl::StrAppend(&text, " seed ", seed, " layer ", layer, " tokens ", at, "..", end);
    at = end;
  }
  return text;
}

bool KnownRows::SameOutput(uint64_t seed, int layer, uint64_t token, absl::Span<const float> out) {
  const MutexLock lock(mutex_);
  std::vector<float>& known = outputs_[{seed, uint64_t(layer) * kTokens + token}];
  if (known.empty()) {
    known.assign(out.begin(), out.end());
    return true;
  }
  return std::equal(out.begin(), out.end(), known.begin(),
                    [](float a, float b) { return std::abs(a - b) <= 1e-3f * (1 + std::abs(b)); });
}

}  // namespace kvmanager::testing
