#include "codecs/builtin.h"

#include "codecs/default/default_codec.h"
#include "codecs/hack/hack.h"
#include "codecs/ladder/ladder.h"
#include "codecs/million/million.h"
#include "codecs/policy/policy.h"
#include "codecs/pq/pq.h"
#include "codecs/raw/raw.h"
#include "codecs/zack/zack.h"
#include "codecs/zack_hack/zack_hack.h"
#include "codecs/zack_million/zack_million.h"

namespace kvmanager {

void RegisterBuiltinCodecs(CodecRegistry& registry) {
  RegisterRaw(registry);
  RegisterHack(registry);
  RegisterMillion(registry);
  RegisterPq(registry);
  RegisterZack(registry);
  RegisterZackHack(registry);
  RegisterZackMillion(registry);
  RegisterDefaultCodec(registry);
  RegisterPolicy(registry);
  RegisterLadder(registry);
}

}  // namespace kvmanager
