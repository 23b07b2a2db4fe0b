#include "codecs/abi/export_codec.h"
#include "codecs/pq/pq.h"

KVMANAGER_EXPORT_CODEC("pq", kvmanager::RegisterPq)
