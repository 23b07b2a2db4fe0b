# The RPC API of kvmanagerd: what engines and kvctl speak, over a Unix socket or TCP (Cap'n Proto RPC, two-party).
#
# Rules
#  * A lease is a capability. Whoever holds a Sequence, Cache or Arena holds what it names; dropping it, or dying, gives it back.
#  * Names and leases travel here, tensors by mapping: an Arena is a memfd (at most one descriptor per message). The inline
#    variant of a tensor copies it through the socket, for small and remote clients.
#  * Every reply but ping's carries a Status, called status or, where that name was taken, error. A request that the daemon understands but refuses is a reply with a code, a field, its value
#    and its bound; nothing has changed, batches are all or nothing, and the connection lives. Malformed framing, invalid Cap'n
#    Proto and messages over 32 MiB end their own connection and its leases, nothing else.
#  * Every call may be cancelled.
#
# Evolution (docs/api.md, "Changing the schema")
#  * Fields, methods, enumerants and union members are only added, with the next free number; none is removed, renumbered,
#    retyped or given another meaning. A field's default must mean what its absence meant before.
#  * A method that must change its meaning becomes a new method; the old one stays for two minor versions.
#  * apiMinor grows with every addition; apiMajor with nothing so far. A client refuses another apiMajor, and asks for features by
#    name (HelloReply.features), never by version.
#  * Byte formats inside Data (block keys, tensors, tickets) are described here and change only by a new field.
@0xaab65c2f9c52c08c;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("kvmanager::api");

const apiMajor :UInt16 = 1;
const apiMinor :UInt16 = 20;

struct Status {
  code @0 :UInt16;     # absl::StatusCode: 0 ok, 3 INVALID_ARGUMENT, 5 NOT_FOUND, 8 RESOURCE_EXHAUSTED, 9 FAILED_PRECONDITION, ...
  message @1 :Text;
  field @2 :Text;      # what the error is about, its value, and what would be allowed; empty where there is no such thing
  value @3 :Text;
  bound @4 :Text;
}

enum DType { float16 @0; bfloat16 @1; float32 @2; }

struct CacheConfig {
  # The identity of a model's cache. All of it is in the cache digest, and the digest in every block key.
  model @0 :Text;
  revision @1 :Text;
  tenant @2 :Text;
  # A salt: caches of different tenants share nothing. In a request a name of this client's own; in a CacheInfo the full name, which
  # begins with "uid:N/" for a user N other than root and the daemon's, and with "tcp:/" for clients over TCP, unless the operator
  # lists the tenant. Names that begin with "uid:" or "tcp:" are INVALID_ARGUMENT in requests; a tenant that is listed, and not this
  # client's, is PERMISSION_DENIED.
  rope @3 :Text;                 # RoPE facts as the engine writes them
  calibrationDigest @4 :Text;    # if not empty, the artifact that the codec names must have it (64 hexadecimal digits)
  layers @5 :UInt32;
  kvHeads @6 :UInt32;            # of this shard
  queryHeads @7 :UInt32;         # of this shard
  headDim @8 :UInt32;
  pageTokens @9 :UInt32 = 64;
  dtype @10 :DType = float16;    # of raw K and V: float16 or bfloat16
  tensorParallelRank @11 :UInt32;
  tensorParallelSize @12 :UInt32 = 1;
  codec @13 :Text = "raw";       # NAME[:key=value,...], or a policy: SPEC[;FIRST..LAST=SPEC...][;sinks=N]. Without sinks, a lossy
                                 # codec keeps the first page of every context raw.
  lagPages @14 :UInt32 = 2;      # newest full pages that are read raw
  device @15 :Int32 = -1;        # where pages are computed on: -1: host memory; else the GPU of the daemon with this ordinal.
                                 # Not part of the digest: blocks have the same names and bytes everywhere. Feature "device".
  hiddenSize @16 :UInt32;
  # Values per token of activations X, the input of a layer's K and V projections (after its norm): steps may then give X, too. Part
  # of the digest unless 0: none are kept, nor are they in GPU memory. Feature "recompute".
}

struct CacheInfo {
  cacheId @0 :UInt32;
  config @1 :CacheConfig;        # with the codec's canonical form
  digest @2 :Data;               # 32 bytes
  codecVersion @3 :UInt32;
  rawPageBytes @4 :UInt64;
  encodedPageBytes @5 :UInt64;   # of the largest layer's, padding included
  payloadPageBytes @6 :UInt64;   # codes, metadata and sums alone, the mean over layers
  sequences @7 :UInt64;
  publishedBlocks @8 :UInt64;
  residentRawBytes @9 :UInt64;
  residentEncodedBytes @10 :UInt64;
  residentActivationBytes @11 :UInt64;
  sinkTokens @12 :UInt64;        # at the beginning of every context, whose pages stay raw; whole pages
  meanEncodedPageBytes @13 :UInt64;  # the mean over layers, padding included, rounded up; 0: a daemon before schema 1.11
  poolBytes @14 :UInt64;         # of its memory, that its tenant may have at most; 0: a daemon before schema 1.14
}

struct BlockName {
  key @0 :Data;      # 32 bytes: SHA-256(parent key, cache digest, token ids as u32 little-endian); the root's parent is zeros
  tokens @1 :Data;   # 32 bytes: SHA-256(token ids as u32 little-endian), verified on a hit
}

