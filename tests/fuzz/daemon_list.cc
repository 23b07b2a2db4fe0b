#include "tests/fuzz/fuzz_target.h"

namespace kvmanager::fuzz {

absl::Span<const NamedTarget> DaemonTargets() {
  static constexpr NamedTarget kTargets[] = {
      {"rpc", MakeRpcTarget},
      {"peer_stream", MakePeerStreamTarget},
  };
  return kTargets;
}

}  // namespace kvmanager::fuzz
