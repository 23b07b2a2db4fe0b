#include "codecs/builtin.h"

#include "codecs/hack/hack.h"
#include "codecs/policy/policy.h"
#include "codecs/raw/raw.h"
#include "codecs/zack/zack.h"

namespace kvmanager {

void RegisterBuiltinCodecs(CodecRegistry& registry) {
  RegisterRaw(registry);
  RegisterHack(registry);
  RegisterZack(registry);
  RegisterPolicy(registry);
}

}  // namespace kvmanager
