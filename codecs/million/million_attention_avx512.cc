#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#include "codecs/million/million_attention_inl.h"
#endif
