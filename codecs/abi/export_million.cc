#include "codecs/abi/export_codec.h"
#include "codecs/million/million.h"

KVMANAGER_EXPORT_CODEC("million", kvmanager::RegisterMillion)
