#include "codecs/million/million_attention_inl.h"
