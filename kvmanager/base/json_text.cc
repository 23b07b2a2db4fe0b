#include "kvmanager/base/json_text.h"

#include <nlohmann/json.hpp>

namespace kvmanager {

std::string JsonText(const nlohmann::json& value) {
  if (value.is_structured()) return value.type_name();
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kJsonTextBytesMax) text.replace(kJsonTextBytesMax, std::string::npos, "...");
  return text;
}

}  // namespace kvmanager
