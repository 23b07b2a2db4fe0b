// A codec policy: which codec each layer's pages have, and which pages stay raw.
//
//   SPEC[;FIRST..LAST[,FIRST..LAST...]=SPEC]...[;sinks=N]
//
// The first clause is the codec of every layer that no later clause names; layers are counted from 0, and one alone may
// be written without "..". No layer is named twice. Each SPEC is as for a cache of one codec, with parameters and an
// artifact of its own, so K and V may differ too. Pages of layers whose codec is raw are not encoded. `sinks` tokens at
// the beginning of every context stay raw, rounded up to whole pages: their pages are not encoded.
//
//   hack:k_bits=3,v_bits=2;0..1,30..31=hack:k_bits=8,v_bits=8;sinks=64
//
// The canonical text names each codec's layers once, in ascending order, and drops clauses that say nothing; a policy
// of one codec and no sinks is that codec. Its calibration digest is the one of its artifact; of several artifacts, the
// SHA-256 of their digests (64 hexadecimal digits each, ascending, a newline behind each). A codec that shares a budget
// among layers (zack+hack, allocation=model) shares it among those of its clauses.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Makes `registry` read texts with a ';'.
void RegisterPolicy(CodecRegistry& registry);

}  // namespace kvmanager