enum MissReason { none @0; notFound @1; tokenMismatch @2; checksum @3; incomplete @4; }
# incomplete: of readBlocks alone, a page of the block is still to be encoded

struct MatchResult {
  hitBlocks @0 :UInt32;     # consecutive, from the first
  reason @1 :MissReason;    # of the first block that was no hit
  inMemory @2 :UInt32;
  # Of hitBlocks, from the first on: in the cache's own memory; the next one is in another memory or on the disk. 0: a daemon before
  # schema 1.20.
}

struct Tensor {
  # A dense array. In a batch, the rows of all entries follow one another in the order of the entries.
  union {
    none @0 :Void;
    inline @1 :Data;
    arena :group { id @2 :UInt32; offset @3 :UInt64; bytes @4 :UInt64; }   # offset: a multiple of 64
  }
}

struct StepEntry {
  sequenceId @0 :UInt64;   # of a Sequence that this connection holds
  position @1 :UInt64;     # of the first token: with k and v, the layer's token count before the step
  tokens @2 :UInt32;       # 1 in decode, more in prefill
}

struct StepRequest {
  # One layer's step for a batch of sequences: append (k and v), attend (q), or both. Causal: token i of an entry sees positions
  # 0 .. position + i. NaN and Inf in k, v or q are INVALID_ARGUMENT, and the error's field names entry, token, head and channel.
  # An arena must not change before the reply: what a client writes to q in the meantime is not checked again, and spoils its own
  # output alone.
  layer @0 :UInt32;
  entries @1 :List(StepEntry);
  k @2 :Tensor;            # [sum of tokens][kvHeads][headDim] of the cache's dtype
  v @3 :Tensor;
  q @4 :Tensor;            # [sum of tokens][queryHeads][headDim] of qDtype
  qDtype @5 :DType = float32;
  out @6 :Tensor;          # where the output goes: an arena range like q's, or none: it comes inline
  lse @7 :Tensor;          # an arena range of [sum of tokens][queryHeads] float32, or none
  wantLse @8 :Bool;        # with lse none: send it inline
  scale @9 :Float32;       # of scores; 0: 1/sqrt(headDim)
  ready @10 :UInt64;
  # Of a cache on a GPU: tensors are ranges of device arenas, qDtype is the cache's dtype, and the scale is 0. The daemon's stream
  # for this connection (openDevice) begins the step once the word `ready` is at least this; 0: at once. The reply comes when the
  # step is submitted, not when it is done: see done. NaN and Inf in k and v are found then; later calls that name the sequence are
  # INVALID_ARGUMENT and say where: it can only be dropped. Those in q spoil their own rows of out.
  x @11 :Tensor;
  # With k and v: activations, [sum of tokens][hiddenSize] of the cache's dtype, or none. They are kept of pages all of whose tokens
  # had them, beside their K and V, for a receiver of a hand-off to recompute those from. Feature "recompute".
}

struct StepReply {
  status @0 :Status;
  out @1 :Data;            # inline output, of qDtype
  lse @2 :Data;            # inline float32
  encodedPairs @3 :UInt64; # (query token, context token) pairs read in encoded form, and raw
  rawPairs @4 :UInt64;
  done @5 :UInt64;         # of a cache on a GPU: the word `done` is at least this once out and lse are there
}

struct ReadRequest {
  # K and V of tokens of one layer, as dense rows, for engines that keep pages of their own: no query, no attention. Tokens
  # position .. position + tokens - 1 of each entry must be in the layer. What a page gives depends on the sequence's operations
  # alone: the bytes that were appended while it is raw for this sequence (not aged, or declined by its codec), later what the codec
  # decodes, which is what attention on the encoded page stands for. Waits for pages that are still to be encoded, or to arrive.
  # Feature "read".
  layer @0 :UInt32;
  entries @1 :List(StepEntry);
  k @2 :Tensor;            # where K goes: an arena range of [sum of tokens][kvHeads][headDim] of the cache's dtype, or none: inline
  v @3 :Tensor;            # the same for V; not the same range
}

struct ReadReply {
  status @0 :Status;       # DATA_LOSS: the codec could not decode a page; the arena ranges may have been written to
  k @1 :Data;              # inline
  v @2 :Data;
  encodedTokens @3 :UInt64; # of all entries, that were decoded, and that were copied from raw pages
  rawTokens @4 :UInt64;
}

struct BlocksRequest {
  # Whole blocks of a cache in host memory, in the form in which they are stored, for engines that encode and decode pages
  # themselves. Pages follow one another block by block, and of a block layer by layer, each from the next multiple of 64 bytes on:
  # rawPageBytes where a page is raw, else the layer's encoded bytes. A page is raw where the codec keeps it raw (sinks, layers of a
  # policy) or declined it; a codec that stores raw pages has one form, which counts as encoded. At most 16384 pages. Feature
  # "blocks".
  firstBlock @0 :UInt32;   # place of names[0] in its sequence
  names @1 :List(BlockName);  # consecutive blocks
  pages @2 :Tensor;        # an arena range: where pages go, as many blocks as fit; or what is written, exactly
  raw @3 :Data;            # to be written: [names][layers], 1 where the page is raw, else 0
  mapped @4 :Bool;
  # Of readBlocks: pages in memory that this process may map are held there, by BlocksReply.lease, and not copied;
  # `pages` has the others, and may be none: then blocks end at the first of these. Feature "map-blocks".
  checksums @5 :Data;
  # Of writeBlocks out of a device arena: [names][layers] XXH3-64 of the pages' bytes, of 64 bits in little endian, 0 where it is not
  # known; or empty. Those of encoded pages are taken as they are, so that no CPU reads all of the pages: they are compared when a
  # page is first used, and a block for which they are wrong is lost then. Of raw pages the daemon makes them. Feature "device-blocks".
}

