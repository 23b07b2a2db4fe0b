#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#include "codecs/pq/pq_kernels_inl.h"
#endif
