// Which kernels OpenBLAS uses: kvmanager/base/blas_core.h, as programs of the engine name it.
#pragma once

#include "kvmanager/base/blas_core.h"

namespace kvmanager::engine {
using kvmanager::ChooseBlasCore;
}  // namespace kvmanager::engine