struct BlocksReply {
  status @0 :Status;
  # Of writeBlocks, what the daemon checks in its own copy: INVALID_ARGUMENT naming page and place where a page is not finite,
  # DATA_LOSS where it is none of its codec's. RESOURCE_EXHAUSTED: no room, nothing was written.
  blocks @1 :UInt32;       # read: from names[0] on; written, and named
  raw @2 :Data;            # of those that were read, [blocks][layers] as in the request
  bytes @3 :UInt64;        # of the range that they take, or that was copied
  reason @4 :MissReason;   # why no more were read; none: all were, or no more fit
  present @5 :UInt32;      # of those that were to be written: the daemon has them already, and copied nothing
  places @6 :Data;
  # With mapped: [blocks][layers] of where a page is, two words of 64 bits in little endian each: the slab to map, 2^64 - 1 for the
  # range, and the offset from the slab's or the range's first byte, a multiple of 64.
  checksums @7 :Data;      # with mapped: [blocks][layers] XXH3-64 of the page's bytes, of 64 bits in little endian
  lease @8 :BlocksLease;   # with mapped, where a page lies in a slab
  unmap @9 :List(UInt32);
  # With mapped: slabs of any tenant that hold nothing, and that others could have if no process mapped them; at most 64.
}

interface BlocksLease {
  # Pages that are held where they lie: until release is answered, this is dropped or 30 s have gone they are neither moved nor
  # written to. The reader compares what it copied with the checksums: the daemon has not.
  release @0 (corruptBlock :UInt32 = 0xffffffff) -> (status :Status);
  # OK: they were held all the time; UNAVAILABLE: they are not any more, and what was copied is of no use. corruptBlock: of those
  # that were read, the one whose bytes had not their checksum: the daemon compares it itself, and forgets it if that is so.
  mapSlab @1 (slab :UInt32) -> (status :Status, slab :Slab, bytes :UInt64);
  # Host memory in which pages of this lease lie. It is their tenant's alone until no process maps it any more. FAILED_PRECONDITION:
  # it is not to be mapped; read without `mapped`. Unix sockets only.
}

struct ExtendRequest {
  # Of a cache on a GPU whose pages this process attends to itself: one call for all layers of a step.
  entries @0 :List(StepEntry);   # tokens: to append (and attend from); with append false, tokens that are there
  append @1 :Bool;               # this process's kernels will write K and V of these tokens, in every layer
  attend @4 :Bool;
  # They will attend from them. A step that also fills pages which its own queries must read encoded (more than lagPages pages of one
  # sequence at once) is INVALID_ARGUMENT: append them in a step of their own.
  encodeHere @2 :Bool;           # and encode the pages that this fills, in encodeItems; else the daemon does
  words @3 :List(UInt32);
  # [entries] which u64 of the words' non-finite table this process's kernels use for the entry's sequence: 0 while all that they
  # appended to it is finite. Else the daemon refuses to publish it.
  queries @5 :List(QueryRow);
  # Of earlier steps, at most 8: where the daemon samples how good encoded pages are (DeviceInfo.samplesQueries).
}

struct QueryRow {
  layer @0 :UInt32;
  q @1 :Data;              # of one token, after RoPE: [queryHeads][headDim] of the cache's dtype; ignored if it is not finite
}

struct ExtendReply {
  status @0 :Status;
  epoch @1 :UInt64;
  # Of this plan; they grow. When this process's kernels no longer need what the plan names, and have appended what it promised,
  # its stream stores this to the word `released`. At most 4096 are outstanding.
  aged @2 :List(UInt32);
  # [entries] pages before this one are read encoded whatever their distance; others raw while they are the query's own page or
  # within lagPages of it. A page without an encoded slot is read raw.
  changes @3 :Data;
  # What this connection's tables of slots lack, as runs of u32 little-endian: entry, page, first layer, layers n, then n times
  # (raw slot, encoded slot), in units of 64 bytes from the pool's first byte; 0xffffffff: none.
  encodeItems @4 :Data;
  # With encodeHere: pages to encode behind the kernels of this step, as u32: layer, raw slot, encoded slot, 0, then u64 position of
  # the first token. For the i-th, one u32 of the words' declined ring at (encodeAt + i) % ring is 1 if the codec declined, else 0.
  encodeBatch @5 :UInt64;        # to be stored to the word `encoded` behind them; 0: nothing to encode
  encodeAt @6 :UInt32;
  choosesFrom @7 :List(UInt64);
  # [entries], of codecs whose queries choose what they read: those from this position on do, by the sequence's index; 2^64 - 1:
  # none does. An encoded slot in `changes` is then one of the index: at page 0 its codebook, at page 1 + i chunk i of its codes,
  # beside the raw slot of the page of that number, if there is one. Codes are the engine's to make, of tokens before its queries.
}

struct SequenceRequest {
  prefix @0 :List(BlockName);
  promptTokens @1 :UInt64;
  # Of the prompt, the prefix's tokens included; 0: it ends where the first append of a single token begins. Matters to codecs
  # whose queries choose what they read behind the prompt ("pq"); others ignore it. Feature "prompt-tokens".
}

