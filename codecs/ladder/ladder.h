// A codec ladder: codecs for the same pages, each in fewer bytes than the one before.
//
//   ladder=SPEC>SPEC[>SPEC[>SPEC]][;sinks=N]
//
// New pages are encoded by the first codec, rung 0. When memory is short the store encodes cold pages again by the next
// one (lower_pages.h) before it evicts any; attention reads pages of every rung in one step. A SPEC is the text of a
// codec or of a policy. `sinks` is said once, in the first rung or behind the last, and holds for all.
//
//   ladder=zack+hack:bytes=56,calibration=m>zack+hack:bytes=32,calibration=m;sinks=64
//
// Rules: 2 to 4 rungs (Codec::kRungsMax); each encodes pages, and leaves outputs in the model's space (no fold=1); a
// page of any layer is never larger on a later rung, and smaller on average; all rungs keep the same layers raw. In the
// canonical text each rung is canonical, and ";sinks=N" stands last. The version is made of the versions of all rungs;
// what else a codec says is said by rung 0. A ladder is for caches in host memory: it does nothing on a GPU.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Makes `registry` read texts that begin with "ladder=". A rung that is a policy, or sinks, need RegisterPolicy, too.
void RegisterLadder(CodecRegistry& registry);

}  // namespace kvmanager
