// Entry points of CUDA's driver, found when a device is opened: programs do not link against libcuda, so that they
// start on machines without a driver. For implementations alone: it includes CUDA's headers.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

struct DeviceDriver {
  PFN_cuGetErrorName_v6000 error_name = nullptr;
  PFN_cuGetErrorString_v6000 error_string = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 allocation_granularity = nullptr;
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 export_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 import_handle = nullptr;
  PFN_cuStreamWaitValue64_v11070 stream_wait = nullptr;
  PFN_cuStreamWriteValue64_v11070 stream_write = nullptr;

  /// Errors: UNAVAILABLE naming the entry point that this driver lacks.
  absl::Status Load();
  /// As CudaStatus, of the driver's own errors.
  absl::Status ToStatus(CUresult result, absl::string_view call) const;
};

}  // namespace kvmanager
