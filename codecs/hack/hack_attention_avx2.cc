#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX2
#include "codecs/hack/hack_attention_inl.h"
#endif
