#include "codecs/abi/export_codec.h"
#include "codecs/hack/hack.h"

KVMANAGER_EXPORT_CODEC("hack", kvmanager::RegisterHack)
