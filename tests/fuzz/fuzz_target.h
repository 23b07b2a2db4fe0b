// A fuzz target: something that takes hostile bytes. smoke_main.cc runs all of them for a bounded time in every test
// run.
//
// A target is made once and used from one thread. A broken promise aborts; everything else is fine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

std::unique_ptr<FuzzTarget> MakeRpcTarget();          // bytes into a connection of a running daemon
std::unique_ptr<FuzzTarget> MakeStepTarget();         // a StepRequest, checked against its cache
std::unique_ptr<FuzzTarget> MakePeerWireTarget();     // frames between daemons
std::unique_ptr<FuzzTarget> MakePeerAuthTarget();     // the exchange of keys before frames
std::unique_ptr<FuzzTarget> MakePeerStreamTarget();   // bytes into a receiving transport
std::unique_ptr<FuzzTarget> MakeManifestTarget();     // a hand-off's manifest, and what the store makes of it
std::unique_ptr<FuzzTarget> MakePageTarget();         // an encoded page from a peer
std::unique_ptr<FuzzTarget> MakeCodecSpecTarget();    // NAME:key=value,...
std::unique_ptr<FuzzTarget> MakeSafetensorsTarget();  // a model's file
std::unique_ptr<FuzzTarget> MakeCalibrationTarget();  // an artifact, its digest right or not

}  // namespace kvmanager::fuzz
