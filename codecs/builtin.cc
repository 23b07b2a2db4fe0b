#include "codecs/builtin.h"

#include "codecs/hack/hack.h"
#include "codecs/raw/raw.h"

namespace kvmanager {

void RegisterBuiltinCodecs(CodecRegistry& registry) {
  RegisterRaw(registry);
  RegisterHack(registry);
}

}  // namespace kvmanager
