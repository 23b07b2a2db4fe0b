#define _GNU_SOURCE
/* A codec that copies pages, and what can be wrong with one: a macro BAD_... makes it so. Without any, it is sound and
 * attends to nothing itself: the core decodes for it. */
#include <stdlib.h>
#include <string.h>
#if defined(BAD_ESCAPES) || defined(BAD_ANSWERS)
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#include "codecs/abi/kvmanager_codec.h"

struct kvmc_codec {
  kvmc_context context;
};

static _Thread_local const char* error_text = "";

static kvmc_status fail(kvmc_status status, const char* text) {
  error_text = text;
  return status;
}

static void last_error(char* text, size_t text_bytes) {
  size_t i = 0;
  for (; error_text[i] != '\0' && i + 1 < text_bytes; ++i) text[i] = error_text[i];
  text[i] = '\0';
}

static size_t head_bytes(const kvmc_context* c) { return (size_t)c->page_tokens * c->head_dim * 2; }
static size_t page_bytes(const kvmc_context* c) { return 2 * c->kv_heads * head_bytes(c); }

static kvmc_status check(const kvmc_context* c) {
  if (c->parameter_count != 0) return fail(KVMC_INVALID_ARGUMENT, "it takes no parameters");
  if (c->dtype > KVMC_BFLOAT16) return fail(KVMC_INVALID_ARGUMENT, "dtype must be 0 or 1");
  if (c->kv_heads < 1 || c->kv_heads > 256) return fail(KVMC_INVALID_ARGUMENT, "kv_heads must be 1..256");
  if (c->head_dim < 16 || c->head_dim > 256 || c->head_dim % 16 != 0) {
    return fail(KVMC_INVALID_ARGUMENT, "head_dim must be a multiple of 16 in 16..256");
  }
  if (c->page_tokens < 16 || c->page_tokens > 256 || c->page_tokens % 16 != 0) {
    return fail(KVMC_INVALID_ARGUMENT, "page_tokens must be a multiple of 16 in 16..256");
  }
  return KVMC_OK;
}

static kvmc_status probe(void) {
#ifdef BAD_PROBE
  return fail(KVMC_UNAVAILABLE, "this machine lacks the instruction FROBNICATE");
#else
  return KVMC_OK;
#endif
}

static kvmc_status describe(const kvmc_context* context, kvmc_description* description) {
  const kvmc_status status = check(context);
  if (status != KVMC_OK) return status;
  description->version = 1;
  description->payload_bytes = page_bytes(context);
  for (uint32_t layer = 0; layer < context->layers; ++layer) {
    description->bytes_of_layer[layer] = (uint32_t)page_bytes(context);
#ifdef BAD_SIZE_NOT_ALIGNED
    description->bytes_of_layer[layer] -= 1;
#endif
#ifdef BAD_SIZE_HUGE
    description->bytes_of_layer[layer] = 0xffffffc0u;
#endif
#ifdef BAD_SIZE_TOO_SMALL
    description->bytes_of_layer[layer] -= 64;
    description->payload_bytes = page_bytes(context) - 64;
#endif
  }
#ifdef BAD_PARAMETERS_WITHOUT_END
  memset(description->parameters, 'a', KVMC_PARAMETERS_BYTES_MAX);
#endif
#ifdef BAD_ATTEND_ERROR
  description->flags = KVMC_ATTENDS;
#endif
#ifdef BAD_ATTEND_WRONG
  description->flags = KVMC_ATTENDS;
#endif
#if defined(BAD_ATTEND_LOOPS) || defined(BAD_ATTEND_NAN)
  description->flags = KVMC_ATTENDS;
#endif
#ifdef BAD_ATTENDS_WITHOUT_ENTRY
  description->flags = KVMC_ATTENDS;
#endif
#ifdef BAD_UNKNOWN_FLAG
  description->layer_flags[0] = 1u << 31;
#endif
  return KVMC_OK;
}

static kvmc_status create(const kvmc_context* context, kvmc_codec** codec) {
#ifdef BAD_CREATE
  return fail(KVMC_INTERNAL, "the moon is in the wrong phase");
#endif
  const kvmc_status status = check(context);
  if (status != KVMC_OK) return status;
  kvmc_codec* made = malloc(sizeof *made);
  if (made == NULL) return fail(KVMC_INTERNAL, "no memory");
  made->context = *context;
  *codec = made;
  return KVMC_OK;
}

static void destroy(kvmc_codec* codec) { free(codec); }

static size_t workspace_bytes(const kvmc_codec* c, uint32_t purpose, uint32_t rows) {
  (void)c, (void)purpose, (void)rows;
#ifdef BAD_WORKSPACE_HUGE
  return (size_t)-1;
#else
  return 64;
#endif
}

