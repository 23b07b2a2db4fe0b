#include "codecs/abi/export_codec.h"
#include "codecs/zack/zack.h"

KVMANAGER_EXPORT_CODEC("zack", kvmanager::RegisterZack)
