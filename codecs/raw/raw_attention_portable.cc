#include "codecs/raw/raw_attention_inl.h"
