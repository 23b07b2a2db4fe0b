// A codec policy: which codec each layer's pages have, and which pages stay raw. Every cache's codec passes here.
//
//   SPEC[;FIRST..LAST[,FIRST..LAST...]=SPEC]...[;sinks=N]
//
// The first clause is the codec of every layer that no later clause names; layers are counted from 0, and one alone may
// be written without "..". No layer is named twice. Each SPEC is as for a cache of one codec, with parameters and an
// artifact of its own, so K and V may differ too. Pages of layers whose codec is raw are not encoded. `sinks` tokens at
// the beginning of every context stay raw, rounded up to whole pages: their pages are not encoded. A cache keeps one
// page if its text has no such clause (CodecRegistry::CreateForCache); sinks=0 turns that off.
//
//   hack:k_bits=3,v_bits=2;0..1,30..31=hack:k_bits=8,v_bits=8;sinks=64
//
// The canonical text names each codec's layers once, in ascending order, and drops clauses that say nothing; sinks=0
// stays, since without it a cache has sinks. A policy whose codecs all keep pages raw is that codec, without sinks. A
// policy of one codec has that codec's name, version and sizes. Its calibration digest is the one of its artifact; of
// several artifacts, the SHA-256 of their digests (64 hexadecimal digits each, ascending, a newline behind each). A
// codec that shares a budget among layers (zack+hack, allocation=model) shares it among those of its clauses.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Makes `registry` read texts with a ';', and keep sinks of caches.
void RegisterPolicy(CodecRegistry& registry);

}  // namespace kvmanager
