#include "kvmanager/memory/device_region.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_driver.h"

namespace kvmanager {
namespace {

CUmemAllocationProp Properties(int ordinal) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = ordinal;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

class CudaRegion final : public DeviceRegion {
 public:
  CudaRegion(const Device* device, uint64_t slab_bytes, uint32_t slabs, CUdeviceptr address)
      : device_(device), slab_bytes_(slab_bytes), address_(address), handles_(slabs, 0) {}
  ~CudaRegion() override;

  uint8_t* data() const override { return reinterpret_cast<uint8_t*>(address_); }
  uint64_t slab_bytes() const override { return slab_bytes_; }
  uint32_t slabs() const override { return static_cast<uint32_t>(handles_.size()); }
  bool IsMapped(uint32_t slab) const override { return handles_[slab] != 0; }
  absl::Status Make(uint32_t slab) override;
  void Unmake(uint32_t slab) override;
  absl::Status Zero(uint32_t slab) override;
  absl::StatusOr<int> Export(uint32_t slab) override;
  absl::Status Import(uint32_t slab, int fd, bool writable) override;

 private:
  absl::Status MapHandle(uint32_t slab, CUmemGenericAllocationHandle handle, bool writable);  // takes the handle
  CUdeviceptr Address(uint32_t slab) const { return address_ + slab * slab_bytes_; }

  const Device* const device_;
  const uint64_t slab_bytes_;
  const CUdeviceptr address_;
  std::vector<CUmemGenericAllocationHandle> handles_;  // [slab]; 0: none
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceRegion>> DeviceRegion::Reserve(const Device* device, uint64_t slab_bytes,
                                                                    uint32_t slabs) {
  KV_RETURN_IF_ERROR(device->Use());
  const DeviceDriver& driver = device->driver();
  const CUmemAllocationProp properties = Properties(device->info().ordinal);
  size_t granularity = 0;
  KV_RETURN_IF_ERROR(
      driver.ToStatus(driver.allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                      "cuMemGetAllocationGranularity"));
  const uint64_t least = slabs == 1 ? granularity : kSlabBytesMin;
  if (slab_bytes < least || slab_bytes % granularity != 0) {
    return InvalidField("device slab bytes", slab_bytes,
                        absl::StrCat("at least ", least, ", a multiple of ", granularity));
  }
  if (slabs == 0 || slabs > kBytesMax / slab_bytes) {
    return InvalidField("device slabs", slabs,
                        absl::StrCat("1..", kBytesMax / slab_bytes, " of ", slab_bytes, " bytes"));
  }
  CUdeviceptr address = 0;
  KV_RETURN_IF_ERROR(
      driver.ToStatus(driver.address_reserve(&address, slab_bytes * slabs, granularity, 0, 0), "cuMemAddressReserve"));
  return std::make_unique<CudaRegion>(device, slab_bytes, slabs, address);
}

CudaRegion::~CudaRegion() {
  if (!device_->Use().ok()) return;
  for (uint32_t slab = 0; slab < slabs(); ++slab) {
    if (IsMapped(slab)) Unmake(slab);
  }
  device_->driver().address_free(address_, slab_bytes_ * slabs());
}

absl::Status CudaRegion::MapHandle(uint32_t slab, CUmemGenericAllocationHandle handle, bool writable) {
  const DeviceDriver& driver = device_->driver();
  if (const CUresult result = driver.map(Address(slab), slab_bytes_, 0, handle, 0); result != CUDA_SUCCESS) {
    driver.release(handle);
    if (result == CUDA_ERROR_INVALID_VALUE) {
      return InvalidField("device slab's memory", "smaller or of another kind", absl::StrCat(slab_bytes_, " bytes"));
    }
    return driver.ToStatus(result, "cuMemMap");
  }
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_->info().ordinal;
  access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  if (const CUresult result = driver.set_access(Address(slab), slab_bytes_, &access, 1); result != CUDA_SUCCESS) {
    driver.unmap(Address(slab), slab_bytes_);
    driver.release(handle);
    return driver.ToStatus(result, "cuMemSetAccess");
  }
  handles_[slab] = handle;
  return absl::OkStatus();
}

absl::Status CudaRegion::Make(uint32_t slab) {
  KV_CHECK(slab < slabs() && !IsMapped(slab));
  KV_RETURN_IF_ERROR(device_->Use());
  const DeviceDriver& driver = device_->driver();
  const CUmemAllocationProp properties = Properties(device_->info().ordinal);
  CUmemGenericAllocationHandle handle = 0;
  KV_RETURN_IF_ERROR(driver.ToStatus(driver.create(&handle, slab_bytes_, &properties, 0), "cuMemCreate"));
  KV_RETURN_IF_ERROR(MapHandle(slab, handle, /*writable=*/true));
  absl::Status zeroed = Zero(slab);
  if (!zeroed.ok()) Unmake(slab);
  return zeroed;
}

void CudaRegion::Unmake(uint32_t slab) {
  KV_CHECK(slab < slabs() && IsMapped(slab));
  // Errors: the context is gone, and the mapping with it.
  if (device_->Use().ok()) {
    device_->driver().unmap(Address(slab), slab_bytes_);
    device_->driver().release(handles_[slab]);
  }
  handles_[slab] = 0;
}

absl::Status CudaRegion::Zero(uint32_t slab) {
  KV_CHECK(slab < slabs() && IsMapped(slab));
  KV_RETURN_IF_ERROR(device_->Use());
  CUstream_st* const stream = device_->service_stream();
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(reinterpret_cast<void*>(Address(slab)), 0, slab_bytes_, stream), "cudaMemsetAsync"));
  return CudaStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

absl::StatusOr<int> CudaRegion::Export(uint32_t slab) {
  KV_CHECK(slab < slabs() && IsMapped(slab));
  KV_RETURN_IF_ERROR(device_->Use());
  int fd = -1;
  KV_RETURN_IF_ERROR(device_->driver().ToStatus(
      device_->driver().export_handle(&fd, handles_[slab], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle"));
  return fd;
}

absl::Status CudaRegion::Import(uint32_t slab, int fd, bool writable) {
  KV_CHECK(slab < slabs() && !IsMapped(slab));
  CUmemGenericAllocationHandle handle = 0;
  absl::Status imported = device_->Use();
  if (imported.ok()) {
    imported = device_->driver().ToStatus(
        device_->driver().import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  }
  close(fd);
  KV_RETURN_IF_ERROR(imported);
  return MapHandle(slab, handle, writable);
}

}  // namespace kvmanager
