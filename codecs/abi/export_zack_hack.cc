#include "codecs/abi/export_codec.h"
#include "codecs/zack_hack/zack_hack.h"

KVMANAGER_EXPORT_CODEC("zack+hack", kvmanager::RegisterZackHack)
