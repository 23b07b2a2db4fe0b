#include "codecs/hack/hack_attention_inl.h"