struct SequenceReply {
  status @0 :Status;
  sequence @1 :Sequence;
  sequenceId @2 :UInt64;
  match @3 :MatchResult;   # the sequence begins with match.hitBlocks * pageTokens tokens
  done @4 :UInt64;
  # Of a fork in a cache on a GPU: the word `done` is at least this once open pages are copied; what comes later in the daemon's
  # stream comes after that anyway. If this process appends itself, they are copied behind its plans so far (`released`).
}

struct SequenceInfo {
  sequenceId @0 :UInt64;
  cacheId @1 :UInt32;
  tokens @2 :UInt64;
  hitBlocks @3 :UInt32;
  publishedBlocks @4 :UInt32;
  bytes @5 :UInt64;        # of its pages, shared ones in full
  client @6 :Text;         # who holds it, as it said in hello; empty: nobody yet, it was received and waits to be claimed
  pid @7 :UInt32;          # of that process, as the Unix socket's credentials say; 0 over TCP, or in another PID namespace
}

struct PublishReply {
  status @0 :Status;
  published @1 :UInt32;
  shared @2 :UInt32;       # replaced by equal blocks published earlier
  deferred @3 :UInt32;     # equal to earlier ones, still inside the lag
}

struct HandOffReply {
  status @0 :Status;
  ticket @1 :Data;         # what the receiving side's client claims the sequence with
  bytesSent @2 :UInt64;    # of pages
  pagesSent @3 :UInt64;
  pagesSkipped @4 :UInt64; # the receiver had them, or took activations instead, or not these activations
  seconds @5 :Float64;     # from the offer to the receiver's confirmation
  bytesResent @6 :UInt64;  # of bytesSent, again after a connection broke
  resumes @7 :UInt64;      # connections that broke and were made again
  peer @8 :Text;           # who has it: of several, the one that was chosen
  sendingSeconds @9 :Float64;  # of `seconds`, with pages to send, or on their way
  begunUnixNs @10 :Int64;      # when it was offered, by the sender's clock
  layers @11 :List(LayerTimes);
}

struct LayerTimes {
  # When the pages of a layer went, in seconds since the offer; negative: none did.
  readyFirst @0 :Float64 = -1; # the first was full, and encoded where it travels so
  readyLast @1 :Float64 = -1;
  sentFirst @2 :Float64 = -1; # the first was given to a connection
  arrivedLast @3 :Float64 = -1; # the receiver said that it has them all
}

interface Sequence {
  # One context. The capability is the lease.
  fork @0 () -> (reply :SequenceReply);
  crop @1 (tokens :UInt64) -> (status :Status, done :UInt64);   # done: as SequenceReply's
  publish @2 (names :List(BlockName)) -> (reply :PublishReply);
  handOff @3 (peer :Text, blob :Data, timeoutMs :UInt32, roomMs :UInt32, goesOn :Bool) -> (reply :HandOffReply);
  # Sends the sequence to the daemon at peer ("HOST:PORT" of its --peer-listen): full blocks by key, open pages raw, and an
  # opaque blob of the engine (at most 1 MiB). The sequence here stays until it is dropped. roomMs: how long a receiver that is full
  # may let it wait for room, beyond timeoutMs; 0: it refuses at once. Feature "hand-off-stream".
  # peer may be up to 16 addresses, "HOST:PORT,HOST:PORT". Then each is asked how much it has to do, for at most half a second. Of
  # those that answer, it goes to the one that has as much free as it needs and would be done first: queued bytes and its own over the
  # bandwidth measured to there, ties in their order; if that one refuses, or does not accept, to the next. Feature "choose-peer".
  # goesOn: whoever claims it appends before it reads or crops. Pages then travel as the token to come will read them: one that the
  # last token filled goes encoded where the lag lets it, and the receiver cannot crop into it. Feature "choose-peer".
  info @4 () -> (status :Status, info :SequenceInfo);
  beginHandOff @5 (peer :Text, tokens :UInt64, timeoutMs :UInt32, roomMs :UInt32, goesOn :Bool)
      -> (status :Status, handOff :HandOff, ticket :Data, peer :Text);
  # The same while the sequence still grows to `tokens` tokens in every layer: pages go as soon as they are full and encoded. Answered
  # when the receiver has room; its clients may claim the ticket from then on. Until finish the sequence can be appended to, not
  # beyond `tokens`, attended, forked and published, not cropped. timeoutMs: for this answer, and again for finish's. Of a cache
  # on a GPU pages go once the kernels that fill them have run. Feature "hand-off-stream".
}

interface HandOff {
  # A hand-off under way, and its sequence. Dropping it before finish is answered cancels it.
  finish @0 (blob :Data) -> (reply :HandOffReply);
  # Every layer has its tokens; sends the rest, answered when the receiver has all of it. FAILED_PRECONDITION naming the shortest
  # layer: it may be called again. Other errors: the hand-off has ended, and the receiver's client gets UNAVAILABLE.
}

interface Arena {
  # Shared memory made by the daemon; getFd() of this capability is a memfd sealed against resizing, or, of a device arena, a
  # descriptor that CUDA imports (cuMemImportFromShareableHandle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR). Unix sockets only.
}

struct DeviceInfo {
  ordinal @0 :Int32;       # as the daemon numbers its GPUs
  uuid @1 :Data;           # 16 bytes: the GPU's name in every process
  name @2 :Text;
  poolBytes @3 :UInt64;
  slabBytes @4 :UInt64;
  slabs @5 :UInt32;
  samplesQueries @6 :Bool; # whether the daemon wants ExtendRequest.queries; else it ignores them
}

