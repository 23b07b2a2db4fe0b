/* The C interface of a codec outside this repository: a shared object that kvmanagerd loads by --codec-plugin FILE.so.
 *
 * A codec turns sealed pages of attention keys and values into bytes of its own and back, and may run attention on
 * those bytes. This header is all that it is built against; it includes <stddef.h> and <stdint.h> and nothing else. The
 * object exports one function, kvmanager_codec_v1, which returns a constant table (struct kvmc_codec_api). A tutorial
 * is in docs/writing-a-codec.md, and `codec_conformance FILE.so` checks everything that is demanded below.
 *
 * Words. A page is page_tokens tokens of one layer: K and V of every KV head. Its raw form is
 * [side: K, V][kv_heads][page_tokens][head_dim] of dtype, dense. Its encoded form is bytes_of_layer bytes that are the
 * codec's own, at once what is stored, sent to other hosts and computed on: no pointers, no padding left unwritten.
 *
 * Ownership. Nothing that one side allocated is freed by the other. Whatever is passed to an entry belongs to the
 * caller and is only valid during the call: copy what you keep (parameters, the calibration). A codec made by `create`
 * belongs to the core, which gives it back to `destroy` once no call on it is under way. The table and its strings are
 * constants of the object, which is never unloaded.
 *
 * Threads. Every entry may be called from any thread, and entries on one codec from many threads at once: a codec does
 * not change after `create`. Threads of your own, signal handlers, exit() and fork() do not belong into a codec. The
 * core's event loop may call `describe`, `create` and short `attend_batch`es: none may wait.
 *
 * Memory. encode_batch, decode_batch, attend_batch and the maps allocate nothing: they say by `workspace_bytes` what
 * scratch they need, and get it, 64-byte aligned and with undefined contents. Pages, workspaces, q and acc are 64-byte
 * aligned. A codec writes within what it was given: it runs in the daemon's process, and a byte written past a page is
 * another user's page. No exception, longjmp or C++ object crosses.
 *
 * Errors. An entry returns KVMC_OK or another kvmc_status, and `last_error` then gives the text for the calling thread:
 * what was given, and what is allowed. A page that cannot be encoded (its values do not fit, NaN) is not an error: set
 * `declined`, and it stays raw. After an error of encode_batch the batch's pages stay raw; an error of attend_batch is
 * answered by decode_batch and attention on the raw form, and an error of decode_batch by NaN: never by a wrong answer.
 *
 * Determinism. Equal pages at equal places give equal bytes, on every machine and whatever else is in the batch: pages
 * are named by content, and two hosts must agree. (In C: no -ffast-math, and -ffp-contract=off.) An incompatible change
 * of the bytes is a new `version`: old pages then become misses.
 *
 * Evolution. This interface only grows: fields and entries are added at the end of a struct, never moved or removed,
 * and every struct starts with struct_size, which its maker sets to sizeof. Both sides look at it:
 *   - a core with more entries than your table takes the missing ones for NULL;
 *   - a core with fewer ignores yours;
 *   - read a field of a struct you were given only if it lies inside its struct_size. The fields below are in every
 *     struct of version 1: you need not check for them;
 *   - elements of arrays have no struct_size: whoever passes the array gives item_bytes, the distance from one element
 *     to the next. Step by that, never by sizeof.
 * What cannot be added so will be kvmanager_codec_v2, and an object may export both.
 */
#ifndef KVMANAGER_CODEC_H_
#define KVMANAGER_CODEC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVMC_EXPORT __attribute__((visibility("default")))
#else
#define KVMC_EXPORT
#endif

#define KVMC_ABI_VERSION 1
#define KVMC_ALIGNMENT_BYTES 64        /* of pages, workspaces, q and acc */
#define KVMC_ROWS_MAX 64               /* query rows of one attend item */
#define KVMC_PARAMETERS_BYTES_MAX 1024 /* of the canonical text that describe writes, the 0 at its end included */
#define KVMC_NAME_BYTES_MAX 32

/* What an entry returns. */
typedef int32_t kvmc_status;
#define KVMC_OK 0
#define KVMC_INVALID_ARGUMENT 1    /* a parameter or a layout that the codec does not take */
#define KVMC_FAILED_PRECONDITION 2 /* the calibration is missing, or for another model */
#define KVMC_DATA_LOSS 3           /* encoded bytes that the codec cannot have written */
#define KVMC_UNAVAILABLE 4         /* not on this machine */
#define KVMC_INTERNAL 5            /* anything else */

/* Element types of raw pages. */
#define KVMC_FLOAT16 0u
#define KVMC_BFLOAT16 1u

/* A codec made by `create`: whatever you like behind the pointer. */
typedef struct kvmc_codec kvmc_codec;

