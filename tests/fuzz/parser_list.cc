#include "tests/fuzz/fuzz_target.h"

namespace kvmanager::fuzz {

absl::Span<const NamedTarget> ParserTargets() {
  static constexpr NamedTarget kTargets[] = {
      {"step", MakeStepTarget},
      {"client_message", MakeClientMessageTarget},
      {"daemon_message", MakeDaemonMessageTarget},
      {"peer_wire", MakePeerWireTarget},
      {"peer_auth", MakePeerAuthTarget},
      {"socket_stream", MakeSocketStreamTarget},
      {"http", MakeHttpTarget},
      {"certificate", MakeCertificateTarget},
      {"tls_files", MakeTlsFilesTarget},
      {"options", MakeOptionsTarget},
      {"tenants", MakeTenantsTarget},
      {"text", MakeTextTarget},
      {"trace", MakeTraceTarget},
      {"plugin", MakePluginTarget},
      {"ucx", MakeUcxTarget},
      {"disk", MakeDiskTarget},
      {"safetensors", MakeSafetensorsTarget},
      {"reading", MakeReadingTarget},
  };
  return kTargets;
}

}  // namespace kvmanager::fuzz
