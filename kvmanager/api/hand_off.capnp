# The manifest of a hand-off between two daemons: opaque to the transport, which carries it ahead of the pages. The rules for
# changing it are those of kvmanager.capnp; a receiver refuses another `version`.
@0x920175bcafa2e9ec;

using Cxx = import "/capnp/c++.capnp";
using Api = import "kvmanager.capnp";
$Cxx.namespace("kvmanager::api");

struct HandOffManifest {
  version @0 :UInt16 = 1;
  config @1 :Api.CacheConfig;
  codecVersion @2 :UInt32;
  tokens @3 :UInt64;
  blocks @4 :List(Api.BlockName);  # full blocks, in order; an empty key: not published
  pages @5 :List(Page);            # in the order of sending; sizes and checksums travel with the transport's offer
  blob @6 :Data;
  promptTokens @7 :UInt64;         # of codecs with an index per sequence: what it was made with, 0 where nothing is known
  indexIterations @8 :UInt32;

  struct Page {
    block @0 :UInt32;              # blocks.size(): the open page
    layer @1 :UInt32;
    encoded @2 :Bool;
  }
}