interface DeviceStream {
  # What this connection runs on a GPU of the daemon, in order. getFd() is a memfd sealed against resizing: four words of 64 bits,
  # each on a line of 64 bytes, from its first byte: ready (the engine's stream writes, the daemon's waits), done (the daemon's
  # writes, the engine's waits), released (the engine's writes the newest epoch of a plan that it will not run again), encoded
  # (the engine's encode stream writes). From byte 4096 on, 4096 words of 64 bits that say what was first NaN or Inf; from byte
  # 36864 on, the declined ring: 16384 words of 32 bits. Values of the four words begin at 0 and grow, to at most 2^63 - 2; waits
  # compare cyclically, int64(word - value) >= 0. When one side is gone the other stores 2^63 - 1 to what its own stream waits
  # for; the daemon does so to done as well once the stream has ended.
  copy @0 (request :DeviceCopy) -> (status :Status, done :UInt64);
  # Between device arenas, behind ready; done is at least the returned value behind it: what a step does, without a step. To try
  # how an engine is wired. At most 96 calls of a stream are under way: RESOURCE_EXHAUSTED.
  mapSlab @1 (cacheId :UInt32, slab :UInt32) -> (status :Status, slab :Slab);
  # For a process that attends itself (Cache.extend): GPU memory with pages of this cache's tenant, once. Slab i holds the slots from
  # i * slabBytes of the pool on. Mapped until the process ends: it is not given to another tenant before.
}

interface Slab {
  # getFd() of this capability is a descriptor of a slab: one of a GPU's is imported by CUDA's virtual memory management, one of host
  # memory is mapped for reading.
}

struct DeviceCopy {
  fromArena @0 :UInt32;
  fromOffset @1 :UInt64;
  toArena @2 :UInt32;
  toOffset @3 :UInt64;
  bytes @4 :UInt64;
  ready @5 :UInt64;        # the daemon's stream waits for it first; 0: for nothing
}

interface Cache {
  info @0 () -> (info :CacheInfo, error :Status);
  match @1 (requests :List(SequenceRequest), prefetch :Bool) -> (status :Status, results :List(MatchResult));
  # prefetch: what only the disk has of the hits begins to come to host memory; the answer does not wait for it. It goes on behind
  # what calls wait for, as far as there is room, until the connection ends. Feature "prefetch".
  createSequences @2 (requests :List(SequenceRequest)) -> (replies :List(SequenceReply));
  step @3 (request :StepRequest) -> (reply :StepReply);
  claim @4 (ticket :Data) -> (reply :SequenceReply, tokens :UInt64, blob :Data);
  # Takes over a handed-off sequence, once. The ticket must be of a cache with an equal digest. Of a hand-off that is under way it
  # waits until the sequence has all of its tokens; pages may arrive later: steps that need one wait, and so do fork, crop, publish
  # and hand-offs of it. If the hand-off ends early, all of these are UNAVAILABLE, and the sequence can only be dropped. (A batch
  # that is refused so has appended what it was to append; its other sequences can be asked again.)
  outputFactors @5 (layer :UInt32) -> (status :Status, folds :Bool, factors :Data);
  # folds: steps of this layer leave their outputs in the codec's space ("fold=1" of a codec), for the client to fold the way
  # back into its output projection. factors: [kvHeads][headDim][headDim] float32, row-major: an output o' of a query head stands
  # for o = A o', A being its KV head's. Empty where folds is false: outputs are as usual. Feature "output-factors".
  extend @6 (request :ExtendRequest) -> (reply :ExtendReply);
  openProjections @7 (facts :ProjectionFacts) -> (status :Status, projections :Projections);
  # For a cache with a hiddenSize: what K and V are made of here. The capability is the lease: weights stay while somebody holds it,
  # or a hand-off uses them. All who open it share them; other facts than theirs are FAILED_PRECONDITION. RESOURCE_EXHAUSTED beyond
  # the daemon's --recompute-bytes, or --recompute-device-bytes where a GPU projects. Feature "recompute".
  read @8 (request :ReadRequest) -> (reply :ReadReply);
  # Into host arenas, or inline. Of a cache on a GPU it waits for what this connection submitted or planned so far; apiMinor below 10:
  # FAILED_PRECONDITION.
  readBlocks @9 (request :BlocksRequest) -> (reply :BlocksReply);
  # Copies blocks that are found by name into an arena, and verifies them: a block whose checksum is wrong is a miss.
  writeBlocks @10 (request :BlocksRequest) -> (reply :BlocksReply);
  # Stores and names blocks that are not here: others find them from then on. The first who names a block wins. `pages` may be in a
  # device arena: the GPU's copy engines bring them to their place, and the daemon checks them there. UNAVAILABLE then: the host's
  # memory is not pinned yet. Without names this says whether it is. Feature "device-blocks".
  retain @11 (names :List(BlockName), priority :UInt8 = 50, ttlMs :UInt64) -> (status :Status, blocks :UInt32, bytes :UInt64);
  # How long published blocks are kept when memory is short, in every memory and on the disk; of at most 65536 names, in any order.
  # priority, 0..100: below 50 they go before all others of who pays for them; 50: as the daemon's eviction decides, which takes an
  # earlier call back; above 50 they go after all others, the lowest priority first, then what ends first. Nothing is kept for good:
  # whoever retains all that it pays for loses of that. ttlMs: then the eviction decides again; 0: with the block, or the daemon; at
  # most 315360000000 (ten years). The last call for a block counts. A block without its parents is of no use: names should begin
  # with the first block of the sequence, or parents be retained as well. blocks: of the names, that are in a memory or on the disk;
  # bytes: of these, each copy counted. Names that are nowhere are no error. A name's `tokens` may be 32 zeros: not known. Feature
  # "retain".
  bindSlabs @12 (bytes :UInt64) -> (status :Status, slabs :List(UInt32));
  # Host memory for this cache's tenant ahead of need, to be mapped before it holds blocks: slabs that nobody else wrote become the
  # tenant's alone until all of its slabs that are so are `bytes`, or there are no more. All of these, which mapSlab shows; those that
  # no process maps within 10 s are taken back. FAILED_PRECONDITION: none is to be mapped. Feature "map-blocks"; Unix sockets only.
  mapSlab @13 (slab :UInt32) -> (status :Status, slab :Slab, bytes :UInt64);
  # As BlocksLease.mapSlab, one of bindSlabs.
  prefetch @14 (names :List(BlockName)) -> (status :Status, match :MatchResult);
  # Brings blocks of a prefix ahead of need, at most 65536, names[0] the first of its sequence: from the disk into host memory and, of
  # a cache on a GPU, on to that GPU. Answered once all is there that has room; a call that is given up leaves what has come. Nothing
  # is pinned then: they are the blocks that were used last (retain keeps them longer). match: of the names, once it is done.
  # Feature "prefetch".
}

