#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#include "codecs/zack/rotation_inl.h"
#endif
