// A fuzz target: something that takes hostile bytes. smoke_main.cc runs all of them for a bounded time in every test
// run; libfuzzer_main.cc runs one, guided by coverage (tools/fuzz).
//
// A target is made once and used from one thread. A broken promise aborts; everything else is fine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::fuzz {

class FuzzTarget {
 public:
  virtual ~FuzzTarget() = default;
  /// Well-formed inputs that mutation starts from.
  virtual std::vector<std::string> Seeds() = 0;
  virtual void Run(absl::Span<const uint8_t> input) = 0;
  /// After many runs: what was given is given back, and honest input still works. Aborts if not.
  virtual void Check() {}
};

std::unique_ptr<FuzzTarget> MakeRpcTarget();            // bytes into a connection of a running daemon
std::unique_ptr<FuzzTarget> MakeStepTarget();           // a StepRequest, checked against its cache
std::unique_ptr<FuzzTarget> MakePeerWireTarget();       // frames between daemons
std::unique_ptr<FuzzTarget> MakePeerAuthTarget();       // the exchange of keys before frames
std::unique_ptr<FuzzTarget> MakePeerStreamTarget();     // bytes into a receiving transport
std::unique_ptr<FuzzTarget> MakeManifestTarget();       // a hand-off's manifest, and what the store makes of it
std::unique_ptr<FuzzTarget> MakePageTarget();           // an encoded page from a peer
std::unique_ptr<FuzzTarget> MakeCodecSpecTarget();      // NAME:key=value,...
std::unique_ptr<FuzzTarget> MakeSafetensorsTarget();    // a model's file
std::unique_ptr<FuzzTarget> MakeCalibrationTarget();    // an artifact, its digest right or not
std::unique_ptr<FuzzTarget> MakeClientMessageTarget();  // a cache's configuration, names, digests of a client
std::unique_ptr<FuzzTarget>
MakeDaemonMessageTarget();                             // a daemon's descriptions, in C++ and as the C client gives them
std::unique_ptr<FuzzTarget> MakeSocketStreamTarget();  // messages and descriptors on a socket
std::unique_ptr<FuzzTarget> MakeHttpTarget();          // requests to the pages for people and Prometheus
std::unique_ptr<FuzzTarget> MakeCertificateTarget();   // a certificate in a TLS handshake
std::unique_ptr<FuzzTarget> MakeTlsFilesTarget();      // files of certificates and keys
std::unique_ptr<FuzzTarget> MakeOptionsTarget();       // flags and their file
std::unique_ptr<FuzzTarget> MakeTenantsTarget();       // the tenants' file
std::unique_ptr<FuzzTarget> MakeTextTarget();          // addresses, numbers, failpoints, JSON of engines, metrics
std::unique_ptr<FuzzTarget> MakeTraceTarget();         // requests that the simulator replays
std::unique_ptr<FuzzTarget> MakePluginTarget();        // what a codec plug-in says of itself
std::unique_ptr<FuzzTarget> MakeDiskTarget();          // what a disk has of blocks
std::unique_ptr<FuzzTarget> MakeUcxTarget();           // packets of the UCX process, a peer's UCX memory
std::unique_ptr<FuzzTarget> MakeReadingTarget();       // plans of attention against ReadingRule

struct NamedTarget {
  const char* name;  // also of its folder in corpus/
  std::unique_ptr<FuzzTarget> (*make)();
};

// By what they need to be linked: parsers alone, every codec, a whole daemon.
absl::Span<const NamedTarget> ParserTargets();
absl::Span<const NamedTarget> CodecTargets();
absl::Span<const NamedTarget> DaemonTargets();

}  // namespace kvmanager::fuzz
