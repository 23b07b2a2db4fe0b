#include "codecs/abi/export_codec.h"
#include "codecs/zack_million/zack_million.h"

KVMANAGER_EXPORT_CODEC("zack+million", kvmanager::RegisterZackMillion)
