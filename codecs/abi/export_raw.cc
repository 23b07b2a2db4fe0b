#include "codecs/abi/export_codec.h"
#include "codecs/raw/raw.h"

KVMANAGER_EXPORT_CODEC("raw", kvmanager::RegisterRaw)
