#include "codecs/million/million_encode_inl.h"
