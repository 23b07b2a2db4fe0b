// What a build without the CUDA Toolkit answers: the one header that knows whether there is one.
//
// A function that only CUDA sources define, and that other sources call, is declared with KV_NEEDS_CUDA. With a Toolkit
// that is the declaration and nothing else. Without one it also defines the function: it returns UNAVAILABLE with
// kBuiltWithoutCuda as a Status or StatusOr, the text as a string, and otherwise the type's default value, such as
// nullptr. Interfaces whose factory is declared so need nothing more: nobody has an object of theirs.
#pragma once

#include <string>
#include <type_traits>

#include "absl/status/status.h"

namespace kvmanager {

#ifdef KVMANAGER_WITHOUT_CUDA  // //kvmanager/base:needs_cuda defines it
inline constexpr bool kCudaBuilt = false;
#define KV_NEEDS_CUDA(...) \
  inline __VA_ARGS__ { return ::kvmanager::BuiltWithoutCuda(); }
#else
inline constexpr bool kCudaBuilt = true;
#define KV_NEEDS_CUDA(...) __VA_ARGS__
#endif

inline constexpr char kBuiltWithoutCuda[] = "built without CUDA: nvcc was not on PATH";

/// Converts to what a function returns that is not built.
struct BuiltWithoutCuda {
  template <typename Result>
  operator Result() const {  // NOLINT(google-explicit-constructor): `return BuiltWithoutCuda{};` is to convert
    if constexpr (std::is_constructible_v<Result, absl::Status>) {
      return absl::UnavailableError(kBuiltWithoutCuda);
    } else if constexpr (std::is_same_v<Result, std::string>) {
      return kBuiltWithoutCuda;
    } else {
      return Result();
    }
  }
};

}  // namespace kvmanager
