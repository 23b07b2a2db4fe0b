#include "codecs/zack/rotation_inl.h"
