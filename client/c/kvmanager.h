/* kvmanager's C interface: the C++ client (client/client.h) for languages that call C.
 *
 * Conventions
 *  - Every function but those that say otherwise returns 0, or an error's code (absl::StatusCode: 3 INVALID_ARGUMENT, 5
 *    NOT_FOUND, 8 RESOURCE_EXHAUSTED, 9 FAILED_PRECONDITION, 14 UNAVAILABLE, ...).
 *  - kvm_text() is what this thread's last call left: after an error a JSON object {"code", "message", "field",
 * "value", "bound"}; after success, where a function says so, its result in JSON. Bytes (digests, tickets, blobs) are
 *    hexadecimal there. Members are only added.
 *  - Strings and JSON go in as pointer and length in bytes. A pointer may be NULL where its count is 0.
 *  - An object (kvm_object) is a lease, or a call under way. kvm_close gives back what it holds; kvm_release frees it.
 *
 * Threads: an object belongs to the thread that connected its client. A call from another thread, or in a forked child,
 * is FAILED_PRECONDITION and changes nothing. kvm_release, kvm_wake, kvm_stop_store and kvm_text may be called
 * anywhere: an object that another thread releases is given back when its owner next calls anything here (as many as
 * there are objects may wait); what a forked child releases stays its parent's. When the thread has ended, its leases
 * end with the process.
 *
 * Tensors are addresses of dense arrays. What lies in an arena of the client, from a multiple of 64 of it on, is read
 * and written by the daemon in place; everything else is copied through the socket. Shapes: client/client.h, StepBatch.
 */
#ifndef KVMANAGER_CLIENT_C_KVMANAGER_H_
#define KVMANAGER_CLIENT_C_KVMANAGER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVM_API __attribute__((visibility("default")))
#define KVM_ABI 3 /* grows with every change that a caller built for an older one could not survive */

typedef struct kvm_object kvm_object;

/* What a daemon has of a prefix. */
typedef struct kvm_match_result {
  int32_t hit_blocks;
  int32_t reason;    /* 0 none, 1 not found, 2 token mismatch, 3 checksum */
  int32_t in_memory; /* of hit_blocks, from the first on: in the cache's own memory */
  int32_t reserved;
} kvm_match_result;

KVM_API uint32_t kvm_abi(void);
/* Valid until this thread's next call. Never NULL. */
KVM_API const char* kvm_text(uint64_t* bytes);

/* Gives back what the object holds; it answers FAILED_PRECONDITION from then on. A client's: everything that was made
 * through it, too, and the connection; device arenas that tensors still use keep theirs until those are gone. */
KVM_API int kvm_close(kvm_object* object);
/* Frees the object, giving back what it holds. NULL is allowed. */
KVM_API void kvm_release(kvm_object* object);

/* A client. options: {"name", "deadline_ms", "connect_ms", "hello_ms", "busy_poll_us", "admin_address", "token",
 * "tls_ca", "tls_cert", "tls_key", "tls_name"}, each optional. Text: {"boot_epoch", "peer_address"}. */
KVM_API int kvm_connect(const char* address, size_t address_bytes, const char* options, size_t options_bytes,
                        kvm_object** client);
/* Text as kvm_connect's. */
KVM_API int kvm_reconnect(kvm_object* client);
KVM_API int kvm_connected(kvm_object* client, int* connected);
KVM_API int kvm_ping(kvm_object* client);
/* Text: the description; of lists, an array of them. Members are named as in client/client.h. */
KVM_API int kvm_status(kvm_object* client);
KVM_API int kvm_caches(kvm_object* client);
KVM_API int kvm_sequences(kvm_object* client);
KVM_API int kvm_peers(kvm_object* client, const char* peers, size_t peers_bytes); /* peers: an array of strings */
KVM_API int kvm_recompute(kvm_object* client);
KVM_API int kvm_limits(kvm_object* client);
/* Why these blocks, of `names` as of kvm_name_blocks, are found or not. cache_id: whose names they are; 0: of any. */
KVM_API int kvm_explain(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks);
/* kvm_retain of any tenant's cache, with this id. */
KVM_API int kvm_retain_in_cache(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks,
                                int32_t priority, int64_t ttl_ms, uint64_t* values);
