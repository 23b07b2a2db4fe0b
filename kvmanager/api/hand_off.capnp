# The manifests of a hand-off between two daemons, opaque to the transport: the first goes ahead of the pages, the last comes when
# the sender's sequence is complete. The rules for changing them are those of kvmanager.capnp; a receiver refuses another `version`.
# Pages are in the order of their numbers; their sizes travel with the transport's parts, their checksums with the pages.
@0x920175bcafa2e9ec;

using Cxx = import "/capnp/c++.capnp";
using Api = import "kvmanager.capnp";
$Cxx.namespace("kvmanager::api");

struct HandOffManifest {
  version @0 :UInt16 = 1;          # 2; 3 if activations are offered; 1 was a hand-off in one part
  config @1 :Api.CacheConfig;
  codecVersion @2 :UInt32;
  tokens @3 :UInt64;               # of every layer, once the sender has appended them
  blocks @4 :List(Api.BlockName);  # full blocks, in order; an empty key: not published yet
  pages @5 :List(Page);            # aged ones: encoded, or raw where the codec keeps them so (sinks, raw layers)
  blob @6 :Data;                   # of version 1, here and below
  promptTokens @7 :UInt64;
  indexIterations @8 :UInt32;
  aged @9 :List(UInt32);           # [layers] pages before this one are read encoded, unless the codec declined them
  activations @10 :List(Page);
  # Of some of `pages`, in their order, numbered behind them; encoded is true. The receiver wants a page in one of the two forms:
  # as it is, or as activations from which it recomputes K and V.

  struct Page {
    block @0 :UInt32;              # blocks.size(): the open page
    layer @1 :UInt32;
    encoded @2 :Bool;              # false in the last manifest
  }
}

struct HandOffLastManifest {
  version @0 :UInt16 = 2;
  blocks @1 :List(Api.BlockName);  # as in the first: names since then
  pages @2 :List(HandOffManifest.Page);   # those that travel raw: numbered behind the first's, its activations included
  blob @3 :Data;
  promptTokens @4 :UInt64;         # of codecs with an index per sequence: what it was made with, 0 where nothing is known
  indexIterations @5 :UInt32;
}
