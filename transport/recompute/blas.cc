#include "transport/recompute/blas.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace kvmanager::recompute {
namespace {

// cblas.h's values.
constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;

struct Loaded {
  Blas blas;
  std::string why_not;  // empty: it is there
};

Loaded Load() {
  Loaded loaded;
  void* const library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.why_not = absl::StrCat("recomputing K and V needs OpenBLAS (Debian's libopenblas0): ", dlerror());
    return loaded;
  }
  loaded.blas.sgemm = reinterpret_cast<decltype(loaded.blas.sgemm)>(dlsym(library, "cblas_sgemm"));
  const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
  if (loaded.blas.sgemm == nullptr || set_threads == nullptr) {
    loaded.why_not = "libopenblas.so.0 has no cblas_sgemm, or no openblas_set_num_threads";
    return loaded;
  }
  set_threads(1);
  return loaded;
}

}  // namespace

void Blas::Multiply(int rows, int columns, int depth, const float* x, const float* weights, float* out,
                    int out_stride) const {
  sgemm(kRowMajor, kNoTranspose, kTranspose, rows, columns, depth, 1, x, depth, weights, depth, 0, out, out_stride);
}

absl::StatusOr<const Blas*> LoadBlas() {
  static const Loaded loaded = Load();
  if (!loaded.why_not.empty()) return absl::UnavailableError(loaded.why_not);
  return &loaded.blas;
}

}  // namespace kvmanager::recompute