/* kvm_prefetch of any tenant's cache, with this id. */
KVM_API int kvm_prefetch_in_cache(kvm_object* client, int64_t cache_id, const uint8_t* names, uint32_t blocks,
                                  kvm_match_result* result);
KVM_API int kvm_drain(kvm_object* client, int on);
KVM_API int kvm_purge(kvm_object* client, int64_t cache_id, uint64_t* blocks); /* cache_id: -1: all */

/* Waits until something may have happened to calls under way: an answer, a deadline, the connection's end, kvm_wake, or
 * an object that another thread released; before this call or while it waits. */
KVM_API int kvm_wait_for_news(kvm_object* client);
/* Any thread, as long as the client is not released. */
KVM_API void kvm_wake(kvm_object* client);

/* Shared memory. data: readable and writable here until kvm_release, and as long as kvm_dlpack's tensors live. */
KVM_API int kvm_create_arena(kvm_object* client, uint64_t bytes, kvm_object** arena, void** data,
                             uint64_t* arena_bytes);
/* A DLManagedTensor (versioned: DLManagedTensorVersioned) of dense rows at `offset` of an arena, the caller's. Any
 * thread. code: DLPack's, 1 unsigned, 2 float, 4 bfloat. */
KVM_API int kvm_dlpack(kvm_object* arena, uint64_t offset, const int64_t* shape, int32_t dimensions, uint8_t code,
                       uint8_t bits, int versioned, void** managed);
/* What Python's capsules of such tensors need: addresses of PyCapsule_IsValid and PyCapsule_GetPointer; returns the
 * address of a PyCapsule_Destructor. Once, before others. */
KVM_API void* kvm_capsule_destructor(void* is_valid, void* get_pointer);

/* options: as CacheOptions, {"model", "layers", ..., "dtype": "float16"}. Text: the description. */
KVM_API int kvm_open_cache(kvm_object* client, const char* options, size_t options_bytes, kvm_object** cache);
KVM_API int kvm_refresh(kvm_object* cache); /* text: the description */
/* Names of the full pages of token ids: 64 bytes each (key, digest of tokens), ids / page_tokens of them. Any thread.
 */
KVM_API int kvm_name_blocks(const uint8_t* digest, const uint32_t* ids, uint64_t count, int32_t page_tokens,
                            uint8_t* names);
/* An engine's own hashes of blocks, of sizes[i] bytes each, 1..64, one behind the other. */
typedef struct {
  const uint8_t* bytes;
  const uint32_t* sizes;
  uint32_t count;
} kvm_hashes;
/* Names by them: SHA-256 of a word, the cache's digest and the hash. names: [count] of 64 bytes, out. */
KVM_API int kvm_name_hashes(const uint8_t* digest, const kvm_hashes* hashes, uint8_t* names);

/* names: those of all prefixes behind one another; blocks: [prefixes]. prefetch: not 0: what only the disk has of the
 * hits begins to come to host memory (client/client.h, MatchOptions). */
KVM_API int kvm_match(kvm_object* cache, const uint8_t* names, const uint32_t* blocks, uint32_t prefixes,
                      int32_t prefetch, kvm_match_result* results);
/* Brings blocks of a prefix ahead of need, and waits for them (client/client.h, Cache::Prefetch). */
KVM_API int kvm_prefetch(kvm_object* cache, const uint8_t* names, uint32_t blocks, kvm_match_result* result);

/* How long published blocks are kept when memory is short (client/client.h, RetentionOptions). names: [blocks][64] as
 * of kvm_name_blocks, in any order. priority: 0..100; 50: as the daemon's eviction decides. ttl_ms: 0..315360000000; 0:
 * no end. values: blocks found, their bytes, 0. */
KVM_API int kvm_retain(kvm_object* cache, const uint8_t* names, uint32_t blocks, int32_t priority, int64_t ttl_ms,
                       uint64_t* values);

