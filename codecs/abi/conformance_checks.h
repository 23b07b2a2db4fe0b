// The checks of the conformance suite, each a function that runs in a process of its own.
//
// A check returns a note ("relative error of K 0.004"), or what is wrong as an error's message.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/abi/conformance_subject.h"

namespace kvmanager::conformance {

struct Check {
  const char* name;
  absl::StatusOr<std::string> (*run)(const Case&);
};

/// The note of a check of describe for a layout that the codec does not take, before its text.
inline constexpr char kNotTaken[] = "does not take this layout: ";

/// Of the object, whatever the layout.
std::vector<Check> TableChecks();
/// Of a layout, in this order; the first one finds out whether the codec takes it.
std::vector<Check> LayoutChecks();
/// Those of them about attention (conformance_attend.cc).
std::vector<Check> AttendChecks();

}  // namespace kvmanager::conformance
