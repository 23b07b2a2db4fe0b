/* int8: K and V as signed codes of 8 or 4 bits with one step per channel and page, and attention on the codes.
 *
 * A codec built outside kvmanager's repository, against kvmanager_codec.h alone (README.md). It is small but whole: it
 * declines what it cannot hold, checks what it is given, attends without decoding, and gives the same bytes everywhere.
 *
 * Page of a layer, for each KV head one record of record_bytes():
 *   float k_step[d], v_step[d]     of each channel, little-endian fp32: the largest |x| of the channel / levels
 *   int8_t k[page_tokens][row]     codes, -levels..levels; row = d bytes with bits=8, and d/2 with bits=4:
 *   int8_t v[page_tokens][row]     two codes + 8 per byte, the even channel in the low half
 * A value is code * step.
 *
 * Steps fold into what they stand beside, so no value is rebuilt:
 *   q . k_t = sum_c (q_c k_step_c) code_tc        out_c = v_step_c sum_t p_t code_tc
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmanager_codec.h"

enum { kVersion = 1, kTokensMax = 256 };

struct kvmc_codec {
  uint32_t dtype, heads, d, tokens, layers;
  int bits, levels;
};

/* ---- errors: a text per thread ---- */

static _Thread_local char error_text[200];

static kvmc_status fail(kvmc_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
  return status;
}

static void last_error(char* text, size_t text_bytes) { snprintf(text, text_bytes, "%s", error_text); }

/* ---- elements of raw pages ---- */

static float bits_to_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static uint32_t float_to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static float load(uint32_t dtype, const uint8_t* at) {
  uint16_t x;
  memcpy(&x, at, sizeof x);
  if (dtype == KVMC_BFLOAT16) return bits_to_float((uint32_t)x << 16);
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x0400) return bits_to_float(sign | float_to_bits((float)rest * 0x1p-24f));
  return bits_to_float(sign | ((rest << 13) + 0x38000000));
}

