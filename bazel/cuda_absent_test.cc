// Stands for a test of the GPU where there is no CUDA Toolkit.
#include "gtest/gtest.h"

TEST(Gpu, NeedsTheCudaToolkit) { GTEST_SKIP() << "built without CUDA: nvcc was not on PATH"; }