/* One key=value of a codec's name as a user wrote it: int8:bits=4 has bits=4. Texts end in 0. */
typedef struct kvmc_parameter {
  const char* key;
  const char* value;
} kvmc_parameter;

/* What a codec is wanted for. */
typedef struct kvmc_context {
  size_t struct_size;
  uint32_t dtype;       /* KVMC_FLOAT16 or KVMC_BFLOAT16 */
  uint32_t kv_heads;    /* 1..256, of this shard */
  uint32_t head_dim;    /* 16..256, a multiple of 16 */
  uint32_t page_tokens; /* 16..256, a multiple of 16 */
  uint32_t layers;      /* of the model, 1 or more */
  uint32_t query_heads; /* of this shard; 0: not known */
  /* Sorted by key, each key once; without "calibration", whose file is below. Refuse a key that you do not know. */
  const kvmc_parameter* parameters;
  size_t parameter_count;
  size_t parameter_item_bytes;
  /* The calibration artifact that the user named, as a safetensors file in memory (docs/calibration.md): checked
     against its digest and this geometry. NULL: none was named. 64-byte aligned. */
  const uint8_t* calibration;
  size_t calibration_bytes;
} kvmc_context;

/* description.flags */
#define KVMC_ATTENDS 1u /* attend_batch works on this codec; without it, pages are decoded and attended to raw */
/* description.layer_flags */
#define KVMC_MAPS                                                                                     \
  1u /* attend_batch of this layer takes queries that map_queries made, and leaves acc in the codec's \
        own space: expand_output is the way back */
#define KVMC_FOLDS                                                                                     \
  2u /* the layer's outputs stay in the codec's space, for a client that folds output_factor into W_O; \
        project_output is the way there for raw pages. Only with KVMC_MAPS */

/* What a codec is for one context. The core makes it, zeroed, and `describe` fills it in. */
typedef struct kvmc_description {
  size_t struct_size;
  uint32_t version;       /* of the byte format: 1 or more */
  uint32_t flags;         /* KVMC_ATTENDS */
  uint64_t payload_bytes; /* of a page, what carries information: without padding, the mean over layers */
  /* In: room for `layers` values each. Out: bytes_of_layer[i] is what a page of layer i takes, 1 or more, a multiple of
     KVMC_ALIGNMENT_BYTES, and the same whatever the page holds. layer_flags comes zeroed. */
  uint32_t* bytes_of_layer;
  uint32_t* layer_flags;
  /* In: room for KVMC_PARAMETERS_BYTES_MAX. Out: every parameter with the value in force, in an order of your choice
     that never changes, as "bits=4,range=max"; empty if there are none. It is part of a page's name. */
  char* parameters;
} kvmc_description;

/* For what a workspace is asked. */
#define KVMC_FOR_ENCODE 0u /* of one encode_batch, whatever its size */
#define KVMC_FOR_DECODE 1u
#define KVMC_FOR_ATTEND 2u /* of one attend_batch whose items have at most `rows` rows */

typedef struct kvmc_encode_item {
  const uint8_t* raw;   /* a full page in its raw form */
  uint8_t* encoded;     /* bytes_of_layer[layer]: write every one of them, unless you decline */
  uint32_t layer;       /* of the model */
  uint32_t declined;    /* out, comes as 0; 1: this page cannot be encoded. Say so for NaN and Inf */
  uint64_t first_token; /* position in the context of the page's first token */
} kvmc_encode_item;

typedef struct kvmc_encode_batch {
  size_t struct_size;
  kvmc_encode_item* items;
  size_t item_count;
  size_t item_bytes;
  uint8_t* workspace;
  size_t workspace_bytes;
} kvmc_encode_batch;

typedef struct kvmc_decode_item {
  const uint8_t* encoded;
  uint8_t*
      raw; /* [side: K, V][head_count][page_tokens][head_dim] of dtype: heads first_head .. first_head+head_count-1 */
  uint32_t layer;
  uint32_t first_head;
  uint32_t head_count; /* 1 or more */
} kvmc_decode_item;

typedef struct kvmc_decode_batch {
  size_t struct_size;
  const kvmc_decode_item* items;
  size_t item_count;
  size_t item_bytes;
  uint8_t* workspace;
  size_t workspace_bytes;
} kvmc_decode_batch;

/* Attention of some query rows over pages of one KV head, as a running softmax. For each row r, each token t of each
 * page, with s = scale * dot(q[r], K[t]): raise max[r] to m = max(max[r], s); where it grew from `old`, multiply sum[r]
 * and acc[r] by exp(old - m); then sum[r] += exp(s - m) and acc[r] += exp(s - m) * V[t]. Take a page at a time, not a
 * token. A row that saw nothing yet has max = -infinity, sum = 0 and acc = 0. The output is acc / sum, which the core
 * takes after it has merged this with raw pages and other parts of the context. Every row sees every token. */