typedef struct kvm_created {
  kvm_object* sequence; /* NULL: `code` says why, and the text's array has the error in this place */
  uint64_t id;
  kvm_match_result match;
  int32_t code;
  int32_t reserved;
} kvm_created;
/* prompt_tokens: [prefixes], or NULL. Text: an array with null or an error for each. */
KVM_API int kvm_create_sequences(kvm_object* cache, const uint8_t* names, const uint32_t* blocks,
                                 const uint64_t* prompt_tokens, uint32_t prefixes, kvm_created* created);

typedef struct kvm_tensor {
  void* data; /* NULL: none */
  uint64_t bytes;
} kvm_tensor;

typedef struct kvm_entry {
  uint64_t sequence;
  uint64_t position;
  uint64_t tokens;
} kvm_entry;

typedef struct kvm_step {
  int32_t layer;
  int32_t q_dtype; /* 0 float16, 1 bfloat16, 2 float32 */
  float scale;     /* 0: 1/sqrt(head_dim) */
  uint32_t entry_count;
  const kvm_entry* entries;
  kvm_tensor k, v, x, q, out, lse;
  uint64_t ready;
} kvm_step;
/* values: encoded_pairs, raw_pairs, done. */
KVM_API int kvm_cache_step(kvm_object* cache, const kvm_step* step, uint64_t* values);
/* k, v, x and q that are not in an arena are copied before it returns; such out and lse are written by kvm_wait. */
KVM_API int kvm_cache_step_async(kvm_object* cache, const kvm_step* step, kvm_object** pending);

/* K and V of tokens as dense rows (client/client.h, ReadBatch). values: encoded_tokens, raw_tokens, 0. */
KVM_API int kvm_read(kvm_object* cache, int32_t layer, const kvm_entry* entries, uint32_t entry_count,
                     const kvm_tensor* k, const kvm_tensor* v, uint64_t* values);
/* k and v that are not in an arena are written by kvm_wait. */
KVM_API int kvm_read_async(kvm_object* cache, int32_t layer, const kvm_entry* entries, uint32_t entry_count,
                           const kvm_tensor* k, const kvm_tensor* v, kvm_object** pending);

/* Whole blocks in stored form (client/client.h, BlockRange); `pages` is a range of an arena. names: [blocks][64] as of
 * kvm_name_blocks. values: blocks, reason (as kvm_match_result's), bytes. Text: {"raw"}, one hexadecimal digit for each
 * block and layer: 1 where the page is raw. */
KVM_API int kvm_read_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks,
                                  const kvm_tensor* pages, kvm_object** pending);
/* The same without copying what lies in the daemon's memory that this process may map (client/client.h,
 * MapBlocksAsync); `pages`, which may be none, has the other pages. device: this process's GPU, by its number here, for
 * which mapped memory is pinned, the first that a client names; -1: none. Makes the blocks, which hold their pages
 * until they are closed. values as above. Text: empty; once, where memory could not be pinned, {"unpinned": why}. */
KVM_API int kvm_map_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks,
                                 const kvm_tensor* pages, int32_t device, kvm_object** pending);
/* Maps up to `bytes` of the daemon's memory for the cache's tenant ahead of need (client/client.h, BindSlabs), pinned
 * as above; mapped_bytes: how much of it is mapped now. It waits for that: 0.06 s a GiB where it is pinned. */
KVM_API int kvm_bind_slabs(kvm_object* cache, uint64_t bytes, int32_t device, uint64_t* mapped_bytes);
/* [count], blocks times layers: where pages begin, the XXH3-64 that their bytes should have, and 1 where they are raw.
 * The arrays stay until kvm_release. */
KVM_API int kvm_mapped_pages(kvm_object* mapped, const uint64_t** addresses, const uint64_t** checksums,
                             const uint8_t** raw, uint64_t* count);
/* When they were copied, and before they are closed: whether they were held all the time, else UNAVAILABLE.
 * corrupt_block: the one whose bytes had not their checksum, or UINT32_MAX. values: 0. */
KVM_API int kvm_release_blocks_async(kvm_object* mapped, uint32_t corrupt_block, kvm_object** pending);
/* raw: [blocks][layers]. checksums: NULL, or of pages in a device arena [blocks][layers] XXH3-64 of their bytes, 0: not
 * known. values: written, present, 0. */
