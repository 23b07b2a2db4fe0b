#include "kvmanager/base/tenant_label.h"

#include "kvmanager/base/sha256.h"

namespace kvmanager {

std::string TenantLabel(absl::string_view tenant) {
  if (tenant.empty()) return "none";
  const auto* const bytes = reinterpret_cast<const uint8_t*>(tenant.data());
  return Sha256Stream().Add(absl::MakeConstSpan(bytes, tenant.size())).Finish().ToHex(4);
}

}  // namespace kvmanager
