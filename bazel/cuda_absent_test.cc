// Stands for a test of the GPU where there is no CUDA Toolkit.
#include "gtest/gtest.h"
#include "kvmanager/base/needs_cuda.h"

TEST(Gpu, NeedsTheCudaToolkit) { GTEST_SKIP() << kvmanager::kBuiltWithoutCuda; }