static int is_finite(const kvmc_context* c, const uint8_t* raw) {
  const uint16_t exponent = c->dtype == KVMC_FLOAT16 ? 0x7c00 : 0x7f80;
  for (size_t i = 0; i < page_bytes(c) / 2; ++i) {
    uint16_t bits;
    memcpy(&bits, raw + 2 * i, 2);
    if ((bits & exponent) == exponent) return 0;
  }
  return 1;
}

#ifdef BAD_ESCAPES
/* What a process of its own must keep it from; the error's text names what it could do. */
static kvmc_status escape(void) {
  static _Thread_local char text[400];
  text[0] = '\0';
#define TRY(what, call) \
  if ((call) >= 0) strcat(text, " " what)
  const pid_t daemon = getppid();
  char byte = 0;
  struct iovec here = {&byte, 1}, there = {(void*)describe, 1};
  struct rlimit limit = {1 << 20, 1 << 20};
  char* const arguments[] = {"/bin/true", NULL};
  TRY("fork", syscall(SYS_fork));
  TRY("clone", syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  TRY("execve", syscall(SYS_execve, arguments[0], arguments, NULL));
  TRY("socket", socket(AF_INET, SOCK_STREAM, 0));
  TRY("socketpair", syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, &limit));
  TRY("read", open("/etc/passwd", O_RDONLY));
  TRY("write", open("/tmp/kvmanager-escaped", O_WRONLY | O_CREAT, 0600));
  TRY("unlink", syscall(SYS_unlinkat, AT_FDCWD, "/tmp/kvmanager-escaped", 0));
  TRY("kill", kill(daemon, 0));
  TRY("tgkill", syscall(SYS_tgkill, daemon, daemon, 0));
  TRY("ptrace", ptrace(PTRACE_SEIZE, daemon, 0, 0));
  TRY("vm_readv", process_vm_readv(daemon, &here, 1, &there, 1, 0));
  TRY("prlimit", prlimit(daemon, RLIMIT_NOFILE, &limit, NULL));
  TRY("fcntl", fcntl(5, F_SETOWN, daemon));
  TRY("pidfd", syscall(SYS_pidfd_open, daemon, 0));
  TRY("memfd", syscall(SYS_memfd_create, "x", 0));
  TRY("descriptor", read(8, &byte, 0)); /* beyond control, memory and one lane, but for what the loader left */
#undef TRY
  return fail(KVMC_INTERNAL, text[0] == '\0' ? "nothing" : text);
}
#endif

static kvmc_status encode_batch(const kvmc_codec* c, const kvmc_encode_batch* batch) {
#ifdef BAD_ENCODE_ERROR
  return fail(KVMC_INTERNAL, "out of paper");
#endif
#ifdef BAD_ESCAPES
  return escape();
#endif
#ifdef BAD_ANSWERS
  if (write(5, "garbage", 7) < 0) return fail(KVMC_INTERNAL, "it could not");
#endif
  for (size_t i = 0; i < batch->item_count; ++i) {
#ifdef BAD_STRIDE
    kvmc_encode_item* item = batch->items + i;
#else
    kvmc_encode_item* item = (kvmc_encode_item*)((char*)batch->items + i * batch->item_bytes);
#endif
#ifndef BAD_TAKES_NAN
    if (!is_finite(&c->context, item->raw)) {
      item->declined = 1;
      continue;
    }
#endif
    memcpy(item->encoded, item->raw, page_bytes(&c->context));
#ifdef BAD_WRITES_PAST
    item->encoded[page_bytes(&c->context)] = 1;
#endif
#ifdef BAD_WRITES_BEFORE
    item->encoded[-1] = 1;
#endif
#ifdef BAD_READS_PAST
    item->encoded[0] ^= item->raw[page_bytes(&c->context) + i];
#endif
#ifdef BAD_WRITES_INPUT
    ((uint8_t*)item->raw)[5] = 0;
#endif
#ifdef BAD_WORKSPACE_PAST
    batch->workspace[batch->workspace_bytes] = 1;
#endif
#ifdef BAD_NOT_DETERMINISTIC
    static int calls = 0;
    item->encoded[9] = (uint8_t)(calls++ & 3);
#endif
#ifdef BAD_CRASHES
    abort();
#endif
#ifdef BAD_EXITS
    exit(0);
#endif
  }
  return KVMC_OK;
}

