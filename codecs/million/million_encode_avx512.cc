#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#include "codecs/million/million_encode_inl.h"
#endif
