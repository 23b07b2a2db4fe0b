// A JSON value as an error shows it.
//
// A pure function; any thread.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace kvmanager {

inline constexpr size_t kJsonTextBytesMax = 120;

/// The value in printable ASCII, cut after kJsonTextBytesMax bytes; of an array or an object its kind alone. (Printing
/// one recurses, and a text nests as deep as it is long.)
std::string JsonText(const nlohmann::json& value);

}  // namespace kvmanager