KVM_API int kvm_write_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks,
                                   const uint8_t* raw, uint64_t raw_bytes, const uint64_t* checksums,
                                   const kvm_tensor* pages, kvm_object** pending);

/* Encodes and decodes pages of the cache's codec in this process, between raw pages [K,
 * V][kv_heads][page_tokens][head_dim] and what kvm_read_blocks_async reads. device: this process's GPU, by its number
 * here, or -1: the CPU. calibration_dir: where the artifact lies that the codec names. UNAVAILABLE: the codec has no
 * kernels for that GPU. Text: {"raw_bytes", "page_bytes": [layers], "identity": false, "copies": true, "sink_tokens",
 * "raw_layers": [layers, or none]}. A codec with one form (identity) encodes and decodes nothing, and is made for any
 * GPU; where that is none that is used here, "copies" is false, and kvm_copy_pages and kvm_hash_pages are UNAVAILABLE.
 */
KVM_API int kvm_create_page_codec(kvm_object* cache, const char* calibration_dir, size_t calibration_dir_bytes,
                                  int32_t device, kvm_object** codec);
typedef struct {
  const void* raw; /* finite values; 64-byte aligned, as all of these */
  void* encoded;
  uint64_t first_token; /* of the page, in its context */
  uint32_t layer;
  uint32_t reserved;
} kvm_encode_item;
typedef struct {
  const void* encoded;
  void* raw;
  uint32_t layer;
  uint32_t reserved;
} kvm_decode_item;
/* On a GPU: items and declined are in pinned host memory, and stay until `stream` has passed them; pages are in the
 * GPU's memory. On the CPU it is done on return. declined: [count] out, 1 where a page cannot be encoded and stays raw.
 * Not for a codec with one form (identity). */
KVM_API int kvm_encode_pages(kvm_object* codec, const kvm_encode_item* items, uint32_t count, uint32_t* declined,
                             void* stream);
KVM_API int kvm_decode_pages(kvm_object* codec, const kvm_decode_item* items, uint32_t count, void* stream);
/* Copies `count` pages from host memory (from[i], of bytes[i]) to `to`, one behind the other, each from the next
 * multiple of 64 on, as kvm_read_blocks_async has them. Pages that lie so already are one copy, with what is between
 * them; runs: how many copies, or NULL. On a GPU on `stream`, and the arrays are read on return; on the CPU it is done
 * then. */
KVM_API int kvm_copy_pages(kvm_object* codec, const uint64_t* from, const uint64_t* bytes, uint32_t count, void* to,
                           void* stream, uint64_t* runs);
/* out: [count] XXH3-64 of the bytes[i] bytes at addresses[i]. On a GPU on `stream`, of its memory or pinned memory, and
 * to such: at least 241 and less than 4 GiB each, from a multiple of 16 on. On the CPU it is done on return. */
KVM_API int kvm_hash_pages(kvm_object* codec, const uint64_t* addresses, const uint64_t* bytes, uint32_t count,
                           uint64_t* out, void* stream);

/* An engine's paged caches on the codec's GPU: sizes and strides in bytes, multiples of 16; a block has `tokens`
 * tokens, the cache's page_tokens, in pieces of piece_tokens. layer_table, on the GPU, which stays: [layers] of three
 * words of 64 bits, the addresses of K and of V of block 0 and the group of block ids. */
typedef struct {
  uint32_t layers, heads, tokens, piece_tokens, row_bytes, reserved;
  int64_t block_stride, piece_stride, token_stride, head_stride;
  const void* layer_table;
} kvm_paged;
KVM_API int kvm_set_paged(kvm_object* codec, const kvm_paged* paged);
/* What kvm_bring_blocks uses. raw, stored: two stagings on the GPU with room for `blocks` blocks each, as raw pages and
 * as stored ones; the same where the codec has one form. lists, in pinned host memory, lists_device, on the GPU, and
 * sums, in pinned host memory: of each of `calls` calls to the daemon, list_bytes and sums_bytes apart, for up to
 * call_blocks blocks: a list takes 8 * groups + 24 * layers bytes for each of them, from a multiple of 16 on, sums 8 *
 * layers. copied: a word in pinned host memory, nobody else's. fetch, load: streams, of copies from host memory and of
 * what comes behind them. first_blocks: of the first call. */