struct ProjectionFacts {
  # Rotary position embedding of K; frequencies are theta^(-2 i / rotaryDims), not scaled.
  rotaryDims @0 :UInt32;   # the first ones of a head, even; 0: K is not rotated
  theta @1 :Float64;       # above 0
  interleaved @2 :Bool;    # channel 2 i rotates with 2 i + 1; else i with i + rotaryDims / 2
  doubleAngles @3 :Bool;   # frequency times position in double precision; else rounded to float, as most engines do
}

struct LayerProjections {
  layer @0 :UInt32;
  dtype @1 :DType;         # of the weights and biases
  k @2 :Tensor;            # W_K [kvHeads][headDim][hiddenSize]: row o makes channel o of K, in the order that the engine stores
  v @3 :Tensor;
  kBias @4 :Tensor;        # [kvHeads][headDim], or none
  vBias @5 :Tensor;
  proof @6 :Proof;

  struct Proof {
    # K and V that the engine itself made: the daemon projects x and compares, so that weights and facts which are not those of the
    # engine are refused here, rather than found in its answers. 1..pageTokens tokens, neither K nor V all zeros.
    position @0 :UInt64;   # of the first token; at least 256 where K is rotated, so that a wrong theta shows
    tokens @1 :UInt32;
    x @2 :Tensor;          # [tokens][hiddenSize] of the cache's dtype
    k @3 :Tensor;          # [tokens][kvHeads][headDim] of the cache's dtype, rotated
    v @4 :Tensor;
  }
}

interface Projections {
  setLayer @0 (layer :LayerProjections) -> (status :Status);
  # Copies the weights; arenas must not change before the reply. INVALID_ARGUMENT: sizes, what is not finite, a proof that fails.
  # Where a GPU projects, weights have the cache's dtype; if the first layer's have not, the CPU projects all of them.
  # A layer that somebody registered takes equal weights only (FAILED_PRECONDITION).
}

struct HelloRequest {
  apiMajor @0 :UInt16;
  apiMinor @1 :UInt16;
  client @2 :Text;      # a name for logs and listings
  pid @3 :UInt32;       # as the client sees it, for listings; the daemon trusts only the socket's credentials
  token @4 :Text;
  # Shows that the client may open the tenants whose list has the token's SHA-256: 16 to 1024 bytes; empty: none. PERMISSION_DENIED
  # if no tenant has it. Feature "tokens".
}

struct HelloReply {
  status @0 :Status;
  apiMajor @1 :UInt16;
  apiMinor @2 :UInt16;
  bootEpoch @3 :UInt64;         # random per start of the daemon: handles of another epoch are void
  version @4 :Text;
  features @5 :List(Text);      # "arena", "device", "inline", "hand-off", "busy-poll", ...
  codecs @6 :List(Text);        # names
  messageBytesMax @7 :UInt64;   # a larger message ends the connection
  peerAddress @8 :Text;         # where other daemons hand sequences to; empty if nowhere
}

struct PoolStatus {
  tier @0 :Text;                # "host", "device:0", ...
  capacityBytes @1 :UInt64;
  usedBytes @2 :UInt64;
  slabBytes @3 :UInt64;
  freeSlabs @4 :UInt64;
  hugePages @5 :Text;
}

struct DiskStatus {
  path @0 :Text;                # empty: the daemon has no disk
  capacityBytes @1 :UInt64;
  usedBytes @2 :UInt64;         # of records, with those that are being written
  blocks @3 :UInt64;
  unwrittenBlocks @4 :UInt64;   # of host memory, that are being written or wait for that
  state @5 :Text;               # "ready", "reading its index", or what is wrong
}

struct KeptMemory {
  # Host memory that outlives the daemon.
  stateDir @0 :Text;
  state @1 :Text;              # for people: who keeps it, or why nobody does
  pid @2 :UInt32;              # of the process that keeps it; 0: nobody does
  unclaimedBlocks @3 :UInt64;  # of an earlier daemon: found so far, and taken by no cache yet
}

