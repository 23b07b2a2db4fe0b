// One target for libFuzzer: built with -DKV_FUZZ_TARGET=Make...Target (README.md).
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static kvmanager::fuzz::FuzzTarget* const target = kvmanager::fuzz::KV_FUZZ_TARGET().release();
  target->Run(absl::MakeConstSpan(data, size));
  return 0;
}