typedef struct {
  void* raw[2];
  void* stored[2];
  uint32_t blocks, calls, call_blocks, first_blocks;
  uint8_t* lists;
  uint8_t* lists_device;
  uint8_t* sums;
  uint64_t list_bytes, sums_bytes;
  uint64_t* copied;
  void* fetch;
  void* load;
} kvm_bring_room;
/* blocks: how many are in the engine's caches, from the first on. reason: why no more, as a match's; 0: all are, or the
 * next may not be mapped. bytes: of all that was copied, as stored. */
typedef struct {
  uint32_t blocks, reason;
  uint64_t bytes;
} kvm_brought;
/* Brings blocks, of which the first is block `first` of its sequence, out of the daemon's memory into the engine's
 * caches, behind what `load` was given; returns when they are there. hashes: [blocks], by which they are named; ids:
 * [groups][blocks] of the engine's blocks, 0: not wanted. cache: of the same connection. What was copied is compared
 * with its checksums by the GPU, and was held all the time. Text: empty, or {"unpinned"}: why copies are slow. Errors
 * as of kvm_map_blocks_async, the GPU's, and UNAVAILABLE where it was not held; then blocks of the engine's hold
 * anything, and nothing is under way. */
KVM_API int kvm_bring_blocks(kvm_object* codec, kvm_object* cache, const kvm_bring_room* room, uint32_t first,
                             const kvm_hashes* hashes, const int64_t* ids, uint32_t groups, kvm_brought* brought);
/* Brings blocks of the engine's caches, the first of which is block first_block of its sequence, to `host`, as
 * kvm_write_blocks_async wants them; only begun. host: NULL: they stay in `stored`, such as a device arena. raw,
 * stored: a staging as a load's, with room for `count` blocks. They are copied and encoded on `save`, and copied to
 * `host` on `send`, part by part: `part` blocks each. ids: [groups][count], none 0; read when the call returns. list,
 * in pinned host memory, and list_device, on the GPU, both at multiples of 16: 8 * groups + 36 * layers bytes for each
 * of `count`, and 32 more. declined, at a multiple of 16: [count][layers] and up to three words more, of pages that are
 * encoded, in their order. sums: NULL, or [count][layers] of the pages' XXH3-64. In pinned host memory until `send` has
 * passed: host, list, declined, sums. The engine's blocks are
 * read, and raw and stored written, until `save` has passed; stored is read until `send` has. */
typedef struct {
  void* raw;
  void* stored;
  void* host;
  const int64_t* ids;
  void* list;
  void* list_device;
  uint32_t* declined;
  uint64_t* sums;
  uint32_t first_block, count, groups, part;
  void* save;
  void* send;
} kvm_save;
KVM_API int kvm_save_blocks(kvm_object* codec, const kvm_save* save, uint64_t* stored_bytes);

/* What a store uses. staging: [stagings]; of kvm_save's fields raw, stored (unused where direct), list, list_device,
 * declined and sums, each with room for `blocks` blocks. range: [ranges] of an arena of the connection, range_bytes
 * each. tied: staging and range of one number go together, and both are in use until the daemon has answered. direct:
 * the arena is on the GPU, and stored pages are made there. part: as kvm_save's. writes: calls to the daemon under way
 * at once. first_blocks: of the first call and the last. encoded: a word in pinned host memory, nobody else's. */