typedef struct kvmc_attend_item {
  const float* q; /* [rows][head_dim], after RoPE; not scaled */
  uint32_t rows;  /* 1..KVMC_ROWS_MAX: (query token, head of the group) */
  uint32_t layer;
  uint32_t kv_head;
  float scale;
  const uint8_t* const* pages; /* [page_count], encoded, in order of position, not contiguous */
  size_t page_count;
  float* max; /* [rows], in and out */
  float* sum; /* [rows], in and out */
  float* acc; /* [rows][head_dim], in and out */
  /* What to prefetch: the pages and the head that the core asks for after this item; 0 pages: unknown. */
  const uint8_t* const* next_pages;
  size_t next_page_count;
  uint32_t next_kv_head;
} kvmc_attend_item;

typedef struct kvmc_attend_batch {
  size_t struct_size;
  const kvmc_attend_item* items;
  size_t item_count;
  size_t item_bytes;
  uint8_t* workspace;
  size_t workspace_bytes;
} kvmc_attend_batch;

/* Rows into or out of the codec's own space: to [rows][head_dim] from [rows][head_dim], distinct; what a smaller space
 * does not use is zero. */
typedef struct kvmc_map_item {
  size_t struct_size;
  const float* from;
  float* to;
  uint32_t rows; /* 1..KVMC_ROWS_MAX */
  uint32_t layer;
  uint32_t kv_head;
} kvmc_map_item;

/* The table. */
typedef struct kvmc_codec_api {
  size_t struct_size;   /* sizeof(kvmc_codec_api) */
  uint32_t abi_version; /* KVMC_ABI_VERSION */
  uint32_t reserved;    /* 0 */
  const char* name;     /* what users write: 1..KVMC_NAME_BYTES_MAX of a-z, 0-9, _ and + ; not that of another codec */
  const char* help;     /* one line: what it is, and its parameters */

  /* Required: the core refuses an object in which one of these is NULL or outside struct_size. */

  /* Can the codec run on this machine? Looks at the processor, and takes no resources. */
  kvmc_status (*probe)(void);
  /* Fills in what the codec would be for `context`; makes nothing. Refuses layouts and parameters that it does not
     take. */
  kvmc_status (*describe)(const kvmc_context* context, kvmc_description* description);
  /* Makes a codec for a context that describe took. *codec is written on success only. */
  kvmc_status (*create)(const kvmc_context* context, kvmc_codec** codec);
  void (*destroy)(kvmc_codec* codec);
  /* Bytes of scratch; `rows` counts for KVMC_FOR_ATTEND alone, and more rows never need less. */
  size_t (*workspace_bytes)(const kvmc_codec* codec, uint32_t purpose, uint32_t rows);
  kvmc_status (*encode_batch)(const kvmc_codec* codec, const kvmc_encode_batch* batch);
  /* Writes the values that attention on the encoded form stands for, rounded to dtype; one head, or all of them. */
  kvmc_status (*decode_batch)(const kvmc_codec* codec, const kvmc_decode_batch* batch);
  /* KVMC_OK if decode_batch and attend_batch may read these bytes, which come from a file or another host: nobody
     vouches for them. Check every count and offset against its bound, and that every scale is finite.
     KVMC_DATA_LOSS says what is wrong where. */
  kvmc_status (*validate)(const kvmc_codec* codec, uint32_t layer, const uint8_t* encoded, size_t encoded_bytes);
  /* The text of the calling thread's last error, cut to text_bytes (1 or more) with the 0 at its end; empty if there
     was none. */
  void (*last_error)(char* text, size_t text_bytes);

  /* Optional: NULL, or outside struct_size, if the codec does not do that. */

  kvmc_status (*attend_batch)(const kvmc_codec* codec, const kvmc_attend_batch* batch);
  /* Needed where a layer has KVMC_MAPS: queries into the codec's space, and acc back out of it. */
  kvmc_status (*map_queries)(const kvmc_codec* codec, const kvmc_map_item* item);
  kvmc_status (*expand_output)(const kvmc_codec* codec, const kvmc_map_item* item);
  /* Needed where a layer has KVMC_FOLDS: acc of raw pages into the codec's space, and the factor A
     [head_dim][head_dim], row-major, by which an output o' of the codec's space stands for o = A o'. */
  kvmc_status (*project_output)(const kvmc_codec* codec, const kvmc_map_item* item);
  kvmc_status (*output_factor)(const kvmc_codec* codec, uint32_t layer, uint32_t kv_head, float* factor);
} kvmc_codec_api;

/* The one symbol. It may be called more than once, and always returns the same table. */
#define KVMC_SYMBOL "kvmanager_codec_v1"
KVMC_EXPORT const kvmc_codec_api* kvmanager_codec_v1(void);

#ifdef __cplusplus
}
#endif

#endif /* KVMANAGER_CODEC_H_ */