/* Round to nearest even. */
static void store(uint32_t dtype, uint8_t* at, float f) {
  const uint32_t bits = float_to_bits(f), rest = bits & 0x7fffffff;
  uint16_t x;
  if (dtype == KVMC_BFLOAT16) {
    x = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else if (rest >= 0x477ff000) {
    x = 0x7c00;
  } else if (rest < 0x38800000) {
    x = (uint16_t)(float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000);
  } else {
    x = (uint16_t)((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
  }
  if (dtype == KVMC_FLOAT16) x |= (uint16_t)(bits >> 16 & 0x8000);
  memcpy(at, &x, sizeof x);
}

/* ---- the page ---- */

static size_t row_bytes(const kvmc_codec* c) { return (size_t)c->d * c->bits / 8; }
static size_t record_bytes(const kvmc_codec* c) { return 2 * c->d * sizeof(float) + 2 * c->tokens * row_bytes(c); }
static size_t payload_bytes(const kvmc_codec* c) { return c->heads * record_bytes(c); }
static size_t page_bytes(const kvmc_codec* c) {
  return (payload_bytes(c) + KVMC_ALIGNMENT_BYTES - 1) / KVMC_ALIGNMENT_BYTES * KVMC_ALIGNMENT_BYTES;
}
static size_t side_offset(const kvmc_codec* c, uint32_t head, int side) {
  return head * record_bytes(c) + 2 * c->d * sizeof(float) + side * c->tokens * row_bytes(c);
}
static size_t steps_offset(const kvmc_codec* c, uint32_t head, int side) {
  return head * record_bytes(c) + side * c->d * sizeof(float);
}

/* Codes of one token as floats. */
static inline void load_codes(const kvmc_codec* c, const uint8_t* row, float* codes) {
  if (c->bits == 8) {
    for (uint32_t i = 0; i < c->d; ++i) codes[i] = (float)(int8_t)row[i];
    return;
  }
  for (uint32_t i = 0; i < c->d / 2; ++i) {
    codes[2 * i] = (float)((row[i] & 15) - 8);
    codes[2 * i + 1] = (float)((row[i] >> 4) - 8);
  }
}

/* ---- describe, create ---- */

static kvmc_status read_context(const kvmc_context* context, kvmc_codec* out) {
  memset(out, 0, sizeof *out);
  out->bits = 8;
  for (size_t i = 0; i < context->parameter_count; ++i) {
    const kvmc_parameter* p =
        (const kvmc_parameter*)((const char*)context->parameters + i * context->parameter_item_bytes);
    if (strcmp(p->key, "bits") != 0)
      return fail(KVMC_INVALID_ARGUMENT, "int8 has no parameter %.60s, only bits", p->key);
    if (strcmp(p->value, "8") != 0 && strcmp(p->value, "4") != 0) {
      return fail(KVMC_INVALID_ARGUMENT, "bits is %.60s, must be 8 or 4", p->value);
    }
    out->bits = p->value[0] - '0';
  }
  if (context->calibration != NULL) return fail(KVMC_INVALID_ARGUMENT, "int8 takes no calibration");
  if (context->dtype != KVMC_FLOAT16 && context->dtype != KVMC_BFLOAT16) {
    return fail(KVMC_INVALID_ARGUMENT, "dtype is %u, must be 0 (float16) or 1 (bfloat16)", context->dtype);
  }
  if (context->kv_heads < 1 || context->kv_heads > 256) {
    return fail(KVMC_INVALID_ARGUMENT, "kv_heads is %u, must be 1..256", context->kv_heads);
  }
  if (context->head_dim < 16 || context->head_dim > 256 || context->head_dim % 16 != 0) {
    return fail(KVMC_INVALID_ARGUMENT, "head_dim is %u, must be a multiple of 16 in 16..256", context->head_dim);
  }
  if (context->page_tokens < 16 || context->page_tokens > kTokensMax || context->page_tokens % 16 != 0) {
    return fail(KVMC_INVALID_ARGUMENT, "page_tokens is %u, must be a multiple of 16 in 16..256", context->page_tokens);
  }
  out->dtype = context->dtype;
  out->heads = context->kv_heads;
  out->d = context->head_dim;
  out->tokens = context->page_tokens;
  out->layers = context->layers;
  out->levels = out->bits == 8 ? 127 : 7;
  return KVMC_OK;
}

static kvmc_status probe(void) { return KVMC_OK; }

static kvmc_status describe(const kvmc_context* context, kvmc_description* description) {
  kvmc_codec c;
  const kvmc_status status = read_context(context, &c);
  if (status != KVMC_OK) return status;
  description->version = kVersion;
  description->flags = KVMC_ATTENDS;
  description->payload_bytes = payload_bytes(&c);
  for (uint32_t layer = 0; layer < c.layers; ++layer) description->bytes_of_layer[layer] = (uint32_t)page_bytes(&c);
  snprintf(description->parameters, KVMC_PARAMETERS_BYTES_MAX, "bits=%d", c.bits);
  return KVMC_OK;
}

static kvmc_status create(const kvmc_context* context, kvmc_codec** codec) {
  kvmc_codec c;
  const kvmc_status status = read_context(context, &c);
  if (status != KVMC_OK) return status;
  kvmc_codec* made = malloc(sizeof *made);
  if (made == NULL) return fail(KVMC_INTERNAL, "no memory");
  *made = c;
  *codec = made;
  return KVMC_OK;
}

static void destroy(kvmc_codec* codec) { free(codec); }

/* Attention, in floats: codes [tokens][d], a folded row of q [d], scores [rows][tokens]. The others need none. */
static size_t workspace_bytes(const kvmc_codec* c, uint32_t purpose, uint32_t rows) {
  return purpose == KVMC_FOR_ATTEND ? ((size_t)(c->tokens + 1) * c->d + (size_t)rows * c->tokens) * sizeof(float) : 0;
}

/* ---- encode ---- */

/* 0 if a value is not finite. */
static int encode_side(const kvmc_codec* c, const uint8_t* raw, uint8_t* steps, uint8_t* codes) {
  const size_t row = row_bytes(c);
  for (uint32_t channel = 0; channel < c->d; ++channel) {
    float largest = 0;
    for (uint32_t t = 0; t < c->tokens; ++t) {
      const float x = fabsf(load(c->dtype, raw + 2 * ((size_t)t * c->d + channel)));
      if (!(x <= 3.4e38f)) return 0;
      if (x > largest) largest = x;
    }
    const float step = largest / (float)c->levels;
    memcpy(steps + channel * sizeof step, &step, sizeof step);
    for (uint32_t t = 0; t < c->tokens; ++t) {
      const float x = load(c->dtype, raw + 2 * ((size_t)t * c->d + channel));
      /* A step may have lost bits as a subnormal: the quotient is not quite bounded by the levels. */
      float code = step > 0 ? roundf(x / step) : 0;
      if (code > (float)c->levels) code = (float)c->levels;
      if (code < (float)-c->levels) code = (float)-c->levels;
      uint8_t* at = codes + t * row;
      if (c->bits == 8) {
        at[channel] = (uint8_t)(int8_t)code;
      } else if (channel % 2 == 0) {
        at[channel / 2] = (uint8_t)((int)code + 8);
      } else {
        at[channel / 2] |= (uint8_t)(((int)code + 8) << 4);
      }
    }
  }
  return 1;
}

static kvmc_status encode_batch(const kvmc_codec* c, const kvmc_encode_batch* batch) {
  const size_t raw_head = (size_t)c->tokens * c->d * 2;
  for (size_t i = 0; i < batch->item_count; ++i) {
    kvmc_encode_item* item = (kvmc_encode_item*)((char*)batch->items + i * batch->item_bytes);
    if (item->layer >= c->layers)
      return fail(KVMC_INVALID_ARGUMENT, "layer is %u, must be below %u", item->layer, c->layers);
    for (int side = 0; side < 2 && !item->declined; ++side) {
      for (uint32_t head = 0; head < c->heads && !item->declined; ++head) {
        item->declined =
            !encode_side(c, item->raw + (side * c->heads + head) * raw_head,
                         item->encoded + steps_offset(c, head, side), item->encoded + side_offset(c, head, side));
      }
    }
    memset(item->encoded + payload_bytes(c), 0, page_bytes(c) - payload_bytes(c));
  }
  return KVMC_OK;
}

/* ---- decode, validate ---- */

static kvmc_status check_heads(const kvmc_codec* c, uint32_t layer, uint32_t first, uint32_t count) {
  if (layer >= c->layers) return fail(KVMC_INVALID_ARGUMENT, "layer is %u, must be below %u", layer, c->layers);
  if (count == 0 || first >= c->heads || count > c->heads - first) {
    return fail(KVMC_INVALID_ARGUMENT, "heads are %u+%u, must be within %u", first, count, c->heads);
  }
  return KVMC_OK;
}

static kvmc_status decode_batch(const kvmc_codec* c, const kvmc_decode_batch* batch) {
  float codes[256], steps[256];
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_decode_item* item = (const kvmc_decode_item*)((const char*)batch->items + i * batch->item_bytes);
    const kvmc_status status = check_heads(c, item->layer, item->first_head, item->head_count);
    if (status != KVMC_OK) return status;
    uint8_t* at = item->raw;
    for (int side = 0; side < 2; ++side) {
      for (uint32_t head = item->first_head; head < item->first_head + item->head_count; ++head) {
        memcpy(steps, item->encoded + steps_offset(c, head, side), c->d * sizeof(float));
        for (uint32_t t = 0; t < c->tokens; ++t) {
          load_codes(c, item->encoded + side_offset(c, head, side) + t * row_bytes(c), codes);
          for (uint32_t channel = 0; channel < c->d; ++channel, at += 2) {
            store(c->dtype, at, codes[channel] * steps[channel]);
          }
        }
      }
    }
  }
  return KVMC_OK;
}

/* Any code is safe to multiply with; a step must be finite. */
static kvmc_status validate(const kvmc_codec* c, uint32_t layer, const uint8_t* encoded, size_t encoded_bytes) {
  if (layer >= c->layers) return fail(KVMC_INVALID_ARGUMENT, "layer is %u, must be below %u", layer, c->layers);
  if (encoded_bytes != page_bytes(c)) {
    return fail(KVMC_DATA_LOSS, "the page has %zu bytes, must have %zu", encoded_bytes, page_bytes(c));
  }
  for (uint32_t head = 0; head < c->heads; ++head) {
    for (uint32_t i = 0; i < 2 * c->d; ++i) {
      float step;
      memcpy(&step, encoded + steps_offset(c, head, 0) + i * sizeof step, sizeof step);
      if (!(step >= 0 && step <= 3.4e38f)) {
        return fail(KVMC_DATA_LOSS, "head %u step %u is %g, must be finite and 0 or more", head, i, (double)step);
      }
    }
  }
  return KVMC_OK;
}

/* ---- attention ---- */

/* Vectors as gcc and clang have them: 16 floats in as many registers as the machine needs. head_dim is a multiple of
 * 16, and everything here is 64-byte aligned. */
enum { kLanes = 16 };
typedef float lanes __attribute__((vector_size(kLanes * sizeof(float)), may_alias));

/* Compiled once per width of registers, with what is inlined into it; the loader chooses. Attention alone: its last
 * bits may differ from machine to machine, a page's bytes may not. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE_REGISTERS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE_REGISTERS
#endif

static inline float dot(const float* a, const float* b, uint32_t d) {
  lanes partial = {0};
  for (uint32_t i = 0; i < d; i += kLanes) partial += *(const lanes*)(a + i) * *(const lanes*)(b + i);
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += partial[lane];
  return sum;
}

/* Scores into probabilities, and the state's maximum, sum and acc brought to them. */
static inline void softmax(const kvmc_codec* c, const kvmc_attend_item* item, uint32_t r, float* scores) {
  float page_max = -INFINITY, sum = 0;
  for (uint32_t t = 0; t < c->tokens; ++t) page_max = scores[t] > page_max ? scores[t] : page_max;
  if (page_max > item->max[r]) {
    const float shrink = expf(item->max[r] - page_max); /* 0 for a row that saw nothing yet */
    item->max[r] = page_max;
    item->sum[r] *= shrink;
    for (uint32_t i = 0; i < c->d; ++i) item->acc[(size_t)r * c->d + i] *= shrink;
  }
  for (uint32_t t = 0; t < c->tokens; ++t) {
    scores[t] = expf(scores[t] - item->max[r]);
    sum += scores[t];
  }
  item->sum[r] += sum;
}

/* Each code is unpacked once, for all rows. */
WIDE_REGISTERS static void attend_page(const kvmc_codec* c, const kvmc_attend_item* item, const uint8_t* page,
                                       float* workspace) {
  const uint32_t d = c->d, rows = item->rows, tokens = c->tokens;
  const size_t row = row_bytes(c);
  float *codes = workspace, *folded = codes + (size_t)tokens * d, *scores = folded + d;
  const uint8_t* k = page + side_offset(c, item->kv_head, 0);
  const uint8_t* v = page + side_offset(c, item->kv_head, 1);
  float steps[256] __attribute__((aligned(64)));
  memcpy(steps, page + steps_offset(c, item->kv_head, 0), d * sizeof(float));
  for (uint32_t t = 0; t < tokens; ++t) load_codes(c, k + t * row, codes + (size_t)t * d);
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t i = 0; i < d; ++i) folded[i] = item->q[(size_t)r * d + i] * steps[i] * item->scale;
    for (uint32_t t = 0; t < tokens; ++t) scores[(size_t)r * tokens + t] = dot(folded, codes + (size_t)t * d, d);
    softmax(c, item, r, scores + (size_t)r * tokens);
  }
  memcpy(steps, page + steps_offset(c, item->kv_head, 1), d * sizeof(float));
  for (uint32_t t = 0; t < tokens; ++t) load_codes(c, v + t * row, codes + (size_t)t * d);
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t i = 0; i < d; i += kLanes) {
      lanes sum = {0};
      for (uint32_t t = 0; t < tokens; ++t) {
        sum += scores[(size_t)r * tokens + t] * *(const lanes*)(codes + (size_t)t * d + i);
      }
      *(lanes*)(item->acc + (size_t)r * d + i) += sum * *(const lanes*)(steps + i);
    }
  }
}

static kvmc_status attend_batch(const kvmc_codec* c, const kvmc_attend_batch* batch) {
  for (size_t i = 0; i < batch->item_count; ++i) {
    const kvmc_attend_item* item = (const kvmc_attend_item*)((const char*)batch->items + i * batch->item_bytes);
    const kvmc_status status = check_heads(c, item->layer, item->kv_head, 1);
    if (status != KVMC_OK) return status;
    for (size_t page = 0; page < item->page_count; ++page) {
      attend_page(c, item, item->pages[page], (float*)batch->workspace);
    }
  }
  return KVMC_OK;
}

/* ---- the table ---- */

const kvmc_codec_api* kvmanager_codec_v1(void) {
  static const kvmc_codec_api api = {
      .struct_size = sizeof api,
      .abi_version = KVMC_ABI_VERSION,
      .name = "int8",
      .help = "codes of 8 or 4 bits with a step per channel and page (bits)",
      .probe = probe,
      .describe = describe,
      .create = create,
      .destroy = destroy,
      .workspace_bytes = workspace_bytes,
      .encode_batch = encode_batch,
      .decode_batch = decode_batch,
      .validate = validate,
      .last_error = last_error,
      .attend_batch = attend_batch,
  };
  return &api;
}