typedef struct {
  void* raw;
  void* stored;
  void* list;
  void* list_device;
  uint32_t* declined;
  uint64_t* sums;
} kvm_store_staging;
typedef struct {
  const kvm_store_staging* staging;
  void* const* range;
  uint64_t range_bytes;
  uint64_t* encoded;
  void* save;
  void* send;
  uint32_t stagings, ranges, blocks, part, writes, first_blocks;
  int32_t tied, direct;
} kvm_store_room;
/* Words that any thread may write while a store runs: not 0 where something urgent waits, and how many jobs wait. */
typedef struct {
  uint32_t urgent, waiting;
} kvm_store_signals;
enum { KVM_STORE_DONE = 0, KVM_STORE_URGENT = 1, KVM_STORE_DECLINED = 2 };
/* state: of the enumeration above; URGENT: to be run again; DECLINED: blocks from `next` on have a page that the codec
 * cannot encode, and are the caller's to store. Of the store's blocks: found, that the daemon had before; written and
 * present, of those that it was given; full, for which it had no room. nanoseconds: since the first were encoded. */
typedef struct {
  uint32_t state, next, found, written, present, full;
  uint64_t written_bytes, nanoseconds;
} kvm_stored;
/* A store of `blocks` blocks of the engine's caches, of which the first is block `first` of its sequence, behind what
 * `save` was given. hashes: [first + blocks], by which they are named; ids: [groups][blocks], none 0. All is read when
 * this returns, but for what `room` points to on the GPU and in pinned memory, which stays until no store is under way.
 * read: out, a word that is 1 once nothing reads the engine's blocks any more, nor will; valid until the store is
 * released. */
KVM_API int kvm_create_store(kvm_object* codec, const kvm_store_room* room, uint32_t first, const kvm_hashes* hashes,
                             const int64_t* ids, uint32_t groups, kvm_object** store, const uint32_t** read);
/* Runs it. codec, cache: the same each time, of the connection. Text: why the daemon had no room, or empty. Errors: the
 * GPU's and the daemon's; then nothing is under way. Errors of the arguments run nothing, and leave `stored` as it is.
 */
KVM_API int kvm_run_store(kvm_object* store, kvm_object* codec, kvm_object* cache, const kvm_store_signals* signals,
                          kvm_stored* stored);
/* Any thread of the process that made it: no more is copied out of the engine's blocks, but for what `save` was given;
 * it returns at once, or when `save` was given what is being begun. What was begun is written when the store is run. */
KVM_API int kvm_stop_store(kvm_object* store);

/* Where K and V of blocks go in host memory, as rows of one token and head: of [blocks] each the address of layer 0,
 * token 0, head 0; strides in bytes. */
typedef struct {
  void* const* k;
  void* const* v;
  int64_t layer_stride, token_stride, head_stride;
} kvm_rows;
enum { KVM_ROWS_LOADED = 0, KVM_ROWS_MISSING = 1, KVM_ROWS_UNMAPPED = 2 };
/* Brings blocks, each the first of a sequence of its own, out of the daemon's memory to rows, by up to `threads`
 * (1..64) threads of this call's own: each page is copied, compared with its checksum, decoded and spread. codec: of
 * the CPU, made for `cache`. names: [blocks][64]. results: [blocks] out, of the enumeration above: what is missing, or
 * whose bytes were wrong; what lies in memory that is not to be mapped, or is still to be encoded: it can be read
 * otherwise. Rows of both hold anything. It waits for the daemon. Errors as of kvm_map_blocks_async; then nothing is
 * loaded. */
KVM_API int kvm_load_rows(kvm_object* codec, kvm_object* cache, const kvm_rows* rows, const uint8_t* names,
                          uint32_t blocks, uint32_t threads, uint8_t* results);

/* A call under way. Closing it, or releasing it, cancels the call. */
KVM_API int kvm_ready(kvm_object* pending, int* ready);
/* Once. values: [3], as the call says; made: the object that the call makes, or NULL. */
KVM_API int kvm_wait(kvm_object* pending, uint64_t* values, kvm_object** made);

/* factors: [kv_heads][head_dim][head_dim]; folds: 0 where outputs are as usual, and nothing was written. */
KVM_API int kvm_output_factors(kvm_object* cache, int32_t layer, float* factors, uint64_t count, int* folds);
/* deadline_ms: 0: the client's. Makes the sequence; values: tokens, id. Text: {"blob"}. */
KVM_API int kvm_claim(kvm_object* cache, const uint8_t* ticket, size_t ticket_bytes, int64_t deadline_ms,
                      kvm_object** pending);

