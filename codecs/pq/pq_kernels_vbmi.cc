#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#define KVMANAGER_PQ_VBMI
#include "codecs/pq/pq_kernels_inl.h"
#endif