static kvmc_status decode_batch(const kvmc_codec* c, const kvmc_decode_batch* batch) {
#ifdef BAD_DECODE_ERROR
  return fail(KVMC_INTERNAL, "cannot read my own writing");
#endif
  const size_t head = head_bytes(&c->context);
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_decode_item* item = (const kvmc_decode_item*)((const char*)batch->items + i * batch->item_bytes);
    uint32_t first = item->first_head;
#ifdef BAD_FIRST_HEAD_IGNORED
    first = 0;
#endif
    for (int side = 0; side < 2; ++side) {
      memcpy(item->raw + side * item->head_count * head, item->encoded + (side * c->context.kv_heads + first) * head,
             item->head_count * head);
    }
  }
  return KVMC_OK;
}

static kvmc_status validate(const kvmc_codec* c, uint32_t layer, const uint8_t* encoded, size_t encoded_bytes) {
  (void)layer;
#ifdef BAD_VALIDATE_FOLLOWS_BYTES
  uint32_t at;
  memcpy(&at, encoded, sizeof at);
  if (encoded[at & 0xffffff] == 7) return fail(KVMC_DATA_LOSS, "seven");
#endif
  if (encoded_bytes != page_bytes(&c->context)) return fail(KVMC_DATA_LOSS, "a page of another size");
  return is_finite(&c->context, encoded) ? KVMC_OK : fail(KVMC_DATA_LOSS, "a value is not finite");
}

#ifdef BAD_ATTEND_ERROR
/* Spoils the state before it fails. */
static kvmc_status attend_batch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  (void)c;
  batch->items->sum[0] = 1e9f;
  batch->items->acc[0] = -1;
  return fail(KVMC_INTERNAL, "attention wandered off");
}
#endif

#ifdef BAD_ATTEND_WRONG
/* As if every page had one token, whose score and V are 0. */
static kvmc_status attend_batch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_attend_item* item = (const kvmc_attend_item*)((const char*)batch->items + i * batch->item_bytes);
    memset(item->max, 0, item->rows * sizeof(float));
    memset(item->acc, 0, item->rows * c->context.head_dim * sizeof(float));
    for (uint32_t row = 0; row < item->rows; ++row) item->sum[row] = 1;
  }
  return KVMC_OK;
}
#endif

#ifdef BAD_ATTEND_LOOPS
static kvmc_status attend_batch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  (void)c, (void)batch;
  for (volatile int i = 0; i >= 0; i = i == 0) {
  }
  return KVMC_OK;
}
#endif

#ifdef BAD_ATTEND_NAN
static kvmc_status attend_batch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  (void)c;
  memset(batch->items->acc, 0xff, sizeof(float));
  return KVMC_OK;
}
#endif

/* A table of a later version: entries that nobody here knows. */
typedef struct later_api {
  kvmc_codec_api api;
  void* more[5];
} later_api;

#ifdef BAD_SYMBOL
#define kvmanager_codec_v1 kvmanager_codec_v2
#endif

KVMC_EXPORT const kvmc_codec_api* kvmanager_codec_v1(void) {
  static later_api table;
  kvmc_codec_api* api = &table.api;
  api->struct_size = sizeof *api;
  api->abi_version = KVMC_ABI_VERSION;
  api->name = "copy";
  api->help = "pages as they are";
  api->probe = probe;
  api->describe = describe;
  api->create = create;
  api->destroy = destroy;
  api->workspace_bytes = workspace_bytes;
  api->encode_batch = encode_batch;
  api->decode_batch = decode_batch;
  api->validate = validate;
  api->last_error = last_error;
#if defined(BAD_ATTEND_ERROR) || defined(BAD_ATTEND_WRONG) || defined(BAD_ATTEND_LOOPS) || defined(BAD_ATTEND_NAN)
  api->attend_batch = attend_batch;
#endif
#ifdef BAD_STRUCT_SIZE_SMALL
  api->struct_size = offsetof(kvmc_codec_api, decode_batch) + 3;
#endif
#ifdef BAD_STRUCT_SIZE_ZERO
  api->struct_size = 0;
#endif
#ifdef BAD_NULL_ENTRY
  api->decode_batch = NULL;
#endif
#ifdef BAD_VERSION
  api->abi_version = 7;
#endif
#ifdef BAD_NAME
  api->name = "No Name";
#endif
#ifdef OLDER_TABLE /* of a time when nothing was optional: attend_batch is beyond its end, whatever lies there */
  api->struct_size = offsetof(kvmc_codec_api, attend_batch);
  memset((char*)api + api->struct_size, 0xcc, sizeof table - api->struct_size);
#endif
#ifdef NEWER_TABLE
  api->struct_size = sizeof table;
  memset(table.more, 0xcc, sizeof table.more);
#endif
#ifdef BAD_NULL_TABLE
  return NULL;
#endif
  return api;
}
