#include "transport/recompute/cublas.h"

#include <dlfcn.h>
#include <library_types.h>

#include <string>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

// cuBLAS's header is no part of a Toolkit without it: what is used of it, with its values.
constexpr int kSuccess = 0, kAllocFailed = 3, kNoTranspose = 0, kTranspose = 1, kCompute32F = 68,
              kDefaultAlgorithm = -1;

/// Where NVIDIA's packages put it if the loader does not know.
constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so.13",
                                  "/usr/local/cuda/lib64/libcublas.so.12"};

}  // namespace

struct CublasCalls {
  int (*create)(cublasContext** handle) = nullptr;
  int (*destroy)(cublasContext* handle) = nullptr;
  int (*set_stream)(cublasContext* handle, CUstream_st* stream) = nullptr;
  int (*gemm)(cublasContext* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
              const void* a, cudaDataType a_type, int lda, const void* b, cudaDataType b_type, int ldb,
              const void* beta, void* c, cudaDataType c_type, int ldc, int compute_type, int algorithm) = nullptr;
  std::string why_not;  // empty: all are there
};

namespace {

CublasCalls Load() {
  CublasCalls calls;
  void* library = nullptr;
  std::string why;
  for (const char* const name : kNames) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    if (why.empty()) why = dlerror();
  }
  if (library == nullptr) {
    calls.why_not = absl::StrCat("recomputing K and V on a GPU needs cuBLAS, libcublas.so.13 or .12 (NVIDIA's package ",
                                 "libcublas-13-0, or its folder on LD_LIBRARY_PATH): ", why);
    return calls;
  }
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) calls.why_not = absl::StrCat("cuBLAS has no ", name);
  };
  find("cublasCreate_v2", &calls.create);
  find("cublasDestroy_v2", &calls.destroy);
  find("cublasSetStream_v2", &calls.set_stream);
  find("cublasGemmEx", &calls.gemm);
  return calls;
}

absl::Status StatusOf(int error, absl::string_view call) {
  if (error == kSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat("cuBLAS: ", call, " failed with status ", error);
  return error == kAllocFailed ? absl::ResourceExhaustedError(message) : absl::UnavailableError(message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cublas>> Cublas::Make(CUstream_st* stream) {
  static const CublasCalls calls = Load();
  if (!calls.why_not.empty()) return absl::UnavailableError(calls.why_not);
  cublasContext* handle = nullptr;
  KV_RETURN_IF_ERROR(StatusOf(calls.create(&handle), "cublasCreate"));
  std::unique_ptr<Cublas> cublas(new Cublas(&calls, handle));
  KV_RETURN_IF_ERROR(StatusOf(calls.set_stream(handle, stream), "cublasSetStream"));
  return cublas;
}

Cublas::~Cublas() { calls_->destroy(handle_); }

absl::Status Cublas::Multiply(DType dtype, int rows, int columns, int depth, const void* x, const void* weights,
                              float* out) {
  // cuBLAS's matrices are column by column: out^T [columns x rows] = weights * x^T.
  const cudaDataType type = dtype == DType::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
  const float one = 1, zero = 0;
  return StatusOf(calls_->gemm(handle_, kTranspose, kNoTranspose, columns, rows, depth, &one, weights, type, depth, x,
                               type, depth, &zero, out, CUDA_R_32F, columns, kCompute32F, kDefaultAlgorithm),
                  "cublasGemmEx");
}

}  // namespace kvmanager::recompute
