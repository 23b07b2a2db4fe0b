// Where there is no CUDA Toolkit.
#include "codecs/pq/pq_rows_cuda.h"

namespace kvmanager::pq {

const device::AttendKernels* SelectedRowsKernels(int) { return nullptr; }

}  // namespace kvmanager::pq
