#include "codecs/pq/pq_kernels_inl.h"
