// The conformance suite: everything that kvmanager_codec.h demands and that can be seen from outside, tried on a shared
// object.
//
// Every check runs in a process of its own, which also loads the object, so that a crash, a hang or a write into other
// memory is a failed check with a sentence. The program codec_conformance is this; tests call it too. REQUIRES: the
// calling process has one thread (it forks).
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/registry.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

struct ConformanceOptions {
  std::string path;
  CodecParameters parameters;
  std::string calibration_path;     // empty: none
  std::string capture_path;         // what attention is tried on (docs/calibration.md); empty: white noise
  std::vector<PageLayout> layouts;  // empty: five unlike ones, or the geometry of the artifact or the capture
  int check_seconds_max = 120;      // of one check, times 8 where every instruction is instrumented
  int rounds = 200;                 // of random bytes, of making and destroying
};

struct ConformanceCheck {
  enum class Outcome { kPassed, kFailed, kNotTaken };  // kNotTaken: the codec does not take the layout, which it may
  std::string name;                                    // "decode: one head alone is that head of all"
  std::string where;                                   // the layout, as "f16x2x64x64", or empty
  Outcome outcome = Outcome::kFailed;
  std::string note;  // what is wrong, or what was measured
};

struct ConformanceReport {
  std::vector<ConformanceCheck> checks;
  int count(ConformanceCheck::Outcome outcome) const;
  int passed() const { return count(ConformanceCheck::Outcome::kPassed); }
  int failed() const { return count(ConformanceCheck::Outcome::kFailed); }
};

/// Runs every check; each is written to `out` as it ends, with "N passed, N failed" as the last line (nullptr: nothing
/// is written). Errors: a file that cannot be read; a capture that fits neither the artifact nor the layouts; the
/// object itself is judged by the checks.
absl::StatusOr<ConformanceReport> RunConformance(const ConformanceOptions& options, FILE* out);

/// "f16x8x128x64": dtype (f16, bf16), KV heads, head_dim, page_tokens.
absl::StatusOr<PageLayout> ParseLayoutText(absl::string_view text);
std::string LayoutText(const PageLayout& layout);

}  // namespace kvmanager