struct DaemonStatus {
  version @0 :Text;
  bootEpoch @1 :UInt64;
  uptimeSeconds @2 :Float64;
  draining @3 :Bool;
  pools @4 :List(PoolStatus);
  connections @5 :UInt32;
  leases @6 :UInt64;            # sequences held by clients
  caches @7 :UInt32;
  publishedBlocks @8 :UInt64;
  cpuTarget @9 :Text;           # instruction set that attention uses
  threads @10 :UInt32;
  listen @11 :Text;
  peerListen @12 :Text;
  metricsListen @13 :Text;
  waitingHandOffs @14 :UInt64;  # received sequences that nobody has claimed yet
  gpus @15 :Text;               # what GPUs the daemon sees, or why none
  pinnedBytes @16 :UInt64;      # of the host pool, for copies to and from GPUs: pinned so far, and to be pinned; 0: no GPU
  pinTotalBytes @17 :UInt64;
  pinError @18 :Text;           # why the rest stays unpinned
  ucx @19 :Text;                # whether pages go to and from peers through UCX: its version, or why not
  httpListen @20 :Text;         # the page for people; empty: none
  disk @21 :DiskStatus;
  keptMemory @22 :KeptMemory;   # null: without --state-dir
}

struct PeerStatus {
  peer @0 :Text;
  incoming @1 :Bool;
  transfers @2 :UInt64;
  failures @3 :UInt64;
  bytes @4 :UInt64;
  active @5 :UInt64;
  bytesPerSecond @6 :Float64;  # measured while there was something to send, recent transfers counting most; 0: never
  lastError @7 :Text;
  loadError @8 :Status;        # why there is no load; empty where there is, and where it was not asked
  load @9 :PeerLoad;           # null: not known
  copiedBytes @10 :UInt64;     # of bytes: from one daemon's memory to the other's on one host, through no socket
}

struct PeerLoad {
  # How much a peer has to do, as it says itself.
  capacityBytes @0 :UInt64;    # of its host pool
  freeBytes @1 :UInt64;        # to be had at once, what it may evict included
  queuedBytes @2 :UInt64;      # of hand-offs that it accepted, or lets wait for room, and that are to come yet
  waitingOffers @3 :UInt64;    # for room
  activeTransfers @4 :UInt64;  # that it receives
}

struct RecomputeStatus {
  weightBytes @0 :UInt64;        # of all sets in host memory, their buffers included
  weightBytesMax @1 :UInt64;     # --recompute-bytes
  sets @2 :List(Set);
  links @3 :List(Link);
  devices @4 :List(Device);      # GPUs that project

  struct Device {
    ordinal @0 :Int32;
    weightBytes @1 :UInt64;      # of its memory: of sets there, their buffers included
    weightBytesMax @2 :UInt64;   # --recompute-device-bytes
  }
  struct Set {
    digest @0 :Data;             # of the cache
    hiddenSize @1 :UInt32;
    kvWidth @2 :UInt32;          # kvHeads x headDim
    layers @3 :UInt32;           # of the cache
    layersReady @4 :UInt32;      # registered
    flops @5 :Rate;              # of its projections, per second
    failed @6 :Text;             # why nothing is recomputed with it any more; empty: it is
    chunkTokens @7 :UInt32;      # projected at once
    device @8 :Int32 = -1;       # where it is projected: -1: the CPU; else this GPU
  }
  struct Link {
    peer @0 :Text;               # host that pages came from
    bytes @1 :Rate;              # per second
  }
  struct Rate {
    perSecond @0 :Float64;       # the median of `samples`; 0 without any
    samples @1 :UInt32;
    stale @2 :Bool;              # all of them are older than a minute
  }
}

struct LimitInfo {
  # A bound of the daemon, and how much of it is used.
  name @0 :Text;
  scope @1 :Text;      # what has so much: "daemon" (all together), "tenant", "connection", "process" of clients, "call", "peer"
  unit @2 :Text;       # "bytes", "ms", or what is counted, such as "connections"
  limit @3 :UInt64;
  used @4 :UInt64;     # now: by the daemon, or by the one of its scope that has most
  usedKnown @5 :Bool;  # else the daemon does not count it
  flag @6 :Text;       # from which it follows, such as "--arena-bytes"; empty: fixed
  bounds @7 :Text;     # what it bounds, in words
}

enum BlockPlace { nowhere @0; memory @1; arriving @2; disk @3; }
# arriving: on its way to memory, from another memory or the disk

enum BlockLoss { unknown @0; evicted @1; purged @2; checksum @3; diskRecord @4; }
# unknown: it was not stored, as far as the daemon remembers. checksum: its bytes had changed. diskRecord: its record on the disk was
# wrong, or could not be read.

struct BlockExplanation {
  # Where a block is, or why it is not found by its name. Tenants are labels, as in metrics; tiers "host", "device:N", "disk".
  place @0 :BlockPlace;
  loss @1 :BlockLoss;         # nowhere: how it went the last time
  tier @2 :Text;              # where it is, or was; empty: unknown
  cacheId @3 :UInt32;         # which has it, or had it; 0: unknown, or not open when it went
  secondsAgo @4 :Float64;     # when it went
  owner @5 :Text;             # whose it was when it went; empty: unknown
  taker @6 :Text;             # evicted: for whose request; empty: unknown
  otherTokens @7 :Bool;       # what has its key there has other tokens: a miss
  sameTokensCacheId @8 :UInt32;  # nowhere: a cache of `others` that has the same tokens in memory under another name; 0: none
  priority @9 :UInt8 = 50;    # where it is: as retain said (Cache); 50: the eviction decides
  retainedMs @10 :UInt64;     # until the eviction decides again; 0: no end, or it does now
}