KVM_API int kvm_fork(kvm_object* sequence, kvm_object** fork, uint64_t* id);
KVM_API int kvm_crop(kvm_object* sequence, uint64_t tokens);
/* outcome: [3]: published, shared, deferred. */
KVM_API int kvm_publish(kvm_object* sequence, const uint8_t* names, uint32_t blocks, int32_t* outcome);
KVM_API int kvm_info(kvm_object* sequence); /* text: the description */

typedef struct kvm_hand_off_options {
  int64_t timeout_ms;
  int64_t room_ms;
  int32_t will_append;
  int32_t reserved;
} kvm_hand_off_options;
/* Text: the outcome. */
KVM_API int kvm_hand_off(kvm_object* sequence, const char* peer, size_t peer_bytes, const uint8_t* blob,
                         size_t blob_bytes, const kvm_hand_off_options* options, kvm_object** pending);
/* Makes the hand-off. Text: {"ticket", "peer"}. */
KVM_API int kvm_begin_hand_off(kvm_object* sequence, const char* peer, size_t peer_bytes, uint64_t tokens,
                               const kvm_hand_off_options* options, kvm_object** pending);
/* Text: the outcome. */
KVM_API int kvm_finish(kvm_object* hand_off, const uint8_t* blob, size_t blob_bytes, kvm_object** pending);

/* A GPU of the daemon (client/device.h). Streams are CUDA's, of this process. Text: {"ordinal", "here", "uuid", "name",
 * "pool_bytes", "slab_bytes", "slabs"}; here: this process's number of it. */
KVM_API int kvm_open_device(kvm_object* client, int32_t ordinal, kvm_object** device);
/* data: an address of the GPU. */
KVM_API int kvm_create_device_arena(kvm_object* device, uint64_t bytes, kvm_object** arena, void** data,
                                    uint64_t* arena_bytes);
KVM_API int kvm_enqueue_ready(kvm_object* device, void* stream, uint64_t value);
KVM_API int kvm_enqueue_wait_done(kvm_object* device, void* stream, uint64_t value);
KVM_API int kvm_device_lost(kvm_object* device, int* lost);
/* Between two ranges of device arenas; done: what the word `done` will be behind it. */
KVM_API int kvm_device_copy(kvm_object* device, const void* from, void* to, uint64_t bytes, uint64_t ready,
                            uint64_t* done);
/* Once, before this process first uses CUDA, while it has one thread (kvmanager/memory/device.h). */
KVM_API void kvm_allow_many_streams(void);

/* Attention in this process (client/in_process.h). */
typedef struct kvm_run_options {
  void* stream;
  uint64_t pages_max;
  int32_t encode_here;
  int32_t sequences_max;
  int32_t tokens_max;
  int32_t reserved;
} kvm_run_options;
/* calibration_dir: where the artifact that the cache's codec names lies; may be empty. Closing device or cache closes
 * the run first. */
KVM_API int kvm_create_run(kvm_object* device, kvm_object* cache, const char* calibration_dir,
                           size_t calibration_dir_bytes, const kvm_run_options* options, kvm_object** run);
KVM_API int kvm_run_begin(kvm_object* run, const kvm_entry* entries, uint32_t entry_count, int append, int attend);
/* begin in two: ask sends, start waits for the answer, before the first append or attend. */
KVM_API int kvm_run_ask(kvm_object* run, const kvm_entry* entries, uint32_t entry_count, int append, int attend);
KVM_API int kvm_run_start(kvm_object* run);
KVM_API int kvm_run_append(kvm_object* run, int32_t layer, const void* k, const void* v);
KVM_API int kvm_run_attend(kvm_object* run, int32_t layer, const void* q, void* out, void* lse);
KVM_API int kvm_run_end(kvm_object* run);
KVM_API int kvm_run_launches(kvm_object* run, uint64_t* launches);
KVM_API int kvm_run_after(kvm_object* run, kvm_object* sequence);
KVM_API int kvm_run_forget(kvm_object* run, uint64_t sequence);

#ifdef __cplusplus
}
#endif

#endif /* KVMANAGER_CLIENT_C_KVMANAGER_H_ */