struct OtherCache {
  cacheId @0 :UInt32;
  tenant @1 :Text;            # its label
  tier @2 :Text;
  differs @3 :List(Text);     # from the cache that was asked about: fields of CacheConfig; none: the tokens before these differ
}

interface Admin {
  status @0 () -> (status :DaemonStatus, error :Status);
  caches @1 () -> (caches :List(CacheInfo), error :Status);
  sequences @2 () -> (sequences :List(SequenceInfo), error :Status);
  peers @3 (load :Bool, peers :List(Text)) -> (peers :List(PeerStatus), error :Status);
  # load: peers that sequences were handed to, or those listed, are asked how much they have to do, all at once, for at most half a
  # second. peers: these alone ("HOST:PORT", at most 256), in this order; empty: all that are known. Feature "choose-peer".
  drain @4 () -> (status :Status);
  # Refuses what is new, with UNAVAILABLE: createSequences, forks, incoming hand-offs. Allows everything else: steps and
  # publishing of held sequences, claims of sequences received before, outgoing hand-offs. SIGTERM does the same, and the daemon
  # then exits when leases are gone and received sequences are claimed or expired, or after its --drain-s.
  undrain @5 () -> (status :Status);
  purge @6 (cacheId :UInt32, all :Bool) -> (status :Status, blocks :UInt64);
  # Published blocks that nothing pins. Answered once the disk has removed them durably; UNAVAILABLE: they are gone, but the disk's
  # index refuses, and a restart may find them again until it does not.
  recompute @7 () -> (recompute :RecomputeStatus, error :Status);             # what plans go by. Feature "recompute"
  metrics @8 () -> (text :Text, error :Status);                               # as on /metrics. Feature "metrics-text"
  limits @9 () -> (limits :List(LimitInfo), error :Status);                   # every bound that there is. Feature "limits"
  explain @10 (cacheId :UInt32, names :List(BlockName))
      -> (blocks :List(BlockExplanation), others :List(OtherCache), remembered :UInt32, rememberedMax :UInt32,
          rememberedSeconds :Float64, error :Status);
  # Why these blocks are found, or not; an entry for each of at most 65536 names. cacheId: whose names they are; then what is missing
  # is also looked for under other names. 0: keys of any open cache. A name's `tokens` may be 32 zeros: not known. remembered: blocks
  # that went, of which the daemon knows how, at most rememberedMax; rememberedSeconds: how far back that goes. Feature "explain"
  retain @11 (cacheId :UInt32, names :List(BlockName), priority :UInt8 = 50, ttlMs :UInt64)
      -> (status :Status, blocks :UInt32, bytes :UInt64);  # Cache's, of any tenant's cache. Feature "retain"
  prefetch @13 (cacheId :UInt32, names :List(BlockName)) -> (status :Status, match :MatchResult);
  # Cache's, of any tenant's cache. Feature "prefetch"
  upgrade @12 (program :Text, cold :Bool) -> (status :Status);
  # Another program goes on in this process, with this one's flags, listening sockets and, with --state-dir, host memory. program: an
  # absolute path; empty: the path that this one was started by. The reply comes before: once the program was tried and takes the flags.
  # Then calls under way end, within a second, and every connection ends: who connects again waits until the program serves.
  # FAILED_PRECONDITION: memory would be lost, and cold does not say that this is meant; or the daemon ends already. INVALID_ARGUMENT:
  # the program cannot be run, or refuses the flags; its words are in the message. The daemon serves on. Feature "upgrade".
}

interface Daemon {
  # The bootstrap capability.
  hello @0 (request :HelloRequest) -> (reply :HelloReply);      # first; other calls before it are refused
  openCache @1 (config :CacheConfig) -> (status :Status, cache :Cache, info :CacheInfo);
  createArena @2 (bytes :UInt64) -> (status :Status, arena :Arena, id :UInt32);
  # bytes: a multiple of 4096, at most 1 GiB. RESOURCE_EXHAUSTED beyond 64 arenas or 4 GiB of a connection, or the daemon's
  # --arena-bytes of all.
  admin @3 () -> (admin :Admin, error :Status);
  # On the daemon's admin socket alone, which its own user and root reach (PATH.admin beside unix:PATH, unless --admin-listen says
  # otherwise). Elsewhere, where hello names the feature "admin-socket", PERMISSION_DENIED.
  ping @4 ();                                                   # an empty round trip
  openDevice @5 (ordinal :Int32) -> (status :Status, stream :DeviceStream, id :UInt32, info :DeviceInfo);
  # One stream per connection and GPU; RESOURCE_EXHAUSTED beyond 16 of a GPU. Unix sockets only. Feature "device".
  createDeviceArena @6 (device :Int32, bytes :UInt64) -> (status :Status, arena :Arena, id :UInt32, bytes :UInt64);
  # GPU memory, zeroed; bytes is rounded up to 2 MiB, and counts with arenas. Its id stands where an arena's does. It goes when
  # it is dropped and this connection's stream has passed what used it. Feature "device".
}
